"""The samples of one data-parallel rank, and how samples are sharded over the ranks."""

import math
from collections.abc import Hashable, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from slime_tis.correction import response_slices
from slime_tis.policy.response_tokens import ResponseTokens, numbered, turns_of
from slime_tis.trainer.data.sample import SamplingMask

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Samples of one data-parallel rank."""

    tokens: list[Tensor]
    """Whole sequences, prompt and response, int64 [total]."""
    responses: ResponseTokens
    """The response tokens that this context-parallel rank owns."""
    sampling_masks: list[SamplingMask] | None = None
    """The tokens that could be sampled at each of these, one mask per response; None for all
    tokens."""
    routed_experts: Sequence[Tensor | None] | None = None
    """Experts to replay in each sequence, [tokens - 1, sparse layers, k]; None: the routers
    choose."""
    routing_weights: Sequence[Tensor | None] | None = None
    """Their weights to replay, float32 of the same shape."""

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, samples: Sequence[int]) -> "TrainingBatch":
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
    ) -> "TrainingBatch":
        """The same samples with the experts to replay, and their weights."""
        return replace(self, routed_experts=experts, routing_weights=weights)

    def with_token_values(self, **values_L: Tensor) -> "TrainingBatch":
        """The same samples with these fields [L] of `ResponseTokens`."""
        return replace(self, responses=replace(self.responses, **values_L))  # type: ignore[arg-type]

    def with_advantages(self, per_sample: Sequence[float]) -> "TrainingBatch":
        """The same samples with every sample's advantage at each of its tokens."""
        return replace(self, responses=self.responses.with_advantages(per_sample))


def make_batch(  # noqa: PLR0913
    tokens: Sequence[Sequence[int]],
    loss_masks: Sequence[Sequence[int]],
    rollout_log_probs: Sequence[Sequence[float]],
    weight_versions: Sequence[Sequence[int]],
    context_rank: int = 0,
    context_size: int = 1,
    *,
    workers: Sequence[Sequence[int]] | None = None,
    sampling_masks: Sequence[SamplingMask | None] = (),
    rollouts: Sequence[int] | None = None,
) -> TrainingBatch:
    """Builds a batch from whole sequences; of the responses, this context-parallel rank's slices.

    Log-probs are NaN if the engine gave none, weight versions are in optimizer steps. Each sample
    may be a segment of the rollout with its number in `rollouts`. `sampling_masks` is empty if
    sampling is not truncated.
    """
    totals = [len(ids) for ids in tokens]
    lengths = [len(mask) for mask in loss_masks]
    masks = [
        SamplingMask.unrecorded(length) if mask is None else mask
        for mask, length in zip(sampling_masks or [None] * len(lengths), lengths, strict=True)
    ]
    named: dict[str, Sequence[Sized]] = {
        "rollout_log_probs": rollout_log_probs,
        "weight_versions": weight_versions,
        **({} if workers is None else {"workers": workers}),
        "sampling_masks": masks,
    }
    for name, rows in named.items():
        if (row_lengths := [len(row) for row in rows]) != lengths:
            raise ValueError(
                f"{name} has {row_lengths} response tokens per sample but loss_masks has {lengths}."
            )
    slices = response_slices(totals, lengths, context_rank, context_size)

    def flat(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(
            np.concatenate([np.empty(0, dtype), *(np.asarray(row, dtype) for row in rows)])
        )

    loss_mask_N = flat(loss_masks, np.float32)
    local_masks = None
    if any(len(mask.token_ids) for mask in masks):
        positions = slices.slice_flat(torch.arange(sum(lengths)))
        local_masks = SamplingMask.cat(masks).select(positions).split(slices.local_lengths)
    return TrainingBatch(
        tokens=list(flat(tokens, np.int64).split(totals)),
        responses=ResponseTokens(
            slices=slices,
            total_lengths=tuple(totals),
            loss_mask_L=slices.slice_flat(loss_mask_N),
            loss_mask_N=loss_mask_N,
            rollout_log_probs_L=slices.slice_flat(flat(rollout_log_probs, np.float32)),
            weight_versions_L=slices.slice_flat(flat(weight_versions, np.int64)),
            workers_L=None if workers is None else slices.slice_flat(flat(workers, np.int64)),
            turns_L=slices.slice_flat(turns_of(loss_mask_N, lengths)),
            rollouts=None if rollouts is None else numbered(rollouts),
        ),
        sampling_masks=local_masks,
    )


def shard(items: Sequence[T], rank: int, size: int, together: int = 1) -> list[T]:
    """The items of data-parallel rank `rank` of `size`: every size-th run of `together` items."""
    return [
        item
        for start in range(rank * together, len(items), size * together)
        for item in items[start : start + together]
    ]


def unshard(shards: Sequence[Sequence[T]], together: int = 1) -> list[T]:
    """All items in their order, from the equally long shards of the data-parallel ranks."""
    starts = range(0, len(shards[0]), together)
    return [
        item for start in starts for of_rank in shards for item in of_rank[start : start + together]
    ]


def assign_together(groups: Sequence[Hashable], size: int) -> int:
    """The longest runs of samples, given each one's group, that ranks can get equally and without cutting a group."""
    return math.gcd(len(groups) // size, *(len(list(group)) for _, group in groupby(groups)))


def fixed_partition(count: int, micro_batch_size: int | None) -> list[list[int]]:
    """Samples 0 … count−1 in runs of `micro_batch_size`, or in one run if it is None."""
    size = micro_batch_size or max(count, 1)
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]
