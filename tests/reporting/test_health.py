"""Each finding by the metrics of a step; said once, and once more when it is over."""

from collections.abc import Mapping

import pytest

from slime_tis import RolloutCorrectionConfig
from slime_tis.trainer.reporting.health import RULES, Health, findings

TIS = RolloutCorrectionConfig(use_tis=True)
NOTHING = RolloutCorrectionConfig()
GOOD = {
    "train/gradient_kept_fraction": 0.9,
    "train/mis_eff_sample_size": 0.5,
    "train/mis_truncate_fraction": 0.05,
    "train/grad_norm": 1e-9,
    "train/nonfinite_gradient_steps": 0.0,
    "train/nonfinite_token_fraction": 0.0,
    "rollout/zero_std_groups": 0.99,
    "rollout/raw_reward": 0.5,
    "rollout/weight_staleness": 3.0,
    "rollout/update_received": 0.5,
    "train/mismatch_k3_kl": 0.05,
    "perf/micro_batch_load": 1.0,
}
BAD: dict[str, tuple[dict[str, float], str]] = {
    "rejection": (
        {"train/gradient_kept_fraction": 0.46},
        "train/gradient_kept_fraction is 0.46: 54.0% of the tokens are rejected, more than 10%, so training is on a "
        "selected set; widen the bounds that reject, let them follow length and noise (--rs-target-fraction 0.02), "
        "or bring "
        "the rollout closer (higher precision, newer weights).",
    ),
    "effective_samples": (
        {"train/mis_eff_sample_size": 0.31},
        "train/mis_eff_sample_size is 0.31: fewer than 50% of the samples carry the gradient, the rest is noise; lower "
        "--tis-upper-bound, weight at a lower level (--tis-level token), or bring the rollout closer.",
    ),
    "at_bound": (
        {"train/mis_truncate_fraction": 0.2},
        "train/mis_truncate_fraction is 0.2: in each of the last 10 steps more than 5% of the weights were at "
        "--tis-upper-bound 2, so the bound decides the weights; raise it, weight at a lower level, or bring the "
        "rollout closer.",
    ),
    "zero_gradient": (
        {"train/grad_norm": 0.0},
        "train/grad_norm is 0: nothing is learned from this step: all advantages are 0, as they are where all samples "
        "of a group have the same reward; check the reward function and the difficulty of the prompts.",
    ),
    "nonfinite_gradient": (
        {"train/nonfinite_gradient_steps": 1.0},
        "train/nonfinite_gradient_steps is 1: the gradient was NaN or infinite and the step was left out; lower "
        "--lr, and "
        "look at rewards, --kl-loss-coef and --entropy-coef.",
    ),
    "nonfinite_log_probs": (
        {"train/nonfinite_token_fraction": 0.01},
        "train/nonfinite_token_fraction is 0.01: log-probs of the rollout or of the training engine are NaN, "
        "infinite or "
        "missing; look at the rollout engine's numbers. --nonfinite-policy reject is what happens to these tokens.",
    ),
    "no_variance": (
        {"rollout/zero_std_groups": 1.0},
        "rollout/zero_std_groups is 1: in every group all samples have the same reward, so that all advantages are "
        "0; take "
        "prompts of another difficulty, more samples per prompt, or a reward that distinguishes answers.",
    ),
    "mismatch": (
        {"train/mismatch_k3_kl": 0.2},
        "train/mismatch_k3_kl is 0.2: more than 0.05 nats per token between rollout and training policy; compare their "
        "weights (--check-weight-sync), temperature, tokenizer and chat template, then raise the rollout's precision.",
    ),
    "routing_replay": (
        {"train/routing_replay_missing": 16.0},
        "train/routing_replay_missing is 16: this number of samples of the step has no experts that can be replayed, "
        "so training routes them itself; generate the samples with --use-rollout-routing-replay and an engine that "
        "records experts (docs/moe.md).",
    ),
    "absorbed_updates": (
        {"rollout/update_received": 0.02},
        "rollout/update_received is 0.02: in each of the last 3 updates rounding to the rollout engine's precision "
        "kept back more than 50%, so samples are staler than rollout/weight_staleness says; add "
        "--weight-update-rounding stochastic, train in the engine's precision (--bf16), or raise --lr or the engine's "
        "precision.",
    ),
    "micro_batch_load": (
        {"perf/micro_batch_load": 1.5},
        "perf/micro_batch_load is 1.5: a micro-batch is over the token budget: a sample, or the segments of a rollout, "
        "which are in one micro-batch, have more tokens, and may not fit into memory; raise --max-tokens-per-gpu, "
        "lower --rollout-max-context-len, or return fewer or shorter segments.",
    ),
}


def said(health: Health, rows: list[Mapping[str, float]]) -> list[tuple[int, str]]:
    """(step, message) of rows."""
    return [(step, message) for step, row in enumerate(rows, start=1) for message in health.check(row).messages]


def test_values_at_the_limits_are_no_finding() -> None:
    assert said(Health(TIS), [GOOD] * 50) == []
    assert Health(TIS).check(GOOD).metrics == {}


@pytest.mark.parametrize("name", BAD)
def test_a_finding_is_said_once_and_marks_every_step(name: str) -> None:
    metrics, message = BAD[name]
    health, after = Health(TIS), RULES[name].after
    rows = [health.check(GOOD | metrics) for _ in range(after + 5)]
    assert [row.messages for row in rows] == [[]] * (after - 1) + [[message]] + [[]] * 5
    assert [row.metrics for row in rows] == [{}] * (after - 1) + [{f"health/{name}": 1.0}] * 6


def test_a_finding_that_comes_and_goes_does_not_flap() -> None:
    bad = GOOD | {"train/grad_norm": 0.0}
    health = Health(TIS)
    assert len(said(health, [bad, GOOD, bad, *[GOOD] * 9, bad])) == 1
    assert said(health, [GOOD] * 12) == [
        (10, "health/zero_gradient is over: it did not hold in the last 10 steps."),
    ]
    assert len(said(health, [bad])) == 1, "and is said again when it is back"


def test_the_step_at_which_it_is_over_is_marked_with_zero() -> None:
    health = Health(TIS)
    rows = [health.check(row).metrics for row in [GOOD | {"train/grad_norm": 0.0}, *[GOOD] * 11]]
    assert rows == [{"health/zero_gradient": 1.0}] * 10 + [{"health/zero_gradient": 0.0}, {}]


def test_rejecting_everything_is_named_as_the_cause_of_no_gradient() -> None:
    row = GOOD | {"train/grad_norm": 0.0, "train/skipped_steps": 1.0}
    ((_, message),) = said(Health(TIS), [row])
    assert message.startswith(
        "train/grad_norm is 0: nothing was left to train on: everything was rejected or left out;"
    )


def test_rejection_of_retokenized_samples_does_not_blame_the_bounds() -> None:
    row = GOOD | {"train/grad_norm": 0.0, "train/skipped_steps": 1.0, "train/gradient_kept_fraction": 0.0}
    all_retokenized = {"rollout/retokenized": 1.0}
    found = findings(row | all_retokenized, TIS)
    assert found["rejection"] is None and "retokenized" in str(found["zero_gradient"])
    half = findings(row | {"rollout/retokenized": 0.5}, TIS)
    assert half["rejection"] is not None and "widen the bounds" in str(half["zero_gradient"])
    assert findings(GOOD | all_retokenized | {"train/gradient_kept_fraction": 0.4}, TIS)["rejection"] is not None


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (NOTHING, ["staleness"]),
        (RolloutCorrectionConfig(get_mismatch_metrics=True), ["staleness"]),
        (TIS, []),
        (RolloutCorrectionConfig(use_rollout_logprobs=True), []),
        (RolloutCorrectionConfig(old_logprobs="interpolate"), []),
    ],
    ids=["no correction", "metrics only", "TIS", "bypass", "interpolated old policy"],
)
def test_staleness_is_said_where_nothing_corrects_it(config: RolloutCorrectionConfig, names: list[str]) -> None:
    assert [name for name, finding in findings(GOOD, config).items() if finding] == names
    assert findings(GOOD | {"rollout/weight_staleness": 0.0}, config)["staleness"] is None


def test_a_reward_that_never_changes_is_said_after_ten_rollouts() -> None:
    same = GOOD | {"rollout/zero_std_groups": 1.0, "rollout/raw_reward": 0.0}
    messages = said(Health(TIS), [same] * 12)
    assert [
        step for step, message in messages if message.startswith("rollout/raw_reward is 0: every sample of the")
    ] == [10]
    varied = [same | {"rollout/raw_reward": step % 2 / 2} for step in range(30)]
    assert not any("rollout/raw_reward" in message for _, message in said(Health(TIS), varied))


def test_what_was_not_measured_is_no_finding_and_ends_none() -> None:
    assert findings({}, NOTHING) == {}
    health = Health(TIS)
    assert len(said(health, [GOOD | {"train/grad_norm": 0.0}])) == 1
    assert said(health, [{}] * 30) == []


def test_nan_is_reported_by_the_metric_that_counts_it_alone() -> None:
    row = dict.fromkeys(GOOD, float("nan")) | {"train/nonfinite_gradient_steps": 1.0}
    assert [name for name, finding in findings(row, TIS).items() if finding] == ["nonfinite_gradient"]
