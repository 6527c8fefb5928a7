"""The tables of the page, as Markdown."""

from collections.abc import Iterable, Sequence

import numpy as np

from slime_tis.analysis.report.comparison_study import MARGIN, STANDARD, Cell, Column, record
from studies.collapse.results import Row, mean_of
from studies.comparison.columns import REFERENCE, accuracy_of, by_case_of, on_policy_of
from studies.comparison.marked_numbers import percent

MIN_PAIRS = 5
"""A rank correlation of fewer methods is not shown."""
MIN_RECORD_COLUMNS = 5
"""Smallest number of columns of a method in the table of records."""
LATE_QUARTERS = ((0.5, 0.75), (0.75, 1.0))
"""Parts of a run in which the accuracy of on-policy training is compared, as shares of its
steps."""
PREDICTORS = ("mismatch_k3_kl", "ess", "kept_fraction")
"""Quantities of a run that may rank the methods, columns of results.csv."""


def results(compared: Sequence[Column]) -> str:
    """Relative accuracy and gap by method and mismatch."""
    methods: dict[str, None] = {}
    for column in compared:
        for cell in column.cells:
            methods[cell.method] = None
    lines = [_row("method", [column.name for column in compared])]
    lines.append("|---" * (len(compared) + 1) + "|")
    for method in methods:
        texts = [_cell_text(column.cell(method)) for column in compared]
        lines.append(_row(method, texts))
    sizes = []
    for column in compared:
        low, high = column.sigma
        sizes.append(f"{low:.2g} to {high:.2g}")
    lines.append(_row("σ√T", sizes))
    return "\n".join(lines)


def _row(name: str, texts: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(texts)} |"


def _cell_text(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    number = f"{cell.relative:.2f}"
    if cell.gap <= MARGIN:
        number = f"**{number}**"
    # GitHub's tables have no line breaks but this tag.
    lines = [f"{number} [{cell.low:.2f}, {cell.high:.2f}]", gap_text(cell)]
    if cell.collapsed:
        lines.append(f"{cell.collapsed} of {cell.seeds} collapsed")
    return "<br>".join(lines)


def gap_text(cell: Cell) -> str:
    """The gap of a method with its interval, in percent; * if the test finds it worse."""
    if cell.gap == cell.gap_low == cell.gap_high == 0:
        return "best"
    star = "*" if cell.is_worse else ""
    return f"{percent(cell.gap)} [{percent(cell.gap_low)}, {percent(cell.gap_high)}]{star}"


def comparisons(compared: Sequence[Column]) -> str:
    """The number of comparisons with the best method of each column, and their results."""
    lines = [
        "| column | seeds | methods | best | comparisons | found worse | within 10 % |",
        "|---|---|---|---|---|---|---|",
    ]
    all_tests = 0
    all_worse = 0
    all_near = 0
    for column in compared:
        seeds = sorted({cell.seeds for cell in column.cells})
        worse = [cell for cell in column.cells if cell.is_worse]
        best, *others = column.cells
        near = [cell for cell in others if cell.gap <= MARGIN]
        all_tests += len(others)
        all_worse += len(worse)
        all_near += len(near)
        lines.append(
            f"| {column.name} | {' or '.join(map(str, seeds))} | {len(column.cells)} |"
            f" {best.method} | {len(others)} | {len(worse)} | {len(near)} |"
        )
    lines.append(f"| all | | | | {all_tests} | {all_worse} | {all_near} |")
    return "\n".join(lines)


def records(seen: Sequence[Column]) -> str:
    """Mean and largest gap of each method over its columns."""
    lines = [
        "| method | columns | mean gap, % | upper end, % | largest gap, % | in the column |",
        "|---|---|---|---|---|---|",
    ]
    of_methods = {}
    for column in seen:
        for cell in column.cells:
            gaps = record(cell.method, seen)
            if gaps is not None and gaps.columns >= MIN_RECORD_COLUMNS:
                of_methods[cell.method] = gaps
    for method, gaps in sorted(of_methods.items(), key=lambda item: item[1].high):
        lines.append(
            f"| {method} | {gaps.columns} | {percent(gaps.mean)} | {percent(gaps.high)} |"
            f" {percent(gaps.worst)} | {gaps.worst_column} |"
        )
    return "\n".join(lines)


def growth(rows: Iterable[Row]) -> str:
    """Accuracy of on-policy training in the last two quarters of its runs, by task."""
    lines = [
        "| on-policy training | seeds | steps: accuracy | steps: accuracy |",
        "|---|---|---|---|",
    ]
    for (scenario, method), by_seed in by_case_of(rows).items():
        if scenario != on_policy_of(scenario) or method != STANDARD:
            continue
        runs = [*by_seed.values()]
        texts = []
        for first, last in LATE_QUARTERS:
            start = round(first * runs[0].steps)
            end = round(last * runs[0].steps)
            values = []
            for run in runs:
                values += [accuracy for step, accuracy in run.accuracy if start < step <= end]
            texts.append(f"{start + 1} to {end}: {np.mean(values):.2f}")
        lines.append(f"| {scenario} | {len(runs)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def predictors(rows: Iterable[Row], compared: Sequence[Column]) -> str:
    """Rank correlation of quantities in training with accuracy, per column."""
    lines = [
        "| column | methods | k3 | ESS of the weights | tokens kept |",
        "|---|---|---|---|---|",
    ]
    by_case = by_case_of(rows)
    for column in compared:
        if len(column.cells) < MIN_PAIRS:
            continue
        texts = []
        for name in PREDICTORS:
            pairs = []
            for cell in column.cells:
                runs = by_case[column.name, cell.method].values()
                value = mean_of(getattr(run, name) for run in runs)
                if value is not None:
                    pairs.append((value, cell.relative))
            texts.append(rank_correlation(pairs))
        lines.append(f"| {column.name} | {len(column.cells)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> str:
    """Spearman's ρ of the pairs, with the number of pairs."""
    ranks = []
    for side in zip(*pairs, strict=True):
        if len(set(side)) == 1:
            return "–"
        ranks.append(_ranks(side))
    if len(pairs) < MIN_PAIRS:
        return "–"
    correlation = np.corrcoef(np.array(ranks))[0, 1]
    return f"{correlation:.2f} ({len(pairs)})"


def _ranks(values: Sequence[float]) -> list[float]:
    """The ranks of the values; equal values share their mean rank."""
    ranks = []
    for value in values:
        smaller = [other for other in values if other < value]
        ranks.append(len(smaller) + values.count(value) / 2)
    return ranks


def sweep(rows: Iterable[Row]) -> str:
    """Relative accuracy by method and bound of the sweep, with the same seeds."""
    by_case = by_case_of(rows)
    reference = accuracy_of(by_case.pop((REFERENCE, STANDARD)))
    lines = ["| method | bound | seeds | relative accuracy |", "|---|---|---|---|"]
    for (_, correction), by_seed in by_case.items():
        method, _, bound = correction.partition(", ")
        accuracy = accuracy_of(by_seed)
        bases = [reference[seed] for seed in accuracy]
        relative = np.mean([*accuracy.values()]) / np.mean(bases)
        lines.append(f"| {method} | {bound or '–'} | {len(accuracy)} | {relative:.2f} |")
    return "\n".join(lines)


def cost(rows: Sequence[Row]) -> str:
    """Returns a sentence: number and time of the runs."""
    hours = sum(row.seconds for row in rows) / 3600
    return (
        f"{len(rows)} runs took {hours:.1f} hours, one core per run, on machines with other load."
    )
