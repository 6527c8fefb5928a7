"""Rollout correction in the losses of prime-rl, SkyRL, NeMo-RL, OpenRLHF, AReaL, ms-swift and open-instruct.

A wrapped loss gets the advantage of each token times the importance weight, which is 0 for a
rejected token. This is exact for losses that are homogeneous in the advantage: PPO, dual clip,
GSPO, CISPO, SAPO, DPPO. The framework keeps its clipping, its KL term and its divisor. No framework
is imported before its loss is called.

A loss sees one micro-batch: options that need the global batch are refused, and metrics are of this
micro-batch alone.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime_tis.correction import (
    Correction,
    RolloutCorrectionConfig,
    correct,
    is_log_prob,
    safe_exp,
    within_bound,
)

PREFIX = "correction/"
"""Prefix of the metrics."""
SKYRL_SWITCHES = ("tis_ratio_type", "sequence_mask_metric", "is_threshold_low", "is_threshold_high")
"""Ends of the names of SkyRL's options that correct when they are set."""
Loss = Callable[..., Any]


class Tokens(NamedTuple):
    """One micro-batch: [B, T], or packed [N] with the lengths of the sequences."""

    log_probs: Tensor
    """log π_θ."""
    old: Tensor | None
    """log π_old; None where π_old is π_θ."""
    rollout: Tensor | None
    """log π_rollout."""
    advantages: Tensor
    mask: Tensor
    lengths: Sequence[int] | None = None


@dataclass(frozen=True)
class Corrected:
    """What the framework's loss gets instead, and the correction behind it."""

    old: Tensor | None
    rollout: Tensor
    advantages: Tensor
    found: Correction[Tensor]

    def metrics(self) -> dict[str, float]:
        """Metrics of the micro-batch, with the prefix."""
        return {PREFIX + name: value for name, value in self.found.statistics.metrics().items()}


def corrected(config: RolloutCorrectionConfig, tokens: Tokens) -> Corrected:
    """The micro-batch with weighted advantages; unchanged for metrics alone.

    Raises:
        ValueError: the batch has no log-probs of the sampler, or an option needs the global batch.
    """
    others = {
        "tis_batch_normalize": True,
        "rejection_normalizer": "kept",
        "old_logprobs": "interpolate",
    }
    wrong = config.batch_options + [
        f"{name}={x!r}" for name, x in others.items() if getattr(config, name) == x
    ]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} cannot work in the loss of one micro-batch; drop it.")
    if tokens.rollout is None:
        raise ValueError(
            "the batch has no log-probs of the sampler; make the rollout engine return log-probs."
        )
    current = tokens.log_probs.detach()
    old = current if tokens.old is None else tokens.old
    found = correct(
        config,
        current if config.use_rollout_logprobs else old,
        tokens.rollout,
        tokens.mask,
        current_log_probs=current,
        advantages=tokens.advantages,
        lengths=tokens.lengths,
    )
    if not config.touches_loss:
        return Corrected(tokens.old, tokens.rollout, tokens.advantages, found)
    factors = found.weights * found.mask

    def bounded(log_probs: Tensor) -> Tensor:
        """Log-probs whose ratio to the current policy does not overflow; a rejected token beyond has ratio 1.

        The framework's loss takes exp of the difference without a bound, and 0 · inf is NaN.
        """
        near = within_bound(log_probs, current)
        return torch.where((factors > 0) | (near == log_probs), near, current)

    rollout = bounded(tokens.rollout)
    kept_old = None
    if config.use_rollout_logprobs:
        kept_old = rollout
    elif tokens.old is not None:
        kept_old = bounded(tokens.old)
    advantages = torch.where(factors > 0, tokens.advantages * factors, 0.0)
    return Corrected(kept_old, rollout, advantages, found)


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
        options = copy.copy(config)
        options.policy_loss_type = loss_type
        own = vars(options.off_policy_correction).items()
        is_on = any(value is not None for name, value in own if name.endswith(SKYRL_SWITCHES))
        _refuse_second("SkyRL's off_policy_correction", is_on)
        mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
        batch = corrected(
            correction, Tokens(log_probs, old_log_probs, rollout_logprobs, advantages, mask)
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
    """An object with the signature of OpenRLHF's `PolicyLoss.forward`, around a `PolicyLoss` without correction."""
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
        mask = torch.ones_like(log_probs) if action_mask is None else action_mask
        batch = corrected(
            correction, Tokens(log_probs, old_log_probs, rollout_log_probs, advantages, mask)
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
        difference = torch.where(batch.found.mask, batch.rollout - old_log_probs, 0.0)
        return total, clipped, ppo_kl, difference.sum() / count, 1 - batch.found.mask.sum() / count

    return policy_loss


class NemoLoss:
    """A `LossFunction` of NeMo-RL around its `ClippedPGLossFn`, for `grpo_train(loss_fn=…)`."""

    def __init__(self, loss: Any, correction: RolloutCorrectionConfig) -> None:
        _refuse_second(
            "NeMo-RL's use_importance_sampling_correction", loss.use_importance_sampling_correction
        )
        if loss.force_on_policy_ratio and correction.use_rollout_logprobs:
            raise ValueError(
                "force_on_policy_ratio of NeMo-RL has no old policy; drop use_rollout_logprobs."
            )
        self.loss, self.correction = loss, correction
        normalizers = getattr(loss, "metric_normalizations", {})
        if "probs_ratio" in normalizers:  # a share of all tokens, too
            names = (
                PREFIX + name for name in ("rejected_fraction", "nonfinite_fraction", "weight")
            )
            self.metric_normalizations = normalizers | dict.fromkeys(
                names, normalizers["probs_ratio"]
            )

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped loss, for example loss_type and input_type."""
        if name == "loss" or name.startswith("__"):
            raise AttributeError(name)  # not there yet while pickle restores the object
        return getattr(self.loss, name)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Any,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss and its metrics; NeMo-RL adds metrics over micro-batches, so these are shares of all tokens."""
        rollout, advantages = (data[name][:, 1:] for name in ("generation_logprobs", "advantages"))
        old = None if self.loss.force_on_policy_ratio else data["prev_logprobs"][:, 1:]
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        batch = corrected(
            self.correction, Tokens(next_token_logprobs, old, rollout, advantages, mask)
        )
        columns = {
            "prev_logprobs": batch.old,
            "generation_logprobs": batch.rollout,
            "advantages": batch.advantages,
        }
        data = copy.copy(data)
        for name, values in columns.items():
            if values is not None:
                data[name] = torch.cat([data[name][:, :1], values], 1)
        loss, metrics = self.loss(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
        shares = {
            "rejected_fraction": (mask > 0) & ~batch.found.mask,
            "nonfinite_fraction": (mask > 0) & ~is_log_prob(rollout),
            "weight": batch.found.weights * batch.found.mask,
        }
        return loss, metrics | {
            PREFIX + name: (x.sum() / global_valid_toks).item() for name, x in shares.items()
        }


def areal(
    loss: Loss,
    correction: RolloutCorrectionConfig,
    report: Callable[[dict[str, float]], object] = lambda metrics: None,
) -> Loss:
    """AReaL's `grpo_loss_fn` with correction, to replace `areal.trainer.ppo.actor.grpo_loss_fn`.

    Args:
        loss: AReaL's function.
        correction: The options; AReaL's `rejection_sampling` must be off.
        report: Gets the metrics of each micro-batch: `lambda metrics:
            stats_tracker.scalar(**metrics)`.
    """

    def policy_loss(
        logprobs: Tensor, entropy: Tensor, input_data: Mapping[str, Any], **options: Any
    ) -> Tensor:
        _refuse_second("AReaL's rejection_sampling", options.get("rejection_sampling"))
        starts = input_data.get("cu_seqlens") if logprobs.ndim == 1 else None
        tokens = Tokens(
            logprobs,
            input_data.get("prox_logp"),
            input_data["logprobs"],
            input_data["advantages"],
            input_data["loss_mask"],
            None if starts is None else starts.diff().tolist(),
        )
        batch = corrected(correction, tokens)
        report(batch.metrics())
        changed = {
            "prox_logp": batch.old,
            "logprobs": batch.rollout,
            "advantages": batch.advantages,
        }
        total: Tensor = loss(logprobs, entropy, {**input_data, **changed}, **options)
        return total

    return policy_loss


def prime_rl(loss: Loss, correction: RolloutCorrectionConfig) -> Loss:
    """A loss of prime-rl on one sample, around `loss`: LossInputs → LossOutputs.

    π_old is the rollout policy there, so the ratio of the loss is the importance weight and only
    rejection acts.
    """
    bypass = replace(correction, use_rollout_logprobs=True)

    def sample_loss(inputs: Any) -> Any:
        tokens = Tokens(
            inputs.trainer_logprobs,
            None,
            inputs.inference_logprobs,
            inputs.advantages,
            inputs.loss_mask,
            [len(inputs.loss_mask)],
        )
        batch = corrected(bypass, tokens)
        outputs = loss(
            replace(inputs, inference_logprobs=batch.rollout, advantages=batch.advantages)
        )
        metrics = {
            name: inputs.advantages.new_tensor(value) for name, value in batch.metrics().items()
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
    return _prime_rl_default(tuple((loss or {}).items()), tuple(options.items()))(inputs)


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
    return prime_rl(
        lambda inputs: default_loss_fn(inputs, settings), RolloutCorrectionConfig(**dict(options))
    )


def ms_swift(correction: RolloutCorrectionConfig) -> Loss:
    """A method to replace `_get_rollout_is_correction` of ms-swift's GRPOTrainer, from an external plugin.

    ms-swift calls it if `rollout_importance_sampling_mode` has any value. It weights the KL term,
    too.
    """

    def method(
        trainer: Any, old: Tensor, rollout: Tensor, mask: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        if (
            trainer.rollout_importance_sampling_mode is None
            or trainer.disable_rollout_importance_sampling
        ):
            return None, None
        batch = corrected(correction, Tokens(old, old, rollout, torch.ones_like(old), mask))
        return torch.where(batch.found.mask, old - rollout, 0.0), batch.advantages

    return _without_advantages(correction, method)


def open_instruct(result: Callable[..., Any], correction: RolloutCorrectionConfig) -> Loss:
    """A function to replace `open_instruct.grpo_utils.compute_rho_correction`; `result` is its class RhoCorrection."""

    def rho_correction(
        old_logprob: Tensor,
        vllm_logprobs: Tensor,
        response_mask: Tensor,
        advantages: Tensor,
        _: Any,
    ) -> Any:
        rollout = torch.where(
            vllm_logprobs > 0, torch.nan, vllm_logprobs
        )  # 1.0 stands for a missing log-prob there
        batch = corrected(
            correction,
            Tokens(old_logprob, old_logprob, rollout, torch.ones_like(old_logprob), response_mask),
        )
        rejected = (response_mask > 0) & ~batch.found.mask
        metrics = {
            "val/rho_drop_frac": rejected.float(),
            "val/rho_weight": batch.advantages.float(),
        }
        counted = batch.found.mask & is_log_prob(old_logprob) & is_log_prob(rollout)
        ratios = safe_exp((old_logprob - rollout)[counted]).float()
        return result(
            weights=batch.advantages, metrics=metrics, histogram_metrics={"val/rho_hist": ratios}
        )

    return _without_advantages(correction, rho_correction)


def _without_advantages(correction: RolloutCorrectionConfig, function: Loss) -> Loss:
    if correction.needs_advantages or correction.use_rollout_logprobs:
        raise ValueError(
            "this framework takes weights alone; drop the options that need advantages, and the"
            " bypass."
        )
    return function


def _refuse_second(name: str, is_on: object) -> None:
    if is_on:
        raise ValueError(f"{name} would correct a second time; switch it off.")
