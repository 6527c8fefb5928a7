"""Student's t distribution for whole degrees of freedom, without SciPy.

NumPy has no quantiles, and SciPy is no dependency of the package.
"""

import math

PRECISION = 1e-9
"""Largest error of a quantile."""


def t_probability(t: float, degrees: int) -> float:
    """Returns P(abs(T) ≤ t) of Student's t distribution.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4: a finite sum for
    whole degrees of freedom.
    """
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    is_odd = degrees % 2 == 1
    term = 1.0
    first_power = 0
    if is_odd:
        term = cosine
        first_power = 1
    total = 0.0
    for power in range(first_power, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def t_quantile(probability: float, degrees: int) -> float:
    """Returns the t with P(abs(T) ≤ t) = probability, by bisection."""
    low = 0.0
    high = 1.0
    while t_probability(high, degrees) < probability:
        high *= 2
    while high - low > PRECISION:
        middle = (low + high) / 2
        if t_probability(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return high
