"""Student's t for a few seeds: intervals, tests of several methods, and their simulated coverage.

Accuracies are compared as log-ratios, seed by seed: a seed sets the order of the prompts and the
sampling, so that runs with the same seed share a part of their noise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slime_tis.analysis.report.student_t import t_probability, t_quantile

Accuracy = Mapping[int, float]
"""Accuracy by seed."""

MIN_ACCURACY = 1 / 512
"""Half of one correct answer of the 256 evaluation prompts. It replaces an accuracy of 0, which has
no logarithm."""
LEVEL = 0.05
"""Significance level; intervals have the confidence 1 − LEVEL."""


@dataclass(frozen=True, kw_only=True)
class LogRatio:
    """The mean log-ratio of two accuracies over seeds, with its Student interval."""

    mean: float
    low: float
    high: float
    p_value: float
    """Two-sided p-value of the hypothesis that the mean is 0."""
    seeds: int
    """Number of common seeds."""


def log_ratios(accuracy: Accuracy, base: Accuracy) -> NDArray[np.float64]:
    """Returns log(accuracy / base) for each common seed, in the order of the seeds."""
    seeds = sorted(accuracy.keys() & base.keys())
    values = np.array([accuracy[seed] for seed in seeds])
    bases = np.array([base[seed] for seed in seeds])
    return np.log(np.maximum(values, MIN_ACCURACY) / np.maximum(bases, MIN_ACCURACY))


def compare(accuracy: Accuracy, base: Accuracy) -> LogRatio:
    """Compares two methods on their common seeds by a paired t-test.

    Raises:
        ValueError: There are less than two common seeds.
    """
    return ratio_of(log_ratios(accuracy, base))


def ratio_of(values: NDArray[np.float64]) -> LogRatio:
    """Returns the mean of n log-ratios ± t(n − 1)·s/√n, s their standard deviation.

    Raises:
        ValueError: There are less than two values.
    """
    count = len(values)
    if count < 2:
        raise ValueError(f"an interval needs two common seeds, but there are {count}.")
    mean = float(values.mean())
    error = float(values.std(ddof=1)) / math.sqrt(count)
    width = t_quantile(1 - LEVEL, count - 1) * error
    if error > 0:
        p_value = 1 - t_probability(abs(mean) / error, count - 1)
    else:
        # Equal values with every seed: no difference at all, or one without any noise.
        p_value = 1.0 if mean == 0 else 0.0
    return LogRatio(mean=mean, low=mean - width, high=mean + width, p_value=p_value, seeds=count)


def is_worse(gap: LogRatio, comparisons: int) -> bool:
    """Whether a method is worse than the best one of its column, whose mean is the largest.

    A one-sided t-test with Bonferroni's level 0.05 / comparisons. The truly best method is then
    found worse in at most 5 % of the columns, although the best mean is chosen after the fact: the
    sum of the probabilities that each other method beats it significantly is at most 5 %
    (J. C. Hsu, "Simultaneous confidence intervals for all distances from the 'best'", 1981).
    """
    return gap.mean < 0 and gap.p_value / 2 <= LEVEL / comparisons
