"""Rows of K tokens: how the packed tokens of a chunk of sequences become blocks, and packed tokens again.

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


@dataclass(frozen=True)
class PackedChunk:
    """Some whole sequences of a batch, as packed tokens and the rows that they lie in."""

    train_N: Tensor
    """Log-probs of the training policy; what follows the chunk's last token is of other sequences, or padding."""
    rollout_N: Tensor
    """Log-probs of the rollout policy; NaN where the sample has none."""
    mask_N: Tensor
    """Of any dtype, nonzero at the tokens of the loss."""
    rows: "Rows"
    """Where the sequences lie."""
    first: int
    """Number of the chunk's first sequence in the batch."""

    @property
    def working_dtype(self) -> torch.dtype:
        """What the correction is computed in: float32, or float64 where log-probs are."""
        return torch.promote_types(torch.promote_types(self.train_N.dtype, self.rollout_N.dtype), torch.float32)

    def blocks(self) -> Chunk:
        """The chunk as blocks, in the working precision."""
        rows, working = self.rows, self.working_dtype
        return Chunk(
            train_RK=rows.to_blocks(self.train_N).to(working),
            rollout_RK=rows.to_blocks(self.rollout_N).to(working),
            mask_RK=rows.mask_foreign_(_indicator(rows.to_blocks(self.mask_N), working)),
            sequence_R=rows.owner_R,
            offset_R=rows.offset_R,
            first=self.first,
            count=rows.end_S.numel(),
        )


class Rows:
    """Which rows of K tokens the sequences of a chunk lie in.

    First come the rows in order, each owned by the sequence of its first token; then, for each sequence, its boundary
    row: its first row again, for its tokens in a row of another sequence.
    """

    def __init__(self, end_S: Tensor, length_S: Tensor, tokens: int, width: int, aligned: bool) -> None:
        """Finds the rows and their owners.

        Args:
            end_S: Where each sequence of the chunk ends, in tokens of the chunk.
            length_S: Its length in tokens.
            tokens: Number of tokens of the chunk.
            width: K.
            aligned: Whether every row is one sequence's alone.
        """
        self.end_S, self.length_S, self.width = end_S, length_S, width
        self.tokens, self.aligned = tokens, aligned
        self.full_rows = max(-(-tokens // width), 1)
        """Number of rows without the boundary rows."""
        self.padded_len = self.full_rows * width
        """Tokens that the rows hold: the last row may end after the chunk's last token."""
        device, count = end_S.device, end_S.numel()
        self.start_S = start_S = end_S - length_S
        row_starts = torch.arange(0, self.padded_len, width, device=device)
        owner_R = torch.searchsorted(self.end_S, row_starts, right=True).clamp_max_(count - 1)
        if not self.aligned:
            self._boundary_S = start_S.div(width, rounding_mode="floor").clamp_max_(self.full_rows - 1)
            boundary = self._boundary_S * width
            row_starts = torch.cat([row_starts, torch.where(boundary < start_S, boundary, boundary - width)])
            owner_R = torch.cat([owner_R, torch.arange(count, device=device)])
        self.owner_R = owner_R
        """Which sequence of the chunk owns the row."""
        self.offset_R = row_starts - start_S.index_select(0, owner_R)
        """Where in its sequence the row begins, in tokens; below 0 where another sequence's tokens come first."""

    def to_blocks(self, flat_N: Tensor) -> Tensor:
        """Tokens of the chunk as blocks [R, K], with the rows that sequences begin in twice; a view where it can be."""
        gap = self.padded_len - flat_N.numel()
        if gap > 0:
            flat_N = torch.cat([flat_N, flat_N.new_zeros(gap)])
        rows = flat_N.view(self.full_rows, self.width)
        return rows if self.aligned else torch.cat([rows, rows.index_select(0, self._boundary_S)])

    def mask_foreign_(self, mask_RK: Tensor) -> Tensor:
        """Clears a mask, in place, at tokens of another sequence than the row's owner: each token counts once."""
        if self.aligned:
            return mask_RK
        column = torch.arange(self.width, device=mask_RK.device)
        rows, boundary_rows = mask_RK[: self.full_rows], mask_RK[self.full_rows :]
        rows.view(-1)[self.tokens :].zero_()
        position = self.offset_R[self.full_rows :, None] + column
        boundary_rows.mul_((position >= 0) & (position < self.length_S[:, None]))
        owner_S = self.owner_R.index_select(0, self._boundary_S)
        left_S = self.end_S.index_select(0, owner_S) - self._boundary_S * self.width
        rows.index_copy_(0, self._boundary_S, rows.index_select(0, self._boundary_S) * (column < left_S[:, None]))
        return mask_RK

    def from_blocks(self, blocks_RK: Tensor) -> Tensor:
        """Blocks, 0 at tokens of another sequence than the row's owner, as tokens; the blocks are overwritten."""
        if self.aligned:
            return blocks_RK.view(-1)
        numbers = blocks_RK.view(torch.uint8) if blocks_RK.dtype == torch.bool else blocks_RK
        numbers[: self.full_rows].index_add_(0, self._boundary_S, numbers[self.full_rows :])
        return blocks_RK[: self.full_rows].view(-1)


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


def _indicator(mask: Tensor, working: torch.dtype) -> Tensor:
    """Returns 1.0 where a mask of any dtype is not 0, in new memory."""
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8).to(working)
    return torch.ne(mask, 0, out=torch.empty_like(mask, dtype=working))
