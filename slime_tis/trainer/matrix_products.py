"""Float32 matrix products by the library that is fast on this processor.

torch multiplies float32 matrices on a CPU with MKL. On processors that are not Intel's, MKL uses
AVX2 even if there is AVX-512. oneDNN, which torch has too and uses for bfloat16, then is up to
twice as fast: 160 to 220 against 80 to 110 GFLOP/s on one core of an AMD EPYC of family 26 (Zen 5),
and 110 to 160 for the gradients of weights.

Both sum in float32, in different orders. Results differ by rounding errors, and the choice depends
on the processor only. The products of `--true-on-policy` are in `invariant.operations`.

Shapes: M and N rows and columns of the result, K the length of the sums.
"""

import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, all_reduce

CPU_INFO = Path("/proc/cpuinfo")
INTEL = "GenuineIntel"
MIN_MULTIPLICATIONS = 2**23
"""Size M·N·K of a product that is worth the code that oneDNN compiles for each shape. Compiling
takes 0.2 ms, and a product of this size saves 0.08 ms. The layers of a model share the code."""
MIN_WEIGHTS = 2**18
"""Entries of a weight that is worth it with few rows, too: decoding repeats such a product."""
CACHE_SIZES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables that limit how many shapes' code is kept: the first by oneDNN, the second
by each thread in torch's wrapper of oneDNN. They are read at the first product."""
CACHED_SHAPES = 24
"""Shapes that are kept, unless the user has set the variables. The code for 480 shapes takes 320 MB
with the default of 1024, 130 MB with 128, 40 MB with 32 and 25 MB with 16, in the same time: a
decode step or a micro-batch has at most 20 shapes and repeats them."""


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL: AVX-512, but not Intel's."""
    if not torch.backends.mkl.is_available() or not torch.backends.mkldnn.is_available():
        return False
    # The operation is private, and another version of torch may lack it.
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return INTEL not in CPU_INFO.read_text()
    except OSError:
        return False


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Returns left [..., M, K] times right [K, N], without gradient."""
    if _is_large(left, right) and _onednn_is_faster(left, right):
        return _onednn_linear(left, right.t(), None)
    return left @ right


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x Wᵀ + b [..., N] for x [..., K], weight [N, K] and bias [N], without gradient."""
    is_large = weight.numel() >= MIN_WEIGHTS or _is_large(x, weight)
    if is_large and _onednn_is_faster(x, weight):
        return _onednn_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def trained_linear(x: Tensor, weight: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Returns x Wᵀ [..., N] for x [..., K] and weight [N, K], with gradient.

    `group` has the tensor-parallel ranks over which the gradient of x is summed; None for none.
    """
    output: Tensor = _Linear.apply(x, weight, group)  # type: ignore[no-untyped-call]  # torch's
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
        # A frozen weight has no gradient, which needs x.
        saved_x = x if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(saved_x, weight)
        ctx.group = group
        return linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = None
        grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = multiply(grad, weight)
            if ctx.group is not None:
                all_reduce(grad_x, group=ctx.group)
        if ctx.needs_input_grad[1]:
            grad_weight = multiply(grad.flatten(0, -2).t(), x.flatten(0, -2))
        return grad_x, grad_weight, None


class FastLinear(nn.Linear):
    """A linear layer that shares the parameters of an nn.Linear and multiplies as above."""

    def __init__(self, layer: nn.Linear) -> None:
        # nn.Linear would allocate other parameters.
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = layer.weight
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] → [..., out_features]."""
        # torch multiplies a non-contiguous batch, such as the last hidden state of every sequence,
        # as one product per sequence, each with a copy of the weight.
        rows = input.reshape(-1, self.in_features)
        if not torch.is_grad_enabled():
            output = linear(rows, self.weight, self.bias)
        else:
            output = trained_linear(rows, self.weight)
            if self.bias is not None:
                output = output + self.bias
        return output.view(*input.shape[:-1], self.out_features)


def use_fast_linear_layers(model: nn.Module) -> None:
    """Replaces the linear layers of a model of transformers."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            parent_name, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent_name), child, FastLinear(module))


def _is_large(left: Tensor, right: Tensor) -> bool:
    """Whether left [..., M, K] times `right`, [K, N] or its transpose, is worth compiling."""
    rows = math.prod(left.shape[:-1])
    return rows * right.numel() >= MIN_MULTIPLICATIONS


def _onednn_is_faster(left: Tensor, right: Tensor) -> bool:
    is_float32 = left.dtype == right.dtype == torch.float32
    return is_float32 and left.device.type == "cpu" and prefers_onednn()


@cache
def _limit_caches() -> None:
    """Sets `CACHE_SIZES` before the first product; later changes have no effect."""
    for variable in CACHE_SIZES:
        os.environ.setdefault(variable, str(CACHED_SHAPES))


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x Wᵀ + b by the operation that torch.compile calls for linear layers on a CPU."""
    _limit_caches()
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return output
