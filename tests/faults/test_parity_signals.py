"""Ctrl-C and SIGTERM at any moment of `slime-tis parity`: one line, no process, no half a page."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slime_tis.main import main
from tests.faults.forked import ForkedRun, Outcome, check, group_is_empty
from tests.parity.test_parity_adapters import adapter, base, tensors  # noqa: F401  (fixtures)

TIMEOUT = 240.0
"""Seconds after which a comparison counts as hanging."""
MOMENTS = 10
"""Signals that are spread over the time of a comparison."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(scope="module")
def words(base: Path, adapter: str) -> list[str]:  # noqa: F811
    """A comparison that samples, runs two executions and searches for the fault of an adapter."""
    words = ["parity", str(base), "--adapter", adapter, "--other-adapter", "none"]
    return [*words, "--other", "training", "--other", "local"]


def start(words: list[str], directory: Path, before: Callable[[], object] = int) -> ForkedRun:
    """Starts a comparison that writes a page, in `directory`."""
    argv = [*words, "--out", str(directory / "page.html")]
    return ForkedRun(argv, directory / "log", before=before, program=main)


def problem(outcome: Outcome, number: signal.Signals, run: ForkedRun, directory: Path) -> str:
    """Describes a wrong end of a signalled comparison; empty if it is right."""
    if outcome.status is None:
        return f"hangs: {outcome.error}"
    if not group_is_empty(run.pid):
        return "left a process behind"
    names = {path.name for path in directory.iterdir()} - {"log"}
    if outcome.status == 0:  # the signal came after the end
        expected = {"page.html"}
    elif outcome.status == 128 + number:
        expected = names & {"page.html"}
        # The search for a fault announces its time.
        lines = [line for line in outcome.error.splitlines() if not line.startswith("Scoring ")]
        if lines != [f"ended by {number.name}; unfinished files are removed."]:
            return outcome.error
    else:
        return f"status {outcome.status}: {outcome.error}"
    if names != expected:
        return f"left {names}"
    if names and not (directory / "page.html").read_text().endswith("</html>\n"):
        return "wrote a part of the page"
    return ""


def pause(seconds: float) -> None:
    """Waits: signals at any moment have no event to wait for."""
    time.sleep(seconds)


@pytest.fixture(scope="module")
def duration(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds of a comparison without a signal."""
    directory = tmp_path_factory.mktemp("complete")
    run = start(words, directory)
    outcome = run.wait(TIMEOUT)
    assert outcome.status == 0, outcome.error
    return time.monotonic() - run.started


@pytest.mark.parametrize("number", SIGNALS, ids=[number.name for number in SIGNALS])
def test_a_signal_ends_a_comparison_with_one_line(
    number: signal.Signals, words: list[str], duration: float, tmp_path: Path
) -> None:
    problems = {}
    for moment in range(MOMENTS):
        directory = tmp_path / str(moment)
        run = start(words, directory)
        # The first moment is just after the command has read its options.
        pause(0.05 + duration * moment / MOMENTS)
        run.kill(number, group=True)
        outcome = run.wait(TIMEOUT)
        problems[str(moment)] = problem(outcome, number, run, directory) or None
    check(problems, at_least=MOMENTS)


def signal_in_the_page(number: signal.Signals) -> None:
    """Sends a signal to this process while the page has its bytes but not yet its name."""
    synchronize = os.fsync

    def signalled(fd: Any) -> None:
        os.kill(os.getpid(), number)
        synchronize(fd)

    os.fsync = signalled  # type: ignore[assignment]


@pytest.mark.parametrize("number", SIGNALS, ids=[number.name for number in SIGNALS])
def test_a_signal_while_the_page_is_written_leaves_none(
    number: signal.Signals, words: list[str], tmp_path: Path
) -> None:
    run = start(words, tmp_path, before=partial(signal_in_the_page, number))
    outcome = run.wait(TIMEOUT)
    assert problem(outcome, number, run, tmp_path) == ""
    assert not (tmp_path / "page.html").exists()
