"""Compares every method with on-policy training, per mismatch.

Writes README's figure and table, and the table that `recommend` reads.

    python -m studies.comparison.compare    # part of `make docs`

A method's accuracy is the mean of the evaluations in the last quarter of a run. Its relative
accuracy is the mean over seeds divided by the mean of on-policy training in the same task over the
same seeds. Its 95 % interval is the percentile bootstrap over seeds, resampled together for both
means. A method is tied with the best one if their difference is within `tie_margin`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import NormalDist
from textwrap import fill

import numpy as np

from slime_tis.analysis.report.recommend import (
    STANDARD,
    Cell,
    Column,
    Mismatch,
    best_cell,
    column_for,
    is_negligible,
    study,
)
from slime_tis.atomic_files import atomic_file, write_atomically
from studies.collapse.cases import ROOT, Grid, Study
from studies.collapse.report import replace_table
from studies.collapse.results import Row, mean_of, read_table

STUDY = Study(ROOT / "studies" / "comparison")
EVIDENCE = ROOT / "slime_tis" / "analysis" / "report" / "comparison_study.json"
"""The columns of the study, as `slime-tis recommend` reads them."""
REFERENCE = "none"
"""On-policy training."""
MIN_SEEDS = 3
"""Methods with fewer seeds in a column have no interval and are not ranked."""
MIN_PAIRS = 5
"""A rank correlation of fewer methods is not shown."""
RESAMPLES = 10_000
SWEEP = Study(STUDY.directory / "sweep")
SORTING = ""
"""The task of columns without a task in their name."""
MAIN = ("stale 16", "stale 64", "fp8", "fp8 and stale 16", "int4")
"""The columns of the first table."""
COVERED = (*MAIN, "stale 2", "stale 8", "int4 and stale 16")
"""The columns in which `recommend` places a mismatch: old weights or precision, one step per
rollout."""
STALE_SERVER = "stale_server"
"""The fault with old weights."""
TOKENS = {SORTING: 11, "lr 2e-4": 11, "experts": 11, "agent": 17}
"""Mean number of trained tokens of a response, by task (`rollout/response_len`)."""

Accuracy = Mapping[int, float]
"""Accuracy by seed."""


def main() -> None:
    rows = read_table(STUDY.results)
    grid = Grid.load(STUDY)
    compared = columns(rows.values(), grid)
    seen = [column for column in compared if task_of(column.name) == SORTING]
    held_out = [column for column in compared if column not in seen]
    first = [column for column in seen if column.name in MAIN]
    write_atomically(
        EVIDENCE, json.dumps([*map(asdict, seen)], indent=1, ensure_ascii=False) + "\n"
    )
    print(EVIDENCE)
    print(draw(compared, STUDY.picture))
    print(replace_table(STUDY.page, "results", table(first)))
    print(replace_table(STUDY.page, "results of other tasks", table(held_out)))
    print(
        replace_table(
            STUDY.page,
            "other mismatches",
            table([column for column in seen if column not in first]),
        )
    )
    print(replace_table(STUDY.page, "held-out columns", answers(held_out, study())))
    print(replace_table(STUDY.page, "predictors", predictors(rows.values(), compared)))
    swept = read_table(SWEEP.results)
    print(replace_table(STUDY.page, "sweep", sweep(swept.values())))

    hours = sum(row.seconds for row in [*rows.values(), *swept.values()]) / 3600
    cost = (
        f"{len(rows) + len(swept)} runs took {hours:.1f} hours, one core per run, on machines with"
        " other load."
    )
    print(replace_table(STUDY.page, "cost", cost))


def task_of(scenario: str) -> str:
    """The task in the name of a column, "TASK: MISMATCH"."""
    return scenario.partition(":")[0] if ":" in scenario else SORTING


def columns(rows: Iterable[Row], grid: Grid) -> list[Column]:
    """The mismatches with at least two ranked methods, in the order of the grid."""
    by_case: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        by_case.setdefault((row.scenario, row.correction), {})[row.seed] = row
    result = []
    for scenario in grid.scenarios:
        task = task_of(scenario)
        on_policy = f"{task}: {REFERENCE}" if task else REFERENCE
        reference = {
            seed: row.late_accuracy for seed, row in by_case.get((on_policy, STANDARD), {}).items()
        }
        methods = {
            method: by_case[scenario, method]
            for method in grid.corrections
            if len(by_case.get((scenario, method), {}).keys() & reference.keys()) >= MIN_SEEDS
        }
        if scenario != on_policy and len(methods) > 1:
            result.append(_column(scenario, grid, methods, reference))
    return result


def _column(
    name: str, grid: Grid, methods: Mapping[str, Mapping[int, Row]], reference: Accuracy
) -> Column:
    accuracy = {
        method: {seed: row.late_accuracy for seed, row in by_seed.items() if seed in reference}
        for method, by_seed in methods.items()
    }
    means = {method: float(np.mean([*values.values()])) for method, values in accuracy.items()}
    least = max(means.values()) - tie_margin([*accuracy.values()])
    cells = []
    for method, by_seed in methods.items():
        seeds = sorted(accuracy[method])
        rows = [by_seed[seed] for seed in seeds]
        relative, low, high = relative_accuracy(accuracy[method], reference)
        cells.append(
            Cell(
                method=method,
                flags=grid.corrections[method],
                seeds=len(seeds),
                relative=relative,
                low=low,
                high=high,
                tied=means[method] >= least,
                collapsed=sum(row.collapse_step is not None for row in rows),
            )
        )
    k3 = [
        float(np.mean([row.mismatch_k3_kl or 0.0 for row in by_seed.values()]))
        for by_seed in methods.values()
    ]
    tokens = TOKENS[task_of(name)]
    standard = next((cell.relative for cell in cells if cell.method == STANDARD), math.nan)
    return Column(
        name=name,
        covers=name in COVERED,
        stale="--update-weights-interval" in grid.scenarios[name]
        or grid.faults.get(name) == STALE_SERVER,
        sigma=(math.sqrt(2 * min(k3) * tokens), math.sqrt(2 * max(k3) * tokens)),
        standard=standard,
        cells=tuple(sorted(cells, key=lambda cell: -cell.relative)),
    )


def relative_accuracy(method: Accuracy, reference: Accuracy) -> tuple[float, float, float]:
    """Returns mean accuracy over mean reference of the common seeds, and its 95 % interval."""
    seeds = sorted(method.keys() & reference.keys())
    values, base = (
        np.array([method[seed] for seed in seeds]),
        np.array([reference[seed] for seed in seeds]),
    )
    chosen = np.random.default_rng(0).integers(len(seeds), size=(RESAMPLES, len(seeds)))
    low, high = np.quantile(values[chosen].mean(1) / base[chosen].mean(1), (0.025, 0.975))
    return float(values.mean() / base.mean()), float(low), float(high)


def tie_margin(accuracies: Sequence[Accuracy]) -> float:
    """The largest difference from the best method that is not significant.

    The residual variance s² of a randomized block design (method + seed) is pooled over the
    methods, on their n common seeds. The margin is z·s·√(2/n) with Bonferroni's z for the
    comparisons of all other methods with the best, at 5 %.
    """
    seeds = sorted(set.intersection(*(set(accuracy) for accuracy in accuracies)))
    values = np.array([[accuracy[seed] for seed in seeds] for accuracy in accuracies])
    residual = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    methods, count = values.shape
    variance = (residual**2).sum() / ((methods - 1) * (count - 1))
    return float(NormalDist().inv_cdf(1 - 0.025 / (methods - 1)) * math.sqrt(2 * variance / count))


def table(compared: Sequence[Column]) -> str:
    """Returns Markdown: relative accuracy by method and mismatch, ties with the best in bold."""
    by_method: dict[str, dict[str, Cell]] = {}
    for column in compared:
        for cell in column.cells:
            by_method.setdefault(cell.method, {})[column.name] = cell
    names = [column.name for column in compared]
    heads = [
        f"{column.name} (σ√T {column.sigma[0]:.2g} to {column.sigma[1]:.2g})" for column in compared
    ]
    lines = [f"| method | {' | '.join(heads)} |", "|---" * (len(names) + 1) + "|"]
    for method, cells in by_method.items():
        lines.append(f"| {method} | {' | '.join(_text(cells.get(name)) for name in names)} |")
    return "\n".join(lines)


def answers(tests: Sequence[Column], columns: Sequence[Column]) -> str:
    """Returns Markdown: answers of `recommend` in other columns, at their extreme mismatches."""
    lines = [
        "| column | σ√T | answer | relative accuracy | tied with the best |",
        "|---|---|---|---|---|",
    ]
    for test in tests:
        for sigma in test.sigma:
            cause = "stale_weights" if test.stale else "rounding"
            mismatch = Mismatch(cause=cause, k3=0.0, sigma=sigma, age=0)
            chosen = column_for(mismatch, columns)
            method = None if chosen is None else best_cell(chosen, columns).method
            method = STANDARD if is_negligible(mismatch, columns) else method
            cell = next((cell for cell in test.cells if cell.method == method), None)
            result = (
                "– | –" if cell is None else f"{cell.relative:.2f} | {'yes' if cell.tied else 'no'}"
            )
            lines.append(f"| {test.name} | {sigma:.2g} | {method or 'not covered'} | {result} |")
    return "\n".join(lines)


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


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    bold = "**" if cell.tied else ""
    collapsed = f", {cell.collapsed} of {cell.seeds} collapsed" if cell.collapsed else ""
    return f"{bold}{cell.relative:.2f}{bold} [{cell.low:.2f}, {cell.high:.2f}]{collapsed}"


def draw(compared: Sequence[Column], path: Path) -> Path:
    """Draws the heat map of relative accuracy; a dot marks ties with the best method."""
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
            text = f"{cell.relative:.2f}{' ●' if cell.tied else ''}"
            axes.text(
                x,
                y,
                text,
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
        "accuracy relative to on-policy training; ● not told apart from the best", fontsize=8
    )
    figure.tight_layout()
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=130)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    main()
