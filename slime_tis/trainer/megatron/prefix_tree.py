"""A tree of the segments that the sequences of a micro-batch share; each segment is computed once.

Siblings of a group share a prompt, turns of a conversation share the previous turns. Hidden states of a causal model
depend only on earlier tokens, so that equal beginnings have equal hidden states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from torch import Tensor

MIN_SHARED = 8
"""Shortest beginning within prompts, or segment of a response, that is shared: each level costs an attention per
layer."""
MAX_DEPTH = 8
"""Levels of the tree: a token's attention is merged from this number of parts."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens that one or more sequences have at the same position, after the same tokens."""

    sequence: int
    """A sequence that contains them."""
    start: int
    """Position of the first."""
    length: int
    parent: int
    """The segment before them; -1 at the start of a sequence."""
    depth: int
    """Number of segments before them."""


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """Sequences as paths through segments. Segments are in depth-first order: a parent before its subtree."""

    segments: tuple[Segment, ...]
    paths: tuple[tuple[int, ...], ...]
    """The segments of each sequence, from its start; a sequence may end within the last."""
    total_lengths: tuple[int, ...]
    """Tokens of each sequence."""
    response_lengths: tuple[int, ...]
    """Tokens of each sequence's response."""

    @classmethod
    def apart(cls, total_lengths: Iterable[int], response_lengths: Sequence[int]) -> PrefixTree:
        """Sequences that share nothing: one segment each."""
        totals = tuple(total_lengths)
        return cls(
            segments=tuple(
                Segment(sequence=sequence, start=0, length=total, parent=-1, depth=0)
                for sequence, total in enumerate(totals)
            ),
            paths=tuple((sequence,) for sequence in range(len(totals))),
            total_lengths=totals,
            response_lengths=tuple(response_lengths),
        )

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int] | Tensor], response_lengths: Sequence[int]) -> PrefixTree:
        """Shares beginnings that are whole prompts, or long enough.

        In lexicographic order sequences with a common beginning are neighbors. A sequence that another one continues
        is a part of that one's path; the others are split where their common beginning ends.

        Args:
            tokens: ids of each sequence, prompt and response.
            response_lengths: tokens of each response.
        """
        ids = [np.asarray(sequence, dtype=">i8") for sequence in tokens]  # big endian: bytes sort as numbers
        lengths = [len(sequence) for sequence in ids]
        order = sorted(range(len(ids)), key=[sequence.tobytes() for sequence in ids].__getitem__)
        common = [0, *(_common(ids[left], ids[right]) for left, right in pairwise(order))]
        longest, of_longest, continued_by = _without_continued(order, common, lengths)
        prompts = [lengths[sequence] - response_lengths[sequence] for sequence in longest]
        segments, leaves = _grow(longest, of_longest, lengths, prompts)
        if sum(segment.length for segment in segments) == sum(lengths):
            return cls.apart(lengths, response_lengths)
        paths = []
        for sequence, length in enumerate(lengths):
            path, segment = [], leaves[continued_by.get(sequence, sequence)]
            while segment >= 0:
                if segments[segment].start < length:
                    path.append(segment)
                segment = segments[segment].parent
            paths.append(tuple(reversed(path)))
        return cls(
            segments=tuple(segments),
            paths=tuple(paths),
            total_lengths=tuple(lengths),
            response_lengths=tuple(response_lengths),
        )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.paths)

    @property
    def tokens(self) -> int:
        """Number of computed tokens: the tokens of all segments."""
        return sum(segment.length for segment in self.segments)

    @property
    def is_shared(self) -> bool:
        """Whether a token belongs to several sequences."""
        return self.tokens < sum(self.total_lengths)

    @cached_property
    def ends(self) -> list[int]:
        """The first segment after each one's subtree."""
        ends = list(range(1, len(self.segments) + 1))
        for index in reversed(range(len(self.segments))):
            parent = self.segments[index].parent
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[index])
        return ends

    def families(self) -> list[list[int]]:
        """The sequences grouped by their first segment; sequences that share most are adjacent."""
        families: dict[int, list[int]] = {}
        for sequence in sorted(range(len(self)), key=lambda sequence: (self.paths[sequence], sequence)):
            root = self.paths[sequence][0] if self.paths[sequence] else -1 - sequence
            families.setdefault(root, []).append(sequence)
        return sorted(families.values(), key=min)


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the common beginning of two sequences."""
    shorter = min(len(left), len(right))
    differs = left[:shorter] != right[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _without_continued(
    order: list[int], common: list[int], lengths: list[int]
) -> tuple[list[int], list[int], dict[int, int]]:
    """Separates sequences that another sequence continues.

    Returns:
        (sequences that none continues, the length of the beginning that each shares with the previous one, and for
        each of the other sequences one that continues it).
    """
    continued_by: dict[int, int] = {}
    for left, right, shared in reversed(list(zip(order, order[1:], common[1:], strict=False))):
        if shared == lengths[left]:
            continued_by[left] = continued_by.get(right, right)
    longest, of_longest, least = [], [], 0
    for sequence, shared in zip(order, common, strict=True):
        least = min(least, shared)
        if sequence not in continued_by:
            longest.append(sequence)
            of_longest.append(least)
            least = 2**62
    return longest, of_longest, continued_by


def _grow(
    longest: list[int], common: list[int], lengths: list[int], prompts: list[int]
) -> tuple[list[Segment], dict[int, int]]:
    """The segments of sequences in lexicographic order, and the last segment of each sequence."""
    segments: list[Segment] = []
    leaves: dict[int, int] = {}

    def add(sequence: int, start: int, end: int, parent: int) -> int:
        depth = 0 if parent < 0 else segments[parent].depth + 1
        segments.append(Segment(sequence=sequence, start=start, length=end - start, parent=parent, depth=depth))
        return len(segments) - 1

    todo = [(0, len(longest), 0, -1)]
    while todo:
        first, last, start, parent = todo.pop()
        sequence = longest[first]
        if last - first == 1:
            leaves[sequence] = add(sequence, start, lengths[sequence], parent)
            continue
        shared = min(common[first + 1 : last])
        has_room = parent < 0 or segments[parent].depth + 1 < MAX_DEPTH
        holds_prompts = start == 0 < shared and shared >= max(prompts[first:last])
        if has_room and (holds_prompts or shared - start >= MIN_SHARED):
            start, parent = shared, add(sequence, start, shared, parent)
        cuts = [first, *(index for index in range(first + 1, last) if common[index] == shared), last]
        todo += [(*ends, start, parent) for ends in reversed(list(pairwise(cuts)))]
    return segments, leaves
