"""Attention in plain torch, as a megatron-core spec module.

It is used without transformer-engine. megatron-core's local attention supports neither packed sequences nor context
parallelism.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_tis.trainer.megatron.packing import PackedSequences
from slime_tis.trainer.megatron.shared_attention import shared_attention


class TorchAttention(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """Rotary embedding and causal attention over packed sequences, by `scaled_dot_product_attention`.

    `shared_attention` replaces it if sequences share their prompts. Under context parallelism keys and values are
    gathered over the ranks. The rotary embedding is applied here, with angles computed once per micro-batch, because
    megatron-core's rotary embedding splits and joins the packed tokens per sequence, layer and tensor.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
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
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """query [tokens, heads, d], key and value [tokens, groups, d] → [tokens, heads·d]."""
        layout = packed_seq_params
        assert layout is not None and layout.cos is not None and layout.sin is not None  # `pack` with rotary angles
        query, key = rotate(query, layout.cos, layout.sin), rotate(key, layout.cos, layout.sin)
        if layout.parts:
            value = value.contiguous()  # a view would keep the unrotated queries and keys alive
            return shared_attention(query, key, value, layout.parts, self.softmax_scale).flatten(1)
        if self.context_group.size() > 1:
            key, value = all_gather_tokens(torch.stack([key, value], 1), self.context_group).unbind(1)
        repeats = query.shape[1] // key.shape[1]
        output = F.scaled_dot_product_attention(
            layout.query_rows(query),
            layout.key_rows(key).repeat_interleave(repeats, 1),
            layout.key_rows(value).repeat_interleave(repeats, 1),
            attn_mask=layout.attention_mask,
            is_causal=layout.attention_mask is None,
            scale=self.softmax_scale,
        )
        return layout.tokens(output).flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: rotates each pair (x_i, x_{i+d/2}) of the first d features by its angle.

        y_i = x_i cos − x_{i+d/2} sin,   y_{i+d/2} = x_{i+d/2} cos + x_i sin

    Source: "RoFormer: Enhanced Transformer with Rotary Position Embedding", Su et al.
    (https://arxiv.org/abs/2104.09864), eq. 34, with the pairs of Hugging Face's layout.

    Args:
        x: [tokens, heads, d or more]; features after the first d are unchanged.
        cos: [tokens, 1, d/2] of each token's angles.
        sin: [tokens, 1, d/2].

    Returns:
        A tensor like x, differentiable in x; the gradient is the inverse rotation.
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


def all_gather_tokens(x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Concatenates [tokens, …] of all ranks: [ranks·tokens, …]. The gradient is summed over the ranks."""
    gathered: Tensor = _AllGatherTokens.apply(x, group)  # type: ignore[no-untyped-call]  # torch's
    return gathered


class _AllGatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = [torch.empty_like(x) for _ in range(group.size())]
        torch.distributed.all_gather(gathered, x.contiguous(), group=group)
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None
