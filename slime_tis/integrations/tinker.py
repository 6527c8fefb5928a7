"""Losses for tinker's `forward_backward_custom` and `create_custom_loss`, with rollout correction.

A datum has tinker's keys `logprobs` (of the sampler), `advantages`, and optionally `mask`. Without
a mask, tokens with a nonzero advantage are trained. The losses are sums over tokens, as in tinker.
π_train is the current policy.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slime_tis import functional
from slime_tis.correction import RolloutCorrectionConfig, correct
from slime_tis.integrations.frameworks import TINKER
from slime_tis.live_health import LiveHealth, OnAlarm, logged
from slime_tis.token_signs import sign_metrics, token_sums

TokenLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log π_θ with gradient, log π_rollout, advantages) → losses [T] before weights and mask."""
INPUTS = ("logprobs", "sampling_logprobs", "advantages", "mask")
"""Parameters of a traced loss, all of rank 1."""


def policy_gradient(log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """−A·log π_θ: with the importance weight, the gradient of tinker's `importance_sampling`."""
    return -advantages * log_probs


def corrected_loss(
    config: RolloutCorrectionConfig,
    token_loss: TokenLoss = policy_gradient,
    *,
    on_alarm: OnAlarm = "warn",
    log_all_metrics: bool = False,
) -> Callable[[Sequence[Any], Sequence[Tensor]], tuple[Tensor, dict[str, float]]]:
    """A loss for `TrainingClient.forward_backward_custom`.

    It has all options and metrics of `slime_tis.correct`; metrics are named custom/NAME:mean. The
    data of one call are the global batch, and one call is one step of the health alarms. Without
    data the loss is 0. A token without a finite log π_θ has loss and gradient 0, or raises if
    `nonfinite_policy` is "raise".

    A datum may have `weight_age`, one number: optimizer steps between the weights that sampled it
    and the current ones.

    Args:
        config: The options of the correction.
        token_loss: Losses per token.
        on_alarm: "warn" prints health alarms, "stop" also raises `HealthAlarm` if training would
            use wrong numbers.
        log_all_metrics: Whether all metrics are returned instead of `DEFAULT_METRICS`.
    """
    health = LiveHealth(config, TINKER, on_alarm=on_alarm)
    # tinker does not tell the loss the number of the step.
    calls = itertools.count()

    def loss(data: Sequence[Any], log_probs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        columns = [_columns(datum) for datum in data]
        rollout = [column.rollout for column in columns]
        advantages = [column.advantages for column in columns]
        masks = [column.mask for column in columns]
        current = [values.detach() for values in log_probs]
        correction = correct(config, current, rollout, masks, advantages=advantages)
        # Without data, the zero makes the sum a scalar on which backward() works.
        losses = [torch.zeros((), requires_grad=True)]
        for i, column in enumerate(columns):
            loss = _weighted_loss(
                token_loss,
                log_probs[i],
                column.rollout,
                column.advantages,
                weights=correction.weights[i],
                accepted=correction.mask[i],
            )
            losses.append(loss)
        metrics = correction.statistics.metrics()
        if columns:
            metrics |= sign_metrics(_signs(columns, current))
        values = {f"train/{name}": value for name, value in metrics.items()}
        reported = logged(metrics, all_metrics=log_all_metrics)
        reported |= health.check(next(calls), values)
        named = {f"custom/{name.lower()}:mean": value for name, value in reported.items()}
        return torch.stack(losses).sum(), named

    return loss


def _signs(columns: Sequence["Columns"], current: Sequence[Tensor]) -> Tensor:
    """The sums of `token_signs` over the data of a call."""
    ages = [torch.full_like(column.mask, column.age, dtype=torch.int64) for column in columns]
    return token_sums(
        pad_sequence(list(current), batch_first=True),
        pad_sequence([column.rollout for column in columns], batch_first=True),
        pad_sequence([column.mask for column in columns], batch_first=True),
        age_BT=pad_sequence(ages, batch_first=True, padding_value=-1),
    )


def traced_loss(
    config: RolloutCorrectionConfig, token_loss: TokenLoss = policy_gradient
) -> tuple[Callable[..., tuple[Tensor, Mapping[str, Tensor]]], dict[str, int]]:
    """The arguments of `ServiceClient.create_custom_loss`: a loss and the ranks of its inputs.

    tinker traces the loss and may run it on its server. The loss sees one datum at a time, which
    must have the keys `sampling_logprobs`, `advantages` and `mask`. Options that need the batch are
    refused: see `slime_tis.functional`.
    """

    def corrected_policy_loss(
        logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        correction = functional.correct(
            config, logprobs, sampling_logprobs, mask, advantages=advantages
        )
        accepted = correction.mask.float()
        total = _weighted_loss(
            token_loss,
            logprobs,
            sampling_logprobs,
            advantages,
            weights=correction.weights,
            accepted=accepted,
        )
        return total, {
            "custom/trained_tokens:sum": mask.float().sum(),
            "custom/accepted_tokens:sum": accepted.sum(),
            "custom/weights:sum": (correction.weights * accepted).sum(),
        }

    return corrected_policy_loss, dict.fromkeys(INPUTS, 1)


class Columns(NamedTuple):
    """Tensors [T] of one datum, and the age of the weights that sampled it."""

    rollout: Tensor
    advantages: Tensor
    mask: Tensor
    age: int
    """Optimizer steps; −1 if unknown."""


def _columns(datum: Any) -> Columns:
    """The tensors of a datum.

    Raises:
        ValueError: A key is missing, or there is more than one age.
    """
    inputs = datum.loss_fn_inputs
    missing = [name for name in ("logprobs", "advantages") if name not in inputs]
    if missing:
        raise ValueError(
            f"a datum lacks loss_fn_inputs {', '.join(missing)}; pass the sampler's log-probs and"
            " advantages."
        )
    advantages = inputs["advantages"].to_torch()
    if "mask" in inputs:
        mask = inputs["mask"].to_torch()
    else:
        mask = advantages != 0
    age = -1
    if "weight_age" in inputs:
        age_values = inputs["weight_age"].to_torch().flatten()
        if len(age_values) != 1:
            raise ValueError(
                f"weight_age in loss_fn_inputs of a datum has {len(age_values)} entries; give one"
                " number per datum, the optimizer steps since the weights that sampled it."
            )
        age = int(age_values[0])
    return Columns(inputs["logprobs"].to_torch(), advantages, mask, age)


def _weighted_loss(
    token_loss: TokenLoss,
    log_probs: Tensor,
    rollout: Tensor,
    advantages: Tensor,
    *,
    weights: Tensor,
    accepted: Tensor,
) -> Tensor:
    """Σ of the weighted losses of the accepted tokens, [] with gradient.

    Other tokens may have any log-probs. The neutral policy accepts tokens with non-finite
    log-probs: without log π_θ a token has no loss and no gradient; without log π_rollout it has
    ratio 1.
    """
    trained = (accepted > 0) & log_probs.isfinite()
    # torch.where before the loss: exp(inf) would make the gradient NaN even at a loss of 0.
    current = torch.where(trained, log_probs, 0.0)
    sampled = torch.where(trained & rollout.isfinite(), rollout, current.detach())
    losses = token_loss(current, sampled, advantages)
    return torch.where(trained, losses * weights, 0.0).sum()
