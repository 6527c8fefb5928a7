"""train.py with a mixture of experts: routing replay, the remaining mismatch, and samples without experts."""

import json

import pytest

from slime_tis.trainer.data.sample_file import encoded, load_samples
from tests.runs import make_task, run_here, training_metrics

REPLAY = ("--use-rollout-routing-replay", "--measure-routing-mismatch", "1")
COARSE = ("--rollout-precision", "fp32", "--rollout-router-bits", "3")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The flags that train a mixture of experts on the task."""
    return make_task(tmp_path_factory.mktemp("task"), "qwen3_moe")


def test_replay_removes_the_mismatch_of_a_coarse_router(run):
    rows = run(*COARSE, *REPLAY)
    for row in rows:
        assert row["train/routing_replay_missing"] == 0
        assert row["train/routing_difference"] > 0.2
        assert (
            row["train/without_replay/routing_difference"]
            >= row["train/routing_difference/layer_0"]
            > 0.05
        )
        assert (
            row["train/with_replay/mismatch_k3_kl"] < row["train/without_replay/mismatch_k3_kl"] / 3
        )
        assert row["train/with_replay/ratio_max"] < row["train/without_replay/ratio_max"]
        # one step per rollout: the corrected policy is the trained one
        assert row["train/mismatch_k3_kl"] == pytest.approx(
            row["train/with_replay/mismatch_k3_kl"], rel=1e-4
        )
        assert 0 <= row["train/expert_load_min"] < 1 / 8 < row["train/expert_load_max"] <= 1 / 2


def test_replayed_weights_remove_the_rest_of_the_mismatch(run):
    experts = run(*COARSE, *REPLAY, "--num-rollout", "1")[0]
    both = run(*COARSE, *REPLAY, "--num-rollout", "1", "--routing-replay-weights", name="weights")[
        0
    ]
    assert (
        both["train/with_replay/mismatch_k3_kl"]
        < 1e-9
        < experts["train/with_replay/mismatch_k3_kl"]
    )
    assert (
        both["train/without_replay/mismatch_k3_kl"]
        == experts["train/without_replay/mismatch_k3_kl"]
    )


def test_equal_engines_need_no_replay(run):
    plain = run("--rollout-precision", "fp32")
    for name, flags in (("experts", []), ("weights", ["--routing-replay-weights"])):
        rows = run("--rollout-precision", "fp32", *REPLAY, *flags, name=name)
        for row, expected in zip(rows, plain, strict=True):
            assert row["train/routing_difference"] == 0
            assert row["train/without_replay/mismatch_k3_kl"] < 1e-9
            assert row["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)


def test_a_run_without_replay_measures_the_mismatch_with_replay(run):
    plain = run(*COARSE, "--num-steps-per-rollout", "2")
    measured = run(*COARSE, "--num-steps-per-rollout", "2", *REPLAY[1:-1], "2", name="measured")
    replayed = run(
        *COARSE, "--num-steps-per-rollout", "2", *REPLAY, "--num-rollout", "1", name="replayed"
    )
    assert [row["step"] for row in measured if "train/with_replay/ratio_max" in row] == [1, 3, 5]
    assert any("perf/with_replay_time" in row for row in measured)
    for row, same in zip(measured, plain, strict=True):  # training is bitwise without replay
        assert {name: row[name] for name in training_metrics(same)} == training_metrics(same)
        assert row["train/routing_replay_missing"] == 0
    for row in measured[::2]:
        assert (
            0
            < row["train/with_replay/mismatch_k3_kl"]
            < row["train/without_replay/mismatch_k3_kl"] / 3
        )
        assert (
            row["train/routing_difference"] > 0.2 and row["train/routing_difference/layer_0"] > 0.05
        )
    for metric in ("mismatch_k3_kl", "ratio_max", "ratio_min", "train_rollout_logprob_abs_diff"):
        for name in (
            f"train/with_replay/{metric}",
            f"train/without_replay/{metric}",
        ):  # the same samples
            assert measured[0][name] == pytest.approx(replayed[0][name], rel=1e-5)
    assert measured[0]["train/routing_difference"] == replayed[0]["train/routing_difference"]


def test_training_replays_the_pass_for_old_log_probs(run):
    steps = ("--num-steps-per-rollout", "2", "--lr", "3e-2", "--rollout-precision", "fp32")
    plain, replayed = run(*steps), run(*steps, "--use-routing-replay", name="replayed")
    assert [row["train/routing_difference"] for row in replayed[::2]] == [
        0,
        0,
        0,
    ]  # the same weights
    assert all(row["train/routing_difference"] > 0 for row in replayed[1::2])
    assert (
        "train/routing_difference" not in plain[1]
        and "train/routing_replay_missing" not in replayed[1]
    )
    assert plain[0]["train/loss"] == replayed[0]["train/loss"]
    assert plain[1]["train/ppo_kl"] != replayed[1]["train/ppo_kl"]


def test_both_replays_together_replay_the_rollouts_experts(run):
    steps = (*COARSE, *REPLAY, "--num-steps-per-rollout", "2", "--routing-replay-weights")
    rollout, both = run(*steps), run(*steps, "--use-routing-replay", name="both")
    assert [training_metrics(row) for row in both] == [training_metrics(row) for row in rollout]


def spoil(file):
    """Makes the records of a dump's first four samples unusable, each in another way."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    samples = [sample for group in load_samples(file, 4, 4) for sample in group]
    for number, (row, sample) in enumerate(zip(rows[:4], samples, strict=False)):
        experts, weights = sample.rollout_routed_experts, sample.rollout_routing_weights
        assert experts is not None and weights is not None
        changed = [
            (None, weights),
            (experts[:-1], weights[:-1]),
            (experts + 8, weights),
            (experts, None),
        ][number]
        row |= {
            "rollout_routed_experts": encoded(changed[0]),
            "rollout_routing_weights": encoded(changed[1]),
        }
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_samples_without_usable_experts_are_trained_without_replay_and_counted(task, tmp_path):
    data = str(tmp_path / "{rollout_id}.jsonl")
    flags = [*task, *COARSE, *REPLAY, "--routing-replay-weights", "--num-rollout", "1"]
    whole = run_here([*flags, "--save-debug-rollout-data", data], tmp_path / "whole")[0]
    flags += ["--load-debug-rollout-data", data]
    again = run_here(flags, tmp_path / "again")[0]
    assert training_metrics(again) == training_metrics(whole)  # the file has the records
    spoil(tmp_path / "0.jsonl")
    row = run_here(flags, tmp_path / "spoilt")[0]
    assert (whole["train/routing_replay_missing"], row["train/routing_replay_missing"]) == (0, 4)
    assert (whole.get("health/routing_replay"), row["health/routing_replay"]) == (None, 1)
    assert row["train/with_replay/mismatch_k3_kl"] > 100 * whole["train/with_replay/mismatch_k3_kl"]
    assert (
        row["train/without_replay/mismatch_k3_kl"] == whole["train/without_replay/mismatch_k3_kl"]
    )
    micro_batches = run_here([*flags, "--micro-batch-size", "2"], tmp_path / "micro")[0]
    assert training_metrics(micro_batches) == pytest.approx(
        training_metrics(row), rel=1e-4, abs=1e-6
    )


def test_a_resumed_run_with_replay_is_bitwise(task, tmp_path):
    flags = [
        *task,
        *COARSE,
        *REPLAY,
        "--use-routing-replay",
        "--num-steps-per-rollout",
        "2",
        "--use-tis",
    ]
    flags += ["--update-weights-interval", "3", "--num-rollout", "4", "--save-interval", "2"]
    whole = run_here([*flags, "--save", str(tmp_path / "save")], tmp_path / "whole")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "iter_0000004").symlink_to(tmp_path / "save" / "iter_0000004")
    flags += ["--load", str(tmp_path / "copy"), "--save", str(tmp_path / "resumed_save")]
    resumed = run_here(flags, tmp_path / "resumed")
    assert [row["step"] for row in resumed] == [5, 6, 7, 8]
    assert [training_metrics(row) for row in resumed] == [
        training_metrics(row) for row in whole[4:]
    ]


def test_rollouts_in_flight_keep_their_experts(run):
    rows = run("--rollout-precision", "fp32", *REPLAY, "--rollout-lookahead", "1", "--lr", "1e-2")
    assert [row["rollout/weight_staleness"] for row in rows] == [0, 1, 1]
    assert [row["train/routing_difference"] > 0 for row in rows] == [
        False,
        True,
        True,
    ]  # chosen by older weights
    assert all(row["train/routing_replay_missing"] == 0 for row in rows)
