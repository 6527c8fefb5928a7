"""verl 0.9.1's `rollout_corr_helper`: its public names, signatures and metrics, on this library.

`RolloutCorrectionConfig` is verl's class, with its fields and presets. `to_config()` converts it to
the `slime_tis.RolloutCorrectionConfig` that `slime_tis.correct` takes.

verl's older API works as well: `rollout_rs="token"|"sequence"|"geometric"` with
`rollout_rs_threshold_lower` and `rollout_token_veto_threshold`.

Deliberate differences:
    * k1 bounds are on the ratio π_train/π_rollout. verl bounds the inverse, as `verl_compat=True`
      does.
    * Rows without a valid token are ignored.
    * Padding may have any values.
    * If all weights are zero, or no log-ratio is finite, metrics are 0 instead of an error.

Shapes: suffix _BT is [batch, time], _B is one value per row. Metrics are over valid tokens, or over
    rows with a valid token.
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
"""Bound on log-ratios, in nats."""
SUPPORTED_ROLLOUT_RS_OPTIONS: set[str] = set(CRITERIA)
"""Criteria of `rollout_rs`."""
TOKEN_LEVEL_ROLLOUT_RS_OPTIONS: set[str] = {name for name in CRITERIA if name.startswith("token_")}
"""Criteria that reject single tokens."""
MISMATCH = Config(get_mismatch_metrics=True)
"""Only measures."""


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

    The options are verl's. `rollout_token_veto_threshold` and `rollout_rs_threshold_lower` are from
    the older API. `verl_compat` inverts the bounds of k1 criteria, as verl does.

    Returns:
        An object with `.batch["rollout_is_weights"]` (None without weights), the mask in the dtype
        of `response_mask`, and the metrics with the prefix rollout_corr/.

    Raises:
        ValueError: No token is valid, shapes differ, or an option has no meaning.
    """
    _check(old_log_prob, rollout_log_prob, response_mask)
    are_usable = is_log_prob(old_log_prob) & is_log_prob(rollout_log_prob)
    log_ratio = torch.where(are_usable, old_log_prob - rollout_log_prob, torch.nan).detach()
    metrics: dict[str, float] = {}
    weights = None
    if rollout_is is not None and rollout_is_threshold is not None:
        weights, weight_values = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        metrics |= weight_values
    mask = response_mask.detach().clone()
    if rollout_rs is not None or rollout_token_veto_threshold is not None:
        options = {
            "rollout_rs": rollout_rs,
            "rollout_rs_threshold": rollout_rs_threshold,
            "rollout_rs_threshold_lower": rollout_rs_threshold_lower,
            "rollout_token_veto_threshold": rollout_token_veto_threshold,
        }
        config = Config(**config_fields(options))
        mask, rejection_values = _reject(config, log_ratio, response_mask, verl_compat)
        metrics |= rejection_values
    metrics |= compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    proto = None
    if weights is not None:
        proto = _proto({"rollout_is_weights": weights})
    return proto, mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Bounded weights [B, T], 0 at padding, and their metrics without prefix."""
    options = {
        "rollout_is": rollout_is,
        "rollout_is_threshold": rollout_is_threshold,
        "rollout_is_batch_normalize": rollout_is_batch_normalize,
    }
    config = Config(**config_fields(options))
    ranks = Ranks()
    distributed = torch.distributed
    if rollout_is_batch_normalize and distributed.is_available() and distributed.is_initialized():
        # verl's ranks are data-parallel.
        ranks = Ranks.from_groups(data=distributed.group.WORLD)
    # Δ as log π_train, and zeros as log π_rollout, have the log-ratio Δ.
    delta = _usable(log_ratio)
    correction = correct(
        config,
        delta,
        torch.zeros_like(delta),
        response_mask,
        global_batch=GlobalBatch(ranks=ranks),
    )
    metrics = weight_metrics(config, log_ratio, response_mask)
    if rollout_is_batch_normalize:
        factor = correction.statistics.batch_norm_factor(ranks)
        metrics["rollout_is_batch_norm_factor"] = factor.item()
    return correction.weights.to(log_ratio.dtype), metrics


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
    *,
    verl_compat: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """The mask without rejected tokens, and the criteria's metrics without prefix."""
    options = {"rollout_rs": rollout_rs, "rollout_rs_threshold": rollout_rs_threshold}
    config = Config(**config_fields(options))
    if log_ratio.shape[0] == 0:
        return response_mask.detach(), {}
    return _reject(config, log_ratio, response_mask, verl_compat)


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """Perplexities and divergences without prefix; empty if no log-prob is finite.

    Without rollout log-probs there are only the training policy's perplexities.
    """
    reference = rollout_log_prob
    prefix = "mismatch_"
    if reference is None:
        reference = old_log_prob
        prefix = "mismatch_training_"
    _check(old_log_prob, reference, response_mask)
    correction = correct(MISMATCH, old_log_prob, reference, response_mask)
    return {
        name.removeprefix("mismatch_"): value
        for name, value in correction.statistics.metrics().items()
        if name.startswith(prefix)
    }


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """Metrics between the current policy and the rollout, with the prefix rollout_corr/."""
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def compute_rollout_correction_and_add_to_batch(
    batch: Any, rollout_corr_config: Any
) -> tuple[Any, dict[str, float]]:
    """Sets `response_mask` of a DataProto and, with weights, `rollout_is_weights`."""
    options = {
        name: rollout_corr_config.get(name, default)
        for name, default in vars(RolloutCorrectionConfig(rollout_is=None)).items()
        if name.startswith("rollout_")
    }
    proto, mask, metrics = compute_rollout_correction_and_rejection_mask(
        batch.batch["old_log_probs"],
        batch.batch["rollout_log_probs"],
        batch.batch["response_mask"],
        **options,
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
    """Replaces `old_log_probs` by `rollout_log_probs`, and selects verl's bypass loss.

    Args:
        batch: A DataProto, changed in place.
        rollout_corr_config: Options of the correction, for the policy loss.
        policy_loss_config: Options of the policy loss, changed in place.

    Raises:
        ValueError: The batch has no rollout log-probs.
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
    """Lets a struct of omegaconf take new keys."""
    # A program that has not imported omegaconf has no struct.
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None or not omegaconf.OmegaConf.is_config(config):
        return nullcontext()
    opened: AbstractContextManager[object] = omegaconf.open_dict(config)
    return opened


def _reject(
    config: Config, log_ratio: Tensor, response_mask: Tensor, inverted: bool
) -> tuple[Tensor, dict[str, float]]:
    """The mask without rejected tokens, and metrics; `inverted` as verl's bounds of k1."""
    criteria = parse_criteria(config.rollout_rs, config.rollout_rs_threshold)
    thresholds = config.rollout_rs_threshold
    if inverted and criteria:
        thresholds = ",".join(_inverted_threshold(criterion) for criterion in criteria)
    delta = _usable(log_ratio)
    correction = correct(
        replace(config, rollout_rs_threshold=thresholds),
        delta,
        torch.zeros_like(delta),
        response_mask,
    )
    values = correction.statistics.metrics()
    metrics: dict[str, float] = {}
    for criterion in criteria:
        metrics |= criterion_metrics(criterion, log_ratio, response_mask, inverted)
    prefixes = [f"rs_{criterion.name}_" for criterion in config.rejections]
    if prefixes:
        prefixes.insert(0, "rs_")
    # Without a valid token, there are no statistics: verl's metrics are then 0.
    for prefix in prefixes:
        for name in (f"{prefix}masked_fraction", f"{prefix}seq_masked_fraction"):
            metrics[f"rollout_{name}"] = values.get(f"mis_{name}", 0.0)
    if config.vetoes:
        sequences = values.get("mis_catastrophic_seq_fraction", 0.0)
        tokens = values.get("mis_catastrophic_token_fraction", 0.0)
        metrics["rollout_is_veto_fraction"] = sequences
        metrics["rollout_is_catastrophic_token_fraction"] = tokens
    return correction.mask.to(response_mask.dtype), metrics


def _inverted_threshold(criterion: Criterion) -> str:
    """A criterion's threshold with k1 bounds as verl reads them: on π_rollout/π_train."""
    if criterion.lower is None:
        return str(criterion.upper)
    # A lower bound of 0 is none; 1e-300 keeps its inverse finite.
    lower = criterion.lower or 1e-300
    return f"{1 / criterion.upper}_{1 / lower}"


def _check(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> None:
    """Refuses a batch without a valid token, or with different shapes, in verl's words."""
    if not response_mask.any():
        raise ValueError("response_mask must contain at least one valid token (1).")
    others = {"rollout_log_prob": rollout_log_prob, "response_mask": response_mask}
    for name, values in others.items():
        if old_log_prob.shape != values.shape:
            raise ValueError(
                f"old_log_prob shape {old_log_prob.shape} does not match {name} shape"
                f" {values.shape}."
            )


def _proto(tensors: dict[str, Tensor]) -> Any:
    """verl's DataProto if verl is loaded, else a stand-in with the same `.batch`."""
    protocol = sys.modules.get("verl.protocol")
    if protocol is None:
        return SimpleNamespace(batch=tensors)
    return protocol.DataProto.from_dict(tensors=tensors)


def weight_metrics(
    config: Config, log_ratio_BT: Tensor, response_mask_BT: Tensor
) -> dict[str, float]:
    """rollout_is_* metrics of the bounded weights, before batch normalisation."""
    valid, delta = _clean(log_ratio_BT, response_mask_BT)
    lower, upper = config.is_bounds
    log_weight = delta
    if config.tis_level != "token":
        log_weight = delta.sum(-1, keepdim=True)
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
    """verl's rollout_is_* metrics of weights, without prefix.

    Args:
        rollout_is_weights: Bounded weights [B, T].
        raw_rollout_is_weights: Weights before the bound, [B, T].
        log_ratio_for_metrics: Log-ratios [B, T] per token, or [B, 1] per sequence.
        response_mask: Nonzero at valid tokens, [B, T].
        rollout_is: Level of the weights: token or sequence.
        rollout_is_threshold: Upper bound.
        rollout_is_threshold_lower: Lower bound; None is 1/upper.
    """
    valid = response_mask.bool() & rollout_is_weights.isfinite() & raw_rollout_is_weights.isfinite()
    bounded = torch.where(valid, rollout_is_weights, 0.0).double()
    raw = torch.where(valid, raw_rollout_is_weights, 0.0).double()
    upper = rollout_is_threshold
    lower = rollout_is_threshold_lower
    if lower is None:
        lower = 1.0 / upper
    has_tokens = valid.any(-1)
    per_row = _row_means(bounded, valid)[has_tokens]
    raw_per_row = _row_means(raw, valid)[has_tokens]
    if rollout_is == "token":
        high = raw[valid] > upper
        low = raw[valid] < lower
        extremes = bounded[valid]
    else:
        # As in verl, minimum and maximum of sequences are of the unbounded ratio, at most e^20.
        log_ratios = log_ratio_for_metrics.double()[:, 0][has_tokens]
        log_ratios = log_ratios.nan_to_num(0.0, torch.inf, -torch.inf)
        log_lower = math.log(lower) if lower else -math.inf
        high = log_ratios > math.log(upper)
        low = log_ratios < log_lower
        extremes = log_ratios.clamp(max=LOG_RATIO_BOUND).exp()
    mean, mean_square, deviation = _deviation(bounded[valid].clamp(0.0, upper))
    sample_size = 0.0
    if mean_square:
        sample_size = mean * mean / mean_square
    return {
        "rollout_is_mean": _mean(bounded[valid]),
        "rollout_is_ratio_fraction_high": _mean(high),
        "rollout_is_ratio_fraction_low": _mean(low),
        "rollout_is_max": _highest(extremes),
        "rollout_is_min": -_highest(-extremes),
        "rollout_is_std": deviation,
        "rollout_is_eff_sample_size": sample_size,
        **_row_metrics("rollout_is_", per_row),
        "rollout_is_seq_max_deviation": _highest((per_row - 1).abs()),
        "rollout_is_seq_fraction_high": _mean(raw_per_row > upper),
        "rollout_is_seq_fraction_low": _mean(raw_per_row < lower),
    }


def criterion_metrics(
    criterion: Criterion, log_ratio_BT: Tensor, response_mask_BT: Tensor, inverted: bool
) -> dict[str, float]:
    """rollout_rs_<criterion>_* metrics of the criterion's statistic; `inverted` negates Δ of k1."""
    valid, delta = _clean(log_ratio_BT, response_mask_BT)
    bounded = delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    k1 = bounded
    if inverted:
        k1 = -bounded
    divergences = {
        "k1": k1,
        "k2": bounded.square() / 2,
        "k3": bounded.expm1() - bounded,
        "error": bounded.abs().exp(),
    }
    statistic = torch.where(valid, divergences[criterion.divergence], 0.0)
    level = "token"
    per_row = None
    if not criterion.per_token:
        level = "sequence"
        # The padding lets amax work on rows of no columns; k2 and k3 are never negative.
        maxima = torch.nn.functional.pad(statistic, (0, 1)).amax(-1)
        rows = {"mean": _row_means(statistic, valid), "sum": statistic.sum(-1), "max": maxima}
        per_row = rows[criterion.aggregation]
        statistic = per_row[:, None].expand_as(statistic)
    if criterion.lower is None:
        lower = 0.0
        upper = criterion.upper
    else:
        lower, upper = criterion.log_bounds
    return compute_rs_metrics(
        criterion.name,
        statistic,
        valid,
        valid.any(-1),
        level=level,
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
    """verl's rollout_rs_<option>_* metrics of a statistic, without prefix.

    Args:
        option_name: The criterion, for the names.
        rs_statistic: [B, T].
        response_mask: Nonzero at valid tokens, [B, T].
        seq_valid_mask: Nonzero at rows to count, [B].
        level: token or sequence.
        per_sequence_values: The statistic per row, [B]; None is the mean over the row.
        rollout_rs_threshold: Upper bound, a logarithm for k1.
        rollout_rs_threshold_lower: Lower bound, a logarithm.
        apply_lower_threshold: Whether there is a lower bound; k2 and k3 have none.
    """
    valid = response_mask.bool() & rs_statistic.isfinite()
    statistic = torch.where(valid, rs_statistic, 0.0).double()
    upper = rollout_rs_threshold
    lower = rollout_rs_threshold_lower if apply_lower_threshold else 0.0
    if per_sequence_values is None:
        per_row = _row_means(statistic, valid)
    else:
        per_row = per_sequence_values.double().flatten()
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
        **_row_metrics("", rows),
        "seq_max_deviation": _highest(rows.abs()),
        "seq_fraction_high": _mean(rows > upper),
    }
    if apply_lower_threshold:
        metrics["seq_fraction_low"] = _mean(rows < lower)
    return {f"rollout_rs_{option_name}_{name}": value for name, value in metrics.items()}


def _usable(log_ratio_BT: Tensor) -> Tensor:
    """Δ, or NaN at differences so large that an engine's code for minus infinity caused them."""
    return torch.where(log_ratio_BT.abs() < LOG_PROB_LIMIT, log_ratio_BT, torch.nan)


def _clean(log_ratio_BT: Tensor, response_mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The mask of valid tokens with a finite Δ, and Δ in float64, 0 at other tokens."""
    valid = response_mask_BT.bool() & _usable(log_ratio_BT).isfinite()
    return valid, torch.where(valid, log_ratio_BT, 0.0).to(torch.float64)


def _row_means(values_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """The means over the valid tokens per row, 0 without one, [B]."""
    totals = torch.where(valid_BT, values_BT, 0.0).sum(-1)
    return totals / valid_BT.sum(-1).clamp_min(1)


def _mean(values: Tensor) -> float:
    """The mean; 0 without values, where torch gives NaN."""
    if not values.numel():
        return 0.0
    return values.double().mean().item()


def _deviation(clamped: Tensor) -> tuple[float, float, float]:
    """Mean, mean square and deviation of clamped values."""
    mean = _mean(clamped)
    mean_square = _mean(clamped.square())
    # Rounding may make the variance of equal values negative.
    return mean, mean_square, math.sqrt(max(mean_square - mean * mean, 0.0))


def _highest(values: Tensor) -> float:
    """The maximum; 0 without values, of which torch takes none."""
    if not values.numel():
        return 0.0
    return values.max().item()


def _row_metrics(prefix: str, rows_B: Tensor) -> dict[str, float]:
    """Mean, deviation and extremes of one value per row."""
    deviation = 0.0
    # The unbiased deviation, as in verl, needs two values.
    if rows_B.numel() > 1:
        deviation = rows_B.std().item()
    return {
        f"{prefix}seq_mean": _mean(rows_B),
        f"{prefix}seq_std": deviation,
        f"{prefix}seq_max": _highest(rows_B),
        f"{prefix}seq_min": -_highest(-rows_B),
    }
