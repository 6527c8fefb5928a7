"""verl's figures of a padded batch: one number each, over valid tokens or over rows that have one.

Shapes: suffix _BT is [batch, time], _B per row.
"""

import math

import torch
from torch import Tensor

from slime_tis.correction import Criterion, RolloutCorrectionConfig

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ±20 before exp and before the divergences, as verl does."""


def weight_metrics(config: RolloutCorrectionConfig, log_ratio_BT: Tensor, response_mask_BT: Tensor) -> dict[str, float]:
    """rollout_is_*: of the weights after the bound and before batch normalisation.

    As in verl, minimum and maximum at the sequence level are of the unbounded ratio.
    """
    valid, delta = _clean(log_ratio_BT, response_mask_BT)
    lower, upper = config.is_bounds
    log_weight = delta if config.tis_level == "token" else delta.sum(-1, keepdim=True).expand_as(delta)
    raw = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    inside = (raw >= lower) & (raw <= upper)
    bounded = torch.where(inside, raw, 0.0) if config.tis_mode == "mask" else raw.clamp(max=upper)
    present = valid.any(-1)
    per_row = _row_means(bounded, valid)[present]
    raw_per_row = _row_means(raw, valid)[present]
    if config.tis_level == "token":
        high, low = _mean(raw > upper, valid), _mean(raw < lower, valid)
        highest, lowest = bounded[valid].max().item(), bounded[valid].min().item()
    else:
        rows = log_weight[:, 0][present]
        high, low = _mean_of(rows > math.log(upper)), _mean_of(rows < math.log(lower))
        highest, lowest = rows.max().clamp(max=LOG_RATIO_BOUND).exp().item(), rows.min().exp().item()
    mean, mean_square = _mean(bounded, valid), _mean(bounded.square(), valid)
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_ratio_fraction_high": high,
        "rollout_is_ratio_fraction_low": low,
        "rollout_is_max": highest,
        "rollout_is_min": lowest,
        "rollout_is_std": math.sqrt(max(mean_square - mean * mean, 0.0)),
        "rollout_is_eff_sample_size": mean * mean / mean_square if mean_square else 0.0,
        "rollout_is_seq_mean": per_row.mean().item(),
        "rollout_is_seq_std": _std(per_row),
        "rollout_is_seq_max": per_row.max().item(),
        "rollout_is_seq_min": per_row.min().item(),
        "rollout_is_seq_max_deviation": (per_row - 1).abs().max().item(),
        "rollout_is_seq_fraction_high": _mean_of(raw_per_row > upper),
        "rollout_is_seq_fraction_low": _mean_of(raw_per_row < lower),
    }
    if config.tis_mode == "mask":
        metrics["rollout_is_oob_ratio"] = _mean(~inside, valid)
    return metrics


def criterion_metrics(
    criterion: Criterion, log_ratio_BT: Tensor, response_mask_BT: Tensor, inverted: bool
) -> dict[str, float]:
    """rollout_rs_<criterion>_*: of the statistic that is bounded.

    Args:
        criterion: With the bounds as the user wrote them.
        inverted: k1 is −Δ with these bounds, as verl has it; otherwise it is Δ.
    """
    valid, delta = _clean(log_ratio_BT, response_mask_BT)
    statistic, per_row, lower, upper = _statistic(criterion, valid, delta, inverted)
    rows = per_row[valid.any(-1)]
    two_sided = criterion.lower is not None
    if criterion.per_token:
        values, high, low = statistic[valid], _mean(statistic > upper, valid), _mean(statistic < lower, valid)
    else:
        values, high, low = rows, _mean_of(rows > upper), _mean_of(rows < lower)
    clamped = statistic.clamp(lower if two_sided else 0.0, upper)
    mean, mean_square = _mean(clamped, valid), _mean(clamped.square(), valid)
    metrics = {
        "mean": _mean(statistic, valid),
        "max": values.max().item(),
        "min": values.min().item(),
        "fraction_high": high,
        "fraction_low": low if two_sided else 0.0,
        "std": math.sqrt(max(mean_square - mean * mean, 0.0)) if valid.sum() > 1 else 0.0,
        "seq_mean": rows.mean().item(),
        "seq_std": _std(rows),
        "seq_max": rows.max().item(),
        "seq_min": rows.min().item(),
        "seq_max_deviation": rows.abs().max().item(),
        "seq_fraction_high": _mean_of(rows > upper),
    }
    if two_sided:
        metrics["seq_fraction_low"] = _mean_of(rows < lower)
    return {f"rollout_rs_{criterion.name}_{name}": value for name, value in metrics.items()}


def _statistic(
    criterion: Criterion, valid: Tensor, delta: Tensor, inverted: bool
) -> tuple[Tensor, Tensor, float, float]:
    """The statistic at every token, that of every row (a mean for per-token criteria), and its bounds."""
    bounded = delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    per_token = {
        "k1": -bounded if inverted else bounded,
        "k2": bounded.square() / 2,
        "k3": bounded.exp() - 1 - bounded,
    }[criterion.divergence]
    per_token = torch.where(valid, per_token, 0.0)
    per_row = {
        "token": lambda: _row_means(per_token, valid),
        "sum": lambda: per_token.sum(-1),
        "mean": lambda: _row_means(per_token, valid),
        "max": lambda: per_token.amax(-1),
    }[criterion.aggregation]()
    spread = per_token if criterion.per_token else per_row[:, None].expand_as(per_token)
    if criterion.lower is None:
        return spread, per_row, 0.0, criterion.upper
    return spread, per_row, math.log(criterion.lower), math.log(criterion.upper)


def _clean(log_ratio_BT: Tensor, response_mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens are valid and finite, and Δ in float64, 0 elsewhere."""
    valid = response_mask_BT.bool() & log_ratio_BT.isfinite()
    return valid, torch.where(valid, log_ratio_BT, 0.0).to(torch.float64)


def _mean(values_BT: Tensor, valid_BT: Tensor) -> float:
    total = torch.where(valid_BT, values_BT.to(torch.float64), 0.0).sum()
    return (total / valid_BT.sum().clamp_min(1)).item()


def _mean_of(values_B: Tensor) -> float:
    return values_B.to(torch.float64).mean().item()


def _row_means(values_BT: Tensor, valid_BT: Tensor) -> Tensor:
    return torch.where(valid_BT, values_BT, 0.0).sum(-1) / valid_BT.sum(-1).clamp_min(1)


def _std(values_B: Tensor) -> float:
    return values_B.std().item() if values_B.numel() > 1 else 0.0
