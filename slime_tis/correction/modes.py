"""Modes of importance weights: how a weight is bounded, and whether a weight out of bounds is rejected.

Sources: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(https://fengyao.notion.site/off-policy-rl) for truncation, "Every Step Evolves" (https://arxiv.org/abs/2510.18855,
IcePop) for the mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One mode; its functions use tensor methods only, so that the options need no torch."""

    bound: "Callable[[Tensor, float, float], Tensor]"
    """(w, lower, upper) to the bounded weight in new memory, for w of any shape."""
    high_fraction: str
    """Metric: share of the weights above the upper bound."""
    low_fraction: str
    """Metric: share of the weights below the lower bound."""
    has_lower_bound: bool = True
    """Whether the lower bound changes weights."""
    rejects: bool = False
    """Whether a weight out of bounds becomes 0 and rejects its token or sequence."""

    @property
    def raises_weights(self) -> bool:
        """Whether weights below the lower bound become larger, also the 0 of invalid tokens."""
        return self.has_lower_bound and not self.rejects


MODES = {
    "truncate": Mode(
        bound=lambda raw, lower, upper: raw.clamp_max(upper),
        high_fraction="truncate_fraction",
        low_fraction="ratio_fraction_low",
        has_lower_bound=False,
    ),
    "clip": Mode(
        bound=lambda raw, lower, upper: raw.clamp(lower, upper),
        high_fraction="clip_fraction_high",
        low_fraction="clip_fraction_low",
    ),
    "mask": Mode(
        bound=lambda raw, lower, upper: raw.clone().le_(upper).mul_(raw.clone().ge_(lower)).mul_(raw),
        high_fraction="mask_fraction_high",
        low_fraction="mask_fraction_low",
        rejects=True,
    ),
}
"""Modes by their command-line name (--tis-mode)."""
