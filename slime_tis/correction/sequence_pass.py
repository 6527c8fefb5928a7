"""Per-sequence weights and rejection, after the token pass, computed from the reduced table.

Shapes: suffix _S is per sequence.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.modes import LEVELS
from slime_tis.correction.ratio import (
    LOG_RATIO_BOUND,
    indicator,
    safe_exp,
    sequence_log_weights,
    weight_bounds,
)
from slime_tis.correction.rejection import AdaptiveBounds, sequence_accepted
from slime_tis.correction.statistics import Statistics
from slime_tis.correction.sums import (
    EXTREMES,
    BatchSums,
    BoundSums,
    Counts,
    Extremes,
    PerplexitySums,
    SequenceSums,
    WeightSums,
    stacked,
)

LARGEST_EXPONENT = 700.0
"""Largest log-ratio of a sequence in the metrics, in nats: exp overflows float64 above 709. The
weight itself is limited to e^20."""
LOG_PPL_BOUND = 80.0
"""exp of a perplexity is taken up to e^80, so that sums of perplexities stay finite."""


@dataclass(frozen=True)
class SequencePass:
    """Weights and verdicts per sequence, and the statistics of the batch."""

    weight_S: Tensor | None
    """Bounded weight of the sequence; None if weights differ from token to token or are off."""
    accept_S: Tensor
    """1.0 if the sequence is accepted, 0.0 if it is rejected as a unit."""
    accepted_S: Tensor
    """Number of accepted tokens."""
    statistics: Statistics
    """Complete except for the extremes of per-token weights, which the token pass has."""


def sequence_pass(
    config: RolloutCorrectionConfig,
    sums_S: SequenceSums[Tensor],
    bounds: AdaptiveBounds | None = None,
) -> SequencePass:
    """Sequence-wide weights, rejection and statistics.

    Args:
        config: The options.
        sums_S: Sums over complete sequences, reduced over context-parallel ranks.
        bounds: Adaptive bounds of the global batch; None if rejection is not adaptive.
    """
    is_nonempty_S = sums_S.valid > 0
    nonempty_S = is_nonempty_S.to(torch.float64)
    # Under the neutral policy, a valid token may lack the log-probs of a perplexity.
    is_measured_S = sums_S.masked_in > sums_S.nonfinite
    measured_S = is_measured_S.to(torch.float64)
    weight_S = None
    ratio_S = None
    weights = sums_S.weights
    mean_weights = None
    mean_weight_S = None
    if weights is not None:
        weights, mean_weights = _token_weights(config, sums_S, weights, nonempty_S)
        mean_weight_S = mean_weights.total
    elif config.use_tis:
        aggregation = LEVELS[config.tis_level].aggregation
        log_weight_S = sequence_log_weights(aggregation, sums_S.log_ratio, sums_S.valid)
        weight_S, weights = _sequence_weights(config, sums_S, log_weight_S, nonempty_S)
        ratio_S = _ratio(log_weight_S, LARGEST_EXPONENT)
    accept_S, rejected = _rejection(config, sums_S, bounds)
    if sums_S.catastrophic is not None:
        accept_S = accept_S * (sums_S.catastrophic == 0)
    if weight_S is not None and config.mode.rejects:
        accept_S = accept_S * indicator(torch.gt, weight_S, 0.0)
    accepted_S = accept_S * sums_S.accepted
    perplexity = perplexities(sums_S)
    bound_terms = None
    if bounds is not None:
        log_lower, log_upper = bounds.log_bounds(config.rs_level)
        bound_terms = BoundSums(
            k3=bounds.k3 * nonempty_S,
            z_score=bounds.z_score * nonempty_S,
            log_lower=log_lower * nonempty_S,
            log_upper=log_upper * nonempty_S,
        )
    veto = None
    if sums_S.catastrophic is not None:
        veto = _counts(sums_S.catastrophic)
    extremes = Extremes(
        log_ppl_diff=_present(perplexity.log_ppl_diff, is_measured_S),
        ratio=_present(ratio_S, is_nonempty_S),
        sequence_weight=_present(mean_weight_S, is_nonempty_S),
        weight=_present(weight_S, is_nonempty_S),
        sequence_log_ratio=_present(sums_S.log_ratio, is_nonempty_S),
    )
    # amin of no rows is an error: one row of NaN is added, which counts neither as min nor as max
    table = torch.nn.functional.pad(stacked(extremes), (0, 0, 0, 1), value=torch.nan)
    mins = table.masked_fill(table.isnan(), torch.inf).amin(0)
    maxs = table.masked_fill(table.isnan(), -torch.inf).amax(0)
    # exp(Σ Δ) is summed relative to the largest: the plain sum would overflow, or be 0 in a batch
    # whose Σ Δ are all below −700.
    relative_log_S = sums_S.log_ratio - maxs[EXTREMES.sequence_log_ratio]
    relative_S = torch.where(is_nonempty_S, relative_log_S, -torch.inf).exp_()
    bounded_S = sums_S.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    terms_S = BatchSums(
        sequences=nonempty_S,
        measured_sequences=measured_S,
        masked_in_tokens=sums_S.masked_in,
        tokens=sums_S.valid,
        nonfinite_tokens=sums_S.nonfinite,
        log_ratio=sums_S.log_ratio,
        abs_log_ratio=sums_S.abs_log_ratio,
        ratio_minus_1=sums_S.ratio_minus_1,
        # ρ² − 1 = (ρ − 1)² + 2·(ρ − 1), without cancellation for ρ near 1
        ratio_squared_minus_1=sums_S.ratio_minus_1_squared + 2 * sums_S.ratio_minus_1,
        sequence_ratio_squared_minus_1=torch.expm1(2 * bounded_S),
        accepted_tokens=accepted_S,
        sequence_weight=relative_S,
        sequence_weight_squared=relative_S.square(),
        perplexity=perplexity,
        weights=weights,
        mean_weights=mean_weights,
        rejected=rejected,
        bounds=bound_terms,
        veto=veto,
        trimmed_tokens=sums_S.trimmed,
    )
    return SequencePass(
        weight_S=weight_S,
        accept_S=accept_S,
        accepted_S=accepted_S,
        statistics=Statistics(config=config, sums=stacked(terms_S).sum(0), mins=mins, maxs=maxs),
    )


def perplexities(sums_S: SequenceSums[Tensor]) -> PerplexitySums[Tensor]:
    """Per-sequence perplexities, [S]: exp(−mean_t log π_t) over finite tokens.

    They are 0 if the sequence has no finite token; neutral tokens do not count.
    """
    finite_S = sums_S.masked_in - sums_S.nonfinite
    n_S = finite_S.clamp_min(1)
    measured_S = (finite_S > 0).to(torch.float64)
    training_S = -sums_S.train / n_S
    difference_S = -sums_S.log_ratio / n_S
    rollout_S = training_S - difference_S
    return PerplexitySums(
        training_log_ppl=training_S,
        training_ppl=_ratio(training_S, LOG_PPL_BOUND) * measured_S,
        rollout_log_ppl=rollout_S,
        rollout_ppl=_ratio(rollout_S, LOG_PPL_BOUND) * measured_S,
        log_ppl_diff=difference_S,
        log_ppl_abs_diff=difference_S.abs(),
        ppl_ratio=_ratio(difference_S, LOG_PPL_BOUND) * measured_S,
    )


def _sequence_weights(
    config: RolloutCorrectionConfig,
    sums_S: SequenceSums[Tensor],
    log_weight_S: Tensor,
    nonempty_S: Tensor,
) -> tuple[Tensor, WeightSums[Tensor]]:
    """Returns the bounded sequence weights and their contribution to the batch's sums.

    A sequence counts once, and only if it has a valid token.
    """
    lower, upper = weight_bounds(config, sums_S.advantage)
    raw_S = safe_exp(log_weight_S)
    weight_S = config.mode.bound(raw_S, lower, upper)
    minus_1_S = (weight_S - 1) * nonempty_S
    return weight_S, WeightSums(
        before=raw_S * nonempty_S,
        before_minus_1=(raw_S - 1) * nonempty_S,
        total=weight_S * nonempty_S,
        total_squared=weight_S.square() * nonempty_S,
        minus_1=minus_1_S,
        minus_1_squared=minus_1_S.square(),
        high=(raw_S > upper) * nonempty_S,
        low=(raw_S < lower) * nonempty_S,
    )


def _token_weights(
    config: RolloutCorrectionConfig,
    sums_S: SequenceSums[Tensor],
    weights: WeightSums[Tensor],
    nonempty_S: Tensor,
) -> tuple[WeightSums[Tensor], WeightSums[Tensor]]:
    """The sums over tokens, and the terms of sums over per-sequence mean weights."""
    lower, upper = weight_bounds(config, sums_S.advantage)
    before_S = weights.before_minus_1
    if before_S is None:
        # At the token level, a weight before the mode is the token's ratio.
        before_S = sums_S.ratio_minus_1
    assert weights.before is not None
    n_S = sums_S.valid.clamp_min(1)
    raw_S = _mean_weight(weights.before, before_S, n_S)
    mean_S = _mean_weight(weights.total, weights.minus_1, n_S) * nonempty_S
    # As in `_mean_weight`, the more accurate of the two sums is taken.
    minus_1_S = torch.where(mean_S < 0.5, mean_S - nonempty_S, weights.minus_1 / n_S)
    means = WeightSums(
        before=None,
        before_minus_1=None,
        total=mean_S,
        total_squared=mean_S.square(),
        minus_1=minus_1_S,
        minus_1_squared=minus_1_S.square(),
        high=(raw_S > upper) * nonempty_S,
        low=(raw_S < lower) * nonempty_S,
    )
    return replace(weights, before_minus_1=before_S), means


def _mean_weight(total_S: Tensor, minus_1_S: Tensor, n_S: Tensor) -> Tensor:
    """Mean weight: Σw/n if it is below 1/2, else 1 + Σ(w − 1)/n, which is then more accurate."""
    mean_S = total_S / n_S
    return torch.where(mean_S < 0.5, mean_S, 1 + minus_1_S / n_S)


def _rejection(
    config: RolloutCorrectionConfig, sums_S: SequenceSums[Tensor], bounds: AdaptiveBounds | None
) -> tuple[Tensor, dict[str, Counts[Tensor]]]:
    """Applies the rejection criteria to sequences.

    Returns:
        1.0 for each sequence that all sequence-wide criteria accept, and the rejected tokens by the
        name of the criterion, first those of any criterion under "".
    """
    accept_S = torch.ones_like(sums_S.valid)
    rejected = {}
    for criterion in config.rejections:
        if criterion.per_token:
            rejected_S = sums_S.criteria[criterion.name]
        else:
            accepted_S = sequence_accepted(criterion, sums_S, bounds)
            accept_S = accept_S * accepted_S
            rejected_S = (1 - accepted_S) * sums_S.valid
        rejected[criterion.name] = _counts(rejected_S)
    if rejected:
        rejected = {"": _counts(sums_S.valid - accept_S * sums_S.rs_accepted), **rejected}
    return accept_S, rejected


def _present(x_S: Tensor | None, is_present_S: Tensor) -> Tensor:
    """The values of the present sequences, NaN elsewhere; only NaN without values."""
    if x_S is None:
        return torch.full_like(is_present_S, torch.nan, dtype=torch.float64)
    return torch.where(is_present_S, x_S, torch.nan)


def _counts(tokens_S: Tensor) -> Counts[Tensor]:
    """Tokens, and 1.0 for each sequence with at least one token."""
    return Counts(tokens=tokens_S, sequences=(tokens_S > 0).to(torch.float64))


def _ratio(log_ratio_S: Tensor, bound: float) -> Tensor:
    """exp of log-ratios clamped to ±bound."""
    return log_ratio_S.clamp(-bound, bound).exp_()
