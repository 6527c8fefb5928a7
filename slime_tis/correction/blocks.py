"""Rows of K tokens: how packed tokens of a chunk of sequences are cut into blocks, and joined again.

The block layout: each row is owned by one sequence, what is not the owner's is masked. A row is summed in the
working precision, rows are added into sequences in float64: accurate, without a loop over sequences, and without
a host synchronisation. Rows are cut where the tokens lie; one that two sequences share is taken once for each.

Shapes: suffix _RK is [rows, row width], _R per row, _S per sequence, _N per token of the chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ROW_WIDTHS = (128, 64, 32, 16)
WIDEST_ROW = 256
LONGEST_SEQUENCE = 1 << 32


@dataclass(frozen=True)
class Chunk:
    """Some whole sequences of a batch, as blocks."""

    train_RK: Tensor
    """Log-probs of the training policy; anything where masked."""
    rollout_RK: Tensor
    """Log-probs of the rollout policy; NaN where the sample has none."""
    mask_RK: Tensor
    """1.0 at valid tokens, 0.0 elsewhere and at tokens of other sequences."""
    sequence_R: Tensor
    """Which sequence of the chunk owns the row; a sequence's rows are in order, but not next to each other."""
    offset_R: Tensor
    """Where in its sequence the row begins, in tokens; below 0 where another sequence's tokens come first."""
    first: int
    """Number of the chunk's first sequence in the batch."""
    count: int
    """Number of sequences in the chunk."""

    def order(self) -> Tensor:
        """The rows, sequence by sequence, as [R] indices."""
        return (self.sequence_R * LONGEST_SEQUENCE + self.offset_R).argsort()


class Rows:
    """Which rows of K tokens the sequences of a chunk lie in.

    First come the rows as they lie, each owned by the sequence of its first token; then, for each sequence, the
    row it begins in once more, for those of its tokens that another sequence owns the row of.
    """

    def __init__(self, end_S: Tensor, length_S: Tensor, tokens: int, width: int, aligned: bool) -> None:
        """Args:
        end_S: Where each sequence of the chunk ends, in tokens of the chunk.
        length_S: Its length.
        tokens: Of the chunk.
        width: K.
        aligned: Whether every row is one sequence's alone.
        """
        self._end_S, self._length_S, self._width = end_S, length_S, width
        self.tokens, self.aligned = tokens, aligned
        self._lying = max(-(-tokens // width), 1)
        self.held = self._lying * width
        """Tokens of the rows as they lie: the last row may end after the chunk's last token."""
        device, count = end_S.device, end_S.numel()
        start_S = self._end_S - self._length_S
        row_starts = torch.arange(0, self.held, width, device=device)
        owner_R = torch.searchsorted(self._end_S, row_starts, right=True).clamp_max_(count - 1)
        if not self.aligned:
            self._begins_S = start_S.div(width, rounding_mode="floor").clamp_max_(self._lying - 1)
            again = self._begins_S * width
            row_starts = torch.cat([row_starts, torch.where(again < start_S, again, again - width)])
            owner_R = torch.cat([owner_R, torch.arange(count, device=device)])
        self.owner_R = owner_R
        """Which sequence of the chunk owns the row."""
        self.offset_R = row_starts - start_S.index_select(0, owner_R)
        """Where in its sequence the row begins, in tokens; below 0 where another sequence's tokens come first."""

    def cut(self, flat_N: Tensor) -> Tensor:
        """Tokens of the chunk as blocks, with the rows that sequences begin in twice."""
        rows = flat_N.view(self._lying, self._width)
        return rows if self.aligned else torch.cat([rows, rows.index_select(0, self._begins_S)])

    def own(self, mask_RK: Tensor) -> Tensor:
        """Clears a mask, in place, where a token is another sequence's, or its own in an earlier row."""
        if self.aligned:
            return mask_RK
        column = torch.arange(self._width, device=mask_RK.device)
        lying, again = mask_RK[: self._lying], mask_RK[self._lying :]
        lying.view(-1)[self.tokens :].zero_()
        position = self.offset_R[self._lying :, None] + column
        again.mul_((position >= 0) & (position < self._length_S[:, None]))
        owner_S = self.owner_R.index_select(0, self._begins_S)
        left_S = self._end_S.index_select(0, owner_S) - self._begins_S * self._width
        lying.index_copy_(0, self._begins_S, lying.index_select(0, self._begins_S) * (column < left_S[:, None]))
        return mask_RK

    def join(self, blocks_RK: Tensor) -> Tensor:
        """Blocks, 0 where they are not the owner's, as the tokens of the chunk's rows; takes the blocks over."""
        if self.aligned:
            return blocks_RK.view(-1)
        numbers = blocks_RK.view(torch.uint8) if blocks_RK.dtype == torch.bool else blocks_RK
        numbers[: self._lying].index_add_(0, self._begins_S, numbers[self._lying :])
        return blocks_RK[: self._lying].view(-1)


def row_width(lengths: list[int]) -> int:
    """One row for short sequences of one length, a divisor of longer ones; else an eighth of the average at most."""
    if lengths and min(lengths) == max(lengths) > 0:
        length = lengths[0]
        if length <= WIDEST_ROW:
            return length
        divisor = next((width for width in range(WIDEST_ROW, WIDEST_ROW // 4 - 1, -1) if length % width == 0), None)
        if divisor is not None:
            return divisor
    average = sum(lengths) / max(len(lengths), 1)
    return next((width for width in ROW_WIDTHS if average >= 8 * width), ROW_WIDTHS[-1])
