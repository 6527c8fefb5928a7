"""Writes the tables of README.md from results.csv.

python -m studies.true_on_policy.report   # part of `make docs`
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.tables import read_rows
from slime_tis.analysis.report.student_t import t_quantile
from studies.true_on_policy.results import RESULTS, Row

PAGE = Path(__file__).with_name("README.md")
START = "<!-- tables of true_on_policy: make docs -->"
"""The tables follow this line."""
END = "<!-- end of tables -->"
"""The tables end before this line."""
BASE = "raw"
"""The mode that the others are compared with."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half the width of its 95 % interval."""

    mean: float
    half_width: float

    def text(self) -> str:
        """As 0.512 ± 0.034."""
        return f"{self.mean:.3f} ± {self.half_width:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of n values ± t(n − 1)·s/√n, s their standard deviation.

    Raises:
        ValueError: There are less than two values.
    """
    count = len(values)
    if count < 2:
        raise ValueError(f"an interval needs two seeds, but there are {count}.")
    error = statistics.stdev(values) / math.sqrt(count)
    return Interval(statistics.fmean(values), t_quantile(CONFIDENCE, count - 1) * error)


def paired(rows: Sequence[Row], base: Sequence[Row]) -> Interval:
    """Returns the difference of late accuracy, seed by seed, to the runs of another mode."""
    of_base = {row.seed: row.late_accuracy for row in base}
    return interval([row.late_accuracy - of_base[row.seed] for row in rows if row.seed in of_base])


def by_mode(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The runs of each mode, in the order of the table."""
    modes: dict[str, list[Row]] = {}
    for row in rows:
        modes.setdefault(row.correction, []).append(row)
    return modes


def by_scenario(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """The runs of each scenario and mode."""
    scenarios: dict[str, list[Row]] = {}
    for row in rows:
        scenarios.setdefault(row.scenario, []).append(row)
    return {name: by_mode(found) for name, found in scenarios.items()}


def accuracy_table(modes: Mapping[str, Sequence[Row]]) -> str:
    """The table of accuracies."""
    lines = [
        "| mode | final accuracy | last quarter | last quarter − raw | seeds |",
        "|---|---|---|---|---|",
    ]
    for name, rows in modes.items():
        final = interval([row.final_accuracy for row in rows])
        late = interval([row.late_accuracy for row in rows])
        gap = "–" if name == BASE else paired(rows, modes[BASE]).text()
        lines.append(f"| {name} | {final.text()} | {late.text()} | {gap} | {len(rows)} |")
    return "\n".join(lines)


def mismatch_table(modes: Mapping[str, Sequence[Row]]) -> str:
    """The table of Δ, over all seeds."""
    lines = [
        "| mode | tokens with Δ ≠ 0 | trained tokens | mean abs(Δ) | largest abs(Δ) |",
        "|---|---|---|---|---|",
    ]
    for name, rows in modes.items():
        tokens = sum(row.tokens for row in rows)
        different = sum(row.different for row in rows)
        mean = sum(row.mean_abs * row.tokens for row in rows) / tokens
        largest = max(row.max_abs for row in rows)
        lines.append(f"| {name} | {different:,} | {tokens:,} | {mean:.2g} | {largest:.2g} |")
    return "\n".join(lines)


def time_table(modes: Mapping[str, Sequence[Row]]) -> str:
    """The table of CPU times: medians over the seeds, with the lowest and highest."""
    lines = [
        "| mode | CPU s per step | training | the rest | step / raw |",
        "|---|---|---|---|---|",
    ]
    base = {row.seed: row.cpu_step for row in modes[BASE]}
    for name, rows in modes.items():
        step = spread([row.cpu_step for row in rows])
        training = spread([row.cpu_training for row in rows])
        rest = spread([row.cpu_rest for row in rows])
        # Seed by seed, because the load of the machine changed between seeds.
        ratio = spread([row.cpu_step / base[row.seed] for row in rows if row.seed in base])
        lines.append(f"| {name} | {step} | {training} | {rest} | {ratio} |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """The median, and the lowest and highest value, as 0.41 [0.40, 0.45]."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def tables(rows: Sequence[Row]) -> str:
    """Everything between the marks of the page."""
    parts = []
    for name, modes in by_scenario(rows).items():
        parts.append(f"**{name}**")
        parts.append(accuracy_table(modes))
        parts.append(mismatch_table(modes))
        parts.append(time_table(modes))
    return "\n\n".join(parts)


def main() -> None:
    """Replaces the text between the marks."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    text = tables(read_rows(RESULTS, Row))
    PAGE.write_text(f"{before}{START}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
