"""Trains all weights, and LoRA adapters of rank 8, on the same number of samples.

    python -m studies.lora.run                             # sort digits, three seeds
    python -m studies.lora.run --task smollm2              # memory and time of SmolLM2-135M
    python -m studies.lora.run --task smollm2-accuracy     # accuracy of SmolLM2-135M, three seeds

SmolLM2 is trained and sampled in bf16 where the processor has instructions for it, else in fp32;
--precision sets another one, or both. Runs are made one after another. Each appends a row to
results.csv: accuracy on held-out prompts, CPU time, and the peak resident set of the process.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.provenance import commit, machine
from examples.tables import read_rows, write_rows
from slime_tis.trainer.cli.bf16_if_fast import bf16_unit

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results.csv"
RANK = 8
PRECISIONS = {
    "fp32": "--rollout-precision fp32",
    "bf16": "--bf16 --rollout-precision bf16",
}
"""Flags of train.py for the precision of training and of the in-process engine."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Runs that differ in rank, learning rate and seed."""

    flags: str
    steps: int
    seeds: tuple[int, ...]
    cases: tuple[tuple[int | None, float], ...]
    """Rank of the adapters, None for all weights, and learning rate."""
    measures_time: bool = True
    """Whether a second run of one step gives the time that the start and the evaluations take."""
    has_real_model: bool = False
    """Whether the model is large enough to be faster in bf16."""


SORT_DIGITS = (
    "--hf-checkpoint data/sort_digits/checkpoint --prompt-data data/sort_digits/train.jsonl"
    " --input-key prompt --label-key label --rollout-shuffle --rm-type exact_match"
    " --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 12"
    " --eval-prompt-data held_out data/sort_digits/eval.jsonl --eval-interval 60"
)
SMOLLM2 = (
    "--hf-checkpoint data/smollm2/checkpoint --prompt-data data/smollm2/prompts/train.jsonl"
    " --input-key prompt --label-key label --apply-chat-template --rollout-shuffle --custom-rm-path"
    " examples/reasoning_gym/reward.py:correct --rollout-batch-size 4"
    " --rollout-max-response-len 12 --micro-batch-size 4"
)
SMOLLM2_ACCURACY = (
    f"{SMOLLM2} --n-samples-per-prompt 8 --lr-warmup-iters 2 --lr-decay-style constant"
    " --eval-prompt-data held_out data/smollm2/prompts/eval.jsonl --eval-interval 12"
)
COMMON = "--weight-decay 0 --num-threads 1 --no-progress --check-engines off"
TASKS = {
    "sort_digits": Task(
        flags=SORT_DIGITS,
        steps=60,
        seeds=(0, 1, 2),
        cases=((None, 1.5e-4), (RANK, 3e-4), (RANK, 1e-3), (RANK, 3e-3)),
    ),
    "smollm2": Task(
        flags=f"{SMOLLM2} --n-samples-per-prompt 4",
        steps=2,
        seeds=(0,),
        cases=((None, 2e-5), (RANK, 2e-4)),
        has_real_model=True,
    ),
    "smollm2-accuracy": Task(
        flags=SMOLLM2_ACCURACY,
        steps=12,
        seeds=(0, 1, 2),
        cases=((None, 2e-5), (RANK, 2e-4), (RANK, 5e-4), (RANK, 1e-3)),
        measures_time=False,
        has_real_model=True,
    ),
}


@dataclass(frozen=True)
class Row:
    """One run."""

    task: str
    rank: int | None
    lr: float
    seed: int
    precision: str
    """Of training and of the engine, a key of `PRECISIONS`."""
    accuracy_before: float | None
    accuracy: float | None
    """Share of correct answers to held-out prompts after the last step."""
    step_cpu_s: float | None
    """CPU time of a step, rollout and weight update included, without the time of the first step
    and of the start, seconds; None if it was not measured."""
    run_cpu_s: float | None
    """CPU time of the process with start and evaluations, seconds; None in early rows."""
    peak_mib: float
    """Largest resident set of the process."""
    machine: str
    commit: str

    @property
    def key(self) -> tuple[str, int | None, float, int, str]:
        """What distinguishes the runs of the table."""
        return (self.task, self.rank, self.lr, self.seed, self.precision)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the runs that are missing in results.csv."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", choices=list(TASKS), default="sort_digits")
    parser.add_argument("--precision", choices=list(PRECISIONS), nargs="+")
    options = parser.parse_args(argv)
    rows = []
    if RESULTS.exists():
        rows = read_rows(RESULTS, Row)
    done = {row.key for row in rows}
    task = TASKS[options.task]
    precisions = options.precision or [usual_precision(task)]
    for seed, (rank, lr), precision in product(task.seeds, task.cases, precisions):
        if (options.task, rank, lr, seed, precision) in done:
            continue
        row = run(options.task, rank, lr, seed, precision)
        rows.append(row)
        done.add(row.key)
        write_rows(RESULTS, Row, rows)
        print(row, flush=True)
    return 0


def usual_precision(task: Task) -> str:
    """Returns bf16 for a real model if this processor has instructions for it, else fp32."""
    if task.has_real_model and bf16_unit() is not None:
        return "bf16"
    return "fp32"


def run(name: str, rank: int | None, lr: float, seed: int, precision: str) -> Row:
    """Makes a run of a task, and if its time is measured, one of a single step to subtract."""
    task = TASKS[name]
    words = task_words(task, rank, lr, seed, precision)
    rows, usage = train(words, task.steps)
    step_cpu_s = None
    if task.measures_time:
        _, first = train(words, 1)
        step_cpu_s = (cpu_seconds(usage) - cpu_seconds(first)) / (task.steps - 1)
    accuracy_before = None
    accuracy = None
    accuracies = [row["eval/held_out"] for row in rows if "eval/held_out" in row]
    if accuracies:
        accuracy_before = accuracies[0]
        accuracy = accuracies[-1]
    return Row(
        task=name,
        rank=rank,
        lr=lr,
        seed=seed,
        precision=precision,
        accuracy_before=accuracy_before,
        accuracy=accuracy,
        step_cpu_s=step_cpu_s,
        run_cpu_s=cpu_seconds(usage),
        peak_mib=usage.ru_maxrss / 1024,
        machine=machine(),
        commit=commit(),
    )


def cpu_seconds(usage: resource.struct_rusage) -> float:
    """Returns the CPU time of a process."""
    return usage.ru_utime + usage.ru_stime


def task_words(task: Task, rank: int | None, lr: float, seed: int, precision: str) -> list[str]:
    """Returns the flags of train.py without the number of steps."""
    words = [*task.flags.split(), *COMMON.split(), *PRECISIONS[precision].split()]
    words += ["--lr", str(lr), "--seed", str(seed), "--rollout-seed", str(seed)]
    if rank is not None:
        words += ["--lora-rank", str(rank)]
    return words


def train(
    words: Sequence[str], steps: int
) -> tuple[list[dict[str, float]], resource.struct_rusage]:
    """Trains in a separate process; returns the metrics, and the resources that it used."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "train.py", *words, "--num-rollout", str(steps)]
        command += ["--output-dir", directory]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(Path(directory) / "log.txt", "w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise RuntimeError((Path(directory) / "log.txt").read_text()[-2000:])
        lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], usage


if __name__ == "__main__":
    sys.exit(main())
