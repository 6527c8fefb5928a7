"""verl's metrics of a padded batch: one number each, over valid tokens or over rows that have one.

A batch without a valid token with a finite log-ratio gives 0 for each of them.

Shapes: suffix _BT is [batch, time], _B per row.
"""

import math

import torch
from torch import Tensor

from slime_tis.correction import LOG_RATIO_BOUND, LOG_RATIO_LIMIT, Criterion, RolloutCorrectionConfig


def weight_metrics(config: RolloutCorrectionConfig, log_ratio_BT: Tensor, response_mask_BT: Tensor) -> dict[str, float]:
    """rollout_is_* of the weights that `config` makes of a log-ratio, after the bound, before batch normalisation."""
    valid, delta = _clean(log_ratio_BT, response_mask_BT)
    lower, upper = config.is_bounds
    log_weight = delta if config.tis_level == "token" else delta.sum(-1, keepdim=True)
    raw = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().expand_as(delta)
    bounded = config.mode.bound(raw, lower, upper)
    metrics = compute_is_metrics(bounded, raw, log_weight, valid, config.tis_level, upper, lower)
    if config.mode.rejects:
        metrics["rollout_is_oob_ratio"] = _mean(bounded[valid] == 0)
    return metrics


def compute_is_metrics(
    rollout_is_weights: Tensor,
    raw_rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
) -> dict[str, float]:
    """verl's rollout_is_* metrics of given weights, without prefix.

    As in verl, minimum and maximum at the sequence level are of the unbounded ratio, up to e^20 and from 0. The
    log-ratios are [B, T] per token, or [B, 1] per sequence; the lower bound is 1/upper when None.
    """
    valid = response_mask.bool() & rollout_is_weights.isfinite() & raw_rollout_is_weights.isfinite()
    bounded, raw = (torch.where(valid, x, 0.0).double() for x in (rollout_is_weights, raw_rollout_is_weights))
    upper = rollout_is_threshold
    lower = 1.0 / upper if rollout_is_threshold_lower is None else rollout_is_threshold_lower
    present = valid.any(-1)
    per_row, raw_per_row = _row_means(bounded, valid)[present], _row_means(raw, valid)[present]
    if rollout_is == "token":
        high, low, extremes = raw[valid] > upper, raw[valid] < lower, bounded[valid]
    else:
        rows = log_ratio_for_metrics.double()[:, 0][present].nan_to_num(0.0, torch.inf, -torch.inf)
        high, low = rows > math.log(upper), rows < (math.log(lower) if lower else -math.inf)
        extremes = rows.clamp(max=LOG_RATIO_BOUND).exp()
    mean, mean_square, deviation = _deviation(bounded[valid].clamp(0.0, upper))
    return {
        "rollout_is_mean": _mean(bounded[valid]),
        "rollout_is_ratio_fraction_high": _mean(high),
        "rollout_is_ratio_fraction_low": _mean(low),
        "rollout_is_max": _highest(extremes),
        "rollout_is_min": -_highest(-extremes),
        "rollout_is_std": deviation,
        "rollout_is_eff_sample_size": mean * mean / mean_square if mean_square else 0.0,
        **_of_rows("rollout_is_", per_row),
        "rollout_is_seq_max_deviation": _highest((per_row - 1).abs()),
        "rollout_is_seq_fraction_high": _mean(raw_per_row > upper),
        "rollout_is_seq_fraction_low": _mean(raw_per_row < lower),
    }


def criterion_metrics(
    criterion: Criterion, log_ratio_BT: Tensor, response_mask_BT: Tensor, inverted: bool
) -> dict[str, float]:
    """rollout_rs_<criterion>_* of the statistic that a criterion bounds; for k1 it is −Δ if `inverted`, as in verl."""
    valid, delta = _clean(log_ratio_BT, response_mask_BT)
    bounded = delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    divergences = {
        "k1": -bounded if inverted else bounded,
        "k2": bounded.square() / 2,
        "k3": bounded.expm1() - bounded,
        "error": bounded.abs().exp(),
    }
    statistic, per_row = torch.where(valid, divergences[criterion.divergence], 0.0), None
    if not criterion.per_token:  # divergences with a maximum are never negative
        maxima = torch.nn.functional.pad(statistic, (0, 1)).amax(-1)
        rows = {"mean": _row_means(statistic, valid), "sum": statistic.sum(-1), "max": maxima}
        per_row = rows[criterion.aggregation]
        statistic = per_row[:, None].expand_as(statistic)
    lower, upper = (0.0, criterion.upper) if criterion.lower is None else criterion.log_bounds
    return compute_rs_metrics(
        criterion.name,
        statistic,
        valid,
        valid.any(-1),
        level="token" if criterion.per_token else "sequence",
        per_sequence_values=per_row,
        rollout_rs_threshold=upper,
        rollout_rs_threshold_lower=lower,
        apply_lower_threshold=criterion.lower is not None,
    )


def compute_rs_metrics(
    option_name: str,
    rs_statistic: Tensor,
    response_mask: Tensor,
    seq_valid_mask: Tensor,
    *,
    level: str,
    per_sequence_values: Tensor | None,
    rollout_rs_threshold: float,
    rollout_rs_threshold_lower: float,
    apply_lower_threshold: bool,
) -> dict[str, float]:
    """verl's rollout_rs_<option>_* metrics of a given statistic, without prefix.

    `per_sequence_values` [B] are means over the row when None; bounds of k1 are logarithms, and k2 and k3 have no
    lower bound (`apply_lower_threshold`).
    """
    valid = response_mask.bool() & rs_statistic.isfinite()
    statistic = torch.where(valid, rs_statistic, 0.0).double()
    upper, lower = rollout_rs_threshold, rollout_rs_threshold_lower if apply_lower_threshold else 0.0
    per_row = _row_means(statistic, valid) if per_sequence_values is None else per_sequence_values.double().flatten()
    rows = per_row[seq_valid_mask.bool() & valid.any(-1)].nan_to_num()
    values = statistic[valid] if level == "token" else rows
    _, _, deviation = _deviation(statistic[valid].clamp(lower, upper))
    metrics = {
        "mean": _mean(statistic[valid]),
        "max": _highest(values),
        "min": -_highest(-values),
        "fraction_high": _mean(values > upper),
        "fraction_low": _mean(values < lower) if apply_lower_threshold else 0.0,
        "std": deviation if valid.sum() > 1 else 0.0,
        **_of_rows("", rows),
        "seq_max_deviation": _highest(rows.abs()),
        "seq_fraction_high": _mean(rows > upper),
    }
    if apply_lower_threshold:
        metrics["seq_fraction_low"] = _mean(rows < lower)
    return {f"rollout_rs_{option_name}_{name}": value for name, value in metrics.items()}


def _clean(log_ratio_BT: Tensor, response_mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens are valid and finite, and Δ in float64, 0 elsewhere."""
    valid = response_mask_BT.bool() & (log_ratio_BT.abs() < LOG_RATIO_LIMIT)
    return valid, torch.where(valid, log_ratio_BT, 0.0).to(torch.float64)


def _row_means(values_BT: Tensor, valid_BT: Tensor) -> Tensor:
    return torch.where(valid_BT, values_BT, 0.0).sum(-1) / valid_BT.sum(-1).clamp_min(1)


def _mean(values: Tensor) -> float:
    return values.double().mean().item() if values.numel() else 0.0


def _deviation(clamped: Tensor) -> tuple[float, float, float]:
    """Mean, mean square and deviation of clamped values."""
    mean, mean_square = _mean(clamped), _mean(clamped.square())
    return mean, mean_square, math.sqrt(max(mean_square - mean * mean, 0.0))


def _highest(values: Tensor) -> float:
    return values.max().item() if values.numel() else 0.0


def _of_rows(prefix: str, rows_B: Tensor) -> dict[str, float]:
    """Mean, deviation and extremes of one value per row."""
    return {
        f"{prefix}seq_mean": _mean(rows_B),
        f"{prefix}seq_std": rows_B.std().item() if rows_B.numel() > 1 else 0.0,
        f"{prefix}seq_max": _highest(rows_B),
        f"{prefix}seq_min": -_highest(-rows_B),
    }
