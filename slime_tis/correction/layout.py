"""Lists, padded [B, T] batches and packed tokens: checked, read as blocks, and written back.

A block has rows of K tokens, and one sequence owns each row. Tokens of other sequences in a row are
masked. A row that two sequences share is taken once for each. Rows are summed in the working
precision, and their sums are added up per sequence in float64: that is accurate, without a loop
over sequences and without a host synchronisation. Blocks come in chunks that fit a CPU cache. So a
chunk is read from memory once, however many operations follow.

Shapes: suffix _RK is [rows, row width], _R per row, _S per sequence, _N per packed token.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

WIDEST_ROW = 256
"""Widest row, in tokens."""
NARROWEST_DIVISOR = 64
"""Narrowest row, in tokens, that cuts longer sequences of one length into equal parts."""
ROW_WIDTHS = (128, 64, 32, 16)
"""Row widths for sequences of different lengths, in tokens."""
TOKENS_PER_ROW_WIDTH = 8
"""Smallest ratio of the average sequence to the row width, if lengths differ. Each sequence adds
one boundary row, so this limits the additional tokens to 1/8."""
LONGEST_SEQUENCE = 1 << 32
"""Above the length of any sequence: sequence · LONGEST_SEQUENCE + position orders all tokens."""
CPU_CHUNK_TOKENS = 1 << 18
"""Tokens of a chunk on a CPU: a dozen float32 temporaries of this size fit its caches."""
GPU_CHUNK_TOKENS = 1 << 24
"""Tokens of a chunk on other devices, where the number of launched kernels determines the time."""

LogProbs = Tensor | Sequence[Tensor | None]
"""An input of `correct`: [B, T], packed [N], or a list of [T_i] with None for a missing one."""
Sequences = Tensor | list[Tensor]
"""One value per token: packed [N], sequence after sequence, or a list of [T_i]."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some complete sequences of a batch, as blocks in the working precision."""

    train_RK: Tensor
    """Log-probs of the training policy; undefined at masked tokens."""
    rollout_RK: Tensor
    """Log-probs of the rollout policy; NaN if the sample has none."""
    mask_RK: Tensor
    """1.0 at tokens of the loss mask, 0.0 elsewhere and at tokens of other sequences."""
    current_RK: Tensor | None
    """Log-probs of the current policy, if it is not the training policy."""
    advantage_RK: Tensor | None
    """Advantages, if an option needs them."""
    sequence_R: Tensor
    """Index in the chunk of the sequence that owns the row. The rows of a sequence are in order,
    but not next to each other."""
    offset_R: Tensor
    """Position of the row's first token in the owner, below 0 if another sequence's tokens come
    first."""
    first: int
    """Index in the batch of the chunk's first sequence."""
    sequences: int
    """Number of sequences in the chunk."""
    are_densities: bool
    """Whether the log-probs are log-densities of continuous samples, which have no lowest value."""

    def order(self) -> Tensor:
        """The rows, sequence by sequence, as [R] indices."""
        return (self.sequence_R * LONGEST_SEQUENCE + self.offset_R).argsort()


class Rows:
    """Maps the sequences of a chunk to rows of K tokens.

    The full rows come first, in order. The sequence of the first token owns a full row. Then comes
    one boundary row per sequence: a copy of the full row in which the sequence begins. It is for
    the sequence's tokens in a row that another sequence owns.
    """

    def __init__(
        self, end_S: Tensor, length_S: Tensor, tokens: int, width: int, aligned: bool
    ) -> None:
        """Finds the rows and their owners.

        Args:
            end_S: Ends of the sequences, in tokens from the start of the chunk.
            length_S: Lengths of the sequences, in tokens.
            tokens: Number of tokens in the chunk.
            width: K.
            aligned: Whether no two sequences share a row. Then there are no boundary rows.
        """
        self.end_S = end_S
        self.length_S = length_S
        self.tokens = tokens
        self.width = width
        self.aligned = aligned
        # A chunk of empty sequences has one row, because reductions refuse blocks without a row.
        self.full_rows = max(-(-tokens // width), 1)
        """Number of rows without the boundary rows."""
        self.padded_len = self.full_rows * width
        """Tokens that the full rows hold; the last row may end after the chunk's last token."""
        self.block_len = self.padded_len
        """Tokens that a block holds, with the boundary rows."""
        device = end_S.device
        sequences = end_S.numel()
        start_S = end_S - length_S
        row_starts = torch.arange(0, self.padded_len, width, device=device)
        # `right`: a row that starts where a sequence ends belongs to the next sequence.
        owner_R = torch.searchsorted(end_S, row_starts, right=True).clamp_max_(sequences - 1)
        if not aligned:
            self.block_len += sequences * width
            # An empty sequence at the end would begin after the last row.
            boundary_S = start_S.div(width, rounding_mode="floor").clamp_max_(self.full_rows - 1)
            self._boundary_S = boundary_S
            """Full row in which each sequence begins."""
            boundary = boundary_S * width
            # A sequence that begins at a row's start owns that row. Its boundary row gets an
            # offset of −width, so that its tokens do not count twice.
            boundary_starts = torch.where(boundary < start_S, boundary, boundary - width)
            row_starts = torch.cat([row_starts, boundary_starts])
            owner_R = torch.cat([owner_R, torch.arange(sequences, device=device)])
        self.owner_R = owner_R
        """As `Chunk.sequence_R`."""
        self.offset_R = row_starts - start_S.index_select(0, owner_R)
        """As `Chunk.offset_R`."""

    def to_blocks(self, flat_N: Tensor) -> Tensor:
        """The chunk's tokens as blocks [R, K]: full rows, then boundary rows; a view if aligned."""
        gap = self.padded_len - flat_N.numel()
        if gap > 0:
            flat_N = torch.cat([flat_N, flat_N.new_zeros(gap)])
        rows = flat_N.view(self.full_rows, self.width)
        if self.aligned:
            return rows
        return torch.cat([rows, rows.index_select(0, self._boundary_S)])

    def join(self, sequences: Sequence[Tensor]) -> Tensor:
        """As `to_blocks`, of the chunk's sequences [T_i], copying every token once."""
        end = sequences[0].new_zeros(self.block_len - self.tokens)
        blocks = torch.cat([*sequences, end]).view(-1, self.width)
        if not self.aligned:
            # `to_blocks` of the joined tokens would copy the full rows again
            rows = blocks[: self.full_rows]
            torch.index_select(rows, 0, self._boundary_S, out=blocks[self.full_rows :])
        return blocks

    def mask_foreign_(self, mask_RK: Tensor) -> Tensor:
        """Clears a mask, in place, at tokens that do not belong to the row's owner.

        Each token then counts exactly once.
        """
        if self.aligned:
            return mask_RK
        column = torch.arange(self.width, device=mask_RK.device)
        rows = mask_RK[: self.full_rows]
        boundary_rows = mask_RK[self.full_rows :]
        # Packed tokens go on after the chunk's last token, with sequences of the next chunk.
        rows.view(-1)[self.tokens :].zero_()
        position = self.offset_R[self.full_rows :, None] + column
        boundary_rows.mul_((position >= 0) & (position < self.length_S[:, None]))
        # Only full rows in which a sequence begins can have tokens of other sequences.
        owner_S = self.owner_R.index_select(0, self._boundary_S)
        left_S = self.end_S.index_select(0, owner_S) - self._boundary_S * self.width
        owned = rows.index_select(0, self._boundary_S) * (column < left_S[:, None])
        # A row in which several sequences begin is written several times, with the same values.
        rows.index_copy_(0, self._boundary_S, owned)
        return mask_RK

    def from_blocks(self, blocks_RK: Tensor) -> Tensor:
        """Blocks as tokens; overwrites the blocks, which must be 0 at tokens of other owners."""
        if self.aligned:
            return blocks_RK.view(-1)
        numbers = blocks_RK
        if blocks_RK.dtype == torch.bool:
            # Bytes can be added; at most one of the added values is not 0.
            numbers = blocks_RK.view(torch.uint8)
        numbers[: self.full_rows].index_add_(0, self._boundary_S, numbers[self.full_rows :])
        return blocks_RK[: self.full_rows].view(-1)


class Layout:
    """The inputs of `correct` as chunks of blocks, and the way back to their layout."""

    def __init__(
        self,
        inputs: Mapping[str, Sequences],
        lengths: list[int],
        shape: tuple[int, ...] | None,
        device: torch.device,
    ) -> None:
        """Divides the sequences into chunks and rows.

        Args:
            inputs: The inputs by their names in `correct`.
            lengths: Tokens per sequence.
            shape: Shape of the results; None for a list of sequences.
            device: The device of all inputs.
        """
        self.inputs = inputs
        self.lengths = lengths
        self.device = device
        self._shape = shape
        self._starts = list(accumulate(lengths, initial=0))
        """Where each sequence starts in the packed tokens, and where the last one ends."""
        chunk_tokens = GPU_CHUNK_TOKENS
        if device.type == "cpu":
            chunk_tokens = CPU_CHUNK_TOKENS
        self._spans = _spans(lengths, chunk_tokens)
        self._rows = self._rows_per_chunk()

    def _rows_per_chunk(self) -> list[Rows]:
        """The rows per chunk, all of one width."""
        width = row_width(self.lengths)
        aligned = all(length > 0 and length % width == 0 for length in self.lengths)
        ends = self._starts[1:]
        # One copy for the complete batch: on a GPU each copy from the host costs a launch.
        end_S, length_S = torch.tensor([ends, self.lengths]).to(self.device, non_blocking=True)
        rows_per_chunk = []
        for first, last in self._spans:
            start = self._starts[first]
            rows = Rows(
                end_S=end_S[first:last] - start,
                length_S=length_S[first:last],
                tokens=self._starts[last] - start,
                width=width,
                aligned=aligned,
            )
            rows_per_chunk.append(rows)
        return rows_per_chunk

    @property
    def number_of_chunks(self) -> int:
        """How many chunks the batch has; 0 without a sequence."""
        return len(self._rows)

    def chunk(self, number: int, *, are_densities: bool = False) -> Chunk:
        """A chunk of complete sequences, copied or as views; `are_densities` as in `Chunk`."""
        rows = self._rows[number]
        first, last = self._spans[number]
        blocks = {}
        for name, values in self.inputs.items():
            if isinstance(values, Tensor):
                start = self._starts[first]
                # The last row may end in the next chunk: a view is cheaper than padding.
                blocks[name] = rows.to_blocks(values[start : start + rows.padded_len])
            else:
                blocks[name] = rows.join(values[first:last])
        train = blocks["train_log_probs"]
        rollout = blocks["rollout_log_probs"]
        log_prob_dtype = torch.promote_types(train.dtype, rollout.dtype)
        # float64 log-probs are computed in float64, all others in float32.
        working = torch.promote_types(log_prob_dtype, torch.float32)
        current = blocks.get("current_log_probs")
        if current is not None:
            current = current.to(working)
        advantage = blocks.get("advantages")
        if advantage is not None:
            advantage = advantage.to(working)
        mask = _indicator(blocks["loss_mask"], working)
        return Chunk(
            train_RK=train.to(working),
            rollout_RK=rollout.to(working),
            mask_RK=rows.mask_foreign_(mask),
            current_RK=current,
            advantage_RK=advantage,
            sequence_R=rows.owner_R,
            offset_R=rows.offset_R,
            first=first,
            sequences=last - first,
            are_densities=are_densities,
        )

    def packed(self) -> dict[str, Tensor]:
        """The inputs as packed [N] tensors, by their names in `correct`."""
        packed = {}
        for name, values in self.inputs.items():
            if not isinstance(values, Tensor):
                # `cat` refuses an empty list, which a batch without a sequence has.
                no_token = torch.zeros(0, device=self.device)
                values = torch.cat([no_token, *values])
            packed[name] = values
        return packed

    def restore(self, blocks: list[Tensor], dtype: torch.dtype) -> Tensor | list[Tensor]:
        """Blocks of all chunks in the layout of the input.

        Args:
            blocks: [R, K] per chunk, in order; 0 at masked tokens. They are overwritten.
            dtype: The dtype of the blocks, for a batch without a sequence.
        """
        if not blocks:
            return self.shaped(torch.empty(0, dtype=dtype, device=self.device))
        chunks = []
        for rows, block in zip(self._rows, blocks, strict=True):
            chunks.append(rows.from_blocks(block)[: rows.tokens])
        if len(chunks) == 1:
            # `cat` would copy it.
            return self.shaped(chunks[0])
        return self.shaped(torch.cat(chunks))

    def shaped(self, flat_N: Tensor) -> Tensor | list[Tensor]:
        """All tokens, one sequence after another, in the layout of the input."""
        if self._shape is None:
            return list(flat_N.split(self.lengths))
        return flat_N.view(self._shape)


def row_width(lengths: Sequence[int]) -> int:
    """K for sequences of these lengths.

    If all have one length, K divides it, so no two sequences share a row. It is the length itself
    or at least `NARROWEST_DIVISOR`. Otherwise, and without such a divisor, K is one of
    `ROW_WIDTHS`.
    """
    if not lengths:
        return ROW_WIDTHS[-1]
    length = lengths[0]
    if min(lengths) == max(lengths) > 0:
        if length <= WIDEST_ROW:
            return length
        for width in range(WIDEST_ROW, NARROWEST_DIVISOR - 1, -1):
            if length % width == 0:
                return width
    average = sum(lengths) / len(lengths)
    for width in ROW_WIDTHS:
        if average >= TOKENS_PER_ROW_WIDTH * width:
            return width
    return ROW_WIDTHS[-1]


def _spans(lengths: Sequence[int], largest: int) -> list[tuple[int, int]]:
    """Ranges [first, last) of sequences, of at most `largest` tokens or one sequence."""
    spans = []
    first = 0
    tokens = 0
    for i, length in enumerate(lengths):
        # `i > first`: a sequence that is longer than a chunk becomes a chunk by itself.
        if i > first and tokens + length > largest:
            spans.append((first, i))
            first = i
            tokens = 0
        tokens += length
    if lengths:
        spans.append((first, len(lengths)))
    return spans


def _indicator(mask: Tensor, working: torch.dtype) -> Tensor:
    """1.0 where a mask of any dtype is not 0, in new memory."""
    if mask.dtype == torch.bool:
        # Conversion from bytes vectorises on a CPU, conversion from bools does not.
        return mask.view(torch.uint8).to(working)
    return torch.ne(mask, 0, out=torch.empty_like(mask, dtype=working))


def as_layout(inputs: Mapping[str, LogProbs], lengths: Sequence[int] | None) -> Layout:
    """The layout of the inputs of `correct`, by their names.

    Raises:
        ValueError: if the inputs differ in layout, device, number of sequences or lengths, or
            log-probs are not floating-point numbers.
    """
    if all(isinstance(values, Tensor) for values in inputs.values()):
        return _layout_of_tensors(inputs, lengths)
    if all(isinstance(values, list | tuple) for values in inputs.values()):
        return _layout_of_lists(inputs, lengths)
    kinds = ", ".join(f"{name} is {type(values).__name__}" for name, values in inputs.items())
    raise ValueError(f"{kinds}; pass tensors of one shape, or lists of tensors.")


def _layout_of_tensors(inputs: Mapping[str, Any], lengths: Sequence[int] | None) -> Layout:
    """The layout of padded tensors, or of packed ones with lengths."""
    train = inputs["train_log_probs"]
    shape = train.shape
    for name, values in inputs.items():
        _check(name, values, train.device)
    if any(values.shape != shape for values in inputs.values()):
        shapes = ", ".join(f"{name} {tuple(values.shape)}" for name, values in inputs.items())
        raise ValueError(f"the inputs have shapes {shapes}; pass tensors of one shape.")
    if lengths is not None:
        sequence_lengths = _checked_lengths(lengths, shape)
    elif len(shape) == 2:
        sequence_lengths = [shape[1]] * shape[0]
    else:
        raise ValueError(
            f"the log-probs have shape {tuple(shape)}; pass [B, T], or [N] with lengths."
        )
    packed = {name: values.reshape(-1) for name, values in inputs.items()}
    return Layout(packed, sequence_lengths, shape, train.device)


def _layout_of_lists(inputs: Mapping[str, Any], lengths: Sequence[int] | None) -> Layout:
    """The layout of lists of [T_i], with NaN for samples without rollout log-probs."""
    if lengths is not None:
        raise ValueError(
            "lengths are given but the log-probs are a list; pass lengths with packed tensors only."
        )
    counts = {name: len(tensors) for name, tensors in inputs.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"the numbers of sequences differ: {counts}; pass one of each per sequence."
        )
    train = inputs["train_log_probs"]
    device = torch.device("cpu")
    if train and isinstance(train[0], Tensor):
        device = train[0].device
    lists = dict(inputs)
    lists["rollout_log_probs"] = _with_missing(train, inputs["rollout_log_probs"], device)
    for name, tensors in lists.items():
        _check_list(name, tensors, device)
    lengths_of_input = {}
    for name, tensors in lists.items():
        lengths_of_input[name] = [tensor.numel() for tensor in tensors]
    sequence_lengths = lengths_of_input["train_log_probs"]
    if any(numbers != sequence_lengths for numbers in lengths_of_input.values()):
        raise ValueError(_different_lengths(lengths_of_input))
    return Layout(lists, sequence_lengths, None, device)


def _check_list(name: str, tensors: Sequence[Any], device: torch.device) -> None:
    """Raises the ValueError of `_check` for the first sequence that has one."""
    readable_kinds = set()
    for i, values in enumerate(tensors):
        kind = None
        if isinstance(values, Tensor):
            kind = (values.dtype, values.layout, values.device, values.dim())
        # `_check` of each of thousands of sequences would take a tenth of the correction's time
        if kind is None or kind not in readable_kinds:
            _check(f"{name}[{i}]", values, device, dimensions=1)
            readable_kinds.add(kind)


def _different_lengths(lengths_of_input: Mapping[str, Sequence[int]]) -> str:
    """The message about the first sequence whose inputs have different lengths."""
    all_numbers = list(zip(*lengths_of_input.values(), strict=True))
    i = next(i for i, numbers in enumerate(all_numbers) if len(set(numbers)) > 1)
    sizes = ", ".join(f"{name} {numbers[i]}" for name, numbers in lengths_of_input.items())
    return f"sequence {i} has these numbers of tokens: {sizes}; pass tensors of one length."


def _with_missing(train: Sequence[Any], rollout: Sequence[Any], device: torch.device) -> list[Any]:
    """The rollout log-probs, with NaN for each token of a sample that has none."""
    completed = []
    for train_T, rollout_T in zip(train, rollout, strict=True):
        if rollout_T is None and isinstance(train_T, Tensor):
            rollout_T = torch.full((train_T.numel(),), torch.nan, device=device)
        completed.append(rollout_T)
    return completed


def _checked_lengths(lengths: Sequence[int], shape: torch.Size) -> list[int]:
    """The lengths as ints, if they fit packed tensors of this shape."""
    try:
        # `index` also takes integers of numpy and torch, and refuses 3.0.
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


def _check(name: str, values: Any, device: torch.device, dimensions: int | None = None) -> None:
    """Raises a ValueError unless the values are a tensor that the correction can read."""
    if not isinstance(values, Tensor):
        raise ValueError(f"{name} is {type(values).__name__}; pass a tensor.")
    if values.layout != torch.strided or values.device != device:
        raise ValueError(
            f"{name} is {values.layout} on {values.device}; pass dense tensors, all on {device}."
        )
    if device.type == "meta":
        raise ValueError(
            f"{name} is on the meta device, which has no values; pass it on a CPU or GPU."
        )
    if dimensions is not None and values.dim() != dimensions:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}; pass one dimension per sequence, [T]."
        )
    if name.startswith("loss_mask"):
        is_usable = not values.dtype.is_complex
    else:
        is_usable = values.dtype.is_floating_point
    if not is_usable:
        raise ValueError(
            f"{name} has dtype {values.dtype}; pass floating-point log-probs and a real or bool"
            " mask."
        )
    check_precision(name, values)


def check_precision(name: str, values: Tensor) -> None:
    """Refuses float8 and float4, in which torch neither subtracts nor compares.

    Raises:
        ValueError: naming the tensor and its dtype.
    """
    # float4_e2m1fn_x2 packs two values into one byte.
    if values.dtype.is_floating_point and values.dtype.itemsize == 1:
        raise ValueError(
            f"{name} has dtype {values.dtype}, which has too few digits; pass float32, bfloat16 or"
            " float16."
        )
