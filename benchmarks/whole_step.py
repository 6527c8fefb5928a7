"""Complete training steps of train.py, TRL's GRPOTrainer and hand-written loops on one task.

    python benchmarks/whole_step.py --threads 2 1 --rounds 3 --steps 40
    python benchmarks/whole_step.py --task smollm2 --threads 1 --rounds 3 --steps 1

Every round runs each contender once in a separate process, one after another (or --jobs at a time),
so that other load on the machine affects all contenders equally. A contender's time is the median
over rounds of its median step after warm-up; its memory is the median over rounds of its process's
peak resident set. Prints the medians, the ratios and the time of each part, and appends a row per
contender to whole_step.csv.
"""

import argparse
import csv
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from peers.task import CLOCKS, MAX_GRAD_NORM, TASKS, Task, prepare_rows
from provenance import commit, machine
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEERS = HERE / "peers"
TABLE = HERE / "whole_step.csv"
TRL_VENV = ROOT / ".venv-trl"
TRL_PACKAGES = ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets")
TORCH_PACKAGE = "torch==2.13.0"

TASK_FLAGS = "--input-key prompt --label-key label --weight-decay 0 --no-progress"

DECOUPLED = (
    "--use-tis --use-rs --rs-level geometric --rs-lower-bound 0.5 --rs-upper-bound 2.0"
    " --rs-veto-threshold 1e-4"
)

OURS = {
    "slime_tis, decoupled TIS + RS + veto": DECOUPLED,
    "slime_tis, the same in bf16": f"{DECOUPLED} --bf16 --rollout-precision bf16",
    "slime_tis, --use-rollout-logprobs": "--use-rollout-logprobs",
}
"""Our contenders, by name: the flags of the correction and of the precision."""

TRL = "TRL GRPOTrainer"
TRL_SCRIPT = "trl_grpo.py"
PEER_SCRIPTS = {
    TRL: (TRL_SCRIPT,),
    "TRL GRPOTrainer, gradient checkpointing": (TRL_SCRIPT, "--checkpointing"),
    "hand-written loop": ("hand_written.py",),
    "hand-written loop, own decode": ("hand_written.py", "--own-decode"),
}
"""The peers, by name: the script below peers/ and its switches."""

MEASURE = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[2:]).returncode
open(sys.argv[1], "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(status)
"""
"""Runs a command and writes its peak resident set in KiB. The kernel counts the parent's memory as
the child's, so that the parent must be small."""

COLUMNS = (
    "date",
    "machine",
    "cores",
    "threads",
    "commit",
    "contender",
    "rounds",
    "steps",
    "median_step_s",
    "times_trl",
    "reward_at_end",
    "python",
    "versions",
    "task",
    "clock",
    "response_len",
    "peak_memory_mb",
    "memory_times_trl",
    "fastest_step_s",
    "slowest_step_s",
)


@dataclass(kw_only=True)
class Run:
    """The steps of one process, in seconds."""

    steps: list[float]
    parts: dict[str, float]
    reward: float
    """Mean of the last ten steps."""
    response_len: float
    """Mean tokens of a completion after warm-up."""
    warm_up: int
    """Steps that are not counted."""
    versions: dict[str, str] = field(default_factory=dict)
    peak_memory: float = 0.0
    """Largest resident set, in MB (10⁶ bytes)."""

    @property
    def median(self) -> float:
        """The median step after warm-up."""
        return statistics.median(self.steps[self.warm_up :])


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setting of all contenders."""

    name: str
    """Of the task."""
    data: Path
    """Its directory."""
    threads: int
    steps: int
    clock: str

    @property
    def task(self) -> Task:
        """What is trained on."""
        return TASKS[self.name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="sort_digits", help="the task")
    parser.add_argument("--data", type=Path, help="directory of the task, data/TASK by default")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[2, 1], help="CPU threads, each measured alone"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of every contender")
    parser.add_argument("--steps", type=int, default=40, help="training steps of a run")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="how seconds are measured: cpu on a busy machine",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="contenders that run at the same time, for --clock cpu"
    )
    parser.add_argument("--only", nargs="+", help="contenders to run, by a part of their names")
    options = parser.parse_args()
    task = TASKS[options.task]
    if options.steps <= task.warm_up:
        parser.error(
            f"--steps is {options.steps} but the first {task.warm_up} are warm-up; raise it."
        )
    names = chosen([*OURS, *PEER_SCRIPTS], options.only)
    if not names:
        parser.error(
            f"--only {' '.join(options.only)} names none of {', '.join([*OURS, *PEER_SCRIPTS])}."
        )
    data = (options.data or ROOT / "data" / task.data).resolve()
    prepare_task(task, data)
    trl_python = prepare_trl() if any(script_of(name) == TRL_SCRIPT for name in names) else None
    for threads in options.threads:
        setting = Setting(
            name=options.task, data=data, threads=threads, steps=options.steps, clock=options.clock
        )
        runs: dict[str, list[Run]] = {name: [] for name in names}

        def run_once(turn: int, name: str, setting: Setting = setting) -> tuple[str, Run]:
            run = measure(name, setting, trl_python)
            shown = (
                f"{run.median:.3f} s, {run.peak_memory:.0f} MB, {run.response_len:.1f} tokens per"
                " response"
            )
            print(f"round {turn}: {name} {shown}", file=sys.stderr, flush=True)
            return name, run

        order = itertools.product(range(1, options.rounds + 1), names)
        with ThreadPoolExecutor(options.jobs) as pool:
            for name, run in pool.map(run_once, *zip(*order, strict=True)):
                runs[name].append(run)
        report(runs, setting)
        append_rows(runs, setting)


def chosen(names: Sequence[str], parts: Sequence[str] | None) -> list[str]:
    """Returns the names that contain one of the parts; all names without parts.

    A part that is a complete name selects only that name.
    """
    if not parts:
        return list(names)
    return [
        name
        for name in names
        if any(part == name if part in names else part in name for part in parts)
    ]


def script_of(name: str) -> str | None:
    """The script of a peer; None for ours."""
    return None if name in OURS else PEER_SCRIPTS[name][0]


def measure(name: str, setting: Setting, trl_python: Path | None) -> Run:
    """Runs one contender in a separate process."""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, rows = setting.data / "checkpoint", Path(scratch) / "rows.jsonl"
        prepare_rows(setting.task, setting.data, AutoTokenizer.from_pretrained(checkpoint), rows)
        if name in OURS:
            return measure_ours(OURS[name].split(), setting, rows, Path(scratch))
        out = Path(scratch) / "times.json"
        script, *switches = PEER_SCRIPTS[name]
        python = str(trl_python if script == TRL_SCRIPT else sys.executable)
        line = [
            python,
            str(PEERS / script),
            "--task",
            setting.name,
            "--checkpoint",
            str(checkpoint),
        ]
        line += ["--rows", str(rows), "--out", str(out), "--clock", setting.clock, *switches]
        memory = run_quietly(
            [*line, "--threads", str(setting.threads), "--steps", str(setting.steps)],
            setting.threads,
        )
        found = json.loads(out.read_text())
    warm_up = setting.task.warm_up
    return Run(
        steps=found["steps"],
        parts={
            part: statistics.median(seconds[warm_up:]) for part, seconds in found["parts"].items()
        },
        reward=statistics.mean(found["rewards"][-10:]),
        response_len=statistics.mean(found["lengths"][warm_up:]),
        warm_up=warm_up,
        versions=found["versions"],
        peak_memory=memory,
    )


def our_flags(task: Task) -> list[str]:
    """The task's flags of train.py, without its files."""
    line = [*TASK_FLAGS.split(), *task.our_reward.split(), "--lr", str(task.learning_rate)]
    line += ["--clip-grad", str(MAX_GRAD_NORM), "--rollout-batch-size", str(task.prompts)]
    line += [
        "--n-samples-per-prompt",
        str(task.group),
        "--rollout-max-response-len",
        str(task.max_new_tokens),
    ]
    return [*line, "--micro-batch-size", str(task.micro_batch)]


def measure_ours(correction: Sequence[str], setting: Setting, rows: Path, scratch: Path) -> Run:
    """Runs train.py and reads its steps from the metrics.jsonl that every run leaves."""
    line = [
        sys.executable,
        str(PEERS / "ours.py"),
        setting.clock,
        *our_flags(setting.task),
        *correction,
    ]
    line += ["--hf-checkpoint", str(setting.data / "checkpoint"), "--prompt-data", str(rows)]
    line += [
        "--num-rollout",
        str(setting.steps),
        "--num-threads",
        str(setting.threads),
        "--output-dir",
        str(scratch),
    ]
    memory = run_quietly(line, setting.threads)
    found = [json.loads(text) for text in (scratch / "metrics.jsonl").read_text().splitlines()]
    found = [row for row in found if "train/loss" in row]
    return replace(of_metrics(found, setting.task.warm_up), peak_memory=memory)


def of_metrics(rows: Sequence[dict[str, float]], warm_up: int) -> Run:
    """The steps of train.py's metrics."""
    names = {
        name for row in rows for name in row if name.startswith("perf/") and name.endswith("_time")
    }
    parts = {
        name.removeprefix("perf/").removesuffix("_time"): statistics.median(
            row.get(name, 0.0) for row in rows[warm_up:]
        )
        for name in names - {"perf/step_time"}
    }
    del parts["forward_backward"]  # forward and backward are separate parts
    return Run(
        steps=[row["perf/step_time"] for row in rows],
        parts=parts,
        reward=statistics.mean(row["rollout/raw_reward"] for row in rows[-10:]),
        response_len=statistics.mean(row["rollout/response_len"] for row in rows[warm_up:]),
        warm_up=warm_up,
        versions={
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "megatron-core")
        },
    )


def run_quietly(command: Sequence[str], threads: int) -> float:
    """Runs a command with this number of threads; if it fails, shows its output.

    Returns:
        The peak resident set of its process and its children, in MB.

    Raises:
        SystemExit: it failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), environment.get("PYTHONPATH")))
    )
    with tempfile.NamedTemporaryFile() as found:
        line = [sys.executable, "-c", MEASURE, found.name, *command]
        done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return int(found.read()) * 1024 / 1e6


def prepare_task(task: Task, data: Path) -> None:
    """Makes the checkpoint and the prompts of sort digits where they are not there yet.

    Raises:
        SystemExit: the real model is not there.
    """
    if task.data == "sort_digits":
        script = ROOT / "examples" / "sort_digits" / "prepare.py"
        subprocess.run([sys.executable, str(script), "--out", str(data)], check=True)
    elif not (data / task.rows).exists():
        sys.exit(f"{data / task.rows} is not there; make it with: make data-smollm2")


def prepare_trl() -> Path:
    """Returns the interpreter of TRL's environment, which is made if it is missing; torch first."""
    python = TRL_VENV / "bin" / "python"
    installed = TRL_VENV / ".installed"
    if not installed.exists():
        subprocess.run([sys.executable, "-m", "venv", str(TRL_VENV)], check=True)
        for packages in ((TORCH_PACKAGE,), TRL_PACKAGES):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        installed.touch()
    return python


def report(runs: dict[str, list[Run]], setting: Setting) -> None:
    """Prints medians, times by round, ratios, memory, and the contenders' profiles."""
    width, threads = max(map(len, runs)), setting.threads
    medians = {name: statistics.median(run.median for run in found) for name, found in runs.items()}
    memory = {
        name: statistics.median(run.peak_memory for run in found) for name, found in runs.items()
    }
    print(
        f"\n{setting.name}, {threads} thread{'s' * (threads > 1)}: {setting.clock} seconds per"
        " step, median of rounds (each round), relative to TRL"
    )
    for name, found in sorted(runs.items(), key=lambda item: medians[item[0]]):
        rounds = " ".join(f"{run.median:.3f}" for run in found)
        ratio = f"× {medians[name] / medians[TRL]:.2f}" if TRL in medians else ""
        print(f"  {name:<{width}}  {medians[name]:.3f}  ({rounds})  {ratio}")
    print("peak memory, MB, and tokens per response:")
    for name, found in runs.items():
        ratio = f"× {memory[name] / memory[TRL]:.2f}" if TRL in memory else ""
        tokens = statistics.mean(run.response_len for run in found)
        print(f"  {name:<{width}}  {memory[name]:.0f}  {ratio}  {tokens:.1f}")
    print("parts, ms:")
    for name, found in runs.items():
        parts = {
            part: statistics.median(run.parts[part] for run in found) for part in found[0].parts
        }
        if not parts:
            continue
        rest = medians[name] - sum(parts.values())
        shown = [
            f"{part} {seconds * 1e3:.1f}"
            for part, seconds in sorted(parts.items(), key=lambda item: -item[1])
        ]
        print(f"  {name:<{width}}  {', '.join(shown)}, rest {rest * 1e3:.1f}")


def append_rows(runs: dict[str, list[Run]], setting: Setting) -> None:
    """Appends one row per contender to whole_step.csv, with date, machine and versions."""
    medians = {name: statistics.median(run.median for run in found) for name, found in runs.items()}
    memory = {
        name: statistics.median(run.peak_memory for run in found) for name, found in runs.items()
    }
    is_new = not TABLE.exists()
    with open(TABLE, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for name, found in runs.items():
            writer.writerow(
                {
                    "date": datetime.date.today().isoformat(),
                    "machine": machine(),
                    "cores": os.cpu_count(),
                    "threads": setting.threads,
                    "commit": commit(),
                    "contender": name,
                    "rounds": len(found),
                    "steps": setting.steps,
                    "median_step_s": f"{medians[name]:.4f}",
                    "times_trl": f"{medians[name] / medians[TRL]:.3f}" if TRL in medians else "",
                    "reward_at_end": f"{statistics.mean(run.reward for run in found):.3f}",
                    "python": platform.python_version(),
                    "versions": " ".join(
                        f"{package}=={version}" for package, version in found[0].versions.items()
                    ),
                    "task": setting.name,
                    "clock": setting.clock,
                    "response_len": f"{statistics.mean(run.response_len for run in found):.1f}",
                    "peak_memory_mb": f"{memory[name]:.0f}",
                    "memory_times_trl": f"{memory[name] / memory[TRL]:.3f}"
                    if TRL in memory
                    else "",
                    "fastest_step_s": f"{min(run.median for run in found):.4f}",
                    "slowest_step_s": f"{max(run.median for run in found):.4f}",
                }
            )


if __name__ == "__main__":
    main()
