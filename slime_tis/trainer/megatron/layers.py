"""Layers in plain torch, as megatron-core spec modules, for machines without transformer-engine.

RMSNorm and SwiGLU save little for the backward pass. megatron-core's torch RMSNorm refuses sequence
parallelism, and torch's RMSNorm also saves the normalized input on a CPU. megatron-core's MLP saves
the input of SwiGLU, silu(gate), a copy of the other factor and the product: five times the inner
size. Here only the input is saved, twice the inner size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from slime_tis.trainer.invariant import operations
from slime_tis.trainer.megatron.packing import AttentionRows, PackedSequences

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class AttentionTraits:
    """How the attention of one layer differs from Llama's."""

    rotates: bool = True
    """Whether queries and keys get a rotary embedding."""
    rotary_kind: int = 0
    """Index of the layer's rotary angles."""
    turns_neighbors: bool = False
    """Whether the rotary embedding turns the features 2i and 2i + 1 instead of i and i + d/2."""
    window: int | None = None
    """Number of last tokens, itself included, that a token sees; None for all."""
    sinks: bool = False
    """Whether each head has a learned logit in the softmax, without a value."""


class TorchAttention(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """Rotary embedding and causal attention over packed sequences.

    megatron-core's local attention supports neither packed sequences nor context parallelism, and
    its rotary embedding splits and joins the packed tokens per sequence, layer and tensor. Here
    angles are computed once per micro-batch.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        invariant: bool = False,
        traits: Sequence[AttentionTraits] = (),
        **_: Any,
    ) -> None:
        """Builds the attention of the layer `layer_number`, which counts from 1.

        Args:
            config: megatron-core's configuration.
            layer_number: Number of the layer in the whole model.
            softmax_scale: Factor on products of queries and keys; None for d^(-1/2).
            pg_collection: megatron-core's process groups.
            invariant: Whether a token's output has the same bits in every batch.
            traits: For each layer of the model; empty for Llama's attention.
        """
        super().__init__(config=config)
        self.traits = traits[layer_number - 1] if traits else AttentionTraits()
        self.softmax_scale = softmax_scale
        self.sinks: nn.Parameter | None = None
        if self.traits.sinks:
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.sinks = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            # megatron-core's gradient norm then counts the sinks of every rank
            self.sinks.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.invariant = invariant
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
        if self.traits.rotates:
            query = self._rotated(query, layout)
            key = self._rotated(key, layout)
        if self.context_group.size() > 1:
            local = torch.cat([key, value], -1)
            # gathers along the first dimension, the tokens
            gathered = gather_from_sequence_parallel_region(local, group=self.context_group)
            key, value = gathered.split([key.shape[-1], value.shape[-1]], -1)
        # A view would keep the queries and keys before rotation for the backward pass.
        value = value.contiguous()
        outputs = []
        for rows in layout.rows:
            attend = self._attend_rows
            if rows.shares_keys:
                # Every response gets a copy of its prompt's keys and values. Keeping the copies for
                # the backward pass would need much memory, so it makes them again.
                attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
            outputs.append(attend(query, key, value, rows))
        return layout.packed(outputs).flatten(1)

    def _attend_rows(
        self, query: Tensor, key: Tensor, value: Tensor, rows: AttentionRows
    ) -> Tensor:
        """Returns the attention [rows, heads, Lq, d] of a padded batch of packed tokens."""
        return self._attend(
            rows.gather(query, rows.query_index),
            rows.gather(key, rows.key_index),
            rows.gather(value, rows.key_index),
            rows.mask,
        )

    def _rotated(self, x: Tensor, layout: PackedSequences) -> Tensor:
        """Applies the rotary embedding to queries or keys [tokens, heads, d]."""
        assert layout.cos is not None and layout.sin is not None  # `pack` with rotary angles
        if self.invariant:
            return operations.rotate(x, layout.cos, layout.sin)
        kind = self.traits.rotary_kind
        cos = layout.cos[:, kind : kind + 1]
        sin = layout.sin[:, kind : kind + 1]
        if self.traits.turns_neighbors:
            x = neighbors_apart(x, 2 * cos.shape[-1])
        return rotate(x, cos, sin)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Returns [rows, heads, Lq, d] of a padded batch; the mask is [rows, 1, Lq, Lk] or None."""
        if self.traits.window is not None and self.traits.window < key.shape[-2]:
            mask = windowed(mask, self.traits.window, key)
        if self.invariant:
            scale = self.softmax_scale
            if scale is None:
                scale = query.shape[-1] ** -0.5
            seen = None if mask is None else mask[:, 0]
            return operations.attention(query, key, value, seen, scale)
        queries_per_group = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(queries_per_group, 1)
        value = value.repeat_interleave(queries_per_group, 1)
        if self.sinks is not None:
            return attention_with_sinks(query, key, value, mask, self.sinks, self.softmax_scale)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Returns the sinks as one of the parts that tensor-parallel ranks save and load."""
        if self.sinks is None:
            return {}
        parts: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"sinks": self.sinks}, prefix, {"sinks": 0}, sharded_offsets
        )
        return parts


def attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor,
    scale: float | None,
) -> Tensor:
    """Returns softmax([s, scale · q·k]) · [0, v], with a sink s for each head.

    The sink is a first key with one more feature: the query's is 1 and the key's is s / scale. Then
    torch's fast attention computes the formula and its gradient.

    Source: "gpt-oss-120b & gpt-oss-20b Model Card" (https://arxiv.org/abs/2508.10925), section 2.3.

    Args:
        query: [rows, heads, Lq, d].
        key: [rows, heads, Lk, d].
        value: [rows, heads, Lk, d].
        mask: [rows, 1, Lq, Lk], or None for causal attention.
        sinks: [heads] logits.
        scale: Factor on products of queries and keys; None for d^(-1/2).
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if mask is None:
        index = torch.arange(key.shape[-2], device=key.device)
        mask = (index <= index[:, None])[None, None]
    sink_feature = (sinks / scale)[:, None, None]
    sink = F.pad(sink_feature, (key.shape[-1], 0)).expand(len(key), -1, -1, -1)
    return F.scaled_dot_product_attention(
        F.pad(query, (0, 1), value=1.0),
        torch.cat([sink, F.pad(key, (0, 1))], -2),
        F.pad(value, (0, 0, 1, 0)),
        attn_mask=F.pad(mask, (1, 0), value=True),
        scale=scale,
    )


def windowed(mask: Tensor | None, window: int, key: Tensor) -> Tensor:
    """Returns a mask without the keys before the last `window` ones that it shows to a query.

    Args:
        mask: [rows, 1, Lq, Lk]; its keys are in the order of positions, and the last one that a
            query sees is its own. None for causal attention, Lq = Lk.
        window: Number of keys.
        key: [rows, heads, Lk, d], for the length and the device.
    """
    length = key.shape[-2]
    index = torch.arange(length, device=key.device)
    if mask is None:
        mask = (index <= index[:, None])[None, None]
    last = mask.sum(-1, keepdim=True)
    return mask & (index >= last - window)


def neighbors_apart(x: Tensor, width: int) -> Tensor:
    """Moves the features 2i of the first `width` ones to i, and 2i + 1 to i + width/2.

    `rotate` then turns pairs of neighbors. Queries and keys are reordered alike, so that their
    products stay the same.
    """
    turned, rest = x.split([width, x.shape[-1] - width], -1)
    apart = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat([apart, rest], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: rotates each pair (x_i, x_{i+d/2}) of the first d features by its angle.

        y_i = x_i cos − x_{i+d/2} sin,   y_{i+d/2} = x_{i+d/2} cos + x_i sin

    Source: "RoFormer: Enhanced Transformer with Rotary Position Embedding", Su et al.
    (https://arxiv.org/abs/2104.09864), eq. 34, with the pairs of Hugging Face's layout.

    x is [tokens, heads, d or more], cos and sin are [tokens, 1, d/2].
    """
    width = 2 * cos.shape[-1]
    rotated, rest = x.split([width, x.shape[-1] - width], -1)
    output: Tensor = _Rotate.apply(rotated, cos.to(x.dtype), sin.to(x.dtype))  # type: ignore[no-untyped-call]
    if rest.shape[-1] == 0:
        return output
    return torch.cat([output, rest], -1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None  # the inverse rotation


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The formula of `rotate`, in one new tensor."""
    half = x.shape[-1] // 2
    rotated: Tensor = x.unflatten(-1, (2, half)) * cos.unsqueeze(-2)
    rotated[..., 0, :].addcmul_(x[..., half:], sin, value=-1)
    rotated[..., 1, :].addcmul_(x[..., :half], sin)
    return rotated.flatten(-2)


class TorchRMSNorm(torch.nn.Module):
    """x / sqrt(mean(x²) + ε) · (weight + offset)."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        invariant: bool = False,
        offset: float = 0.0,
        **_: Any,
    ) -> None:
        """`invariant`: whether it rounds as transformers does, see `operations.rms_norm`."""
        super().__init__()
        self.offset = offset
        self.invariant = invariant
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # megatron-core sums the gradient of weights with this mark over the tensor-parallel ranks
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension of x [..., hidden_size]."""
        if self.invariant:
            return operations.rms_norm(x, self.weight, self.eps)
        if self.offset:
            # in float32, as transformers does
            weight = self.weight.float() + self.offset
            shifted: Tensor = _RMSNorm.apply(x, weight, self.eps)  # type: ignore[no-untyped-call]  # torch's
            return shifted
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
        grad_weight = grad * wide
        grad_weight.mul_(scale)
        grad_x = grad * weight.to(scale.dtype)
        mean = (grad_x * wide).mean(-1, keepdim=True)
        grad_x.addcmul_(wide, mean.mul_(scale).mul_(scale), value=-1).mul_(scale)
        grad_weight = grad_weight.flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class TorchMLP(MLP):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's MLP without biases.

    The backward pass computes the input of the second linear layer again.
    """

    def __init__(
        self,
        *args: Any,
        vectorized_silu: bool | None = None,
        activation: str = "silu",
        **kwargs: Any,
    ) -> None:
        """Builds the MLP.

        Args:
            args: megatron-core's arguments.
            vectorized_silu: See `operations.silu`; None for torch's silu in any batch.
            activation: A key of `ACTIVATIONS`.
            kwargs: megatron-core's arguments.
        """
        super().__init__(*args, **kwargs)
        self.activation = ACTIVATIONS[activation]
        if vectorized_silu is not None:
            self.activation = partial(operations.swiglu, vectorized=vectorized_silu)

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """[..., hidden size] → [..., hidden size], and None instead of a bias."""
        assert per_token_scale is None  # experts use megatron-core's MLP
        x, _bias = self.linear_fc1(hidden_states)
        output, _bias = with_recomputed_input(self.linear_fc2, self.activation, x)
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


def geglu(x: Tensor) -> Tensor:
    """gelu(gate) · up [..., inner] of x = gate and up [..., 2·inner], gelu approximated by tanh.

    Source: "GLU Variants Improve Transformer", Shazeer (https://arxiv.org/abs/2002.05202), eq. 6.
    """
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": swiglu, "gelu_pytorch_tanh": geglu}
"""Activations of MLPs with a gate, by transformers' name."""


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
        return operations.swiglu_gradient(grad, x)


def with_recomputed_input(
    layer: Callable[[Tensor], R], function: Callable[[Tensor], Tensor], x: Tensor
) -> R:
    """Returns layer(function(x)); the layer saves x instead of its input.

    `function` must be deterministic.
    """
    inputs = function(x)
    # Autograd keeps `pack`. If that referred to `inputs`, they would stay in memory.
    size = inputs.numel()
    address = inputs.data_ptr()
    saved = x.detach()

    def pack(tensor: Tensor) -> Tensor | _Recomputed:
        is_input = tensor.data_ptr() == address and tensor.numel() == size
        # torch's product with a LoRA adapter saves a view with fewer dimensions
        if is_input and tensor.is_contiguous():
            return _Recomputed(saved, tensor.shape)
        return tensor

    def unpack(packed: Tensor | _Recomputed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return function(packed.x).view(packed.shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return layer(inputs)


@dataclass(frozen=True)
class _Recomputed:
    x: Tensor
    shape: torch.Size
    """Of the tensor to compute again, which may be a view."""


class MoeRouter(TopKRouter):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's top-k router, without transformer-engine."""

    expert_bias: Tensor | None

    def gating(self, input: Tensor) -> Tensor:
        """Computes logits [..., experts] in float32.

        megatron-core's method needs transformer-engine.
        """
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MoeRouter":
        """Moves the router; its bias stays float32 when the parameters become bfloat16."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(self.weight.device)
        return self

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Does nothing: megatron-core would count tokens per expert to update the bias."""


def release_probabilities(module: nn.Module) -> None:
    """Makes megatron-core's dispatchers release the probabilities after their layer has run.

    The autograd graph of the probabilities refers to the parameters, whose data-parallel hooks
    refer to the model. Python's garbage collector does not see this cycle through C++, and would
    never free the model.
    """

    def release(layer: Any, args: Any, output: Any) -> None:
        layer.token_dispatcher.local_probs = None
        layer.token_dispatcher.probs = None

    for child in module.modules():
        if isinstance(child, MoELayer):
            child.register_forward_hook(release)


def separate_expert_gradients(module: nn.Module) -> None:
    """Makes megatron-core sum gradients of routed experts over the ranks with the same shard.

    megatron-core 0.16.1 does so only for weights with the mark `allreduce = False`, and it sets
    that mark only if the expert-parallel size is above 1
    (`megatron/core/tensor_parallel/layers.py`). Without the mark, gradients are summed over the
    data- and context-parallel ranks. If the expert-tensor size differs from the tensor size, these
    are other ranks: experts then miss tokens, or gradients of different shards are added.
    """
    for child in module.modules():
        if isinstance(child, MoELayer):
            for parameter in child.experts.parameters():
                parameter.allreduce = False
