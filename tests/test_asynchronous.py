"""train.py with rollouts in flight: how stale they are, what is omitted, what resuming and the sync check do."""

import pytest

from slime_tis.main import train
from slime_tis.trainer.engines.engine import RolloutUnavailable
from slime_tis.trainer.engines.local.engine import LocalEngine
from tests.runs import read_metrics, run_here


def test_lookahead_makes_samples_as_many_rollouts_stale(run):
    rows = run("--rollout-lookahead", "2", "--num-rollout", "5")
    assert [row["rollout/weight_staleness"] for row in rows] == [0, 1, 2, 2, 2]
    assert [row["rollout/weight_staleness_max"] for row in rows] == [0, 1, 2, 2, 2]
    assert "train/mismatch_kl_staleness_0" not in rows[0]  # all of one staleness says nothing more
    assert rows[1]["train/token_fraction_staleness_1"] == rows[2]["train/token_fraction_staleness_2"] == 1.0
    assert rows[2]["train/mismatch_k3_kl_staleness_2"] == pytest.approx(rows[2]["train/mismatch_k3_kl"], rel=1e-5)


def test_stale_samples_are_left_out_and_counted(run):
    flags = ("--rollout-lookahead", "2", "--num-rollout", "4", "--use-tis")
    rows = run(*flags, "--max-weight-staleness", "1")
    assert [row["rollout/stale_samples"] for row in rows] == [0, 0, 16, 16]
    assert [row["train/skipped_steps"] for row in rows] == [0, 0, 1, 1]
    assert [row["rollout/stale_samples"] for row in run(*flags, name="all")] == [0, 0, 0, 0]


def test_a_resumed_run_takes_the_prompts_in_flight_again(task, tmp_path):
    flags = [*task, "--rollout-lookahead", "1", "--save", str(tmp_path / "save"), "--save-interval", "2"]
    data = str(tmp_path / "{rollout_id}.jsonl")
    run_here([*flags, "--num-rollout", "4", "--save-debug-rollout-data", data], tmp_path / "whole")
    again = str(tmp_path / "again_{rollout_id}.jsonl")
    resumed = [*flags, "--num-rollout", "4", "--load", str(tmp_path / "copy"), "--save-debug-rollout-data", again]
    resumed += ["--save", str(tmp_path / "resumed_save")]
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "iter_0000002").symlink_to(tmp_path / "save" / "iter_0000002")
    rows = run_here(resumed, tmp_path / "resumed")
    assert [row["step"] for row in rows] == [3, 4]
    for rollout in (2, 3):
        prompts = [
            [line.split('"text"')[1][:40] for line in (tmp_path / name.format(rollout)).read_text().splitlines()]
            for name in ("{}.jsonl", "again_{}.jsonl")
        ]
        assert prompts[0] == prompts[1]


def test_evaluation_by_the_rollout_engine_has_the_present_weights(run, task, tmp_path):
    held_out = ["--eval-prompt-data", task[task.index("--prompt-data") + 1], "--eval-interval", "1"]
    flags = [*held_out, "--rollout-precision", "fp32", "--update-weights-interval", "3", "--num-rollout", "2"]
    local = run(*flags, name="local")
    remote = run(*flags, "--eval-engine", "rollout", name="rollout")
    assert remote[0]["eval/accuracy"] == local[0]["eval/accuracy"]
    assert [row.get("eval/accuracy/response_len") for row in remote] == [
        row.get("eval/accuracy/response_len") for row in local
    ]


def test_a_lost_engine_ends_the_run_with_a_checkpoint(task, tmp_path, monkeypatch, capsys):
    usual, calls = LocalEngine.submit, []

    def lose_the_third(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise RolloutUnavailable("no server answers.")
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(LocalEngine, "submit", lose_the_third)
    flags = [*task, "--save", str(tmp_path / "save"), "--output-dir", str(tmp_path / "run")]
    assert train(flags) == 1
    said = capsys.readouterr().err
    assert "error: no server answers. The run stops after step 2, saved under" in said
    assert (tmp_path / "save" / "iter_0000002").is_dir()
    assert len(read_metrics(tmp_path / "run")) == 2
    monkeypatch.undo()
    assert [row["step"] for row in run_here([*flags, "--load", str(tmp_path / "save")], tmp_path / "resumed")] == [3]
