"""Lists of sequences, padded [B, T] batches and packed tokens, all read as blocks, and written back.

The block layout: each row of K tokens is owned by one sequence; tokens of other sequences in it are
masked. A row is summed in the working precision, rows are added into sequences in float64:
accurate, without a loop over sequences, and without a host synchronisation. A row that two
sequences share is taken once for each. Blocks come in chunks that fit a CPU cache, so that a chunk
is read from memory once, however many operations follow.

Shapes: suffix _RK is [rows, row width], _R per row, _S per sequence, _N per token of the chunk.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

ROW_WIDTHS = (128, 64, 32, 16)
WIDEST_ROW = 256
LONGEST_SEQUENCE = 1 << 32
CPU_CHUNK_TOKENS = 1 << 18
"""Tokens of a chunk on a CPU: a dozen float32 temporaries of this size live in its caches."""
GPU_CHUNK_TOKENS = 1 << 24
"""Tokens of a chunk elsewhere, where the number of launched kernels is what costs."""

LogProbs = Tensor | Sequence[Tensor | None]
Sequences = Tensor | list[Tensor]
"""One value per token: packed [N], sequence after sequence, or a list of [T_i]."""
INPUTS = {
    "train_log_probs": "train_N",
    "rollout_log_probs": "rollout_N",
    "loss_mask": "mask_N",
    "current_log_probs": "current_N",
    "advantages": "advantage_N",
}
"""Fields of `PackedChunk` by the name of the input; the last two are optional."""


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
    """Which sequence of the chunk owns the row; a sequence's rows are in order, but not next to
    each other."""
    offset_R: Tensor
    """Where in its sequence the row begins, in tokens; below 0 where another sequence's tokens come
    first."""
    first: int
    """Number of the chunk's first sequence in the batch."""
    current_RK: Tensor | None = None
    """Log-probs of the current policy, if it is not the training policy."""
    advantage_RK: Tensor | None = None
    are_densities: bool = False
    """Whether the log-probs are log-densities of continuous samples, which have no lowest value."""

    def order(self) -> Tensor:
        """The rows, sequence by sequence, as [R] indices."""
        return (self.sequence_R * LONGEST_SEQUENCE + self.offset_R).argsort()


@dataclass(frozen=True)
class PackedChunk:
    """Some whole sequences of a batch, as packed tokens and the rows that they lie in."""

    train_N: Tensor
    """Log-probs of the training policy; after the chunk's last token come other sequences, or
    padding."""
    rollout_N: Tensor
    """Log-probs of the rollout policy; NaN where the sample has none."""
    mask_N: Tensor
    """Of any dtype, nonzero at the tokens of the loss."""
    rows: "Rows"
    """Where the sequences lie."""
    first: int
    """Number of the chunk's first sequence in the batch."""
    current_N: Tensor | None = None
    """Log-probs of the current policy, if it is not the training policy."""
    advantage_N: Tensor | None = None
    are_densities: bool = False
    """As in `Chunk`."""

    @property
    def working_dtype(self) -> torch.dtype:
        """What the correction is computed in: float32, or float64 where log-probs are."""
        return torch.promote_types(
            torch.promote_types(self.train_N.dtype, self.rollout_N.dtype), torch.float32
        )

    def blocks(self) -> Chunk:
        """The chunk as blocks, in the working precision."""
        rows = self.rows
        working = self.working_dtype
        current = None
        if self.current_N is not None:
            current = rows.to_blocks(self.current_N).to(working)
        advantage = None
        if self.advantage_N is not None:
            advantage = rows.to_blocks(self.advantage_N).to(working)
        mask = _indicator(rows.to_blocks(self.mask_N), working)
        return Chunk(
            train_RK=rows.to_blocks(self.train_N).to(working),
            rollout_RK=rows.to_blocks(self.rollout_N).to(working),
            mask_RK=rows.mask_foreign_(mask),
            sequence_R=rows.owner_R,
            offset_R=rows.offset_R,
            first=self.first,
            current_RK=current,
            advantage_RK=advantage,
            are_densities=self.are_densities,
        )


class Rows:
    """Maps the sequences of a chunk to rows of K tokens.

    First come all rows in order; each is owned by the sequence of its first token. Then comes one
    boundary row per sequence: a copy of the row in which it begins, for its tokens in a row that
    another sequence owns.
    """

    def __init__(
        self, end_S: Tensor, length_S: Tensor, tokens: int, width: int, aligned: bool
    ) -> None:
        """Finds the rows and their owners.

        Args:
            end_S: Where each sequence of the chunk ends, in tokens of the chunk.
            length_S: Its length in tokens.
            tokens: Number of tokens of the chunk.
            width: K.
            aligned: Whether no row is shared by two sequences.
        """
        self.end_S = end_S
        self.length_S = length_S
        self.width = width
        self.tokens = tokens
        self.aligned = aligned
        self.full_rows = max(-(-tokens // width), 1)
        """Number of rows without the boundary rows."""
        self.padded_len = self.full_rows * width
        """Tokens that the rows hold: the last row may end after the chunk's last token."""
        device = end_S.device
        count = end_S.numel()
        start_S = end_S - length_S
        self.start_S = start_S
        row_starts = torch.arange(0, self.padded_len, width, device=device)
        owner_R = torch.searchsorted(self.end_S, row_starts, right=True).clamp_max_(count - 1)
        if not self.aligned:
            self._boundary_S = start_S.div(width, rounding_mode="floor").clamp_max_(
                self.full_rows - 1
            )
            boundary = self._boundary_S * width
            # A sequence that begins at a row's start owns that row. Its boundary row gets an
            # offset of −width, so that none of its tokens count twice.
            boundary_starts = torch.where(boundary < start_S, boundary, boundary - width)
            row_starts = torch.cat([row_starts, boundary_starts])
            owner_R = torch.cat([owner_R, torch.arange(count, device=device)])
        self.owner_R = owner_R
        """Which sequence of the chunk owns the row."""
        self.offset_R = row_starts - start_S.index_select(0, owner_R)
        """Where in its sequence the row begins, in tokens; below 0 where another sequence's tokens
        come first."""

    def to_blocks(self, flat_N: Tensor) -> Tensor:
        """Tokens of the chunk as blocks [R, K]: all rows, then boundary rows; a view if aligned."""
        gap = self.padded_len - flat_N.numel()
        if gap > 0:
            flat_N = torch.cat([flat_N, flat_N.new_zeros(gap)])
        rows = flat_N.view(self.full_rows, self.width)
        if self.aligned:
            return rows
        return torch.cat([rows, rows.index_select(0, self._boundary_S)])

    def mask_foreign_(self, mask_RK: Tensor) -> Tensor:
        """Clears a mask, in place, at tokens that the row's owner does not have.

        Each token then counts exactly once.
        """
        if self.aligned:
            return mask_RK
        column = torch.arange(self.width, device=mask_RK.device)
        rows = mask_RK[: self.full_rows]
        boundary_rows = mask_RK[self.full_rows :]
        rows.view(-1)[self.tokens :].zero_()  # the last row may end in the next chunk
        position = self.offset_R[self.full_rows :, None] + column
        boundary_rows.mul_((position >= 0) & (position < self.length_S[:, None]))
        owner_S = self.owner_R.index_select(0, self._boundary_S)
        left_S = self.end_S.index_select(0, owner_S) - self._boundary_S * self.width
        # a row with several boundaries is written several times, with the same values
        owned = rows.index_select(0, self._boundary_S) * (column < left_S[:, None])
        rows.index_copy_(0, self._boundary_S, owned)
        return mask_RK

    def from_blocks(self, blocks_RK: Tensor) -> Tensor:
        """Blocks as tokens; overwrites the blocks, which must be 0 at tokens of other owners."""
        if self.aligned:
            return blocks_RK.view(-1)
        numbers = blocks_RK
        if blocks_RK.dtype == torch.bool:
            numbers = blocks_RK.view(
                torch.uint8
            )  # added as bytes; the owners of a token do not overlap
        numbers[: self.full_rows].index_add_(0, self._boundary_S, numbers[self.full_rows :])
        return blocks_RK[: self.full_rows].view(-1)


class Layout:
    """A batch, read as chunks of blocks, and the way back."""

    def __init__(
        self, tokens: Mapping[str, Sequences], lengths: list[int], shape: tuple[int, ...] | None
    ) -> None:
        """Lays the tokens out in rows.

        Args:
            tokens: By their names in `INPUTS`.
            lengths: Tokens of each sequence.
            shape: Shape of the results; None for a list of sequences.
        """
        self.tokens = tokens
        self.lengths = lengths
        self._shape = shape
        self.device = device_of(tokens["train_log_probs"])
        self._width = row_width(lengths)
        chunk_tokens = CPU_CHUNK_TOKENS if self.device.type == "cpu" else GPU_CHUNK_TOKENS
        self._spans = _spans(lengths, chunk_tokens)
        self._rows = list(self._rows_of_chunks()) if lengths else []

    def chunks(self, *, are_densities: bool = False) -> Iterator[PackedChunk]:
        """The batch as chunks of complete sequences, in order; `are_densities` as in `Chunk`."""
        start = 0
        for (first, last), rows in zip(self._spans, self._rows, strict=True):
            tokens = {
                INPUTS[name]: _tokens_of(x, first, last, start, rows)
                for name, x in self.tokens.items()
            }
            yield PackedChunk(rows=rows, first=first, are_densities=are_densities, **tokens)
            start += rows.tokens

    def _rows_of_chunks(self) -> Iterator[Rows]:
        ends = list(accumulate(self.lengths))
        aligned = all(length % self._width == 0 and length for length in self.lengths)
        end_S, length_S = torch.tensor([ends, self.lengths]).to(self.device, non_blocking=True)
        start = 0
        for first, last in self._spans:
            tokens = ends[last - 1] - start
            yield Rows(
                end_S[first:last] - start, length_S[first:last], tokens, self._width, aligned
            )
            start += tokens

    def restore(self, blocks: list[Tensor], dtype: torch.dtype) -> Tensor | list[Tensor]:
        """Blocks of all chunks, in order and 0 where masked, in the layout of the input; `dtype` is theirs."""
        parts = [
            rows.from_blocks(block)[: rows.tokens]
            for rows, block in zip(self._rows, blocks, strict=True)
        ]
        if not parts:
            parts = [torch.empty(0, dtype=dtype, device=self.device)]
        return self.shaped(parts[0] if len(parts) == 1 else torch.cat(parts))

    def shaped(self, flat: Tensor) -> Tensor | list[Tensor]:
        """All tokens, one sequence after another, in the layout of the input."""
        return list(flat.split(self.lengths)) if self._shape is None else flat.view(self._shape)


def as_layout(inputs: Mapping[str, LogProbs], lengths: Sequence[int] | None) -> Layout:
    """The layout of the inputs of `correct`, by their names in `INPUTS`.

    Raises:
        ValueError: if the inputs differ in layout, device, number of sequences or lengths, or
            log-probs are not floating-point numbers.
    """
    train = inputs["train_log_probs"]
    is_tensor = isinstance(train, Tensor)
    if any(
        isinstance(x, Tensor) != is_tensor or not isinstance(x, Tensor | list | tuple)
        for x in inputs.values()
    ):
        kinds = ", ".join(f"{name} is {type(x).__name__}" for name, x in inputs.items())
        raise ValueError(f"{kinds}; pass tensors of one shape, or lists of tensors.")
    device = device_of(train)
    if not isinstance(train, Tensor):
        if lengths is not None:
            raise ValueError(
                "lengths are given but the log-probs are a list; pass lengths with packed tensors"
                " only."
            )
        lists = _checked_lists(inputs, device)
        return Layout(lists, [x.numel() for x in lists["train_log_probs"]], None)
    tensors = {name: _checked(name, x, device) for name, x in inputs.items()}
    shape = train.shape
    if any(x.shape != shape for x in tensors.values()):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"the inputs have shapes {shapes}; pass tensors of one shape.")
    if lengths is not None:
        return Layout(tensors, _checked_lengths(lengths, shape), shape)
    if len(shape) != 2:
        raise ValueError(
            f"the log-probs have shape {tuple(shape)}; pass [B, T], or [N] with lengths."
        )
    return Layout(
        {name: x.reshape(-1) for name, x in tensors.items()}, [shape[1]] * shape[0], shape
    )


def device_of(values: object) -> torch.device:
    """The device of a tensor or of the first tensor of a list, the CPU without any."""
    first = values[0] if isinstance(values, list | tuple) and values else values
    return first.device if isinstance(first, Tensor) else torch.device("cpu")


def _checked_lists(inputs: Mapping[str, Any], device: torch.device) -> dict[str, list[Tensor]]:
    """The inputs as lists of [T_i], with NaN for samples without rollout log-probs."""
    counts = {name: len(values) for name, values in inputs.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"the numbers of sequences differ: {counts}; pass one of each per sequence."
        )
    train, rollout = inputs["train_log_probs"], inputs["rollout_log_probs"]
    sizes = [
        t.numel()
        for t, r in zip(train, rollout, strict=True)
        if r is None and isinstance(t, Tensor)
    ]
    absent = iter(torch.full((sum(sizes),), torch.nan, device=device).split(sizes) if sizes else ())
    inputs = {
        **inputs,
        "rollout_log_probs": [next(absent, None) if x is None else x for x in rollout],
    }
    lists = {
        name: [_checked(f"{name}[{i}]", x, device, 1) for i, x in enumerate(xs)]
        for name, xs in inputs.items()
    }
    for i, tensors in enumerate(zip(*lists.values(), strict=True)):
        if len({x.numel() for x in tensors}) > 1:
            tokens = ", ".join(
                f"{name} {x.numel()}" for name, x in zip(lists, tensors, strict=True)
            )
            raise ValueError(
                f"sequence {i} has these numbers of tokens: {tokens}; pass tensors of one length."
            )
    return lists


def _checked_lengths(lengths: Sequence[int], shape: torch.Size) -> list[int]:
    try:
        numbers = [operator.index(length) for length in lengths]
    except TypeError as error:
        raise ValueError(
            f"lengths is {repr(lengths)[:80]}; pass one whole number per sequence."
        ) from error
    if len(shape) != 1 or min(numbers, default=0) < 0 or sum(numbers) != shape[0]:
        raise ValueError(
            f"lengths sum to {sum(numbers)} but the tensors have shape {tuple(shape)}; "
            "pass packed [N] tensors with lengths that sum to N, none below 0."
        )
    return numbers


def _checked(name: str, x: Any, device: torch.device, dimensions: int | None = None) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is {type(x).__name__}; pass a tensor.")
    if x.layout != torch.strided or x.device != device:
        raise ValueError(
            f"{name} is {x.layout} on {x.device}; pass dense tensors, all on {device}."
        )
    if x.device.type == "meta":
        raise ValueError(
            f"{name} is on the meta device, which has no values; pass it on a CPU or GPU."
        )
    if dimensions is not None and x.dim() != dimensions:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; pass one dimension per sequence, [T]."
        )
    if x.dtype.is_complex if name.startswith("loss_mask") else not x.dtype.is_floating_point:
        raise ValueError(
            f"{name} has dtype {x.dtype}; pass floating-point log-probs and a real or bool mask."
        )
    check_precision(name, x)
    return x


def check_precision(name: str, x: Tensor) -> None:
    """Refuses float8 and float4, in which torch neither subtracts nor compares.

    Raises:
        ValueError: naming the tensor and its dtype.
    """
    if x.dtype.is_floating_point and x.dtype.itemsize == 1:
        raise ValueError(
            f"{name} has dtype {x.dtype}, which has too few digits; pass float32, bfloat16 or"
            " float16."
        )


def row_width(lengths: list[int]) -> int:
    """One row for short sequences of one length, a divisor of longer ones; else an eighth of the average at most."""
    if lengths and min(lengths) == max(lengths) > 0:
        length = lengths[0]
        if length <= WIDEST_ROW:
            return length
        divisor = next(
            (width for width in range(WIDEST_ROW, WIDEST_ROW // 4 - 1, -1) if length % width == 0),
            None,
        )
        if divisor is not None:
            return divisor
    average = sum(lengths) / max(len(lengths), 1)
    return next((width for width in ROW_WIDTHS if average >= 8 * width), ROW_WIDTHS[-1])


def _tokens_of(tokens: Sequences, first: int, last: int, start: int, rows: Rows) -> Tensor:
    """The tokens of sequences first … last, which begin at `start`, and the tokens after them in their last row.

    Packed tokens are a view, which ends where the batch does; lists become one copy, padded to
    whole rows.
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


def _indicator(mask: Tensor, working: torch.dtype) -> Tensor:
    """Returns 1.0 where a mask of any dtype is not 0, in new memory."""
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8).to(working)
    return torch.ne(mask, 0, out=torch.empty_like(mask, dtype=working))
