"""The plot and the tables of every study, from its results.csv.

python -m studies.collapse.report    # writes them into docs/; part of `make docs`
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from slime_tis.analysis.report.overview import group_points
from slime_tis.atomic_files import atomic_file, write_atomically
from studies.collapse.cases import ROOT, Curve, Grid, Study
from studies.collapse.results import Row, read_table

STUDIES = (
    Study(),
    *(Study(ROOT / "studies" / name) for name in ("real_model", "rounding", "tool_agent")),
)
SEEDS = (0, 1, 2)
"""The seeds of a whole study."""
END = "<!-- end of table -->\n"
MISSING = "–"
"""In a cell without a value."""

REFERENCE = "none"
"""The scenario without a mismatch, drawn into the panels of the others."""

LOOKS = {
    "standard PPO, no mismatch": ("grey", ":"),
    "standard PPO": ("black", "-"),
    "token TIS": ("tab:blue", "-"),
    "token MIS": ("tab:blue", "--"),
    "segment TIS": ("tab:cyan", "-"),
    "sequence TIS": ("tab:orange", "-"),
    "sequence MIS": ("tab:orange", "--"),
    "geometric RS + veto": ("tab:green", "-"),
    "geometric RS by z-score": ("tab:green", "-"),
    "bypass PPO": ("tab:purple", "-"),
    "bypass PPO + RS": ("tab:purple", "--"),
    "policy gradient + sequence IS": ("tab:red", ":"),
    "OPSM": ("tab:red", "-"),
    "quadratic pull 0.1": ("tab:brown", "-"),
    "engine in fp32": ("grey", ":"),
    "nearest": ("black", "-"),
    "stochastic": ("tab:blue", "-"),
}
"""Colour and style of a line, one colour per family; other lines get matplotlib's next colour."""


def main() -> None:
    for study in STUDIES:
        rows = list(read_table(study.results).values())
        grid = Grid.load(study)
        print(draw(rows, study.picture, grid.draws))
        print(replace_table(study.page, "results", table(rows) + not_run(rows, grid)))


def replace_table(page: Path, name: str, text: str) -> Path:
    """Puts a table between its marks on a page."""
    before, rest = page.read_text(encoding="utf-8").split(begin(name))
    after = rest.split(END, 1)[1]
    write_atomically(page, f"{before}{begin(name)}{text}\n{END}{after}")
    return page


def begin(name: str) -> str:
    """The mark before a table."""
    return f"<!-- table of {name}: make docs -->\n"


def table(rows: Iterable[Row]) -> str:
    """One Markdown table per scenario: medians over seeds, in brackets the lowest and highest."""
    rows, parts = list(rows), []
    columns = {
        name: column
        for name, column in COLUMNS.items()
        if name not in SOME or column(rows) != MISSING
    }
    for scenario, cases in by_case(rows).items():
        parts += [
            "",
            f"**{scenario}**",
            "",
            f"| run | {' | '.join(columns)} |",
            "|---" * (len(columns) + 1) + "|",
        ]
        for name, seeds in cases.items():
            parts.append(f"| {name} | {' | '.join(column(seeds) for column in columns.values())} |")
    return "\n".join(parts[1:])


def not_run(rows: Iterable[Row], grid: Grid) -> str:
    """A paragraph that lists a whole study's runs without a row; empty if every run has one."""
    there, cases = (
        {row.key for row in rows},
        sorted(grid.cases(SEEDS), key=lambda case: grid.position(case.key)),
    )
    lacking: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        if case.key not in there:
            lacking.setdefault((case.scenario, case.correction), []).append(str(case.seed))
    if not lacking:
        return ""
    by_scenario: dict[str, list[str]] = {}
    for (scenario, correction), seeds in lacking.items():
        by_scenario.setdefault(scenario, []).append(f"{correction} (seeds {', '.join(seeds)})")
    listed = "\n".join(
        f"* {scenario}: {', '.join(names)}" for scenario, names in by_scenario.items()
    )
    count = sum(case.key in there for case in cases)
    all_seeds = ", ".join(map(str, SEEDS))
    return (
        f"\n\n{count} of the {len(cases)} runs of seeds {all_seeds} were made."
        f" Not run yet:\n\n{listed}"
    )


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """The rows by scenario and correction, in the order they are in."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault(row.scenario, {}).setdefault(row.correction, []).append(row)
    return found


def spread(values: Sequence[float]) -> str:
    """Median, lowest and highest; of a single value that value."""
    median = f"{statistics.median(values):.2f}"
    return median if len(values) == 1 else f"{median} [{min(values):.2f}, {max(values):.2f}]"


def middle(values: Sequence[float | None], form: str) -> str:
    """The median of the values that are not None."""
    there = [value for value in values if value is not None]
    return form.format(statistics.median(there)) if there else MISSING


def collapses(rows: Sequence[Row]) -> str:
    """Median step of the runs that lost half of their best, and how many of the seeds did."""
    steps = [row.collapse_step for row in rows if row.collapse_step is not None]
    return f"{statistics.median_low(steps)} ({len(steps)} of {len(rows)})" if steps else MISSING


def ages(rows: Sequence[Row]) -> str:
    """The k3 KL of the samples of the newest and of the oldest weights, medians over seeds."""
    youngest, oldest = (
        middle([row.k3_by_staleness[end][1] for row in rows if row.k3_by_staleness], "{:.2g}")
        for end in (0, -1)
    )
    return (
        youngest if all(len(row.k3_by_staleness) == 1 for row in rows) else f"{youngest} → {oldest}"
    )


COLUMNS: dict[str, Callable[[Sequence[Row]], str]] = {
    "final accuracy": lambda rows: spread([row.final_accuracy for row in rows]),
    "last quarter": lambda rows: spread([row.late_accuracy for row in rows]),
    "mean accuracy": lambda rows: spread([row.accuracy_area for row in rows]),
    "collapse at step": collapses,
    "k3 KL": lambda rows: middle([row.mismatch_k3_kl for row in rows], "{:.2g}"),
    "k3 KL, new → old": ages,
    "ESS": lambda rows: middle([row.ess for row in rows], "{:.2f}"),
    "kept": lambda rows: middle([row.kept_fraction for row in rows], "{:.0%}"),
    "last reward": lambda rows: middle(
        [row.rewards[-1][1] if row.rewards else None for row in rows], "{:.2f}"
    ),
    "update received": lambda rows: middle([row.update_received for row in rows], "{:.2f}"),
}
"""Columns of the table, each from the seeds of one case."""
LABELS: dict[Curve, str] = {
    "accuracy": "held-out accuracy of the training policy",
    "rewards": "mean reward of the rollout engine's samples",
}
SOME = ("ESS", "last reward", "update received")
"""Columns that are dropped from a table if no row has a value."""


def draw(rows: Sequence[Row], path: Path, curve: Curve = "accuracy") -> Path:
    """Draws a curve over steps, one panel per scenario: medians over seeds, and their range.

    Args:
        rows: of all runs.
        path: PNG file to make or to replace.
        curve: held-out accuracy of the training policy, or rewards of the rollout engine's samples.
    """
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scenarios = by_case(rows)
    panels = {name: cases for name, cases in scenarios.items() if name != REFERENCE} or scenarios
    reference = [row for cases in scenarios.get(REFERENCE, {}).values() for row in cases]
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(5 * len(panels), 5.2),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    lines: dict[str, Any] = {}
    for axis, (scenario, cases) in zip(axes[0], panels.items(), strict=True):
        if reference:
            _draw_case(axis, reference, curve, "standard PPO, no mismatch", lines)
        for correction, seeds in cases.items():
            _draw_case(axis, seeds, curve, correction, lines)
        axis.set_title(scenario, loc="left", fontweight="bold")
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.25)
        axis.set_ylim(0, 1)
    axes[0][0].set_ylabel(LABELS[curve])
    figure.legend(
        handles=lines.values(),
        loc="outside lower center",
        ncols=min(5, 2 * len(panels)),
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        figure.savefig(file, dpi=110, format="png")
    pyplot.close(figure)
    return path


def _draw_case(
    axis: Any, seeds: Sequence[Row], curve: Curve, label: str, lines: dict[str, Any]
) -> None:
    """The median over seeds as a line, their range as a band; only steps that all seeds have."""
    points = group_points([dict(getattr(row, curve)) for row in seeds])
    columns = list(zip(*points.members, strict=True))
    median = [statistics.median(values) for values in columns]
    low = [min(values) for values in columns]
    high = [max(values) for values in columns]
    color, style = LOOKS.get(label, (None, "-"))
    (line,) = axis.plot(points.steps, median, style, color=color, label=label)
    axis.fill_between(points.steps, low, high, color=line.get_color(), alpha=0.1)
    lines[label] = line


if __name__ == "__main__":
    main()
