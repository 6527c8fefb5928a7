"""Health warnings: each rule on the metrics of one step, and when warnings begin and end."""

import pytest

from slime_tis import RolloutCorrectionConfig
from slime_tis.health import STEP_RULES, Health, evaluate

TIS = RolloutCorrectionConfig(use_tis=True)
NO_CORRECTION = RolloutCorrectionConfig()
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
    "rollout/retokenized": 0.0,
    "train/mismatch_k3_kl": 0.05,
    "train/worst_worker": 2.0,
    "train/worst_worker_abs_diff": 0.01,
    "train/worst_worker_ratio": 3.0,
    "perf/micro_batch_load": 1.0,
}
BAD = {
    "rejection": ("train/gradient_kept_fraction", 0.46, 2, "54.0% of the tokens are rejected"),
    "effective_samples": ("train/mis_eff_sample_size", 0.31, 2, "fewer than 50%"),
    "at_bound": ("train/mis_truncate_fraction", 0.2, 10, "--tis-upper-bound 2"),
    "zero_gradient": ("train/grad_norm", 0.0, 1, "all advantages are 0"),
    "nonfinite_gradient": ("train/nonfinite_gradient_steps", 1.0, 1, "the step was skipped"),
    "nonfinite_log_probs": ("train/nonfinite_token_fraction", 0.01, 1, "--nonfinite-policy reject"),
    "no_variance": ("rollout/zero_std_groups", 1.0, 2, "all rewards are equal"),
    "mismatch": ("train/mismatch_k3_kl", 0.2, 2, "--check-weight-sync"),
    "routing_replay": ("train/routing_replay_missing", 16.0, 1, "no recorded experts"),
    "worst_worker": ("train/worst_worker_ratio", 9.0, 3, "rollout server 2"),
    "retokenized": ("rollout/retokenized", 0.1, 1, "token ids instead of text"),
    "absorbed_updates": ("rollout/update_received", 0.02, 3, "--weight-update-rounding stochastic"),
    "micro_batch_load": ("perf/micro_batch_load", 1.5, 1, "--max-tokens-per-gpu"),
}
"""Rule: its metric, a bad value, steps until the warning, and a part of the message."""


def messages(health, rows):
    return [
        (step, message)
        for step, row in enumerate(rows, start=1)
        for message in health.check(row)[1]
    ]


def causes(row, config=TIS):
    return [name for name, finding in evaluate(STEP_RULES, row, config).items() if finding]


def test_values_at_the_limits_and_missing_or_nan_metrics_are_healthy():
    assert messages(Health(TIS), [GOOD] * 50) == []
    assert Health(TIS).check(GOOD) == ({}, [])
    assert evaluate(STEP_RULES, {}, NO_CORRECTION) == {}
    health = Health(TIS)
    assert len(messages(health, [GOOD | {"train/grad_norm": 0.0}])) == 1
    assert messages(health, [{}] * 30) == []
    assert causes(dict.fromkeys(GOOD, float("nan")) | {"train/nonfinite_gradient_steps": 1.0}) == [
        "nonfinite_gradient"
    ]


@pytest.mark.parametrize("name", BAD)
def test_a_finding_is_printed_once_and_marks_every_step(name):
    metric, value, after, text = BAD[name]
    health = Health(TIS)
    rows = [health.check(GOOD | {metric: value}) for _ in range(after + 5)]
    assert [len(found) for _, found in rows] == [0] * (after - 1) + [1] + [0] * 5
    (message,) = rows[after - 1][1]
    assert (
        message.startswith(f"{metric} is {value:.3g}: ")
        and text in message
        and message.endswith(".")
    )
    assert [metrics for metrics, _ in rows] == [{}] * (after - 1) + [{f"health/{name}": 1.0}] * 6


def test_a_finding_that_comes_and_goes_does_not_flap():
    bad = GOOD | {"train/grad_norm": 0.0}
    health = Health(TIS)
    assert len(messages(health, [bad, GOOD, bad, *[GOOD] * 9, bad])) == 1
    reports = [health.check(GOOD) for _ in range(12)]
    assert [len(found) for _, found in reports] == [0] * 9 + [1, 0, 0]
    assert [metrics for metrics, _ in reports] == [{"health/zero_gradient": 1.0}] * 9 + [
        {"health/zero_gradient": 0.0},
        {},
        {},
    ]


def test_messages_fit_the_mode_and_the_cause():
    row = GOOD | {
        "train/grad_norm": 0.0,
        "train/skipped_steps": 1.0,
        "train/gradient_kept_fraction": 0.0,
    }
    for retokenized, text in (
        (0.0, "widen the bounds"),
        (0.5, "widen the bounds"),
        (1.0, "retokenized"),
    ):
        findings = evaluate(STEP_RULES, row | {"rollout/retokenized": retokenized}, TIS)
        assert text in str(findings["zero_gradient"])
        assert (findings["rejection"] is None) == (retokenized == 1)
    assert "rejection" in causes(
        GOOD | {"rollout/retokenized": 1.0, "train/gradient_kept_fraction": 0.4}
    )
    clip = RolloutCorrectionConfig(use_tis=True, tis_mode="clip", tis_lower_bound=0.5)
    row = GOOD | {"train/mis_clip_fraction_high": 0.2}
    assert causes(row, clip) == ["at_bound"] and causes(row, TIS) == []
    same = GOOD | {"rollout/zero_std_groups": 1.0, "rollout/raw_reward": 0.0}
    found = [
        step
        for step, message in messages(Health(TIS), [same] * 12)
        if "rollout/raw_reward is 0" in message
    ]
    assert found == [10]
    varied = [same | {"rollout/raw_reward": step % 2 / 2} for step in range(30)]
    assert not any("rollout/raw_reward" in message for _, message in messages(Health(TIS), varied))


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (NO_CORRECTION, ["staleness"]),
        (RolloutCorrectionConfig(get_mismatch_metrics=True), ["staleness"]),
        (TIS, []),
        (RolloutCorrectionConfig(use_rollout_logprobs=True), []),
        (RolloutCorrectionConfig(old_logprobs="interpolate"), []),
    ],
    ids=["no correction", "metrics only", "TIS", "bypass", "interpolated old policy"],
)
def test_uncorrected_staleness_is_a_finding(config, names):
    assert causes(GOOD, config) == names
    for metrics in (
        {"rollout/weight_staleness": 0.0},
        {"train/opsm_clipfrac": 0.0},
        {"train/rollout_pull": 0.1},
    ):
        assert "staleness" not in causes(GOOD | metrics, config)
