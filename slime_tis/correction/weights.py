"""Importance weights: exp of the log-weight, bounded by the mode.

Sources: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(https://fengyao.notion.site/off-policy-rl) for truncation, "Every Step Evolves" (https://arxiv.org/abs/2510.18855,
IcePop) for the mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.correction.ratio import indicator


@dataclass(frozen=True)
class Weights:
    """Weights before and after the mode, and what the mode touched, all of one shape."""

    raw: Tensor
    """exp(clamp(L, −20, 20))."""
    bounded: Tensor
    """The weight after the mode; 0 outside the bounds of the mask mode."""
    high: Tensor
    """1.0 where raw > upper."""
    low: Tensor | None
    """1.0 where raw < lower; None for truncation, which has no lower bound."""


def bounded_weights(raw: Tensor, mode: str, lower: float, upper: float) -> Weights:
    """The weight after the mode.

    truncate: min(w, upper). clip: clamp(w, lower, upper). mask: w where lower ≤ w ≤ upper, else 0.

    Args:
        raw: w = exp(clamp(L, −20, 20)), any shape.
        mode: "truncate", "clip" or "mask".
        lower: Lower bound on the ratio; not used by truncation.
        upper: Upper bound on the ratio.
    """
    high = indicator(torch.gt, raw, upper)
    if mode == "truncate":
        return Weights(raw, raw.clamp_max(upper), high, None)
    low = indicator(torch.lt, raw, lower)
    bounded = raw.clamp(lower, upper) if mode == "clip" else raw * inside(high, low)
    return Weights(raw, bounded, high, low)


def inside(high: Tensor, low: Tensor | None) -> Tensor:
    """1.0 where a weight is neither above nor below its bounds."""
    return 1 - high if low is None else (1 - high).sub_(low)
