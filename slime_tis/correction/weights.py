"""Importance weights: exp of the log-weight, bounded by the mode.

Sources: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(https://fengyao.notion.site/off-policy-rl) for truncation, "Every Step Evolves" (https://arxiv.org/abs/2510.18855,
IcePop) for the mask.
"""

import torch
from torch import Tensor

from slime_tis.correction.ratio import in_float32, indicator

SMALLEST_BATCH_MEAN = 1e-8
"""Weights whose mean is not above this are not normalised."""


def bounded_weights(raw: Tensor, mode: str, lower: float, upper: float) -> Tensor:
    """The weight after the mode.

    truncate: min(w, upper). clip: clamp(w, lower, upper). mask: w where lower ≤ w ≤ upper, else 0.

    Args:
        raw: w = exp(clamp(L, −20, 20)), any shape.
        mode: "truncate", "clip" or "mask".
        lower: Lower bound on the ratio; not used by truncation.
        upper: Upper bound on the ratio.
    """
    if mode == "truncate":
        return raw.clamp_max(in_float32(upper))
    if mode == "clip":
        return raw.clamp(in_float32(lower), in_float32(upper))
    return indicator(torch.le, raw, upper).mul_(indicator(torch.ge, raw, lower)).mul_(raw)


def inside(masked_weight: Tensor) -> Tensor:
    """1.0 where the mask mode accepts the weight: w > 0 always, so that 0 means out of bounds."""
    return indicator(torch.gt, masked_weight, 0.0)


def mean_weight(total: Tensor, count: Tensor) -> Tensor:
    """total / count, or 1 where that is not a usable divisor."""
    return usable_mean(total / count.clamp_min(1))


def usable_mean(mean: Tensor) -> Tensor:
    """The mean weight, or 1 where weights cannot be divided by it: too small, or no number."""
    return torch.where(mean > SMALLEST_BATCH_MEAN, mean, torch.ones_like(mean))
