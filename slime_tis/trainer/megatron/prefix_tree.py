"""What the sequences of a micro-batch have in common: a tree of segments, each of which is computed once.

Siblings of a group begin with the same prompt, turns of a conversation with the turns before them. Hidden states of a
causal model at a token depend on the tokens up to it alone, so that equal beginnings have equal hidden states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from torch import Tensor

LEAST_SHARED = 8
"""Tokens of a beginning that are shared although the prompts go on: each level costs every layer another attention."""
DEEPEST = 8
"""Levels of the tree: attention of a token is put together from as many parts."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens that one or more sequences have at the same place, after the same tokens."""

    sequence: int
    """One that has them."""
    start: int
    """Their position there."""
    length: int
    """How many they are."""
    parent: int
    """The segment before them; -1 at the start of a sequence."""
    depth: int
    """Segments before them."""


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """Sequences as paths through segments. Segments are in depth-first order: a parent, then all that follow on it."""

    segments: tuple[Segment, ...]
    paths: tuple[tuple[int, ...], ...]
    """The segments of each sequence, from its start; a sequence may end within the last."""
    total_lengths: tuple[int, ...]
    """Tokens of each sequence."""
    response_lengths: tuple[int, ...]
    """Tokens among them that are to be predicted."""

    @classmethod
    def apart(cls, total_lengths: Iterable[int], response_lengths: Sequence[int]) -> PrefixTree:
        """Sequences that share nothing, each a segment of its own."""
        total_lengths = tuple(total_lengths)
        return cls(
            segments=tuple(
                Segment(sequence=sequence, start=0, length=total, parent=-1, depth=0)
                for sequence, total in enumerate(total_lengths)
            ),
            paths=tuple((sequence,) for sequence in range(len(total_lengths))),
            total_lengths=total_lengths,
            response_lengths=tuple(response_lengths),
        )

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int] | Tensor], response_lengths: Sequence[int]) -> PrefixTree:
        """The beginnings that sequences share, wherever they are prompts, or long enough.

        In lexicographic order sequences with a common beginning are neighbours. One that another goes on from is a part
        of that one's path; the others are split where their common beginning ends.

        Args:
            tokens: ids of each sequence, prompt and response.
            response_lengths: tokens of each response.
        """
        ids = [np.asarray(sequence, dtype=">i8") for sequence in tokens]  # its bytes are ordered as its numbers
        lengths = [len(sequence) for sequence in ids]
        order = sorted(range(len(ids)), key=[sequence.tobytes() for sequence in ids].__getitem__)
        common = [0, *(_common(ids[one], ids[other]) for one, other in pairwise(order))]
        longest, of_longest, within = _leave_out_beginnings(order, common, lengths)
        prompts = [lengths[sequence] - response_lengths[sequence] for sequence in longest]
        segments, leaves = _grow(longest, of_longest, lengths, prompts)
        if sum(segment.length for segment in segments) == sum(lengths):
            return cls.apart(lengths, response_lengths)
        paths = []
        for sequence, length in enumerate(lengths):
            path, segment = [], leaves[within.get(sequence, sequence)]
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
        """Sequences."""
        return len(self.paths)

    @property
    def tokens(self) -> int:
        """Tokens of all segments: those that are computed."""
        return sum(segment.length for segment in self.segments)

    @property
    def is_shared(self) -> bool:
        """Whether a token belongs to several sequences."""
        return self.tokens < sum(self.total_lengths)

    @cached_property
    def ends(self) -> list[int]:
        """The first segment after each one that does not follow on it."""
        ends = list(range(1, len(self.segments) + 1))
        for index in reversed(range(len(self.segments))):
            parent = self.segments[index].parent
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[index])
        return ends

    def families(self) -> list[list[int]]:
        """The sequences that have their first segment in common, those that share most side by side."""
        found: dict[int, list[int]] = {}
        for sequence in sorted(range(len(self)), key=lambda sequence: (self.paths[sequence], sequence)):
            found.setdefault(self.paths[sequence][0] if self.paths[sequence] else -1 - sequence, []).append(sequence)
        return sorted(found.values(), key=min)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that two sequences begin with alike."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _leave_out_beginnings(
    order: list[int], common: list[int], lengths: list[int]
) -> tuple[list[int], list[int], dict[int, int]]:
    """(sequences that no other goes on from, what each has in common with the last, of the others one that does)."""
    within: dict[int, int] = {}
    for one, other, shared in reversed(list(zip(order, order[1:], common[1:], strict=False))):
        if shared == lengths[one]:
            within[one] = within.get(other, other)
    longest, of_longest, least = [], [], 0
    for sequence, shared in zip(order, common, strict=True):
        least = min(least, shared)
        if sequence not in within:
            longest.append(sequence)
            of_longest.append(least)
            least = 2**62
    return longest, of_longest, within


def _grow(
    longest: list[int], common: list[int], lengths: list[int], prompts: list[int]
) -> tuple[list[Segment], dict[int, int]]:
    """The segments of sequences in lexicographic order, and the last one of each."""
    segments: list[Segment] = []
    leaves: dict[int, int] = {}
    todo = [(0, len(longest), 0, -1)]
    while todo:
        first, last, start, parent = todo.pop()
        depth = 0 if parent < 0 else segments[parent].depth + 1
        sequence = longest[first]
        if last - first == 1:
            leaves[sequence] = len(segments)
            length = lengths[sequence] - start
            segments.append(Segment(sequence=sequence, start=start, length=length, parent=parent, depth=depth))
            continue
        shared = min(common[first + 1 : last])
        holds_prompts = start == 0 < shared and shared >= max(prompts[first:last])
        if depth < DEEPEST and (holds_prompts or shared - start >= LEAST_SHARED):
            length = shared - start
            segments.append(Segment(sequence=sequence, start=start, length=length, parent=parent, depth=depth))
            start, parent = shared, len(segments) - 1
        cuts = [first, *(place for place in range(first + 1, last) if common[place] == shared), last]
        todo += [(*ends, start, parent) for ends in reversed(list(pairwise(cuts)))]
    return segments, leaves
