"""Lists of sequences, padded [B, T] batches and packed tokens, all read as blocks, and written back.

Blocks come in chunks that fit a CPU cache, so that a chunk is read from memory once however many operations
follow.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from slime_tis.correction.blocks import PackedChunk, Rows, row_width
from slime_tis.correction.inputs import LogProbs, checked_lengths, checked_lists, checked_tensors

CPU_CHUNK_TOKENS = 1 << 18
"""Tokens of a chunk on a CPU: a dozen float32 temporaries of this size live in its caches."""
GPU_CHUNK_TOKENS = 1 << 24
"""Tokens of a chunk elsewhere, where the number of launched kernels is what costs."""


Sequences = Tensor | list[Tensor]
"""One value per token: packed [N], sequence after sequence, or a list of [T_i]."""


class Layout:
    """A batch, read as chunks of blocks, and the way back."""

    def __init__(
        self,
        tokens: tuple[Sequences, Sequences, Sequences],
        device: torch.device,
        lengths: list[int],
        shape: tuple[int, ...] | None,
    ) -> None:
        """Lays the tokens out in rows.

        Args:
            tokens: Train and rollout log-probs, and the loss mask.
            device: Device of the tokens.
            lengths: Tokens of each sequence.
            shape: Shape of the results; None for a list of sequences.
        """
        self._tokens, self.lengths, self._shape = tokens, lengths, shape
        self.device = device
        self._width = row_width(lengths)
        self._spans = _spans(lengths, CPU_CHUNK_TOKENS if self.device.type == "cpu" else GPU_CHUNK_TOKENS)
        self._rows = list(self._rows_of_chunks()) if lengths else []

    def chunks(self) -> Iterator[PackedChunk]:
        """The batch as chunks of whole sequences, in order."""
        start = 0
        for (first, last), rows in zip(self._spans, self._rows, strict=True):
            train, rollout, mask = (_tokens_of(x, first, last, start, rows) for x in self._tokens)
            yield PackedChunk(train_N=train, rollout_N=rollout, mask_N=mask, rows=rows, first=first)
            start += rows.tokens

    def _rows_of_chunks(self) -> Iterator[Rows]:
        """The rows of each chunk."""
        ends = list(accumulate(self.lengths))
        aligned = all(length % self._width == 0 and length for length in self.lengths)
        end_S, length_S = torch.tensor([ends, self.lengths]).to(self.device, non_blocking=True)
        start = 0
        for first, last in self._spans:
            tokens = ends[last - 1] - start
            yield Rows(end_S[first:last] - start, length_S[first:last], tokens, self._width, aligned)
            start += tokens

    def restore(self, blocks: list[Tensor], dtype: torch.dtype) -> Tensor | list[Tensor]:
        """Blocks of all chunks, in order and 0 where masked, in the layout of the input; `dtype` is theirs."""
        parts = [rows.from_blocks(block)[: rows.tokens] for rows, block in zip(self._rows, blocks, strict=True)]
        if not parts:
            parts = [torch.empty(0, dtype=dtype, device=self.device)]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return list(flat.split(self.lengths)) if self._shape is None else flat.view(self._shape)


def as_layout(
    train_log_probs: LogProbs, rollout_log_probs: LogProbs, loss_mask: LogProbs, lengths: Sequence[int] | None
) -> Layout:
    """The layout of the inputs of `correct`.

    Raises:
        ValueError: if the three inputs are not of one layout, number of sequences and lengths.
    """
    if not isinstance(train_log_probs, Tensor):
        if lengths is not None:
            raise ValueError(
                "lengths are given but the log-probs are a list; pass lengths with packed [N] tensors only."
            )
        lists = checked_lists(train_log_probs, rollout_log_probs, loss_mask)
        device = lists[0][0].device if lists[0] else torch.device("cpu")
        return Layout(lists, device, [x.numel() for x in lists[0]], None)
    tensors = checked_tensors(train_log_probs, rollout_log_probs, loss_mask)
    shape = tuple(train_log_probs.shape)
    if lengths is None:
        if len(shape) != 2:
            raise ValueError(f"the log-probs have shape {shape}; pass [B, T], or [N] with lengths.")
        train, rollout, mask = (x.reshape(-1) for x in tensors)
        return Layout((train, rollout, mask), train.device, [shape[1]] * shape[0], shape)
    return Layout(tensors, train_log_probs.device, checked_lengths(lengths, shape), shape)


def _tokens_of(tokens: Sequences, first: int, last: int, start: int, rows: Rows) -> Tensor:
    """The tokens of sequences first … last, which begin at `start`, and what follows them in their last row.

    Packed tokens are a view, which ends where the batch does; lists become one copy, padded to whole rows.
    """
    if isinstance(tokens, Tensor):
        return tokens[start : start + rows.padded_len]
    return torch.cat([*tokens[first:last], tokens[first].new_zeros(rows.padded_len - rows.tokens)])


def _spans(lengths: list[int], most: int) -> list[tuple[int, int]]:
    """Consecutive [first, last) of sequences, each with at most `most` tokens or a single sequence."""
    spans, first, tokens = [], 0, 0
    for i, length in enumerate(lengths):
        if i > first and tokens + length > most:
            spans.append((first, i))
            first, tokens = i, 0
        tokens += length
    return [*spans, (first, len(lengths))] if lengths else []
