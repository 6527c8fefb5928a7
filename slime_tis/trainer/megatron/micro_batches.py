"""Micro-batches of limited numbers of tokens, and the tree of the segments that their sequences share.

Hidden states of a causal model depend only on earlier tokens, so that equal beginnings have equal hidden states: each
segment is computed, and counts, once.

Rollouts whose sequences share a beginning are a family, which is kept together if it fits.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
from torch import Tensor

Rollout = list[int]  # the indices of its sequences
MIN_SHARED = 8
"""Shortest beginning within prompts, or segment of a response, that is shared: each level costs an attention per
layer."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens that one or more sequences have at the same position, after the same tokens."""

    sequence: int
    start: int
    length: int
    parent: int
    """The segment before them; -1 at the start of a sequence."""


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """Sequences as paths through segments. Segments are in depth-first order: a parent before its subtree."""

    segments: tuple[Segment, ...]
    paths: tuple[tuple[int, ...], ...]
    """The segments of each sequence, from its start; a sequence may end within the last."""
    total_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]

    @classmethod
    def apart(cls, total_lengths: Iterable[int], response_lengths: Sequence[int]) -> "PrefixTree":
        """Sequences that share nothing: one segment each."""
        totals = tuple(total_lengths)
        return cls(
            segments=tuple(
                Segment(sequence=sequence, start=0, length=total, parent=-1) for sequence, total in enumerate(totals)
            ),
            paths=tuple((sequence,) for sequence in range(len(totals))),
            total_lengths=totals,
            response_lengths=tuple(response_lengths),
        )

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int] | Tensor], response_lengths: Sequence[int]) -> "PrefixTree":
        """Shares beginnings that are whole prompts, or long enough."""
        ids = [np.asarray(sequence, dtype=">i8") for sequence in tokens]  # big endian: bytes sort as numbers
        order = sorted(range(len(ids)), key=[sequence.tobytes() for sequence in ids].__getitem__)
        # A sequence that others continue is directly before one of them, and a part of that one's path.
        continued_by: dict[int, int] = {}
        for left, right in reversed(list(pairwise(order))):
            if _common(ids[left], ids[right]) == len(ids[left]):
                continued_by[left] = continued_by.get(right, right)
        segments: list[Segment] = []
        leaves: dict[int, int] = {}
        todo = [([sequence for sequence in order if sequence not in continued_by], 0, -1)]
        while todo:
            sequences, start, parent = todo.pop()
            first, is_leaf = sequences[0], len(sequences) == 1
            end = len(ids[first]) if is_leaf else _common(ids[first], ids[sequences[-1]])
            holds_prompts = start == 0 < end and end >= max(len(ids[i]) - response_lengths[i] for i in sequences)
            if is_leaf or holds_prompts or end - start >= MIN_SHARED:
                segments.append(Segment(sequence=first, start=start, length=end - start, parent=parent))
                start, parent = end, len(segments) - 1
            if is_leaf:
                leaves[first] = parent
            else:
                branches: dict[int, list[int]] = {}
                for sequence in sequences:
                    branches.setdefault(int(ids[sequence][end]), []).append(sequence)
                todo += [(branch, start, parent) for branch in reversed(branches.values())]
        tree = cls(
            segments=tuple(segments),
            paths=tuple(
                _path(segments, leaves[continued_by.get(sequence, sequence)], len(ids[sequence]))
                for sequence in range(len(ids))
            ),
            total_lengths=tuple(map(len, ids)),
            response_lengths=tuple(response_lengths),
        )
        return tree if tree.is_shared else cls.apart(tree.total_lengths, response_lengths)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def tokens(self) -> int:
        """Number of computed tokens: the tokens of all segments."""
        return sum(segment.length for segment in self.segments)

    @property
    def is_shared(self) -> bool:
        """Whether a token belongs to several sequences."""
        return self.tokens < sum(self.total_lengths)


def _common(left: np.ndarray, right: np.ndarray) -> int:
    shorter = min(len(left), len(right))
    differs = left[:shorter] != right[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _path(segments: Sequence[Segment], leaf: int, length: int) -> tuple[int, ...]:
    """The segments up to `leaf` that hold the first `length` tokens."""
    path = []
    while leaf >= 0:
        if segments[leaf].start < length:
            path.append(leaf)
        leaf = segments[leaf].parent
    return tuple(reversed(path))


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
