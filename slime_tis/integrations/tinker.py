"""Losses for tinker's `forward_backward_custom` and `create_custom_loss`, with rollout correction.

A datum has tinker's keys `logprobs` (of the sampler), `advantages`, and optionally `mask`; without
a mask the tokens with an advantage other than 0 are trained. The losses are sums over tokens, as
tinker's own are. π_train is the present policy.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime_tis import functional
from slime_tis.correction import RolloutCorrectionConfig, correct

TokenLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log π_θ with gradient, log-probs of the sampler, advantages) → the losses [T] before weights and
mask."""
INPUTS = ("logprobs", "sampling_logprobs", "advantages", "mask")
"""Parameters of a traced loss, all of rank 1."""


def policy_gradient(log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """−A·log π_θ, whose gradient times the importance weight is that of tinker's `importance_sampling`."""
    return -advantages * log_probs


def corrected_loss(
    config: RolloutCorrectionConfig, token_loss: TokenLoss = policy_gradient
) -> Callable[[Sequence[Any], Sequence[Tensor]], tuple[Tensor, dict[str, float]]]:
    """A loss for `TrainingClient.forward_backward_custom`, with all options and all metrics of `slime_tis.correct`.

    Metrics are named custom/NAME:mean. The data of one call are the global batch; without data the
    loss is 0. A token whose log π_θ is not finite has loss and gradient 0 under every
    `nonfinite_policy` but "raise".
    """

    def loss(data: Sequence[Any], log_probs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        columns = [_columns(datum) for datum in data]
        rollout = [column[0] for column in columns]
        advantages = [column[1] for column in columns]
        masks = [column[2] for column in columns]
        found = correct(
            config, [x.detach() for x in log_probs], rollout, masks, advantages=advantages
        )
        terms = zip(log_probs, rollout, advantages, found.weights, found.mask, strict=True)
        losses = [_weighted(token_loss, *term) for term in terms]
        total = torch.stack([torch.zeros((), requires_grad=True), *losses]).sum()
        metrics = found.statistics.metrics()
        return total, {f"custom/{name.lower()}:mean": value for name, value in metrics.items()}

    return loss


def traced_loss(
    config: RolloutCorrectionConfig, token_loss: TokenLoss = policy_gradient
) -> tuple[Callable[..., tuple[Tensor, Mapping[str, Tensor]]], dict[str, int]]:
    """The arguments of `ServiceClient.create_custom_loss`: a loss that tinker traces and may run on its server.

    It sees one datum at a time, which must have the keys `sampling_logprobs`, `advantages` and
    `mask`. Options on the batch are refused: see `slime_tis.functional`.
    """

    def corrected_policy_loss(
        logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        found = functional.correct(config, logprobs, sampling_logprobs, mask, advantages=advantages)
        accepted = found.mask.float()
        total = _weighted(
            token_loss, logprobs, sampling_logprobs, advantages, found.weights, accepted
        )
        return total, {
            "custom/trained_tokens:sum": mask.float().sum(),
            "custom/accepted_tokens:sum": accepted.sum(),
            "custom/weights:sum": (found.weights * accepted).sum(),
        }

    return corrected_policy_loss, dict.fromkeys(INPUTS, 1)


def _columns(datum: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = datum.loss_fn_inputs
    missing = [name for name in ("logprobs", "advantages") if name not in inputs]
    if missing:
        raise ValueError(
            f"a datum lacks loss_fn_inputs {', '.join(missing)}; pass the sampler's log-probs and"
            " advantages."
        )
    rollout, advantages = inputs["logprobs"].to_torch(), inputs["advantages"].to_torch()
    return rollout, advantages, inputs["mask"].to_torch() if "mask" in inputs else advantages != 0


def _weighted(
    token_loss: TokenLoss, log_probs: Tensor, rollout: Tensor, advantages: Tensor, *factors: Tensor
) -> Tensor:
    """Σ of the weighted losses of the accepted tokens; the others are left out, whatever their log-probs are.

    The neutral policy accepts tokens whose log-probs are not finite. One of π_θ has no loss and no
    gradient; one of the sampler is taken as equal to π_θ, whose ratio is 1.
    """
    weights, accepted = factors
    trained = (accepted > 0) & log_probs.isfinite()
    current = torch.where(trained, log_probs, 0.0)
    sampled = torch.where(trained & rollout.isfinite(), rollout, current.detach())
    losses = token_loss(current, sampled, advantages)
    return torch.where(trained, losses * weights, 0.0).sum()
