"""A run of train.py with one model of a family and one real server on this machine's processor.

The run samples, makes one optimizer step, sends the weights to the server, and samples again. In
float32 both engines must report the same log-probs, before and after the update.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from studies.families.models import MODELS
from tests.runs import ROOT, free_port, make_task

EngineName = Literal["sglang", "vllm"]
ENGINES: tuple[EngineName, ...] = ("sglang", "vllm")
METRIC = "train/train_rollout_logprob_abs_diff"
ERROR = re.compile(r"\b\w*(?:Error|Exception)(?:: .+)?$", re.MULTILINE)
"""The line of a Python error in a log."""
INVALID = re.compile(r"\bvalidation errors? for .+\n(?:\(.+?\))? +(.+?) \[type=")
"""pydantic's error in a log of vLLM: only the line after it says what is invalid."""
NO_CAUSES = (
    "Engine core initialization failed",
    "EngineDeadError",
    "cancelled",
    "py-spy",
    # vLLM's advice at every start
    "Consider increasing with ulimit",
)
"""Parts of lines with an error that is not the cause: it follows from another one, or is advice."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one model gave on one engine."""

    engine: EngineName
    model: str
    """Name in MODELS."""
    before: float | None
    """Mean |Δ| of sampled tokens in nats, before the update; None if the run ended before."""
    after: float | None
    """The same after the update."""
    message: str
    """Why the run ended; empty if it did not fail."""


def measure(engine: EngineName, name: str, directory: Path) -> Measurement:
    """Trains a model for two steps with a server of an engine.

    Args:
        engine: The engine.
        name: The model.
        directory: An existing directory for all files.
    """
    model = MODELS[name]
    flags = make_task(directory, model.family, **model.fields)
    # The local engine's precision, which servers refuse.
    place = flags.index("--rollout-precision")
    del flags[place : place + 2]
    output = directory / "run"
    flags += server_flags(engine)
    for file, text in model.code.items():
        (directory / "model" / file).write_text(text)
    if model.code:
        flags.append(f"--{engine}-trust-remote-code")
    flags += ["--rollout-max-response-len", "32", "--num-rollout", "2"]
    flags += ["--get-mismatch-metrics", "--check-engines", "off", "--output-dir", str(output)]
    command = [sys.executable, "train.py", *flags]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    differences: list[float | None] = []
    metrics = output / "metrics.jsonl"
    if metrics.exists():
        for line in metrics.read_text().splitlines():
            differences.append(json.loads(line)[METRIC])
    differences += [None, None]
    message = ""
    if finished.returncode != 0:
        message = error_message(output / f"{engine}_0.log", finished.stderr)
        message = message.replace(str(directory), "DIR")
        if not message:  # such as a run that the system killed
            message = f"train.py ended with status {finished.returncode} and no message"
    return Measurement(
        engine=engine,
        model=name,
        before=differences[0],
        after=differences[1],
        message=message,
    )


def server_flags(engine: EngineName) -> list[str]:
    """Returns flags that launch one server in float32."""
    python = ROOT / f".venv-{engine}" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{python} does not exist: run `make {engine}-env`, which builds it.")
    prefix = f"--{engine}"
    flags = ["--rollout-engine", engine]
    flags += [f"{prefix}-launch", "1"]
    flags += [f"{prefix}-python", str(python)]
    flags += [f"{prefix}-base-port", str(free_port())]
    flags += [f"{prefix}-config", str(ROOT / "tools" / f"{engine}_cpu" / "server.yaml")]
    flags += [f"{prefix}-dtype", "float32"]
    return flags


def error_message(log: Path, stderr: str) -> str:
    """Returns the server's last error, or the message of train.py if the server had none."""
    errors = []
    if log.exists():
        text = log.read_text(errors="replace")
        errors = INVALID.findall(text) or ERROR.findall(text)
    causes = []
    for error in errors:
        if not any(part in error for part in NO_CAUSES):
            causes.append(error)
    if causes:
        return causes[-1].strip()
    # train.py ends with its message.
    last_line = stderr.strip().rpartition("\n")[2]
    return last_line.removeprefix("error:").strip()
