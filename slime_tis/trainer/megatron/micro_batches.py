"""Micro-batches of limited numbers of tokens, and the segments that their sequences share.

In a causal model, hidden states depend only on earlier tokens, so equal beginnings have equal
hidden states. Each shared segment is computed once and counts once.

Rollouts whose sequences share a beginning are a family. A family stays together if it fits.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

Rollout = list[int]  # the indices of its sequences
MIN_SHARED = 8
"""Tokens of the shortest shared segment, except for complete prompts. Each level of the tree costs
one more attention call per layer."""


def in_sample_order(
    values: Tensor, partition: Sequence[Sequence[int]], lengths: Sequence[int]
) -> Tensor:
    """Reorders the values of all micro-batches' tokens to the order of the samples.

    Args:
        values: [tokens, …], micro-batch by micro-batch.
        partition: For each micro-batch, its samples.
        lengths: For each sample, its number of tokens.
    """
    order = list(chain.from_iterable(partition))
    lengths_in_order = [lengths[sample] for sample in order]
    rows_in_order = values.split(lengths_in_order)
    rows_by_sample = dict(zip(order, rows_in_order, strict=True))
    return torch.cat([rows_by_sample[sample] for sample in range(len(order))])


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens that one or more sequences have at the same position, after the same tokens."""

    sequence: int
    """A sequence that contains the segment."""
    start: int
    """Position of the first token in its sequences."""
    length: int
    """Number of tokens."""
    parent: int
    """Index of the segment before it; -1 at the start of a sequence."""


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """Sequences as paths through segments, in depth-first order: a parent precedes its subtree."""

    segments: tuple[Segment, ...]
    paths: tuple[tuple[int, ...], ...]
    """Per sequence, its segments in order; the last may extend past the sequence."""
    total_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]

    @classmethod
    def apart(cls, total_lengths: Iterable[int], response_lengths: Sequence[int]) -> "PrefixTree":
        """Returns a tree of sequences that share nothing: one segment each."""
        totals = tuple(total_lengths)
        segments = [
            Segment(sequence=sequence, start=0, length=total, parent=-1)
            for sequence, total in enumerate(totals)
        ]
        paths = [(sequence,) for sequence in range(len(totals))]
        return cls(
            segments=tuple(segments),
            paths=tuple(paths),
            total_lengths=totals,
            response_lengths=tuple(response_lengths),
        )

    @classmethod
    def of(
        cls, tokens: Sequence[Sequence[int] | Tensor], response_lengths: Sequence[int]
    ) -> "PrefixTree":
        """Returns a tree that shares beginnings that are complete prompts or long enough.

        Args:
            tokens: Token ids per sequence, prompt and response.
            response_lengths: Response tokens per sequence.
        """
        ids = [np.asarray(sequence, dtype=">i8") for sequence in tokens]
        # the bytes of big-endian numbers sort like the numbers
        keys = [sequence.tobytes() for sequence in ids]
        order = sorted(range(len(ids)), key=keys.__getitem__)
        continued_by = _continuations(ids, order)
        roots = [sequence for sequence in order if sequence not in continued_by]
        segments, leaves = _grow(ids, response_lengths, roots)
        paths = []
        for sequence in range(len(ids)):
            leaf = leaves[continued_by.get(sequence, sequence)]
            paths.append(_path(segments, leaf, len(ids[sequence])))
        tree = cls(
            segments=tuple(segments),
            paths=tuple(paths),
            total_lengths=tuple(map(len, ids)),
            response_lengths=tuple(response_lengths),
        )
        if tree.is_shared:
            return tree
        return cls.apart(tree.total_lengths, response_lengths)

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


def _continuations(ids: Sequence[np.ndarray], order: Sequence[int]) -> dict[int, int]:
    """Maps a sequence that is the beginning of others to the longest of these.

    Args:
        ids: Token ids per sequence.
        order: The sequences, sorted by their token ids.
    """
    continued_by: dict[int, int] = {}
    # a sequence that others continue is sorted directly before one of them
    for left, right in reversed(list(pairwise(order))):
        if _common(ids[left], ids[right]) == len(ids[left]):
            continued_by[left] = continued_by.get(right, right)
    return continued_by


def _grow(
    ids: Sequence[np.ndarray], response_lengths: Sequence[int], roots: list[int]
) -> tuple[list[Segment], dict[int, int]]:
    """Divides sequences into segments, depth first.

    Returns:
        The segments, and the last segment per sequence.
    """
    segments: list[Segment] = []
    leaves: dict[int, int] = {}
    # (sequences with the same first `start` tokens, start, the segment before it)
    todo = [(roots, 0, -1)]
    while todo:
        sequences, start, parent = todo.pop()
        first = sequences[0]
        is_leaf = len(sequences) == 1
        # The sequences are sorted: all share the common beginning of the first and the last.
        end = len(ids[first]) if is_leaf else _common(ids[first], ids[sequences[-1]])
        is_segment = is_leaf or end - start >= MIN_SHARED
        if start == 0 and not is_segment:
            is_segment = _holds_prompts(ids, response_lengths, sequences, end)
        if is_segment:
            segments.append(Segment(sequence=first, start=start, length=end - start, parent=parent))
            start = end
            parent = len(segments) - 1
        if is_leaf:
            leaves[first] = parent
            continue
        branches: dict[int, list[int]] = {}
        for sequence in sequences:
            next_token = int(ids[sequence][end])
            branches.setdefault(next_token, []).append(sequence)
        for branch in reversed(branches.values()):
            todo.append((branch, start, parent))
    return segments, leaves


def _holds_prompts(
    ids: Sequence[np.ndarray], response_lengths: Sequence[int], sequences: Sequence[int], end: int
) -> bool:
    """Whether the first `end` tokens, at least one, include the prompts of all these sequences."""
    longest_prompt = max(len(ids[number]) - response_lengths[number] for number in sequences)
    return end > 0 and end >= longest_prompt


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Returns the length of the common beginning."""
    shorter = min(len(left), len(right))
    differs = left[:shorter] != right[:shorter]
    if not differs.any():
        return shorter
    return int(differs.argmax())


def _path(segments: Sequence[Segment], leaf: int, length: int) -> tuple[int, ...]:
    """Returns the segments up to `leaf` that hold the first `length` tokens."""
    path = []
    while leaf >= 0:
        if segments[leaf].start < length:
            path.append(leaf)
        leaf = segments[leaf].parent
    return tuple(reversed(path))


def token_budget_partitions(
    trees: Sequence[PrefixTree], max_tokens: int, rollouts: Sequence[Sequence[int]] | None = None
) -> list[list[list[int]]]:
    """Plans micro-batches of at most `max_tokens` for every data-parallel rank.

    First-fit decreasing of families on each rank. A family over the budget is divided into
    rollouts. All ranks get the same number of micro-batches: if a rank needs fewer, its fullest are
    split. A rollout over the budget is the only one in its micro-batch.

    Args:
        trees: The sequences per rank.
        max_tokens: The token budget of a micro-batch.
        rollouts: Per rank, the rollout number per sequence; sequences of one rollout stay
            together. If None, each sequence is a separate rollout.

    Returns:
        Indices of sequences, per rank and micro-batch.
    """
    if rollouts is None:
        rollouts = [range(len(tree)) for tree in trees]
    plans = []
    for tree, numbers in zip(trees, rollouts, strict=True):
        plans.append(_first_fit_decreasing(tree, numbers, max_tokens))
    count = max(map(len, plans))
    for plan in plans:
        while len(plan) < count:
            _split_fullest(plan)
    partitions = []
    for plan in plans:
        partitions.append([planned.samples for planned in plan])
    return partitions


def load_of(tree: PrefixTree, samples: Sequence[int]) -> int:
    """Returns the size that a token budget limits: the maximum of computed and response tokens."""
    return _Planned(tree=tree).add([list(samples)]).load


@dataclass(kw_only=True, eq=False)
class _Planned:
    """A micro-batch to which rollouts are added."""

    tree: PrefixTree
    rollouts: list[Rollout] = field(default_factory=list)
    segments: set[int] = field(default_factory=set)
    """Segments that the rollouts consist of."""
    tokens: int = 0
    """Computed tokens: the tokens of the segments."""
    responses: int = 0
    """Response tokens; a shared response token counts once per sequence, as in the output layer."""

    @property
    def load(self) -> int:
        return max(self.tokens, self.responses)

    @property
    def samples(self) -> list[int]:
        return sorted(chain(*self.rollouts))

    def add(self, rollouts: Sequence[Rollout]) -> "_Planned":
        """Adds rollouts and returns the micro-batch."""
        self.tokens, self.responses = self._sizes_with(rollouts)
        self.rollouts += rollouts
        self.segments |= _segments(self.tree, rollouts)
        return self

    def load_with(self, rollouts: Sequence[Rollout]) -> int:
        """Returns the load with more rollouts; an upper bound if they share no segment."""
        if self.segments.isdisjoint(_segments(self.tree, rollouts)):
            return self.load + _Planned(tree=self.tree).add(rollouts).load
        return max(self._sizes_with(rollouts))

    def _sizes_with(self, rollouts: Sequence[Rollout]) -> tuple[int, int]:
        """Returns computed tokens and response tokens with more rollouts."""
        new_segments = _segments(self.tree, rollouts) - self.segments
        responses = sum(self.tree.response_lengths[sample] for sample in chain(*rollouts))
        return self.tokens + _tokens(self.tree, new_segments), self.responses + responses


def _segments(tree: PrefixTree, rollouts: Iterable[Rollout]) -> set[int]:
    """Returns the segments of rollouts."""
    return set(chain.from_iterable(tree.paths[sample] for sample in chain(*rollouts)))


def _tokens(tree: PrefixTree, segments: Iterable[int]) -> int:
    """Returns the number of tokens of segments."""
    return sum(tree.segments[segment].length for segment in segments)


def _split_fullest(plan: list[_Planned]) -> None:
    """Replaces the fullest micro-batch of several rollouts by two halves."""
    divisible = [planned for planned in plan if len(planned.rollouts) > 1]
    fullest = max(divisible, key=lambda planned: planned.load)
    half = len(fullest.rollouts) // 2
    plan.remove(fullest)
    plan.append(_Planned(tree=fullest.tree).add(fullest.rollouts[:half]))
    plan.append(_Planned(tree=fullest.tree).add(fullest.rollouts[half:]))


def _families(tree: PrefixTree, numbers: Sequence[int]) -> list[list[Rollout]]:
    """Groups rollouts that begin with the same segment.

    `numbers` has the rollout number per sample.
    """
    samples_of: dict[int, Rollout] = {}
    for sample, number in enumerate(numbers):
        samples_of.setdefault(number, []).append(sample)
    # neighbors in the tree stay neighbors when a family must be divided
    rollouts = sorted(samples_of.values(), key=lambda rollout: (tree.paths[rollout[0]], rollout[0]))
    families: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        root = tree.paths[rollout[0]][0]
        families.setdefault(root, []).append(rollout)
    return sorted(families.values(), key=min)


def _first_fit_decreasing(
    tree: PrefixTree, numbers: Sequence[int], max_tokens: int
) -> list[_Planned]:
    """Puts each family, largest first, into the first micro-batch with enough space."""
    loads = []
    for family in _families(tree, numbers):
        loads.append((load_of(tree, list(chain(*family))), family))
    loads.sort(key=lambda pair: pair[0], reverse=True)
    items: list[list[Rollout]] = []
    for load, family in loads:
        if load <= max_tokens:
            items.append(family)
        else:
            items += [[rollout] for rollout in family]
    plan: list[_Planned] = []
    space = np.full(len(items), -np.inf)  # tokens left in each micro-batch
    uses: Counter[int] = Counter()
    for item in items:
        uses.update(_segments(tree, item))
    for item in items:
        # Segments that no other item has are new in every micro-batch. In most cases an item adds
        # only these, so that the comparison with `space` leaves few micro-batches to try.
        unshared = [segment for segment in _segments(tree, item) if uses[segment] == 1]
        needed = _tokens(tree, unshared)
        for index in np.flatnonzero(space >= needed).tolist():
            if plan[index].load_with(item) <= max_tokens:
                break
        else:
            index = len(plan)
            plan.append(_Planned(tree=tree))
        space[index] = max_tokens - plan[index].add(item).tokens
    return plan
