"""Runs of train.py on a real server."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.real_servers.servers import ENGINE, STARTUP
from tests.runs import Completed, free_port, read_metrics, run_apart

Row = dict[str, Any]
"""A row of metrics.jsonl."""
RUN = 3600.0
"""Seconds after which a run counts as hanging; a busy machine needs minutes to start its server."""


@dataclass
class FinishedRun:
    """A run that ended without an error."""

    rows: list[Row]
    output: Path
    stdout: str
    stderr: str


def ended_run(flags: list[str], output: Path, ranks: int = 1) -> Completed:
    """A run that ended with or without an error."""
    return run_apart(flags, output, ranks, timeout=RUN)


def finished_run(flags: list[str], output: Path, ranks: int = 1) -> FinishedRun:
    run = ended_run(flags, output, ranks)
    assert run.returncode == 0, run.stderr
    return FinishedRun(read_metrics(output), output, run.stdout, run.stderr)


def without_engine(flags: list[str]) -> list[str]:
    """The flags of `make_task` without the precision of the local engine, which servers refuse."""
    precision = flags.index("--rollout-precision")
    return [*flags[:precision], *flags[precision + 2 :]]


def server_flags(*, dtype: str) -> list[str]:
    """Flags that launch one server with weights of this type."""
    prefix = f"--{ENGINE.name}"
    flags = ["--rollout-engine", ENGINE.name]
    flags += [f"{prefix}-launch", "1"]
    flags += [f"{prefix}-python", str(ENGINE.python)]
    flags += [f"{prefix}-base-port", str(free_port())]
    flags += [f"{prefix}-config", str(ENGINE.flags)]
    flags += [f"{prefix}-dtype", dtype]
    flags += [f"{prefix}-startup-timeout", str(STARTUP)]
    return flags
