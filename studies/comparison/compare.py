"""Compares every method with on-policy training and with the best method, per mismatch.

Writes README's figure and tables, and the table that `recommend` reads.

    python -m studies.comparison.compare    # part of `make docs`

A method's accuracy is the mean of the evaluations in the last quarter of a run. Its relative
accuracy is the geometric mean over seeds of its accuracy divided by that of on-policy training with
the same seed. Its gap is the same with the column's best method, as a loss: 1 − accuracy / best.
intervals.py has the intervals and the test.
"""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill

import numpy as np

from slime_tis.analysis.report.comparison_study import (
    MARGIN,
    STANDARD,
    Cell,
    Column,
    Conditions,
    best_cell,
    nearest_column,
    record,
)
from slime_tis.atomic_files import atomic_file, write_atomically
from studies.collapse.cases import ROOT, Grid, Study
from studies.collapse.report import replace_table
from studies.collapse.results import Row, mean_of, read_table
from studies.comparison.coverage import coverage_table, standardized_residuals
from studies.comparison.intervals import Accuracy, LogRatio, compare, is_worse, log_ratios
from studies.comparison.marked_numbers import fill_page, percent, values_of

STUDY = Study(ROOT / "studies" / "comparison")
EVIDENCE = ROOT / "slime_tis" / "analysis" / "report" / "comparison_study.json"
"""The columns of the study, as `slime-tis recommend` reads them."""
REFERENCE = "none"
"""On-policy training."""
MIN_SEEDS = 3
"""Methods with fewer seeds in a column have no interval and are not ranked."""
MIN_PAIRS = 5
"""A rank correlation of fewer methods is not shown."""
MIN_RECORD_COLUMNS = 5
"""Smallest number of columns of a method in the table of records."""
SWEEP = Study(STUDY.directory / "sweep")
SORTING = ""
"""The task of columns without a task in their name."""
PAGES = (STUDY.page, ROOT / "docs" / "choosing.md")
"""Pages with marked numbers."""
MAIN = ("stale 16", "stale 64", "fp8", "fp8 and stale 16", "int4")
"""The columns of the first table."""
STALE_SERVER = "stale_server"
"""The fault of a server with old weights. `recommend` uses its column; columns of other faults only
count in the record of a method."""
STALE_SERVER_SHARE = 0.25
"""Share of the prompts that the stale server answers; faults.py has four servers."""
TOKENS = {SORTING: 11, "lr 2e-4": 11, "experts": 11, "agent": 17}
"""Mean number of trained tokens of a response, by task (`rollout/response_len`)."""
RULE_DATE = "2026-11-27"
"""Runs from this date on did not exist when the rule of `recommend` was written."""


def main() -> None:
    rows = read_table(STUDY.results)
    grid = Grid.load(STUDY)
    compared = columns(rows.values(), grid)
    evidence = json.dumps([*map(asdict, sorting_columns(compared))], indent=1, ensure_ascii=False)
    write_atomically(EVIDENCE, evidence + "\n")
    print(EVIDENCE)
    print(draw(compared, STUDY.picture))
    sweep_rows = read_table(SWEEP.results)
    for name, text in tables([*rows.values()], [*sweep_rows.values()], grid).items():
        print(replace_table(STUDY.page, name, text))
    print(replace_table(STUDY.page, "coverage", coverage_table(residuals(rows.values(), grid))))
    numbers = values_of(compared, sorting_columns(compared))
    for page in PAGES:
        print(fill_page(page, numbers))


def tables(rows: Sequence[Row], sweep_rows: Sequence[Row], grid: Grid) -> dict[str, str]:
    """The tables of the page by name, as Markdown, except the simulated coverage."""
    compared = columns(rows, grid)
    seen = sorting_columns(compared)
    others = [column for column in compared if column not in seen]
    first = [column for column in seen if column.name in MAIN]
    rest = [column for column in seen if column not in first]
    early_rows = [row for row in rows if row.date < RULE_DATE]
    late_rows = [row for row in rows if row.date >= RULE_DATE]
    early = sorting_columns(columns(early_rows, grid))
    return {
        "results": table(first),
        "results of other tasks": table(others),
        "other mismatches": table(rest),
        "comparisons": comparisons(compared),
        "records": records(seen),
        "growth of on-policy training": growth(rows),
        "held-out columns": answers(seen, others),
        "later seeds": later_seeds(early, early_rows, late_rows, grid),
        "predictors": predictors(rows, compared),
        "sweep": sweep(sweep_rows),
        "cost": cost([*rows, *sweep_rows]),
    }


def sorting_columns(compared: Sequence[Column]) -> list[Column]:
    """The columns of the sorting task, which `recommend` sees."""
    return [column for column in compared if task_of(column.name) == SORTING]


def task_of(scenario: str) -> str:
    """The task in the name of a column, "TASK: MISMATCH"."""
    return scenario.partition(":")[0] if ":" in scenario else SORTING


def by_case_of(rows: Iterable[Row]) -> dict[tuple[str, str], dict[int, Row]]:
    """The rows by scenario and method, then by seed."""
    by_case: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        by_case.setdefault((row.scenario, row.correction), {})[row.seed] = row
    return by_case


def accuracy_of(by_seed: Mapping[int, Row]) -> Accuracy:
    """The accuracy by seed."""
    return {seed: row.late_accuracy for seed, row in by_seed.items()}


def on_policy_of(scenario: str) -> str:
    """The scenario of on-policy training in the same task."""
    task = task_of(scenario)
    return f"{task}: {REFERENCE}" if task else REFERENCE


def columns(rows: Iterable[Row], grid: Grid) -> list[Column]:
    """The mismatches with at least two ranked methods, in the order of the grid."""
    by_case = by_case_of(rows)
    result = []
    for scenario in grid.scenarios:
        on_policy = on_policy_of(scenario)
        reference = accuracy_of(by_case.get((on_policy, STANDARD), {}))
        methods = {}
        for method in grid.corrections:
            by_seed = by_case.get((scenario, method), {})
            if len(by_seed.keys() & reference.keys()) >= MIN_SEEDS:
                methods[method] = by_seed
        if scenario != on_policy and len(methods) > 1:
            result.append(_column(scenario, grid, methods, reference))
    return result


def _column(
    name: str, grid: Grid, methods: Mapping[str, Mapping[int, Row]], reference: Accuracy
) -> Column:
    accuracy = {method: accuracy_of(by_seed) for method, by_seed in methods.items()}
    relative = {method: compare(values, reference) for method, values in accuracy.items()}
    best = max(relative, key=lambda method: relative[method].mean)
    gaps = {
        method: compare(values, accuracy[best])
        for method, values in accuracy.items()
        if method != best
    }
    gaps[best] = LogRatio(mean=0.0, low=0.0, high=0.0, p_value=1.0, seeds=relative[best].seeds)
    cells = []
    for method, by_seed in methods.items():
        ratio = relative[method]
        gap = gaps[method]
        collapsed = [row for row in by_seed.values() if row.collapse_step is not None]
        cell = Cell(
            method=method,
            flags=grid.corrections[method],
            seeds=ratio.seeds,
            relative=math.exp(ratio.mean),
            low=math.exp(ratio.low),
            high=math.exp(ratio.high),
            gap=loss(gap.mean),
            gap_low=loss(gap.high),
            gap_high=loss(gap.low),
            is_worse=is_worse(gap, len(methods) - 1),
            collapsed=len(collapsed),
        )
        cells.append(cell)
    k3 = []
    for by_seed in methods.values():
        k3.append(float(np.mean([row.mismatch_k3_kl or 0.0 for row in by_seed.values()])))
    tokens = TOKENS[task_of(name)]
    return Column(
        name=name,
        covers=task_of(name) == SORTING and grid.faults.get(name, STALE_SERVER) == STALE_SERVER,
        conditions=conditions_of(name, grid),
        sigma=(math.sqrt(2 * min(k3) * tokens), math.sqrt(2 * max(k3) * tokens)),
        tokens=tokens,
        cells=tuple(sorted(cells, key=lambda cell: -cell.relative)),
    )


def loss(log_ratio: float) -> float:
    """The share of accuracy that a log-ratio below 0 loses, 1 − exp(log_ratio), without −0."""
    return 1 - math.exp(log_ratio)


def conditions_of(scenario: str, grid: Grid) -> Conditions:
    """The conditions that the flags of a scenario state; the runs themselves are not read."""
    flags = shlex.split(grid.scenarios[scenario])
    values = dict(zip(flags[::2], flags[1::2], strict=True))
    steps = int(values.get("--num-steps-per-rollout", 1))
    interval = int(values.get("--update-weights-interval", 1))
    is_stale_server = grid.faults.get(scenario) == STALE_SERVER
    return Conditions(
        age=interval * steps - 1,
        precision=values.get("--rollout-precision", "fp32"),
        steps=steps,
        stale_servers=STALE_SERVER_SHARE if is_stale_server else 0.0,
    )


def table(compared: Sequence[Column]) -> str:
    """Returns Markdown: relative accuracy and gap by method and mismatch."""
    by_method: dict[str, dict[str, Cell]] = {}
    for column in compared:
        for cell in column.cells:
            by_method.setdefault(cell.method, {})[column.name] = cell
    names = [column.name for column in compared]
    lines = [f"| method | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for method, cells in by_method.items():
        texts = [_text(cells.get(name)) for name in names]
        lines.append(f"| {method} | {' | '.join(texts)} |")
    sizes = [f"{column.sigma[0]:.2g} to {column.sigma[1]:.2g}" for column in compared]
    lines.append(f"| σ√T | {' | '.join(sizes)} |")
    return "\n".join(lines)


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    relative = f"{cell.relative:.2f} [{cell.low:.2f}, {cell.high:.2f}]"
    if cell.gap <= MARGIN:
        relative = f"**{cell.relative:.2f}** [{cell.low:.2f}, {cell.high:.2f}]"
    lines = [relative, gap_text(cell)]
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
    """Returns Markdown: the number of comparisons with the best method, and their results."""
    lines = [
        "| column | seeds | methods | best | comparisons | found worse | within 10 % |",
        "|---|---|---|---|---|---|---|",
    ]
    totals = np.zeros(3, int)
    for column in compared:
        counts = [cell.seeds for cell in column.cells]
        seeds = str(min(counts))
        if max(counts) > min(counts):
            seeds += f" to {max(counts)}"
        tests = len(column.cells) - 1
        worse = sum(cell.is_worse for cell in column.cells)
        near = sum(cell.gap <= MARGIN for cell in column.cells) - 1
        totals += (tests, worse, near)
        lines.append(
            f"| {column.name} | {seeds} | {len(column.cells)} | {column.cells[0].method} | {tests}"
            f" | {worse} | {near} |"
        )
    tests, worse, near = totals
    lines.append(f"| all | | | | {tests} | {worse} | {near} |")
    return "\n".join(lines)


def records(seen: Sequence[Column]) -> str:
    """Returns Markdown: mean and largest gap of each method over the columns in which it ran."""
    lines = [
        "| method | columns | mean gap, % | upper end, % | largest gap, % | in the column |",
        "|---|---|---|---|---|---|",
    ]
    methods = {cell.method for column in seen for cell in column.cells}
    found = []
    for method in methods:
        method_record = record(method, seen)
        if method_record is not None and method_record.columns >= MIN_RECORD_COLUMNS:
            found.append((method_record.high, method, method_record))
    for high, method, gaps in sorted(found):
        lines.append(
            f"| {method} | {gaps.columns} | {percent(gaps.mean)} | {percent(high)} |"
            f" {percent(gaps.worst)} | {gaps.worst_column} |"
        )
    return "\n".join(lines)


def residuals(rows: Iterable[Row], grid: Grid) -> np.ndarray:
    """Standardized residuals of all log-ratios to on-policy training."""
    by_case = by_case_of(rows)
    pairs = []
    for (scenario, _), by_seed in by_case.items():
        if scenario in grid.scenarios and scenario != on_policy_of(scenario):
            on_policy = by_case[on_policy_of(scenario), STANDARD]
            pairs.append((accuracy_of(by_seed), accuracy_of(on_policy)))
    return standardized_residuals(pairs)


def growth(rows: Iterable[Row]) -> str:
    """Returns Markdown: accuracy of on-policy training late in the run, by task."""
    lines = [
        "| on-policy training | seeds | steps, accuracy | steps, accuracy |",
        "|---|---|---|---|",
    ]
    by_scenario: dict[str, list[Row]] = {}
    for row in rows:
        if row.scenario == on_policy_of(row.scenario) and row.correction == STANDARD:
            by_scenario.setdefault(row.scenario, []).append(row)
    for scenario, runs in by_scenario.items():
        texts = []
        for share in ((0.5, 0.75), (0.75, 1.0)):
            start, end = (round(part * runs[0].steps) for part in share)
            values = []
            for row in runs:
                values += [value for step, value in row.accuracy if start < step <= end]
            texts.append(f"{start + 1} to {end}: {np.mean(values):.2f}")
        lines.append(f"| {scenario} | {len(runs)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def answers(seen: Sequence[Column], others: Sequence[Column]) -> str:
    """Returns Markdown: answers of `recommend` in columns that it does not see.

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
    """Returns Markdown: answers from the early runs, tested on seeds that were run later."""
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


def cost(rows: Sequence[Row]) -> str:
    """Returns a sentence: number and time of the runs."""
    hours = sum(row.seconds for row in rows) / 3600
    return (
        f"{len(rows)} runs took {hours:.1f} hours, one core per run, on machines with other load."
    )


def predictors(rows: Iterable[Row], compared: Sequence[Column]) -> str:
    """Returns Markdown: rank correlation of quantities in training with accuracy, per column."""
    lines = [
        "| column | methods | k3 | ESS of the weights | tokens kept |",
        "|---|---|---|---|---|",
    ]
    of_cell: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        of_cell.setdefault((row.scenario, row.correction), []).append(row)
    for column in compared:
        if len(column.cells) < MIN_PAIRS:
            continue
        means = []
        for name in ("mismatch_k3_kl", "ess", "kept_fraction"):
            pairs = [
                (
                    mean_of(getattr(row, name) for row in of_cell[column.name, cell.method]),
                    cell.relative,
                )
                for cell in column.cells
            ]
            complete = [(value, relative) for value, relative in pairs if value is not None]
            means.append(rank_correlation(complete))
        lines.append(f"| {column.name} | {len(column.cells)} | {' | '.join(means)} |")
    return "\n".join(lines)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> str:
    """Spearman's ρ of the pairs, with the number of pairs; equal values share their mean rank."""
    ranks = [
        [sum(x < value for x in side) + side.count(value) / 2 for value in side]
        for side in zip(*pairs, strict=True)
    ]
    if len(pairs) < MIN_PAIRS or any(len({*side}) == 1 for side in ranks):
        return "–"
    return f"{np.corrcoef(ranks)[0, 1]:.2f} ({len(pairs)})"


def sweep(rows: Iterable[Row]) -> str:
    """Returns Markdown: relative accuracy by method and bound of the sweep, with the same seeds."""
    by_case: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        by_case.setdefault((row.scenario, row.correction), {})[row.seed] = row.late_accuracy
    reference = by_case.pop((REFERENCE, STANDARD))
    lines = ["| method | bound | seeds | relative accuracy |", "|---|---|---|---|"]
    for (_, correction), accuracy in by_case.items():
        method, _, bound = correction.partition(", ")
        relative = np.mean([*accuracy.values()]) / np.mean([reference[seed] for seed in accuracy])
        lines.append(f"| {method} | {bound or '–'} | {len(accuracy)} | {relative:.2f} |")
    return "\n".join(lines)


def draw(compared: Sequence[Column], path: Path) -> Path:
    """Draws the heat map of relative accuracy; a dot marks gaps of at most `MARGIN`."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    methods = list(dict.fromkeys(cell.method for column in compared for cell in column.cells))
    values = np.full((len(methods), len(compared)), np.nan)
    figure, axes = pyplot.subplots(figsize=(3.2 + 1.1 * len(compared), 1 + 0.24 * len(methods)))
    for x, column in enumerate(compared):
        for cell in column.cells:
            y = methods.index(cell.method)
            values[y, x] = cell.relative
            dot = " ●" if cell.gap <= MARGIN else ""
            axes.text(
                x,
                y,
                f"{cell.relative:.2f}{dot}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if cell.relative < 0.6 else "black",
            )
    axes.imshow(values, aspect="auto", vmin=0.2, vmax=1.1, cmap="viridis")
    axes.set_xticks(
        range(len(compared)), [fill(column.name, 16) for column in compared], fontsize=8
    )
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    axes.tick_params(length=0)
    axes.set_xlabel(
        f"accuracy relative to on-policy training; ● within {MARGIN:.0%} of the column's best",
        fontsize=8,
    )
    figure.tight_layout()
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=130)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    main()
