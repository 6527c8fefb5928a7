"""Runs of train.py whose weights are rounded on their way to the rollout engine: what arrives, ranks, resumption."""

import pytest

from tests.runs import read_metrics, run_apart, run_here

SMALL = ("--rollout-precision", "bf16", "--lr", "1e-6", "--num-rollout", "4")


def test_small_updates_are_measured_and_warned_of(run, capsys):
    rows = run(*SMALL, name="nearest")
    assert all(row["rollout/update_absorbed"] > 0.9 for row in rows)
    run(*SMALL, "--weight-update-rounding", "stochastic", name="stochastic")
    assert all("rollout/update_received" not in row for row in run("--rollout-precision", "fp32", name="fp32"))


@pytest.mark.parametrize("rounding", ["stochastic", "error-compensated"])
@pytest.mark.parametrize("interval", ["1", "2"])
def test_a_resumed_run_rounds_as_one_that_was_never_stopped(task, tmp_path, rounding, interval):
    flags = [*task, *("--rollout-precision", "int8", "--weight-update-rounding", rounding)]
    flags += ["--lr", "1e-4", "--update-weights-interval", interval]
    whole = run_here([*flags, "--num-rollout", "5"], tmp_path / "whole")
    run_here([*flags, "--num-rollout", "3", "--save", str(tmp_path / "save")], tmp_path / "first")
    resumed = run_here([*flags, "--num-rollout", "5", "--load", str(tmp_path / "save")], tmp_path / "resumed")
    assert [row["step"] for row in resumed] == [4, 5]
    for name in ("rollout/raw_reward", "train/mismatch_k3_kl", "train/grad_norm"):
        assert [row[name] for row in resumed] == [row[name] for row in whole[3:]]


@pytest.mark.parametrize("rounding", ["stochastic", "error-compensated"])
def test_ranks_round_alike(task, tmp_path, rounding):
    flags = [*task, *("--rollout-precision", "bf16", "--weight-update-rounding", rounding, "--lr", "1e-5")]
    alone = run_here(flags, tmp_path / "alone")
    layout = ("--tensor-model-parallel-size", "2")
    ended = run_apart([*flags, *layout], tmp_path / "two", ranks=2)
    assert ended.returncode == 0, ended.stderr
    two = read_metrics(tmp_path / "two")
    assert two[0]["rollout/raw_reward"] == alone[0]["rollout/raw_reward"]  # sampled by rounded weights
    assert two[0]["train/mismatch_k3_kl"] == pytest.approx(alone[0]["train/mismatch_k3_kl"], rel=0.1)
