"""Tests of the rule of `slime-tis recommend` on results that it has not seen, as Markdown."""

import math
from collections.abc import Sequence

from slime_tis.analysis.report.comparison_study import (
    STANDARD,
    Column,
    best_cell,
    nearest_column,
)
from studies.collapse.cases import Grid
from studies.collapse.results import Row
from studies.comparison.columns import accuracy_of, by_case_of, loss, on_policy_of
from studies.comparison.intervals import log_ratios
from studies.comparison.marked_numbers import percent
from studies.comparison.page_tables import gap_text

RULE_DATE = "2026-11-27"
"""Runs from this date on did not exist when the rule of `recommend` was written."""


def answers(seen: Sequence[Column], others: Sequence[Column]) -> str:
    """Answers of `recommend` in columns that it does not see.

    Columns of other tasks are never seen. A column of the sorting task is left out for its answer,
    also from the records of the methods. Conditions come from the flags; the size is the smallest
    one of the column, so that it does not depend on the methods that let the policy drift.
    """
    lines = [
        "| column without its results | nearest column | answer | relative accuracy | gap, % |",
        "|---|---|---|---|---|",
    ]
    for test in (*seen, *others):
        visible = [column for column in seen if column.name != test.name]
        # `recommend` asks to fix the faults of the other columns.
        chosen = None
        if test.covers or test in others:
            chosen = nearest_column(test.conditions, test.sigma[0], visible)
        if chosen is None:
            continue
        method = best_cell(chosen, visible, test.conditions).method
        cell = test.cell(method)
        result = "not run | –"
        if cell is not None:
            result = f"{cell.relative:.2f} | {gap_text(cell)}"
        lines.append(f"| {test.name} | {chosen.name} | {method} | {result} |")
    return "\n".join(lines)


def later_seeds(
    early: Sequence[Column], early_rows: Sequence[Row], late_rows: Sequence[Row], grid: Grid
) -> str:
    """Answers from the early runs, tested on seeds that were run later."""
    lines = [
        "| column | answer | later seeds | methods | relative accuracy | rank | gap, % |",
        "|---|---|---|---|---|---|---|",
    ]
    late = by_case_of(late_rows)
    on_policy = by_case_of(early_rows)
    for column in early:
        reference = accuracy_of(on_policy[on_policy_of(column.name), STANDARD])
        runs = {}
        for method in grid.corrections:
            case = (column.name, method)
            if case in late and column.cell(method) is not None:
                runs[method] = accuracy_of(late[case])
        if not column.covers or len(runs) < 2:
            continue
        # All methods of the comparison have the same seeds.
        common = set(reference).intersection(*runs.values())
        if not common:
            continue
        means = {}
        for method, values in runs.items():
            of_seeds = {seed: values[seed] for seed in common}
            means[method] = float(log_ratios(of_seeds, reference).mean())
        answer = best_cell(column, early, column.conditions).method
        result = "– | – | –"
        if answer in means:
            own = means[answer]
            better = [mean for mean in means.values() if mean > own]
            gap = loss(own - max(means.values()))
            result = f"{math.exp(own):.2f} | {1 + len(better)} | {percent(gap)}"
        lines.append(f"| {column.name} | {answer} | {len(common)} | {len(means)} | {result} |")
    return "\n".join(lines)
