"""Log-probs of given tokens from vocabulary-parallel logits, in the memory of one softmax.

Shapes: suffix _T tokens, V the part of the vocabulary that this tensor-parallel rank holds.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from slime_tis.trainer.data.sampling_mask import SamplingMask


def vocab_parallel_log_probs(
    logits: Tensor,
    target_T: Tensor,
    group: ProcessGroup | None,
    *,
    vocab_start: int = 0,
    temperature: float = 1.0,
    chunk_size: int = -1,
    entropy_gradient: bool = True,
    sampling_mask: SamplingMask | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of every target under softmax(logits / temperature), and the entropy of that distribution.

        log π(y) = z_y − log Σ_{v∈S} e^{z_v},    H = log Σ_{v∈S} e^{z_v} − Σ_{v∈S} π_v z_v,    z = logits / temperature

    S is the whole vocabulary, or the set of tokens that could be sampled, which is constant under differentiation
    ("DeepSeek-V3.2", DeepSeek-AI (https://arxiv.org/abs/2512.02556), section 3.1, "Keep Sampling Mask").

    The backward pass needs π alone, so exactly one [tokens, V] tensor is saved: fp32 logits are overwritten by it
    (their producer, a linear layer, does not need them), logits in another precision are freed.

    Args:
        logits: [tokens, V], any float precision; overwritten when fp32.
        target_T: [tokens] int64, ids in the whole vocabulary.
        group: tensor-parallel group over which the vocabulary is split; None or a group of one for a whole one.
        vocab_start: the id of this rank's first column.
        temperature: > 0, that of the sampling distribution.
        chunk_size: rows worked on at a time, which bounds the temporaries; −1 for all at once.
        entropy_gradient: whether the entropy is to be differentiated; without it the backward pass is cheaper.
        sampling_mask: S of every row, in ids of the whole vocabulary; ids beyond it are passed over, and a row without
            a set has the whole vocabulary. None where all rows have.

    Returns:
        (log_prob_T, entropy_T), float32, differentiable in the logits (the entropy where asked for). A target outside
        of its set has log-prob −inf.

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not positive.
    """
    if logits.dim() != 2 or target_T.shape != logits.shape[:1]:
        raise ValueError(
            f"logits must be [tokens, V] and targets [tokens], got {tuple(logits.shape)}, {tuple(target_T.shape)}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if group is not None and group.size() == 1:
        group = None
    if sampling_mask is not None and len(sampling_mask) != len(target_T):
        raise ValueError(f"the sampling mask has {len(sampling_mask)} positions for {len(target_T)} rows of logits")
    found: tuple[Tensor, Tensor] = _VocabParallelLogProbs.apply(  # type: ignore[no-untyped-call]  # torch's
        logits, target_T - vocab_start, group, temperature, chunk_size, entropy_gradient, vocab_start, sampling_mask
    )
    return found


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        local_target_T: Tensor,
        group: ProcessGroup | None,
        temperature: float,
        chunk_size: int,
        entropy_gradient: bool,
        vocab_start: int,
        sampling_mask: SamplingMask | None,
    ) -> tuple[Tensor, Tensor]:
        probs = logits.detach().float()
        if sampling_mask is not None:
            leave_out_(probs, sampling_mask, vocab_start)
        log_prob_T = probs.new_empty(probs.shape[0])
        entropy_T = probs.new_empty(probs.shape[0])
        for rows in _chunks(probs.shape[0], chunk_size):
            log_prob_T[rows], entropy_T[rows] = _softmax_(probs[rows], local_target_T[rows], group, temperature)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        ctx.save_for_backward(probs, local_target_T, entropy_T)
        ctx.temperature, ctx.chunk_size, ctx.dtype = temperature, chunk_size, logits.dtype
        ctx.entropy_gradient = entropy_gradient
        return log_prob_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Once differentiable: the gradient is built in the memory of the softmax, and autograd's own version
        # counter refuses a second backward pass.
        grad_log_prob_T, grad_entropy_T = grads
        probs, local_target_T, entropy_T = ctx.saved_tensors
        for rows in _chunks(probs.shape[0], ctx.chunk_size):
            scale = -grad_log_prob_T[rows].unsqueeze(1)
            if ctx.entropy_gradient:
                log_probs = probs[rows].clamp_min(torch.finfo(probs.dtype).tiny).log_()
                surprise = log_probs.add_(entropy_T[rows].unsqueeze(1))
                scale = scale - grad_entropy_T[rows].unsqueeze(1) * surprise
            _gradient_(probs[rows], local_target_T[rows], scale, grad_log_prob_T[rows])
        return probs.div_(ctx.temperature).to(ctx.dtype), None, None, None, None, None, None, None


def _chunks(rows: int, chunk_size: int) -> list[slice]:
    size = rows if chunk_size <= 0 else chunk_size
    return [slice(start, min(start + size, rows)) for start in range(0, rows, max(size, 1))]


def in_this_shard(local_target_T: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Whether each target is one of so many columns, [T], and its column, [T, 1], where it is."""
    mine_T = (local_target_T >= 0) & (local_target_T < width)
    return mine_T, local_target_T.clamp(0, width - 1).unsqueeze(1)


def leave_out_(logits: Tensor, sampling_mask: SamplingMask, start: int) -> None:
    """Overwrites logits outside of each row's set by −inf, in place; rows without a set stay as they are.

    The logits of the sets are taken out, the rows lowered to −inf, and the sets put back, in memory of the sets' size:
    no [tokens, V] mask is made. NaN and +inf outside of a set become NaN, so that broken weights still show.

    Args:
        logits: [rows, V] of the tokens from `start` on.
        sampling_mask: the sets, in ids of the whole vocabulary.
        start: id of the first column.
    """
    width = logits.shape[1]
    column_M = sampling_mask.token_ids.long() - start
    mine_M, column_M = (column_M >= 0) & (column_M < width), column_M.clamp(0, width - 1)
    place_M = sampling_mask.position_of_token() * width + column_M
    flat = logits.view(-1)
    # A token of another rank becomes −inf at a place that may be another token's: the larger one is right.
    logit_M = torch.where(mine_M, flat[place_M], -torch.inf)
    logits.add_(torch.where(sampling_mask.lengths > 0, -torch.inf, 0.0).unsqueeze(1))
    flat.scatter_reduce_(0, place_M, logit_M, "amax")


def _softmax_(
    z: Tensor, local_target_T: Tensor, group: ProcessGroup | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Turns logits into probabilities in place; returns the targets' log-probs and the entropies."""
    if temperature != 1.0:
        z.div_(temperature)
    max_T = z.amax(dim=1)
    if group is not None:
        all_reduce(max_T, ReduceOp.MAX, group=group)
    z.sub_(max_T.unsqueeze(1))
    mine_T, column_T = in_this_shard(local_target_T, z.shape[1])
    target_z_T = torch.where(mine_T, z.gather(1, column_T).squeeze(1), 0.0)
    exp_z = z.exp()
    # A padded vocabulary entry, or one outside of the set, has z = −inf and probability 0: it adds nothing to Σ e^z z.
    sums = torch.stack([target_z_T, exp_z.sum(1), (exp_z * z.clamp_min_(-1e4)).sum(1)])
    if group is not None:
        all_reduce(sums, group=group)
    target_z_T, normalizer_T, weighted_T = sums
    torch.div(exp_z, normalizer_T.unsqueeze(1), out=z)
    log_normalizer_T = normalizer_T.log()
    return target_z_T - log_normalizer_T, log_normalizer_T - weighted_T / normalizer_T


def _gradient_(probs: Tensor, local_target_T: Tensor, scale: Tensor, grad_log_prob_T: Tensor) -> None:
    """Overwrites π by π·scale + 1_y·∂log π, where scale = −∂log π − (log π + H)·∂H."""
    mine_T, column_T = in_this_shard(local_target_T, probs.shape[1])
    probs.mul_(scale)
    probs.scatter_add_(1, column_T, torch.where(mine_T, grad_log_prob_T, 0.0).unsqueeze(1))
