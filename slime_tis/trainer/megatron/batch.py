"""The samples of one data-parallel rank: how they are packed, sharded over ranks and dealt into micro-batches."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence, Sized
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import chain, groupby
from typing import TypeVar

import torch
from torch import Tensor

from slime_tis.correction import ResponseSlices, response_slices
from slime_tis.policy.tokens import ResponseTokens, numbered, turns_of
from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.megatron.prefix_tree import PrefixTree

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

    def with_token_advantages(self, advantages_L: Tensor) -> TrainingBatch:
        """The same samples with an advantage [L] of each token's own."""
        return replace(self, responses=replace(self.responses, advantages_L=advantages_L))


def make_batch(
    tokens: Sequence[Sequence[int]],
    loss_masks: Sequence[Sequence[int]],
    rollout_log_probs: Sequence[Sequence[float]],
    weight_versions: Sequence[Sequence[int]],
    context_rank: int = 0,
    context_size: int = 1,
    *,
    sampling_masks: Sequence[SamplingMask | None] = (),
    rollouts: Sequence[int] | None = None,
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
        rollouts: number of the rollout that each sample is a segment of; None where each is a rollout of its own.

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
            turns_L=slices.slice_flat(turns_of(loss_mask_N, lengths)),
            rollouts=None if rollouts is None else numbered(rollouts),
        ),
        sampling_masks=_local_masks(masks, slices),
    )


def _local_masks(masks: Sequence[SamplingMask], slices: ResponseSlices) -> list[SamplingMask] | None:
    """The masks of whole responses, cut to this rank's tokens; None where no set was recorded."""
    if not any(len(mask.token_ids) for mask in masks):
        return None
    positions = slices.slice_flat(torch.arange(sum(slices.lengths)))
    return SamplingMask.cat(masks).select(positions).split(slices.local_lengths)


def shard(items: Sequence[T], rank: int, size: int, together: int = 1) -> list[T]:
    """The items of data-parallel rank `rank` of `size`: every size-th run of so many together."""
    return [
        item
        for start in range(rank * together, len(items), size * together)
        for item in items[start : start + together]
    ]


def unshard(shards: Sequence[Sequence[T]], together: int = 1) -> list[T]:
    """All items in their order, from the equally many of each data-parallel rank."""
    starts = range(0, len(shards[0]), together)
    return [item for start in starts for of_rank in shards for item in of_rank[start : start + together]]


def dealt_together(groups: Sequence[Hashable], size: int) -> int:
    """The longest runs that samples can be dealt out in, without cutting a group, to ranks that get equally many.

    Args:
        groups: of each sample its group, those of one side by side.
        size: data-parallel ranks, which divide the samples.
    """
    return math.gcd(len(groups) // size, *(len(list(group)) for _, group in groupby(groups)))


def fixed_partition(count: int, micro_batch_size: int | None) -> list[list[int]]:
    """Samples 0 … count−1 in runs of `micro_batch_size` (all in one run when None)."""
    size = micro_batch_size or max(count, 1)
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def token_budget_partitions(
    trees: Sequence[PrefixTree], max_tokens: int, rollouts: Sequence[Sequence[int]] | None = None
) -> list[list[list[int]]]:
    """Micro-batches of at most `max_tokens` for every data-parallel rank, as many on each.

    First-fit decreasing on each rank, of families: rollouts whose sequences share what they begin with, with shared
    tokens counted once. A family that is over the budget is dealt out rollout by rollout, each where it fits beside its
    siblings. Where a rank needs fewer micro-batches than another its fullest are split, so that every rank makes the
    same number of passes. A rollout that is over the budget is a micro-batch of its own.

    Args:
        trees: the sequences of every data-parallel rank. Every rank needs at least as many rollouts as the rank with
            most micro-batches, which equal numbers of rollouts guarantee.
        max_tokens: the budget, in tokens that are computed, and in response tokens.
        rollouts: for every rank the number of the rollout that each sequence is a segment of, from 0 on; None where
            each is a rollout of its own.

    Returns:
        For every rank its micro-batches, each a sorted list of indices into that rank's sequences.
    """
    numbers = [range(len(tree)) for tree in trees] if rollouts is None else rollouts
    partitions = [
        _first_fit_decreasing(tree, of_each, max_tokens) for tree, of_each in zip(trees, numbers, strict=True)
    ]
    count = max(len(partition) for partition in partitions)
    return [[sorted(one.samples) for one in _split_fullest(partition, count)] for partition in partitions]


def load_of(tree: PrefixTree, samples: Sequence[int]) -> int:
    """What a token budget bounds of a micro-batch: tokens that are computed, or response tokens if they are more."""
    return _Planned(tree=tree).load_with(samples)


def _split_fullest(planned: Sequence[_Planned], count: int) -> list[_Planned]:
    """So many micro-batches, the fullest of which has been split in two as often as it takes."""
    made = dict(enumerate(planned))
    heap = [(-one.load, number) for number, one in made.items() if len(one) > 1]
    heapify(heap)
    numbers = itertools.count(len(made))
    while len(made) < count:
        _, fullest = heappop(heap)
        for half in made.pop(fullest).halves():
            made[number := next(numbers)] = half
            if len(half) > 1:
                heappush(heap, (-half.load, number))
    return list(made.values())


@dataclass(kw_only=True)
class _Planned:
    """A micro-batch in the making."""

    tree: PrefixTree
    families: list[list[list[int]]] = field(default_factory=list)
    """The samples of its rollouts, those of rollouts that share a beginning side by side."""
    segments: set[int] = field(default_factory=set)
    tokens: int = 0
    responses: int = 0

    def __len__(self) -> int:
        """Rollouts."""
        return sum(map(len, self.families))

    @property
    def samples(self) -> list[int]:
        return [sample for family in self.families for rollout in family for sample in rollout]

    @property
    def load(self) -> int:
        """What the budget bounds."""
        return max(self.tokens, self.responses)

    def load_with(self, samples: Sequence[int]) -> int:
        """The load with more samples."""
        more = self._new_segments(samples)
        return max(self.tokens + self._tokens(more), self.responses + self._responses(samples))

    def add(self, family: Sequence[list[int]], *, are_siblings: bool = False) -> None:
        """Takes more rollouts of one family, of the last one where they are siblings."""
        samples = list(chain(*family))
        more = self._new_segments(samples)
        self.segments |= more
        self.tokens += self._tokens(more)
        self.responses += self._responses(samples)
        if are_siblings and self.families:
            self.families[-1] += family
        else:
            self.families.append(list(family))

    def halves(self) -> list[_Planned]:
        """Its families in two, or the siblings of its only one."""
        if len(self.families) > 1:
            parts = [self.families[0::2], self.families[1::2]]
        else:
            (family,) = self.families
            parts = [[family[: len(family) // 2]], [family[len(family) // 2 :]]]
        found = [_Planned(tree=self.tree) for _ in parts]
        for one, families in zip(found, parts, strict=True):
            for family in families:
                one.add(family)
        return found

    def _new_segments(self, samples: Sequence[int]) -> set[int]:
        return {segment for sample in samples for segment in self.tree.paths[sample]} - self.segments

    def _tokens(self, segments: set[int]) -> int:
        return sum(self.tree.segments[segment].length for segment in segments)

    def _responses(self, samples: Sequence[int]) -> int:
        return sum(self.tree.response_lengths[sample] for sample in samples)


def _families(tree: PrefixTree, rollouts: Sequence[int]) -> list[list[list[int]]]:
    """The samples of rollouts, those of rollouts that share a beginning, with each other or with a third, together."""
    samples_of: dict[int, list[int]] = {}
    for sample, number in enumerate(rollouts):
        samples_of.setdefault(number, []).append(sample)
    joined = {number: number for number in samples_of}

    def first(number: int) -> int:
        while joined[number] != number:
            joined[number] = number = joined[joined[number]]
        return number

    alike = tree.families()
    for samples in alike:
        for sample in samples:
            joined[first(rollouts[sample])] = first(rollouts[samples[0]])
    found: dict[int, list[list[int]]] = {}
    for number in dict.fromkeys(rollouts[sample] for samples in alike for sample in samples):
        found.setdefault(first(number), []).append(samples_of[number])
    return list(found.values())


def _first_fit_decreasing(tree: PrefixTree, rollouts: Sequence[int], max_tokens: int) -> list[_Planned]:
    planned: list[_Planned] = []
    loads = [(load_of(tree, list(chain(*family))), family) for family in _families(tree, rollouts)]
    space = FirstFit(len(tree))
    for load, family in sorted(loads, key=lambda pair: -pair[0]):
        if len(family) > 1 and load > max_tokens:
            for one in _dealt_out(tree, family, max_tokens):
                space.set(len(planned), max_tokens - one.load)
                planned.append(one)
            continue
        # Two families may have their largest tokens and responses apart: the sum of their loads is an upper bound.
        place = space.first(load)
        if place is None:
            place = len(planned)
            planned.append(_Planned(tree=tree))
        planned[place].add(family)
        space.set(place, max_tokens - planned[place].load)
    return planned


def _dealt_out(tree: PrefixTree, family: Sequence[list[int]], max_tokens: int) -> list[_Planned]:
    """Micro-batches of the rollouts of one family."""
    planned: list[_Planned] = []
    segments = [{segment for sample in rollout for segment in tree.paths[sample]} for rollout in family]
    uses = Counter(chain(*segments))
    space = FirstFit(len(family))
    for rollout, own in zip(family, segments, strict=True):
        # What no sibling has is added to every micro-batch, and in most of them it is all that is.
        needed = sum(tree.segments[segment].length for segment in own if uses[segment] == 1)
        place = space.first(needed)
        while place is not None and planned[place].load_with(rollout) > max_tokens:
            place = space.first(needed, place + 1)
        if place is None:
            place = len(planned)
            planned.append(_Planned(tree=tree))
        planned[place].add([rollout], are_siblings=True)
        space.set(place, max_tokens - planned[place].tokens)
    return planned


class FirstFit:
    """The space that is left in bins, and the first of them where something fits: a tree of maxima."""

    def __init__(self, bins: int) -> None:
        """Begins with no space in any of so many bins."""
        self._leaves = 1 << max(bins - 1, 0).bit_length()
        self._most: list[float] = [-math.inf] * (2 * self._leaves)

    def set(self, place: int, space: float) -> None:
        """Notes the space of a bin."""
        node = self._leaves + place
        self._most[node] = space
        while node > 1:
            node //= 2
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])

    def first(self, needed: float, start: int = 0) -> int | None:
        """The first bin from `start` on with as much space; None where there is none."""
        node = self._leaves + start
        if start >= self._leaves:
            return None
        while self._most[node] < needed:
            while node & (node + 1) and node % 2:  # the last of its parent
                node //= 2
            if not node & (node + 1):  # the last of its level
                return None
            node += 1
        while node < self._leaves:
            node = 2 * node if self._most[2 * node] >= needed else 2 * node + 1
        return node - self._leaves
