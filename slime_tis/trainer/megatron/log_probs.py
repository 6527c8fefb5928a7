"""Log-probs and entropies of tokens, from vocabulary-parallel logits or from hidden states.

From logits, the memory is that of one softmax. From hidden states, it is that of one tile of
logits.

Shapes: suffix _L is the rows, that is response tokens; V this tensor-parallel rank's part of the
vocabulary; _LI the hidden states that predict the rows; _OI this rank's rows of the output layer;
_R the rows of a chunk and _RV a tile of its logits, in a block of the vocabulary.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from slime_tis.integrations.slime import context_parallel
from slime_tis.trainer.data.sample import SamplingMask
from slime_tis.trainer.invariant.operations import Tiles, product, row_sums
from slime_tis.trainer.matrix_products import linear, multiply, prefers_onednn

LOWEST = -1e4
"""Replaces −inf in z − m, so that e^{z−m}·(z−m) is 0."""
TILE_BYTES = 8 * 2**20
"""Size of a tile of float32 logits: about a processor's cache."""
GPU_TILE_BYTES = 128 * 2**20
"""The same on a GPU, where a tile costs a dozen kernel launches."""
MIN_COLUMNS = 512
"""Columns of a tile: with fewer, a matrix product is less efficient."""


@dataclass(frozen=True, kw_only=True)
class TokenDistribution:
    """softmax(logits / temperature) over the tokens that could be sampled.

    Tensor-parallel ranks divide the vocabulary.
    """

    temperature: float = 1.0
    sampling_mask: SamplingMask | None = None
    """Each row's set of tokens. A row without a set has the complete vocabulary; None if all rows
    have."""
    group: ProcessGroup | None = None
    """Tensor-parallel group over which the vocabulary is split."""
    vocab_start: int = 0
    vocab_size: int | None = None
    """Tokens of the complete vocabulary; None if it is not padded."""
    chunk_size: int = -1
    """Rows per chunk, which bounds the temporaries; −1 for automatic."""
    entropy_gradient: bool = True
    sums_squares: bool = False
    """Whether Σ_v π_v² is computed, without gradient."""
    tiles: Tiles | None = None
    """Rows of the product with the output layer, if log-probs must equal the rollout engine's to
    the bit. Then the vocabulary is one block. None for the fastest order of sums."""

    def width(self, columns: int) -> int:
        """Returns how many of this rank's columns are tokens; the others pad the vocabulary."""
        if self.vocab_size is None:
            return columns
        tokens_from_here = max(self.vocab_size - self.vocab_start, 0)
        return min(tokens_from_here, columns)

    def scale_(self, logits_LV: Tensor, start: int) -> Tensor:
        """Divides logits by the temperature, and sets tokens outside the sets to −inf.

        The first column is token `start`.
        """
        if self.temperature != 1.0:
            logits_LV.div_(self.temperature)
        if self.sampling_mask is not None:
            leave_out_(logits_LV, self.sampling_mask, start)
        return logits_LV


def vocab_parallel_log_probs(
    logits_LV: Tensor, target_L: Tensor, distribution: TokenDistribution
) -> tuple[Tensor, ...]:
    """Log-prob of every target under the distribution, and the distribution's entropy.

        z = logits / temperature
        log π(y) = z_y − log Σ_{v∈S} e^{z_v}
        H = log Σ_{v∈S} e^{z_v} − Σ_{v∈S} π_v z_v

    The third value is Σ_{v∈S} π_v² if the distribution `sums_squares`.

    S is the complete vocabulary, or the set of tokens that could be sampled. The set is constant
    under differentiation ("DeepSeek-V3.2", DeepSeek-AI (https://arxiv.org/abs/2512.02556),
    section 3.1, "Keep Sampling Mask").

    One [L, V] tensor is saved for the backward pass. It overwrites fp32 logits, which a linear
    layer does not need.
    """
    function: Any = _VocabParallelLogProbs  # torch does not type `apply`
    outputs: tuple[Tensor, ...] = function.apply(logits_LV, target_L, distribution)
    return outputs


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_LV: Tensor, target_L: Tensor, distribution: TokenDistribution
    ) -> tuple[Tensor, ...]:
        z_LV = logits_LV.detach().to(precision(logits_LV))
        z_LV = distribution.scale_(z_LV, distribution.vocab_start)
        column_L = target_L - distribution.vocab_start
        chunks = []
        for rows in row_chunks(len(z_LV), distribution.chunk_size):
            chunk = LogitSums.of_(z_LV[rows], column_L[rows], distribution, has_minus_infinity=True)
            chunks.append(chunk)
        local_sums = LogitSums.cat(chunks)
        sums = local_sums.over_ranks(distribution.group)
        log_normalizer_L, outputs = sums.outputs(ctx, distribution)
        _, entropy_L, *_ = outputs
        # z_LV is z − m of this rank; the backward pass needs z − m of all ranks
        max_rise_L = sums.max - local_sums.max
        ctx.save_for_backward(z_LV, column_L, max_rise_L, log_normalizer_L, entropy_L)
        ctx.distribution = distribution
        ctx.dtype = logits_LV.dtype
        return outputs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_prob_L: Tensor, grad_entropy_L: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        z_LV, column_L, max_rise_L, log_normalizer_L, entropy_L = ctx.saved_tensors
        gradient = LogitGradient.of(
            ctx.distribution, grad_log_prob_L, grad_entropy_L, log_normalizer_L, entropy_L
        )
        z_LV.sub_(max_rise_L.unsqueeze(1))
        for rows in row_chunks(len(z_LV), ctx.distribution.chunk_size):
            gradient.overwrite_(z_LV[rows], column_L[rows], rows)
        return z_LV.to(ctx.dtype), None, None


@dataclass(frozen=True)
class LogitSums:
    """Sums of each row over some of its logits z."""

    max: Tensor
    """m; the lowest finite number if there are no logits, or all are −inf."""
    normalizer: Tensor
    """Σ e^{z−m}"""
    weighted: Tensor
    """Σ e^{z−m}·(z−m)"""
    target: Tensor
    """The target's z; 0 if the target is not among the logits."""
    squares: Tensor
    """Σ e^{2(z−m)}; 0 unless asked for."""

    @classmethod
    def none(cls, like_L: Tensor) -> "LogitSums":
        """Sums over no logits."""
        zero_L = torch.zeros_like(like_L, dtype=precision(like_L))
        # not −inf: the difference of two −inf would be NaN when sums are merged
        lowest_L = torch.full_like(zero_L, torch.finfo(zero_L.dtype).min)
        return cls(lowest_L, zero_L, zero_L, zero_L, zero_L)

    @classmethod
    def of_(
        cls,
        z_LV: Tensor,
        column_L: Tensor,
        distribution: TokenDistribution,
        *,
        has_minus_infinity: bool,
    ) -> "LogitSums":
        """Returns sums over z, and overwrites z by z − m.

        `column_L` is each target's column; it may be out of range.
        """
        max_L = z_LV.amax(1).clamp_min_(torch.finfo(z_LV.dtype).min)
        is_here_L, column_L1 = columns(column_L, z_LV.shape[1])
        target_L = torch.where(is_here_L, z_LV.gather(1, column_L1).squeeze(1), 0.0)
        exp_LV = z_LV.sub_(max_L.unsqueeze(1)).exp()
        normalizer_L = row_sums(exp_LV)
        squares_L = torch.zeros_like(normalizer_L)
        if distribution.sums_squares:
            squares_L = torch.linalg.vector_norm(exp_LV, dim=1).square_()
        if has_minus_infinity:
            z_LV.clamp_min_(LOWEST)  # 0 · −inf would be NaN
        weighted_L = exp_LV.mul_(z_LV).sum(1)
        return cls(max_L, normalizer_L, weighted_L, target_L, squares_L)

    @classmethod
    def cat(cls, chunks: Sequence["LogitSums"]) -> "LogitSums":
        """The sums of the rows of all chunks."""
        columns = []
        for field in fields(cls):
            columns.append(torch.cat([getattr(chunk, field.name) for chunk in chunks]))
        return cls(*columns)

    def merge(self, other: "LogitSums") -> "LogitSums":
        """Sums over the logits of both."""
        max_L = torch.maximum(self.max, other.max)
        sums = self._relative_to(max_L) + other._relative_to(max_L)
        return LogitSums(max_L, *sums)

    def over_ranks(self, group: ProcessGroup | None) -> "LogitSums":
        """Sums over the complete vocabulary; a collective of the group."""
        if group is None or group.size() == 1:
            return self
        max_L = self.max.clone()
        all_reduce(max_L, ReduceOp.MAX, group=group)
        sums = self._relative_to(max_L)
        all_reduce(sums, group=group)
        return LogitSums(max_L, *sums)

    def outputs(
        self, ctx: Any, distribution: TokenDistribution
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes the outputs of an autograd function from sums over all columns.

        Returns:
            log Σ e^{z−m} [L]; log-probs, entropies, and Σ π² if the distribution `sums_squares`.
        """
        log_normalizer_L = self.normalizer.log()
        log_prob_L = self.target - self.max - log_normalizer_L
        entropy_L = log_normalizer_L - self.weighted / self.normalizer
        outputs = [log_prob_L, entropy_L]
        constants = [] if distribution.entropy_gradient else [entropy_L]
        if distribution.sums_squares:
            squares_L = self.squares / self.normalizer.square()
            outputs.append(squares_L)
            constants.append(squares_L)
        ctx.mark_non_differentiable(*constants)
        return log_normalizer_L, tuple(outputs)

    def _relative_to(self, max_L: Tensor) -> Tensor:
        """The sums [4, L] with the maximum over more logits as m, in the order of the fields."""
        shift_L = self.max - max_L
        scale_L = shift_L.exp()
        normalizer_L = scale_L * self.normalizer
        weighted_L = scale_L * (self.weighted + shift_L * self.normalizer)
        squares_L = scale_L.square() * self.squares
        return torch.stack([normalizer_L, weighted_L, self.target, squares_L])


@dataclass(frozen=True)
class LogitGradient:
    """The gradient of logits: e^{z−m}·(constant + slope·(z−m)), plus `target` at the target.

    With p = e^{z−m}/N this is (1_y·∂log π − p·(∂log π + (log p + H)·∂H)) / temperature.
    """

    constant: Tensor
    slope: Tensor | None
    target: Tensor

    @classmethod
    def of(
        cls,
        distribution: TokenDistribution,
        grad_log_prob_L: Tensor,
        grad_entropy_L: Tensor,
        log_normalizer_L: Tensor,
        entropy_L: Tensor,
    ) -> "LogitGradient":
        """The gradient, given the gradients of log-probs and entropies."""
        scale_L = (-log_normalizer_L).exp() / -distribution.temperature
        slope_L = None
        if distribution.entropy_gradient:
            slope_L = scale_L * grad_entropy_L
        return cls(
            constant=scale_L * (grad_log_prob_L + grad_entropy_L * (entropy_L - log_normalizer_L)),
            slope=slope_L,
            target=grad_log_prob_L / distribution.temperature,
        )

    def select(self, rows: Tensor) -> "LogitGradient":
        """The gradient of these rows."""
        slope = None if self.slope is None else self.slope[rows]
        return LogitGradient(self.constant[rows], slope, self.target[rows])

    def overwrite_(self, z_RV: Tensor, column_R: Tensor, rows: slice) -> Tensor:
        """Overwrites z − m of some rows with their gradient, and returns it."""
        constant_R1 = self.constant[rows].unsqueeze(1)
        if self.slope is None:
            z_RV.exp_().mul_(constant_R1)
        else:
            slope_R1 = self.slope[rows].unsqueeze(1)
            exp_RV = z_RV.exp()
            z_RV.clamp_min_(LOWEST).mul_(slope_R1).add_(constant_R1).mul_(exp_RV)
        is_here_R, column_R1 = columns(column_R, z_RV.shape[1])
        target_R = torch.where(is_here_R, self.target[rows], 0.0)
        return z_RV.scatter_add_(1, column_R1, target_R.unsqueeze(1))


def fused_linear_log_probs(
    hidden_LI: Tensor,
    weight_OI: Tensor,
    target_L: Tensor,
    distribution: TokenDistribution,
    weight_grad_OI: Tensor | None,
) -> tuple[Tensor, ...]:
    """Log-prob of every target, and the entropy, of softmax(hidden · weightᵀ / temperature).

    Values and gradients equal `vocab_parallel_log_probs` of the logits, up to the order of sums.
    Only one tile of logits exists at a time, rows × a block of the vocabulary. The forward pass
    takes from it each row's maximum m, Σ e^{z−m}, Σ e^{z−m}(z−m) and the target's z; tiles merge as
    the tensor-parallel ranks do. The backward pass computes the tiles again, except the last one,
    which is saved. Rows whose gradient is zero, such as rejected tokens, are skipped.

    As in "Cut Your Losses in Large-Vocabulary Language Models", Wijmans et al.
    (https://arxiv.org/abs/2411.09009), section 4, with exact gradients and the entropy.

    Args:
        hidden_LI: hidden states, the same on all tensor-parallel ranks; logits have the precision
            of the weight.
        weight_OI: this rank's rows of the output layer.
        target_L: int64, ids in the complete vocabulary.
        distribution: temperature, sampling sets and split of the vocabulary.
        weight_grad_OI: float32; the backward pass adds the weight's gradient to this tensor,
            megatron-core's `main_grad`. Returned to autograd, it would be another tensor of that
            size. None for a frozen weight.

    Returns:
        (log_prob_L, entropy_L), at least float32, differentiable, and Σ_v π_v² if the distribution
        `sums_squares`. The hidden states' gradient is summed over the group.
    """
    tile_bytes = GPU_TILE_BYTES if hidden_LI.is_cuda else TILE_BYTES
    plan = _Plan.of(len(hidden_LI), len(weight_OI), distribution, tile_bytes // 4)
    function: Any = _FusedLinearLogProbs  # torch does not type `apply`
    outputs: tuple[Tensor, ...] = function.apply(
        hidden_LI, weight_OI, target_L, plan, weight_grad_OI
    )
    return outputs


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """How logits are divided into tiles: chunks of rows × blocks of the vocabulary."""

    distribution: TokenDistribution
    chunk_rows: int
    blocks: Sequence[slice]

    @classmethod
    def of(cls, rows: int, width: int, distribution: TokenDistribution, entries: int) -> "_Plan":
        """Plans tiles of about `entries` logits.

        `rows` and `width` are the rows and columns of this rank.
        """
        width = distribution.width(width)
        chunk_size = distribution.chunk_size
        tiles = distribution.tiles
        if tiles is not None:
            if chunk_size == -1:
                # whole tiles, because rows that fill a tile cost as much as tokens
                chunk_size = max(entries // max(width, 1) // tiles.base, 1) * tiles.base
            chunk_rows = max(min(rows, chunk_size), 1)
            return cls(distribution=distribution, chunk_rows=chunk_rows, blocks=[slice(0, width)])
        if chunk_size == -1:
            chunk_size = entries // max(min(width, MIN_COLUMNS), 1)
        chunk_rows = max(min(rows, chunk_size), 1)
        columns = max(entries // chunk_rows, MIN_COLUMNS)
        blocks = [slice(start, min(start + columns, width)) for start in range(0, width, columns)]
        return cls(distribution=distribution, chunk_rows=chunk_rows, blocks=blocks)

    def chunks(self, hidden_LI: Tensor, weight_OI: Tensor, target_L: Tensor) -> list["_Chunk"]:
        """Cuts the rows into chunks, each with its part of the sampling mask."""
        hidden_LI = hidden_LI.to(weight_OI.dtype)
        mask = self.distribution.sampling_mask
        slices = row_chunks(len(target_L), self.chunk_rows)
        masks: Sequence[SamplingMask | None] = [mask] * len(slices)
        if mask is not None and len(slices) > 1:
            masks = mask.split([rows.stop - rows.start for rows in slices])
        chunks = []
        for rows, chunk_mask in zip(slices, masks, strict=True):
            chunk = _Chunk(
                rows=rows,
                hidden_RI=hidden_LI[rows],
                weight_OI=weight_OI,
                column_R=target_L[rows] - self.distribution.vocab_start,
                distribution=replace(self.distribution, sampling_mask=chunk_mask),
            )
            chunks.append(chunk)
        return chunks


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Some rows, whose logits are computed block by block."""

    rows: slice
    hidden_RI: Tensor
    weight_OI: Tensor
    column_R: Tensor
    distribution: TokenDistribution

    def logits(self, block: slice) -> Tensor:
        """z [R, V] of a block of the vocabulary, −inf outside the sets, in separate memory."""
        weight_OI = self.weight_OI[block]
        tiles = self.distribution.tiles
        if tiles is None:
            logits_RV = linear(self.hidden_RI, weight_OI)
        else:
            logits_RV = product(self.hidden_RI, weight_OI, tiles)
        start = self.distribution.vocab_start + block.start
        return self.distribution.scale_(logits_RV.to(precision(logits_RV)), start)

    def sums(self, blocks: Sequence[slice]) -> tuple[LogitSums, tuple[Tensor, ...]]:
        """The sums over all blocks; z − m and m of the last block."""
        sums = LogitSums.none(self.hidden_RI[:, 0])
        is_masked = self.distribution.sampling_mask is not None
        last: tuple[Tensor, ...] = ()
        for block in blocks:
            del last  # frees the memory of a tile before the next one is computed
            z_RV = self.logits(block)
            column_R = self.column_R - block.start
            tile = LogitSums.of_(z_RV, column_R, self.distribution, has_minus_infinity=is_masked)
            sums = sums.merge(tile)
            last = (z_RV, tile.max)
            del z_RV
        return sums, last


class _FusedLinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_LI: Tensor,
        weight_OI: Tensor,
        target_L: Tensor,
        plan: _Plan,
        weight_grad_OI: Tensor | None,
    ) -> tuple[Tensor, ...]:
        chunks = plan.chunks(hidden_LI, weight_OI, target_L)
        chunk_sums = []
        last_tile: tuple[Tensor, ...] = ()
        for chunk in chunks:
            sums, tile = chunk.sums(plan.blocks)
            chunk_sums.append(sums)
            # the backward pass starts with the tile that is still in memory, if there is only one
            # chunk
            last_tile = tile if len(chunks) == 1 else ()
            del tile
        sums = LogitSums.cat(chunk_sums).over_ranks(plan.distribution.group)
        log_normalizer_L, outputs = sums.outputs(ctx, plan.distribution)
        _, entropy_L, *_ = outputs
        ctx.plan = plan
        ctx.weight_grad_OI = weight_grad_OI
        ctx.save_for_backward(
            weight_OI, log_normalizer_L, entropy_L, hidden_LI, target_L, sums.max, *last_tile
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_prob_L: Tensor, grad_entropy_L: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        weight_OI, log_normalizer_L, entropy_L, hidden_LI, *saved = ctx.saved_tensors
        gradient = LogitGradient.of(
            plan.distribution, grad_log_prob_L, grad_entropy_L, log_normalizer_L, entropy_L
        )
        # rejected and masked tokens have no gradient: their logits are not computed again
        rows = ((grad_log_prob_L != 0) | (grad_entropy_L != 0)).nonzero().squeeze(1)
        inputs_LI = hidden_LI
        if len(rows) < len(hidden_LI):
            mask = plan.distribution.sampling_mask
            if mask is not None:
                mask = mask.select(rows)
            plan = replace(plan, distribution=replace(plan.distribution, sampling_mask=mask))
            gradient = gradient.select(rows)
            inputs_LI = hidden_LI.index_select(0, rows)
            saved = [values.index_select(0, rows) for values in saved]
        target_L, max_L, *last = saved
        chunks = []
        if len(rows):
            chunks = plan.chunks(inputs_LI, weight_OI, target_L)
        grad_inputs_LI = max_L.new_zeros(inputs_LI.shape)
        for block in plan.blocks:
            for chunk in chunks:
                if last and block is plan.blocks[-1]:
                    last_z_RV, last_max_R = last
                    z_RV = last_z_RV.sub_((max_L - last_max_R).unsqueeze(1))
                else:
                    z_RV = chunk.logits(block).sub_(max_L[chunk.rows].unsqueeze(1))
                column_R = chunk.column_R - block.start
                grad_RV = gradient.overwrite_(z_RV, column_R, chunk.rows).to(weight_OI.dtype)
                _add_product_(grad_inputs_LI[chunk.rows], grad_RV, weight_OI[block])
                if ctx.weight_grad_OI is not None:
                    _add_product_(ctx.weight_grad_OI[block], grad_RV.t(), chunk.hidden_RI)
                del z_RV, grad_RV  # frees the memory of a tile before the next one is computed
        grad_hidden_LI = grad_inputs_LI
        if len(rows) < len(hidden_LI):
            grad_hidden_LI = max_L.new_zeros(hidden_LI.shape).index_copy_(0, rows, grad_inputs_LI)
        if plan.distribution.group is not None and plan.distribution.group.size() > 1:
            all_reduce(grad_hidden_LI, group=plan.distribution.group)
        return grad_hidden_LI.to(hidden_LI.dtype), None, None, None, None


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right, which may have a lower precision, that of the weight."""
    if total.dtype == left.dtype and not prefers_onednn():
        total.addmm_(left, right)
    else:
        total.add_(multiply(left, right))


def columns(column_L: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns whether each column is in [0, width), [L], and the clamped columns, [L, 1]."""
    is_here_L = (column_L >= 0) & (column_L < width)
    return is_here_L, column_L.clamp(0, width - 1).unsqueeze(1)


def row_chunks(rows: int, chunk_size: int) -> list[slice]:
    """Slices of at most `chunk_size` rows, at least one; -1 for all rows at once."""
    size = max(rows if chunk_size == -1 else chunk_size, 1)
    return [slice(start, min(start + size, rows)) for start in range(0, max(rows, 1), size)]


def precision(values: Tensor) -> torch.dtype:
    """The precision of sums of these values: at least float32."""
    return torch.promote_types(values.dtype, torch.float32)


def leave_out_(logits_LV: Tensor, sampling_mask: SamplingMask, start: int) -> None:
    """Overwrites logits outside each row's set by −inf; rows without a set do not change.

    The first column is token `start`. The logits of the sets are copied, the rows are lowered to
    −inf, and the copies are written back. This needs memory only for the sets, not for an [L, V]
    mask. NaN and +inf outside a set become NaN, so that broken weights remain visible.
    """
    width = logits_LV.shape[1]
    column_M = sampling_mask.token_ids.long() - start
    is_here_M, column_M1 = columns(column_M, width)
    index_M = sampling_mask.position_of_token() * width + column_M1.squeeze(1)
    flat = logits_LV.view(-1)
    # A token of another rank has the index of some token of this rank, and the value −inf. `amax`
    # keeps the larger value, which is right.
    logit_M = torch.where(is_here_M, flat[index_M], -torch.inf)
    logits_LV.add_(torch.where(sampling_mask.lengths > 0, -torch.inf, 0.0).unsqueeze(1))
    flat.scatter_reduce_(0, index_M, logit_M, "amax")


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[Tensor],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    **others: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """slime's helper for loss functions: log-probs and entropies of response tokens, with gradient.

    Both are for the response tokens of this rank.
    """
    total_lengths = [len(tokens) for tokens in unconcat_tokens]
    slices = context_parallel({}).slices(total_lengths, response_lengths, None)
    responses = []
    for tokens, length in zip(unconcat_tokens, response_lengths, strict=True):
        responses.append(tokens[len(tokens) - length :])
    distribution = TokenDistribution(
        temperature=args.rollout_temperature,
        group=mpu.get_tensor_model_parallel_group(),
        vocab_start=mpu.get_tensor_model_parallel_rank() * logits.shape[-1],
        chunk_size=args.log_probs_chunk_size,
        entropy_gradient=with_entropy,
    )
    log_probs_L, entropy_L = vocab_parallel_log_probs(
        logits[0].clone(),  # it is overwritten, and the user's function may use the logits again
        slices.slice_flat(torch.cat(responses)),
        distribution,
    )
    values = {"log_probs": list(log_probs_L.split(slices.local_lengths))}
    if with_entropy:
        values["entropy"] = list(entropy_L.split(slices.local_lengths))
    return logits.new_empty(0), values
