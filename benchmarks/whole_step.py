"""Whole training steps of train.py, of TRL's GRPOTrainer and of hand-written loops, on the same task.

    python benchmarks/whole_step.py --threads 2 1 --rounds 3 --steps 40

Every round runs each contender once, in a process of its own, one after another, so that what else the machine does
falls on all alike. A contender's time is the median over rounds of its median step, the first steps left out. Prints
the medians, the ratios and where our time goes, and appends a row per contender to whole_step.csv.
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
from dataclasses import dataclass, field
from pathlib import Path

from provenance import commit, machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEERS = HERE / "peers"
TABLE = HERE / "whole_step.csv"
TRL_VENV = ROOT / ".venv-trl"
TRL_PACKAGES = ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets")
TORCH_PACKAGE = "torch==2.13.0"
WARM_UP = 5
"""First steps of a run that are left out: imports, caches and allocators are still warming."""

TASK_FLAGS = (
    "--input-key prompt --label-key label --rm-type exact_match --rollout-batch-size 32 --n-samples-per-prompt 8 "
    "--rollout-max-response-len 12 --rollout-shuffle --lr 1e-4 --weight-decay 0 --clip-grad 1.0 --no-progress"
)

OURS = {
    "slime_tis, decoupled TIS + RS + veto": (
        "--use-tis --use-rs --rs-level geometric --rs-lower-bound 0.5 --rs-upper-bound 2.0 --rs-veto-threshold 1e-4"
    ),
    "slime_tis, --use-rollout-logprobs": "--use-rollout-logprobs",
}
"""What we measure of ours, by name: the flags of the correction."""

TRL = "TRL GRPOTrainer"
PEER_SCRIPTS = {
    TRL: ("trl_grpo.py",),
    "hand-written loop": ("hand_written.py",),
    "hand-written loop, own decode": ("hand_written.py", "--own-decode"),
}
"""The others, by name: the script below peers/ and its switches."""

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
)


@dataclass(kw_only=True)
class Run:
    """The steps of one process, in seconds."""

    steps: list[float]
    parts: dict[str, float]
    reward: float
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The median step after warm-up."""
        return statistics.median(self.steps[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "sort_digits", help="directory of the example")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1], help="CPU threads, each measured alone")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every contender")
    parser.add_argument("--steps", type=int, default=40, help="training steps of a run")
    parser.add_argument("--only", nargs="+", help="contenders to run, by a part of their names")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps is {options.steps} but the first {WARM_UP} are left out; ask for more.")
    names = [name for name in (*OURS, *PEER_SCRIPTS) if not options.only or any(p in name for p in options.only)]
    prepare_example(options.data)
    trl_python = prepare_trl() if TRL in names else None
    for threads in options.threads:
        runs: dict[str, list[Run]] = {name: [] for name in names}
        for turn, name in itertools.product(range(1, options.rounds + 1), names):
            runs[name].append(measure(name, options.data, threads, options.steps, trl_python))
            print(f"round {turn}: {name} {runs[name][-1].median:.3f} s", file=sys.stderr, flush=True)
        report(runs, threads)
        append_rows(runs, threads, options.steps)


def measure(name: str, data: Path, threads: int, steps: int, trl_python: Path | None) -> Run:
    """Runs one contender in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        if name in OURS:
            return measure_ours(OURS[name].split(), data, threads, steps, Path(scratch))
        out = Path(scratch) / "times.json"
        script, *switches = PEER_SCRIPTS[name]
        python = str(trl_python if name == TRL else sys.executable)
        line = [python, str(PEERS / script), "--data", str(data), "--out", str(out), *switches]
        run_quietly([*line, "--threads", str(threads), "--steps", str(steps)], threads)
        found = json.loads(out.read_text())
    parts = {part: statistics.median(seconds[WARM_UP:]) for part, seconds in found["parts"].items()}
    return Run(steps=found["steps"], parts=parts, reward=found["reward"], versions=found["versions"])


def measure_ours(correction: Sequence[str], data: Path, threads: int, steps: int, scratch: Path) -> Run:
    """Runs train.py and reads its steps from the metrics.jsonl that every run leaves."""
    line = [sys.executable, str(ROOT / "train.py"), *TASK_FLAGS.split(), *correction]
    line += ["--hf-checkpoint", str(data / "checkpoint"), "--prompt-data", str(data / "train.jsonl")]
    line += ["--num-rollout", str(steps), "--num-threads", str(threads), "--output-dir", str(scratch)]
    run_quietly(line, threads)
    rows = [json.loads(text) for text in (scratch / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "train/loss" in row]
    names = {name for row in rows for name in row if name.startswith("perf/") and name.endswith("_time")}
    parts = {
        name.removeprefix("perf/").removesuffix("_time"): statistics.median(
            row.get(name, 0.0) for row in rows[WARM_UP:]
        )
        for name in names - {"perf/step_time"}
    }
    del parts["forward_backward"]  # the forward and the backward are there each
    return Run(
        steps=[row["perf/step_time"] for row in rows],
        parts=parts,
        reward=statistics.mean(row["rollout/raw_reward"] for row in rows[-10:]),
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers", "megatron-core")},
    )


def run_quietly(command: Sequence[str], threads: int) -> None:
    """Runs a command with that many threads; where it fails, shows what it printed.

    Raises:
        SystemExit: it failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def prepare_example(data: Path) -> None:
    """Makes the example's checkpoint and prompts where they are not there yet."""
    script = ROOT / "examples" / "sort_digits" / "prepare.py"
    subprocess.run([sys.executable, str(script), "--out", str(data)], check=True)


def prepare_trl() -> Path:
    """The interpreter of TRL's own environment, made where it is not there yet; torch goes first."""
    python = TRL_VENV / "bin" / "python"
    installed = TRL_VENV / ".installed"
    if not installed.exists():
        subprocess.run([sys.executable, "-m", "venv", str(TRL_VENV)], check=True)
        for packages in ((TORCH_PACKAGE,), TRL_PACKAGES):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        installed.touch()
    return python


def report(runs: dict[str, list[Run]], threads: int) -> None:
    """Prints medians, each round's time, ratios, and where the time of each contender goes."""
    width = max(map(len, runs))
    medians = {name: statistics.median(run.median for run in found) for name, found in runs.items()}
    print(f"\n{threads} thread{'s' * (threads > 1)}: seconds a step, median of rounds (each round), relative to TRL")
    for name, found in sorted(runs.items(), key=lambda item: medians[item[0]]):
        rounds = " ".join(f"{run.median:.3f}" for run in found)
        ratio = f"× {medians[name] / medians[TRL]:.2f}" if TRL in medians else ""
        print(f"  {name:<{width}}  {medians[name]:.3f}  ({rounds})  {ratio}")
    print("parts, ms:")
    for name, found in runs.items():
        parts = {part: statistics.median(run.parts[part] for run in found) for part in found[0].parts}
        if not parts:
            continue
        rest = medians[name] - sum(parts.values())
        shown = [f"{part} {seconds * 1e3:.1f}" for part, seconds in sorted(parts.items(), key=lambda item: -item[1])]
        print(f"  {name:<{width}}  {', '.join(shown)}, rest {rest * 1e3:.1f}")


def append_rows(runs: dict[str, list[Run]], threads: int, steps: int) -> None:
    """Appends one row per contender to whole_step.csv, with date, machine and versions."""
    medians = {name: statistics.median(run.median for run in found) for name, found in runs.items()}
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
                    "threads": threads,
                    "commit": commit(),
                    "contender": name,
                    "rounds": len(found),
                    "steps": steps,
                    "median_step_s": f"{medians[name]:.4f}",
                    "times_trl": f"{medians[name] / medians[TRL]:.3f}" if TRL in medians else "",
                    "reward_at_end": f"{statistics.mean(run.reward for run in found):.3f}",
                    "python": platform.python_version(),
                    "versions": " ".join(f"{package}=={version}" for package, version in found[0].versions.items()),
                }
            )


if __name__ == "__main__":
    main()
