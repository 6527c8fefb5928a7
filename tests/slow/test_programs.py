"""Whole programs: demo, minimal example, torchrun, simulated device, faults and rounding of weight updates."""

import json
import subprocess
import sys

import pytest
import torch

import slime_tis.trainer.weight_sync
from benchmarks.weight_sync_faults import FAULTS, Planter
from examples.minimal.grpo import END, LENGTH, group_advantages, train
from tests.megatron.test_layouts import TWO_RANKS, assert_same, replayed
from tests.runs import ROOT, read_metrics, run_apart, run_here, run_program
from tests.test_weight_sync import long_prompts


def demo(directory):
    command = [sys.executable, "-m", "slime_tis.main", "demo", "--out", "made"]
    return subprocess.run(
        command, cwd=directory, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )


def test_the_demo_ends_with_a_report_that_names_its_cause(tmp_path):
    first = demo(tmp_path)
    assert first.returncode == 0, first.stderr
    report = tmp_path / "made/run/report.html"
    assert report.is_file() and "open made/run/report.html" in first.stdout
    code = ["-m", "slime_tis.main", "diagnose", "made/run", "--json"]
    asked = [sys.executable, *code]
    found = subprocess.run(
        asked,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout)["findings"][0]["cause"] == "stale_weights"
    metrics = read_metrics(tmp_path / "made/run")
    accuracies = [row["eval/accuracy"] for row in metrics if "eval/accuracy" in row]
    assert accuracies[-1] > accuracies[0]
    again = demo(tmp_path)
    assert again.returncode == 2 and "another --out" in again.stderr


def test_it_learns_and_reports_rounding_and_staleness():
    history = list(train(48))
    rewards = [metrics["reward"] for metrics in history]
    assert rewards[0] == pytest.approx(
        0.074, abs=0.005
    )  # chance: 1/10 per token before the first end
    assert sum(rewards[-8:]) / 8 > 0.6
    k3 = [metrics["mismatch_k3_kl"] for metrics in history]
    fresh, stale = k3[4::4], k3[3::4]  # the first and the last step on one copy of the weights
    assert k3[0] == pytest.approx(6e-7, rel=0.5)  # bf16 alone, near uniform
    assert sum(stale) / len(stale) > 20 * sum(fresh) / len(fresh)
    assert all(0.5 < metrics["mis_eff_sample_size"] <= 1 for metrics in history)
    assert END == 0 and LENGTH == 6


def test_advantages_are_standard_scores_of_a_group():
    rewards = torch.zeros(128)
    rewards[:8] = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 1.0])
    found = group_advantages(rewards)
    assert found.shape == (128, 1) and not found[8:].any()
    assert found[:2, 0].tolist() == pytest.approx(
        [1.6197, -0.5399], abs=1e-3
    )  # deviation 0.4629 around 0.25


TESTS = (
    "tests/correction/test_simulated_device.py",
    "tests/correction/test_mean.py",
    "tests/policy/test_losses.py",
)


def test_the_library_on_another_device():
    # a process of its own: torch has the simulated device from then on
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--device",
        "simulated",
        *TESTS,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout


def test_two_ranks_agree_with_one(tmp_path):
    flags, expected = replayed(tmp_path)
    result = run_program([*flags, *TWO_RANKS["tensor and sequence"]], tmp_path / "two", ranks=2)
    assert result.returncode == 0, result.stderr[-4000:]
    assert_same(read_metrics(tmp_path / "two"), expected)


__all__ = ["long_prompts"]


def test_planted_faults_are_caught_and_fifty_good_updates_raise_no_alarm(
    run, task, long_prompts, monkeypatch
):
    planter = Planter(checkpoint=task[task.index("--hf-checkpoint") + 1], plant_at=[2, 50])
    monkeypatch.setattr(slime_tis.trainer.weight_sync, "check_weight_sync", planter)
    rows = run(*long_prompts, "--check-weight-sync", "--num-rollout", "50", "--lr", "1e-4")
    assert len(rows) == 50 and all(0 < row["rollout/weight_sync_gap"] < 0.1 for row in rows)
    good = [row for row in planter.rows if not row.fault]
    assert len(good) == 5 * 51 and all(
        (row.wrong_tensors, row.log_probs) == (0, "nothing") for row in good
    )
    faults = [row for row in planter.rows if row.fault]
    assert len(faults) == 5 * 2 * len(FAULTS) and all(row.wrong_tensors > 0 for row in faults)
    for row in faults:  # an engine that shows no weights is judged by its log-probs
        if row.fault == "no update" and row.is_judged_by_movement:
            assert row.log_probs == "movement", row


SMALL = ("--rollout-precision", "bf16", "--lr", "1e-6", "--num-rollout", "4")


def test_small_updates_are_measured_and_warned_of(run, capsys):
    rows = run(*SMALL, name="nearest")
    assert all(row["rollout/update_absorbed"] > 0.9 for row in rows)
    run(*SMALL, "--weight-update-rounding", "stochastic", name="stochastic")
    assert all(
        "rollout/update_received" not in row
        for row in run("--rollout-precision", "fp32", name="fp32")
    )


@pytest.mark.parametrize("interval", ["1", "2"])
def test_a_resumed_run_rounds_as_one_that_was_never_stopped(task, tmp_path, interval):
    flags = [*task, *("--rollout-precision", "int8", "--weight-update-rounding", "stochastic")]
    flags += ["--lr", "1e-4", "--update-weights-interval", interval]
    whole = run_here([*flags, "--num-rollout", "5"], tmp_path / "whole")
    run_here([*flags, "--num-rollout", "3", "--save", str(tmp_path / "save")], tmp_path / "first")
    resumed = run_here(
        [*flags, "--num-rollout", "5", "--load", str(tmp_path / "save")], tmp_path / "resumed"
    )
    assert [row["step"] for row in resumed] == [4, 5]
    for name in ("rollout/raw_reward", "train/mismatch_k3_kl", "train/grad_norm"):
        assert [row[name] for row in resumed] == [row[name] for row in whole[3:]]


def test_ranks_round_alike(task, tmp_path):
    flags = [
        *task,
        *("--rollout-precision", "bf16", "--weight-update-rounding", "stochastic", "--lr", "1e-5"),
    ]
    alone = run_here(flags, tmp_path / "alone")
    layout = ("--tensor-model-parallel-size", "2")
    ended = run_apart([*flags, *layout], tmp_path / "two", ranks=2)
    assert ended.returncode == 0, ended.stderr
    two = read_metrics(tmp_path / "two")
    assert (
        two[0]["rollout/raw_reward"] == alone[0]["rollout/raw_reward"]
    )  # sampled by rounded weights
    assert two[0]["train/mismatch_k3_kl"] == pytest.approx(
        alone[0]["train/mismatch_k3_kl"], rel=0.1
    )
