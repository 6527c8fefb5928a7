"""Complete programs: demo, minimal example, torchrun, simulated device, weight updates."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import slime_tis.trainer.weight_sync
from benchmarks.weight_sync_faults import FAULTS, Planter
from examples.minimal.grpo import END, LENGTH, group_advantages, train
from tests.megatron.test_layouts import TWO_RANKS, assert_same, replayed
from tests.runs import ROOT, read_metrics, run_apart, run_here, run_program
from tests.test_weight_sync import write_long_prompts


def run_console(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `slime-tis` in a directory."""
    return subprocess.run(
        [sys.executable, "-m", "slime_tis.main", *words],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@dataclass(frozen=True)
class Demo:
    """A finished `slime-tis demo --out made`."""

    directory: Path
    process: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    directory = tmp_path_factory.mktemp("demo")
    process = run_console(directory, "demo", "--out", "made")
    assert process.returncode == 0, process.stderr
    return Demo(directory, process)


def test_the_demo_ends_with_a_report(demo):
    assert (demo.directory / "made/run/report.html").is_file()
    assert "open made/run/report.html" in demo.process.stdout


def test_the_demo_is_diagnosed_with_its_cause(demo):
    process = run_console(demo.directory, "diagnose", "made/run", "--json")
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["findings"][0]["cause"] == "stale_weights"


def test_the_demo_learns(demo):
    metrics = read_metrics(demo.directory / "made/run")
    accuracies = [row["eval/accuracy"] for row in metrics if "eval/accuracy" in row]
    assert accuracies[-1] > accuracies[0]


def test_a_second_demo_asks_for_another_directory(demo):
    process = run_console(demo.directory, "demo", "--out", "made")
    assert process.returncode == 2
    assert "another --out" in process.stderr


@pytest.fixture(scope="module")
def minimal_history() -> list[dict[str, float]]:
    """The metrics of 48 steps of examples/minimal/grpo.py."""
    return list(train(48))


def test_the_minimal_example_learns(minimal_history):
    rewards = [metrics["reward"] for metrics in minimal_history]
    # chance is 1/10 per token before the first end
    assert (END, LENGTH) == (0, 6)
    assert rewards[0] == pytest.approx(0.074, abs=0.005)
    assert sum(rewards[-8:]) / 8 > 0.6


def test_the_minimal_example_shows_rounding_first(minimal_history):
    # only bf16, near a uniform distribution
    assert minimal_history[0]["mismatch_k3_kl"] == pytest.approx(6e-7, rel=0.5)


def test_the_minimal_example_shows_staleness(minimal_history):
    k3 = [metrics["mismatch_k3_kl"] for metrics in minimal_history]
    # four steps use one copy of the weights
    first_steps = k3[4::4]
    last_steps = k3[3::4]
    assert sum(last_steps) / len(last_steps) > 20 * sum(first_steps) / len(first_steps)


def test_the_minimal_example_keeps_half_of_its_samples(minimal_history):
    for metrics in minimal_history:
        assert 0.5 < metrics["mis_eff_sample_size"] <= 1


def test_advantages_are_standard_scores_of_a_group():
    rewards = torch.zeros(128)
    rewards[0] = 1.0
    rewards[7] = 1.0
    advantages = group_advantages(rewards)
    # two of eight: mean 0.25, standard deviation 0.4629
    assert advantages[:2, 0].tolist() == pytest.approx([1.6197, -0.5399], abs=1e-3)


def test_a_group_of_equal_rewards_has_no_advantages():
    rewards = torch.zeros(128)
    rewards[0] = 1.0
    advantages = group_advantages(rewards)
    assert advantages.shape == (128, 1)
    assert not advantages[8:].any()


TESTS = (
    "tests/correction/test_simulated_device.py",
    "tests/correction/test_mean.py",
    "tests/policy/test_losses.py",
)


def test_the_library_on_another_device():
    # in a separate process, since torch keeps the simulated device for good
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [*command, "--device", "simulated", *TESTS], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout[-4000:]
    assert "skipped" not in process.stdout


def test_two_ranks_agree_with_one(tmp_path):
    flags, expected = replayed(tmp_path)
    result = run_program([*flags, *TWO_RANKS["tensor and sequence"]], tmp_path / "two", ranks=2)
    assert result.returncode == 0, result.stderr[-4000:]
    assert_same(read_metrics(tmp_path / "two"), expected)


@pytest.fixture(scope="module")
def updates(
    task: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Planter]:
    """The metrics of fifty updates, and the checks of engines with faults planted in two."""
    planter = Planter(checkpoint=task[task.index("--hf-checkpoint") + 1], plant_at=[2, 50])
    directory = tmp_path_factory.mktemp("updates")
    prompts = write_long_prompts(directory)
    flags = [*task, *prompts, "--check-weight-sync", "--num-rollout", "50", "--lr", "1e-4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slime_tis.trainer.weight_sync, "check_weight_sync", planter)
        rows = run_here(flags, directory / "run")
    return rows, planter


def test_every_update_has_a_small_gap(updates):
    rows, _ = updates
    assert len(rows) == 50
    for row in rows:
        assert 0 < row["rollout/weight_sync_gap"] < 0.1


def test_fifty_good_updates_raise_no_alarm(updates):
    _, planter = updates
    good = [row for row in planter.rows if not row.fault]
    assert len(good) == 5 * 51  # five engines, and the update before the first step
    for row in good:
        assert row.wrong_tensors == 0
        assert row.log_probs == "nothing"


def test_every_planted_fault_shows_wrong_tensors(updates):
    _, planter = updates
    faults = [row for row in planter.rows if row.fault]
    assert len(faults) == 5 * 2 * len(FAULTS)
    assert all(row.wrong_tensors > 0 for row in faults)


def test_a_missing_update_shows_in_log_probs(updates):
    """For engines that show no weights."""
    _, planter = updates
    for row in planter.rows:
        if row.fault == "no update" and row.is_judged_by_movement:
            assert row.log_probs == "movement", row


SMALL_UPDATES = ("--lr", "1e-6", "--num-rollout", "4")


def test_rounding_to_nearest_absorbs_small_updates(run):
    rows = run("--rollout-precision", "bf16", *SMALL_UPDATES)
    assert all(row["rollout/update_absorbed"] > 0.9 for row in rows)


def test_stochastic_rounding_of_small_updates_trains(run):
    flags = ("--rollout-precision", "bf16", "--weight-update-rounding", "stochastic")
    assert len(run(*flags, *SMALL_UPDATES)) == 4


def test_an_fp32_engine_measures_no_rounding(run):
    for row in run("--rollout-precision", "fp32", "--num-rollout", "4"):
        assert "rollout/update_received" not in row


@pytest.mark.parametrize("interval", ["1", "2"])
def test_a_resumed_run_rounds_like_an_uninterrupted_one(task, tmp_path, interval):
    flags = [
        *task,
        "--rollout-precision",
        "int8",
        "--weight-update-rounding",
        "stochastic",
        "--lr",
        "1e-4",
        "--update-weights-interval",
        interval,
    ]
    save = str(tmp_path / "save")
    complete = run_here([*flags, "--num-rollout", "5"], tmp_path / "complete")
    run_here([*flags, "--num-rollout", "3", "--save", save], tmp_path / "first")
    resumed = run_here([*flags, "--num-rollout", "5", "--load", save], tmp_path / "resumed")
    assert [row["step"] for row in resumed] == [4, 5]
    for name in ("rollout/raw_reward", "train/mismatch_k3_kl", "train/grad_norm"):
        assert [row[name] for row in resumed] == [row[name] for row in complete[3:]]


def test_ranks_round_alike(task, tmp_path):
    rounding = ["--rollout-precision", "bf16", "--weight-update-rounding", "stochastic"]
    flags = [*task, *rounding, "--lr", "1e-5"]
    one = run_here(flags, tmp_path / "one")[0]
    layout = ["--tensor-model-parallel-size", "2"]
    process = run_apart([*flags, *layout], tmp_path / "two", ranks=2)
    assert process.returncode == 0, process.stderr
    two = read_metrics(tmp_path / "two")[0]
    # the rewards are equal if the rounded weights are: they sample the same tokens
    assert two["rollout/raw_reward"] == one["rollout/raw_reward"]
    assert two["train/mismatch_k3_kl"] == pytest.approx(one["train/mismatch_k3_kl"], rel=0.1)
