"""Simulated coverage of the study's intervals, and its false alarms.

Shapes: D draws, n seeds, M methods.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slime_tis.analysis.report.comparison_study import STANDARD
from slime_tis.analysis.report.student_t import t_quantile
from studies.collapse.results import Row
from studies.comparison.columns import accuracy_of, by_case_of, on_policy_of
from studies.comparison.intervals import LEVEL, Accuracy, is_worse, log_ratios, ratio_of

Floats = NDArray[np.float64]

SEEDS = (3, 4, 5)
"""Numbers of seeds of the study's columns."""
DRAWS = 4000
"""Simulated experiments; the standard error of a coverage of 95 % is 0.3 %."""
RESAMPLES = 1000
"""Resamples of the percentile bootstrap."""
SMALL_NOISE = 0.05
"""Standard deviation of an accuracy over seeds, relative to its mean, of methods that keep up."""
LARGE_NOISE = 0.2
"""The same for methods that collapse with some seeds."""
METHODS = 12
"""Methods in a simulated column."""
SPREAD = 0.1
"""Difference of log-accuracy from the best to the worst simulated method."""


def coverage_table(residuals: Floats) -> str:
    """Returns Markdown: coverage of the intervals by number of seeds.

    Args:
        residuals: Residuals of the study's log-ratios with standard deviation 1.
    """
    random = np.random.default_rng(0)
    heads = " | ".join(f"{seeds} seeds" for seeds in SEEDS)
    lines = [f"| simulated | {heads} |", "|---" * (len(SEEDS) + 1) + "|"]
    rows: dict[str, list[float]] = {}
    for seeds in SEEDS:
        for noise in (SMALL_NOISE, LARGE_NOISE):
            method_Dn = 1 + noise * random.normal(size=(DRAWS, seeds))
            base_Dn = 1 + SMALL_NOISE * random.normal(size=(DRAWS, seeds))
            # Accuracies are not negative; 0.2 has this effect once in 30,000 draws.
            ratio_Dn = np.log(np.maximum(method_Dn, 0.01) / base_Dn)
            name = f"t, accuracies with {noise:.0%} of normal noise"
            rows.setdefault(name, []).append(t_coverage(ratio_Dn))
        name = "t, residuals of the study"
        rows.setdefault(name, []).append(t_coverage(random.choice(residuals, (DRAWS, seeds))))
        name = "percentile bootstrap over seeds, normal noise"
        noise_Dn = random.normal(size=(DRAWS, seeds))
        rows.setdefault(name, []).append(bootstrap_coverage(noise_Dn, random))
        columns = simulated_columns(-np.linspace(0, SPREAD, METHODS), seeds, random)
        name = f"t, gap to the best of {METHODS} methods"
        rows.setdefault(name, []).append(columns.coverage)
        name = "mean error of this gap"
        rows.setdefault(name, []).append(columns.excess)
        name = "columns in which the test finds the best method worse"
        rows.setdefault(name, []).append(columns.best_is_worse)
        equal = simulated_columns(np.zeros(METHODS), seeds, random)
        name = f"columns of {METHODS} equal methods in which it finds any method worse"
        rows.setdefault(name, []).append(equal.any_is_worse)
    for name, values in rows.items():
        cells = " | ".join(f"{100 * value:.1f} %" for value in values)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def t_coverage(values_Dn: Floats) -> float:
    """Returns the share of draws whose Student interval contains 0, the true mean."""
    seeds = values_Dn.shape[1]
    error_D = values_Dn.std(axis=1, ddof=1) / math.sqrt(seeds)
    width_D = t_quantile(1 - LEVEL, seeds - 1) * error_D
    return float((np.abs(values_Dn.mean(axis=1)) <= width_D).mean())


def bootstrap_coverage(values_Dn: Floats, random: np.random.Generator) -> float:
    """Returns the share of draws whose percentile bootstrap interval contains 0."""
    seeds = values_Dn.shape[1]
    chosen = random.integers(seeds, size=(RESAMPLES, seeds))
    means = values_Dn[:, chosen].mean(axis=2)
    low_D, high_D = np.quantile(means, (LEVEL / 2, 1 - LEVEL / 2), axis=1)
    return float(((low_D <= 0) & (high_D >= 0)).mean())


@dataclass(frozen=True, kw_only=True)
class SimulatedColumns:
    """Errors of the comparisons with the best method, means over the columns."""

    coverage: float
    """Share of the intervals that contain the gap to the truly best method."""
    excess: float
    """Mean of the gap minus its true value: the largest mean of a sample is too large."""
    best_is_worse: float
    """Share of the columns in which the test finds the truly best method worse."""
    any_is_worse: float
    """Share of the columns in which the test finds any method worse."""


def simulated_columns(true_M: Floats, seeds: int, random: np.random.Generator) -> SimulatedColumns:
    """Simulates columns of methods with these log-accuracies; the first one is the best."""
    is_covered = []
    excess = []
    best_is_worse = []
    any_is_worse = []
    for _ in range(DRAWS // METHODS):
        log_Mn = true_M[:, None] + SMALL_NOISE * random.normal(size=(len(true_M), seeds))
        best = int(log_Mn.mean(axis=1).argmax())
        worse = []
        for method in range(len(true_M)):
            if method == best:
                # The study does not compare a method with itself either.
                worse.append(False)
                continue
            gap = ratio_of(log_Mn[method] - log_Mn[best])
            true_gap = true_M[method] - true_M[0]
            is_covered.append(gap.low <= true_gap <= gap.high)
            excess.append(true_gap - gap.mean)
            worse.append(is_worse(gap, len(true_M) - 1))
        best_is_worse.append(worse[0])
        any_is_worse.append(any(worse))
    return SimulatedColumns(
        coverage=float(np.mean(is_covered)),
        excess=float(np.mean(excess)),
        best_is_worse=float(np.mean(best_is_worse)),
        any_is_worse=float(np.mean(any_is_worse)),
    )


def residuals_of(rows: Iterable[Row]) -> Floats:
    """Returns standardized residuals of the log-ratios of all methods to on-policy training."""
    by_case = by_case_of(rows)
    pairs = []
    for (scenario, _), by_seed in by_case.items():
        on_policy = on_policy_of(scenario)
        if scenario != on_policy:
            reference = accuracy_of(by_case[on_policy, STANDARD])
            pairs.append((accuracy_of(by_seed), reference))
    return standardized_residuals(pairs)


def standardized_residuals(
    pairs: Iterable[tuple[Accuracy, Accuracy]], seeds: int = max(SEEDS)
) -> Floats:
    """Returns residuals of log-ratios, divided by their standard deviation in each pair.

    Pairs with fewer than `seeds` common seeds are left out: n residuals cannot exceed (n − 1)/√n.
    """
    residuals = []
    for accuracy, base in pairs:
        values = log_ratios(accuracy, base)
        if len(values) < seeds:
            continue
        deviation = values.std(ddof=1)
        if deviation > 0:
            residuals.append((values - values.mean()) / deviation)
    return np.concatenate(residuals)
