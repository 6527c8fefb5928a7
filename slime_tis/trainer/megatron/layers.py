"""RMSNorm and SwiGLU in plain torch, as megatron-core spec modules that save little for the backward pass.

They are used without transformer-engine. megatron-core's torch RMSNorm refuses sequence parallelism, and torch's also
saves the normalized input on a CPU. megatron-core's MLP saves the input of SwiGLU, silu(gate), a copy of the other
factor and the product: five times the inner size. Here only the input is saved, twice the inner size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

R = TypeVar("R")


class TorchRMSNorm(torch.nn.Module):
    """x / sqrt(mean(x²) + ε) · weight; megatron-core reduces its gradient under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron-core's mark
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension of x [..., hidden_size]."""
        if x.is_cuda:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        output: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]  # torch's
        return output


class _RMSNorm(torch.autograd.Function):
    """Bitwise equal to `torch.nn.functional.rms_norm`.

    With r = 1 / sqrt(mean(x²) + ε) and g the gradient times the weight, ∂x = r·(g − x·r²·mean(g·x)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return wide.mul(scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide = x.to(scale.dtype)
        of_weight = grad * wide
        of_weight.mul_(scale)
        product = grad * weight.to(scale.dtype)
        mean = (product * wide).mean(-1, keepdim=True)
        product.addcmul_(wide, mean.mul_(scale).mul_(scale), value=-1).mul_(scale)
        grad_weight = of_weight.flatten(0, -2).sum(0)
        return product.to(x.dtype), grad_weight.to(weight.dtype), None


class TorchMLP(MLP):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's MLP without biases, which recomputes the second layer's input in the backward pass."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """[..., hidden size] → the same, and no bias."""
        if per_token_scale is not None:
            raise NotImplementedError("experts use megatron-core's MLP")
        x, _bias = self.linear_fc1(hidden_states)
        output, _bias = with_recomputed_input(self.linear_fc2, swiglu, x)
        return output, None


class TorchSwiGLU(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """`swiglu` for the MLPs of experts."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2·inner] → [..., inner]."""
        return swiglu(x)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up; only x is saved.

    Source: "GLU Variants Improve Transformer", Shazeer (https://arxiv.org/abs/2002.05202), eq. 6.

    Args:
        x: gate and up, concatenated: [..., 2·inner].

    Returns:
        [..., inner]
    """
    output: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]  # torch's
    return output


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _product(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        of_x = torch.empty_like(x)
        of_gate, of_up = of_x.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(torch.mul(grad, up, out=of_gate), gate, grad_input=of_gate)
        return of_x


def _product(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def with_recomputed_input(layer: Callable[[Tensor], R], function: Callable[[Tensor], Tensor], x: Tensor) -> R:
    """layer(function(x)), where the layer saves x instead of its input.

    Args:
        layer: its autograd function saves its input unchanged.
        function: cheap and deterministic; it saves x.
        x: saved once for both.
    """
    inputs = function(x)
    shape, address = inputs.shape, inputs.data_ptr()  # autograd keeps `pack`, which must not refer to the tensor
    saved = x.detach()

    def pack(tensor: Tensor) -> Tensor | _Recomputed:
        is_input = tensor.shape == shape and tensor.data_ptr() == address
        return _Recomputed(saved) if is_input else tensor

    def unpack(packed: Tensor | _Recomputed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return function(packed.x)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return layer(inputs)


@dataclass(frozen=True)
class _Recomputed:
    x: Tensor
