"""Health warnings: each rule on the metrics of one step, and when warnings begin and end."""

from collections.abc import Iterable

import pytest

from slime_tis import RolloutCorrectionConfig
from slime_tis.health import STEP_RULES, Finding, Health, evaluate

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


ZERO_GRADIENT = GOOD | {"train/grad_norm": 0.0}
EQUAL_REWARDS = GOOD | {"rollout/zero_std_groups": 1.0, "rollout/raw_reward": 0.0}


def messages(health: Health, rows: Iterable[dict[str, float]]) -> list[tuple[int, str]]:
    """Returns the step and the text of every message for consecutive steps."""
    return [
        (step, message)
        for step, row in enumerate(rows, start=1)
        for message in health.check(row)[1]
    ]


def causes(row: dict[str, float], config: RolloutCorrectionConfig = TIS) -> list[str]:
    """Returns the rules that find a problem in the metrics of one step."""
    return [name for name, finding in evaluate(STEP_RULES, row, config).items() if finding]


def test_values_at_the_limits_are_healthy():
    assert Health(TIS).check(GOOD) == ({}, [])


def test_a_healthy_run_has_no_messages():
    assert messages(Health(TIS), [GOOD] * 50) == []


def test_a_step_without_metrics_is_healthy():
    assert evaluate(STEP_RULES, {}, NO_CORRECTION) == {}


def test_a_rule_is_skipped_if_its_message_lacks_a_value():
    row = GOOD | {"train/worst_worker_ratio": 9.0}
    del row["train/worst_worker"]  # only the message has it
    findings = evaluate(STEP_RULES, row, TIS)
    assert "worst_worker" not in findings
    assert findings["mismatch"] is None


def test_steps_without_metrics_do_not_end_a_finding():
    health = Health(TIS)
    assert len(messages(health, [ZERO_GRADIENT])) == 1
    assert messages(health, [{}] * 30) == []


def test_metrics_that_are_nan_are_healthy():
    row = dict.fromkeys(GOOD, float("nan"))
    row["train/nonfinite_gradient_steps"] = 1.0
    assert causes(row) == ["nonfinite_gradient"]


@pytest.mark.parametrize("name", BAD)
def test_a_finding_that_lasts_is_printed_once(name):
    metric, value, after, _ = BAD[name]
    health = Health(TIS)
    bad = GOOD | {metric: value}
    printed = [len(health.check(bad)[1]) for _ in range(after + 5)]
    assert printed == [0] * (after - 1) + [1] + [0] * 5


@pytest.mark.parametrize("name", BAD)
def test_a_message_has_the_metric_the_value_and_advice(name):
    metric, value, after, text = BAD[name]
    ((_, message),) = messages(Health(TIS), [GOOD | {metric: value}] * after)
    assert message.startswith(f"{metric} is {value:.3g}: ")
    assert text in message
    assert message.endswith(".")


@pytest.mark.parametrize("name", BAD)
def test_a_finding_marks_each_step_at_which_it_holds(name):
    metric, value, after, _ = BAD[name]
    health = Health(TIS)
    bad = GOOD | {metric: value}
    marks = [health.check(bad)[0] for _ in range(after + 5)]
    assert marks == [{}] * (after - 1) + [{f"health/{name}": 1.0}] * 6


@pytest.fixture
def intermittent() -> Health:
    """Health after a finding at steps 1, 3 and 13."""
    health = Health(TIS)
    rows = [ZERO_GRADIENT, GOOD, ZERO_GRADIENT, *[GOOD] * 9, ZERO_GRADIENT]
    assert len(messages(health, rows)) == 1
    return health


def test_a_finding_that_recurs_ends_once(intermittent):
    printed = [len(intermittent.check(GOOD)[1]) for _ in range(12)]
    assert printed == [0] * 9 + [1, 0, 0]


def test_a_finding_that_recurs_is_marked_until_it_ends(intermittent):
    marks = [intermittent.check(GOOD)[0] for _ in range(12)]
    held = [{"health/zero_gradient": 1.0}] * 9
    assert marks == [*held, {"health/zero_gradient": 0.0}, {}, {}]


def findings_if_all_is_rejected(retokenized: float) -> dict[str, Finding | None]:
    """Findings of a skipped step whose tokens are all rejected."""
    row = GOOD | {
        "train/grad_norm": 0.0,
        "train/skipped_steps": 1.0,
        "train/gradient_kept_fraction": 0.0,
        "rollout/retokenized": retokenized,
    }
    return evaluate(STEP_RULES, row, TIS)


@pytest.mark.parametrize(
    ("retokenized", "text"),
    [(0.0, "widen the bounds"), (0.5, "widen the bounds"), (1.0, "retokenized")],
    ids=["no sample retokenized", "half retokenized", "all retokenized"],
)
def test_a_zero_gradient_message_fits_its_cause(retokenized, text):
    assert text in str(findings_if_all_is_rejected(retokenized)["zero_gradient"])


@pytest.mark.parametrize("retokenized", [0.0, 0.5], ids=["none", "half"])
def test_a_complete_rejection_is_a_finding(retokenized):
    assert findings_if_all_is_rejected(retokenized)["rejection"] is not None


def test_rejection_of_only_retokenized_samples_is_no_finding():
    assert findings_if_all_is_rejected(1.0)["rejection"] is None


def test_a_partial_rejection_is_a_finding_if_all_is_retokenized():
    row = GOOD | {"rollout/retokenized": 1.0, "train/gradient_kept_fraction": 0.4}
    assert "rejection" in causes(row)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (RolloutCorrectionConfig(use_tis=True, tis_mode="clip", tis_lower_bound=0.5), ["at_bound"]),
        (TIS, []),
    ],
    ids=["clip", "truncate"],
)
def test_clipped_weights_are_a_finding_only_in_clip_mode(config, names):
    assert causes(GOOD | {"train/mis_clip_fraction_high": 0.2}, config) == names


def test_a_reward_that_never_changes_is_reported_after_ten_steps():
    steps = [
        step
        for step, message in messages(Health(TIS), [EQUAL_REWARDS] * 12)
        if "rollout/raw_reward is 0" in message
    ]
    assert steps == [10]


def test_a_reward_that_changes_between_steps_is_healthy():
    rows = [EQUAL_REWARDS | {"rollout/raw_reward": step % 2 / 2} for step in range(30)]
    printed = messages(Health(TIS), rows)
    assert not any("rollout/raw_reward" in message for _, message in printed)


STALENESS = {
    "no correction": (NO_CORRECTION, ["staleness"]),
    "metrics only": (RolloutCorrectionConfig(get_mismatch_metrics=True), ["staleness"]),
    "TIS": (TIS, []),
    "bypass": (RolloutCorrectionConfig(use_rollout_logprobs=True), []),
    "interpolated old policy": (RolloutCorrectionConfig(old_logprobs="interpolate"), []),
}
"""Configuration, and the rules that find a problem in stale samples."""


@pytest.mark.parametrize(("config", "names"), STALENESS.values(), ids=STALENESS)
def test_uncorrected_staleness_is_a_finding(config, names):
    assert causes(GOOD, config) == names


@pytest.mark.parametrize(
    "metrics",
    [
        {"rollout/weight_staleness": 0.0},
        {"train/opsm_clipfrac": 0.0},
        {"train/rollout_pull": 0.1},
    ],
    ids=["fresh weights", "masked by OPSM", "pulled to the sampling policy"],
)
@pytest.mark.parametrize("name", STALENESS)
def test_absent_or_corrected_staleness_is_no_finding(name, metrics):
    config, _ = STALENESS[name]
    assert "staleness" not in causes(GOOD | metrics, config)
