"""train.py with a mixture of experts: replay, the mismatch, and samples without experts."""

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


@pytest.fixture(scope="module")
def coarse_rows(task, tmp_path_factory):
    """Metrics of a run with replay, whose rollout engine rounds the router."""
    return run_here([*task, *COARSE, *REPLAY], tmp_path_factory.mktemp("coarse"))


def test_samples_of_the_rollout_engine_have_experts(coarse_rows):
    assert [row["train/routing_replay_missing"] for row in coarse_rows] == [0] * len(coarse_rows)


def test_a_coarse_router_chooses_other_experts(coarse_rows):
    for row in coarse_rows:
        layer = row["train/routing_difference/layer_0"]
        assert row["train/routing_difference"] > 0.2
        assert row["train/without_replay/routing_difference"] >= layer > 0.05


def test_replay_removes_the_mismatch_of_a_coarse_router(coarse_rows):
    for row in coarse_rows:
        with_replay = row["train/with_replay/mismatch_k3_kl"]
        assert with_replay < row["train/without_replay/mismatch_k3_kl"] / 3
        assert row["train/with_replay/ratio_max"] < row["train/without_replay/ratio_max"]
        # one step per rollout: the corrected policy is the trained one
        assert row["train/mismatch_k3_kl"] == pytest.approx(with_replay, rel=1e-4)


def test_expert_loads_are_around_the_mean(coarse_rows):
    for row in coarse_rows:
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


@pytest.fixture(scope="module")
def fp32_rows(task, tmp_path_factory):
    """Metrics of a run without replay, whose engines are equal."""
    return run_here([*task, "--rollout-precision", "fp32"], tmp_path_factory.mktemp("fp32"))


@pytest.mark.parametrize("flags", [[], ["--routing-replay-weights"]], ids=["experts", "weights"])
def test_equal_engines_need_no_replay(flags, fp32_rows, run):
    rows = run("--rollout-precision", "fp32", *REPLAY, *flags)
    for row, expected in zip(rows, fp32_rows, strict=True):
        assert row["train/routing_difference"] == 0
        assert row["train/without_replay/mismatch_k3_kl"] < 1e-9
        assert row["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)


@pytest.fixture(scope="module")
def measured_rows(task, tmp_path_factory):
    """Metrics of a run without replay that measures every second step with replay."""
    flags = [*task, *COARSE, "--num-steps-per-rollout", "2", "--measure-routing-mismatch", "2"]
    return run_here(flags, tmp_path_factory.mktemp("measured"))


def test_mismatch_is_measured_at_the_interval(measured_rows):
    steps = [row["step"] for row in measured_rows if "train/with_replay/ratio_max" in row]
    assert steps == [1, 3, 5]
    assert any("perf/with_replay_time" in row for row in measured_rows)


def test_measuring_the_mismatch_leaves_training(measured_rows, run):
    plain = run(*COARSE, "--num-steps-per-rollout", "2")
    for row, expected in zip(measured_rows, plain, strict=True):
        metrics = {name: row[name] for name in training_metrics(expected)}
        assert metrics == training_metrics(expected)
        assert row["train/routing_replay_missing"] == 0


def test_the_measured_mismatch_is_lower_with_replay(measured_rows):
    for row in measured_rows[::2]:
        without_replay = row["train/without_replay/mismatch_k3_kl"]
        assert 0 < row["train/with_replay/mismatch_k3_kl"] < without_replay / 3
        assert row["train/routing_difference"] > 0.2
        assert row["train/routing_difference/layer_0"] > 0.05


def test_the_measured_mismatch_is_that_of_a_run_with_replay(measured_rows, run):
    (replayed,) = run(*COARSE, "--num-steps-per-rollout", "2", *REPLAY, "--num-rollout", "1")[:1]
    first = measured_rows[0]
    names = ("mismatch_k3_kl", "ratio_max", "ratio_min", "train_rollout_logprob_abs_diff")
    for mode in ("with_replay", "without_replay"):
        keys = [f"train/{mode}/{name}" for name in names]
        expected = {key: replayed[key] for key in keys}
        assert {key: first[key] for key in keys} == pytest.approx(expected, rel=1e-5)
    assert first["train/routing_difference"] == replayed["train/routing_difference"]


OLD_LOG_PROBS = (
    "--num-steps-per-rollout",
    "2",
    "--lr",
    "3e-2",
    "--rollout-precision",
    "fp32",
)


@pytest.fixture(scope="module")
def old_log_prob_rows(task, tmp_path_factory):
    """Metrics of runs without replay, and with replay of the pass for old log-probs."""
    directory = tmp_path_factory.mktemp("old_log_probs")
    plain = run_here([*task, *OLD_LOG_PROBS], directory / "plain")
    replayed = run_here([*task, *OLD_LOG_PROBS, "--use-routing-replay"], directory / "replayed")
    return plain, replayed


def test_training_replays_the_pass_for_old_log_probs(old_log_prob_rows):
    _, replayed = old_log_prob_rows
    # the first step of a rollout has the same weights as that pass
    assert [row["train/routing_difference"] for row in replayed[::2]] == [0, 0, 0]
    assert all(row["train/routing_difference"] > 0 for row in replayed[1::2])


def test_replay_of_old_log_probs_changes_the_second_step(old_log_prob_rows):
    plain, replayed = old_log_prob_rows
    assert plain[0]["train/loss"] == replayed[0]["train/loss"]
    assert plain[1]["train/ppo_kl"] != replayed[1]["train/ppo_kl"]


def test_only_replay_has_routing_metrics(old_log_prob_rows):
    plain, replayed = old_log_prob_rows
    assert "train/routing_difference" not in plain[1]
    assert "train/routing_replay_missing" not in replayed[1]


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


@pytest.fixture(scope="module")
def spoilt(task, tmp_path_factory):
    """Flags of a run that loads its rollout, and metrics with all and without four records."""
    directory = tmp_path_factory.mktemp("spoilt")
    data = str(directory / "{rollout_id}.jsonl")
    flags = [*task, *COARSE, *REPLAY, "--routing-replay-weights", "--num-rollout", "1"]
    (complete,) = run_here([*flags, "--save-debug-rollout-data", data], directory / "complete")
    flags += ["--load-debug-rollout-data", data]
    (again,) = run_here(flags, directory / "again")
    assert training_metrics(again) == training_metrics(complete)  # the file has the records
    spoil(directory / "0.jsonl")
    (row,) = run_here(flags, directory / "spoilt")
    return flags, complete, row


def test_samples_without_usable_experts_are_counted(spoilt):
    _, complete, row = spoilt
    assert complete["train/routing_replay_missing"] == 0
    assert row["train/routing_replay_missing"] == 4


def test_samples_without_usable_experts_are_a_health_warning(spoilt):
    _, complete, row = spoilt
    assert "health/routing_replay" not in complete
    assert row["health/routing_replay"] == 1


def test_samples_without_usable_experts_train_without_replay(spoilt):
    _, complete, row = spoilt
    with_replay = "train/with_replay/mismatch_k3_kl"
    assert row[with_replay] > 100 * complete[with_replay]
    without_replay = "train/without_replay/mismatch_k3_kl"
    assert row[without_replay] == complete[without_replay]


def test_micro_batches_without_usable_experts_give_the_same_step(spoilt, tmp_path):
    flags, _, row = spoilt
    (split,) = run_here([*flags, "--micro-batch-size", "2"], tmp_path)
    assert training_metrics(split) == pytest.approx(training_metrics(row), rel=1e-4, abs=1e-6)


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
