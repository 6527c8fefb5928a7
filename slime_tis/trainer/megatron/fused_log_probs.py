"""Log-probs and entropies from hidden states: output layer and softmax in one, without a [rows, vocabulary] tensor.

Shapes: suffix _L rows, that is response tokens; _LI the hidden states that predict them; _OI this tensor-parallel
rank's rows of the output layer; _R the rows of a chunk and _RV a tile of its logits, in a block of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import all_reduce

from slime_tis.trainer.data.sample import SamplingMask
from slime_tis.trainer.megatron.log_probs import LogitGradient, LogitSums, TokenDistribution, precision, row_chunks

TILE_BYTES = 8 * 2**20
"""Size of a tile of float32 logits: about a processor's cache."""
GPU_TILE_BYTES = 128 * 2**20
"""The same on a GPU, where a tile costs a dozen kernel launches."""
MIN_COLUMNS = 512
"""Columns of a tile: with fewer, a matrix product is less efficient."""


def fused_linear_log_probs(
    hidden_LI: Tensor,
    weight_OI: Tensor,
    target_L: Tensor,
    distribution: TokenDistribution,
    weight_grad_OI: Tensor,
) -> tuple[Tensor, ...]:
    """Log-prob of every target under softmax(hidden · weightᵀ / temperature), and that distribution's entropy.

    Values and gradients equal `vocab_parallel_log_probs` of the logits, up to the order of sums. Only one tile of
    logits exists at a time, rows × a block of the vocabulary. The forward pass takes from it each row's maximum m,
    Σ e^{z−m}, Σ e^{z−m}(z−m) and the target's z; tiles merge as the tensor-parallel ranks do. The backward pass
    computes the tiles again, except the last one, which is saved. Rows whose gradient is zero, such as rejected tokens,
    are skipped.

    As in "Cut Your Losses in Large-Vocabulary Language Models", Wijmans et al. (https://arxiv.org/abs/2411.09009),
    section 4, with exact gradients and the entropy.

    Args:
        hidden_LI: hidden states, the same on all tensor-parallel ranks; logits have the precision of the weight.
        weight_OI: this rank's rows of the output layer.
        target_L: int64, ids in the whole vocabulary.
        distribution: temperature, sampling sets and split of the vocabulary.
        weight_grad_OI: float32; the backward pass adds the weight's gradient to this tensor, megatron-core's
            `main_grad`. Returned to autograd, it would be another tensor of that size.

    Returns:
        (log_prob_L, entropy_L), at least float32, differentiable, and Σ_v π_v² if the distribution `sums_squares`. The
        hidden states' gradient is summed over the group.
    """
    tile_bytes = GPU_TILE_BYTES if hidden_LI.is_cuda else TILE_BYTES
    plan = _Plan.of(len(hidden_LI), len(weight_OI), distribution, tile_bytes // 4)
    outputs: tuple[Tensor, ...] = _FusedLinearLogProbs.apply(hidden_LI, weight_OI, target_L, plan, weight_grad_OI)  # type: ignore[no-untyped-call]  # torch's
    return outputs


@dataclass(frozen=True, kw_only=True)
class _Plan:
    distribution: TokenDistribution
    chunk_rows: int
    blocks: Sequence[slice]

    @classmethod
    def of(cls, rows: int, width: int, distribution: TokenDistribution, entries: int) -> "_Plan":
        width, chunk_size = distribution.width(width), distribution.chunk_size
        if chunk_size == -1:
            chunk_size = entries // max(min(width, MIN_COLUMNS), 1)
        chunk_rows = max(min(rows, chunk_size), 1)
        columns = max(entries // chunk_rows, MIN_COLUMNS)
        blocks = [slice(start, min(start + columns, width)) for start in range(0, width, columns)]
        return cls(distribution=distribution, chunk_rows=chunk_rows, blocks=blocks)

    def chunks(self, hidden_LI: Tensor, weight_OI: Tensor, target_L: Tensor) -> list["_Chunk"]:
        hidden_LI, mask = hidden_LI.to(weight_OI.dtype), self.distribution.sampling_mask
        slices = row_chunks(len(target_L), self.chunk_rows)
        masks: Sequence[SamplingMask | None] = [mask] * len(slices)
        if mask is not None and len(slices) > 1:
            masks = mask.split([rows.stop - rows.start for rows in slices])
        return [
            _Chunk(
                rows=rows,
                hidden_RI=hidden_LI[rows],
                weight_OI=weight_OI,
                column_R=target_L[rows] - self.distribution.vocab_start,
                distribution=replace(self.distribution, sampling_mask=chunk_mask),
            )
            for rows, chunk_mask in zip(slices, masks, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    rows: slice
    hidden_RI: Tensor
    weight_OI: Tensor
    column_R: Tensor
    distribution: TokenDistribution

    def logits(self, block: slice) -> Tensor:
        """z [R, V] of a block of the vocabulary, −inf outside the sets, in separate memory."""
        logits_RV = self.hidden_RI @ self.weight_OI[block].t()
        return self.distribution.scale_(logits_RV.to(precision(logits_RV)), self.distribution.vocab_start + block.start)

    def sums(self, blocks: Sequence[slice]) -> tuple[LogitSums, tuple[Tensor, ...]]:
        """The sums over all blocks; z − m and m of the last block."""
        sums = LogitSums.none(self.hidden_RI[:, 0])
        last: tuple[Tensor, ...] = ()
        for block in blocks:
            del last  # before the next tile is made
            z_RV = self.logits(block)
            masked = self.distribution.sampling_mask is not None
            tile = LogitSums.of_(z_RV, self.column_R - block.start, self.distribution, has_minus_infinity=masked)
            sums, last = sums.merge(tile), (z_RV, tile.max)
            del z_RV
        return sums, last


class _FusedLinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_LI: Tensor, weight_OI: Tensor, target_L: Tensor, plan: _Plan, weight_grad_OI: Tensor
    ) -> tuple[Tensor, ...]:
        chunks = plan.chunks(hidden_LI, weight_OI, target_L)
        sums_of_chunks = [chunk.sums(plan.blocks) for chunk in chunks]
        sums = LogitSums.cat([sums for sums, _ in sums_of_chunks]).over_ranks(plan.distribution.group)
        log_normalizer_L, outputs = sums.outputs(ctx, plan.distribution)
        last = sums_of_chunks[0][1] if len(chunks) == 1 else ()
        ctx.plan, ctx.weight_grad_OI = plan, weight_grad_OI
        ctx.save_for_backward(weight_OI, log_normalizer_L, outputs[1], hidden_LI, target_L, sums.max, *last)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob_L: Tensor, grad_entropy_L: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        weight_OI, log_normalizer_L, entropy_L, hidden_LI, *saved = ctx.saved_tensors
        gradient = LogitGradient.of(plan.distribution, grad_log_prob_L, grad_entropy_L, log_normalizer_L, entropy_L)
        rows = ((grad_log_prob_L != 0) | (grad_entropy_L != 0)).nonzero().squeeze(1)
        inputs_LI = hidden_LI
        if len(rows) < len(hidden_LI):
            mask = plan.distribution.sampling_mask
            mask = None if mask is None else mask.select(rows)
            plan = replace(plan, distribution=replace(plan.distribution, sampling_mask=mask))
            gradient, inputs_LI = gradient.select(rows), hidden_LI.index_select(0, rows)
            saved = [values.index_select(0, rows) for values in saved]
        target_L, max_L, *last = saved
        chunks = plan.chunks(inputs_LI, weight_OI, target_L) if len(rows) else []
        grad_inputs_LI = max_L.new_zeros(inputs_LI.shape)
        for block in plan.blocks:
            for chunk in chunks:
                if last and block is plan.blocks[-1]:
                    z_RV = last[0].sub_((max_L - last[1]).unsqueeze(1))
                else:
                    z_RV = chunk.logits(block).sub_(max_L[chunk.rows].unsqueeze(1))
                grad_RV = gradient.overwrite_(z_RV, chunk.column_R - block.start, chunk.rows).to(weight_OI.dtype)
                _add_product_(grad_inputs_LI[chunk.rows], grad_RV, weight_OI[block])
                _add_product_(ctx.weight_grad_OI[block], grad_RV.t(), chunk.hidden_RI)
                del z_RV, grad_RV  # before the next tile is made
        grad_hidden_LI = grad_inputs_LI
        if len(rows) < len(hidden_LI):
            grad_hidden_LI = max_L.new_zeros(hidden_LI.shape).index_copy_(0, rows, grad_inputs_LI)
        if plan.distribution.group is not None and plan.distribution.group.size() > 1:
            all_reduce(grad_hidden_LI, group=plan.distribution.group)
        return grad_hidden_LI.to(hidden_LI.dtype), None, None, None, None


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right, which has the weight's, possibly lower, precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
