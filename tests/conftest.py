"""Runs of train.py on a task of its own for each file of tests."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import make_task, run_here

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it, and so would its children

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags that train on the task."""
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def run(task: list[str], tmp_path: Path) -> Run:
    """Runs train.py on the task with more flags; the rows of metrics.jsonl."""

    def go(*flags: str, name: str = "run") -> list[dict[str, Any]]:
        return run_here([*task, *flags], tmp_path / name)

    return go
