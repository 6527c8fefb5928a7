"""A tree of the segments that the sequences of a micro-batch share; each segment is computed once.

Hidden states of a causal model depend only on earlier tokens, so that equal beginnings have equal hidden states.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

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
