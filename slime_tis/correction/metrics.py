"""The named metrics, computed from merged statistics once per step."""

import math
import sys
from dataclasses import fields

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.ratio import LOG_RATIO_BOUND
from slime_tis.correction.sums import (
    BatchSums,
    BoundSums,
    Extremes,
    PerplexitySums,
    RejectionSums,
    SequenceWeightSums,
    WeightSums,
)

SMALLEST_BATCH_MEAN = 1e-8
"""Weights whose mean is not above this are not normalized."""


def mean_weight(total: Tensor, count: Tensor) -> Tensor:
    """total / count, or 1 where that is not a usable divisor."""
    return usable_mean(total / count.clamp_min(1))


def usable_mean(mean: Tensor) -> Tensor:
    """The mean weight, or 1 where weights cannot be divided by it: too small, or NaN."""
    return torch.where(mean > SMALLEST_BATCH_MEAN, mean, torch.ones_like(mean))


def correction_metrics(
    config: RolloutCorrectionConfig, sums: BatchSums[float], mins: Extremes[float], maxs: Extremes[float]
) -> dict[str, float]:
    """All metrics that apply to the configuration, by their names in the log; see `Statistics.metrics`."""
    found = {}
    if sums.masked_in_tokens:
        found["nonfinite_token_fraction"] = sums.nonfinite_tokens / sums.masked_in_tokens
        if config.corrects:
            found["gradient_kept_fraction"] = sums.accepted_tokens / sums.masked_in_tokens
    if not sums.tokens:
        return found
    found |= _mismatch_metrics(sums, mins, maxs)
    if sums.weights is not None:
        found |= _weight_metrics(config, sums.weights, mins, maxs)
    if sums.sequence_weights is not None:
        found |= _sequence_weight_metrics(sums.sequence_weights, sums.sequences, mins, maxs)
    if sums.rejection is not None:
        found |= _rejection_metrics(sums.rejection, sums.tokens, sums.sequences)
    if sums.bounds is not None:
        found |= _bound_metrics(sums.bounds, sums.sequences)
    if sums.veto is not None:
        found["mis_catastrophic_token_fraction"] = sums.veto.tokens / sums.tokens
        found["mis_catastrophic_seq_fraction"] = sums.veto.sequences / sums.sequences
    if sums.trimmed_tokens is not None:
        found["mis_second_moment_masked_fraction"] = sums.trimmed_tokens / sums.tokens
    return found


def _mismatch_metrics(sums: BatchSums[float], mins: Extremes[float], maxs: Extremes[float]) -> dict[str, float]:
    """Divergences over valid tokens and sequences; perplexities over the sequences with a finite log-prob."""
    tokens = sums.tokens
    found = {
        "mismatch_kl": -sums.log_ratio / tokens,
        "mismatch_k3_kl": max(sums.ratio_minus_1 - sums.log_ratio, 0.0) / tokens,  # never negative but by rounding
        "mismatch_chi2_token": sums.ratio_squared_minus_1 / tokens,
        "mismatch_chi2_seq": sums.sequence_ratio_squared_minus_1 / sums.sequences,
        "train_rollout_logprob_abs_diff": sums.abs_log_ratio / tokens,
    }
    if sums.measured_sequences:
        for field in fields(PerplexitySums):
            found[f"mismatch_{field.name}"] = getattr(sums.perplexity, field.name) / sums.measured_sequences
        found["mismatch_log_ppl_diff_max"] = maxs.log_ppl_diff
        found["mismatch_log_ppl_diff_min"] = mins.log_ppl_diff
    return found


def _weight_metrics(
    config: RolloutCorrectionConfig, weights: WeightSums[float], mins: Extremes[float], maxs: Extremes[float]
) -> dict[str, float]:
    """Mean and extremes before the mode; mean, extremes, deviation and sample size of the weights after it."""
    count = weights.count
    mean = weights.total / count
    normalizer = mean if config.tis_batch_normalize and mean > SMALLEST_BATCH_MEAN else 1.0
    if config.mode.rejects:
        rejected = weights.high + (weights.low if config.mode.has_lower_bound else 0.0)
        lowest, highest = 0.0 if rejected else _clamped(mins.ratio), maxs.weight
    else:
        ratios = torch.tensor([_clamped(mins.ratio), _clamped(maxs.ratio)], dtype=torch.float64)
        lowest, highest = config.mode.bound(ratios, *config.is_bounds).tolist()
    deviation = _deviation(weights.minus_1, weights.minus_1_squared, count, highest - lowest)
    mean_square = deviation * deviation + mean * mean
    found = {
        "mis_mean_is_weight_before_clip": 1 + weights.before_minus_1 / count,
        "mis_weight_max_before_clip": maxs.ratio,
        "mis_weight_min_before_clip": mins.ratio,
        "mis_ratio_mean_after_mis": mean,
        "mis_weight_min": lowest / normalizer,
        "mis_weight_max": highest / normalizer,
        "mis_weight_std": deviation / normalizer,
        "mis_eff_sample_size": mean * mean / mean_square if mean_square else 0.0,
    }
    found[f"mis_{config.mode.low_fraction}"] = weights.low / count
    found[f"mis_{config.mode.high_fraction}"] = weights.high / count
    if config.tis_batch_normalize:
        found["mis_batch_norm_factor"] = normalizer
    return found


def _sequence_weight_metrics(
    weights: SequenceWeightSums[float], sequences: float, mins: Extremes[float], maxs: Extremes[float]
) -> dict[str, float]:
    """The mean weight of each sequence, after the mode and before batch normalisation."""
    lowest, highest = mins.sequence_weight, maxs.sequence_weight
    return {
        "mis_seq_weight_mean": 1 + weights.minus_1 / sequences,
        "mis_seq_weight_std": _deviation(weights.minus_1, weights.minus_1_squared, sequences, highest - lowest),
        "mis_seq_weight_min": lowest,
        "mis_seq_weight_max": highest,
        "mis_seq_weight_max_deviation": max(abs(lowest - 1), abs(highest - 1)),
        "mis_seq_weight_fraction_high": weights.high / sequences,
        "mis_seq_weight_fraction_low": weights.low / sequences,
    }


def _rejection_metrics(rejection: RejectionSums[float], tokens: float, sequences: float) -> dict[str, float]:
    found = {
        "mis_rs_masked_fraction": rejection.together.tokens / tokens,
        "mis_rs_seq_masked_fraction": rejection.together.sequences / sequences,
    }
    for name, rejected in rejection.criteria.items():
        found[f"mis_rs_{name}_masked_fraction"] = rejected.tokens / tokens
        found[f"mis_rs_{name}_seq_masked_fraction"] = rejected.sequences / sequences
    return found


def _bound_metrics(bounds: BoundSums[float], sequences: float) -> dict[str, float]:
    def ratio(log_bound: float) -> float:
        return math.exp(min(max(log_bound / sequences, -LOG_RATIO_BOUND), LOG_RATIO_BOUND))

    return {
        "mis_rs_k3": bounds.k3 / sequences,
        "mis_rs_z_score": bounds.z_score / sequences,
        "mis_rs_lower_bound": ratio(bounds.log_lower),
        "mis_rs_upper_bound": ratio(bounds.log_upper),
    }


def _deviation(minus_1: float, minus_1_squared: float, count: float, spread: float) -> float:
    """Standard deviation of w from Σ(w − 1), Σ(w − 1)² and max w − min w.

    The sums may be float32's: no deviation is above half the spread (Popoviciu), so equal weights have exactly 0.
    """
    mean_square = minus_1_squared / count
    variance = mean_square - (minus_1 / count) ** 2
    if variance <= 4 * sys.float_info.epsilon * mean_square:
        return 0.0
    return min(math.sqrt(variance), max(spread, 0.0) / 2)


def _clamped(ratio: float) -> float:
    return min(max(ratio, math.exp(-LOG_RATIO_BOUND)), math.exp(LOG_RATIO_BOUND))
