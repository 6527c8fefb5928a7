"""Losses with the signatures of other frameworks: PPO with clip range 0.2, without correction."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slime_tis.policy.losses import ppo_clip


@dataclass
class LossInputs:
    """prime-rl's."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    """prime-rl's."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def prime_rl(inputs: LossInputs) -> LossOutputs:
    """−A·r + 1e-3·(log r)², summed over the tokens of a sample."""
    log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
    gain = inputs.loss_mask * inputs.advantages * log_ratio.exp()
    pull = inputs.loss_mask * log_ratio**2
    return LossOutputs((-gain + 1e-3 * pull).sum())


def skyrl(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor,
    rollout_logprobs: Tensor,
) -> tuple[Tensor, dict[str, float]]:
    assert config.policy_loss_type == "regular"
    loss, _ = ppo_clip(log_probs, old, advantages)
    return (loss * loss_mask).sum(), {"clip_ratio": 0.0}


class OpenRLHF:
    is_correction_level = "off"

    def __call__(
        self,
        log_probs: Tensor,
        old: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        rollout_log_probs: Tensor,
    ) -> tuple[Tensor | None, ...]:
        loss, clipped = ppo_clip(log_probs, old, advantages)
        total = (loss * action_mask).sum() / action_mask.sum()
        return total, clipped.mean(), clipped.mean(), None, None


class Nemo:
    use_importance_sampling_correction = False
    force_on_policy_ratio = False
    loss_type = "token_level"

    def __init__(self) -> None:
        self.metric_normalizations = {"loss": "sequences", "probs_ratio": "tokens"}

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: dict[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss, _ = ppo_clip(
            next_token_logprobs, data["prev_logprobs"][:, 1:], data["advantages"][:, 1:]
        )
        return (loss * mask).sum() / (global_valid_toks + 1e-8), {}


def areal(
    logprobs: Tensor, entropy: Tensor, input_data: dict[str, Tensor], **options: Any
) -> Tensor:
    loss, _ = ppo_clip(logprobs, input_data["prox_logp"], input_data["advantages"])
    mask = input_data["loss_mask"]
    return torch.where(mask.bool(), loss, 0).sum() / (mask.count_nonzero() or 1)


@dataclass
class RhoCorrection:
    """open-instruct's."""

    weights: Tensor
    metrics: dict[str, Tensor]
    histogram_metrics: dict[str, Tensor] = field(default_factory=dict)


def skyrl_options() -> SimpleNamespace:
    correction = SimpleNamespace(tis_ratio_type=None, sequence_mask_metric=None)
    return SimpleNamespace(policy_loss_type="slime_tis", off_policy_correction=correction)
