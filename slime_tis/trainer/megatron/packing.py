"""Sequences → one packed row: context-parallel slices, next-token targets, and index tensors for attention.

The row consists of segments: whole sequences, or, with shared prompts, the segments of a prefix tree.

Shapes: suffix _T the packed tokens of this context-parallel rank, _L the response tokens that they predict, _S the
sequences of the micro-batch, _J its segments; a filler is the last of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slime_tis.policy.tokens import ResponseTokens
from slime_tis.trainer.data.sample import SamplingMask
from slime_tis.trainer.megatron.batch import TrainingBatch
from slime_tis.trainer.megatron.micro_batches import PrefixTree


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """How a packed row is divided over ranks."""

    context_rank: int = 0
    context_size: int = 1
    tensor_size: int = 1
    """With sequence parallelism, the tensor-parallel size; it must divide the length of the row."""


@dataclass(frozen=True, kw_only=True)
class AttentionRows:
    """Segments as rows of a padded batch, each with the keys that it sees."""

    count: int
    query_index: Tensor | None = None
    """[rows·Lq] packed token at each index; None if the batch is the packed tokens."""
    key_index: Tensor | None = None
    """[rows·Lk] the same for keys, into the concatenated tokens of all context-parallel ranks."""
    mask: Tensor | None = None
    """[rows, 1, Lq, Lk] True if a query sees a key; None for plain causal attention."""

    def gather(self, x: Tensor, index: Tensor | None) -> Tensor:
        """Packed [tokens, heads, d] → padded batch [rows, heads, length, d]."""
        rows: Tensor = (x if index is None else x.index_select(0, index)).unflatten(0, (self.count, -1))
        return rows.transpose(1, 2)


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's packed-sequence parameters, with the inputs of `ResponseModel` and `TorchAttention`."""

    response_rows: Tensor | None = None
    """[L] packed tokens that predict the response tokens; None for all."""
    gives_logits: bool = False
    """Whether the model returns the logits after these tokens instead of their hidden states."""
    cos: Tensor | None = None
    """[tokens, 1, d/2] cosines of the rotary angles; None if transformer-engine applies them."""
    sin: Tensor | None = None
    rows: tuple[AttentionRows, ...] = ()
    """Every packed token is once a query."""
    token_index: Tensor | None = None
    """[tokens] index of every packed token in the concatenated padded batches."""

    def packed(self, outputs: Sequence[Tensor]) -> Tensor:
        """Padded batches [rows, heads, Lq, d] → packed [tokens, heads, d]."""
        flat = torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs])
        return flat if self.token_index is None else flat.index_select(0, self.token_index)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch on one context-parallel rank."""

    responses: ResponseTokens
    input_ids: Tensor
    position_ids: Tensor
    target_L: Tensor
    """This rank's response tokens, which the logits after `packed_seq_params.response_rows` predict."""
    packed_seq_params: PackedSequences
    sequences: Sequence[Tensor]
    """Prompt and response of each sample, int64, on the host."""
    is_fed_T: Tensor
    """bool: tokens that are followed by another token of their sequence; False for padding and filler."""
    sampling_mask: SamplingMask | None = None
    """The tokens that could be sampled at each of the L targets; None for all."""
    routed_experts: Tensor | None = None
    """int16 [T, sparse layers, k] to replay, -1 for tokens without a record; None if there is no record."""
    routing_weights: Tensor | None = None
    """Their float32 weights, NaN for tokens without a record."""
    has_gradient: bool = True
    """Whether its loss is differentiated; if not, its forward pass is for the metrics."""
    logits: Tensor | None = None
    """[1, L, V] that predict the L targets, with gradient; None if the loss does not get them."""

    def to(self, device: torch.device) -> "MicroBatch":
        """The micro-batch on a device, except `sequences`."""
        return self if device.type == "cpu" else _moved(self, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, ResponseTokens | SamplingMask):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    if isinstance(value, MicroBatch | PackedSequences | AttentionRows):
        moved = {name: _moved(field, device) for name, field in vars(value).items()}
        return replace(value, **{name: field for name, field in moved.items() if field is not getattr(value, name)})
    return value


@dataclass(frozen=True)
class _Row:
    split: RowSplit
    local_J: Tensor
    """Tokens of each segment on this rank."""
    start_J: Tensor
    """First packed token of each segment."""
    chunk_J: Tensor
    """Tokens of a context-parallel chunk of each segment."""
    segment_T: Tensor
    offset_T: Tensor
    """Index of each packed token among its segment's tokens on this rank."""
    sequence_T: Tensor
    position_T: Tensor

    @classmethod
    def of(cls, tree: PrefixTree, filler: int, split: RowSplit) -> "_Row":
        segments = [(segment.sequence, segment.start, segment.length) for segment in tree.segments]
        sequence_J, begin_J, length_J = torch.tensor([*segments, *[(len(tree), 0, filler)] * (filler > 0)]).T
        chunk_J = (length_J + 2 * split.context_size - 1) // (2 * split.context_size)
        local_J = length_J if split.context_size == 1 else 2 * chunk_J
        segment_T = torch.repeat_interleave(torch.arange(len(local_J)), local_J)
        start_J = local_J.cumsum(0) - local_J
        offset_T = torch.arange(len(segment_T)) - start_J[segment_T]
        position_T = begin_J[segment_T] + _positions(offset_T, chunk_J[segment_T], split)
        return cls(split, local_J, start_J, chunk_J, segment_T, offset_T, sequence_J[segment_T], position_T)


def pack(
    batch: TrainingBatch,
    split: RowSplit | None = None,
    *,
    rotary: "RotaryAngles | None" = None,
    share_prompts: bool = False,
) -> MicroBatch:
    """Packs whole sequences into one row, cut for this context-parallel rank.

    With `share_prompts`, shared beginnings are packed once (see `PrefixTree`).

    With context parallelism every sequence is cut into 2·size chunks of ceil(total / 2·size) tokens and rank r holds
    chunks r and 2·size−1−r, so that all ranks have equal work in causal attention. A filler sequence, which is not
    trained on, makes the row divisible by the tensor-parallel size.
    """
    split = split or RowSplit()
    totals, lengths = batch.responses.total_lengths, batch.responses.response_lengths
    tree = PrefixTree.of(batch.tokens, lengths) if share_prompts else PrefixTree.apart(totals, lengths)
    filler = _filler_length([segment.length for segment in tree.segments], split)
    row = _Row.of(tree, filler, split)
    flat = torch.cat([*batch.tokens, torch.zeros(filler, dtype=torch.int64)])
    total_S = torch.tensor([*totals, *[filler] * (filler > 0)])
    prompt_S = total_S - torch.tensor([*lengths, *[0] * (filler > 0)])
    total_T = total_S[row.sequence_T]
    start_T = (total_S.cumsum(0) - total_S)[row.sequence_T]

    def token_at(position: Tensor) -> Tensor:
        return torch.where(position < total_T, flat[start_T + torch.minimum(position, total_T - 1)], 0)

    is_fed_T = (row.position_T < total_T - 1) & (row.sequence_T < len(batch))
    layout = _layout(row, tree, filler)
    if rotary is not None:
        layout.cos, layout.sin = rotary(row.position_T)
    if tree.is_shared:
        layout.response_rows, target_L = _predicted(tree, row.start_J, flat)
    else:
        layout.response_rows = (is_fed_T & (row.position_T >= prompt_S[row.sequence_T] - 1)).nonzero().squeeze(1)
        target_L = token_at(row.position_T + 1)[layout.response_rows]
    return MicroBatch(
        responses=batch.responses,
        input_ids=token_at(row.position_T)[None],
        position_ids=row.position_T[None],
        target_L=target_L,
        packed_seq_params=layout,
        sampling_mask=None if batch.sampling_masks is None else SamplingMask.cat(batch.sampling_masks),
        sequences=batch.tokens,
        is_fed_T=is_fed_T,
        routed_experts=_recorded(batch.routed_experts, row, is_fed_T, torch.tensor(-1, dtype=torch.int16)),
        routing_weights=_recorded(batch.routing_weights, row, is_fed_T, torch.tensor(torch.nan)),
    )


def _predicted(tree: PrefixTree, start_J: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
    """The packed tokens [L] that predict response tokens, and the response tokens, response by response."""
    pieces = [
        (segment, min(tree.segments[segment].length, total - tree.segments[segment].start))
        for path, total in zip(tree.paths, tree.total_lengths, strict=True)
        for segment in path
    ]
    segment, length = torch.tensor(pieces).T
    packed = _ranges(start_J[segment], length)
    total_S, response_S = torch.tensor(tree.total_lengths), torch.tensor(tree.response_lengths)
    before = _ranges(total_S.cumsum(0) - response_S - 1, response_S)  # indices into `flat`
    return packed[before], flat[before + 1]


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - before, lengths)


def _recorded(rows_S: Sequence[Tensor | None] | None, row: _Row, is_fed_T: Tensor, missing: Tensor) -> Tensor | None:
    """The rollout engine's record of every token [T, …], from a row for each token but a sequence's last."""
    recorded = [rows for rows in rows_S or [] if rows is not None]
    if rows_S is None or not recorded:
        return None
    flat = torch.cat([*(rows.to(missing.dtype) for rows in recorded), missing.expand(1, *recorded[0].shape[1:])])
    count_S = torch.tensor([0 if rows is None else len(rows) for rows in rows_S] + [0])  # 0 for the filler
    start_S = count_S.cumsum(0) - count_S
    has_row_T = is_fed_T & (count_S[row.sequence_T] > 0)
    return flat[torch.where(has_row_T, start_S[row.sequence_T] + row.position_T, len(flat) - 1)]


def _filler_length(totals: Sequence[int], split: RowSplit) -> int:
    size, tensor_size = split.context_size, split.tensor_size
    if size == 1:
        return -sum(totals) % tensor_size
    local = sum(2 * -(-total // (2 * size)) for total in totals)
    return (-local % (2 * tensor_size)) * size


def _positions(offset: Tensor, chunk: Tensor, split: RowSplit) -> Tensor:
    rank, size = split.context_rank, split.context_size
    if size == 1:
        return offset
    return torch.where(offset < chunk, rank * chunk + offset, (2 * size - 2 - rank) * chunk + offset)


def _layout(row: _Row, tree: PrefixTree, filler: int) -> PackedSequences:
    size, longest = row.split.context_size, int(row.local_J.max())
    cu_seqlens = torch.cat([row.local_J.new_zeros(1), row.local_J.cumsum(0)]).to(torch.int32) * size
    layout = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest * size,
        max_seqlen_kv=longest * size,
        rows=(AttentionRows(count=len(row.local_J)),),
    )
    if tree.is_shared:
        layout.rows, layout.token_index = _shared_rows(tree, filler)
    elif size > 1 or int(row.local_J.min()) < longest:
        offset = torch.arange(longest)
        query_index = (row.start_J[:, None] + torch.minimum(offset, row.local_J[:, None] - 1)).flatten()
        key_index, mask = _gathered_keys(row) if size > 1 else (query_index, None)
        layout.rows = (AttentionRows(count=len(row.local_J), query_index=query_index, key_index=key_index, mask=mask),)
        layout.token_index = row.segment_T * longest + row.offset_T
    return layout


def _shared_rows(tree: PrefixTree, filler: int) -> tuple[tuple[AttentionRows, ...], Tensor]:
    """The rows of a tree's segments and of the filler, where each segment also sees the segments before it."""
    segments = [(segment.start, segment.length, segment.parent) for segment in tree.segments]
    segments += [(0, filler, -1)] * (filler > 0)
    paths: list[Tensor] = []  # packed tokens up to the end of each segment
    total = 0
    for _, length, parent in segments:
        own = torch.arange(total, total + length)
        paths.append(own if parent < 0 else torch.cat([paths[parent], own]))
        total += length
    rows, token_index, padded = [], torch.empty(total, dtype=torch.int64), 0
    for bucket in _buckets_of_similar([length for _, length, _ in segments]):
        start_R, length_R = torch.tensor([segments[i][:2] for i in bucket]).T[..., None]
        position = start_R + torch.minimum(torch.arange(int(length_R.max())), length_R - 1)
        keys = pad_sequence([paths[i] for i in bucket], batch_first=True)
        queries, mask = keys.gather(1, position), torch.arange(keys.shape[1]) <= position[..., None]
        rows.append(
            AttentionRows(
                count=len(bucket), query_index=queries.flatten(), key_index=keys.flatten(), mask=mask[:, None]
            )
        )
        is_token = torch.arange(queries.shape[1]) < length_R
        token_index[queries[is_token]] = torch.arange(padded, padded + queries.numel()).view_as(queries)[is_token]
        padded += queries.numel()
    return tuple(rows), token_index


def _buckets_of_similar(lengths: Sequence[int]) -> list[list[int]]:
    """Indices in buckets whose longest is at most twice as long as their shortest, which limits padding."""
    buckets: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not buckets or 2 * lengths[index] < longest:
            buckets.append([])
            longest = lengths[index]
        buckets[-1].append(index)
    return [sorted(bucket) for bucket in buckets]


def _gathered_keys(row: _Row) -> tuple[Tensor, Tensor]:
    size, chunk = row.split.context_size, row.chunk_J[:, None]
    key_position = torch.arange(int(row.chunk_J.max()) * 2 * size)[None]
    number = torch.minimum(key_position // chunk, torch.tensor(2 * size - 1))  # of the chunk
    owner = torch.where(number < size, number, 2 * size - 1 - number)
    offset = key_position % chunk + torch.where(number < size, 0, chunk)
    key_index = (owner * int(row.local_J.sum()) + row.start_J[:, None] + offset).flatten()
    query_offset = torch.arange(int(row.local_J.max()))[None].expand(len(chunk), -1)
    query_position = _positions(query_offset, chunk.expand_as(query_offset), row.split)
    is_padding = key_position >= 2 * size * chunk
    seen = (key_position[:, None, :] <= query_position[:, :, None]) & ~is_padding[:, None, :]
    return key_index, seen[:, None]


@dataclass(frozen=True)
class RotaryAngles:
    """Rotary embedding of a Hugging Face model: angle = position · inverse_frequency."""

    inverse_frequency: Tensor
    """[d/2] radians per position."""
    scaling: float = 1.0
    """Factor on cosine and sine; only YaRN has another than 1."""

    def __call__(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [tokens, 1, d/2] of integer positions [tokens]."""
        angle = (position_T[:, None].float() * self.inverse_frequency)[:, None]
        return angle.cos() * self.scaling, angle.sin() * self.scaling
