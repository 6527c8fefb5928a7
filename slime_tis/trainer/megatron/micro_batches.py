"""Micro-batches of limited numbers of tokens, where shared beginnings count once.

Rollouts whose sequences share a beginning are a family, which is kept together if it fits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain

import numpy as np

from slime_tis.trainer.megatron.prefix_tree import PrefixTree

Rollout = list[int]
"""The indices of a rollout's sequences, which are its segments."""


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """How the samples of a data-parallel rank are divided into micro-batches."""

    partition: list[list[int]]
    """The samples of each."""
    load: float | None = None
    """Tokens of the largest micro-batch of all ranks, divided by the token budget; None without a budget."""


def token_budget_partitions(
    trees: Sequence[PrefixTree], max_tokens: int, rollouts: Sequence[Sequence[int]] | None = None
) -> list[list[list[int]]]:
    """Micro-batches of at most `max_tokens` for every data-parallel rank, the same number on each.

    First-fit decreasing of families on each rank. A family over the budget is divided into rollouts, each placed where
    it fits next to its siblings. If a rank needs fewer micro-batches than another, its fullest are split. A rollout
    over the budget is a micro-batch alone.

    Args:
        trees: the sequences of every data-parallel rank. Every rank needs at least as many rollouts as the rank with
            most micro-batches, which equal numbers of rollouts guarantee.
        max_tokens: the budget, both in computed tokens and in response tokens.
        rollouts: for every rank the number of the rollout that each sequence is a segment of, from 0 on; None if each
            is a separate rollout.

    Returns:
        For every rank its micro-batches, each a sorted list of indices into that rank's sequences.
    """
    numbers = [range(len(tree)) for tree in trees] if rollouts is None else rollouts
    plans = [
        _first_fit_decreasing(tree, of_sequences, max_tokens) for tree, of_sequences in zip(trees, numbers, strict=True)
    ]
    count = max(map(len, plans))
    return [[sorted(planned.samples) for planned in _split_fullest(plan, count)] for plan in plans]


def load_of(tree: PrefixTree, samples: Sequence[int]) -> int:
    """The size that a token budget bounds: computed tokens, or response tokens if they are more."""
    return _Planned(tree=tree).load_with(samples)


def _split_fullest(plan: Sequence[_Planned], count: int) -> list[_Planned]:
    """Splits the fullest micro-batches in two until there are `count`."""
    result = dict(enumerate(plan))
    heap = [(-planned.load, number) for number, planned in result.items() if planned.rollouts > 1]
    heapify(heap)
    numbers = itertools.count(len(result))
    while len(result) < count:
        _, fullest = heappop(heap)
        for half in result.pop(fullest).halves():
            result[number := next(numbers)] = half
            if half.rollouts > 1:
                heappush(heap, (-half.load, number))
    return list(result.values())


@dataclass(kw_only=True)
class _Planned:
    """A micro-batch to which families are added."""

    tree: PrefixTree
    families: list[list[Rollout]] = field(default_factory=list)
    segments: set[int] = field(default_factory=set)
    tokens: int = 0
    responses: int = 0

    @property
    def rollouts(self) -> int:
        """Number of rollouts."""
        return sum(map(len, self.families))

    @property
    def samples(self) -> list[int]:
        return [sample for family in self.families for rollout in family for sample in rollout]

    @property
    def load(self) -> int:
        return max(self.tokens, self.responses)

    def load_with(self, samples: Sequence[int]) -> int:
        """The load with more samples."""
        added = self._new_segments(samples)
        return max(self.tokens + self._tokens(added), self.responses + self._responses(samples))

    def add(self, family: Sequence[Rollout], *, extends_last: bool = False) -> None:
        """Adds rollouts as a new family, or to the last one."""
        samples = list(chain(*family))
        added = self._new_segments(samples)
        self.segments |= added
        self.tokens += self._tokens(added)
        self.responses += self._responses(samples)
        if extends_last and self.families:
            self.families[-1] += family
        else:
            self.families.append(list(family))

    def halves(self) -> list[_Planned]:
        """Every second family, or half of the only family's rollouts."""
        if len(self.families) > 1:
            divided = [self.families[0::2], self.families[1::2]]
        else:
            (family,) = self.families
            divided = [[family[: len(family) // 2]], [family[len(family) // 2 :]]]
        halves = []
        for families in divided:
            halves.append(_Planned(tree=self.tree))
            for family in families:
                halves[-1].add(family)
        return halves

    def _new_segments(self, samples: Sequence[int]) -> set[int]:
        return {segment for sample in samples for segment in self.tree.paths[sample]} - self.segments

    def _tokens(self, segments: set[int]) -> int:
        return sum(self.tree.segments[segment].length for segment in segments)

    def _responses(self, samples: Sequence[int]) -> int:
        return sum(self.tree.response_lengths[sample] for sample in samples)


def _families(tree: PrefixTree, rollouts: Sequence[int]) -> list[list[Rollout]]:
    """The rollouts, grouped by shared beginnings, directly or through a third rollout."""
    samples_of: dict[int, Rollout] = {}
    for sample, number in enumerate(rollouts):
        samples_of.setdefault(number, []).append(sample)
    joined = {number: number for number in samples_of}  # union-find

    def root(number: int) -> int:
        while joined[number] != number:
            joined[number] = number = joined[joined[number]]
        return number

    sharing = tree.families()
    for samples in sharing:
        for sample in samples:
            joined[root(rollouts[sample])] = root(rollouts[samples[0]])
    families: dict[int, list[Rollout]] = {}
    for number in dict.fromkeys(rollouts[sample] for samples in sharing for sample in samples):
        families.setdefault(root(number), []).append(samples_of[number])
    return list(families.values())


def _first_fit_decreasing(tree: PrefixTree, rollouts: Sequence[int], max_tokens: int) -> list[_Planned]:
    plan: list[_Planned] = []
    loads = [(load_of(tree, list(chain(*family))), family) for family in _families(tree, rollouts)]
    space = np.full(len(tree), -np.inf)
    for load, family in sorted(loads, key=lambda pair: -pair[0]):
        if len(family) > 1 and load > max_tokens:
            for planned in _divide_family(tree, family, max_tokens):
                space[len(plan)] = max_tokens - planned.load
                plan.append(planned)
            continue
        # The sum of two loads is an upper bound of their families' joint load.
        index = _first_with(space, load)
        if index is None:
            index = len(plan)
            plan.append(_Planned(tree=tree))
        plan[index].add(family)
        space[index] = max_tokens - plan[index].load
    return plan


def _divide_family(tree: PrefixTree, family: Sequence[Rollout], max_tokens: int) -> list[_Planned]:
    """Micro-batches of the rollouts of one family."""
    plan: list[_Planned] = []
    segments = [{segment for sample in rollout for segment in tree.paths[sample]} for rollout in family]
    uses = Counter(chain(*segments))
    space = np.full(len(family), -np.inf)
    for rollout, of_rollout in zip(family, segments, strict=True):
        # Segments without siblings are added to any micro-batch; in most cases they are all that is added.
        needed = sum(tree.segments[segment].length for segment in of_rollout if uses[segment] == 1)
        index = _first_with(space, needed)
        while index is not None and plan[index].load_with(rollout) > max_tokens:
            index = _first_with(space, needed, index + 1)
        if index is None:
            index = len(plan)
            plan.append(_Planned(tree=tree))
        plan[index].add([rollout], extends_last=True)
        space[index] = max_tokens - plan[index].tokens
    return plan


def _first_with(space: np.ndarray, needed: float, start: int = 0) -> int | None:
    """The first index from `start` on with enough space."""
    fits = space[start:] >= needed
    return start + int(fits.argmax()) if fits.any() else None
