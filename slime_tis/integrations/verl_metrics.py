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
        metrics["rollout_is_oob_ratio"] = _mean(bounded == 0, valid)
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
        high, low = _mean(raw > upper, valid), _mean(raw < lower, valid)
        highest, lowest = _highest(bounded[valid]), _lowest(bounded[valid])
    else:
        rows = log_ratio_for_metrics.double()[:, 0][present].nan_to_num(0.0, torch.inf, -torch.inf)
        high, low = _mean_of(rows > math.log(upper)), _mean_of(rows < (math.log(lower) if lower else -math.inf))
        ratios = rows.clamp(max=LOG_RATIO_BOUND).exp()
        highest, lowest = _highest(ratios), _lowest(ratios)
    applied = bounded.clamp(0.0, upper)
    mean, mean_square = _mean(applied, valid), _mean(applied.square(), valid)
    return {
        "rollout_is_mean": _mean(bounded, valid),
        "rollout_is_ratio_fraction_high": high,
        "rollout_is_ratio_fraction_low": low,
        "rollout_is_max": highest,
        "rollout_is_min": lowest,
        "rollout_is_std": math.sqrt(max(mean_square - mean * mean, 0.0)),
        "rollout_is_eff_sample_size": mean * mean / mean_square if mean_square else 0.0,
        "rollout_is_seq_mean": _mean_of(per_row),
        "rollout_is_seq_std": _std(per_row),
        "rollout_is_seq_max": _highest(per_row),
        "rollout_is_seq_min": _lowest(per_row),
        "rollout_is_seq_max_deviation": _highest((per_row - 1).abs()),
        "rollout_is_seq_fraction_high": _mean_of(raw_per_row > upper),
        "rollout_is_seq_fraction_low": _mean_of(raw_per_row < lower),
    }


def criterion_metrics(
    criterion: Criterion, log_ratio_BT: Tensor, response_mask_BT: Tensor, inverted: bool
) -> dict[str, float]:
    """rollout_rs_<criterion>_* of the statistic that a criterion bounds; for k1 it is −Δ if `inverted`, as in verl."""
    valid, delta = _clean(log_ratio_BT, response_mask_BT)
    statistic, per_row, lower, upper = _statistic(criterion, valid, delta, inverted)
    return compute_rs_metrics(
        criterion.name,
        statistic,
        valid,
        valid.any(-1),
        level="token" if criterion.per_token else "sequence",
        per_sequence_values=None if criterion.per_token else per_row,
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
    if level == "token":
        values, high, low = statistic[valid], _mean(statistic > upper, valid), _mean(statistic < lower, valid)
    else:
        values, high, low = rows, _mean_of(rows > upper), _mean_of(rows < lower)
    clamped = statistic.clamp(lower, upper)
    mean, mean_square = _mean(clamped, valid), _mean(clamped.square(), valid)
    metrics = {
        "mean": _mean(statistic, valid),
        "max": _highest(values),
        "min": _lowest(values),
        "fraction_high": high,
        "fraction_low": low if apply_lower_threshold else 0.0,
        "std": math.sqrt(max(mean_square - mean * mean, 0.0)) if valid.sum() > 1 else 0.0,
        "seq_mean": _mean_of(rows),
        "seq_std": _std(rows),
        "seq_max": _highest(rows),
        "seq_min": _lowest(rows),
        "seq_max_deviation": _highest(rows.abs()),
        "seq_fraction_high": _mean_of(rows > upper),
    }
    if apply_lower_threshold:
        metrics["seq_fraction_low"] = _mean_of(rows < lower)
    return {f"rollout_rs_{option_name}_{name}": value for name, value in metrics.items()}


def _statistic(
    criterion: Criterion, valid: Tensor, delta: Tensor, inverted: bool
) -> tuple[Tensor, Tensor, float, float]:
    """Returns the statistic of every token, of every row (a mean for per-token criteria), and its bounds."""
    bounded = delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    per_token = {
        "k1": -bounded if inverted else bounded,
        "k2": bounded.square() / 2,
        "k3": bounded.expm1() - bounded,
        "error": bounded.abs().exp(),
    }[criterion.divergence]
    per_token = torch.where(valid, per_token, 0.0)
    if criterion.aggregation in ("token", "mean"):
        per_row = _row_means(per_token, valid)
    else:
        per_row = per_token.sum(-1) if criterion.aggregation == "sum" else _row_maxima(per_token)
    spread = per_token if criterion.per_token else per_row[:, None].expand_as(per_token)
    if criterion.lower is None:
        return spread, per_row, 0.0, criterion.upper
    return spread, per_row, *criterion.log_bounds


def _clean(log_ratio_BT: Tensor, response_mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens are valid and finite, and Δ in float64, 0 elsewhere."""
    valid = response_mask_BT.bool() & (log_ratio_BT.abs() < LOG_RATIO_LIMIT)
    return valid, torch.where(valid, log_ratio_BT, 0.0).to(torch.float64)


def _mean(values_BT: Tensor, valid_BT: Tensor) -> float:
    total = torch.where(valid_BT, values_BT.to(torch.float64), 0.0).sum()
    return (total / valid_BT.sum().clamp_min(1)).item()


def _mean_of(values_B: Tensor) -> float:
    return values_B.to(torch.float64).mean().item() if values_B.numel() else 0.0


def _highest(values: Tensor) -> float:
    return values.max().item() if values.numel() else 0.0


def _lowest(values: Tensor) -> float:
    return values.min().item() if values.numel() else 0.0


def _row_means(values_BT: Tensor, valid_BT: Tensor) -> Tensor:
    return torch.where(valid_BT, values_BT, 0.0).sum(-1) / valid_BT.sum(-1).clamp_min(1)


def _row_maxima(values_BT: Tensor) -> Tensor:
    """Of divergences, which are never negative; 0 where a row has no token."""
    return torch.nn.functional.pad(values_BT, (0, 1)).amax(-1)


def _std(values_B: Tensor) -> float:
    return values_B.std().item() if values_B.numel() > 1 else 0.0
