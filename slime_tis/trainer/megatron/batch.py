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
    """Sequences of prompt and response, int64 [total]."""
    responses: ResponseTokens
    """The response tokens that this context-parallel rank owns."""
    sampling_masks: list[SamplingMask] | None = None
    """The tokens that could be sampled at each response token, one mask per response; None if every
    token of the vocabulary could be sampled."""
    routed_experts: Sequence[Tensor | None] | None = None
    """Experts to replay in each sequence, [tokens - 1, sparse layers, k]; None: the routers
    choose."""
    routing_weights: Sequence[Tensor | None] | None = None
    """Their weights to replay, float32 of the same shape."""

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, samples: Sequence[int]) -> "TrainingBatch":
        """Returns the samples at these indices, in that order."""

        def chosen(values: Sequence[T] | None) -> list[T] | None:
            if values is None:
                return None
            return [values[sample] for sample in samples]

        return TrainingBatch(
            tokens=[self.tokens[sample] for sample in samples],
            responses=self.responses.select(samples),
            sampling_masks=chosen(self.sampling_masks),
            routed_experts=chosen(self.routed_experts),
            routing_weights=chosen(self.routing_weights),
        )

    def with_routing(
        self, experts: Sequence[Tensor | None] | None, weights: Sequence[Tensor | None] | None
    ) -> "TrainingBatch":
        """Returns the same samples with the experts to replay, and their weights."""
        return replace(self, routed_experts=experts, routing_weights=weights)

    def with_token_values(self, **values_L: Tensor) -> "TrainingBatch":
        """Returns the same samples with these fields [L] of `ResponseTokens`."""
        return replace(self, responses=replace(self.responses, **values_L))  # type: ignore[arg-type]

    def with_advantages(self, per_sample: Sequence[float]) -> "TrainingBatch":
        """Returns the same samples; all tokens of a sample have the sample's advantage."""
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
    """Builds a batch from complete sequences, with this context-parallel rank's response slices.

    Args:
        tokens: Token ids of prompt and response, per sample.
        loss_masks: 1 for trained response tokens, else 0; one per response token, as in all
            arguments below.
        rollout_log_probs: Log-probs of the rollout engine in nats; NaN if it returned none.
        weight_versions: The optimizer step of the weights that sampled the token.
        context_rank: This rank in its context-parallel group.
        context_size: Number of context-parallel ranks.
        workers: Number of the rollout worker that sampled the token.
        sampling_masks: One mask per sample, None for one without a record; empty if sampling is
            not truncated.
        rollouts: Number of the rollout that each sample is a segment of.

    Raises:
        ValueError: The arguments disagree about the number of response tokens.
    """
    totals = [len(ids) for ids in tokens]
    lengths = [len(mask) for mask in loss_masks]
    masks = []
    for mask, length in zip(sampling_masks or [None] * len(lengths), lengths, strict=True):
        if mask is None:
            mask = SamplingMask.unrecorded(length)
        masks.append(mask)
    fields: dict[str, Sequence[Sized]] = {
        "rollout_log_probs": rollout_log_probs,
        "weight_versions": weight_versions,
    }
    if workers is not None:
        fields["workers"] = workers
    fields["sampling_masks"] = masks
    for name, rows in fields.items():
        row_lengths = [len(row) for row in rows]
        if row_lengths != lengths:
            raise ValueError(
                f"{name} has {row_lengths} response tokens per sample but loss_masks has {lengths}."
            )
    slices = response_slices(totals, lengths, context_rank, context_size)

    def flat(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> Tensor:
        arrays = [np.asarray(row, dtype) for row in rows]
        # np.concatenate refuses an empty list, which an empty batch would give
        return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays]))

    loss_mask_N = flat(loss_masks, np.float32)
    workers_L = None
    if workers is not None:
        workers_L = slices.slice_flat(flat(workers, np.int64))
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
            workers_L=workers_L,
            turns_L=slices.slice_flat(turns_of(loss_mask_N, lengths)),
            rollouts=None if rollouts is None else numbered(rollouts),
        ),
        sampling_masks=local_masks,
    )


def shard(items: Sequence[T], rank: int, size: int, together: int = 1) -> list[T]:
    """Returns the items of data-parallel rank `rank` of `size`.

    Runs of `together` consecutive items are dealt to the ranks in turn.
    """
    share: list[T] = []
    for start in range(rank * together, len(items), size * together):
        share += items[start : start + together]
    return share


def balanced_order(workloads: Sequence[float], size: int) -> list[int]:
    """Returns an order of items in which `shard` gives all ranks similar workloads.

    The largest item goes first, each to the rank with the least workload that has room: ranks get
    equally many items, in their order.

    Source: slime, utils/dp_schedule.py, --balance-data, which divides the items by Karmarkar and
    Karp's algorithm instead.

    Args:
        workloads: Workload of every item, in any unit; their number is a multiple of `size`.
        size: Number of data-parallel ranks.
    """
    room = len(workloads) // size
    shares: list[list[int]] = [[] for _ in range(size)]
    totals = [0.0] * size
    largest_first = sorted(range(len(workloads)), key=lambda item: -workloads[item])
    for item in largest_first:
        open_ranks = [rank for rank in range(size) if len(shares[rank]) < room]
        rank = min(open_ranks, key=totals.__getitem__)
        shares[rank].append(item)
        totals[rank] += workloads[item]
    for share in shares:
        share.sort()
    return unshard(shares)


def unshard(shards: Sequence[Sequence[T]], together: int = 1) -> list[T]:
    """Returns all items in their order before `shard`; all shards have the same length."""
    items: list[T] = []
    for start in range(0, len(shards[0]), together):
        for share in shards:
            items += share[start : start + together]
    return items


def assign_together(groups: Sequence[Hashable], size: int) -> int:
    """Returns how many consecutive samples `shard` keeps together.

    This is the largest divisor of a rank's number of samples and of the size of every group. So all
    ranks get equally many samples, and no run has samples of two groups.

    Args:
        groups: Groups, sample by sample.
        size: Number of data-parallel ranks.
    """
    group_sizes = [len(list(group)) for _, group in groupby(groups)]
    return math.gcd(len(groups) // size, *group_sizes)


def fixed_partition(count: int, micro_batch_size: int | None) -> list[list[int]]:
    """Returns samples 0 … count−1 in runs of `micro_batch_size`, or in one run if it is None."""
    size = micro_batch_size or max(count, 1)
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]
