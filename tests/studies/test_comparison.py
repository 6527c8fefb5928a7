"""The statistics of the comparison study on results that are computed by hand."""

from dataclasses import replace

import pytest

from studies.collapse.cases import Grid
from studies.collapse.results import read_table
from studies.comparison.compare import (
    STUDY,
    columns,
    rank_correlation,
    relative_accuracy,
    sweep,
    table,
    tie_margin,
)


def test_relative_accuracy_and_ties():
    reference = {0: 0.8, 1: 0.6, 2: 0.7}
    half = {seed: value / 2 for seed, value in reference.items()}
    assert relative_accuracy(half, reference) == pytest.approx((0.5, 0.5, 0.5))
    # two methods: sd of their difference / √3, times the normal quantile 1.96
    assert tie_margin([{0: 0.7, 1: 0.7, 2: 0.7}, reference]) == pytest.approx(
        1.96 * 0.1 / 3**0.5, rel=1e-3
    )
    assert tie_margin([{0: 0.9, 1: 0.7, 2: 0.8}, reference]) == pytest.approx(0, abs=1e-9), (
        "0.1 better with every seed"
    )
    mean, low, high = relative_accuracy({0: 0.8, 1: 0.3, 2: 0.7}, reference)
    assert (
        mean == pytest.approx(1.8 / 2.1)
        and low == pytest.approx(0.5)
        and high == pytest.approx(1.0)
    )


def test_a_column_ranks_methods_with_enough_seeds():
    row = next(iter(read_table(STUDY.results).values()))

    def rows(scenario, method, *accuracies):
        change = {
            "scenario": scenario,
            "correction": method,
            "mismatch_k3_kl": 0.02,
            "collapse_step": None,
        }
        return [
            replace(row, **change, seed=seed, late_accuracy=value)
            for seed, value in enumerate(accuracies)
        ]

    results = [
        *rows("none", "standard PPO", 0.8, 0.7, 0.6),
        *rows("stale 16", "standard PPO", 0.4, 0.35, 0.3),
        *rows("stale 16", "bypass PPO", 0.72, 0.63, 0.54),
        *rows("stale 16", "token TIS", 0.9, 0.9),
        *rows("agent: none", "standard PPO", 0.5, 0.5, 0.5),
        *rows("agent: stale 16", "standard PPO", 0.4, 0.4, 0.4),
        *rows("agent: stale 16", "OPSM", 0.5, 0.5, 0.5),
    ]
    column, agent = columns(results, Grid.load(STUDY))
    assert [cell.relative for cell in agent.cells] == pytest.approx([1.0, 0.8]), (
        "relative to the task's own reference"
    )
    assert [(cell.method, cell.tied) for cell in column.cells] == [
        ("bypass PPO", True),
        ("standard PPO", False),
    ]
    assert column.cells[0].relative == pytest.approx(0.9) and column.standard == pytest.approx(0.5)
    assert column.stale and column.sigma == pytest.approx((0.44**0.5,) * 2)
    assert "| bypass PPO | **0.90** [0.90, 0.90] |" in table([column])


def test_rank_correlation():
    """Ranks 0, 1, 2.5, 2.5, 4 and 0, 1, 2, 3, 4: ρ = 9.5 / √(9.5 · 10)."""
    assert (
        rank_correlation([(1, 0.1), (2, 0.2), (7, 0.3), (7, 0.4), (9, 0.9)])
        == f"{0.95**0.5:.2f} (5)"
    )
    assert rank_correlation([(1, 0.1), (1, 0.2), (1, 0.3), (1, 0.4), (1, 0.9)]) == "–", (
        "no variance"
    )


def test_the_sweep_compares_with_the_same_seeds():
    row = next(iter(read_table(STUDY.results).values()))
    values = {("none", "standard PPO"): (0.8, 0.6), ("stale 16", "token TIS, 5"): (0.4,)}
    rows = [
        replace(row, scenario=scenario, correction=method, seed=seed, late_accuracy=value)
        for (scenario, method), accuracies in values.items()
        for seed, value in enumerate(accuracies)
    ]
    assert sweep(rows).splitlines()[-1] == "| token TIS | 5 | 1 | 0.50 |"
