"""Causal attention over a prefix tree: each token sees the segments before its own, and its own up to itself.

In depth-first order token q sees token k exactly if k ≤ q < end(k), where end(k) is the first packed token after all
that follow on k's segment. On a CPU the attention of a token is put together from parts: its own segment, causal, and
each segment before it, whole. Parts P with outputs o_P and L_P = log Σ_{k∈P} e^{s_k} over their scores s merge exactly:

    L = log Σ_P e^{L_P},    o = Σ_P e^{L_P − L} o_P

and the gradient of a part needs o and L in place of its own: the weight of key k is e^{s_k − L} whatever part it is in.
No mask of queries × keys is made, and keys that several responses share are taken once.

Source of the merge: "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", Dao et al.
(https://arxiv.org/abs/2205.14135), section 3.1; of attention to a shared prefix in a part of its own: "Hydragen:
High-Throughput LLM Inference with Shared Prefixes", Juravsky et al. (https://arxiv.org/abs/2402.05099), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from slime_tis.trainer.megatron.prefix_tree import PrefixTree

cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Ranges of packed tokens as rows of a padded batch."""

    count: int
    token_index: Tensor
    """[rows·length] packed token at every place; that of the row's last token where it is padding."""
    is_padding: Tensor
    """bool [rows, length]."""
    valid_place: Tensor
    """[tokens] places that are not padding."""
    valid_token: Tensor
    """[tokens] packed tokens at these places."""

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int]) -> Rows:
        """Rows of the packed tokens from each start on."""
        start_R, length_R = torch.tensor(starts), torch.tensor(lengths)
        place = torch.arange(int(length_R.max()))
        token_index = (start_R[:, None] + torch.minimum(place, length_R[:, None] - 1)).flatten()
        is_padding = place >= length_R[:, None]
        valid_place = (~is_padding).flatten().nonzero().squeeze(1)
        return cls(
            count=len(starts),
            token_index=token_index,
            is_padding=is_padding,
            valid_place=valid_place,
            valid_token=token_index[valid_place],
        )

    def gather(self, x: Tensor) -> Tensor:
        """Packed [tokens, heads, …] → [rows, heads, length, …]."""
        rows: Tensor = x.index_select(0, self.token_index).unflatten(0, (self.count, -1))
        return rows.transpose(1, 2)

    def packed(self, rows: Tensor) -> Tensor:
        """[rows, heads, length, …] → [tokens, heads, …] of `valid_token`."""
        return rows.transpose(1, 2).flatten(0, 1).index_select(0, self.valid_place)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Queries in rows, and the keys that each row of them sees."""

    queries: Rows
    keys: Rows
    is_causal: bool
    """Whether they are the same tokens, which see those up to themselves; else each query sees all keys of its row."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Output [tokens, heads, d] and log Σ e^score [tokens, heads] of the queries' valid tokens."""
        output, log_sum = cpu_attention(
            *self._inputs(query, key, value),
            is_causal=self.is_causal,
            attn_mask=self._mask(query.dtype),
            scale=scale,
        )
        return self.queries.packed(output), self.queries.packed(log_sum)

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor, log_sum: Tensor, scale: float | None
    ) -> list[Tensor]:
        """The part's gradients of query, key and value, of their valid tokens; output and log Σ are those of all."""
        # An infinite sum makes every weight of a row that is padding 0.
        padded_log_sum = self.queries.gather(log_sum).masked_fill(self.queries.is_padding[:, None], torch.inf)
        grads = cpu_attention_backward(
            self.queries.gather(grad),
            *self._inputs(*inputs),
            self.queries.gather(output),
            padded_log_sum,
            0.0,
            self.is_causal,
            attn_mask=self._mask(grad.dtype),
            scale=scale,
        )
        groups = inputs[1].shape[1]
        of_keys = [grad.unflatten(1, (groups, -1)).sum(2) for grad in grads[1:]]
        return [self.queries.packed(grads[0]), *(self.keys.packed(grad) for grad in of_keys)]

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        repeats = query.shape[1] // key.shape[1]
        keys = [self.keys.gather(x).repeat_interleave(repeats, 1) for x in (key, value)]
        return [self.queries.gather(query), *keys]

    def _mask(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores [rows, 1, 1, keys]; None where no key is padding that a query would see."""
        if self.is_causal or len(self.keys.valid_place) == len(self.keys.token_index):
            return None
        hidden = self.keys.is_padding[:, None, None]
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True, kw_only=True)
class SharedAttention:
    """What attention over a prefix tree needs beside queries, keys and values."""

    end_T: Tensor
    """The first packed token that does not see this one any more."""
    parts: tuple[Part, ...]
    """On a CPU: first each token's own segment, every token once, then segments before it."""
    block_mask: BlockMask | None = None
    """On a GPU: which keys each query sees, by blocks."""

    @classmethod
    def of(cls, tree: PrefixTree, filler: int) -> SharedAttention:
        """That of the packed tokens of a tree, and of so many more that see only themselves."""
        lengths = [*(segment.length for segment in tree.segments), *[filler] * (filler > 0)]
        ends = [*tree.ends, *[len(lengths)] * (filler > 0)]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        parts = [
            Part(queries=rows, keys=rows, is_causal=True)
            for chosen in _of_like_length(lengths)
            for rows in [Rows.of([starts[i] for i in chosen], [lengths[i] for i in chosen])]
        ]
        for depth in range(max(segment.depth for segment in tree.segments)):
            inner = [i for i, s in enumerate(tree.segments) if s.depth == depth and ends[i] > i + 1]
            after = [starts[ends[i]] - starts[i + 1] for i in inner]
            for chosen in _of_like_length(after):
                queries = Rows.of([starts[inner[i] + 1] for i in chosen], [after[i] for i in chosen])
                keys = Rows.of([starts[inner[i]] for i in chosen], [lengths[inner[i]] for i in chosen])
                parts.append(Part(queries=queries, keys=keys, is_causal=False))
        end_T = torch.repeat_interleave(torch.tensor([starts[end] for end in ends]), torch.tensor(lengths))
        return cls(end_T=end_T, parts=tuple(parts))

    def to(self, device: torch.device | str) -> SharedAttention:
        """The same for a GPU, which takes the mask of blocks in place of the parts."""
        end_T = self.end_T.to(device, non_blocking=True)
        return replace(self, end_T=end_T, parts=(), block_mask=block_mask(end_T))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Query [tokens, heads, d], key and value [tokens, groups, d] → [tokens, heads, d]."""
        if self.block_mask is not None:
            return flexible(_compiled(), query, key, value, self.block_mask, scale)
        merged: Tensor = _MergedParts.apply(query, key, value, self.parts, scale)  # type: ignore[no-untyped-call]  # torch's
        return merged


def block_mask(end_T: Tensor) -> BlockMask:
    """FlexAttention's mask of k ≤ q < end(k)."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_T[key])

    return create_block_mask(sees, None, None, len(end_T), len(end_T), device=str(end_T.device))


def flexible(attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """FlexAttention over packed tokens.

    Args:
        attention: `flex_attention`, compiled or not.
        query: [tokens, heads, d].
        key: [tokens, groups, d].
        value: [tokens, groups, d].
        mask: of `block_mask`.
        scale: of the scores; None for 1/√d.

    Returns:
        [tokens, heads, d].
    """
    rows = (x.transpose(0, 1)[None] for x in (query, key, value))
    output: Tensor = attention(*rows, block_mask=mask, scale=scale, enable_gqa=True)
    return output[0].transpose(0, 1)


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


class _MergedParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], scale: float | None
    ) -> Tensor:
        merged = torch.zeros(query.shape, dtype=torch.float32)
        log_sum = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32)
        for part in parts:
            token = part.queries.valid_token
            output, found = part.forward(query, key, value, scale)
            if part.is_causal:  # the first of these tokens
                merged[token], log_sum[token] = output.float(), found
                continue
            before = log_sum[token]
            log_sum[token] = total = torch.logaddexp(before, found)
            merged[token] = (
                merged[token] * (before - total).exp()[..., None] + output * (found - total).exp()[..., None]
            )
        output = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.parts, ctx.scale = parts, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sum = ctx.saved_tensors
        found = [torch.zeros(x.shape, dtype=torch.float32) for x in (query, key, value)]
        for part in ctx.parts:
            of_part = part.backward(grads[0], (query, key, value), output, log_sum, ctx.scale)
            tokens = (part.queries.valid_token, part.keys.valid_token, part.keys.valid_token)
            for total, index, grad in zip(found, tokens, of_part, strict=True):
                total.index_add_(0, index, grad.float())
        return *(total.to(query.dtype) for total in found), None, None


def _of_like_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indices in buckets whose longest is at most twice as long as their shortest, so that little is padding."""
    buckets: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if lengths[index] == 0:
            continue
        if not buckets or 2 * lengths[index] < longest:
            buckets.append([])
            longest = lengths[index]
        buckets[-1].append(index)
    return [sorted(bucket) for bucket in buckets]
