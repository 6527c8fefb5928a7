"""verl 0.9.1's `rollout_corr_helper`: its public names, signatures and metrics, on this library.

`RolloutCorrectionConfig` is verl's class, with its fields and presets; `to_config()` makes of it the
`slime_tis.RolloutCorrectionConfig` that `slime_tis.correct` takes.

Also the older API of the documents: `rollout_rs="token"|"sequence"|"geometric"` with `rollout_rs_threshold_lower`
and `rollout_token_veto_threshold`. What differs, deliberately: k1 bounds are on the ratio π_train/π_rollout, where
verl inverts them (`verl_compat=True` brings that back); rows without a valid token count nowhere; padding may hold
anything; weights that are all zero, or a batch without a finite log-ratio, give metrics of 0 instead of an error.
"""

import sys
from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slime_tis.correction import CRITERIA, LOG_RATIO_BOUND, GlobalBatch, Ranks, correct, parse_criteria
from slime_tis.correction import RolloutCorrectionConfig as Config
from slime_tis.integrations import verl_metrics
from slime_tis.integrations.verl_config import RolloutCorrectionConfig, config_fields
from slime_tis.integrations.verl_metrics import compute_is_metrics, compute_rs_metrics

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


def compute_rollout_correction_and_rejection_mask(
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

    The options are verl's; `rollout_token_veto_threshold` and `rollout_rs_threshold_lower` are its older API's.
    `verl_compat` inverts the bounds of k1 criteria, as verl does.

    Returns:
        An object with `.batch["rollout_is_weights"]` (None without weights), the mask in its own dtype, and the
        metrics with the prefix rollout_corr/.

    Raises:
        ValueError: if there is no valid token, shapes differ, or an option means nothing.
    """
    _check(old_log_prob, rollout_log_prob, response_mask)
    log_ratio = (old_log_prob - rollout_log_prob).detach()
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
    config = Config(**config_fields({**options, "rollout_is_batch_normalize": rollout_is_batch_normalize}))
    ranks, distributed = Ranks(), torch.distributed
    if rollout_is_batch_normalize and distributed.is_available() and distributed.is_initialized():
        ranks = Ranks.from_groups(data=distributed.group.WORLD)  # verl's ranks are data-parallel
    known = GlobalBatch(ranks=ranks)
    found = correct(config, log_ratio, torch.zeros_like(log_ratio), response_mask, global_batch=known)
    metrics = verl_metrics.weight_metrics(config, log_ratio, response_mask)
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
    config = Config(**config_fields({"rollout_rs": rollout_rs, "rollout_rs_threshold": rollout_rs_threshold}))
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
    metrics = {name.removeprefix("mismatch_"): value for name, value in found.items() if name.startswith("mismatch_")}
    if rollout_log_prob is None:
        return {name: metrics[name] for name in ("training_ppl", "training_log_ppl") if name in metrics}
    return metrics


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """The same between the current policy and the rollout, with the prefix rollout_corr/."""
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def compute_rollout_correction_and_add_to_batch(batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, float]]:
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
        specs = [str(c.upper) if c.lower is None else f"{1 / c.upper}_{1 / (c.lower or 1e-300)}" for c in criteria]
        acting = replace(config, rollout_rs_threshold=",".join(specs) or None)
    found = correct(acting, log_ratio, torch.zeros_like(log_ratio), response_mask)
    values = found.statistics.metrics()
    metrics: dict[str, float] = {}
    for criterion in criteria:
        metrics |= verl_metrics.criterion_metrics(criterion, log_ratio, response_mask, inverted)
    for prefix in ["rs_", *(f"rs_{criterion.name}_" for criterion in config.rejections)] if config.rejections else []:
        for name in (f"{prefix}masked_fraction", f"{prefix}seq_masked_fraction"):
            metrics[f"rollout_{name}"] = values.get(f"mis_{name}", 0.0)
    if config.vetoes:
        metrics["rollout_is_veto_fraction"] = values.get("mis_catastrophic_seq_fraction", 0.0)
        metrics["rollout_is_catastrophic_token_fraction"] = values.get("mis_catastrophic_token_fraction", 0.0)
    return found.mask.to(response_mask.dtype), metrics


def _check(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> None:
    if not response_mask.any():
        raise ValueError("response_mask must contain at least one valid token (1).")
    for name, x in (("rollout_log_prob", rollout_log_prob), ("response_mask", response_mask)):
        if old_log_prob.shape != x.shape:
            raise ValueError(f"old_log_prob shape {old_log_prob.shape} does not match {name} shape {x.shape}.")


def _proto(tensors: dict[str, Tensor]) -> Any:
    """verl's DataProto where verl is loaded, a stand-in with the same `.batch` elsewhere."""
    protocol = sys.modules.get("verl.protocol")
    return SimpleNamespace(batch=tensors) if protocol is None else protocol.DataProto.from_dict(tensors=tensors)
