"""Layers in plain torch, as megatron-core spec modules, for machines without transformer-engine.

RMSNorm and SwiGLU save little for the backward pass. megatron-core's torch RMSNorm refuses sequence
parallelism, and torch's also saves the normalized input on a CPU. megatron-core's MLP saves the
input of SwiGLU, silu(gate), a copy of the other factor and the product: five times the inner size.
Here only the input is saved, twice the inner size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from slime_tis.trainer.megatron.packing import PackedSequences

R = TypeVar("R")


class TorchAttention(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """Rotary embedding and causal attention over packed sequences, by `scaled_dot_product_attention`.

    megatron-core's local attention supports neither packed sequences nor context parallelism, and
    its rotary embedding splits and joins the packed tokens per sequence, layer and tensor. Here
    angles are computed once per micro-batch.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.context_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSequences,
        **__: Any,
    ) -> Tensor:
        """query [tokens, heads, d], key and value [tokens, groups, d] → [tokens, heads·d]."""
        layout = packed_seq_params
        assert layout.cos is not None and layout.sin is not None  # `pack` with rotary angles
        query, key = rotate(query, layout.cos, layout.sin), rotate(key, layout.cos, layout.sin)
        if self.context_group.size() > 1:
            keys_and_values = torch.stack([key, value], 1)
            key, value = gather_from_sequence_parallel_region(
                keys_and_values, group=self.context_group
            ).unbind(1)
        repeats = query.shape[1] // key.shape[1]
        outputs = [
            F.scaled_dot_product_attention(
                rows.gather(query, rows.query_index),
                rows.gather(key, rows.key_index).repeat_interleave(repeats, 1),
                rows.gather(value, rows.key_index).repeat_interleave(repeats, 1),
                attn_mask=rows.mask,
                is_causal=rows.mask is None,
                scale=self.softmax_scale,
            )
            for rows in layout.rows
        ]
        return layout.packed(outputs).flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: rotates each pair (x_i, x_{i+d/2}) of the first d features by its angle.

        y_i = x_i cos − x_{i+d/2} sin,   y_{i+d/2} = x_{i+d/2} cos + x_i sin

    Source: "RoFormer: Enhanced Transformer with Rotary Position Embedding", Su et al.
    (https://arxiv.org/abs/2104.09864), eq. 34, with the pairs of Hugging Face's layout.

    x is [tokens, heads, d or more], cos and sin are [tokens, 1, d/2].
    """
    rotated, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    rotated = _Rotate.apply(rotated, cos.to(x.dtype), sin.to(x.dtype))  # type: ignore[no-untyped-call]  # torch's
    return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rotated: Tensor = x.unflatten(-1, (2, half)) * cos.unsqueeze(-2)
    rotated[..., 0, :].addcmul_(x[..., half:], sin, value=-1)
    rotated[..., 1, :].addcmul_(x[..., :half], sin)
    return rotated.flatten(-2)


class TorchRMSNorm(torch.nn.Module):
    """x / sqrt(mean(x²) + ε) · weight; megatron-core reduces its gradient under sequence parallelism."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
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

    With r = 1 / sqrt(mean(x²) + ε) and g the gradient times the weight, ∂x = r·(g −
    x·r²·mean(g·x)).
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

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """[..., hidden size] → the same, and no bias."""
        assert per_token_scale is None  # experts use megatron-core's MLP
        x, _bias = self.linear_fc1(hidden_states)
        output, _bias = with_recomputed_input(self.linear_fc2, swiglu, x)
        return output, None


class TorchSwiGLU(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """`swiglu` for the MLPs of experts."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2·inner] → [..., inner]."""
        return swiglu(x)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up [..., inner] of x = gate and up [..., 2·inner]; only x is saved.

    Source: "GLU Variants Improve Transformer", Shazeer (https://arxiv.org/abs/2002.05202), eq. 6.
    """
    output: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]  # torch's
    return output


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        of_x = torch.empty_like(x)
        of_gate, of_up = of_x.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(
            torch.mul(grad, up, out=of_gate), gate, grad_input=of_gate
        )
        return of_x


def with_recomputed_input(
    layer: Callable[[Tensor], R], function: Callable[[Tensor], Tensor], x: Tensor
) -> R:
    """layer(function(x)), where the layer saves x instead of its input; `function` must be deterministic."""
    inputs = function(x)
    shape, address = (
        inputs.shape,
        inputs.data_ptr(),
    )  # autograd keeps `pack`, which must not refer to the tensor
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


class MoeRouter(TopKRouter):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's top-k router, without transformer-engine."""

    expert_bias: Tensor | None

    def gating(self, input: Tensor) -> Tensor:
        """Logits [..., experts] float32; megatron-core's method reads a name of transformer-engine."""
        return F.linear(input.float(), self.weight.float())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MoeRouter":
        """Moves the router; its bias stays float32 when the parameters become bfloat16."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(self.weight.device)
        return self

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Does nothing: megatron-core would count tokens per expert, to change the bias."""


def release_probabilities(module: nn.Module) -> None:
    """Makes megatron-core's dispatchers release the probabilities of a micro-batch after their layer has run.

    The graph of the probabilities refers to the parameters, whose data-parallel hooks refer to the
    model: a cycle through C++ that Python's garbage collector does not see, so that the model would
    never be freed.
    """

    def release(layer: Any, args: Any, output: Any) -> None:
        layer.token_dispatcher.local_probs = layer.token_dispatcher.probs = None

    for child in module.modules():
        if isinstance(child, MoELayer):
            child.register_forward_hook(release)


def separate_expert_gradients(module: nn.Module) -> None:
    """Makes megatron-core sum the gradients of routed experts over the ranks that hold the same shard of an expert.

    megatron-core 0.16.1 does so only for weights with the mark `allreduce = False`, and it sets
    that mark only if the expert-parallel size is above 1
    (`megatron/core/tensor_parallel/layers.py`). Without the mark, gradients are summed over the
    data- and context-parallel ranks. These are other ranks if the expert-tensor size differs from
    the tensor size: experts then miss tokens, or the gradients of different shards are added.
    """
    for child in module.modules():
        if isinstance(child, MoELayer):
            for parameter in child.experts.parameters():
                parameter.allreduce = False
