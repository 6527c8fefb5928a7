"""The study of collapse: its runs, each in a process as a user makes them, and their rows."""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from studies.collapse import run
from studies.collapse.results import Row, read_table
from tests.runs import make_task

Key = tuple[str, str, int]
KEYS: list[Key] = [("both", "token TIS", 0), ("both", "standard PPO", 0)]
"""Scenario, correction and seed of the runs."""


@dataclass(frozen=True)
class SmallStudy:
    """Two runs of two steps."""

    directory: Path
    task: list[str]

    @property
    def results(self) -> Path:
        return self.directory / "results.csv"

    @property
    def log(self) -> Path:
        """The output of the corrected run."""
        return self.directory / "runs" / "both" / "token_tis" / "seed_0" / "train.log"

    def run(
        self,
        corrections: Sequence[str] = ("token TIS", "standard PPO"),
        flags: Sequence[str] = (),
    ) -> int:
        """Runs the missing cases with further flags of train.py; returns the exit status."""
        options = [
            "--results",
            str(self.results),
            "--runs",
            str(self.directory / "runs"),
            "--scenarios",
            "both",
            "--corrections",
            *corrections,
            "--jobs",
            "2",
        ]
        train = [
            *self.task,
            "--rm-type",
            "none",
            "--num-rollout",
            "2",
            "--lr-warmup-iters",
            "1",
            "--eval-interval",
            "1",
            "--eval-prompt-data",
            str(self.directory / "train.jsonl"),
        ]
        return run.main([*options, "--", *train, *flags])


@dataclass(frozen=True)
class FinishedStudy:
    """A study after its runs."""

    study: SmallStudy
    status: int
    rows: dict[Key, Row]
    printed: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedStudy:
    directory = tmp_path_factory.mktemp("study")
    study = SmallStudy(directory, make_task(directory))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = study.run()
    return FinishedStudy(study, status, read_table(study.results), output.getvalue())


def test_every_run_becomes_a_row(finished):
    assert finished.status == 0
    assert set(finished.rows) == set(KEYS)


def test_a_row_has_the_steps_and_accuracies_of_its_run(finished):
    corrected = finished.rows["both", "token TIS", 0]
    assert corrected.steps == 2
    assert [step for step, _ in corrected.accuracy] == [0, 1, 2]


def test_a_corrected_run_has_mismatch_and_effective_sample_size(finished):
    corrected = finished.rows["both", "token TIS", 0]
    assert corrected.mismatch_k3_kl > 0
    assert 0 < corrected.ess <= 1


def test_a_run_without_weights_has_no_effective_sample_size(finished):
    assert finished.rows["both", "standard PPO", 0].ess is None


def test_a_row_says_how_it_was_made(finished):
    corrected = finished.rows["both", "token TIS", 0]
    flags = "--rollout-precision fp8 --update-weights-interval 16 --use-tis"
    assert corrected.flags.startswith(flags)
    assert "torch 2" in corrected.versions
    assert "cores of" in corrected.machine


def test_progress_and_table_are_printed(finished):
    assert "2/2  both, " in finished.printed
    assert "| token TIS |" in finished.printed


def test_the_study_is_drawn(finished):
    assert (finished.study.directory / "runs" / "study.png").stat().st_size > 10_000


def test_a_finished_run_is_not_made_again(finished):
    study = finished.study
    time_of_run = study.log.stat().st_mtime_ns
    study.results.unlink()
    assert study.run() == 0
    assert study.log.stat().st_mtime_ns == time_of_run
    assert read_table(study.results) == finished.rows


def test_a_wrong_flag_is_refused_before_any_run(finished, capsys):
    study = finished.study
    time_of_run = study.log.stat().st_mtime_ns
    assert study.run(flags=("--lr", "-1")) == 2
    assert "--lr" in capsys.readouterr().err
    assert study.log.stat().st_mtime_ns == time_of_run


def run_broken(study: SmallStudy) -> int:
    """Runs the study with a reward that raises an exception; returns the exit status."""
    reward = study.directory / "broken.py"
    reward.write_text("def reward(args, sample):\n    raise ValueError('no reward today')\n")
    flags = ("--custom-rm-path", f"{reward}:reward")
    return study.run(corrections=["token TIS"], flags=flags)


def test_a_failed_run_is_named_with_its_error(finished, capsys):
    assert run_broken(finished.study) == 1
    message = capsys.readouterr().err
    assert "error: both/token_tis/seed_0 ended with status 2; " in message
    assert "no reward today" in message


def test_a_failed_run_leaves_the_other_rows(finished):
    assert run_broken(finished.study) == 1
    assert read_table(finished.study.results) == finished.rows
