"""The tasks of the whole-step contenders; also imported outside this project's environment."""

import argparse
import json
import random
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_GRAD_NORM = 1.0
ROWS_SEED = 0
"""Of the order of the prompts, the same for all contenders."""
NUMBER = re.compile(r"-?\d+")
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""What a second is: of the wall clock, or of the processor, which what else the machine does hardly
changes."""


def exact_match(text: str, label: str) -> float:
    """1 where the completion is the label."""
    return float(text == label)


def last_number(text: str, label: str) -> float:
    """1 where the last number of the completion is the label."""
    numbers = NUMBER.findall(text)
    return float(bool(numbers) and numbers[-1] == label)


def reward(args: Any, sample: Any) -> float:
    """`last_number` as the reward of train.py."""
    return last_number(sample.response, sample.label)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on, and how much of it a step has."""

    data: str
    """Directory of the task below data/, with checkpoint/."""
    rows: str
    """JSONL file of prompts and labels below it."""
    prompts: int
    """Prompts per step."""
    group: int
    """Completions per prompt."""
    max_new_tokens: int
    """Longest completion."""
    micro_batch: int
    """Completions of one forward and backward."""
    learning_rate: float
    score: Callable[[str, str], float]
    """Reward of a completion's text, by its label."""
    our_reward: str
    """The flags that make train.py reward the same."""
    warm_up: int
    """First steps of a run, which are not counted: imports, caches and allocators are still warming
    up."""

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes of a step."""
        return self.prompts * self.group // self.micro_batch


TASKS = {
    "sort_digits": Task(
        data="sort_digits",
        rows="train.jsonl",
        prompts=32,
        group=8,
        max_new_tokens=12,  # ten digits, the end of sequence and one to spare
        micro_batch=256,
        learning_rate=1e-4,
        score=exact_match,
        our_reward="--rm-type exact_match",
        warm_up=5,
    ),
    "smollm2": Task(
        data="smollm2",
        rows="prompts/train.jsonl",
        prompts=8,
        group=8,
        max_new_tokens=64,
        micro_batch=16,
        learning_rate=1e-6,  # so small that responses keep their length over a run of few steps
        score=last_number,
        our_reward="--custom-rm-path benchmarks/peers/task.py:reward",
        warm_up=0,  # a step takes a minute: the first is as long as the second
    ),
}


class StepClock:
    """Time of whole steps, and of named parts inside them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.steps: list[float] = []
        self.parts: defaultdict[str, list[float]] = defaultdict(list)
        self.rewards: list[float] = []
        self.lengths: list[float] = []
        self._clock = clock
        self._step_start = clock()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times one part of the present step."""
        start = self._clock()
        yield
        self.parts[name].append(self._clock() - start)

    def start(self) -> None:
        """Begins the first step."""
        self._step_start = self._clock()

    def scored(self, rewards: Sequence[float], lengths: Sequence[int]) -> None:
        """Takes the rewards and lengths of the completions of a step."""
        self.rewards.append(statistics.mean(rewards))
        self.lengths.append(statistics.mean(lengths))

    def end_step(self) -> None:
        """Ends a step; the next one begins."""
        now = self._clock()
        self.steps.append(now - self._step_start)
        self._step_start = now


def prepare_rows(task: Task, data: Path, tokenizer: Any, out: Path) -> None:
    """Writes the task's prompts as text, in the order in which all contenders take them."""
    rows = [json.loads(line) for line in (data / task.rows).read_text().splitlines()]
    random.Random(ROWS_SEED).shuffle(rows)
    written = []
    for row in rows:
        prompt = row["prompt"]
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True
            )
        written.append(json.dumps({"prompt": prompt, "label": row["label"]}) + "\n")
    out.write_text("".join(written))


def read_rows(path: Path) -> list[dict[str, str]]:
    """The prompt and label of each row of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_options(description: str, *switches: str) -> argparse.Namespace:
    """The command line that the benchmark starts a contender with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--task", choices=TASKS, required=True, help="what is trained on")
    parser.add_argument("--checkpoint", type=Path, required=True, help="directory of the model")
    parser.add_argument("--rows", type=Path, required=True, help="JSONL file of prompts and labels")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the times")
    parser.add_argument("--threads", type=int, required=True, help="CPU threads")
    parser.add_argument("--steps", type=int, required=True, help="training steps")
    parser.add_argument("--clock", choices=CLOCKS, required=True, help="what a second is")
    for switch in switches:
        parser.add_argument(switch, action="store_true")
    return parser.parse_args()


def write_times(out: Path, clock: StepClock, versions: dict[str, str]) -> None:
    """Hands the times of a run to the benchmark."""
    found = {
        "steps": clock.steps,
        "parts": dict(clock.parts),
        "rewards": clock.rewards,
        "lengths": clock.lengths,
        "versions": versions,
    }
    out.write_text(json.dumps(found))
