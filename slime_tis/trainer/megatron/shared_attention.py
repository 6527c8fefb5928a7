"""Causal attention over a prefix tree: each token sees the segments before its segment, and its own up to itself.

The attention of a token is merged from parts: its own segment, causal, and each segment before it. Parts P with outputs
o_P and L_P = log Σ_{k∈P} e^{s_k} over their scores s merge exactly:

    L = log Σ_P e^{L_P},    o = Σ_P e^{L_P − L} o_P

The gradient of a part needs o and L instead of o_P and L_P, because the weight of key k is e^{s_k − L} in every part.
Source of the merge: "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", Dao et al.
(https://arxiv.org/abs/2205.14135), section 3.1; of separate attention to a shared prefix: "Hydragen: High-Throughput
LLM Inference with Shared Prefixes", Juravsky et al. (https://arxiv.org/abs/2402.05099), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from slime_tis.trainer.megatron.prefix_tree import PrefixTree

cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Ranges of packed tokens as rows of a padded batch."""

    count: int
    token_index: Tensor
    """[rows·length] packed token at each index; padding repeats the row's last token."""
    is_padding: Tensor
    """bool [rows, length]."""
    valid_index: Tensor
    """[tokens] indices that are not padding."""
    valid_token: Tensor
    """[tokens] packed tokens at these indices."""

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int], rows: Sequence[int]) -> Rows:
        """The ranges `rows`, given the start and the length of all ranges."""
        start_R, length_R = torch.tensor([(starts[row], lengths[row]) for row in rows]).T
        offset = torch.arange(int(length_R.max()))
        token_index = (start_R[:, None] + torch.minimum(offset, length_R[:, None] - 1)).flatten()
        is_padding = offset >= length_R[:, None]
        valid_index = (~is_padding).flatten().nonzero().squeeze(1)
        return cls(
            count=len(rows),
            token_index=token_index,
            is_padding=is_padding,
            valid_index=valid_index,
            valid_token=token_index[valid_index],
        )

    def gather(self, x: Tensor) -> Tensor:
        """Packed [tokens, heads, …] → [rows, heads, length, …]."""
        rows: Tensor = x.index_select(0, self.token_index).unflatten(0, (self.count, -1))
        return rows.transpose(1, 2)

    def packed(self, rows: Tensor) -> Tensor:
        """[rows, heads, length, …] → [tokens, heads, …] of `valid_token`."""
        return rows.transpose(1, 2).flatten(0, 1).index_select(0, self.valid_index)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Queries in rows, and the keys that each row of queries sees."""

    queries: Rows
    keys: Rows
    is_causal: bool
    """True: queries and keys are the same tokens, and each sees keys up to itself. False: each sees all keys."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Output [tokens, heads, d] and log Σ e^score [tokens, heads] of the queries' valid tokens."""
        options = self._options(query.dtype, scale)
        output, log_sum = cpu_attention(*self._inputs(query, key, value), is_causal=self.is_causal, **options)
        return self.queries.packed(output), self.queries.packed(log_sum)

    def backward(self, grad: Tensor, saved: Sequence[Tensor], scale: float | None) -> list[Tensor]:
        """The part's gradients of query, key and value; `saved` are these, merged output and merged log Σ."""
        query, key, value, output, log_sum = saved
        # An infinite sum makes every weight in padding rows 0.
        padded_log_sum = self.queries.gather(log_sum).masked_fill(self.queries.is_padding[:, None], torch.inf)
        grads = cpu_attention_backward(
            self.queries.gather(grad),
            *self._inputs(query, key, value),
            self.queries.gather(output),
            padded_log_sum,
            0.0,
            self.is_causal,
            **self._options(grad.dtype, scale),
        )
        of_keys = [grad.unflatten(1, (key.shape[1], -1)).sum(2) for grad in grads[1:]]
        return [self.queries.packed(grads[0]), *(self.keys.packed(grad) for grad in of_keys)]

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        repeats = query.shape[1] // key.shape[1]
        keys = [self.keys.gather(x).repeat_interleave(repeats, 1) for x in (key, value)]
        return [self.queries.gather(query), *keys]

    def _options(self, dtype: torch.dtype, scale: float | None) -> dict[str, Any]:
        """Scale and attention mask [rows, 1, 1, keys], which is None if no query would see padding."""
        mask = None
        if not self.is_causal and len(self.keys.valid_index) < len(self.keys.token_index):
            hidden = self.keys.is_padding[:, None, None]
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        return {"attn_mask": mask, "scale": scale}


def attention_parts(tree: PrefixTree, filler: int) -> tuple[Part, ...]:
    """The parts of the attention over a tree's packed tokens, and over `filler` more tokens that see only themselves.

    First each token's own segment, every token once, then the segments before it.
    """
    lengths = [*(segment.length for segment in tree.segments), *[filler] * (filler > 0)]
    starts = list(accumulate(lengths, initial=0))
    ends = list(range(1, len(lengths) + 1))  # the first segment after each one's subtree
    for index, segment in reversed(list(enumerate(tree.segments))):
        if segment.parent >= 0:
            ends[segment.parent] = max(ends[segment.parent], ends[index])
    parts = []
    for bucket in _buckets_of_similar(lengths):
        rows = Rows.of(starts, lengths, bucket)
        parts.append(Part(queries=rows, keys=rows, is_causal=True))
    for depth in range(max(segment.depth for segment in tree.segments)):
        inner = [i for i, segment in enumerate(tree.segments) if segment.depth == depth and ends[i] > i + 1]
        after = [starts[ends[i]] - starts[i + 1] for i in inner]
        for bucket in _buckets_of_similar(after):
            queries = Rows.of([starts[i + 1] for i in inner], after, bucket)
            keys = Rows.of(starts, lengths, [inner[i] for i in bucket])
            parts.append(Part(queries=queries, keys=keys, is_causal=False))
    return tuple(parts)


def shared_attention(
    query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], scale: float | None = None
) -> Tensor:
    """Query [tokens, heads, d], key and value [tokens, groups, d] → [tokens, heads, d]; scale None is 1/√d."""
    merged: Tensor = _MergedParts.apply(query, key, value, parts, scale)  # type: ignore[no-untyped-call]  # torch's
    return merged


class _MergedParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, ctx.parts, ctx.scale = inputs
        merged = torch.zeros(query.shape, dtype=torch.float32)
        log_sum = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32)
        for part in ctx.parts:
            token = part.queries.valid_token
            output, added = part.forward(query, key, value, ctx.scale)
            if part.is_causal:  # the first part of these tokens
                merged[token], log_sum[token] = output.float(), added
                continue
            before = log_sum[token]
            log_sum[token] = total = torch.logaddexp(before, added)
            merged[token] = (
                merged[token] * (before - total).exp()[..., None] + output * (added - total).exp()[..., None]
            )
        output = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        totals = [torch.zeros(x.shape, dtype=torch.float32) for x in saved[:3]]
        for part in ctx.parts:
            tokens = (part.queries.valid_token, part.keys.valid_token, part.keys.valid_token)
            for total, index, grad in zip(totals, tokens, part.backward(grads[0], saved, ctx.scale), strict=True):
                total.index_add_(0, index, grad.float())
        return *(total.to(saved[0].dtype) for total in totals), None, None


def _buckets_of_similar(lengths: Sequence[int]) -> list[list[int]]:
    """Indices in buckets whose longest is at most twice as long as their shortest, which limits padding."""
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
