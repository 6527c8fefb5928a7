"""Results of a run, read from its metrics.jsonl: one row of results.csv."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from examples.tables import read_rows
from slime_tis.atomic_files import METRICS

ACCURACY, REWARD = "eval/accuracy", "rollout/raw_reward"
LAST_QUARTER = 0.75
"""Evaluations after this share of the steps count as late."""
K3, STALENESS = "train/mismatch_k3_kl", "rollout/weight_staleness"
EIGHTHS = 8
"""Points of the curve of rewards."""
MEANS = {
    "mismatch_kl": "train/mismatch_kl",
    "mismatch_k3_kl": K3,
    "ess": "train/mis_eff_sample_size",
    "kept_fraction": "train/gradient_kept_fraction",
    "reward": REWARD,
    "update_received": "rollout/update_received",
}
"""Columns that are means of a metric over all steps; empty where it was not logged."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. Accuracy is the training policy's greedy accuracy on held-out prompts."""

    scenario: str
    correction: str
    seed: int
    final_accuracy: float
    late_accuracy: float
    """Mean of the evaluations in the last quarter of the steps."""
    accuracy_area: float
    """Mean of the accuracy over the steps: the area under its curve, by the trapezoid rule, over
    their number."""
    collapse_step: int | None
    """First evaluation below half of the highest accuracy until then; None without a collapse."""
    mismatch_kl: float | None
    mismatch_k3_kl: float | None
    ess: float | None
    """Effective sample size of the weights, a share of 1; None where there are no weights."""
    kept_fraction: float | None
    reward: float | None
    update_received: float | None
    """Share of each update that arrived in the engine's precision; None where nothing is
    rounded."""
    steps: int
    seconds: float
    """Wall time of the process; the machine had other load."""
    accuracy: tuple[tuple[int, float], ...]
    """The curve: (step, accuracy) of every evaluation."""
    rewards: tuple[tuple[int, float], ...]
    """The curve of the samples' mean reward, over each eighth of the run: (its last step, mean)."""
    k3_by_staleness: tuple[tuple[int, float], ...]
    """(optimizer steps between the weights that sampled and those trained, median k3 KL of such
    steps)."""
    flags: str
    date: str
    machine: str
    versions: str

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies the row."""
        return self.scenario, self.correction, self.seed


def summarize(rows: Sequence[Mapping[str, Any]], **facts: Any) -> Row:
    """The row of a run.

    Args:
        rows: its metrics.jsonl.
        facts: the columns that are not in there.
    """
    curve = tuple((row["step"], row[ACCURACY]) for row in rows if ACCURACY in row)
    means: dict[str, Any] = {
        name: mean_of([row.get(metric) for row in rows]) for name, metric in MEANS.items()
    }
    last = rows[-1]["step"]
    return Row(
        **means,
        **facts,
        final_accuracy=curve[-1][1],
        late_accuracy=late_accuracy(curve),
        accuracy_area=area(curve),
        collapse_step=collapse_step(curve),
        steps=last,
        accuracy=curve,
        rewards=by_eighths(rows),
        k3_by_staleness=by_staleness(rows),
    )


def late_accuracy(curve: Sequence[tuple[int, float]]) -> float:
    """The mean accuracy of the evaluations in the last quarter of the steps."""
    last_step, _ = curve[-1]
    return statistics.fmean(value for step, value in curve if step > LAST_QUARTER * last_step)


def by_staleness(rows: Iterable[Mapping[str, Any]]) -> tuple[tuple[int, float], ...]:
    """The median mismatch of the steps of each staleness."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row.get(STALENESS) is not None and row.get(K3) is not None:
            found.setdefault(round(row[STALENESS]), []).append(row[K3])
    return tuple(
        (staleness, statistics.median(values)) for staleness, values in sorted(found.items())
    )


def by_eighths(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, float], ...]:
    """The mean reward over each eighth of the steps; of fewer than eight steps each one's."""
    rewards = [(row["step"], row[REWARD]) for row in rows if row.get(REWARD) is not None]
    ends = sorted({round(len(rewards) * part / EIGHTHS) for part in range(EIGHTHS + 1)})
    return tuple(
        (rewards[end - 1][0], statistics.fmean(reward for _, reward in rewards[start:end]))
        for start, end in pairwise(ends)
    )


def area(curve: Sequence[tuple[int, float]]) -> float:
    """Mean height of a piecewise linear curve."""
    total = sum(
        (after - before) * (left + right) / 2 for (before, left), (after, right) in pairwise(curve)
    )
    return total / (curve[-1][0] - curve[0][0])


def collapse_step(curve: Sequence[tuple[int, float]]) -> int | None:
    """The first step at which less than half of the highest accuracy so far is left."""
    highest = accumulate((accuracy for _, accuracy in curve), max)
    return next(
        (
            step
            for (step, accuracy), best in zip(curve, highest, strict=True)
            if accuracy < best / 2
        ),
        None,
    )


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are not None; None without such values."""
    there = [value for value in values if value is not None]
    return statistics.fmean(there) if there else None


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return [
        json.loads(line) for line in (directory / METRICS).read_text(encoding="utf-8").splitlines()
    ]


def read_table(path: Path) -> dict[tuple[str, str, int], Row]:
    """The rows of a results.csv by run; none where there is no such file.

    Raises:
        ValueError: it has other columns.
    """
    return {row.key: row for row in read_rows(path, Row)} if path.exists() else {}
