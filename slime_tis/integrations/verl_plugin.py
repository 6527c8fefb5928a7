"""Importing this module in verl replaces verl's correction by ours, and registers our losses.

    export VERL_USE_EXTERNAL_MODULES=slime_tis.integrations.verl_plugin

`verl.trainer.ppo.rollout_corr_helper` gets the functions of `slime_tis.integrations.verl`, with
verl's signatures, options and metric names. A block `slime_tis` with our options replaces verl's
options: `+algorithm.rollout_correction.slime_tis.rs_z_score=3.0`. The policy losses are registered
as slime_tis_NAME, for `actor_rollout_ref.actor.policy_loss.loss_mode`; NAME is a key of `LOSSES`.
"""

import math
import sys
from collections.abc import Callable, MutableMapping
from functools import wraps
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from slime_tis import functional
from slime_tis.correction import PRESETS, RolloutCorrectionConfig, correct, is_log_prob
from slime_tis.integrations import verl
from slime_tis.integrations.frameworks import VERL
from slime_tis.live_health import LiveHealth, logged
from slime_tis.policy import losses
from slime_tis.token_signs import sign_metrics, token_sums

try:
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.utils.tracking import Tracking
except ImportError as error:
    raise ImportError(
        f"slime_tis.integrations.verl_plugin needs verl ({error}); pip install verl, for example"
        " 0.9.1."
    ) from error

LossAndMask = tuple[Tensor, Tensor]
"""Losses [B, T], and 1.0 at tokens whose gradient is removed by a clip or a mask."""
Options = Any
"""verl's ActorConfig."""


def _clip_range(config: Options) -> dict[str, float]:
    """verl's clip ratios as arguments of a loss."""
    low = getattr(config, "clip_ratio_low", None)
    if low is None:
        low = config.clip_ratio
    high = getattr(config, "clip_ratio_high", None)
    if high is None:
        high = config.clip_ratio
    return {"clip_low": low, "clip_high": high}


def _ppo(
    log_prob: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, config: Options
) -> LossAndMask:
    """`losses.ppo_clip` with verl's options."""
    clip_range = _clip_range(config)
    return losses.ppo_clip(log_prob, old, advantage, **clip_range, dual_clip=config.clip_ratio_c)


def _cispo(
    log_prob: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, config: Options
) -> LossAndMask:
    """`losses.cispo` with verl's options."""
    return losses.cispo(log_prob, old, advantage, **_clip_range(config))


def _vespo(
    log_prob: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, config: Options
) -> LossAndMask:
    """`losses.vespo` on a padded batch, whose rows are the sequences."""
    log_ratio = torch.where(mask, (log_prob - old).detach(), 0.0).sum(1, keepdim=True)
    loss = losses.vespo(log_prob, log_ratio.expand_as(old), advantage)
    return loss, torch.zeros_like(old)


def _masked(preset: str) -> Callable[..., LossAndMask]:
    """−A·π/π_old, 0 at tokens that the preset's divergence mask rejects, exact in float64."""
    options: dict[str, Any] = {
        name: value for name, value in PRESETS[preset].items() if name.startswith("divergence_mask")
    }
    config = RolloutCorrectionConfig(**options)

    def loss(
        log_prob: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, _: Options
    ) -> LossAndMask:
        accepted = functional.correct(config, log_prob, old, mask, advantages=advantage).mask
        ratio = losses.policy_ratio(log_prob, old)
        rejected = mask & ~accepted
        return torch.where(accepted, -advantage * ratio, 0.0), rejected.to(old.dtype)

    return loss


LOSSES: dict[str, Callable[..., LossAndMask]] = {
    "ppo": _ppo,
    "cispo": _cispo,
    "vespo": _vespo,
    "dppo_tv": _masked("dppo_tv"),
    "dppo_kl": _masked("dppo_kl"),
    "kpop": _masked("kpop"),
    "ipo": _masked("ipo"),
}
"""NAME of slime_tis_NAME → loss of (log π_θ, log π_old, A, mask, config)."""


def _register(name: str, token_loss: Callable[..., LossAndMask]) -> None:
    """Registers a loss with verl's signature."""

    def policy_loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Options = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        valid = response_mask.bool()
        # In bypass mode the old log-probs are the sampler's, which may be missing.
        is_usable = is_log_prob(old_log_prob) & is_log_prob(log_prob.detach())
        mask = valid & is_usable
        # Padding may have any values: 0 · NaN would reach the gradient.
        current = torch.where(mask, log_prob, 0.0)
        old = torch.where(mask, old_log_prob, 0.0)
        loss, removed = token_loss(current, old, advantages, mask, config)
        if rollout_is_weights is not None:
            loss = loss * torch.where(mask, rollout_is_weights, 0.0)
        total = core_algos.agg_loss(
            loss_mat=torch.where(mask, loss, 0.0),
            loss_mask=response_mask,
            loss_agg_mode=loss_agg_mode,
            **config.global_batch_info,
        )
        count = response_mask.sum().clamp_min(1)
        sums = {
            "actor/pg_clipfrac": removed.detach()[mask].sum(),
            "actor/ppo_kl": (old - current).detach()[mask].sum(),
            "actor/nonfinite_token_fraction": (valid & ~is_usable).sum(),
        }
        return total, {name: (value / count).item() for name, value in sums.items()}

    core_algos.register_policy_loss(f"slime_tis_{name}")(policy_loss)


METRICS = {
    "k3_kl": "train/mismatch_k3_kl",
    "kl": "train/mismatch_kl",
    "rollout_is_eff_sample_size": "train/mis_eff_sample_size",
}
"""Metrics of verl's correction → our names; others have equal names."""
METRIC_PREFIXES = ("rollout_corr/", "actor/rollout_corr/")
"""In decoupled and in bypass mode."""
HEALTH_OPTIONS = {"on_alarm": "warn", "log_all_metrics": False}
"""Options of the block `slime_tis_health` and their defaults."""


class DriverHealth:
    """Health alarms on verl's driver: the batch's tokens, then all metrics of the step."""

    def __init__(self) -> None:
        self.log_all_metrics = False
        self._health: LiveHealth | None = None
        self._signs: dict[str, float] = {}

    def configure(self, rollout_corr_config: Any, config: RolloutCorrectionConfig) -> None:
        """Reads the block `slime_tis_health` at the first step.

        Raises:
            ValueError: An option is unknown.
        """
        if self._health is not None:
            return
        block = (rollout_corr_config or {}).get("slime_tis_health") or {}
        options = {**HEALTH_OPTIONS, **block}
        unknown = sorted(set(options) - set(HEALTH_OPTIONS))
        if unknown:
            raise ValueError(
                f"rollout_correction.slime_tis_health has no option {', '.join(unknown)}; it has"
                f" {' and '.join(HEALTH_OPTIONS)}."
            )
        self.log_all_metrics = options["log_all_metrics"]
        self._health = LiveHealth(config, VERL, on_alarm=options["on_alarm"])

    def measure(self, batch: Any) -> None:
        """Takes the signs of the batch's tokens, before rejection changes its mask."""
        tensors = batch.batch
        sums = token_sums(
            tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"]
        )
        # verl's driver has its tensors on the CPU.
        self._signs = sign_metrics(sums)

    def checked(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        """The metrics of a step with health/CAUSE, and with the signs if all metrics are logged.

        Raises:
            HealthAlarm: See `LiveHealth`.
        """
        if self._health is None:
            return data
        values = {f"train/{name}": value for name, value in self._signs.items()}
        signs = {}
        if self.log_all_metrics:
            # Not in the helper's result: without a block slime_tis it has only verl's metrics.
            signs = {VERL.metric(name): value for name, value in self._signs.items()}
        # A line without a new batch, such as a validation, must not repeat the old signs.
        self._signs = {}
        for name, value in data.items():
            # verl also logs texts and tables.
            if not isinstance(value, Real):
                continue
            for prefix in METRIC_PREFIXES:
                own = name.removeprefix(prefix)
                if own != name:
                    values[METRICS.get(own, f"train/{own}")] = float(value)
        if "actor/grad_norm" in data:
            is_finite = math.isfinite(data["actor/grad_norm"])
            values["train/nonfinite_gradient_steps"] = float(not is_finite)
        if "actor/pg_clipfrac" in data:
            values["train/pg_clipfrac"] = float(data["actor/pg_clipfrac"])
        return {**signs, **data, **self._health.check(step, values)}


DRIVER_HEALTH = DriverHealth()
"""verl has one driver process, and its helper is a function without state."""


def compute_rollout_correction_and_add_to_batch(
    batch: Any, rollout_corr_config: Any
) -> tuple[Any, dict[str, float]]:
    """Corrects the batch of a step in place, on verl's driver.

    The block `slime_tis` replaces verl's options.

    Raises:
        ValueError: An option is unknown or needs advantages, which verl computes later.
    """
    options = rollout_corr_config.get("slime_tis")
    if options is None:
        DRIVER_HEALTH.configure(rollout_corr_config, verl.MISMATCH)
        DRIVER_HEALTH.measure(batch)
        return verl.compute_rollout_correction_and_add_to_batch(batch, rollout_corr_config)
    unknown = sorted(set(options) - set(RolloutCorrectionConfig.__dataclass_fields__))
    if unknown:
        raise ValueError(
            f"rollout_correction.slime_tis has no option {', '.join(unknown)}; docs/flags.md lists"
            " all."
        )
    config = RolloutCorrectionConfig(**options)
    if config.use_rollout_logprobs:
        raise ValueError(
            "rollout_correction.slime_tis is only read in decoupled mode; drop"
            " use_rollout_logprobs."
        )
    DRIVER_HEALTH.configure(rollout_corr_config, config)
    DRIVER_HEALTH.measure(batch)
    tensors = batch.batch
    correction = correct(
        config, tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"]
    )
    if config.touches_loss:
        tensors["rollout_is_weights"] = correction.weights * correction.mask
        if config.rejection_normalizer == "kept":
            tensors["response_mask"] = correction.mask.to(tensors["response_mask"].dtype)
    metrics = logged(correction.statistics.metrics(), all_metrics=DRIVER_HEALTH.log_all_metrics)
    return batch, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def apply_bypass_mode(
    batch: Any,
    rollout_corr_config: Any = None,
    policy_loss_config: MutableMapping[str, object] | None = None,
) -> None:
    """verl's bypass mode, with health alarms on the workers' metrics."""
    DRIVER_HEALTH.configure(rollout_corr_config, verl.MISMATCH)
    verl.apply_bypass_mode(batch, rollout_corr_config, policy_loss_config)


def _check_before_logging() -> None:
    """Makes verl's `Tracking.log` check each step and log health/CAUSE."""
    log = Tracking.log

    @wraps(log)
    def checked_log(self: Any, data: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        return log(self, DRIVER_HEALTH.checked(data, step), step, *args, **kwargs)

    Tracking.log = checked_log


def _replace_helper() -> None:
    """Replaces verl's functions in their module and in all modules that imported them."""
    modules = [module for key, module in sys.modules.items() if key.split(".")[0] == "verl"]
    for name in verl.__all__:
        original = getattr(rollout_corr_helper, name, None)
        # verl's configuration class stays: our functions read it, too.
        if not callable(original) or isinstance(original, type):
            continue
        # This module's function of the same name has priority.
        replacement = globals().get(name, getattr(verl, name))
        for module in modules:
            if getattr(module, name, None) is original:
                setattr(module, name, replacement)


for _name, _loss in LOSSES.items():
    _register(_name, _loss)
_replace_helper()
_check_before_logging()
