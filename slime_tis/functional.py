"""The correction as one pure function of tensors, whose control flow does not depend on values.

`correct` here gives the weights and the mask of `slime_tis.correct` for padded tensors [..., T],
without statistics. torch.fx, `torch.compile(fullgraph=True)` and torch.func trace it, because only
the options decide what is computed. Options that need order statistics of the batch are refused.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.layout import check_precision
from slime_tis.correction.reference import correction_steps


class WeightsAndMask(NamedTuple):
    """Weights and mask, [..., T], without gradient."""

    weights: Tensor
    """float32, 0 at invalid tokens."""
    mask: Tensor
    """bool, True at accepted tokens."""


def correct(
    config: RolloutCorrectionConfig,
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    *,
    current_log_probs: Tensor | None = None,
    advantages: Tensor | None = None,
) -> WeightsAndMask:
    """Importance weights and mask; arguments as in `slime_tis.correct`, here tensors [..., T].

    Computes in float32, or in float64 if log-probs are float64. `tis_batch_normalize` divides by
    the mean weight of this call. Meta tensors give meta tensors.

    Raises:
        ValueError: if an option needs the values of the batch, advantages are missing, or a tensor
            is float8.
    """
    options = config.batch_options
    if config.nonfinite_policy == "raise":
        options.append("nonfinite_policy")
    if options:
        raise ValueError(
            f"{', '.join(options)} needs the values of the batch; call slime_tis.correct instead."
        )
    if config.needs_advantages and advantages is None:
        raise ValueError(
            "the divergence mask or the bounds by sign need advantages; pass advantages=."
        )
    train = _working("train_log_probs", train_log_probs)
    rollout = _working("rollout_log_probs", rollout_log_probs)
    if current_log_probs is not None:
        current_log_probs = _working("current_log_probs", current_log_probs)
    if advantages is not None:
        advantages = _working("advantages", advantages)
    steps = correction_steps(config, (train, rollout), loss_mask, current_log_probs, advantages)
    return WeightsAndMask(steps.weights.float(), steps.mask)


def _working(name: str, values: Tensor) -> Tensor:
    """Detached values in float32 or float64."""
    if isinstance(values, Tensor):  # a tracer's proxy has no dtype yet
        check_precision(name, values)
    # A product has the wider dtype of its factors. Unlike `to`, it also has this dtype if a traced
    # program later runs with tensors of another dtype.
    return values.detach() * torch.ones(1, dtype=torch.float32, device=values.device)
