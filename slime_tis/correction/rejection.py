"""Rejection: which tokens and sequences leave the loss.

A criterion bounds a divergence between the two policies: k1 = Δ (on the ratio, from both sides), k2 = Δ²/2,
k3 = exp(Δ) − Δ − 1 ("Approximating KL Divergence", Schulman 2020, http://joschu.net/blog/kl-approx.html),
taken per token, or summed, averaged or maximised over a sequence. Ratios are compared in log space, unclamped.
"""

import math

import torch
from torch import Tensor

from slime_tis.correction.adaptive import AdaptiveBounds
from slime_tis.correction.blocks import Chunk
from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.criteria import Criterion
from slime_tis.correction.ratio import (
    LOG_RATIO_BOUND,
    Tokens,
    indicator,
    sequence_log_weights,
    token_log_weights,
)
from slime_tis.correction.sums import SequenceSums


def token_statistic(criterion: Criterion, tokens: Tokens, chunk: Chunk) -> Tensor:
    """The per-token quantity of a criterion: L_t for k1, the divergence of Δ_t for k2 and k3."""
    if criterion.divergence == "k1":
        level = criterion.aggregation if criterion.per_token else "token"
        return token_log_weights(level, tokens, chunk)
    if criterion.divergence == "k2":
        return tokens.log_ratio_RK.square().mul_(0.5)
    bounded = tokens.log_ratio_RK.clamp(max=LOG_RATIO_BOUND)
    return torch.expm1(bounded).sub_(bounded)


def accepted(criterion: Criterion, statistic: Tensor) -> Tensor:
    """1.0 where a statistic (of any shape) lies within the bounds of the criterion."""
    if criterion.lower is None:
        return indicator(torch.le, statistic, criterion.upper)
    log_lower, log_upper = criterion.log_bounds
    within = indicator(torch.le, statistic, log_upper)
    return within.mul_(indicator(torch.ge, statistic, log_lower)) if criterion.lower else within


def catastrophic_tokens(config: RolloutCorrectionConfig, tokens: Tokens) -> Tensor:
    """1.0 at tokens whose unclamped ratio is below the veto threshold or above the upper one, 0 elsewhere."""
    found = None
    if config.rs_veto_threshold is not None:
        found = indicator(torch.lt, tokens.log_ratio_RK, math.log(config.rs_veto_threshold), tokens.scratch_RK)
    if config.rs_veto_upper_threshold is not None:
        above = indicator(torch.gt, tokens.log_ratio_RK, math.log(config.rs_veto_upper_threshold))
        found = above if found is None else found.add_(above)
    assert found is not None, "called without a veto threshold"
    return found


def sequence_accepted(criterion: Criterion, sums_S: SequenceSums[Tensor], bounds: AdaptiveBounds | None) -> Tensor:
    """1.0 for each sequence that a sequence-wide criterion accepts, as it does a sequence without valid tokens.

    Args:
        criterion: With aggregation sum, mean or max.
        sums_S: Sums over whole sequences: for max, the number of tokens out of bounds, so that a sum over ranks is
            all that context parallelism needs.
        bounds: Of the global batch, for an adaptive criterion.
    """
    if criterion.adaptive:
        assert bounds is not None, "called without the bounds of the global batch"
        return bounds.accepted(sums_S)
    own = sums_S.criteria[criterion.name]
    if own.outside is not None:
        return indicator(torch.eq, own.outside, 0.0)
    total = sums_S.log_ratio if own.divergence is None else own.divergence
    statistic = sequence_log_weights(criterion.aggregation, total, sums_S.valid)
    return torch.where(sums_S.valid > 0, accepted(criterion, statistic), 1.0)
