"""The run directory: its configuration, the reports of earlier runs, and those of a resumed run."""

import os
from pathlib import Path

import pytest

from slime_tis.atomic_files import METRICS, metrics_before
from slime_tis.trainer.reporting.reporters import JsonLines
from slime_tis.trainer.reporting.run_directory import (
    continues,
    foreign_file,
    prepare_run_directory,
)
from tests.storage.killed import killed_at_each_operation

LONG_AGO = 86400 * 365


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write_metrics(directory: Path, text: str) -> None:
    """Writes metrics as a run of January 1971."""
    metrics = directory / METRICS
    metrics.write_text(text)
    os.utime(metrics, (0, LONG_AGO))


@pytest.fixture
def used(tmp_path) -> Path:
    """The directory of run r1 with metrics, TensorBoard files and checkpoints."""
    directory = prepare_run_directory(str(tmp_path), {"seed": 1}, 0, "r1")
    write_metrics(directory, '{"step": 1}\n')
    (directory / "tensorboard").mkdir()
    (directory / "checkpoints").mkdir()
    return directory


def test_a_resumed_run_keeps_its_reports_in_place(used):
    prepare_run_directory(str(used), {"seed": 1}, 2, "r1")
    assert (used / METRICS).exists()
    assert not (used / "earlier").exists()


@pytest.fixture
def restarted(used) -> Path:
    """The used directory after the start of a new run r2."""
    prepare_run_directory(str(used), {"seed": 2}, 0, "r2")
    return used


@pytest.fixture
def earlier(restarted) -> Path:
    """The directory that has the reports of run r1."""
    (directory,) = (restarted / "earlier").iterdir()
    return directory


def test_earlier_reports_have_the_time_of_their_metrics(earlier):
    # The name is in local time, which may be a day before or after UTC.
    assert earlier.name.startswith(("1971010", "19701231"))


def test_a_new_run_moves_all_earlier_reports(earlier):
    assert names(earlier) == ["config.yaml", "metrics.jsonl", "run.json", "tensorboard"]


def test_earlier_reports_have_their_configuration(earlier):
    assert (earlier / "config.yaml").read_text() == "seed: 1\n"


def test_a_new_run_leaves_checkpoints_in_place(restarted):
    assert names(restarted) == ["checkpoints", "config.yaml", "earlier", "run.json"]


def test_a_new_run_writes_its_configuration(restarted):
    assert (restarted / "config.yaml").read_text() == "seed: 2\n"


def test_a_resumed_run_moves_the_metrics_of_another_run(used):
    prepare_run_directory(str(used), {}, 2, "r2")
    assert not (used / METRICS).exists()


def test_earlier_reports_of_the_same_second_are_numbered(used):
    prepare_run_directory(str(used), {}, 2, "r2")
    write_metrics(used, '{"step": 2}\n')
    prepare_run_directory(str(used), {}, 0, "r3")
    first, second = sorted((used / "earlier").iterdir())
    assert second.name == f"{first.name}-2"
    assert (first / METRICS).read_text() == '{"step": 1}\n'
    assert (second / METRICS).read_text() == '{"step": 2}\n'


@pytest.mark.parametrize(
    "line",
    [b"[1]", b'{"loss": 1}', b'{"step": 1, "x": "\xff"}', b'{"step": 1', b"[" * 100_000],
    ids=["list", "no step", "bytes", "cut", "deep"],
)
def test_a_damaged_line_is_named(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2, is not the metrics"):
        metrics_before(path, 9)


@pytest.mark.parametrize(
    ("text", "step", "lines"),
    [
        ('{"step": 1}\n{"step": 2}\n{"step": 3', 2, ['{"step": 1}\n']),
        ('{"step": 1}\n{"step": 2}\n{"step": 3', 9, ['{"step": 1}\n', '{"step": 2}\n']),
        ('{"step": 1}\n{"step": 2}', 9, ['{"step": 1}\n', '{"step": 2}\n']),
    ],
    ids=["before a step", "a line is cut off", "only the line break is missing"],
)
def test_complete_lines_before_a_step_are_kept(text, step, lines, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    assert metrics_before(path, step) == lines


@pytest.mark.parametrize("resume_step", [0, 3], ids=["anew", "resumed"])
def test_a_run_killed_at_any_file_operation_loses_no_report(tmp_path, resume_step):
    directory = tmp_path / "run"

    def start(resume_step: int = resume_step) -> None:
        assert foreign_file(directory) is None
        prepare_run_directory(str(directory), {"lr": 1.0}, resume_step, "a")
        JsonLines(directory / METRICS, resume_step).close()

    def reported_steps() -> int:
        return sum(path.read_text().count("\n") for path in directory.rglob(METRICS))

    start(0)
    (directory / METRICS).write_text('{"step": 1}\n{"step": 2}\n')
    kills = 0
    for _number in killed_at_each_operation(tmp_path, start):
        kills += 1
        assert reported_steps() == 2
        start()
        assert reported_steps() == 2
        if resume_step:
            assert not (directory / "earlier").exists()
            assert continues(directory, "a")
    assert kills > 5
