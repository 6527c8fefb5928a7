"""The statistics of the comparison study on results that are computed by hand."""

from dataclasses import replace

import pytest

from studies.collapse.cases import Grid
from studies.collapse.results import Row, read_table
from studies.comparison.compare import (
    STUDY,
    Column,
    columns,
    rank_correlation,
    relative_accuracy,
    sweep,
    table,
    tie_margin,
)

REFERENCE = {0: 0.8, 1: 0.6, 2: 0.7}
"""Accuracies of the on-policy run by seed."""


def test_half_of_every_seed_is_half():
    half = {seed: value / 2 for seed, value in REFERENCE.items()}
    assert relative_accuracy(half, REFERENCE) == pytest.approx((0.5, 0.5, 0.5))


def test_relative_accuracy_has_the_range_of_the_seeds():
    relative = relative_accuracy({0: 0.8, 1: 0.3, 2: 0.7}, REFERENCE)
    assert relative == pytest.approx((1.8 / 2.1, 0.5, 1.0))


def test_a_tie_follows_the_differences_by_seed():
    # two methods: sd of their difference / √3, times the normal quantile 1.96
    margin = tie_margin([{0: 0.7, 1: 0.7, 2: 0.7}, REFERENCE])
    assert margin == pytest.approx(1.96 * 0.1 / 3**0.5, rel=1e-3)


def test_a_constant_difference_is_no_tie():
    # 0.1 better with every seed
    margin = tie_margin([{0: 0.9, 1: 0.7, 2: 0.8}, REFERENCE])
    assert margin == pytest.approx(0, abs=1e-9)


def results_of(scenario: str, method: str, *accuracies: float) -> list[Row]:
    """A row per seed, with the other fields of a stored row."""
    stored = next(iter(read_table(STUDY.results).values()))
    rows = []
    for seed, accuracy in enumerate(accuracies):
        row = replace(
            stored,
            scenario=scenario,
            correction=method,
            seed=seed,
            late_accuracy=accuracy,
            mismatch_k3_kl=0.02,
            collapse_step=None,
        )
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def two_columns() -> list[Column]:
    """The columns "stale 16" and "agent: stale 16"."""
    results = [
        *results_of("none", "standard PPO", 0.8, 0.7, 0.6),
        *results_of("stale 16", "standard PPO", 0.4, 0.35, 0.3),
        *results_of("stale 16", "bypass PPO", 0.72, 0.63, 0.54),
        *results_of("stale 16", "token TIS", 0.9, 0.9),  # two seeds are too few
        *results_of("agent: none", "standard PPO", 0.5, 0.5, 0.5),
        *results_of("agent: stale 16", "standard PPO", 0.4, 0.4, 0.4),
        *results_of("agent: stale 16", "OPSM", 0.5, 0.5, 0.5),
    ]
    return columns(results, Grid.load(STUDY))


def test_accuracy_is_relative_to_the_same_task(two_columns):
    _, agent = two_columns
    assert [cell.relative for cell in agent.cells] == pytest.approx([1.0, 0.8])


def test_a_column_ranks_methods_with_enough_seeds(two_columns):
    column, _ = two_columns
    ranking = [(cell.method, cell.tied) for cell in column.cells]
    assert ranking == [("bypass PPO", True), ("standard PPO", False)]


def test_a_column_has_the_accuracy_of_standard_ppo(two_columns):
    column, _ = two_columns
    assert column.cells[0].relative == pytest.approx(0.9)
    assert column.standard == pytest.approx(0.5)


def test_a_column_has_its_mismatch(two_columns):
    column, _ = two_columns
    assert column.stale
    assert column.sigma == pytest.approx((0.44**0.5, 0.44**0.5))


def test_the_table_shows_the_best_in_bold(two_columns):
    column, _ = two_columns
    assert "| bypass PPO | **0.90** [0.90, 0.90] |" in table([column])


def test_rank_correlation():
    """Ranks 0, 1, 2.5, 2.5, 4 and 0, 1, 2, 3, 4: ρ = 9.5 / √(9.5 · 10)."""
    pairs = [(1, 0.1), (2, 0.2), (7, 0.3), (7, 0.4), (9, 0.9)]
    assert rank_correlation(pairs) == f"{0.95**0.5:.2f} (5)"


def test_equal_values_have_no_rank_correlation():
    pairs = [(1, 0.1), (1, 0.2), (1, 0.3), (1, 0.4), (1, 0.9)]
    assert rank_correlation(pairs) == "–"


def test_the_sweep_compares_with_the_same_seeds():
    rows = [
        *results_of("none", "standard PPO", 0.8, 0.6),
        *results_of("stale 16", "token TIS, 5", 0.4),
    ]
    assert sweep(rows).splitlines()[-1] == "| token TIS | 5 | 1 | 0.50 |"
