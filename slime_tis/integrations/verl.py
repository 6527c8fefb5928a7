"""verl 0.9.1's `rollout_corr_helper`: its public names, signatures and metrics, on this library.

`RolloutCorrectionConfig` is verl's class, with its fields and presets. `to_config()` converts it to
the `slime_tis.RolloutCorrectionConfig` that `slime_tis.correct` takes.

Also the older API of the documents: `rollout_rs="token"|"sequence"|"geometric"` with
`rollout_rs_threshold_lower` and `rollout_token_veto_threshold`. What differs, deliberately: k1
bounds are on the ratio π_train/π_rollout, where verl inverts them (`verl_compat=True` brings that
back); rows without a valid token count nowhere; padding may hold anything; weights that are all
zero, or a batch without a finite log-ratio, give metrics of 0 instead of an error.

Shapes: suffix _BT is [batch, time], _B per row. Metrics are over valid tokens, or over rows that
    have one.
"""

import math
import sys
from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slime_tis.correction import (
    CRITERIA,
    LOG_PROB_LIMIT,
    LOG_RATIO_BOUND,
    Criterion,
    GlobalBatch,
    Ranks,
    correct,
    is_log_prob,
    parse_criteria,
    safe_exp,
)
from slime_tis.correction import RolloutCorrectionConfig as Config
from slime_tis.integrations.verl_config import RolloutCorrectionConfig, config_fields

__all__ = [
    "SAFETY_BOUND",
    "SUPPORTED_ROLLOUT_RS_OPTIONS",
    "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS",
    "RolloutCorrectionConfig",
    "apply_bypass_mode",
    "compute_is_metrics",
    "compute_offpolicy_metrics",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_add_to_batch",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "compute_rs_metrics",
]

SAFETY_BOUND = LOG_RATIO_BOUND
SUPPORTED_ROLLOUT_RS_OPTIONS: set[str] = set(CRITERIA)
TOKEN_LEVEL_ROLLOUT_RS_OPTIONS: set[str] = {name for name in CRITERIA if name.startswith("token_")}
MISMATCH = Config(get_mismatch_metrics=True)


def compute_rollout_correction_and_rejection_mask(  # noqa: PLR0913
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
    rollout_rs_threshold_lower: float | None = None,
    rollout_token_veto_threshold: float | None = None,
    *,
    verl_compat: bool = False,
) -> tuple[Any, Tensor, dict[str, float]]:
    """Weights, rejection mask and metrics of a padded batch.

    The options are verl's; `rollout_token_veto_threshold` and `rollout_rs_threshold_lower` are its
    older API's. `verl_compat` inverts the bounds of k1 criteria, as verl does.

    Returns:
        An object with `.batch["rollout_is_weights"]` (None without weights), the mask in its own
        dtype, and the metrics with the prefix rollout_corr/.

    Raises:
        ValueError: if there is no valid token, shapes differ, or an option means nothing.
    """
    _check(old_log_prob, rollout_log_prob, response_mask)
    are_usable = is_log_prob(old_log_prob) & is_log_prob(rollout_log_prob)
    log_ratio = torch.where(are_usable, old_log_prob - rollout_log_prob, torch.nan).detach()
    metrics: dict[str, float] = {}
    weights = None
    if rollout_is is not None and rollout_is_threshold is not None:
        weights, found = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        metrics |= found
    mask = response_mask.detach().clone()
    if rollout_rs is not None or rollout_token_veto_threshold is not None:
        options = {
            "rollout_rs": rollout_rs,
            "rollout_rs_threshold": rollout_rs_threshold,
            "rollout_rs_threshold_lower": rollout_rs_threshold_lower,
            "rollout_token_veto_threshold": rollout_token_veto_threshold,
        }
        config = Config(**config_fields(options))
        mask, found = _reject(config, log_ratio, response_mask, verl_compat)
        metrics |= found
    metrics |= compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    proto = None if weights is None else _proto({"rollout_is_weights": weights})
    return proto, mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Bounded weights [B, T], 0 at padding, and their metrics without prefix."""
    options = {"rollout_is": rollout_is, "rollout_is_threshold": rollout_is_threshold}
    config = Config(
        **config_fields({**options, "rollout_is_batch_normalize": rollout_is_batch_normalize})
    )
    ranks, distributed = Ranks(), torch.distributed
    if rollout_is_batch_normalize and distributed.is_available() and distributed.is_initialized():
        ranks = Ranks.from_groups(data=distributed.group.WORLD)  # verl's ranks are data-parallel
    known = GlobalBatch(ranks=ranks)
    delta = _usable(log_ratio)
    found = correct(config, delta, torch.zeros_like(delta), response_mask, global_batch=known)
    metrics = weight_metrics(config, log_ratio, response_mask)
    if rollout_is_batch_normalize:
        metrics["rollout_is_batch_norm_factor"] = found.statistics.batch_norm_factor(ranks).item()
    return found.weights.to(log_ratio.dtype), metrics


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
    *,
    verl_compat: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """The mask without what the criteria reject, and their metrics without prefix."""
    config = Config(
        **config_fields({"rollout_rs": rollout_rs, "rollout_rs_threshold": rollout_rs_threshold})
    )
    if log_ratio.shape[0] == 0:
        return response_mask.detach(), {}
    return _reject(config, log_ratio, response_mask, verl_compat)


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """Perplexities and divergences without prefix; only the training policy's without rollout log-probs.

    Empty where no log-prob is finite.
    """
    reference = old_log_prob if rollout_log_prob is None else rollout_log_prob
    _check(old_log_prob, reference, response_mask)
    found = correct(MISMATCH, old_log_prob, reference, response_mask).statistics.metrics()
    metrics = {
        name.removeprefix("mismatch_"): value
        for name, value in found.items()
        if name.startswith("mismatch_")
    }
    if rollout_log_prob is None:
        return {
            name: metrics[name] for name in ("training_ppl", "training_log_ppl") if name in metrics
        }
    return metrics


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """The same between the current policy and the rollout, with the prefix rollout_corr/."""
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def compute_rollout_correction_and_add_to_batch(
    batch: Any, rollout_corr_config: Any
) -> tuple[Any, dict[str, float]]:
    """Corrects a DataProto in place: `response_mask` always, `rollout_is_weights` where there are weights."""
    defaults = RolloutCorrectionConfig(rollout_is=None)
    names = [name for name in vars(defaults) if name.startswith("rollout_")]
    proto, mask, metrics = compute_rollout_correction_and_rejection_mask(
        batch.batch["old_log_probs"],
        batch.batch["rollout_log_probs"],
        batch.batch["response_mask"],
        **{name: rollout_corr_config.get(name, defaults.get(name)) for name in names},
    )
    batch.batch["response_mask"] = mask
    if proto is not None:
        batch.batch["rollout_is_weights"] = proto.batch["rollout_is_weights"]
    return batch, metrics


def apply_bypass_mode(
    batch: Any,
    rollout_corr_config: Any = None,
    policy_loss_config: MutableMapping[str, object] | None = None,
) -> None:
    """Bypass: `old_log_probs` of the batch become `rollout_log_probs`, and the policy loss gets their configuration.

    Raises:
        ValueError: if the batch has no rollout log-probs.
    """
    if "rollout_log_probs" not in batch.batch:
        raise ValueError(
            "bypass_mode=True requires rollout_log_probs in batch. "
            "Ensure rollout worker is configured to calculate_log_probs=true."
        )
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    if policy_loss_config is not None:
        with _open(policy_loss_config):
            policy_loss_config["rollout_correction"] = rollout_corr_config
            policy_loss_config["loss_mode"] = "bypass_mode"


def _open(config: object) -> AbstractContextManager[object]:
    """Lets a struct of omegaconf's take new keys; omegaconf has been imported by whoever has one."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None or not omegaconf.OmegaConf.is_config(config):
        return nullcontext()
    opened: AbstractContextManager[object] = omegaconf.open_dict(config)
    return opened


def _reject(
    config: Config, log_ratio: Tensor, response_mask: Tensor, inverted: bool
) -> tuple[Tensor, dict[str, float]]:
    criteria, acting = parse_criteria(config.rollout_rs, config.rollout_rs_threshold), config
    if inverted:  # k1 bounds as verl reads them: on π_rollout/π_train
        specs = [
            str(c.upper) if c.lower is None else f"{1 / c.upper}_{1 / (c.lower or 1e-300)}"
            for c in criteria
        ]
        acting = replace(config, rollout_rs_threshold=",".join(specs) or None)
    delta = _usable(log_ratio)
    found = correct(acting, delta, torch.zeros_like(delta), response_mask)
    values = found.statistics.metrics()
    metrics: dict[str, float] = {}
    for criterion in criteria:
        metrics |= criterion_metrics(criterion, log_ratio, response_mask, inverted)
    for prefix in (
        ["rs_", *(f"rs_{criterion.name}_" for criterion in config.rejections)]
        if config.rejections
        else []
    ):
        for name in (f"{prefix}masked_fraction", f"{prefix}seq_masked_fraction"):
            metrics[f"rollout_{name}"] = values.get(f"mis_{name}", 0.0)
    if config.vetoes:
        metrics["rollout_is_veto_fraction"] = values.get("mis_catastrophic_seq_fraction", 0.0)
        metrics["rollout_is_catastrophic_token_fraction"] = values.get(
            "mis_catastrophic_token_fraction", 0.0
        )
    return found.mask.to(response_mask.dtype), metrics


def _check(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> None:
    if not response_mask.any():
        raise ValueError("response_mask must contain at least one valid token (1).")
    for name, x in (("rollout_log_prob", rollout_log_prob), ("response_mask", response_mask)):
        if old_log_prob.shape != x.shape:
            raise ValueError(
                f"old_log_prob shape {old_log_prob.shape} does not match {name} shape {x.shape}."
            )


def _proto(tensors: dict[str, Tensor]) -> Any:
    """verl's DataProto where verl is loaded, a stand-in with the same `.batch` elsewhere."""
    protocol = sys.modules.get("verl.protocol")
    return (
        SimpleNamespace(batch=tensors)
        if protocol is None
        else protocol.DataProto.from_dict(tensors=tensors)
    )


def weight_metrics(
    config: Config, log_ratio_BT: Tensor, response_mask_BT: Tensor
) -> dict[str, float]:
    """rollout_is_* of the weights that `config` makes of a log-ratio, after the bound, before batch normalisation."""
    valid, delta = _clean(log_ratio_BT, response_mask_BT)
    lower, upper = config.is_bounds
    log_weight = delta if config.tis_level == "token" else delta.sum(-1, keepdim=True)
    raw = safe_exp(log_weight).expand_as(delta)
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

    As in verl, minimum and maximum at the sequence level are of the unbounded ratio, up to e^20 and
    from 0. The log-ratios are [B, T] per token, or [B, 1] per sequence; the lower bound is 1/upper
    when None.
    """
    valid = response_mask.bool() & rollout_is_weights.isfinite() & raw_rollout_is_weights.isfinite()
    bounded, raw = (
        torch.where(valid, x, 0.0).double() for x in (rollout_is_weights, raw_rollout_is_weights)
    )
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


def compute_rs_metrics(  # noqa: PLR0913
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

    `per_sequence_values` [B] are means over the row when None; bounds of k1 are logarithms, and k2
    and k3 have no lower bound (`apply_lower_threshold`).
    """
    valid = response_mask.bool() & rs_statistic.isfinite()
    statistic = torch.where(valid, rs_statistic, 0.0).double()
    upper, lower = (
        rollout_rs_threshold,
        (rollout_rs_threshold_lower if apply_lower_threshold else 0.0),
    )
    per_row = (
        _row_means(statistic, valid)
        if per_sequence_values is None
        else per_sequence_values.double().flatten()
    )
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


def _usable(log_ratio_BT: Tensor) -> Tensor:
    """Δ, and NaN where it is as large as only an engine's code for minus infinity makes it."""
    return torch.where(log_ratio_BT.abs() < LOG_PROB_LIMIT, log_ratio_BT, torch.nan)


def _clean(log_ratio_BT: Tensor, response_mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens are valid and finite, and Δ in float64, 0 elsewhere."""
    valid = response_mask_BT.bool() & _usable(log_ratio_BT).isfinite()
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
