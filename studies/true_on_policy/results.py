"""Results of the study: a row per run, and their means over seeds."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from studies.collapse.results import ACCURACY, by_eighths, late_accuracy

RESULTS = Path(__file__).with_name("results.csv")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. Accuracy is the training policy's greedy accuracy on held-out prompts."""

    scenario: str
    correction: str
    seed: int
    final_accuracy: float
    late_accuracy: float
    """Mean of the evaluations in the last quarter of the steps."""
    tokens: int
    """Trained tokens of all steps."""
    different: int
    """Of these, tokens with Δ ≠ 0."""
    mean_abs: float
    """Mean abs(Δ) over all trained tokens, nats."""
    max_abs: float
    """Largest abs(Δ), nats."""
    cpu_step: float
    """Median CPU time of a step without an evaluation, seconds."""
    cpu_training: float
    """Its part in `Learner.train`: log-probs, forward, backward and optimizer."""
    cpu_rest: float
    """Median of the other part: sampling, rewards, the update of the engine and reports."""
    steps: int
    accuracy: tuple[tuple[int, float], ...]
    """The curve: (step, accuracy) of every evaluation."""
    rewards: tuple[tuple[int, float], ...]
    """The samples' mean reward over each eighth of the run: (its last step, mean)."""
    flags: str
    date: str
    machine: str
    versions: str

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies the row."""
        return self.scenario, self.correction, self.seed


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    """Medians over the steps of a run, seconds."""

    step: float
    training: float
    rest: float


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines that `measured` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summarize(
    metrics: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], **facts: Any
) -> Row:
    """The row of a run.

    Args:
        metrics: Its metrics.jsonl.
        steps: The lines of `measured`.
        facts: The columns that are in neither.
    """
    curve = []
    for row in metrics:
        if ACCURACY in row:
            curve.append((row["step"], row[ACCURACY]))
    tokens = sum(step["tokens"] for step in steps)
    times = cpu_times(steps, {step for step, _ in curve})
    return Row(
        final_accuracy=curve[-1][1],
        late_accuracy=late_accuracy(curve),
        tokens=tokens,
        different=sum(step["different"] for step in steps),
        mean_abs=sum(step["sum_abs"] for step in steps) / tokens,
        max_abs=max(step["max_abs"] for step in steps),
        cpu_step=times.step,
        cpu_training=times.training,
        cpu_rest=times.rest,
        steps=steps[-1]["step"],
        accuracy=tuple(curve),
        rewards=by_eighths(metrics),
        **facts,
    )


def cpu_times(steps: Sequence[Mapping[str, Any]], evaluated: set[int]) -> CpuTimes:
    """Median CPU times of the steps, in seconds.

    The first step and steps that follow an evaluation are left out: the time before their training
    contains the start of the program, or the evaluation.
    """
    whole: list[float] = []
    training: list[float] = []
    rest: list[float] = []
    for before, step in pairwise(steps):
        if before["step"] in evaluated:
            continue
        whole.append(step["cpu_after"] - before["cpu_after"])
        training.append(step["cpu_after"] - step["cpu_before"])
        rest.append(step["cpu_before"] - before["cpu_after"])
    return CpuTimes(
        step=statistics.median(whole),
        training=statistics.median(training),
        rest=statistics.median(rest),
    )
