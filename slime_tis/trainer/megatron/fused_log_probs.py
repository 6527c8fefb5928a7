"""Log-probs and entropies from hidden states: output layer and softmax in one, without a tensor of rows × vocabulary.

Shapes: suffix _L rows, that is response tokens; _LI the hidden states that predict them; _OI the output layer's weight,
one row for each token of the vocabulary that this tensor-parallel rank holds; _R the rows of a chunk and _RV a tile of
its logits, in a block of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.megatron.log_probs import in_this_shard, leave_out_

TILE_BYTES = 8 * 2**20
"""Of the logits that exist at a time, in float32: about what a processor's cache holds."""
GPU_TILE_BYTES = 128 * 2**20
"""On a GPU, where a tile costs a dozen kernel launches."""
MIN_COLUMNS = 512
"""Of a tile: with fewer, a matrix product is less efficient. More rows than fit beside them are taken in chunks."""


def fused_linear_log_probs(
    hidden_LI: Tensor,
    weight_OI: Tensor,
    target_L: Tensor,
    group: ProcessGroup | None,
    *,
    vocab_start: int = 0,
    width: int | None = None,
    temperature: float = 1.0,
    chunk_size: int = -1,
    entropy_gradient: bool = True,
    sampling_mask: SamplingMask | None = None,
    weight_grad_OI: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of every target under softmax(hidden · weightᵀ / temperature), and the entropy of that distribution.

    The values and gradients are those of `vocab_parallel_log_probs` of the logits, up to the order of sums. Logits
    exist a tile at a time, rows × a block of the vocabulary, from which the forward pass takes each row's maximum
    m, Σ e^{z−m}, Σ e^{z−m}(z−m) and the target's z; tiles merge as the tensor-parallel ranks do. The backward pass
    computes them again, all but the last tile's, which is saved, so that what fits into one tile is computed once.
    Each block of the weight's gradient is complete after its tiles. Rows whose gradient is zero, such as those of
    rejected tokens or of advantages of zero, are left out.

    As in "Cut Your Losses in Large-Vocabulary Language Models", Wijmans et al. (https://arxiv.org/abs/2411.09009),
    section 4, with exact gradients and the entropy.

    Args:
        hidden_LI: hidden states, the same on all tensor-parallel ranks; logits are in the precision of the weight.
        weight_OI: this rank's rows of the output layer.
        target_L: int64, ids in the whole vocabulary.
        group: tensor-parallel group over which the vocabulary is split; None or a group of one for a whole one.
        vocab_start: the id of this rank's first row of the weight.
        width: rows of the weight that are tokens; those after them pad the vocabulary. None for all.
        temperature: > 0, that of the sampling distribution.
        chunk_size: rows worked on at a time; −1 for as many as fit into a tile beside `MIN_COLUMNS`.
        entropy_gradient: whether the entropy is to be differentiated; without it the backward pass is cheaper.
        sampling_mask: the set of every row that the softmax is over, as of `vocab_parallel_log_probs`.
        weight_grad_OI: what the weight's gradient is added to in the backward pass, megatron-core's `main_grad`, in
            place of being returned to autograd, which would hold another tensor of that size meanwhile.

    Returns:
        (log_prob_L, entropy_L), float32 (float64 for such hidden states), differentiable in hidden states and weight
        (the entropy where asked for). The hidden states' gradient is summed over the group.

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not positive.
    """
    if hidden_LI.dim() != 2 or hidden_LI.shape[1:] != weight_OI.shape[1:] or target_L.shape != hidden_LI.shape[:1]:
        raise ValueError(
            "hidden states must be [rows, I], the weight [tokens, I] and targets [rows], "
            f"got {tuple(hidden_LI.shape)}, {tuple(weight_OI.shape)}, {tuple(target_L.shape)}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if sampling_mask is not None and len(sampling_mask) != len(target_L):
        raise ValueError(f"the sampling mask has {len(sampling_mask)} positions for {len(target_L)} rows")
    width = len(weight_OI) if width is None else width
    options = _Options(
        group=None if group is not None and group.size() == 1 else group,
        vocab_start=vocab_start,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
        sampling_mask=sampling_mask,
        weight_grad_OI=weight_grad_OI,
        tiles=_Tiles.of(len(target_L), width, chunk_size, GPU_TILE_BYTES if hidden_LI.is_cuda else TILE_BYTES),
    )
    found: tuple[Tensor, Tensor] = _FusedLinearLogProbs.apply(hidden_LI, weight_OI, target_L, options)  # type: ignore[no-untyped-call]  # torch's
    return found


LOWEST = -1e4
"""In place of −inf in z − m, where e^{z−m} is 0 in any precision: their product is to be 0."""


@dataclass(frozen=True, kw_only=True)
class _Tiles:
    """How rows × vocabulary is cut."""

    rows: int
    """Of a chunk."""
    blocks: Sequence[slice]
    """Of the vocabulary."""

    @classmethod
    def of(cls, rows: int, width: int, chunk_size: int, tile_bytes: int) -> "_Tiles":
        entries = tile_bytes // 4
        if chunk_size == -1:
            chunk_size = entries // max(min(width, MIN_COLUMNS), 1)
        chunk = max(min(rows, chunk_size), 1)
        columns = max(entries // chunk, MIN_COLUMNS)
        return cls(rows=chunk, blocks=[slice(start, min(start + columns, width)) for start in range(0, width, columns)])


@dataclass(frozen=True, kw_only=True)
class _Options:
    group: ProcessGroup | None
    vocab_start: int
    temperature: float
    entropy_gradient: bool
    sampling_mask: SamplingMask | None
    weight_grad_OI: Tensor | None
    tiles: _Tiles


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Some rows, and what their logits are computed from."""

    rows: slice
    hidden_RI: Tensor
    weight_OI: Tensor
    target_R: Tensor
    """Ids in this rank's vocabulary."""
    sampling_mask: SamplingMask | None
    vocab_start: int
    temperature: float

    def logits(self, block: slice) -> Tensor:
        """z [R, V] of a block of the vocabulary, −inf outside of the sets, in memory of its own."""
        logits_RV = self.hidden_RI @ self.weight_OI[block].t()
        z_RV = logits_RV.to(_precision(logits_RV))
        if self.temperature != 1.0:
            z_RV.div_(self.temperature)
        if self.sampling_mask is not None:
            leave_out_(z_RV, self.sampling_mask, self.vocab_start + block.start)
        return z_RV

    def columns(self, block: slice) -> tuple[Tensor, Tensor]:
        """Whether each row's target is in the block, [R], and its column there, [R, 1]."""
        return in_this_shard(self.target_R - block.start, block.stop - block.start)


def _chunks(hidden_LI: Tensor, weight_OI: Tensor, target_L: Tensor, options: _Options) -> list[_Chunk]:
    hidden_LI, count, mask = hidden_LI.to(weight_OI.dtype), options.tiles.rows, options.sampling_mask
    rows = [slice(start, min(start + count, len(target_L))) for start in range(0, max(len(target_L), 1), count)]
    masks: Sequence[SamplingMask | None] = [None] * len(rows)
    if mask is not None:
        masks = [mask] if len(rows) == 1 else mask.split([part.stop - part.start for part in rows])
    return [
        _Chunk(
            rows=part,
            hidden_RI=hidden_LI[part],
            weight_OI=weight_OI,
            target_R=target_L[part] - options.vocab_start,
            sampling_mask=of_part,
            vocab_start=options.vocab_start,
            temperature=options.temperature,
        )
        for part, of_part in zip(rows, masks, strict=True)
    ]


@dataclass(frozen=True)
class _Sums:
    """Of each row, over some of its logits z."""

    max: Tensor
    """m; the lowest finite number where there are no logits, or none is in the set."""
    normalizer: Tensor
    """Σ e^{z−m}"""
    weighted: Tensor
    """Σ e^{z−m}·(z−m)"""
    target: Tensor
    """The target's z; 0 where it is not among them."""

    @classmethod
    def none(cls, chunk: _Chunk) -> "_Sums":
        """Those over no logits."""
        zero = chunk.hidden_RI.new_zeros(len(chunk.target_R), dtype=_precision(chunk.hidden_RI))
        return cls(torch.full_like(zero, torch.finfo(zero.dtype).min), zero, zero, zero)

    @classmethod
    def of_tile(cls, chunk: _Chunk, block: slice) -> tuple["_Sums", Tensor]:
        """Those over a block of the vocabulary, and z − m."""
        z_RV = chunk.logits(block)
        max_R = z_RV.amax(1).clamp_min_(torch.finfo(z_RV.dtype).min)
        mine_R, column_R1 = chunk.columns(block)
        target_R = torch.where(mine_R, z_RV.gather(1, column_R1).squeeze(1), 0.0)
        exp_RV = z_RV.sub_(max_R.unsqueeze(1)).exp()
        normalizer_R = exp_RV.sum(1)
        if chunk.sampling_mask is not None:
            z_RV.clamp_min_(LOWEST)
        return cls(max_R, normalizer_R, exp_RV.mul_(z_RV).sum(1), target_R), z_RV

    @classmethod
    def cat(cls, parts: Sequence["_Sums"]) -> "_Sums":
        """Those of the rows of all parts."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def merge(self, other: "_Sums") -> "_Sums":
        """Those over the logits of both."""
        max_R = torch.maximum(self.max, other.max)
        one, two = self.relative_to(max_R), other.relative_to(max_R)
        normalizer_R, weighted_R = one.normalizer + two.normalizer, one.weighted + two.weighted
        return _Sums(max_R, normalizer_R, weighted_R, one.target + two.target)

    def over_ranks(self, group: ProcessGroup) -> "_Sums":
        """Those over the whole vocabulary."""
        max_R = self.max.clone()
        all_reduce(max_R, ReduceOp.MAX, group=group)
        own = self.relative_to(max_R)
        sums = torch.stack([own.normalizer, own.weighted, own.target])
        all_reduce(sums, group=group)
        return _Sums(max_R, *sums)

    def relative_to(self, max_R: Tensor) -> "_Sums":
        """The same, with the maximum over more logits as m."""
        down_R = self.max - max_R
        scale_R = down_R.exp()
        weighted_R = scale_R * (self.weighted + down_R * self.normalizer)
        return _Sums(max_R, scale_R * self.normalizer, weighted_R, self.target)


class _FusedLinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_LI: Tensor, weight_OI: Tensor, target_L: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor]:
        chunks = _chunks(hidden_LI, weight_OI, target_L, options)
        found = [_sums_of(chunk, options.tiles.blocks) for chunk in chunks]
        sums = _Sums.cat([of_chunk for of_chunk, _ in found])
        if options.group is not None:
            sums = sums.over_ranks(options.group)
        log_normalizer_L = sums.normalizer.log()
        log_prob_L = sums.target - sums.max - log_normalizer_L
        entropy_L = log_normalizer_L - sums.weighted / sums.normalizer
        if not options.entropy_gradient:
            ctx.mark_non_differentiable(entropy_L)
        last = found[0][1] if len(chunks) == 1 else ()
        ctx.options = options
        ctx.save_for_backward(weight_OI, hidden_LI, target_L, sums.max, log_normalizer_L, entropy_L, *last)
        return log_prob_L, entropy_L

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob_L: Tensor, grad_entropy_L: Tensor) -> tuple[Tensor | None, ...]:
        options: _Options = ctx.options
        weight_OI, *saved = ctx.saved_tensors
        hidden_LI = saved[0]
        rows = ((grad_log_prob_L != 0) | (grad_entropy_L != 0)).nonzero().squeeze(1)
        is_whole = len(rows) == len(hidden_LI)
        by_row = [grad_log_prob_L, grad_entropy_L, *saved]
        if not is_whole:
            mask = options.sampling_mask
            options = replace(options, sampling_mask=None if mask is None else mask.select(rows))
            by_row = [values.index_select(0, rows) for values in by_row]
        grad_hidden_LI, grad_weight_OI = _gradients(options, weight_OI, *by_row)
        if not is_whole:
            grad_hidden_LI = grad_hidden_LI.new_zeros(hidden_LI.shape).index_copy_(0, rows, grad_hidden_LI)
        if options.group is not None:
            all_reduce(grad_hidden_LI, group=options.group)
        is_added = options.weight_grad_OI is not None
        return grad_hidden_LI.to(hidden_LI.dtype), None if is_added else grad_weight_OI, None, None


def _sums_of(chunk: _Chunk, blocks: Sequence[slice]) -> tuple[_Sums, tuple[Tensor, ...]]:
    """The sums over all blocks, and of the last one z − m and m."""
    sums = _Sums.none(chunk)
    last: tuple[Tensor, ...] = ()
    for block in blocks:
        del last  # before the next tile is made
        tile, z_RV = _Sums.of_tile(chunk, block)
        sums, last = sums.merge(tile), (z_RV, tile.max)
        del z_RV
    return sums, last


def _gradients(
    options: _Options,
    weight_OI: Tensor,
    grad_log_prob_L: Tensor,
    grad_entropy_L: Tensor,
    hidden_LI: Tensor,
    target_L: Tensor,
    max_L: Tensor,
    log_normalizer_L: Tensor,
    entropy_L: Tensor,
    *last: Tensor,
) -> tuple[Tensor, Tensor]:
    """Those of the hidden states, in the precision of the sums and of this rank's vocabulary alone, and of the weight.

    With p = e^{z−m}/N the gradient of a logit is (1_y·∂log π − p·(∂log π + (log p + H)·∂H)) / temperature, which is
    e^{z−m}·(constant + slope·(z−m)) beside the target's.
    """
    chunks = _chunks(hidden_LI, weight_OI, target_L, options) if len(target_L) else []
    scale_L = (-log_normalizer_L).exp() / -options.temperature
    constant_L = scale_L * (grad_log_prob_L + grad_entropy_L * (entropy_L - log_normalizer_L))
    slope_L = scale_L * grad_entropy_L if options.entropy_gradient else None
    of_target_L = grad_log_prob_L / options.temperature
    grad_hidden_LI = max_L.new_zeros(hidden_LI.shape)
    grad_weight_OI = torch.zeros_like(weight_OI) if options.weight_grad_OI is None else options.weight_grad_OI
    for block in options.tiles.blocks:
        grad_block_OI = grad_weight_OI[block].to(max_L.dtype)
        for chunk in chunks:
            rows = chunk.rows
            if last and block.stop == options.tiles.blocks[-1].stop:
                z_RV = last[0].sub_((max_L - last[1]).unsqueeze(1))
            else:
                z_RV = chunk.logits(block).sub_(max_L[rows].unsqueeze(1))
            grad_RV = _grad_logits(z_RV, constant_L[rows], None if slope_L is None else slope_L[rows])
            mine_R, column_R1 = chunk.columns(block)
            grad_RV.scatter_add_(1, column_R1, torch.where(mine_R, of_target_L[rows], 0.0).unsqueeze(1))
            grad_RV = grad_RV.to(weight_OI.dtype)
            _add_product_(grad_hidden_LI[rows], grad_RV, weight_OI[block])
            _add_product_(grad_block_OI, grad_RV.t(), chunk.hidden_RI)
            del z_RV, grad_RV  # before the next tile is made
        if grad_block_OI.dtype != grad_weight_OI.dtype:  # else it is a view
            grad_weight_OI[block] = grad_block_OI
    return grad_hidden_LI, grad_weight_OI


def _grad_logits(z_RV: Tensor, constant_R: Tensor, slope_R: Tensor | None) -> Tensor:
    """e^z·(constant + slope·z); overwrites z."""
    if slope_R is None:
        return z_RV.exp_().mul_(constant_R.unsqueeze(1))
    exp_RV = z_RV.exp()
    return exp_RV.mul_(z_RV.clamp_min_(LOWEST).mul_(slope_R.unsqueeze(1)).add_(constant_R.unsqueeze(1)))


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right, which is in another precision where that of the weight is lower."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _precision(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
