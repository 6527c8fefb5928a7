"""The statistics of the comparison study on results that are computed by hand."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from slime_tis.analysis.report.comparison_study import MARGIN, Cell, Conditions
from studies.collapse.cases import Grid
from studies.collapse.report import begin
from studies.collapse.results import Row, read_table
from studies.comparison.columns import STUDY, Column, columns, conditions_of, sorting_columns
from studies.comparison.compare import EVIDENCE, PAGES, SWEEP, tables
from studies.comparison.coverage import (
    bootstrap_coverage,
    simulated_columns,
    standardized_residuals,
    t_coverage,
)
from studies.comparison.intervals import MIN_ACCURACY, LogRatio, compare, is_worse, ratio_of
from studies.comparison.marked_numbers import MARKED, filled, values_of
from studies.comparison.page_tables import (
    comparisons,
    gap_text,
    growth,
    rank_correlation,
    records,
    results,
    sweep,
)
from studies.comparison.rule_tests import RULE_DATE, answers, later_seeds

REFERENCE = {0: 0.8, 1: 0.6, 2: 0.7}
"""Accuracies of the on-policy run by seed."""


def test_half_of_every_seed_is_half() -> None:
    half = {seed: value / 2 for seed, value in REFERENCE.items()}
    ratio = compare(half, REFERENCE)
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((math.log(0.5),) * 3)
    assert ratio.p_value == 0.0


def test_an_interval_is_that_of_student() -> None:
    """Log-ratios 0, 0.1, 0.2: mean 0.1, s 0.1, t(2) = 4.303; p = 1 − P(abs(T) ≤ √3)."""
    ratio = ratio_of(np.array([0.0, 0.1, 0.2]))
    width = 4.302653 * 0.1 / math.sqrt(3)
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((0.1, 0.1 - width, 0.1 + width))
    assert ratio.p_value == pytest.approx(0.225403, abs=1e-6)


def test_only_common_seeds_are_compared() -> None:
    ratio = compare({0: 0.4, 1: 0.3, 7: 0.9}, REFERENCE)
    assert ratio.seeds == 2
    assert ratio.mean == pytest.approx(math.log(0.5))


def test_equal_runs_do_not_differ() -> None:
    ratio = compare(REFERENCE, REFERENCE)
    assert (ratio.mean, ratio.low, ratio.high, ratio.p_value) == (0, 0, 0, 1)


def test_an_accuracy_of_0_is_half_an_answer() -> None:
    ratio = compare({0: 0.0, 1: 0.0}, {0: 1.0, 1: 1.0})
    assert ratio.mean == pytest.approx(math.log(MIN_ACCURACY))


def test_one_seed_has_no_interval() -> None:
    with pytest.raises(ValueError, match="needs two common seeds, but there are 1"):
        compare({0: 0.5}, REFERENCE)


@pytest.mark.parametrize(
    ("mean", "p_value", "comparisons", "expected"),
    [
        pytest.param(-0.2, 0.02, 5, True, id="one-sided 0.01 = 0.05 / 5"),
        pytest.param(-0.2, 0.021, 5, False, id="just above"),
        pytest.param(0.2, 0.001, 5, False, id="better on the common seeds"),
    ],
)
def test_bonferroni_divides_the_level(
    mean: float, p_value: float, comparisons: int, expected: bool
) -> None:
    gap = LogRatio(mean=mean, low=mean, high=mean, p_value=p_value, seeds=3)
    assert is_worse(gap, comparisons) is expected


@pytest.mark.parametrize("seeds", [3, 4, 5], ids=str)
def test_intervals_cover_95_percent(seeds: int) -> None:
    """The standard error of 20,000 draws is 0.15 %."""
    draws = np.random.default_rng(seeds).normal(size=(20_000, seeds))
    assert t_coverage(draws) == pytest.approx(0.95, abs=0.006)


@pytest.mark.parametrize("seeds", [3, 5], ids=str)
def test_intervals_cover_residuals_of_the_study(seeds: int) -> None:
    results = read_table(STUDY.results).values()
    pairs = []
    reference = {row.seed: row.late_accuracy for row in results if row.scenario == "none"}
    for method in Grid.load(STUDY).corrections:
        accuracy = {
            row.seed: row.late_accuracy
            for row in results
            if (row.scenario, row.correction) == ("stale 16", method)
        }
        pairs.append((accuracy, reference))
    residuals = standardized_residuals(pairs)
    assert residuals.std(ddof=1) == pytest.approx(math.sqrt(4 / 5), rel=0.02)
    draws = np.random.default_rng(0).choice(residuals, (20_000, seeds))
    assert 0.91 < t_coverage(draws) < 0.96


def test_the_bootstrap_of_three_seeds_does_not_cover() -> None:
    """The percentile interval of three values is about [minimum, maximum]: 1 − 2/2³ = 75 %."""
    random = np.random.default_rng(0)
    draws = random.normal(size=(2_000, 3))
    assert 0.67 < bootstrap_coverage(draws, random) < 0.78


def test_the_best_method_is_rarely_found_worse() -> None:
    true_log_accuracy = -np.linspace(0, 0.02, 6)
    simulated = simulated_columns(true_log_accuracy, 5, np.random.default_rng(0))
    assert simulated.best_is_worse < 0.05
    assert simulated.coverage == pytest.approx(0.95, abs=0.03)


def test_the_largest_mean_of_equal_methods_is_too_large() -> None:
    """Mean maximum of six standard normals: 1.267; here times 0.05 / √4, over five others 6/5."""
    simulated = simulated_columns(np.zeros(6), 4, np.random.default_rng(0))
    assert simulated.excess == pytest.approx(1.267 * 0.025 * 6 / 5, rel=0.1)


@cache
def stored_row() -> Row:
    """The first row of results.csv."""
    return next(iter(read_table(STUDY.results).values()))


def results_of(scenario: str, method: str, *accuracies: float, date: str = "") -> list[Row]:
    """A row per seed, with the other fields of a stored row."""
    stored = stored_row()
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
            date=date or stored.date,
        )
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def grid() -> Grid:
    """The grid of the study."""
    return Grid.load(STUDY)


@pytest.fixture(scope="module")
def two_columns(grid: Grid) -> list[Column]:
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
    return columns(results, grid)


def test_accuracy_is_relative_to_the_same_task(two_columns: Sequence[Column]) -> None:
    _, agent = two_columns
    assert [cell.relative for cell in agent.cells] == pytest.approx([1.0, 0.8])


def test_a_column_ranks_methods_with_enough_seeds(two_columns: Sequence[Column]) -> None:
    column, _ = two_columns
    assert [cell.method for cell in column.cells] == ["bypass PPO", "standard PPO"]


def test_a_gap_is_relative_to_the_best_method(two_columns: Sequence[Column]) -> None:
    """0.4 / 0.72 with every seed."""
    column, _ = two_columns
    best, standard = column.cells
    assert (best.gap, best.gap_low, best.gap_high) == (0, 0, 0)
    assert standard.gap == pytest.approx(4 / 9)
    assert standard.is_worse
    assert not best.is_worse


def test_a_column_has_its_mismatch(two_columns: Sequence[Column]) -> None:
    column, _ = two_columns
    assert column.sigma == pytest.approx((0.44**0.5, 0.44**0.5))
    assert column.conditions.age == 15
    assert column.covers


def test_columns_of_other_tasks_give_no_advice(two_columns: Sequence[Column]) -> None:
    _, agent = two_columns
    assert not agent.covers


def test_the_best_method_may_have_other_seeds(grid: Grid) -> None:
    """OPSM is best over five seeds; bypass PPO is better on its own three."""
    results = [
        *results_of("none", "standard PPO", 0.5, 0.5, 0.5, 0.5, 0.5),
        *results_of("stale 16", "OPSM", 0.4, 0.4, 0.4, 0.9, 0.9),
        *results_of("stale 16", "bypass PPO", 0.42, 0.42, 0.42),
    ]
    (column,) = columns(results, grid)
    other = column.cell("bypass PPO")
    assert other is not None
    assert other.gap == pytest.approx(1 - 0.42 / 0.4)
    assert not other.is_worse


@pytest.mark.parametrize(
    ("scenario", "age", "precision", "steps", "stale_servers"),
    [
        ("stale 64", 63, "fp32", 1, 0.0),
        ("fp8", 0, "fp8", 1, 0.0),
        ("int4 and stale 16", 15, "int4", 1, 0.0),
        ("eight steps", 7, "fp32", 8, 0.0),
        ("four steps and stale 16", 15, "fp32", 4, 0.0),
        ("one of four servers is stale", 0, "fp32", 1, 0.25),
    ],
)
def test_conditions_are_those_of_the_flags(
    grid: Grid, scenario: str, age: int, precision: str, steps: int, stale_servers: float
) -> None:
    expected = Conditions(age=age, precision=precision, steps=steps, stale_servers=stale_servers)
    assert conditions_of(scenario, grid) == expected


def test_the_table_has_accuracy_with_gap(two_columns: Sequence[Column]) -> None:
    column, _ = two_columns
    lines = results([column]).splitlines()
    assert "| bypass PPO | **0.90** [0.90, 0.90]<br>best |" in lines
    assert "| standard PPO | 0.50 [0.50, 0.50]<br>44 [44, 44]* |" in lines


def test_a_gap_below_0_has_a_minus(two_columns: Sequence[Column]) -> None:
    column, _ = two_columns
    better = replace(column.cells[1], gap=0.004, gap_low=-0.1, gap_high=0.1, is_worse=False)
    assert gap_text(better) == "0 [−10, 10]"


def test_comparisons_are_counted(two_columns: Sequence[Column]) -> None:
    last = comparisons(two_columns).splitlines()[-1]
    assert last == "| all | | | | 2 | 2 | 0 |"


def test_records_need_five_columns(two_columns: Sequence[Column]) -> None:
    column, _ = two_columns
    several = [replace(column, name=str(i)) for i in range(5)]
    assert "| bypass PPO | 5 | 0 | 0 | 0 | 0 |" in records(several).splitlines()
    assert len(records(several[:4]).splitlines()) == 2


def test_growth_compares_late_quarters() -> None:
    (row,) = results_of("none", "standard PPO", 0.5)
    curve = ((80, 0.9), (88, 0.2), (120, 0.4), (128, 0.5), (160, 0.7))
    line = growth([replace(row, accuracy=curve, steps=160)]).splitlines()[-1]
    assert line == "| none | 1 | 81 to 120: 0.30 | 121 to 160: 0.60 |"


def test_an_answer_does_not_see_its_column(two_columns: Sequence[Column]) -> None:
    """Without "stale 16", the nearest column is "stale 8", where OPSM is the only method."""
    stale_16, agent = two_columns
    conditions = replace(stale_16.conditions, age=7)
    opsm = replace(agent.cells[0], gap=0.0)
    stale_8 = replace(stale_16, name="stale 8", conditions=conditions, cells=(opsm,))
    lines = answers([stale_16, stale_8], [agent]).splitlines()
    assert lines[2] == "| stale 16 | stale 8 | OPSM | not run | – |"
    assert lines[3] == "| stale 8 | stale 16 | bypass PPO | not run | – |"


def test_later_seeds_test_the_answer_of_earlier_ones(grid: Grid) -> None:
    reference = results_of("none", "standard PPO", 0.5, 0.5, 0.5, 0.5, 0.5)
    early = [*reference]
    early += results_of("stale 16", "OPSM", 0.5, 0.5, 0.5)
    early += results_of("stale 16", "bypass PPO", 0.3, 0.3, 0.3)
    late = []
    for method, accuracy in (("OPSM", 0.4), ("bypass PPO", 0.5)):
        late += results_of("stale 16", method, *([accuracy] * 5), date=RULE_DATE)[3:]
    line = later_seeds(columns(early, grid), early, late, grid).splitlines()[-1]
    assert line == "| stale 16 | OPSM | 2 | 2 | 0.80 | 2 | 20 |"


def test_rank_correlation() -> None:
    """Ranks 0, 1, 2.5, 2.5, 4 and 0, 1, 2, 3, 4: ρ = 9.5 / √(9.5 · 10)."""
    pairs = [(1, 0.1), (2, 0.2), (7, 0.3), (7, 0.4), (9, 0.9)]
    assert rank_correlation(pairs) == f"{0.95**0.5:.2f} (5)"


def test_equal_values_have_no_rank_correlation() -> None:
    pairs = [(1, 0.1), (1, 0.2), (1, 0.3), (1, 0.4), (1, 0.9)]
    assert rank_correlation(pairs) == "–"


def test_the_sweep_compares_with_the_same_seeds() -> None:
    rows = [
        *results_of("none", "standard PPO", 0.8, 0.6),
        *results_of("stale 16", "token TIS, 5", 0.4),
    ]
    assert sweep(rows).splitlines()[-1] == "| token TIS | 5 | 1 | 0.50 |"


@pytest.fixture(scope="module")
def stored_rows() -> list[Row]:
    """The rows of results.csv."""
    return [*read_table(STUDY.results).values()]


@pytest.fixture(scope="module")
def stored_columns(stored_rows: list[Row], grid: Grid) -> list[Column]:
    """The columns of results.csv."""
    return columns(stored_rows, grid)


def test_the_page_has_the_tables_of_the_results(stored_rows: list[Row], grid: Grid) -> None:
    page = STUDY.page.read_text(encoding="utf-8")
    sweep_rows = [*read_table(SWEEP.results).values()]
    for name, text in tables(stored_rows, sweep_rows, grid).items():
        assert f"{begin(name)}{text}\n" in page, f"run `make docs`: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_in_sentences_are_those_of_the_results(
    page: Path, stored_columns: list[Column]
) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(MARKED.findall(text)) > 10
    assert filled(text, values_of(stored_columns, sorting_columns(stored_columns))) == text


def test_the_packaged_study_has_the_results(stored_columns: list[Column]) -> None:
    expected = json.dumps([*map(asdict, sorting_columns(stored_columns))])
    assert json.loads(EVIDENCE.read_text(encoding="utf-8")) == json.loads(expected)


def test_a_marked_number_is_replaced(two_columns: Sequence[Column]) -> None:
    values = values_of(two_columns, [])
    text = "loses 7<!-- loss | stale 16 | standard PPO --> % of 0.1<!-- stale 16 | bypass PPO -->."
    assert filled(text, values) == (
        "loses 44<!-- loss | stale 16 | standard PPO --> % of 0.90<!-- stale 16 | bypass PPO -->."
    )


def test_a_mark_of_a_table_is_no_number() -> None:
    text = "in 2.\n<!-- table of results: make docs -->\n"
    assert filled(text, {}) == text


def test_an_unknown_mark_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'stale 3 \| OPSM' names no result"):
        filled("0.5<!-- stale 3 | OPSM -->", {})


@pytest.fixture(scope="module")
def by_name(stored_columns: list[Column]) -> dict[str, Column]:
    """The columns of results.csv by name."""
    return {column.name: column for column in stored_columns}


def stored_cell(column: Column, method: str) -> Cell:
    """The cell of a method that ran in the column."""
    cell = column.cell(method)
    assert cell is not None
    return cell


def test_pull_with_opsm_have_the_best_records(stored_columns: list[Column]) -> None:
    lines = records(sorting_columns(stored_columns)).splitlines()[2:]
    assert lines[0].startswith("| quadratic pull 0.1 |")
    assert lines[1].startswith("| OPSM |")


def test_no_seed_of_the_pull_collapsed(stored_columns: list[Column]) -> None:
    for column in stored_columns:
        cell = column.cell("quadratic pull 0.1")
        assert cell is None or cell.collapsed == 0, column.name


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_no_correction_is_shown_to_help_with_precision(
    by_name: dict[str, Column], name: str
) -> None:
    standard = stored_cell(by_name[name], "standard PPO")
    assert standard.gap_low <= 0
    assert standard.gap <= MARGIN


def test_eight_methods_are_near_the_best_at_16_steps(by_name: dict[str, Column]) -> None:
    near = [cell for cell in by_name["stale 16"].cells if cell.gap <= MARGIN]
    assert len(near) == 8
    assert stored_cell(by_name["stale 16"], "quadratic pull 0.1").is_worse


@pytest.mark.parametrize(
    "name", ["stale 16", "int4 and stale 16", "experts: stale 16", "agent: stale 16"]
)
def test_standard_ppo_collapses_with_old_weights(by_name: dict[str, Column], name: str) -> None:
    standard = stored_cell(by_name[name], "standard PPO")
    assert standard.collapsed == standard.seeds


def test_bypass_ppo_is_below_others_with_old_int4(by_name: dict[str, Column]) -> None:
    column = by_name["int4 and stale 16"]
    bypass = stored_cell(column, "bypass PPO")
    for method in ("OPSM", "DPPO, TV (prime-rl)", "bypass VESPO", "quadratic pull 0.1"):
        assert stored_cell(column, method).relative > bypass.relative


def test_the_pull_is_best_with_eight_steps(by_name: dict[str, Column]) -> None:
    assert by_name["eight steps"].cells[0].method == "quadratic pull 0.1"


def test_no_seed_collapses_one_step_behind(by_name: dict[str, Column]) -> None:
    assert sum(cell.collapsed for cell in by_name["stale 2"].cells) == 0
