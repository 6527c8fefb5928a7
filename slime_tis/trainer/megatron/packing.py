"""Sequences → one packed row: context-parallel slices, next-token targets, and the layout attention works on.

The row is made of segments: whole sequences, or, with shared prompts, the parts of a prefix tree.

Shapes: suffix _T the packed tokens of this context-parallel rank, _L the response tokens that they predict, _S the
sequences of the micro-batch, _J its segments; a filler is the last of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime_tis.policy.tokens import ResponseTokens
from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.megatron.batch import TrainingBatch
from slime_tis.trainer.megatron.prefix_tree import PrefixTree
from slime_tis.trainer.megatron.shared_attention import SharedAttention


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's packed-sequence parameters, with what `ResponseModel` and `TorchAttention` need beside them."""

    response_rows: Tensor | None = None
    """[L] packed tokens that predict response tokens, in that order; None for all. With shared prompts a token is
    there once for each response that goes on from it."""
    gives_logits: bool = False
    """Whether the model's output are the logits after these tokens, or their hidden states, from which log-probs are
    computed without logits of all of them."""
    shared: SharedAttention | None = None
    """Attention over segments that several sequences have in common, in place of what follows; None where none is."""

    cos: Tensor | None = None
    """[tokens, 1, d/2] cosines of the rotary angles; None where transformer-engine applies its own."""
    sin: Tensor | None = None
    query_index: Tensor | None = None
    """[J·Lq] packed token at every place of the padded batch; None when all sequences are of one length."""
    key_index: Tensor | None = None
    """[J·Lk] the same for keys, into the tokens of all context-parallel ranks one after another."""
    token_index: Tensor | None = None
    """[tokens] place of every packed token in the padded batch."""
    attention_mask: Tensor | None = None
    """[J, 1, Lq, Lk] True where a query sees a key; None when plain causal attention is right."""
    sequences: int = 0

    def query_rows(self, x: Tensor) -> Tensor:
        """Packed [tokens, heads, d] → padded batch [J, heads, Lq, d]."""
        return self._rows(x, self.query_index)

    def key_rows(self, x: Tensor) -> Tensor:
        """Packed keys or values of all context-parallel ranks → padded batch [J, heads, Lk, d]."""
        return self._rows(x, self.key_index)

    def tokens(self, rows: Tensor) -> Tensor:
        """Padded batch [J, heads, Lq, d] → packed [tokens, heads, d]."""
        flat = rows.transpose(1, 2).flatten(0, 1)
        return flat if self.token_index is None else flat.index_select(0, self.token_index)

    def _rows(self, x: Tensor, index: Tensor | None) -> Tensor:
        x = x if index is None else x.index_select(0, index)
        rows: Tensor = x.unflatten(0, (self.sequences, -1))
        return rows.transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch on one context-parallel rank."""

    responses: ResponseTokens
    input_ids: Tensor
    """[1, T]"""
    position_ids: Tensor
    """[1, T] position of every token in its own sequence."""
    target_L: Tensor
    """The response tokens that this rank owns, which the logits after `packed_seq_params.response_rows` predict."""
    packed_seq_params: PackedSequences
    sequences: Sequence[Tensor]
    """Prompt and response of each sample, int64, on the host."""
    is_fed_T: Tensor
    """bool: tokens that another token of their sequence follows; False for the last ones, padding and filler."""
    sampling_mask: SamplingMask | None = None
    """The tokens that could be sampled in place of each of the L targets; None for all."""
    routed_experts: Tensor | None = None
    """int16 [T, sparse layers, k] to replay, -1 where nothing was recorded; None: nothing in the micro-batch was."""
    routing_weights: Tensor | None = None
    """float32 [T, sparse layers, k] of the same, NaN where nothing was recorded."""
    has_gradient: bool = True
    """Whether its loss is to be differentiated; without, it has a forward pass for the metrics."""
    logits: Tensor | None = None
    """[1, L, V] that predict the L targets, with gradient, once they are there; None where no user's loss gets them."""


def pack(
    batch: TrainingBatch,
    *,
    rotary: RotaryAngles | None = None,
    context_rank: int = 0,
    context_size: int = 1,
    tensor_size: int = 1,
    share_prompts: bool = False,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Packs whole sequences into one row, cut for this context-parallel rank.

    With `share_prompts` what sequences begin with alike is packed once (see `PrefixTree`), unless experts are replayed:
    those that were recorded of siblings' prompts can differ.

    With context parallelism every sequence is cut into 2·size chunks of ceil(total / 2·size) tokens and rank r holds
    chunks r and 2·size−1−r, so that each has as much causal attention to do. A filler sequence makes the row
    divisible by the tensor-parallel size, as sequence parallelism requires; nothing is trained on it.
    """
    tree = _tree(batch, share_prompts)
    filler = _filler_length([segment.length for segment in tree.segments], context_size, tensor_size)
    flat = torch.cat([*batch.tokens, torch.zeros(filler, dtype=torch.int64)])
    total_S = torch.tensor([*batch.total_lengths, *[filler] * (filler > 0)])
    prompt_S = total_S - torch.tensor([*batch.responses.response_lengths, *[0] * (filler > 0)])
    sequence_J = torch.tensor([*(segment.sequence for segment in tree.segments), *[len(batch)] * (filler > 0)])
    begin_J = torch.tensor([*(segment.start for segment in tree.segments), *[0] * (filler > 0)])
    length_J = torch.tensor([*(segment.length for segment in tree.segments), *[filler] * (filler > 0)])
    chunk_J = (length_J + 2 * context_size - 1) // (2 * context_size)
    local_J = length_J if context_size == 1 else 2 * chunk_J

    segment_T = torch.repeat_interleave(torch.arange(len(local_J)), local_J)
    start_J = local_J.cumsum(0) - local_J
    place_T = torch.arange(len(segment_T)) - start_J[segment_T]
    position_T = begin_J[segment_T] + _positions(place_T, chunk_J[segment_T], context_rank, context_size)
    sequence_T = sequence_J[segment_T]
    total_T = total_S[sequence_T]
    offset_T = (total_S.cumsum(0) - total_S)[sequence_T]

    def token_at(position: Tensor) -> Tensor:
        return torch.where(position < total_T, flat[offset_T + torch.minimum(position, total_T - 1)], 0)

    is_fed_T = (position_T < total_T - 1) & (sequence_T < len(batch))

    def recorded(rows: Sequence[Tensor | None] | None, dtype: torch.dtype, missing: float) -> Tensor | None:
        return recorded_rows(rows or [], sequence_T, position_T, is_fed_T, dtype=dtype, missing=missing)

    shared = SharedAttention.of(tree, filler) if tree.is_shared else None
    layout = _layout(local_J, start_J, segment_T, place_T, chunk_J, context_rank, context_size, shared)
    if rotary is not None:
        layout.cos, layout.sin = rotary(position_T)
    if shared is not None:
        layout.response_rows, target_L = _predicted(tree, start_J, flat)
    else:
        layout.response_rows = (is_fed_T & (position_T >= prompt_S[sequence_T] - 1)).nonzero().squeeze(1)
        target_L = token_at(position_T + 1)[layout.response_rows]
    masks = batch.sampling_masks
    packed = MicroBatch(
        responses=batch.responses,
        input_ids=token_at(position_T)[None],
        position_ids=position_T[None],
        target_L=target_L,
        packed_seq_params=layout,
        sampling_mask=None if masks is None else SamplingMask.cat(masks),
        sequences=batch.tokens,
        is_fed_T=is_fed_T,
        routed_experts=recorded(batch.routed_experts, torch.int16, -1),
        routing_weights=recorded(batch.routing_weights, torch.float32, torch.nan),
    )
    return packed if torch.device(device).type == "cpu" else _to(packed, device)


def _tree(batch: TrainingBatch, share_prompts: bool) -> PrefixTree:
    replays = any(experts is not None for experts in batch.routed_experts or [])
    if share_prompts and not replays:
        return PrefixTree.of(batch.tokens, batch.responses.response_lengths)
    return PrefixTree.apart(batch.total_lengths, batch.responses.response_lengths)


def _predicted(tree: PrefixTree, start_J: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
    """The packed tokens after which response tokens come, [L], and these, response by response.

    Args:
        tree: of the sequences.
        start_J: packed token at which each segment begins.
        flat: the tokens of one sequence after another.
    """
    parts = [
        (segment, min(tree.segments[segment].length, total - tree.segments[segment].start))
        for path, total in zip(tree.paths, tree.total_lengths, strict=True)
        for segment in path
    ]
    first, length = torch.tensor(parts).T
    packed = _ranges(start_J[first], length)
    total_S, response_S = torch.tensor(tree.total_lengths), torch.tensor(tree.response_lengths)
    before = _ranges(total_S.cumsum(0) - response_S - 1, response_S)  # each response token, in `flat`
    return packed[before], flat[before + 1]


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """start, start + 1, … of each length, one range after another."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - before, lengths)


def recorded_rows(
    rows_S: Sequence[Tensor | None],
    sequence_T: Tensor,
    position_T: Tensor,
    is_fed_T: Tensor,
    *,
    dtype: torch.dtype,
    missing: float,
) -> Tensor | None:
    """What the rollout engine recorded of every token that it was fed, [T, …].

    Args:
        rows_S: of each sequence, one row for each token but the last; None where it recorded nothing.
        sequence_T: the sequence of each packed token.
        position_T: its position there.
        is_fed_T: whether it has a row.
        dtype: of the result.
        missing: the value where there is no row: of the last tokens, padding, filler, and sequences without rows.

    Returns:
        None where there are no rows at all.
    """
    there = [rows for rows in rows_S if rows is not None]
    if not there:
        return None
    flat = torch.cat([*(rows.to(dtype) for rows in there), torch.full((1, *there[0].shape[1:]), missing, dtype=dtype)])
    count_S = torch.tensor([0 if rows is None else len(rows) for rows in rows_S] + [0])  # the filler has none
    start_S = count_S.cumsum(0) - count_S
    row_T = torch.where(is_fed_T & (count_S[sequence_T] > 0), start_S[sequence_T] + position_T, len(flat) - 1)
    return flat[row_T]


def _filler_length(totals: Sequence[int], context_size: int, tensor_size: int) -> int:
    if context_size == 1:
        return -sum(totals) % tensor_size
    local = sum(2 * -(-total // (2 * context_size)) for total in totals)
    return (-local % (2 * tensor_size)) * context_size


def _positions(place_T: Tensor, chunk_T: Tensor, rank: int, size: int) -> Tensor:
    if size == 1:
        return place_T
    first = rank * chunk_T + place_T
    second = (2 * size - 2 - rank) * chunk_T + place_T
    return torch.where(place_T < chunk_T, first, second)


def _layout(
    local_J: Tensor,
    start_J: Tensor,
    segment_T: Tensor,
    place_T: Tensor,
    chunk_J: Tensor,
    rank: int,
    size: int,
    shared: SharedAttention | None,
) -> PackedSequences:
    longest = int(local_J.max())
    cu_seqlens = torch.cat([local_J.new_zeros(1), local_J.cumsum(0)]).to(torch.int32) * size
    layout = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest * size,
        max_seqlen_kv=longest * size,
        sequences=len(local_J),
        shared=shared,
    )
    if shared is not None or (size == 1 and int(local_J.min()) == longest):
        return layout
    place = torch.arange(longest)
    layout.query_index = (start_J[:, None] + torch.minimum(place, local_J[:, None] - 1)).flatten()
    layout.token_index = segment_T * longest + place_T
    layout.key_index = layout.query_index
    if size > 1:
        key_index, seen = _gathered_keys(local_J, start_J, chunk_J, rank, size)
        layout.key_index, layout.attention_mask = key_index, seen
    return layout


def _gathered_keys(local_J: Tensor, start_J: Tensor, chunk_J: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Where each position's key lies among all ranks' tokens, and which keys each of this rank's queries sees."""
    tokens = int(local_J.sum())
    chunk = chunk_J[:, None]
    key_position = torch.arange(int(chunk_J.max()) * 2 * size)[None]
    part = torch.minimum(key_position // chunk, torch.tensor(2 * size - 1))
    owner = torch.where(part < size, part, 2 * size - 1 - part)
    place = key_position % chunk + torch.where(part < size, 0, chunk)
    key_index = (owner * tokens + start_J[:, None] + place).flatten()
    query_place = torch.arange(int(local_J.max()))[None].expand(len(local_J), -1)
    query_position = _positions(query_place, chunk.expand_as(query_place), rank, size)
    inside = key_position < 2 * size * chunk
    seen = (key_position[:, None, :] <= query_position[:, :, None]) & inside[:, None, :]
    return key_index, seen[:, None]


def _to(packed: MicroBatch, device: torch.device | str) -> MicroBatch:
    def move(value: Tensor) -> Tensor:
        return value.to(device, non_blocking=True)

    moved: dict[str, Any] = {
        name: move(value) for name, value in vars(packed.packed_seq_params).items() if isinstance(value, Tensor)
    }
    shared = packed.packed_seq_params.shared
    layout = replace(packed.packed_seq_params, **moved, shared=None if shared is None else shared.to(device))
    return MicroBatch(
        responses=packed.responses.to(device),
        input_ids=move(packed.input_ids),
        position_ids=move(packed.position_ids),
        target_L=move(packed.target_L),
        packed_seq_params=layout,
        sampling_mask=None if packed.sampling_mask is None else packed.sampling_mask.to(device),
        sequences=packed.sequences,
        is_fed_T=move(packed.is_fed_T),
        routed_experts=None if packed.routed_experts is None else move(packed.routed_experts),
        routing_weights=None if packed.routing_weights is None else move(packed.routing_weights),
    )


@dataclass(frozen=True)
class RotaryAngles:
    """Rotary embedding of a Hugging Face model: angle = position · inverse_frequency, scaled as the model says."""

    inverse_frequency: Tensor
    """[d/2] radians per position."""
    scaling: float = 1.0
    """Factor on cosine and sine (1 but for YaRN)."""

    def __call__(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [tokens, 1, d/2] of integer positions [tokens]."""
        angle = (position_T[:, None].float() * self.inverse_frequency)[:, None]
        return angle.cos() * self.scaling, angle.sin() * self.scaling
