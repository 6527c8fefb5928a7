"""Rounding noise per precision, measured on trained models.

The rules, the proof, the check before the first step and the weight check use this one table. The
noise is Σ abs(Δ) / Σ (1 − p), with p the larger probability of the token: noise of a logit moves
the log-prob of a token in proportion to 1 − p.

The measurements are in `studies/precision_noise`: sort digits with 2 to 8 layers of 64 to 256
features, and SmolLM2-135M with 30 layers of 576. Between these models the noise of 16-bit numbers
differs by a factor of four. It follows the size of the logits more than depth or width.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Noise of one precision, in either engine or in both."""

    smallest: float
    """Smallest noise of the measured models."""
    largest: float
    """Largest noise of the measured models."""

    def likelihood(self, noise: float) -> float:
        """Returns the density of a noise, up to a factor.

        Log-normal; the measured range is that of two standard deviations on either side, which are
        at least MIN_SPREAD.
        """
        center = 0.5 * math.log(self.smallest * self.largest)
        spread = max(0.25 * math.log(self.largest / self.smallest), MIN_SPREAD)
        distance = (math.log(max(noise, 1e-12)) - center) / spread
        return math.exp(-0.5 * distance * distance) / spread

    def includes(self, noise: float) -> bool:
        """Whether the precision can make this noise: up to MARGIN times the largest measured."""
        return noise <= min(MARGIN * self.largest, LARGEST_USEFUL)


MIN_SPREAD = 0.35
"""Smallest standard deviation of the logarithm of the noise over models."""
MARGIN = 2.5
"""Other models may have this many times the largest measured noise: logits of 80 layers are
larger than those of 30."""
NOISE: dict[str, Noise] = {
    "fp16": Noise(smallest=0.00057, largest=0.0088),
    "bf16": Noise(smallest=0.0025, largest=0.068),
    "int8": Noise(smallest=0.007, largest=0.094),
    "fp8": Noise(smallest=0.029, largest=0.32),
    "int4": Noise(smallest=0.12, largest=1.6),
}
"""Noise by precision, of weights, arithmetic or the cache; `studies/precision_noise` prints it."""
LARGEST_USEFUL = 2.0
"""Noise above which an engine gives another distribution, whatever its precision."""
MIN_PROBABILITY = 0.15
"""Smallest probability of a precision that is named as possible."""


def fits(precision: str, noise: float) -> bool:
    """Whether a precision, by its name in a dump, makes noise of a size."""
    return precision in NOISE and NOISE[precision].includes(noise)


def possible_precisions(noise: float) -> dict[str, float]:
    """Returns the precisions that make noise of a size, the most probable first.

    Args:
        noise: Σ abs(Δ) / Σ (1 − p).

    Returns:
        Probability by precision, if all precisions are equally frequent. Empty if no precision
        makes so much noise.
    """
    possible = {
        name: each.likelihood(noise) for name, each in NOISE.items() if each.includes(noise)
    }
    total = sum(possible.values())
    if total == 0:
        # Noise below that of every precision: the finest one is the nearest.
        return dict.fromkeys(list(possible)[:1], 1.0)
    named = {}
    for name, likelihood in sorted(possible.items(), key=lambda item: -item[1]):
        if likelihood >= MIN_PROBABILITY * total:
            named[name] = likelihood / total
    return named
