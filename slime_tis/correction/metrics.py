"""The named metrics, computed from merged statistics once per step."""

import math

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.ratio import LOG_RATIO_BOUND
from slime_tis.correction.weights import SMALLEST_BATCH_MEAN

PERPLEXITIES = ("training_log_ppl", "training_ppl", "rollout_log_ppl", "rollout_ppl")


def correction_metrics(
    config: RolloutCorrectionConfig, sums: dict[str, float], mins: dict[str, float], maxs: dict[str, float]
) -> dict[str, float]:
    """All metrics that apply to the configuration, by their names in the log; see `Statistics.metrics`."""
    found = {}
    if sums["original_tokens"]:
        found["nonfinite_token_fraction"] = sums["nonfinite_tokens"] / sums["original_tokens"]
        if config.corrects:
            found["gradient_kept_fraction"] = sums["kept_tokens"] / sums["original_tokens"]
    if not sums["tokens"]:
        return found
    found |= _mismatch_metrics(sums, mins, maxs)
    if config.use_tis:
        found |= _weight_metrics(config, sums, mins, maxs)
    if config.has_token_weights:
        found |= _sequence_mean_metrics(sums, mins, maxs)
    if config.rejections:
        found |= _rejection_metrics(config, sums)
    if config.vetoes:
        found["mis_catastrophic_token_fraction"] = sums["catastrophic_tokens"] / sums["tokens"]
        found["mis_catastrophic_seq_fraction"] = sums["catastrophic_sequences"] / sums["sequences"]
    if config.rs_second_moment_bound is not None:
        found["mis_second_moment_masked_fraction"] = sums["trimmed_tokens"] / sums["tokens"]
    return found


def _mismatch_metrics(sums: dict[str, float], mins: dict[str, float], maxs: dict[str, float]) -> dict[str, float]:
    """Divergences over valid tokens and sequences; perplexities over the sequences with a finite log-prob."""
    tokens, sequences, measured = sums["tokens"], sums["sequences"], sums["measured_sequences"]
    found = {
        "mismatch_kl": -sums["log_ratio"] / tokens,
        "mismatch_k3_kl": max(sums["excess"] - sums["log_ratio"], 0.0) / tokens,  # never negative but by rounding
        "mismatch_chi2_token": sums["ratio_squared_excess"] / tokens,
        "mismatch_chi2_seq": sums["sequence_ratio_squared_excess"] / sequences,
        "train_rollout_logprob_abs_diff": sums["abs_log_ratio"] / tokens,
    }
    if measured:
        means = (*PERPLEXITIES, "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio")
        found |= {f"mismatch_{name}": sums[name] / measured for name in means}
        found["mismatch_log_ppl_diff_max"] = maxs["log_ppl_diff"]
        found["mismatch_log_ppl_diff_min"] = mins["log_ppl_diff"]
    return found


def _weight_metrics(
    config: RolloutCorrectionConfig, sums: dict[str, float], mins: dict[str, float], maxs: dict[str, float]
) -> dict[str, float]:
    """Mean and extremes before the mode; mean, extremes, deviation and sample size of the weights after it."""
    count = sums["weights"]
    mean = sums["weight"] / count
    deviation = _deviation(sums["weight_excess"], sums["weight_excess_squared"], count)
    mean_square = deviation * deviation + mean * mean
    normalizer = mean if config.tis_batch_normalize and mean > SMALLEST_BATCH_MEAN else 1.0
    lowest, highest = _weight_of(config, mins["ratio"]), _weight_of(config, maxs["ratio"])
    if config.tis_mode == "mask":
        lowest = 0.0 if sums["weight_low"] + sums["weight_high"] else lowest
        highest = maxs["weight"]
    found = {
        "mis_mean_is_weight_before_clip": 1 + sums["raw_weight_excess"] / count,
        "mis_weight_max_before_clip": maxs["ratio"],
        "mis_weight_min_before_clip": mins["ratio"],
        "mis_ratio_mean_after_mis": mean,
        "mis_weight_min": lowest / normalizer,
        "mis_weight_max": highest / normalizer,
        "mis_weight_std": deviation / normalizer,
        "mis_eff_sample_size": mean * mean / mean_square if mean_square else 0.0,
    }
    if config.tis_mode == "truncate":
        found["mis_truncate_fraction"] = sums["weight_high"] / count
        found["mis_ratio_fraction_low"] = sums["weight_low"] / count
    else:
        found[f"mis_{config.tis_mode}_fraction_low"] = sums["weight_low"] / count
        found[f"mis_{config.tis_mode}_fraction_high"] = sums["weight_high"] / count
    if config.tis_batch_normalize:
        found["mis_batch_norm_factor"] = normalizer
    return found


def _sequence_mean_metrics(sums: dict[str, float], mins: dict[str, float], maxs: dict[str, float]) -> dict[str, float]:
    """Of the mean weight of each sequence, after the mode and before batch normalisation."""
    sequences = sums["sequences"]
    excess, squared = sums["sequence_weight_excess"], sums["sequence_weight_excess_squared"]
    lowest, highest = mins["sequence_weight"], maxs["sequence_weight"]
    return {
        "mis_seq_weight_mean": 1 + excess / sequences,
        "mis_seq_weight_std": _deviation(excess, squared, sequences),
        "mis_seq_weight_min": lowest,
        "mis_seq_weight_max": highest,
        "mis_seq_weight_max_deviation": max(abs(lowest - 1), abs(highest - 1)),
        "mis_seq_weight_fraction_high": sums["sequence_weight_high"] / sequences,
        "mis_seq_weight_fraction_low": sums["sequence_weight_low"] / sequences,
    }


def _deviation(excess: float, excess_squared: float, count: float) -> float:
    """Standard deviation of w from Σ(w − 1) and Σ(w − 1)²."""
    return math.sqrt(max(excess_squared / count - (excess / count) ** 2, 0.0))


def _weight_of(config: RolloutCorrectionConfig, ratio: float) -> float:
    """The weight after the mode of a ratio that mask mode does not reject."""
    lower, upper = config.is_bounds
    weight = min(max(ratio, math.exp(-LOG_RATIO_BOUND)), math.exp(LOG_RATIO_BOUND))
    if config.tis_mode == "mask":
        return weight
    return min(weight if config.tis_mode == "truncate" else max(weight, lower), upper)


def _rejection_metrics(config: RolloutCorrectionConfig, sums: dict[str, float]) -> dict[str, float]:
    tokens, sequences = sums["tokens"], sums["sequences"]
    found = {
        "mis_rs_masked_fraction": sums["rs_tokens"] / tokens,
        "mis_rs_seq_masked_fraction": sums["rs_sequences"] / sequences,
    }
    for criterion in config.rejections:
        found[f"mis_rs_{criterion.name}_masked_fraction"] = sums[f"rs_tokens:{criterion.name}"] / tokens
        found[f"mis_rs_{criterion.name}_seq_masked_fraction"] = sums[f"rs_sequences:{criterion.name}"] / sequences
    if config.adaptive:
        found["mis_rs_k3"] = sums["rs_k3"] / sequences
        found["mis_rs_z_score"] = sums["rs_z_score"] / sequences
        for side in ("lower", "upper"):
            log_bound = sums[f"rs_log_{side}"] / sequences
            found[f"mis_rs_{side}_bound"] = math.exp(min(max(log_bound, -LOG_RATIO_BOUND), LOG_RATIO_BOUND))
    return found
