"""Packs sequences into one row: context-parallel slices, next-token targets, attention indices.

The row consists of segments. A segment is a sequence, or, with shared prompts, a node of a prefix
tree.

Shapes: suffix _T is the packed tokens of this context-parallel rank, _L the response tokens that
they predict, _S the sequences of the micro-batch, _J its segments. If there is a filler, it is the
last sequence and the last segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slime_tis.policy.response_tokens import ResponseTokens
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
    shares_keys: bool = False
    """Whether several rows may have the same keys, those of a common prompt."""

    def gather(self, x: Tensor, index: Tensor | None) -> Tensor:
        """Packed [tokens, heads, d] → padded batch [rows, heads, length, d]."""
        if index is not None:
            x = x.index_select(0, index)
        rows: Tensor = x.unflatten(0, (self.count, -1))
        return rows.transpose(1, 2)


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's packed-sequence parameters.

    The additional fields are inputs of `ResponseModel` and `TorchAttention`.
    """

    response_rows: Tensor | None = None
    """[L] packed tokens that predict the response tokens; None for all."""
    gives_logits: bool = False
    """Whether the model returns logits after these tokens instead of hidden states."""
    cos: Tensor | None = None
    """[tokens, kinds, d/2] cosines of the rotary angles; None if transformer-engine applies
    them."""
    sin: Tensor | None = None
    rows: tuple[AttentionRows, ...] = ()
    """Every packed token is once a query."""
    token_index: Tensor | None = None
    """[tokens] index of every packed token in the concatenated padded batches."""

    def packed(self, outputs: Sequence[Tensor]) -> Tensor:
        """Padded batches [rows, heads, Lq, d] → packed [tokens, heads, d]."""
        flat = torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs])
        if self.token_index is None:
            return flat
        return flat.index_select(0, self.token_index)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch on one context-parallel rank."""

    responses: ResponseTokens
    input_ids: Tensor
    position_ids: Tensor
    target_L: Tensor
    """This rank's response tokens, which the logits after `packed_seq_params.response_rows`
    predict."""
    packed_seq_params: PackedSequences
    sequences: Sequence[Tensor]
    """Per sample, token ids of prompt and response, int64, on the host."""
    is_fed_T: Tensor
    """bool: whether a token of the same sequence follows; False for padding and filler."""
    sampling_mask: SamplingMask | None = None
    """The tokens that could be sampled at each of the L targets; None for all."""
    routed_experts: Tensor | None = None
    """int16 [T, sparse layers, k] to replay, -1 for tokens without a record; None if there is no
    record."""
    routing_weights: Tensor | None = None
    """Their float32 weights, NaN for tokens without a record."""
    has_gradient: bool = True
    """Whether its loss is differentiated; if not, its forward pass is for the metrics."""
    logits: Tensor | None = None
    """[1, L, V] that predict the L targets, with gradient; None if the loss does not get them."""

    def to(self, device: torch.device) -> "MicroBatch":
        """The micro-batch on a device, except `sequences`."""
        if device.type == "cpu":
            return self
        moved: MicroBatch = _on_device(self, device)
        return moved


def _on_device(value: Any, device: torch.device) -> Any:
    """Copies the tensors inside a micro-batch; other values stay as they are."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, ResponseTokens | SamplingMask):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_on_device(item, device) for item in value)
    if isinstance(value, MicroBatch | PackedSequences | AttentionRows):
        moved = {}
        for name, field in vars(value).items():
            copy = _on_device(field, device)
            if copy is not field:
                moved[name] = copy
        return replace(value, **moved)
    return value


@dataclass(frozen=True)
class _Row:
    """Where the tokens of a packed row come from."""

    split: RowSplit
    local_J: Tensor
    """Per segment, number of tokens on this rank."""
    start_J: Tensor
    """Per segment, index of the first packed token."""
    chunk_J: Tensor
    """Per segment, number of tokens in a context-parallel chunk."""
    segment_T: Tensor
    """Per packed token, index of the segment."""
    offset_T: Tensor
    """Per packed token, index among the segment's tokens on this rank."""
    sequence_T: Tensor
    """Per packed token, index of the sequence; the filler is the sequence after the last one."""
    position_T: Tensor
    """Per packed token, position in the sequence."""

    @classmethod
    def of(cls, tree: PrefixTree, filler: int, split: RowSplit) -> "_Row":
        """Cuts the segments of a tree, and a filler of that many tokens, for one rank."""
        sequences = [segment.sequence for segment in tree.segments]
        starts = [segment.start for segment in tree.segments]
        lengths = [segment.length for segment in tree.segments]
        if filler:
            sequences.append(len(tree))
            starts.append(0)
            lengths.append(filler)
        sequence_J = torch.tensor(sequences)
        begin_J = torch.tensor(starts)
        length_J = torch.tensor(lengths)
        chunks = 2 * split.context_size
        chunk_J = (length_J + chunks - 1) // chunks
        # every rank has two chunks of each sequence; the last chunk of a sequence may be shorter
        local_J = length_J if split.context_size == 1 else 2 * chunk_J
        segment_T = torch.repeat_interleave(torch.arange(len(local_J)), local_J)
        start_J = local_J.cumsum(0) - local_J
        offset_T = torch.arange(len(segment_T)) - start_J[segment_T]
        return cls(
            split=split,
            local_J=local_J,
            start_J=start_J,
            chunk_J=chunk_J,
            segment_T=segment_T,
            offset_T=offset_T,
            sequence_T=sequence_J[segment_T],
            position_T=begin_J[segment_T] + _positions(offset_T, chunk_J[segment_T], split),
        )


def pack(
    batch: TrainingBatch,
    split: RowSplit | None = None,
    *,
    rotary: "RotaryAngles | None" = None,
    share_prompts: bool = False,
    limits_padding: bool = False,
) -> MicroBatch:
    """Packs sequences into one row, cut for this context-parallel rank.

    With `share_prompts`, shared beginnings are packed once (see `PrefixTree`).

    With context parallelism every sequence is cut into 2·size chunks of ceil(total / 2·size)
    tokens, and rank r holds chunks r and 2·size−1−r, so that all ranks have equal work in causal
    attention. A filler sequence, which is not trained on, makes the row divisible by the
    tensor-parallel size.

    Args:
        batch: The samples of the micro-batch.
        split: How the row is divided over ranks; one rank if None.
        rotary: Computes the rotary angles; None if the attention layer applies them itself.
        share_prompts: Whether common beginnings are packed once.
        limits_padding: Whether only sequences of similar length are rows of one padded batch, also
            without shared prompts.
    """
    split = split or RowSplit()
    totals = list(batch.responses.total_lengths)
    lengths = list(batch.responses.response_lengths)
    if share_prompts:
        tree = PrefixTree.of(batch.tokens, lengths)
    else:
        tree = PrefixTree.apart(totals, lengths)
    filler = _filler_length([segment.length for segment in tree.segments], split)
    if filler:
        totals.append(filler)
        lengths.append(0)
    row = _Row.of(tree, filler, split)
    flat = torch.cat([*batch.tokens, torch.zeros(filler, dtype=torch.int64)])
    total_S = torch.tensor(totals)
    prompt_S = total_S - torch.tensor(lengths)
    total_T = total_S[row.sequence_T]
    start_T = (total_S.cumsum(0) - total_S)[row.sequence_T]

    def token_at(position_T: Tensor) -> Tensor:
        """Token ids at positions of the packed tokens' sequences; 0 after a sequence's end."""
        index_T = start_T + torch.minimum(position_T, total_T - 1)
        return torch.where(position_T < total_T, flat[index_T], 0)

    is_fed_T = (row.position_T < total_T - 1) & (row.sequence_T < len(batch))
    layout = _layout(row, tree, filler, limits_padding=limits_padding)
    if rotary is not None:
        layout.cos, layout.sin = rotary(row.position_T)
    if tree.is_shared:
        layout.response_rows, target_L = _predicted(tree, row.start_J, flat)
    else:
        # the last prompt token predicts the first response token
        predicts_T = is_fed_T & (row.position_T >= prompt_S[row.sequence_T] - 1)
        layout.response_rows = predicts_T.nonzero().squeeze(1)
        target_L = token_at(row.position_T + 1)[layout.response_rows]
    sampling_mask = None
    if batch.sampling_masks is not None:
        sampling_mask = SamplingMask.cat(batch.sampling_masks)
    no_expert = torch.tensor(-1, dtype=torch.int16)
    no_weight = torch.tensor(torch.nan)
    return MicroBatch(
        responses=batch.responses,
        input_ids=token_at(row.position_T)[None],
        position_ids=row.position_T[None],
        target_L=target_L,
        packed_seq_params=layout,
        sampling_mask=sampling_mask,
        sequences=batch.tokens,
        is_fed_T=is_fed_T,
        routed_experts=_recorded(batch.routed_experts, row, is_fed_T, missing=no_expert),
        routing_weights=_recorded(batch.routing_weights, row, is_fed_T, missing=no_weight),
    )


def _predicted(tree: PrefixTree, start_J: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the predictions of response tokens in a row with shared beginnings.

    Returns:
        The packed tokens [L] that predict response tokens, and the response tokens [L], response by
        response.
    """
    segments = []
    lengths = []
    for path, total in zip(tree.paths, tree.total_lengths, strict=True):
        for number in path:
            segment = tree.segments[number]
            segments.append(number)
            # a segment may be longer than a sequence that ends inside it
            lengths.append(min(segment.length, total - segment.start))
    packed = _ranges(start_J[torch.tensor(segments)], torch.tensor(lengths))
    total_S = torch.tensor(tree.total_lengths)
    response_S = torch.tensor(tree.response_lengths)
    before_response_S = total_S.cumsum(0) - response_S - 1
    before_L = _ranges(before_response_S, response_S)  # indices into `flat`
    return packed[before_L], flat[before_L + 1]


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenates arange(start, start + length) for all pairs."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - before, lengths)


def _recorded(
    rows_S: Sequence[Tensor | None] | None, row: _Row, is_fed_T: Tensor, *, missing: Tensor
) -> Tensor | None:
    """Reads the rollout engine's records, one row for each token except the last of a sequence.

    Returns:
        The record of every packed token [T, …], `missing` for tokens without one; None if no
        sequence has a record.
    """
    if rows_S is None:
        return None
    recorded = [rows for rows in rows_S if rows is not None]
    if not recorded:
        return None
    blocks = [rows.to(missing.dtype) for rows in recorded]
    blocks.append(missing.expand(1, *recorded[0].shape[1:]))
    flat = torch.cat(blocks)
    counts = [0 if rows is None else len(rows) for rows in rows_S]
    counts.append(0)  # the filler
    count_S = torch.tensor(counts)
    start_S = count_S.cumsum(0) - count_S
    has_row_T = is_fed_T & (count_S[row.sequence_T] > 0)
    index_T = start_S[row.sequence_T] + row.position_T
    return flat[torch.where(has_row_T, index_T, len(flat) - 1)]


def _filler_length(totals: Sequence[int], split: RowSplit) -> int:
    """Returns the length of the filler sequence over all context-parallel ranks."""
    if split.context_size == 1:
        return -sum(totals) % split.tensor_size
    chunks = 2 * split.context_size
    local = sum(2 * -(-total // chunks) for total in totals)
    # a filler of 2·size·n tokens adds 2·n to every rank
    return (-local % (2 * split.tensor_size)) * split.context_size


def _positions(offset: Tensor, chunk: Tensor, split: RowSplit) -> Tensor:
    """Positions in a segment of this rank's tokens: chunk r, then chunk 2·size−1−r."""
    rank = split.context_rank
    size = split.context_size
    if size == 1:
        return offset
    first = rank * chunk + offset
    # `offset` counts from the start of the first chunk, therefore one chunk less
    second = (2 * size - 2 - rank) * chunk + offset
    return torch.where(offset < chunk, first, second)


def _layout(row: _Row, tree: PrefixTree, filler: int, *, limits_padding: bool) -> PackedSequences:
    """Describes the row for megatron-core and for the attention in plain torch."""
    size = row.split.context_size
    longest = int(row.local_J.max())
    ends = torch.cat([row.local_J.new_zeros(1), row.local_J.cumsum(0)])
    cu_seqlens = ends.to(torch.int32) * size  # transformer-engine counts the tokens of all ranks
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
        return layout
    has_equal_lengths = int(row.local_J.min()) == longest
    if size == 1 and has_equal_lengths:
        return layout
    buckets = [list(range(len(row.local_J)))]
    if limits_padding:
        buckets = _buckets_of_similar(row.local_J.tolist())
    rows = []
    first_J = torch.empty_like(row.start_J)  # index in the concatenated padded batches
    padded = 0
    for bucket in buckets:
        segments = torch.tensor(bucket)
        rows.append(_padded_rows(row, segments))
        length = int(row.local_J[segments].max())
        first_J[segments] = padded + length * torch.arange(len(bucket))
        padded += length * len(bucket)
    layout.rows = tuple(rows)
    layout.token_index = first_J[row.segment_T] + row.offset_T
    return layout


def _padded_rows(row: _Row, segments: Tensor) -> AttentionRows:
    """Makes the rows of some segments that share nothing, padded to the longest of these."""
    local = row.local_J[segments][:, None]
    offset = torch.arange(int(local.max()))
    start = row.start_J[segments][:, None]
    query_index = (start + torch.minimum(offset, local - 1)).flatten()
    key_index = query_index
    mask = None
    if row.split.context_size > 1:
        key_index, mask = _gathered_keys(row, segments)
    return AttentionRows(
        count=len(segments), query_index=query_index, key_index=key_index, mask=mask
    )


def _shared_rows(tree: PrefixTree, filler: int) -> tuple[tuple[AttentionRows, ...], Tensor]:
    """Makes the rows of a tree's segments and of the filler; a segment also sees its ancestors.

    Returns:
        One `AttentionRows` for each bucket of segments of similar length, and the index [tokens] of
        every packed token in the concatenated padded batches.
    """
    starts = [segment.start for segment in tree.segments]
    lengths = [segment.length for segment in tree.segments]
    parents = [segment.parent for segment in tree.segments]
    if filler:
        starts.append(0)
        lengths.append(filler)
        parents.append(-1)
    paths: list[Tensor] = []  # packed tokens up to the end of each segment
    total = 0
    for length, parent in zip(lengths, parents, strict=True):
        tokens = torch.arange(total, total + length)
        paths.append(tokens if parent < 0 else torch.cat([paths[parent], tokens]))
        total += length
    rows = []
    token_index = torch.empty(total, dtype=torch.int64)
    padded = 0
    for bucket in _buckets_of_similar(lengths):
        start_R = torch.tensor([starts[number] for number in bucket])[:, None]
        length_R = torch.tensor([lengths[number] for number in bucket])[:, None]
        offset = torch.arange(int(length_R.max()))
        position = start_R + torch.minimum(offset, length_R - 1)
        keys = pad_sequence([paths[number] for number in bucket], batch_first=True)
        queries = keys.gather(1, position)
        mask = torch.arange(keys.shape[1]) <= position[..., None]
        rows.append(
            AttentionRows(
                count=len(bucket),
                query_index=queries.flatten(),
                key_index=keys.flatten(),
                mask=mask[:, None],
                shares_keys=True,
            )
        )
        is_token = offset < length_R
        places = torch.arange(padded, padded + queries.numel()).view_as(queries)
        token_index[queries[is_token]] = places[is_token]
        padded += queries.numel()
    return tuple(rows), token_index


def _buckets_of_similar(lengths: Sequence[int]) -> list[list[int]]:
    """Sorts indices into buckets with longest ≤ 2 · shortest, which limits padding."""
    buckets: list[list[int]] = []
    longest = 0
    longest_first = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    for index in longest_first:
        if not buckets or 2 * lengths[index] < longest:
            buckets.append([])
            longest = lengths[index]
        buckets[-1].append(index)
    return [sorted(bucket) for bucket in buckets]


def _gathered_keys(row: _Row, segments: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the keys of segments among the tokens gathered from all context-parallel ranks.

    Returns:
        Index [rows·Lk] into the gathered tokens, rank by rank, and the causal mask [rows, 1, Lq,
        Lk].
    """
    size = row.split.context_size
    chunk = row.chunk_J[segments][:, None]
    last_chunk = torch.tensor(2 * size - 1)
    key_position = torch.arange(int(chunk.max()) * 2 * size)[None]
    chunk_number = torch.minimum(key_position // chunk, last_chunk)
    is_first_chunk = chunk_number < size
    owner = torch.where(is_first_chunk, chunk_number, last_chunk - chunk_number)
    offset = key_position % chunk + torch.where(is_first_chunk, 0, chunk)
    tokens_per_rank = int(row.local_J.sum())
    start = row.start_J[segments][:, None]
    key_index = (owner * tokens_per_rank + start + offset).flatten()
    longest = int(row.local_J[segments].max())
    query_offset = torch.arange(longest)[None].expand(len(chunk), -1)
    query_position = _positions(query_offset, chunk.expand_as(query_offset), row.split)
    is_padding = key_position >= 2 * size * chunk
    seen = (key_position[:, None, :] <= query_position[:, :, None]) & ~is_padding[:, None, :]
    return key_index, seen[:, None]


@dataclass(frozen=True)
class RotaryAngles:
    """Rotary embedding of a Hugging Face model: angle = position · inverse_frequency."""

    inverse_frequency: Tensor
    """[kinds, d/2] radians per position, for each kind of layers."""
    scaling: float = 1.0
    """Factor on cosine and sine; only YaRN has another than 1."""

    def __call__(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [tokens, kinds, d/2] of integer positions [tokens]."""
        angle = position_T[:, None, None].float() * self.inverse_frequency
        return angle.cos() * self.scaling, angle.sin() * self.scaling
