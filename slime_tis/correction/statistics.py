"""The mergeable statistics, and the named metrics that are computed from them once per step."""

import math
import sys
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.context_parallel import ONE_RANK, Ranks
from slime_tis.correction.ratio import LOG_RATIO_BOUND
from slime_tis.correction.sums import (
    EXTREMES,
    BatchSums,
    BoundSums,
    Extremes,
    PerplexitySums,
    WeightSums,
    batch_columns,
    named,
    number_of_columns,
)

SMALLEST_BATCH_MEAN = 1e-8
"""Weights are not normalized if their mean is this small or smaller."""


def usable_mean(mean: Tensor) -> Tensor:
    """The mean weight, or 1 if it is too small to divide by, or NaN."""
    return torch.where(mean > SMALLEST_BATCH_MEAN, mean, torch.ones_like(mean))


@dataclass(frozen=True)
class Statistics:
    """The mergeable sums, minima and maxima of some sequences under one configuration.

    To merge micro-batches and ranks, sums are added, and extremes are merged by min and max. Ratios
    of sequences are summed relative to the batch's maximum, so merging first converts both sums to
    the common maximum. Columns depend only on the options, so a rank without a sequence merges,
    too.
    """

    config: RolloutCorrectionConfig
    sums: Tensor
    """`BatchSums` of complete sequences as columns, float64 [k]: the same on every context-parallel
    rank, to be added over data-parallel ranks."""
    mins: Tensor
    """Minima over this rank's tokens and sequences, `Extremes` as columns, float64 [m]."""
    maxs: Tensor
    """Maxima over this rank's tokens and sequences, in the same columns."""

    @classmethod
    def empty(
        cls, config: RolloutCorrectionConfig, device: torch.device | str = "cpu"
    ) -> "Statistics":
        """The neutral element of `merge`."""
        zero = torch.zeros(1, dtype=torch.float64, device=device)
        return cls(
            config=config,
            sums=zero.repeat(number_of_columns(batch_columns(config))),
            mins=(zero + torch.inf).repeat(number_of_columns(EXTREMES)),
            maxs=(zero - torch.inf).repeat(number_of_columns(EXTREMES)),
        )

    def merge(self, other: "Statistics") -> "Statistics":
        """The statistics of both together.

        Raises:
            ValueError: if they were measured under different options.
        """
        if self.config != other.config:
            names = []
            for field in fields(self.config):
                if getattr(self.config, field.name) != getattr(other.config, field.name):
                    names.append(field.name)
            raise ValueError(
                f"the statistics to merge differ in {', '.join(names)}; merge statistics of one"
                " config."
            )
        maxs = torch.maximum(self.maxs, other.maxs)
        return replace(
            self,
            sums=self._sums_relative_to(maxs) + other._sums_relative_to(maxs),
            mins=torch.minimum(self.mins, other.mins),
            maxs=maxs,
        )

    def all_reduce(self, ranks: Ranks) -> "Statistics":
        """The statistics of all ranks, as new tensors.

        Sums are added only over data-parallel ranks, because context-parallel ranks have equal
        sums.
        """
        maxs = ranks.all_reduce(self.maxs.clone(), "max")
        return replace(
            self,
            sums=ranks.over_data(self._sums_relative_to(maxs)),
            mins=ranks.all_reduce(self.mins.clone(), "min"),
            maxs=maxs,
        )

    def _sums_relative_to(self, maxs: Tensor) -> Tensor:
        """A copy of the sums, with sequence ratios relative to a larger batch's maximum."""
        sums = self.sums.clone()
        columns = batch_columns(self.config)
        own = self.maxs[EXTREMES.sequence_log_ratio]
        largest = maxs[EXTREMES.sequence_log_ratio]
        # The maximum of no sequence is −inf, and −inf − (−inf) is NaN; the sums are 0 then.
        shift = torch.where(own == largest, 0.0, own - largest)
        sums[columns.sequence_weight].mul_(shift.exp())
        sums[columns.sequence_weight_squared].mul_((2 * shift).exp())
        return sums

    def batch_norm_factor(self, ranks: Ranks = ONE_RANK) -> Tensor:
        """Mean bounded weight over valid tokens, or over sequences for sequence-wide weights.

        Args:
            ranks: The ranks that share the batch, if these are the statistics of a single rank.

        Returns:
            float64 scalar; 1 if there is no weight, all weights are 0, or the configuration does
            not normalise.
        """
        columns = batch_columns(self.config)
        if columns.weights is None or not self.config.tis_batch_normalize:
            return torch.ones_like(self.sums[0])
        count = self.sums[columns.sequences]
        if self.config.has_token_weights:
            count = self.sums[columns.tokens]
        total = self.sums[columns.weights.total]
        total, count = ranks.over_data(torch.stack([total, count])).unbind()
        # 0/0 without a token is NaN, which gives 1.
        return usable_mean(total / count)

    def metrics(self) -> dict[str, float]:
        """All metrics of the configuration by name in the log, with one host synchronisation.

        Returns:
            Name to value; empty without a token in the loss mask. Values are never NaN or infinite.
        """
        # One copy to the host for all columns, because each copy waits for the device.
        values = iter(torch.cat([self.sums, self.mins, self.maxs]).tolist())
        sums: BatchSums[Any] = named(batch_columns(self.config), islice(values, len(self.sums)))
        mins: Extremes[Any] = named(EXTREMES, islice(values, len(self.mins)))
        maxs: Extremes[Any] = named(EXTREMES, values)
        config = self.config
        metrics: dict[str, float] = {}
        if sums.masked_in_tokens:
            metrics["nonfinite_token_fraction"] = sums.nonfinite_tokens / sums.masked_in_tokens
            if config.corrects:
                metrics["gradient_kept_fraction"] = sums.accepted_tokens / sums.masked_in_tokens
        # All other metrics divide by tokens or sequences.
        if not sums.tokens:
            return metrics
        metrics |= _mismatch_metrics(sums, mins, maxs)
        if sums.weights is not None:
            count = sums.sequences
            if config.has_token_weights:
                count = sums.tokens
            metrics |= _weight_metrics(config, sums.weights, count, mins, maxs)
        if sums.mean_weights is not None:
            metrics |= _mean_weight_metrics(sums.mean_weights, sums.sequences, mins, maxs)
        metrics |= _rejection_metrics(sums)
        if sums.bounds is not None:
            metrics |= _bound_metrics(sums.bounds, sums.sequences)
        if sums.veto is not None:
            metrics["mis_catastrophic_token_fraction"] = sums.veto.tokens / sums.tokens
            metrics["mis_catastrophic_seq_fraction"] = sums.veto.sequences / sums.sequences
        if sums.trimmed_tokens is not None:
            metrics["mis_second_moment_masked_fraction"] = sums.trimmed_tokens / sums.tokens
        return metrics


def _mismatch_metrics(
    sums: BatchSums[float], mins: Extremes[float], maxs: Extremes[float]
) -> dict[str, float]:
    """Divergences over valid tokens and sequences; perplexities of sequences with finite tokens."""
    tokens = sums.tokens
    k3 = max(sums.ratio_minus_1 - sums.log_ratio, 0.0)  # negative only by rounding
    # (Σw)²/(n·Σw²), with w relative to the largest: the scale cancels
    square_of_sum = sums.sequence_weight * sums.sequence_weight
    sum_of_squares = sums.sequences * sums.sequence_weight_squared
    metrics = {
        "mismatch_kl": -sums.log_ratio / tokens,
        "mismatch_k3_kl": k3 / tokens,
        "mismatch_chi2_token": sums.ratio_squared_minus_1 / tokens,
        "mismatch_chi2_seq": sums.sequence_ratio_squared_minus_1 / sums.sequences,
        "effective_sequence_share": square_of_sum / sum_of_squares,
        "train_rollout_logprob_abs_diff": sums.abs_log_ratio / tokens,
    }
    if sums.measured_sequences:
        for field in fields(PerplexitySums):
            total = getattr(sums.perplexity, field.name)
            metrics[f"mismatch_{field.name}"] = total / sums.measured_sequences
        metrics["mismatch_log_ppl_diff_max"] = maxs.log_ppl_diff
        metrics["mismatch_log_ppl_diff_min"] = mins.log_ppl_diff
    return metrics


def _weight_metrics(
    config: RolloutCorrectionConfig,
    weights: WeightSums[float],
    count: float,
    mins: Extremes[float],
    maxs: Extremes[float],
) -> dict[str, float]:
    """Weights: mean and extremes before the mode; also deviation and sample size after it."""
    assert weights.before is not None and weights.before_minus_1 is not None
    mean = weights.total / count
    normalizer = 1.0
    if config.tis_batch_normalize and mean > SMALLEST_BATCH_MEAN:
        normalizer = mean
    if config.mode.rejects:
        lowest = _clamped(mins.ratio)
        if weights.high or (weights.low and config.mode.has_lower_bound):
            # A rejected weight is 0.
            lowest = 0.0
        highest = maxs.weight
    elif config.signs_bounds:
        lowest = mins.weight
        highest = maxs.weight
    else:
        # Bounding is monotonic: the extremes after the mode are the bounded extremes before it.
        ratios = torch.tensor([_clamped(mins.ratio), _clamped(maxs.ratio)], dtype=torch.float64)
        lowest, highest = config.mode.bound(ratios, *config.is_bounds).tolist()
    deviation = _deviation(weights, count, highest - lowest)
    mean_square = deviation * deviation + mean * mean
    metrics = {
        "mis_mean_is_weight_before_clip": _mean(weights.before, weights.before_minus_1, count),
        "mis_weight_max_before_clip": maxs.ratio,
        "mis_weight_min_before_clip": mins.ratio,
        "mis_ratio_mean_after_mis": mean,
        "mis_weight_min": lowest / normalizer,
        "mis_weight_max": highest / normalizer,
        "mis_weight_std": deviation / normalizer,
        "mis_eff_sample_size": 0.0,
    }
    if mean_square:
        metrics["mis_eff_sample_size"] = mean * mean / mean_square
    metrics[f"mis_{config.mode.low_fraction}"] = weights.low / count
    metrics[f"mis_{config.mode.high_fraction}"] = weights.high / count
    if config.tis_batch_normalize:
        metrics["mis_batch_norm_factor"] = normalizer
    return metrics


def _mean_weight_metrics(
    weights: WeightSums[float], sequences: float, mins: Extremes[float], maxs: Extremes[float]
) -> dict[str, float]:
    """Per-sequence mean weights, after the mode and before batch normalisation."""
    lowest = mins.sequence_weight
    highest = maxs.sequence_weight
    return {
        "mis_seq_weight_mean": _mean(weights.total, weights.minus_1, sequences),
        "mis_seq_weight_std": _deviation(weights, sequences, highest - lowest),
        "mis_seq_weight_min": lowest,
        "mis_seq_weight_max": highest,
        "mis_seq_weight_max_deviation": max(abs(lowest - 1), abs(highest - 1)),
        "mis_seq_weight_fraction_high": weights.high / sequences,
        "mis_seq_weight_fraction_low": weights.low / sequences,
    }


def _rejection_metrics(sums: BatchSums[float]) -> dict[str, float]:
    """Shares of rejected tokens and of sequences with one, per criterion and in all."""
    metrics = {}
    for name, counts in sums.rejected.items():
        prefix = "mis_rs_"
        if name:
            prefix = f"mis_rs_{name}_"
        metrics[f"{prefix}masked_fraction"] = counts.tokens / sums.tokens
        metrics[f"{prefix}seq_masked_fraction"] = counts.sequences / sums.sequences
    return metrics


def _bound_metrics(bounds: BoundSums[float], sequences: float) -> dict[str, float]:
    """The adaptive bounds, as ratios of a sequence of median length."""

    def ratio(log_bound: float) -> float:
        return math.exp(min(max(log_bound / sequences, -LOG_RATIO_BOUND), LOG_RATIO_BOUND))

    return {
        "mis_rs_k3": bounds.k3 / sequences,
        "mis_rs_z_score": bounds.z_score / sequences,
        "mis_rs_lower_bound": ratio(bounds.log_lower),
        "mis_rs_upper_bound": ratio(bounds.log_upper),
    }


def _mean(total: float, minus_1: float, count: float) -> float:
    """Mean weight: Σw/n if it is below 1/2, else 1 + Σ(w − 1)/n, which is then more accurate."""
    mean = total / count
    if mean < 0.5:
        return mean
    return 1 + minus_1 / count


def _deviation(weights: WeightSums[float], count: float, spread: float) -> float:
    """Standard deviation of w, from the sums and from the spread max w − min w.

    Σw and Σw² have the same variance as Σ(w − 1) and Σ(w − 1)². The rounding error grows with the
    larger term, and Σw² < Σ(w − 1)² if the mean is below 1/2. The sums may have float32's accuracy.
    A deviation is at most half the spread (Popoviciu's inequality), so equal weights give exactly
    0.
    """
    mean = weights.total / count
    mean_square = weights.total_squared / count
    if mean >= 0.5:
        mean = weights.minus_1 / count
        mean_square = weights.minus_1_squared / count
    variance = mean_square - mean**2
    # If all weights are equal, only the rounding error of the two sums is left.
    if variance <= 4 * sys.float_info.epsilon * mean_square:
        return 0.0
    return min(math.sqrt(variance), max(spread, 0.0) / 2)


def _clamped(ratio: float) -> float:
    """A ratio in the range of `safe_exp`."""
    return min(max(ratio, math.exp(-LOG_RATIO_BOUND)), math.exp(LOG_RATIO_BOUND))
