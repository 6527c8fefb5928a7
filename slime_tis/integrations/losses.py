"""Rollout correction in other frameworks' losses.

The frameworks are prime-rl, SkyRL, NeMo-RL, OpenRLHF, AReaL, ms-swift and open-instruct. No
framework is imported before its loss is called.

A wrapped loss gets advantages that are multiplied by the importance weights; rejected tokens have
weight 0. This is exact for losses that are homogeneous in the advantage: PPO, dual clip, GSPO,
CISPO, SAPO, DPPO. The framework keeps its clipping, its KL term and its divisor.

A loss sees one micro-batch. Options that need the global batch are refused, and metrics cover only
this micro-batch.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slime_tis.correction import (
    Correction,
    Ranks,
    RolloutCorrectionConfig,
    correct,
    is_log_prob,
    safe_exp,
    within_bound,
)
from slime_tis.integrations.frameworks import MS_SWIFT
from slime_tis.live_health import OnAlarm, StepMonitor
from slime_tis.token_signs import token_sums

PREFIX = "correction/"
"""Prefix of the metrics."""
SKYRL_SWITCHES = ("tis_ratio_type", "sequence_mask_metric", "is_threshold_low", "is_threshold_high")
"""SkyRL corrects if an option is set whose name ends with one of these."""
Loss = Callable[..., Any]


@dataclass(frozen=True)
class Corrected:
    """A micro-batch for the framework's loss, and the correction that changed it."""

    old: Tensor | None
    """log π_old; None if π_old is π_θ."""
    rollout: Tensor
    """log π_rollout."""
    advantages: Tensor
    """Advantages times weights, 0 for rejected tokens."""
    correction: Correction[Tensor]

    def metrics(self) -> dict[str, float]:
        """Metrics of the micro-batch, with the prefix."""
        metrics = self.correction.statistics.metrics()
        return {PREFIX + name: value for name, value in metrics.items()}


def corrected(
    config: RolloutCorrectionConfig,
    *,
    log_probs: Tensor,
    old: Tensor | None,
    rollout: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    lengths: Sequence[int] | None = None,
) -> Corrected:
    """Weights the advantages of one micro-batch; without a correction they stay as they are.

    Args:
        config: The options of the correction.
        log_probs: log π_θ, [B, T], or packed [N].
        old: log π_old in the same layout; None if π_old is π_θ.
        rollout: log π_rollout in the same layout.
        advantages: In the same layout.
        mask: Nonzero at trained tokens, in the same layout.
        lengths: Lengths of the packed sequences.

    Raises:
        ValueError: The batch has no rollout log-probs, or an option needs the global batch.
    """
    _refuse_global_options(config)
    if rollout is None:
        raise ValueError(
            "the batch has no rollout log-probs; make the rollout engine return log-probs."
        )
    current = log_probs.detach()
    if old is None or config.use_rollout_logprobs:
        train = current
    else:
        train = old
    correction = correct(
        config,
        train,
        rollout,
        mask,
        current_log_probs=current,
        advantages=advantages,
        lengths=lengths,
    )
    if not config.touches_loss:
        return Corrected(old, rollout, advantages, correction)
    factors = correction.weights * correction.mask
    rollout = _bounded(rollout, current, factors)
    if config.use_rollout_logprobs:
        old = rollout
    elif old is not None:
        old = _bounded(old, current, factors)
    # A masked token may have any advantage, and 0 · NaN is NaN.
    advantages = torch.where(factors > 0, advantages * factors, 0.0)
    return Corrected(old, rollout, advantages, correction)


def _refuse_global_options(config: RolloutCorrectionConfig) -> None:
    """Refuses options that need more than one micro-batch."""
    refused = [*config.batch_options]
    if config.tis_batch_normalize:
        refused.append("tis_batch_normalize=True")
    if config.rejection_normalizer == "kept":
        refused.append("rejection_normalizer='kept'")
    if config.old_logprobs == "interpolate":
        refused.append("old_logprobs='interpolate'")
    if refused:
        raise ValueError(
            f"{', '.join(refused)} cannot work in a loss that sees one micro-batch; drop it."
        )


def _bounded(log_probs: Tensor, current: Tensor, factors: Tensor) -> Tensor:
    """Log-probs whose ratio to the current policy does not overflow.

    The framework's loss takes exp of the difference without a bound, and 0 · inf is NaN. A rejected
    token out of the bound gets ratio 1.
    """
    near = within_bound(log_probs, current)
    return torch.where((factors > 0) | (near == log_probs), near, current)


def skyrl(loss: Loss, correction: RolloutCorrectionConfig, loss_type: str = "regular") -> Loss:
    """A loss for SkyRL's `PolicyLossRegistry.register(name, …)`.

    Args:
        loss: SkyRL's loss, for example `ppo_policy_loss`.
        correction: The options; SkyRL's `off_policy_correction` must be off.
        loss_type: SkyRL's name of `loss`, which it looks up in its options.
    """

    def policy_loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        # A copy: the trainer's own options keep their policy_loss_type.
        options = copy.copy(config)
        options.policy_loss_type = loss_type
        for name, value in vars(options.off_policy_correction).items():
            if name.endswith(SKYRL_SWITCHES):
                _refuse_second("SkyRL's off_policy_correction", value is not None)
        batch = corrected(
            correction,
            log_probs=log_probs,
            old=old_log_probs,
            rollout=rollout_logprobs,
            advantages=advantages,
            mask=_mask_or_ones(loss_mask, log_probs),
        )
        total, metrics = loss(
            log_probs,
            batch.old,
            batch.advantages,
            config=options,
            loss_mask=loss_mask,
            rollout_logprobs=batch.rollout,
        )
        return total, metrics | batch.metrics()

    return policy_loss


def openrlhf(loss: Any, correction: RolloutCorrectionConfig) -> Loss:
    """A loss with the signature of OpenRLHF's `PolicyLoss.forward`.

    Args:
        loss: A `PolicyLoss` of OpenRLHF whose correction is off.
        correction: The options.
    """
    level = getattr(loss, "is_correction_level", None)
    if level is None:
        raise ValueError(
            f"{type(loss).__name__} has no is_correction_level, so it is not OpenRLHF's PolicyLoss"
            " of 0.11.2; install openrlhf==0.11.2, the version that this function was written for."
        )
    _refuse_second("OpenRLHF's is_correction_level", level != "off")

    def policy_loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        **totals: Any,
    ) -> tuple[Tensor | None, ...]:
        mask = _mask_or_ones(action_mask, log_probs)
        batch = corrected(
            correction,
            log_probs=log_probs,
            old=old_log_probs,
            rollout=rollout_log_probs,
            advantages=advantages,
            mask=mask,
        )
        total, clipped, ppo_kl, *_ = loss(
            log_probs,
            batch.old,
            batch.advantages,
            action_mask=action_mask,
            rollout_log_probs=batch.rollout,
            **totals,
        )
        count = mask.sum().clamp_min(1)
        accepted = batch.correction.mask
        difference = torch.where(accepted, batch.rollout - old_log_probs, 0.0)
        # The last two are OpenRLHF's metrics of its correction: vllm_kl and is_filter_ratio.
        return total, clipped, ppo_kl, difference.sum() / count, 1 - accepted.sum() / count

    return policy_loss


class NemoLoss:
    """A `LossFunction` of NeMo-RL around its `ClippedPGLossFn`, for `grpo_train(loss_fn=…)`."""

    METRICS = ("rejected_fraction", "nonfinite_fraction", "weight")
    """Names of the metrics without prefix."""

    def __init__(self, loss: Any, correction: RolloutCorrectionConfig) -> None:
        _refuse_second(
            "NeMo-RL's use_importance_sampling_correction", loss.use_importance_sampling_correction
        )
        if loss.force_on_policy_ratio and correction.use_rollout_logprobs:
            raise ValueError(
                "force_on_policy_ratio of NeMo-RL has no old policy; drop use_rollout_logprobs."
            )
        self.loss = loss
        self.correction = correction
        normalizers = getattr(loss, "metric_normalizations", {})
        if "probs_ratio" in normalizers:
            # Our metrics are shares of all tokens, as NeMo-RL's probs_ratio is.
            names = [PREFIX + name for name in self.METRICS]
            shares = dict.fromkeys(names, normalizers["probs_ratio"])
            self.metric_normalizations = normalizers | shares

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped loss, for example loss_type and input_type."""
        if name == "loss" or name.startswith("__"):
            # While pickle restores the object, `loss` is not set yet: this would not end.
            raise AttributeError(name)
        return getattr(self.loss, name)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Any,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss and its metrics.

        NeMo-RL adds metrics over micro-batches, so ours are shares of all tokens.
        """
        # Token 0 is never predicted: NeMo-RL's log-probs are one column shorter than its data.
        rollout = data["generation_logprobs"][:, 1:]
        advantages = data["advantages"][:, 1:]
        old = None
        if not self.loss.force_on_policy_ratio:
            old = data["prev_logprobs"][:, 1:]
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        batch = corrected(
            self.correction,
            log_probs=next_token_logprobs,
            old=old,
            rollout=rollout,
            advantages=advantages,
            mask=mask,
        )
        columns = {
            "prev_logprobs": batch.old,
            "generation_logprobs": batch.rollout,
            "advantages": batch.advantages,
        }
        # A shallow copy: the caller's batch keeps its columns.
        data = copy.copy(data)
        for name, values in columns.items():
            if values is not None:
                # The first column comes back, because the wrapped loss removes it as well.
                data[name] = torch.cat([data[name][:, :1], values], 1)
        loss, metrics = self.loss(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
        accepted = batch.correction.mask
        counts = {
            "rejected_fraction": ((mask > 0) & ~accepted).sum(),
            "nonfinite_fraction": ((mask > 0) & ~is_log_prob(rollout)).sum(),
            "weight": (batch.correction.weights * accepted).sum(),
        }
        shares = {
            PREFIX + name: (count / global_valid_toks).item() for name, count in counts.items()
        }
        return loss, metrics | shares


def areal(
    loss: Loss,
    correction: RolloutCorrectionConfig,
    report: Callable[[dict[str, float]], object] = lambda metrics: None,
) -> Loss:
    """AReaL's `grpo_loss_fn` with correction, to replace `areal.trainer.ppo.actor.grpo_loss_fn`.

    Args:
        loss: AReaL's function.
        correction: The options; AReaL's `rejection_sampling` must be off.
        report: Is called with the metrics of every micro-batch, for example `lambda metrics:
            stats_tracker.scalar(**metrics)`.
    """

    def policy_loss(
        logprobs: Tensor, entropy: Tensor, input_data: Mapping[str, Any], **options: Any
    ) -> Tensor:
        _refuse_second("AReaL's rejection_sampling", options.get("rejection_sampling"))
        starts = input_data.get("cu_seqlens")
        lengths = None
        # Padded tensors [B, T] need no lengths.
        if logprobs.ndim == 1 and starts is not None:
            lengths = starts.diff().tolist()
        batch = corrected(
            correction,
            log_probs=logprobs,
            old=input_data.get("prox_logp"),
            rollout=input_data["logprobs"],
            advantages=input_data["advantages"],
            mask=input_data["loss_mask"],
            lengths=lengths,
        )
        report(batch.metrics())
        data = {
            **input_data,
            "prox_logp": batch.old,
            "logprobs": batch.rollout,
            "advantages": batch.advantages,
        }
        total: Tensor = loss(logprobs, entropy, data, **options)
        return total

    return policy_loss


def prime_rl(loss: Loss, correction: RolloutCorrectionConfig) -> Loss:
    """A loss of prime-rl on one sample, around `loss`: LossInputs → LossOutputs.

    prime-rl's π_old is the rollout policy, so the ratio of its loss is the importance weight
    already. Only rejection acts.
    """
    bypass = replace(correction, use_rollout_logprobs=True)

    def sample_loss(inputs: Any) -> Any:
        batch = corrected(
            bypass,
            log_probs=inputs.trainer_logprobs,
            old=None,
            rollout=inputs.inference_logprobs,
            advantages=inputs.advantages,
            mask=inputs.loss_mask,
            # prime-rl calls the loss with one sample at a time.
            lengths=[len(inputs.loss_mask)],
        )
        inputs = replace(inputs, inference_logprobs=batch.rollout, advantages=batch.advantages)
        outputs = loss(inputs)
        metrics = {
            name: batch.advantages.new_tensor(value) for name, value in batch.metrics().items()
        }
        return replace(outputs, metrics=outputs.metrics | metrics)

    return sample_loss


def prime_rl_loss(inputs: Any, *, loss: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """prime-rl's default loss with rejection, for `[trainer.loss] type = "custom"`.

    Args:
        inputs: prime-rl's LossInputs.
        loss: Fields of prime-rl's DefaultLossConfig.
        options: Fields of `RolloutCorrectionConfig`.
    """
    default_loss = _prime_rl_default(tuple((loss or {}).items()), tuple(options.items()))
    return default_loss(inputs)


# prime-rl calls with the same options for every sample; pairs are hashable, dicts are not.
@cache
def _prime_rl_default(
    loss: tuple[tuple[str, Any], ...], options: tuple[tuple[str, Any], ...]
) -> Loss:
    try:
        from prime_rl.configs.trainer import DefaultLossConfig
        from prime_rl.trainer.rl.loss import default_loss_fn
    except ImportError as error:
        raise ImportError(
            f"prime_rl_loss needs prime-rl ({error}); install"
            " https://github.com/PrimeIntellect-ai/prime-rl."
        ) from error
    settings = DefaultLossConfig(**dict(loss))
    correction = RolloutCorrectionConfig(**dict(options))
    return prime_rl(lambda inputs: default_loss_fn(inputs, settings), correction)


def ms_swift(correction: RolloutCorrectionConfig, *, on_alarm: OnAlarm = "warn") -> Loss:
    """A method to replace `_get_rollout_is_correction` of ms-swift's GRPOTrainer.

    An external plugin of ms-swift replaces it. ms-swift calls the method if
    `rollout_importance_sampling_mode` has any value. It also weights the KL term.

    The metrics of a step and its health alarms are in the log of the next step.

    Args:
        correction: The options.
        on_alarm: "warn" prints health alarms, "stop" also raises `HealthAlarm` if training would
            use wrong numbers.
    """
    _refuse_advantages(correction)
    monitor = StepMonitor(correction, MS_SWIFT, on_alarm)

    def method(
        trainer: Any, old: Tensor, rollout: Tensor, mask: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        if (
            trainer.rollout_importance_sampling_mode is None
            or trainer.disable_rollout_importance_sampling
        ):
            return None, None
        batch = _with_weights(correction, old, rollout, mask)
        # Statistics of an evaluation would mix with those of the step.
        if trainer.model.training:
            ranks = Ranks()
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                ranks = Ranks.from_groups(data=torch.distributed.group.WORLD)
            metrics = monitor.add(
                trainer.state.global_step,
                batch.correction.statistics,
                token_sums(old, rollout, mask),
                ranks,
                prints=trainer.accelerator.is_main_process,
            )
            for name, value in metrics.items():
                full_name = PREFIX + name
                if name.startswith("health/"):
                    full_name = name
                trainer._metrics["train"][full_name].append(value)
        log_ratio = torch.where(batch.correction.mask, old - rollout, 0.0)
        return log_ratio, batch.advantages

    return method


def open_instruct(result: Callable[..., Any], correction: RolloutCorrectionConfig) -> Loss:
    """A function to replace `open_instruct.grpo_utils.compute_rho_correction`.

    Args:
        result: open-instruct's class RhoCorrection.
        correction: The options.
    """
    _refuse_advantages(correction)

    def rho_correction(
        old_logprob: Tensor,
        vllm_logprobs: Tensor,
        response_mask: Tensor,
        advantages: Tensor,
        _: Any,
    ) -> Any:
        # open-instruct writes 1.0 for a missing log-prob.
        rollout = torch.where(vllm_logprobs > 0, torch.nan, vllm_logprobs)
        batch = _with_weights(correction, old_logprob, rollout, response_mask)
        weights = batch.advantages
        accepted = batch.correction.mask
        rejected = (response_mask > 0) & ~accepted
        metrics = {
            "val/rho_drop_frac": rejected.float(),
            "val/rho_weight": weights.float(),
        }
        counted = accepted & is_log_prob(old_logprob) & is_log_prob(rollout)
        ratios = safe_exp((old_logprob - rollout)[counted]).float()
        return result(weights=weights, metrics=metrics, histogram_metrics={"val/rho_hist": ratios})

    return rho_correction


def _with_weights(
    correction: RolloutCorrectionConfig, old: Tensor, rollout: Tensor, mask: Tensor
) -> Corrected:
    """The micro-batch of a loss that the framework weights itself.

    Args:
        correction: The options.
        old: log π_old, [B, T].
        rollout: log π_rollout, [B, T].
        mask: Nonzero at trained tokens, [B, T].

    Returns:
        A micro-batch whose advantages are the weights [B, T], 0 at rejected tokens and 1 without a
        correction.
    """
    # With advantages of 1, the corrected advantages are the weights.
    return corrected(
        correction,
        log_probs=old,
        old=old,
        rollout=rollout,
        advantages=torch.ones_like(old),
        mask=mask,
    )


def _mask_or_ones(mask: Tensor | None, log_probs: Tensor) -> Tensor:
    """The mask; without one, all tokens are trained."""
    if mask is None:
        return torch.ones_like(log_probs)
    return mask


def _refuse_advantages(correction: RolloutCorrectionConfig) -> None:
    """Refuses options that change more than the weights of a loss."""
    if correction.needs_advantages or correction.use_rollout_logprobs:
        raise ValueError(
            "this framework only takes weights; drop the options that need advantages, and"
            " use_rollout_logprobs."
        )


def _refuse_second(name: str, is_on: object) -> None:
    """Refuses a correction of the framework itself."""
    if is_on:
        raise ValueError(f"{name} would correct a second time; switch it off.")
