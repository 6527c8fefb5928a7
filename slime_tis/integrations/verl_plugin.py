"""Importing this module in verl replaces verl's correction by ours, and registers our losses.

    export VERL_USE_EXTERNAL_MODULES=slime_tis.integrations.verl_plugin

`verl.trainer.ppo.rollout_corr_helper` gets the functions of `slime_tis.integrations.verl`, with
verl's signatures, options and metric names. A block `slime_tis` with our options replaces verl's
options: `+algorithm.rollout_correction.slime_tis.rs_z_score=3.0`. The policy losses are registered
as slime_tis_NAME, for `actor_rollout_ref.actor.policy_loss.loss_mode`; NAME is a key of `LOSSES`.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slime_tis import functional
from slime_tis.correction import PRESETS, RolloutCorrectionConfig, correct, is_log_prob
from slime_tis.integrations import verl
from slime_tis.policy import losses

try:
    from verl.trainer.ppo import core_algos, rollout_corr_helper
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
    clip_range = _clip_range(config)
    return losses.ppo_clip(log_prob, old, advantage, **clip_range, dual_clip=config.clip_ratio_c)


def _cispo(
    log_prob: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, config: Options
) -> LossAndMask:
    return losses.cispo(log_prob, old, advantage, **_clip_range(config))


def _vespo(
    log_prob: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, config: Options
) -> LossAndMask:
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
    tensors = batch.batch
    correction = correct(
        config, tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"]
    )
    if config.touches_loss:
        tensors["rollout_is_weights"] = correction.weights * correction.mask
        if config.rejection_normalizer == "kept":
            tensors["response_mask"] = correction.mask.to(tensors["response_mask"].dtype)
    metrics = correction.statistics.metrics()
    return batch, {f"rollout_corr/{name}": value for name, value in metrics.items()}


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
