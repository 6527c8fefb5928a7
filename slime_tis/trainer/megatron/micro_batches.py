"""Micro-batches of limited numbers of tokens, where shared beginnings count once.

Rollouts whose sequences share a beginning are a family, which is kept together if it fits.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from slime_tis.trainer.megatron.prefix_tree import PrefixTree

Rollout = list[int]  # the indices of its sequences


def token_budget_partitions(
    trees: Sequence[PrefixTree], max_tokens: int, rollouts: Sequence[Sequence[int]] | None = None
) -> list[list[list[int]]]:
    """Micro-batches of at most `max_tokens` for every data-parallel rank, the same number on each.

    First-fit decreasing of families on each rank. A family over the budget is divided into rollouts. If a rank needs
    fewer micro-batches than another, its fullest are split. A rollout over the budget is a micro-batch alone.
    """
    numbers = [range(len(tree)) for tree in trees] if rollouts is None else rollouts
    plans = [_first_fit_decreasing(tree, of_tree, max_tokens) for tree, of_tree in zip(trees, numbers, strict=True)]
    count = max(map(len, plans))
    for plan in plans:
        while len(plan) < count:
            fullest = max((planned for planned in plan if len(planned.rollouts) > 1), key=lambda planned: planned.load)
            plan.remove(fullest)
            half = len(fullest.rollouts) // 2
            plan += [
                _Planned(tree=fullest.tree).add(fullest.rollouts[part]) for part in (slice(half), slice(half, None))
            ]
    return [[sorted(chain(*planned.rollouts)) for planned in plan] for plan in plans]


def load_of(tree: PrefixTree, samples: Sequence[int]) -> int:
    """The size that a token budget bounds: computed tokens, or response tokens if they are more."""
    return _Planned(tree=tree).add([list(samples)]).load


@dataclass(kw_only=True, eq=False)
class _Planned:
    tree: PrefixTree
    rollouts: list[Rollout] = field(default_factory=list)
    segments: set[int] = field(default_factory=set)
    tokens: int = 0
    responses: int = 0

    @property
    def load(self) -> int:
        return max(self.tokens, self.responses)

    def add(self, rollouts: Sequence[Rollout]) -> "_Planned":
        """Adds rollouts and returns the micro-batch."""
        self.tokens, self.responses = self._sizes_with(rollouts)
        self.rollouts += rollouts
        self.segments |= _segments(self.tree, rollouts)
        return self

    def load_with(self, rollouts: Sequence[Rollout]) -> int:
        """The load with more rollouts; an upper bound if they share nothing with the others."""
        if self.segments.isdisjoint(_segments(self.tree, rollouts)):
            return self.load + _Planned(tree=self.tree).add(rollouts).load
        return max(self._sizes_with(rollouts))

    def _sizes_with(self, rollouts: Sequence[Rollout]) -> tuple[int, int]:
        tokens = _tokens(self.tree, _segments(self.tree, rollouts) - self.segments)
        return self.tokens + tokens, self.responses + sum(self.tree.response_lengths[i] for i in chain(*rollouts))


def _segments(tree: PrefixTree, rollouts: Iterable[Rollout]) -> set[int]:
    return {segment for sample in chain(*rollouts) for segment in tree.paths[sample]}


def _tokens(tree: PrefixTree, segments: Iterable[int]) -> int:
    return sum(tree.segments[segment].length for segment in segments)


def _first_fit_decreasing(tree: PrefixTree, numbers: Sequence[int], max_tokens: int) -> list[_Planned]:
    samples_of: dict[int, Rollout] = {}
    for sample, number in enumerate(numbers):
        samples_of.setdefault(number, []).append(sample)
    families: dict[int, list[Rollout]] = {}
    for rollout in sorted(samples_of.values(), key=lambda rollout: (tree.paths[rollout[0]], rollout[0])):
        families.setdefault(tree.paths[rollout[0]][0], []).append(rollout)
    loads = [(load_of(tree, list(chain(*family))), family) for family in sorted(families.values(), key=min)]
    items = []
    for load, family in sorted(loads, key=lambda pair: -pair[0]):
        items += [family] if load <= max_tokens else [[rollout] for rollout in family]
    plan: list[_Planned] = []
    space = np.full(len(items), -np.inf)
    uses = Counter(chain(*(_segments(tree, item) for item in items)))
    for item in items:
        # Segments that no other item has are added to any micro-batch; in most cases they are all that is added.
        needed = _tokens(tree, (segment for segment in _segments(tree, item) if uses[segment] == 1))
        fitting = (index for index in np.flatnonzero(space >= needed) if plan[index].load_with(item) <= max_tokens)
        index = next(fitting, len(plan))
        if index == len(plan):
            plan.append(_Planned(tree=tree))
        space[index] = max_tokens - plan[index].add(item).tokens
    return plan
