"""Alarms during training in other trainers: causes, messages in their words, and the stop."""

import logging
import math

import pytest
import torch

from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.errors import HealthAlarm
from slime_tis.integrations import frameworks
from slime_tis.live_health import (
    LIVE_RULES,
    OPTIONS,
    STOPPING,
    Framework,
    LiveHealth,
    live_rules,
    logged,
)
from slime_tis.token_signs import sign_metrics, token_sums

CONFIG = RolloutCorrectionConfig(get_mismatch_metrics=True)
FRAMEWORKS = {
    name: value for name, value in vars(frameworks).items() if isinstance(value, Framework)
}
SAMPLES = 64
LENGTH = 12


def engines(temperature: float = 1.0, noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [64, 12] of training and of the engine that sampled, of 50 token ids."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(SAMPLES, LENGTH, 50, generator=generator)
    training = (logits / temperature).log_softmax(-1)
    changed = logits + noise * torch.randn(logits.shape, generator=generator)
    sampled = (changed / temperature).log_softmax(-1)
    tokens = torch.multinomial(sampled.exp().flatten(0, 1), 1, generator=generator)
    tokens = tokens.view(SAMPLES, LENGTH, 1)
    reported = changed.log_softmax(-1)
    return training.gather(2, tokens)[..., 0], reported.gather(2, tokens)[..., 0]


def metrics(train, rollout, age=None) -> dict[str, float]:
    """The metrics of a batch, as an adapter passes them."""
    mask = torch.ones_like(train)
    named = correct(CONFIG, train, rollout, mask).statistics.metrics()
    ages = None if age is None else torch.full(train.shape, age)
    named |= sign_metrics(token_sums(train, rollout, mask, age_BT=ages))
    return {f"train/{name}": value for name, value in named.items()}


def alarms(rows, framework=frameworks.TRL) -> list[tuple[int, str]]:
    """The step at which each alarm is first on."""
    health = LiveHealth(CONFIG, framework)
    first: dict[str, int] = {}
    for step, row in enumerate(rows):
        for name, value in health.check(step, row).items():
            if value == 1:
                first.setdefault(name.removeprefix("health/"), step)
    return [(step, name) for name, step in first.items()]


TRAIN, SAME = engines()
HEALTHY = metrics(TRAIN, SAME)
NOISY = metrics(*engines(noise=0.02))


def end_is_zero():
    rollout = SAME.clone()
    rollout[:, -1] = 0
    return rollout


def one_in_eight_shifted():
    rollout = SAME.clone()
    rollout[::8] = rollout[::8].roll(-1, 1)
    return rollout


CAUSES = {
    "placeholder_log_probs": metrics(TRAIN, end_is_zero()),
    "shifted_tokens": metrics(TRAIN, one_in_eight_shifted()),
    "broken_tokens": metrics(TRAIN, TRAIN / 0.7),
    "truncated_sampling": metrics(TRAIN, TRAIN + 0.1),
    "temperature": metrics(*engines(temperature=0.6)),
    "other_network": metrics(*engines(noise=1.0)),
    "nonfinite_log_probs": HEALTHY | {"train/nonfinite_token_fraction": 0.01},
}
"""Metrics of the first batch in which a cause acts."""


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_raises_only_its_own_alarm_at_once(cause):
    assert alarms([CAUSES[cause]] * 4) == [(0, cause)]


@pytest.mark.parametrize("row", [HEALTHY, NOISY], ids=["equal engines", "bf16 noise"])
def test_healthy_engines_raise_no_alarm(row):
    assert alarms([row] * 20) == []


def test_a_mismatch_that_begins_after_the_first_batch_is_missing_updates():
    later = metrics(*engines(noise=0.5))
    assert alarms([HEALTHY, later, later]) == [(2, "weights_not_updated")]


def test_a_known_age_explains_a_mismatch():
    stale = metrics(*engines(noise=1.0), age=4)
    assert alarms([HEALTHY, stale, stale]) == [(1, "staleness"), (2, "stale_weights")]


UNMEASURED = {"train/nonfinite_token_fraction": 0.0}
"""Metrics of a batch without one token that both engines know."""


def test_updates_before_the_first_measured_batch_are_counted():
    assert alarms([UNMEASURED, CAUSES["other_network"]]) == []


def test_a_step_without_data_is_not_the_first_batch():
    assert alarms([{}, CAUSES["other_network"]]) == [(1, "other_network")]


@pytest.mark.parametrize("name", ["train/mismatch_k3_kl", "train/mismatch_k3_kl_stale"])
def test_a_value_of_nan_is_missing(name):
    row = {"train/stale_age": 2.0, name: 0.4}
    unknown = row | {name: math.nan}
    health = LiveHealth(CONFIG, frameworks.TRL)
    first = [health.check(step, row) for step in (0, 1)][-1]
    later = [health.check(step, unknown) for step in range(2, 20)]
    assert 1.0 in first.values()
    # Not ended: nothing has been measured since.
    assert all(0.0 not in each.values() for each in later)


def test_advice_for_stale_weights_has_numbers(caplog):
    stale = HEALTHY | {"train/mismatch_k3_kl_stale": 0.2, "train/stale_age": 4.0}
    alarms([stale, stale])
    assert "at most 2 steps, or multiply GRPOConfig(learning_rate) by 0.5" in caplog.text


def test_weights_that_do_not_change_raise_an_alarm_after_two_steps():
    row = HEALTHY | {"train/changed_weight_fraction": 0.0}
    assert alarms([HEALTHY, row, row]) == [(2, "unchanged_policy")]


def test_without_reward_differences_unchanged_weights_are_expected():
    row = HEALTHY | {"train/changed_weight_fraction": 0.0, "rollout/zero_std_groups": 1.0}
    assert alarms([HEALTHY, row, row]) == [(2, "no_variance")]


def test_a_message_names_alarm_step_metric(caplog):
    alarms([HEALTHY, CAUSES["shifted_tokens"]])
    assert caplog.messages == [
        "health/shifted_tokens since step 1: correction/shifted_sample_fraction is 0.125: this"
        " share of the samples agrees with training after a shift by one token, or with a"
        " neighboring sample; return the log-probs in the order of the samples and of their"
        " tokens, without the prompt's."
    ]


def test_an_alarm_ends_once(caplog):
    alarms([CAUSES["temperature"], *[HEALTHY] * 12])
    assert len(caplog.messages) == 2
    assert caplog.messages[1].startswith("health/temperature has ended")


def test_a_quiet_process_prints_nothing(caplog):
    LiveHealth(CONFIG, frameworks.TRL, prints=False).check(0, CAUSES["temperature"])
    assert caplog.messages == []


@pytest.mark.parametrize("cause", sorted(set(CAUSES) & set(STOPPING)))
def test_a_fault_stops_the_run(cause):
    health = LiveHealth(CONFIG, frameworks.TRL, on_alarm="stop")
    with pytest.raises(HealthAlarm, match=f"health/{cause} since step 7"):
        health.check(7, CAUSES[cause])


def test_truncated_sampling_does_not_stop_a_run():
    health = LiveHealth(CONFIG, frameworks.TRL, on_alarm="stop")
    row = CAUSES["truncated_sampling"]
    assert health.check(0, row) == {"health/truncated_sampling": 1.0}


def test_an_unknown_reaction_is_refused():
    with pytest.raises(ValueError, match="on_alarm must be 'warn' or 'stop', not 'halt'"):
        LiveHealth(CONFIG, frameworks.TRL, on_alarm="halt")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_advice_names_the_options_of_the_framework(name):
    framework = FRAMEWORKS[name]
    advice = " ".join(rule.fix for rule in live_rules(framework))
    assert framework.options["learning_rate"] in advice
    assert not any(f"[{option}]" in advice for option in OPTIONS)


@pytest.mark.parametrize("name", ["TRL", "VERL", "TINKER"])
def test_advice_has_no_flag_of_our_trainer(name):
    assert not any("--tis" in rule.fix for rule in live_rules(FRAMEWORKS[name]))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_messages_begin_with_a_metric_of_the_framework(name):
    for rule in live_rules(FRAMEWORKS[name]):
        assert rule.message.startswith(f"{FRAMEWORKS[name].metric(rule.metric)} is ")


def test_every_stopping_alarm_has_a_rule():
    causes = {rule.cause for rule in live_rules(frameworks.TRL)}
    assert set(STOPPING) <= causes
    assert {rule.cause for rule in LIVE_RULES} <= causes


def test_by_default_a_dozen_metrics_are_logged():
    everything = correct(
        RolloutCorrectionConfig(use_tis=True, use_rs=True), TRAIN, SAME, torch.ones_like(TRAIN)
    ).statistics.metrics()
    assert len(logged(everything, all_metrics=False)) == 10
    assert logged(everything, all_metrics=True) == everything


def test_a_step_without_metrics_changes_nothing(caplog):
    caplog.set_level(logging.WARNING)
    assert LiveHealth(CONFIG, frameworks.TRL).check(0, {}) == {}
    assert caplog.messages == []
