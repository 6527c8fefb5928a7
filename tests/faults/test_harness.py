"""The fault tests' own tools: a forked run ends as the program would."""

from pathlib import Path

from tests.faults.forked import run_forked
from tests.runs import make_task


def test_a_forked_run_trains_and_a_wrong_flag_ends_it_with_status_two(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    outcome = run_forked([*task, "--num-rollout", "1", "--output-dir", str(tmp_path / "run")], tmp_path / "log")
    assert (outcome.status, outcome.traceback) == (0, False), outcome.error
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1
    outcome = run_forked([*task, "--lr", "fast"], tmp_path / "wrong")
    assert (outcome.status, outcome.traceback) == (2, False)
    assert "--lr" in outcome.error
