"""The study of collapse: its runs, in processes of their own as a user makes them, and their rows."""

import pytest

from studies.collapse import run
from studies.collapse.results import read_table
from tests.runs import make_task


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    directory = tmp_path_factory.mktemp("study")
    task = make_task(directory)

    def call(*more, flags=()):
        where = ["--results", str(directory / "results.csv"), "--runs", str(directory / "runs")]
        names = ["--scenarios", "both", "--corrections", "token TIS", "standard PPO", "--jobs", "2"]
        sizes = [
            "--num-rollout",
            "2",
            "--lr-warmup-iters",
            "1",
            "--eval-interval",
            "1",
            "--eval-prompt-data",
        ]
        sizes.append(str(directory / "train.jsonl"))
        return run.main([*where, *names, *more, "--", *task, "--rm-type", "none", *sizes, *flags])

    return directory, call


def test_runs_end_in_rows_are_resumed_and_fail_by_themselves(study, capsys):
    directory, call = study
    assert call() == 0
    rows = read_table(directory / "results.csv")
    assert set(rows) == {("both", "token TIS", 0), ("both", "standard PPO", 0)}
    corrected = rows["both", "token TIS", 0]
    assert (corrected.steps, [step for step, _ in corrected.accuracy]) == (2, [0, 1, 2])
    assert (
        corrected.mismatch_k3_kl > 0
        and 0 < corrected.ess <= 1
        and rows["both", "standard PPO", 0].ess is None
    )
    assert corrected.flags.startswith(
        "--rollout-precision fp8 --update-weights-interval 16 --use-tis"
    )
    assert "torch 2" in corrected.versions and "cores of" in corrected.machine
    printed = capsys.readouterr().out
    assert "2/2  both, " in printed and "| token TIS |" in printed
    assert (directory / "runs" / "study.png").stat().st_size > 10_000

    log = directory / "runs" / "both" / "token_tis" / "seed_0" / "train.log"
    before = log.stat().st_mtime_ns
    (directory / "results.csv").unlink()
    assert call() == 0
    assert log.stat().st_mtime_ns == before, "a run that ended with these flags is not made again"
    assert read_table(directory / "results.csv") == rows

    assert call(flags=("--lr", "-1")) == 2
    assert "--lr" in capsys.readouterr().err
    assert log.stat().st_mtime_ns == before, "what train.py refuses is refused before any run"

    (directory / "broken.py").write_text(
        "def reward(args, sample):\n    raise ValueError('no reward today')\n"
    )
    broken = ("--custom-rm-path", f"{directory / 'broken.py'}:reward")
    assert call("--corrections", "token TIS", flags=broken) == 1
    error = capsys.readouterr().err
    assert (
        "error: both/token_tis/seed_0 ended with status 2; " in error and "no reward today" in error
    )
    assert read_table(directory / "results.csv") == rows, "what there was stays"
