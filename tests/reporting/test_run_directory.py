"""The run directory: configuration written whole, earlier runs set aside, resumed ones gone on with."""

import json
import os

import pytest

from slime_tis.atomic_files import METRICS, metrics_before
from slime_tis.trainer.reporting.reporters import JsonLines
from slime_tis.trainer.reporting.run_directory import (
    continues,
    foreign_file,
    prepare_run_directory,
)
from tests.storage.killed import killed_at_each_operation


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_fresh_run_sets_an_earlier_one_aside_and_a_resumed_one_does_not(tmp_path):
    directory = prepare_run_directory(str(tmp_path), {"seed": 1}, 0, "r1")
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    (directory / "tensorboard").mkdir()
    (directory / "checkpoints").mkdir()
    prepare_run_directory(str(tmp_path), {"seed": 1}, 2, "r1")
    assert (directory / "metrics.jsonl").exists() and not (directory / "earlier").exists()
    os.utime(directory / "metrics.jsonl", (0, 86400 * 365))
    prepare_run_directory(str(tmp_path), {"seed": 2}, 0, "r2")
    (earlier,) = (directory / "earlier").iterdir()
    assert earlier.name.startswith("1971010") or earlier.name.startswith("19701231")
    assert names(earlier) == ["config.yaml", "metrics.jsonl", "run.json", "tensorboard"]
    assert (earlier / "config.yaml").read_text() == "seed: 1\n"
    assert names(directory) == ["checkpoints", "config.yaml", "earlier", "run.json"]
    assert (directory / "config.yaml").read_text() == "seed: 2\n"


def test_a_resumed_run_does_not_mix_its_metrics_with_another_ones(tmp_path):
    prepare_run_directory(str(tmp_path), {}, 0, "r1")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    os.utime(tmp_path / "metrics.jsonl", (0, 86400 * 365))
    prepare_run_directory(str(tmp_path), {}, 2, "r2")
    assert not (tmp_path / "metrics.jsonl").exists()
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    os.utime(tmp_path / "metrics.jsonl", (0, 86400 * 365))
    prepare_run_directory(str(tmp_path), {}, 0, "r3")  # in the same second of the clock
    first, second = sorted((tmp_path / "earlier").iterdir())
    assert second.name == f"{first.name}-2"
    assert [(path / "metrics.jsonl").read_text() for path in (first, second)] == [
        '{"step": 1}\n',
        '{"step": 2}\n',
    ]


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


def test_lines_before_a_step_are_kept_and_one_cut_off_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3')
    assert metrics_before(path, 2) == ['{"step": 1}\n']
    assert metrics_before(path, 9) == ['{"step": 1}\n', '{"step": 2}\n']
    path.write_text('{"step": 1}\n{"step": 2}')
    assert metrics_before(path, 9) == ['{"step": 1}\n', '{"step": 2}\n']


@pytest.mark.parametrize("resume_step", [0, 3], ids=["anew", "resumed"])
def test_a_run_killed_at_any_operation_on_its_directory_loses_no_report(tmp_path, resume_step):
    directory = tmp_path / "run"

    def start(resume_step=resume_step):
        assert foreign_file(directory) is None
        prepare_run_directory(str(directory), {"lr": 1.0}, resume_step, "a")
        JsonLines(directory / METRICS, resume_step).close()

    def rows():
        return sum(path.read_text().count("\n") for path in directory.rglob(METRICS))

    start(0)
    (directory / METRICS).write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2)))
    kills = 0
    for _number in killed_at_each_operation(tmp_path, start):
        kills += 1
        assert rows() == 2
        start()
        assert rows() == 2
        if resume_step:
            assert continues(directory, "a") and not (directory / "earlier").exists()
    assert kills > 5
