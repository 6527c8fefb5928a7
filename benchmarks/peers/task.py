"""The task that all whole-step contenders train on, for those that run outside this project's environment."""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROMPTS = 32
"""Prompts per step."""

GROUP = 8
"""Completions per prompt."""

MAX_NEW_TOKENS = 12
"""Longest completion: ten digits, the end of sequence and one to spare."""

LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0


class StepClock:
    """Wall time of whole steps, and of named parts inside them."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.parts: defaultdict[str, list[float]] = defaultdict(list)
        self.rewards: list[float] = []
        self._step_start = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times one part of the present step."""
        start = time.perf_counter()
        yield
        self.parts[name].append(time.perf_counter() - start)

    def start(self) -> None:
        """Begins the first step."""
        self._step_start = time.perf_counter()

    def end_step(self) -> None:
        """Ends a step; the next one begins."""
        now = time.perf_counter()
        self.steps.append(now - self._step_start)
        self._step_start = now


def read_rows(data: Path, name: str) -> list[dict[str, str]]:
    """The prompt and label of each row of a JSONL file of the example."""
    return [json.loads(line) for line in (data / name).read_text().splitlines()]


def read_options(description: str, *switches: str) -> argparse.Namespace:
    """The command line that the benchmark starts a contender with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True, help="directory made by examples/sort_digits/prepare.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the times")
    parser.add_argument("--threads", type=int, required=True, help="CPU threads")
    parser.add_argument("--steps", type=int, required=True, help="training steps")
    for switch in switches:
        parser.add_argument(switch, action="store_true")
    return parser.parse_args()


def write_times(out: Path, clock: StepClock, versions: dict[str, str]) -> None:
    """Hands the times of a run to the benchmark."""
    found = {
        "steps": clock.steps,
        "parts": dict(clock.parts),
        "reward": statistics.mean(clock.rewards[-10:]),
        "versions": versions,
    }
    out.write_text(json.dumps(found))
