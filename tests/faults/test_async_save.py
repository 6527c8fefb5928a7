"""Faults while a checkpoint is written in the background: killed runs, full disks, errors."""

import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slime_tis.trainer.megatron import checkpoint_saving
from tests.faults.forked import ForkedRun, Outcome, run_forked
from tests.runs import largest_file, make_task, read_metrics, training_metrics

TIMEOUT = 120.0
"""Seconds after which a run counts as hanging."""
FAILING = """
calls = []

def reward(args, sample):
    calls.append(sample)
    if len(calls) > 3 * 16:
        raise RuntimeError("the fourth rollout")
    return len(sample.response_ids) % 3 + sample.response_ids[0] / 50
"""


def flags_of(task: list[str], directory: Path) -> list[str]:
    flags = [*task, "--num-rollout", "6", "--save-interval", "2", "--save-retain", "3"]
    return [*flags, "--save", str(directory / "save"), "--output-dir", str(directory / "run")]


def metrics(directory: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without times."""
    rows = read_metrics(directory / "run")
    return [{"step": row["step"], **training_metrics(row)} for row in rows]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "save").iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_task(tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def expected(quick: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saves before each next rollout."""
    directory = tmp_path_factory.mktemp("expected")
    outcome = run_forked(flags_of(quick, directory), directory / "log", timeout=TIMEOUT)
    assert outcome.status == 0, outcome.error
    return directory


def resumed(quick: list[str], directory: Path) -> Outcome:
    flags = [*flags_of(quick, directory), "--async-save", "--load", str(directory / "save")]
    return run_forked(flags, directory / "log", timeout=TIMEOUT)


def test_background_saves_change_no_result(
    quick: list[str], expected: Path, tmp_path: Path
) -> None:
    flags = [*flags_of(quick, tmp_path), "--async-save"]
    outcome = run_forked(flags, tmp_path / "log", timeout=TIMEOUT)
    assert outcome.status == 0, outcome.error
    assert metrics(tmp_path) == metrics(expected)
    assert names(tmp_path) == ["iter_0000002", "iter_0000004", "iter_0000006"]


def never_finish_the_second_save() -> None:
    """The writer of step 4 writes a part of its file, and waits for ever."""
    write = checkpoint_saving._write

    def stuck(request: Any) -> None:
        _, buckets, _ = request.async_fn_args
        if ".iter_0000004.unfinished" in str(buckets[0][0]):
            Path(buckets[0][0]).write_bytes(b"a part")
            threading.Event().wait()
        write(request)

    checkpoint_saving._write = stuck


@dataclass
class Killed:
    directory: Path
    steps: list[int]
    """Steps that the killed run has reported."""
    checkpoints: list[str]
    resumed: Outcome


@pytest.fixture(scope="module")
def killed(quick: list[str], tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """A run that is killed after step 5, while the checkpoint of step 4 is written."""
    directory = tmp_path_factory.mktemp("killed")
    flags = [*flags_of(quick, directory), "--async-save"]
    run = ForkedRun(flags, directory / "log", before=never_finish_the_second_save)
    file = directory / "run" / "metrics.jsonl"
    while not file.exists() or len(file.read_text().splitlines()) < 5:
        assert time.monotonic() < run.started + TIMEOUT
        time.sleep(0.05)
    run.kill(signal.SIGKILL)
    run.wait(TIMEOUT)
    steps = [row["step"] for row in read_metrics(directory / "run")]
    return Killed(directory, steps, names(directory), resumed(quick, directory))


def test_training_goes_on_while_a_checkpoint_is_written(killed: Killed) -> None:
    assert killed.steps == [1, 2, 3, 4, 5]
    assert killed.checkpoints == [".iter_0000004.unfinished", "iter_0000002"]


def test_a_run_resumes_after_a_kill_during_a_save(killed: Killed, expected: Path) -> None:
    assert killed.resumed.status == 0, killed.resumed.error
    assert "after step 2" in killed.resumed.output
    assert metrics(killed.directory) == metrics(expected)
    assert names(killed.directory) == names(expected)


@pytest.fixture(scope="module", params=[10_000, 120_000])
def full(
    request: pytest.FixtureRequest, quick: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Outcome]:
    """A run with a checkpoint of step 2, and its continuation on a full disk."""
    directory = tmp_path_factory.mktemp("full")
    first = [*flags_of(quick, directory), "--async-save", "--num-rollout", "2"]
    assert run_forked(first, directory / "log", timeout=TIMEOUT).status == 0
    with largest_file(request.param):
        outcome = resumed(quick, directory)
    return directory, outcome


def test_a_full_disk_ends_the_run(full: tuple[Path, Outcome]) -> None:
    directory, outcome = full
    assert outcome.status == 1
    (message,) = outcome.messages
    assert "could not write" in message and "File too large" in message
    assert names(directory) == ["iter_0000002"]


def test_a_run_resumes_after_a_full_disk(
    full: tuple[Path, Outcome], quick: list[str], expected: Path
) -> None:
    directory, _ = full
    outcome = resumed(quick, directory)
    assert outcome.status == 0, outcome.error
    assert metrics(directory) == metrics(expected)


def test_an_error_of_the_run_completes_the_save(quick: list[str], tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    flags = [*flags_of(quick, tmp_path), "--async-save", "--save-interval", "3"]
    flags += ["--custom-rm-path", f"{tmp_path / 'failing.py'}:reward"]
    outcome = run_forked(flags, tmp_path / "log", timeout=TIMEOUT)
    assert outcome.status != 0 and "the fourth rollout" in outcome.error
    assert names(tmp_path) == ["iter_0000003"]


def test_a_signal_waits_for_the_save(quick: list[str], tmp_path: Path) -> None:
    flags = [*flags_of(quick, tmp_path), "--async-save", "--save-interval", "1"]
    run = ForkedRun([*flags, "--num-rollout", "400"], tmp_path / "log")
    file = tmp_path / "run" / "metrics.jsonl"
    while not file.exists() or len(file.read_text().splitlines()) < 2:
        assert time.monotonic() < run.started + TIMEOUT
        time.sleep(0.05)
    run.kill(signal.SIGTERM)
    outcome = run.wait(TIMEOUT)
    last = read_metrics(tmp_path / "run")[-1]["step"]
    assert outcome.status == 128 + signal.SIGTERM
    assert f"after step {last}, saved under" in outcome.error
    assert names(tmp_path)[-1] == f"iter_{last:07d}"
