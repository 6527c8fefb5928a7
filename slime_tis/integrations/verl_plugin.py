"""Importing this module in verl puts this library's correction and losses in the place of verl's.

    export VERL_USE_EXTERNAL_MODULES=slime_tis.integrations.verl_plugin

`verl.trainer.ppo.rollout_corr_helper` gets the functions of `slime_tis.integrations.verl`, which
have verl's signatures, options and metric names. A block `slime_tis` with options of this library
replaces verl's options: `+algorithm.rollout_correction.slime_tis.rs_z_score=3.0`. The policy losses
are registered as slime_tis_NAME, for `actor_rollout_ref.actor.policy_loss.loss_mode`; NAME is a key
of `LOSSES`.
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
"""Losses [B, T], and 1.0 where a clip or a mask takes the gradient away."""
Options = Any
"""verl's ActorConfig."""


def _clip_range(config: Options) -> dict[str, float]:
    low, high = (getattr(config, name, None) for name in ("clip_ratio_low", "clip_ratio_high"))
    return {
        "clip_low": config.clip_ratio if low is None else low,
        "clip_high": config.clip_ratio if high is None else high,
    }


def _vespo(
    log_prob: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, config: Options
) -> LossAndMask:
    total = torch.where(mask, (log_prob - old).detach(), 0.0).sum(1, keepdim=True)
    return losses.vespo(log_prob, total.expand_as(old), advantage), torch.zeros_like(old)


def _masked(preset: str) -> Callable[..., LossAndMask]:
    """A·π/π_old without the tokens that the preset's divergence mask rejects, exact in float64."""
    options: dict[str, Any] = {
        name: value for name, value in PRESETS[preset].items() if name.startswith("divergence_mask")
    }
    config = RolloutCorrectionConfig(**options)

    def loss(
        log_prob: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, _: Options
    ) -> LossAndMask:
        accepted = functional.correct(config, log_prob, old, mask, advantages=advantage).mask
        return torch.where(accepted, -advantage * losses.policy_ratio(log_prob, old), 0.0), (
            mask & ~accepted
        ).to(old.dtype)

    return loss


LOSSES: dict[str, Callable[..., LossAndMask]] = {
    "ppo": lambda x, old, a, mask, config: losses.ppo_clip(
        x, old, a, **_clip_range(config), dual_clip=config.clip_ratio_c
    ),
    "cispo": lambda x, old, a, mask, config: losses.cispo(x, old, a, **_clip_range(config)),
    "vespo": _vespo,
    **{preset: _masked(preset) for preset in ("dppo_tv", "dppo_kl", "kpop", "ipo")},
}
"""Losses of (log π_θ, log π_old, A, mask, config) by the name behind slime_tis_."""


def _register(name: str, token_loss: Callable[..., LossAndMask]) -> None:
    def policy_loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Options = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        is_usable = is_log_prob(old_log_prob) & is_log_prob(
            log_prob.detach()
        )  # bypass: the sampler's log-probs
        mask = response_mask.bool() & is_usable
        # padding may hold anything; 0 · NaN would reach the gradient
        current, old = (torch.where(mask, values, 0.0) for values in (log_prob, old_log_prob))
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
        return total, {
            "actor/pg_clipfrac": (removed.detach()[mask].sum() / count).item(),
            "actor/ppo_kl": ((old - current).detach()[mask].sum() / count).item(),
            "actor/nonfinite_token_fraction": (
                ((response_mask.bool() & ~is_usable).sum() / count).item()
            ),
        }

    core_algos.register_policy_loss(f"slime_tis_{name}")(policy_loss)


def compute_rollout_correction_and_add_to_batch(
    batch: Any, rollout_corr_config: Any
) -> tuple[Any, dict[str, float]]:
    """Corrects the batch of a step on verl's driver, in place, with this library's options if there are any.

    Raises:
        ValueError: an unknown option, or one that needs advantages, which verl forms later.
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
    config, tensors = RolloutCorrectionConfig(**options), batch.batch
    if config.use_rollout_logprobs:
        raise ValueError(
            "rollout_correction.slime_tis is read in decoupled mode alone; drop"
            " use_rollout_logprobs."
        )
    found = correct(
        config, tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"]
    )
    if config.touches_loss:
        tensors["rollout_is_weights"] = found.weights * found.mask
        if config.rejection_normalizer == "kept":
            tensors["response_mask"] = found.mask.to(tensors["response_mask"].dtype)
    return batch, {
        f"rollout_corr/{name}": value for name, value in found.statistics.metrics().items()
    }


def _replace_helper() -> None:
    """Replaces verl's functions in their module, and in every module of verl that has imported them by name."""
    for name in verl.__all__:
        original = getattr(rollout_corr_helper, name, None)
        if not callable(original) or isinstance(original, type):
            continue
        for module in [
            module for key, module in sys.modules.items() if key.split(".")[0] == "verl"
        ]:
            if getattr(module, name, None) is original:
                setattr(module, name, globals().get(name, getattr(verl, name)))


for _name, _loss in LOSSES.items():
    _register(_name, _loss)
_replace_helper()
