"""The correction as one pure function: tensors in, tensors out, no look at their values.

`correct` here gives the weights and the mask of `slime_tis.correct` for padded tensors [..., T], without statistics.
torch.fx, `torch.compile(fullgraph=True)` and torch.func trace it, because only the options decide what is computed.
Options that need order statistics of the batch are refused.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.divergence import BINARY_DIVERGENCES
from slime_tis.correction.metrics import SMALLEST_BATCH_MEAN
from slime_tis.correction.modes import LEVELS, Criterion
from slime_tis.correction.ratio import LOG_RATIO_BOUND, LOG_RATIO_LIMIT, in_float32
from slime_tis.correction.reference import aggregate, rejected_by


class WeightsAndMask(NamedTuple):
    """float32 weights, 0 at invalid tokens; bool mask of the accepted tokens. Both [..., T], without gradient."""

    weights: Tensor
    mask: Tensor


def correct(
    config: RolloutCorrectionConfig,
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    *,
    current_log_probs: Tensor | None = None,
    advantages: Tensor | None = None,
) -> WeightsAndMask:
    """Importance weights and mask; see `slime_tis.correct` for the arguments, here tensors [..., T].

    `tis_batch_normalize` divides by the mean weight of this call.

    Raises:
        ValueError: an option needs the values of the batch, or advantages are missing.
    """
    _check(config, advantages is not None)
    train, rollout = train_log_probs.detach(), rollout_log_probs.detach()
    masked_in = loss_mask != 0
    difference = train - rollout
    finite = masked_in & (difference.abs() < LOG_RATIO_LIMIT)  # NaN compares as false
    valid = masked_in if config.nonfinite_policy == "neutral" else finite
    delta = torch.where(finite, difference, 0.0)
    if not config.touches_loss:
        return WeightsAndMask(masked_in.float(), masked_in)
    level = aggregate(LEVELS[config.tis_level].aggregation, delta, valid, masked_in)
    raw = level.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    lower, upper = (torch.full_like(raw, in_float32(bound)) for bound in config.is_bounds)
    if config.signs_bounds:
        assert advantages is not None
        sign = advantages
        if not config.has_token_weights:  # a sequence has the sign of its sum
            sign = torch.where(valid, advantages, 0.0).sum(-1, keepdim=True)
        negative = [in_float32(bound) for bound in config.is_bounds_negative]
        lower = torch.where(sign < 0, negative[0], lower)
        upper = torch.where(sign < 0, negative[1], upper)
    weights = config.mode.bound(raw, lower, upper)
    mask = valid & (weights > 0) if config.rejects_weights else valid
    for criterion in config.rejections:
        if criterion.mask is None:
            mask = mask & ~rejected_by(config, criterion, delta, valid, masked_in)
        else:
            current = train if current_log_probs is None else current_log_probs.detach()
            anchor = rollout if criterion.mask.anchor == "rollout" else train
            mask = mask & ~_diverged(criterion, current, anchor, valid, advantages)
    if config.rs_veto_threshold is not None:
        mask = mask & ~_any(valid & (delta < math.log(config.rs_veto_threshold)))
    if config.rs_veto_upper_threshold is not None:
        mask = mask & ~_any(valid & (delta > math.log(config.rs_veto_upper_threshold)))
    if not config.use_tis:
        return WeightsAndMask(valid.float(), mask)
    if config.tis_batch_normalize:
        counted = valid if config.has_token_weights else valid & (valid.cumsum(-1) == 1)
        mean = torch.where(counted, weights, 0.0).sum() / counted.sum().clamp_min(1)
        weights = weights / torch.where(mean > SMALLEST_BATCH_MEAN, mean, 1.0)
    return WeightsAndMask(torch.where(valid, weights, 0.0).float(), mask)


def _check(config: RolloutCorrectionConfig, has_advantages: bool) -> None:
    needs_values = {
        "rs_z_score": config.rs_z_score is not None,
        "rs_target_fraction": config.rs_target_fraction is not None,
        "rs_second_moment_bound": config.rs_second_moment_bound is not None,
        "nonfinite_policy": config.nonfinite_policy == "raise",
    }
    wrong = [name for name, is_on in needs_values.items() if is_on]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} needs the values of the batch; call slime_tis.correct instead.")
    if config.needs_advantages and not has_advantages:
        raise ValueError("the divergence mask or the bounds by sign need advantages; pass advantages=.")


def _any(tokens: Tensor) -> Tensor:
    return tokens.any(-1, keepdim=True)


def _diverged(
    criterion: Criterion, current: Tensor, anchor: Tensor, valid: Tensor, advantages: Tensor | None
) -> Tensor:
    mask = criterion.mask
    assert mask is not None
    counts = valid & current.isfinite() & anchor.isfinite()
    log_p, log_q = torch.where(counts, current, -1.0), torch.where(counts, anchor, -1.0)
    divergence = torch.where(counts, BINARY_DIVERGENCES[criterion.divergence](log_p, log_q), 0.0)
    if mask.bound_negative is not None:
        assert advantages is not None
        bound = torch.where(advantages < 0, mask.bound_negative, criterion.upper)
        return (divergence > bound) & (advantages * (log_p - log_q) > 0)
    return aggregate(criterion.aggregation, divergence, valid, valid) > criterion.upper
