"""Steps of train.py on a GPU in bf16, with correction, one process and the local rollout engine.

    python -m benchmarks.gpu_steps [--model toy|smollm2] [--steps N] [--device cpu]

A first run saves a checkpoint, and a second run resumes from it. All metrics must be finite;
otherwise the exit status is 1. Appends rows to gpu_steps.csv: median seconds per step without
warm-up, and the peak of torch's memory on the GPU.
"""

import argparse
import csv
import importlib.metadata
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import CARRIED, commit
from slime_tis.main import train

ROOT = Path(__file__).resolve().parents[1]
ROWS = Path(__file__).with_suffix(".csv")
WARM_UP = 3
"""First steps, which compile kernels; the median excludes them if there are more steps."""
COMMON = (
    "--input-key prompt --label-key label --rm-type exact_match --rollout-shuffle --bf16"
    " --rollout-precision bf16 --seed 0 --lr 1e-5 --weight-decay 0 --use-tis --tis-upper-bound 2.0"
    " --use-rs --rs-level geometric --rs-lower-bound 0.8 --rs-upper-bound 1.25 --rs-veto-threshold"
    " 1e-4 --no-progress --no-use-tensorboard"
)
MODELS = {
    "toy": (
        "--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 12"
        " --micro-batch-size 64"
    ),
    "smollm2": (
        "--rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 64"
        " --micro-batch-size 32 --apply-chat-template"
    ),
}
PLAIN = "from the start"
RESUMED = "resumed"
CONTENDERS = {
    PLAIN: "",
    RESUMED: "--load {first}/checkpoints",
}
SAVES = "--save {first}/checkpoints --save-interval 1000"
"""The first contender saves a checkpoint, from which the last one resumes; only with the toy
model."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One contender's process."""

    rows: list[dict[str, Any]]
    """Of metrics.jsonl, one for each step."""
    peak_bytes: int
    """Of the GPU's memory; 0 on a CPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", choices=tuple(MODELS), default="toy", help="toy is the sort-digits example"
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="the example's directory, or the checkpoint's (default .gpu, data)",
    )
    parser.add_argument("--steps", type=int, default=12, help="steps of a contender")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the code out"
    )
    parser.add_argument(
        "--out", type=Path, default=ROWS, help="table to append to (default gpu_steps.csv)"
    )
    parser.add_argument("--peak", type=Path, help=argparse.SUPPRESS)
    options, flags = parser.parse_known_args()
    if options.peak is not None:
        sys.exit(train_here(flags, options.peak))
    if flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    if options.steps < 1:
        parser.error(f"--steps is {options.steps} but must be 1 or more.")
    if (options.device == "cuda") != torch.cuda.is_available():
        sys.exit(
            f"--device is {options.device} but train.py takes a GPU if and only if torch sees one."
        )
    if options.device == "cpu" and options.out == ROWS:
        sys.exit("--device cpu measures no GPU; name another table than gpu_steps.csv with --out.")
    with tempfile.TemporaryDirectory() as scratch:
        task = task_flags(options.model, options.data, Path(scratch))
        names = [name for name in CONTENDERS if name != RESUMED or options.model == "toy"]
        runs = {
            name: measure(name, task, options.steps, Path(scratch), saves=RESUMED in names)
            for name in names
        }
    append(options.out, [row(options, name, run) for name, run in runs.items()])
    problems = []
    for name, run in runs.items():
        problems += nonfinite_metrics(name, run)
    sys.exit("\n".join(problems) or 0)


def task_flags(model: str, data: Path | None, scratch: Path) -> list[str]:
    """Model and prompts."""
    if model == "toy":
        data = data or CARRIED / "sort_digits"
        found = [
            "--hf-checkpoint",
            str(data / "checkpoint"),
            "--prompt-data",
            str(data / "train.jsonl"),
        ]
    else:
        prompts = scratch / "prompts.jsonl"
        rows = [
            {
                "prompt": [
                    {"role": "user", "content": f"What is {a} plus {b}? Answer with a number."}
                ],
                "label": str(a + b),
            }
            for a in range(8)
            for b in range(8)
        ]
        prompts.write_text("".join(json.dumps(one) + "\n" for one in rows))
        checkpoint = data or ROOT / "data" / "smollm2" / "checkpoint"
        found = ["--hf-checkpoint", str(checkpoint), "--prompt-data", str(prompts)]
    return [*found, *COMMON.split(), *MODELS[model].split()]


def measure(name: str, task: list[str], steps: int, scratch: Path, *, saves: bool) -> Run:
    """Runs one contender.

    Raises:
        SystemExit: it failed; what it printed is shown.
    """
    output = scratch / str(list(CONTENDERS).index(name))
    output.mkdir()
    peak = output / "peak"
    flags = CONTENDERS[name] + (f" {SAVES}" if saves and name == PLAIN else "")
    rollouts = steps + 2 if name == RESUMED else steps
    own = [word.format(first=scratch / "0") for word in flags.split()]
    command = [sys.executable, "-m", "benchmarks.gpu_steps", "--peak", str(peak), *task, *own]
    command += ["--num-rollout", str(rollouts), "--output-dir", str(output / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(
            f"{name} ended with status"
            f" {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        )
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [found for found in map(json.loads, lines) if "train/loss" in found]
    return Run(rows=rows, peak_bytes=int(peak.read_text()))


def train_here(flags: list[str], peak: Path) -> int:
    """Trains in this process, and writes the most memory that it had on the GPU."""
    status = train(flags)
    peak.write_text(str(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0))
    return status


def nonfinite_metrics(name: str, run: Run) -> list[str]:
    """Returns one message for each metric of a run that is NaN or infinite."""
    messages = []
    for number, values in enumerate(run.rows, start=1):
        for metric, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                messages.append(f"{name}: {metric} of step {number} is {value}")
    return messages


def row(options: argparse.Namespace, name: str, run: Run) -> dict[str, Any]:
    """When, where, what, and how long."""
    counted = run.rows[min(WARM_UP, len(run.rows) - 1) :]

    def median(metric: str) -> float:
        return round(statistics.median(values.get(metric, 0.0) for values in counted), 5)

    found = {
        "date": date.today().isoformat(),
        "gpu_name": torch.cuda.get_device_name() if options.device == "cuda" else "none, on a CPU",
        "commit": commit(),
        "python": platform.python_version(),
        **{
            package: importlib.metadata.version(package)
            for package in ("torch", "transformers", "megatron-core")
        },
        "model": options.model,
        "contender": name,
        "steps": len(run.rows),
        "median_step_s": median("perf/step_time"),
        "generate_s": median("perf/generate_time"),
        "forward_backward_s": median("perf/forward_backward_time"),
        "peak_mib": round(run.peak_bytes / 2**20, 1),
        "first_loss": run.rows[0]["train/loss"],
        "first_grad_norm": run.rows[0]["train/grad_norm"],
        "mismatch_k3_kl": median("train/mismatch_k3_kl"),
        "raw_reward": round(run.rows[-1]["rollout/raw_reward"], 4),
    }
    print(found, flush=True)
    return found


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
