"""Lists of sequences, padded [B, T] batches and packed tokens, all read as blocks, and written back.

The block layout: tokens in rows of K, each row owned by one sequence, short rows padded with masked tokens.
A row is summed in the working precision, rows are added into sequences in float64: accurate, without a loop
over sequences, and without a host synchronisation. Blocks come in chunks that fit a CPU cache, so that a chunk
is read from memory once however many operations follow.

Shapes: suffix _RK is [rows, row width], _S is per sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

CPU_CHUNK_TOKENS = 1 << 18
"""Tokens of a chunk on a CPU: a dozen float32 temporaries of this size live in its caches."""
GPU_CHUNK_TOKENS = 1 << 24
"""Tokens of a chunk elsewhere, where the number of launched kernels is what costs."""
ROW_WIDTHS = (128, 64, 32, 16)

LogProbs = Tensor | Sequence[Tensor | None]


@dataclass(frozen=True)
class Chunk:
    """Some whole sequences of a batch, as blocks."""

    train_RK: Tensor
    """Log-probs of the training policy; anything where masked."""
    rollout_RK: Tensor
    """Log-probs of the rollout policy; NaN where the sample has none."""
    mask_RK: Tensor
    """1.0 at valid tokens, 0.0 elsewhere and at padding."""
    sequence_R: Tensor
    """Which sequence of the chunk owns the row, ascending."""
    first: int
    """Number of the chunk's first sequence in the batch."""
    count: int
    """Number of sequences in the chunk."""


class Layout(Protocol):
    """A batch that can be read as chunks of blocks, and the way back."""

    sequences: int
    device: torch.device

    def chunks(self) -> Iterator[Chunk]:
        """The batch as chunks of whole sequences, in order."""

    def restore(self, blocks: list[Tensor]) -> Tensor | list[Tensor]:
        """Blocks of all chunks, in order, in the layout of the input."""


def as_layout(
    train_log_probs: LogProbs, rollout_log_probs: LogProbs, loss_mask: LogProbs, lengths: Sequence[int] | None
) -> Layout:
    """The layout of the inputs of `correct`.

    Raises:
        ValueError: if the three inputs are not of one layout, number of sequences and lengths.
    """
    if not isinstance(train_log_probs, Tensor):
        return SequenceList(train_log_probs, rollout_log_probs, loss_mask)
    if not isinstance(rollout_log_probs, Tensor) or not isinstance(loss_mask, Tensor):
        raise ValueError(
            f"train_log_probs is a tensor but rollout_log_probs is {type(rollout_log_probs).__name__} and "
            f"loss_mask is {type(loss_mask).__name__}; pass three tensors of one shape, or three lists."
        )
    shapes = [tuple(x.shape) for x in (train_log_probs, rollout_log_probs, loss_mask)]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"train_log_probs has shape {shapes[0]}, rollout_log_probs {shapes[1]}, loss_mask {shapes[2]}; "
            f"pass three tensors of one shape."
        )
    if lengths is not None:
        return PackedTokens(train_log_probs, rollout_log_probs, loss_mask, lengths)
    return PaddedBatch(train_log_probs, rollout_log_probs, loss_mask)


class SequenceList:
    """A list of [T_i] tensors; a sample without rollout log-probs is None."""

    def __init__(self, train: Sequence[Tensor | None], rollout: LogProbs, mask: LogProbs) -> None:
        self._train, self._rollout, self._mask = _checked_lists(train, rollout, mask)
        self.sequences = len(self._train)
        self.device = self._train[0].device if self._train else torch.device("cpu")
        self._lengths = [x.numel() for x in self._train]
        self._width = _row_width(self._lengths)
        self._rows = [_row_count(length, self._width) for length in self._lengths]
        self._spans = _spans(self._rows, _chunk_tokens(self.device) // self._width)

    def chunks(self) -> Iterator[Chunk]:
        for first, last in self._spans:
            train = self._blocks(self._train[first:last], first)
            rollout = self._blocks(self._rollout[first:last], first)
            mask = self._blocks(self._mask[first:last], first)
            yield _chunk(train, rollout, mask, self._rows[first:last], first)

    def restore(self, blocks: list[Tensor]) -> list[Tensor]:
        pieces: list[Tensor] = []
        for (first, last), block in zip(self._spans, blocks, strict=True):
            sizes = []
            for length, rows in zip(self._lengths[first:last], self._rows[first:last], strict=True):
                sizes += [length, rows * self._width - length]
            pieces += block.view(-1).split(sizes)[::2]
        return pieces

    def _blocks(self, tensors: list[Tensor], first: int) -> Tensor:
        """Tensors and the padding after each, joined by one copy."""
        gaps = [self._rows[first + i] * self._width - self._lengths[first + i] for i in range(len(tensors))]
        wanted = sorted(set(gaps) - {0})
        padding = dict(zip(wanted, tensors[0].new_zeros(sum(wanted)).split(wanted), strict=True)) if wanted else {}
        pieces = []
        for tensor, gap in zip(tensors, gaps, strict=True):
            pieces.append(tensor)
            if gap:
                pieces.append(padding[gap])
        return torch.cat(pieces).view(-1, self._width)


class PackedTokens:
    """[N] tokens, sequence after sequence, with the lengths of the sequences."""

    def __init__(self, train: Tensor, rollout: Tensor, mask: Tensor, lengths: Sequence[int]) -> None:
        if train.dim() != 1 or any(length < 0 for length in lengths) or sum(lengths) != train.numel():
            raise ValueError(
                f"lengths sum to {sum(lengths)} but the tensors have shape {tuple(train.shape)}; "
                f"pass packed [N] tensors with lengths that sum to N."
            )
        sizes = list(lengths)
        self._empty = train.new_empty(0)
        self._list = SequenceList(*(list(x.split(sizes)) for x in (train, rollout, mask)))
        self.sequences = len(sizes)
        self.device = train.device

    def chunks(self) -> Iterator[Chunk]:
        return self._list.chunks()

    def restore(self, blocks: list[Tensor]) -> Tensor:
        if not blocks:
            return self._empty
        return torch.cat(self._list.restore(blocks))


class PaddedBatch:
    """A [B, T] batch, or any tensor whose last dimension is time."""

    def __init__(self, train: Tensor, rollout: Tensor, mask: Tensor) -> None:
        if train.dim() != 2:
            raise ValueError(f"the log-probs have shape {tuple(train.shape)}; pass [B, T], or [N] with lengths.")
        self._inputs = (train, rollout, mask)
        self.sequences, self._length = train.shape
        self.device = train.device
        self._width = _even_width(self._length)
        self._rows = [_row_count(self._length, self._width)] * self.sequences
        self._spans = _spans(self._rows, _chunk_tokens(self.device) // self._width)

    def chunks(self) -> Iterator[Chunk]:
        for first, last in self._spans:
            train, rollout, mask = (self._blocks(x[first:last]) for x in self._inputs)
            yield _chunk(train, rollout, mask, self._rows[first:last], first)

    def restore(self, blocks: list[Tensor]) -> Tensor:
        if not blocks:
            return self._inputs[0].new_empty(self.sequences, self._length)
        pieces = [
            block.view(last - first, -1)[:, : self._length]
            for (first, last), block in zip(self._spans, blocks, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _blocks(self, x: Tensor) -> Tensor:
        gap = _row_count(self._length, self._width) * self._width - self._length
        return (pad(x, (0, gap)) if gap else x).reshape(-1, self._width)


def _checked_lists(
    train: Sequence[Tensor | None], rollout: LogProbs, mask: LogProbs
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The three lists, None in the rollout list replaced by NaN."""
    if isinstance(rollout, Tensor) or isinstance(mask, Tensor):
        raise ValueError("train_log_probs is a list; pass rollout_log_probs and loss_mask as lists too.")
    if not len(train) == len(rollout) == len(mask):
        raise ValueError(
            f"train_log_probs has {len(train)} sequences, rollout_log_probs {len(rollout)}, "
            f"loss_mask {len(mask)}; pass one of each per sequence."
        )
    sizes = [x.numel() for x in train]  # type: ignore[union-attr]
    missing = [i for i, x in enumerate(rollout) if x is None]
    if missing:
        absent = [sizes[i] for i in missing]
        nan = torch.full((sum(absent),), torch.nan, device=train[0].device).split(absent)  # type: ignore[union-attr]
        filled = dict(zip(missing, nan, strict=True))
        rollout = [filled[i] if x is None else x for i, x in enumerate(rollout)]
    rollout_sizes = [x.numel() for x in rollout]  # type: ignore[union-attr]
    mask_sizes = [x.numel() for x in mask]  # type: ignore[union-attr]
    if not sizes == rollout_sizes == mask_sizes:
        i = next(i for i, three in enumerate(zip(sizes, rollout_sizes, mask_sizes, strict=True)) if len(set(three)) > 1)
        raise ValueError(
            f"sequence {i}: train_log_probs has {sizes[i]} tokens, rollout_log_probs {rollout_sizes[i]}, "
            f"loss_mask {mask_sizes[i]}; pass tensors of one length per sequence."
        )
    return list(train), list(rollout), list(mask)  # type: ignore[arg-type]


def _chunk(train: Tensor, rollout: Tensor, mask: Tensor, rows: list[int], first: int) -> Chunk:
    """Blocks in their working precision: float64 when an input is, float32 otherwise."""
    working = torch.promote_types(torch.promote_types(train.dtype, rollout.dtype), torch.float32)
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    owners = torch.arange(len(rows), device=train.device)
    counts = torch.tensor(rows, device=train.device)
    return Chunk(
        train_RK=train.to(working),
        rollout_RK=rollout.to(working),
        mask_RK=mask.to(working, copy=True),
        sequence_R=torch.repeat_interleave(owners, counts, output_size=sum(rows)),
        first=first,
        count=len(rows),
    )


def _spans(rows: list[int], most: int) -> list[tuple[int, int]]:
    """Consecutive [first, last) of sequences, each with at most `most` rows or a single sequence."""
    spans, first, held = [], 0, 0
    for i, count in enumerate(rows):
        if i > first and held + count > most:
            spans.append((first, i))
            first, held = i, 0
        held += count
    return [*spans, (first, len(rows))] if rows else []


def _chunk_tokens(device: torch.device) -> int:
    return CPU_CHUNK_TOKENS if device.type == "cpu" else GPU_CHUNK_TOKENS


def _row_width(lengths: list[int]) -> int:
    """The widest row that a sequence of average length fills eight times: padding is one part in 16 at most."""
    average = sum(lengths) / max(len(lengths), 1)
    return next((width for width in ROW_WIDTHS if average >= 8 * width), ROW_WIDTHS[-1])


def _row_count(length: int, width: int) -> int:
    """Rows of a sequence: at least one, so that a reduction over a chunk never meets an empty block."""
    return max(-(-length // width), 1)


def _even_width(length: int) -> int:
    """A row width that divides `length` when one up to 256 does, else the widest."""
    if length <= 256:
        return max(length, 1)
    return next((width for width in range(256, 63, -1) if length % width == 0), ROW_WIDTHS[0])
