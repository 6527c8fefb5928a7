"""Everything that needs a GPU, in stages, on a machine without a network. `make gpu` runs it.

    python3 tools/gpu/run.py [--device cpu] [--stages engines train]

It uses its own interpreter, whose torch must see the GPU, and the wheels that `make gpu-wheels` put
into .gpu/. The wheels are installed into a temporary directory on PYTHONPATH, because the device
machine's Python is a virtual environment, and a second one on top would not see its packages.

Every stage runs in a separate process with a time limit; a failed stage does not stop the others.
Tables, the log and a summary go to $OUT, or to runs/gpu. Exit status: 0 if all stages passed, 1 if
a stage failed, 2 if nothing ran.

`--device cpu` is the rehearsal: the same stages on the CPU, smaller, with gloo instead of NCCL. Its
rows are marked in `gpu_name`.
"""

import argparse
import contextlib
import csv
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / ".gpu"
REHEARSAL = "none, rehearsal on a CPU"
PROBE = """
import importlib.metadata, json, platform, torch
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
names = "torch transformers safetensors numpy pytest hypothesis pytest-xdist".split()
names += ["megatron-core", "pydantic"]
versions = {name: version(name) for name in names}
print(json.dumps({"gpu": gpu, "python": platform.python_version(), "versions": versions}))
"""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One process."""

    name: str
    about: str
    limit: int
    """Seconds on a GPU; a rehearsal takes as long as it takes."""
    command: tuple[str, ...]
    """Arguments of the interpreter; {device} and {out} are filled in."""
    rehearsal: tuple[str, ...] = ()
    """More of them in a rehearsal."""
    environment: dict[str, str] = field(default_factory=dict)
    needs: Path | None = None
    """A required path; if it is missing, the stage is skipped, with a line in the summary."""
    parallel: bool = False
    """Whether pytest spreads it over processes."""


PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "{device}")
STAGES = (
    Stage(
        name="engines",
        about="training engine and local rollout engine against transformers on the CPU",
        limit=150,
        command=(*PYTEST, "tests/megatron/test_on_device.py"),
    ),
    Stage(
        name="train",
        about="train.py in bf16 on NCCL, with correction, and resumed",
        limit=150,
        command=(
            "-m",
            "benchmarks.gpu_steps",
            "--device",
            "{device}",
            "--out",
            "{out}/gpu_steps.csv",
        ),
        rehearsal=("--steps", "3"),
        needs=CARRIED / "sort_digits" / "complete.json",
    ),
    Stage(
        name="library",
        about="the library's tests with tensors on the GPU",
        limit=200,
        command=(
            *PYTEST,
            "tests/correction",
            "tests/custom_tis",
            "tests/diffusion",
            "tests/policy",
        ),
        parallel=True,
    ),
    Stage(
        name="smollm2",
        about="train.py on SmolLM2-135M-Instruct: seconds per step and peak memory",
        limit=120,
        command=(
            *("-m", "benchmarks.gpu_steps", "--device", "{device}", "--out", "{out}/gpu_steps.csv"),
            *("--model", "smollm2"),
        ),
        rehearsal=("--steps", "2"),
        needs=ROOT / "data" / "smollm2" / "checkpoint" / "config.json",
    ),
)
TOTAL = 570
"""Seconds that all stages take at most on a GPU, so that what they wrote comes back within ten
minutes."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a stage."""

    stage: str
    result: str
    """passed, failed, timeout, skipped."""
    seconds: float = 0.0
    message: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the run as a whole failed with it."""
        return self.result not in ("passed", "skipped")


class Log:
    """A file and the terminal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def __call__(self, text: str) -> None:
        """Writes one line."""
        print(text, flush=True)
        self._file.write(text + "\n")
        self._file.flush()

    def follow(self, process: subprocess.Popen) -> None:
        """Writes what a process prints, until it ends."""
        assert process.stdout is not None
        for line in process.stdout:
            self(line.rstrip("\n"))


def main(argv: list[str] | None = None) -> int:
    """Runs the stages; the exit status."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu is the rehearsal (default cuda)",
    )
    parser.add_argument(
        "--stages", nargs="+", choices=names, default=names, metavar="NAME", help="stages to run"
    )
    parser.add_argument(
        "--out", type=Path, help="directory for tables and log (default $OUT, or runs/gpu)"
    )
    options = parser.parse_args(argv)
    python = sys.executable
    try:
        there = probe(python, dict(os.environ))
    except ValueError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 2
    if options.device == "cuda" and there["gpu"] is None:
        print(
            f"make gpu: torch {there['versions']['torch']} of {python} sees no GPU; nothing was"
            " run.",
            file=sys.stderr,
        )
        return 2
    if not list((CARRIED / "wheels").glob("*.whl")):
        print(
            f"make gpu: no wheels in {CARRIED}; run `make gpu-wheels` where there is an index.",
            file=sys.stderr,
        )
        return 2
    out = (options.out or Path(os.environ.get("OUT") or ROOT / "runs" / "gpu")).resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        log = Log(out / f"gpu-{datetime.datetime.now():%Y%m%d-%H%M%S}.log")
    except OSError as error:
        print(
            f"make gpu: cannot write to {out}: {error.strerror}; choose another --out.",
            file=sys.stderr,
        )
        return 2
    stages = [stage for stage in STAGES if stage.name in options.stages]
    with tempfile.TemporaryDirectory(prefix="slime-tis-gpu-") as site:
        return run_all(stages, options.device, python, Path(site), out, log)


def run_all(stages: list[Stage], device: str, python: str, site: Path, out: Path, log: Log) -> int:
    """Installs the wheels and runs the stages; the exit status."""
    started = time.monotonic()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
    }
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    install = Stage(
        name="wheels",
        about="",
        limit=120,
        command=(
            *(
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--no-index",
                "--no-deps",
            ),
            *("--no-compile", "--no-cache-dir", "--target", str(site)),
            *map(str, sorted((CARRIED / "wheels").glob("*.whl"))),
        ),
    )
    outcomes = [
        run_stage(install, list(install.command), install.limit, python, dict(os.environ), log)
    ]
    if outcomes[0].is_failure:
        outcomes += [
            Outcome(stage=stage.name, result="failed", message="no wheels") for stage in stages
        ]
        return summarise(outcomes, about_machine(python, environment, device), out, log)
    about = about_machine(python, environment, device)
    log(" ".join(f"{name}={value}" for name, value in about.items()))
    for stage in stages:
        left = TOTAL - (time.monotonic() - started)
        limit = None if device == "cpu" else min(stage.limit, left)
        if stage.needs is not None and not stage.needs.exists():
            missing = stage.needs.relative_to(ROOT)
            outcomes.append(
                Outcome(stage=stage.name, result="skipped", message=f"{missing} is not there")
            )
        elif limit is not None and limit < 5:
            outcomes.append(
                Outcome(stage=stage.name, result="timeout", message=f"not begun within {TOTAL} s")
            )
        else:
            command = command_of(stage, device, out, about)
            outcomes.append(
                run_stage(stage, command, limit, python, {**environment, **stage.environment}, log)
            )
    return summarise(outcomes, about, out, log)


def command_of(stage: Stage, device: str, out: Path, about: dict[str, str]) -> list[str]:
    """The interpreter's arguments."""
    command = [word.format(device=device, out=out) for word in stage.command]
    if device == "cpu":
        command += stage.rehearsal
    elif stage.parallel and about["pytest-xdist"]:
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    return command


def run_stage(
    stage: Stage,
    command: list[str],
    limit: float | None,
    python: str,
    environment: dict[str, str],
    log: Log,
) -> Outcome:
    """Runs a stage and ends it with all its processes when its time is over."""
    log(f"\n=== {stage.name}: {stage.about}\n$ python {' '.join(command)}")
    started = time.monotonic()
    process = subprocess.Popen(
        [python, *command],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timer = Timer(process, limit)
    try:
        log.follow(process)
        status = process.wait()
    except BaseException:
        timer.end()
        process.wait()
        raise
    finally:
        timer.cancel()
    seconds = time.monotonic() - started
    if timer.is_over:
        return Outcome(
            stage=stage.name,
            result="timeout",
            seconds=seconds,
            message=f"ended after {limit:.0f} s",
        )
    if status:
        return Outcome(
            stage=stage.name, result="failed", seconds=seconds, message=f"exit status {status}"
        )
    return Outcome(stage=stage.name, result="passed", seconds=seconds)


class Timer:
    """Ends a process and all that it started, after some time."""

    def __init__(self, process: subprocess.Popen, seconds: float | None) -> None:
        self.process = process
        self.is_over = False
        self._timer = threading.Timer(seconds or 0, self._over)
        self._timer.daemon = True
        if seconds is not None:
            self._timer.start()

    def _over(self) -> None:
        self.is_over = True
        self.end()

    def end(self) -> None:
        """Kills the stage's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def cancel(self) -> None:
        """Stops the timer; the process continues."""
        self._timer.cancel()


def probe(python: str, environment: dict[str, str]) -> dict:
    """GPU and versions, from a separate interpreter.

    Raises:
        ValueError: it has no torch.
    """
    done = subprocess.run(
        [python, "-c", PROBE], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(
            f"{python} cannot import torch ({reason}); start it with an interpreter that can"
            " (PYTHON=…)."
        )
    return json.loads(done.stdout.strip().splitlines()[-1])


def about_machine(python: str, environment: dict[str, str], device: str) -> dict[str, str]:
    """What every row says of the machine, with the wheels in place."""
    found = probe(python, environment)
    sys.path.insert(0, str(ROOT))
    from benchmarks.provenance import commit

    return {
        "date": datetime.date.today().isoformat(),
        "gpu_name": found["gpu"] if device == "cuda" else REHEARSAL,
        "commit": commit(),
        "python": found["python"],
        **{name: version or "" for name, version in found["versions"].items()},
    }


def summarise(outcomes: list[Outcome], about: dict[str, str], out: Path, log: Log) -> int:
    """Writes a row for every stage; the exit status."""
    log("\n=== summary")
    with (out / "summary.csv").open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*about, "stage", "result", "seconds", "message"])
        if file.tell() == 0:
            writer.writeheader()
        for one in outcomes:
            row = {
                "stage": one.stage,
                "result": one.result,
                "seconds": f"{one.seconds:.1f}",
                "message": one.message,
            }
            writer.writerow({**about, **row})
            log(f"{one.stage:10s} {one.result:8s} {one.seconds:6.1f} s  {one.message}".rstrip())
    failures = sum(one.is_failure for one in outcomes)
    log(f"{failures} of {len(outcomes)} stages failed; tables and log are in {out}")
    return 1 if failures else 0


def epilog() -> str:
    """The stages, for --help."""
    return "\n".join(
        ["stages:", *(f"  {stage.name:10s} {stage.about}, {stage.limit} s" for stage in STAGES)]
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("make gpu: interrupted; what the finished stages wrote is there.", file=sys.stderr)
        sys.exit(130)
