"""The samples of one data-parallel rank: how they are packed, sharded over ranks and dealt into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from slime_tis.correction import ResponseSlices, response_slices
from slime_tis.policy.tokens import ResponseTokens
from slime_tis.sampling_mask import SamplingMask

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Samples of one data-parallel rank."""

    tokens: list[Tensor]
    """Whole sequences, prompt and response, int64 [total]."""
    responses: ResponseTokens
    """What is known of the response tokens that this context-parallel rank owns."""
    sampling_masks: list[SamplingMask] | None = None
    """The tokens that could be sampled at these response tokens, response by response; None for all tokens."""
    routed_experts: Sequence[Tensor | None] | None = None
    """Of each sequence the experts to replay, [tokens - 1, sparse layers, k]; None where its routers choose."""
    routing_weights: Sequence[Tensor | None] | None = None
    """Of each sequence the weights to replay, float32 of the same shape."""

    def __len__(self) -> int:
        """Samples."""
        return len(self.tokens)

    @property
    def total_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return self.responses.total_lengths

    def select(self, samples: Sequence[int]) -> TrainingBatch:
        """The samples at these indices, in that order."""
        masks, experts, weights = self.sampling_masks, self.routed_experts, self.routing_weights
        return TrainingBatch(
            tokens=[self.tokens[i] for i in samples],
            responses=self.responses.select(samples),
            sampling_masks=None if masks is None else [masks[i] for i in samples],
            routed_experts=None if experts is None else [experts[i] for i in samples],
            routing_weights=None if weights is None else [weights[i] for i in samples],
        )

    def with_routing(
        self, experts: Sequence[Tensor | None] | None, weights: Sequence[Tensor | None] | None
    ) -> TrainingBatch:
        """The same samples with the experts to replay, and their weights."""
        return replace(self, routed_experts=experts, routing_weights=weights)

    def with_old_log_probs(self, values_L: Tensor) -> TrainingBatch:
        """The same samples with log π_old [L]."""
        return replace(self, responses=replace(self.responses, old_log_probs_L=values_L))

    def with_ref_log_probs(self, values_L: Tensor) -> TrainingBatch:
        """The same samples with the reference policy's log-probs [L]."""
        return replace(self, responses=replace(self.responses, ref_log_probs_L=values_L))

    def with_advantages(self, per_sample: Sequence[float]) -> TrainingBatch:
        """The same samples with every sample's advantage at each of its tokens."""
        return replace(self, responses=self.responses.with_advantages(per_sample))


def make_batch(
    tokens: Sequence[Sequence[int]],
    loss_masks: Sequence[Sequence[int]],
    rollout_log_probs: Sequence[Sequence[float]],
    weight_versions: Sequence[Sequence[int]],
    context_rank: int = 0,
    context_size: int = 1,
    *,
    sampling_masks: Sequence[SamplingMask | None] = (),
) -> TrainingBatch:
    """Builds a batch from whole sequences, with what this context-parallel rank owns of the responses.

    Args:
        tokens: ids of prompt and response.
        loss_masks: of the responses, 1 where a token is trained on.
        rollout_log_probs: of the responses, NaN where the engine gave none.
        weight_versions: of the responses, in optimizer steps.
        context_rank: in the context-parallel group.
        context_size: of the group.
        sampling_masks: of the responses, None where none was recorded; empty where nothing truncates sampling.

    Raises:
        ValueError: the rows of a sample's response differ in length, or the numbers of samples do.
    """
    totals = [len(ids) for ids in tokens]
    lengths = [len(mask) for mask in loss_masks]
    masks = [
        SamplingMask.unrecorded(length) if mask is None else mask
        for mask, length in zip(sampling_masks or [None] * len(lengths), lengths, strict=True)
    ]
    rows_of: dict[str, Sequence[Sized]] = {
        "rollout_log_probs": rollout_log_probs,
        "weight_versions": weight_versions,
        "sampling_masks": masks,
    }
    for name, rows in rows_of.items():
        found = [len(row) for row in rows]
        if found != lengths:
            raise ValueError(f"the lengths of {name} are {found} but those of loss_masks {lengths}.")
    slices = response_slices(totals, lengths, context_rank, context_size)

    def packed(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        # one tensor from Python numbers is much faster than one for each row
        return torch.tensor([value for row in rows for value in row], dtype=dtype)

    loss_mask_N = packed(loss_masks, torch.float32)
    return TrainingBatch(
        tokens=list(packed(tokens, torch.int64).split(totals)),
        responses=ResponseTokens(
            slices=slices,
            total_lengths=tuple(totals),
            loss_mask_L=slices.slice_flat(loss_mask_N),
            loss_mask_N=loss_mask_N,
            rollout_log_probs_L=slices.slice_flat(packed(rollout_log_probs, torch.float32)),
            weight_versions_L=slices.slice_flat(packed(weight_versions, torch.int64)),
        ),
        sampling_masks=_local_masks(masks, slices),
    )


def _local_masks(masks: Sequence[SamplingMask], slices: ResponseSlices) -> list[SamplingMask] | None:
    """The masks of whole responses, cut to this rank's tokens; None where no set was recorded."""
    if not any(len(mask.token_ids) for mask in masks):
        return None
    positions = slices.slice_flat(torch.arange(sum(slices.lengths)))
    return SamplingMask.cat(masks).select(positions).split(slices.local_lengths)


def shard(items: Sequence[T], rank: int, size: int) -> list[T]:
    """The items of data-parallel rank `rank` of `size`: every size-th one."""
    return list(items[rank::size])


def unshard(shards: Sequence[Sequence[T]]) -> list[T]:
    """All items in their order, from the equally many of each data-parallel rank."""
    return [item for items in zip(*shards, strict=True) for item in items]


def fixed_partition(count: int, micro_batch_size: int | None) -> list[list[int]]:
    """Samples 0 … count−1 in runs of `micro_batch_size` (all in one run when None)."""
    size = micro_batch_size or max(count, 1)
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def token_budget_partitions(lengths_of_ranks: list[list[int]], max_tokens: int) -> list[list[list[int]]]:
    """Micro-batches of at most `max_tokens` for every data-parallel rank, as many on each.

    First-fit decreasing on each rank; where a rank needs fewer micro-batches than another its fullest are split, so
    that every rank makes the same number of passes. A sequence longer than the budget is a micro-batch of its own.

    Args:
        lengths_of_ranks: tokens of every sequence, for every data-parallel rank. Every rank needs at least as many
            sequences as the rank with most micro-batches, which equal numbers of sequences guarantee.
        max_tokens: the budget, in tokens.

    Returns:
        For every rank its micro-batches, each a sorted list of indices into that rank's sequences.
    """
    partitions = [_first_fit_decreasing(lengths, max_tokens) for lengths in lengths_of_ranks]
    count = max(len(partition) for partition in partitions)
    for lengths, partition in zip(lengths_of_ranks, partitions, strict=True):
        while len(partition) < count:
            fullest = max((bin for bin in partition if len(bin) > 1), key=lambda bin: sum(lengths[i] for i in bin))
            partition.remove(fullest)
            partition += [fullest[0::2], fullest[1::2]]
    return [[sorted(bin) for bin in partition] for partition in partitions]


def _first_fit_decreasing(lengths: list[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        slot = next((b for b, tokens in enumerate(free) if tokens >= lengths[index]), None)
        if slot is None:
            bins.append([])
            free.append(max_tokens)
            slot = len(bins) - 1
        bins[slot].append(index)
        free[slot] -= lengths[index]
    return bins
