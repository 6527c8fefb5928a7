"""Warnings about metrics: which, when, and each once."""

from typing import NamedTuple

import pytest

from slime_tis import RolloutCorrectionConfig
from slime_tis.diffusion import Diagnostics

CONFIG = RolloutCorrectionConfig(use_tis=True, use_rs=True)


class StepWarning(NamedTuple):
    """A message, and the step whose metrics gave it, from 1."""

    step: int
    message: str


def warnings_of(
    diagnostics: Diagnostics, steps: int, prefix: str = "rollout_corr/", **metrics: float
) -> list[StepWarning]:
    """The warnings of several steps with the same metrics."""
    values = {"gradient_kept_fraction": 0.9, **metrics}
    row = {prefix + name: value for name, value in values.items()}
    warnings = []
    for step in range(1, steps + 1):
        warnings += [StepWarning(step, message) for message in diagnostics.check(row)]
    return warnings


@pytest.fixture
def diagnostics() -> Diagnostics:
    return Diagnostics(CONFIG)


def test_nine_steps_of_rejection_do_not_warn(diagnostics):
    assert warnings_of(diagnostics, 9, rejected_sequence_fraction=0.5) == []


def test_rejection_at_its_limit_does_not_warn(diagnostics):
    assert warnings_of(diagnostics, 60, rejected_sequence_fraction=0.05) == []


def test_rejection_above_its_limit_warns_once(diagnostics):
    metrics = {"rejected_sequence_fraction": 0.06, "gradient_kept_fraction": 0.95}
    (warning,) = warnings_of(diagnostics, 60, **metrics)
    assert warning.step == 10
    assert warning.message.startswith("6.0% of the sequences lost a step to rejection")


def test_a_step_without_rejection_starts_the_count_again(diagnostics):
    warnings_of(diagnostics, 9, rejected_sequence_fraction=0.5)
    warnings_of(diagnostics, 1)
    (warning,) = warnings_of(diagnostics, 10, rejected_sequence_fraction=0.5)
    assert warning.step == 10


def test_a_mismatch_at_its_limit_does_not_warn(diagnostics):
    assert warnings_of(diagnostics, 60, mismatch_log_ppl_abs_diff=1.0) == []


def test_a_mismatch_above_its_limit_warns_at_once(diagnostics):
    (warning,) = warnings_of(diagnostics, 5, mismatch_log_ppl_abs_diff=1.31)
    assert warning.step == 1
    words = "mismatch_log_ppl_abs_diff is 1.31 nats at step 1, above 1: rollout and"
    assert warning.message.startswith(words)


def test_a_mismatch_after_fifty_steps_does_not_warn(diagnostics):
    warnings_of(diagnostics, 50)
    assert warnings_of(diagnostics, 5, mismatch_log_ppl_abs_diff=9.0) == []


def test_each_condition_warns_once(diagnostics):
    warnings = warnings_of(
        diagnostics,
        60,
        rejected_sequence_fraction=0.3,
        mismatch_log_ppl_abs_diff=2.0,
        mis_truncate_fraction=0.1,
    )
    assert [warning.step for warning in warnings] == [1, 10, 10]


BYPASS = RolloutCorrectionConfig(
    use_rollout_logprobs=True, use_rs=True, rejection_normalizer="original"
)
SHRUNK = {"rejected_sequence_fraction": 0.2, "gradient_kept_fraction": 0.83}


@pytest.mark.parametrize(
    "fix",
    [
        "The gradient is shrunk to 83% by it; --rejection-normalizer kept",
        "Without --use-rollout-logprobs rejection compares π_old",
    ],
    ids=["normalizer", "bypass"],
)
def test_the_fix_fits_the_configuration(fix):
    (warning,) = warnings_of(Diagnostics(BYPASS), 10, "actor/rollout_corr/", **SHRUNK)
    assert fix in warning.message


def test_metrics_of_another_mode_are_not_read():
    assert warnings_of(Diagnostics(BYPASS), 10, "rollout_corr/", **SHRUNK) == []


@pytest.mark.parametrize(
    ("mode", "metric"),
    [("truncate", "mis_truncate_fraction"), ("clip", "mis_clip_fraction_high")],
    ids=["truncate", "clip"],
)
def test_weights_at_their_bound_for_ten_steps_warn(mode, metric):
    config = RolloutCorrectionConfig(use_tis=True, tis_mode=mode, tis_upper_bound=3.0)
    (warning,) = warnings_of(Diagnostics(config), 50, **{metric: 0.01})
    assert warning.step == 10
    words = "The largest weight was at its bound --tis-upper-bound 3 in each"
    assert warning.message.startswith(words)


def test_weights_masked_at_their_bound_do_not_warn():
    config = RolloutCorrectionConfig(use_tis=True, tis_mode="mask", tis_upper_bound=3.0)
    assert warnings_of(Diagnostics(config), 50, mis_mask_fraction_high=0.01) == []


def test_weights_at_their_bound_after_fifty_steps_do_not_warn():
    config = RolloutCorrectionConfig(use_tis=True, tis_mode="truncate", tis_upper_bound=3.0)
    diagnostics = Diagnostics(config)
    warnings_of(diagnostics, 45)
    assert warnings_of(diagnostics, 20, mis_truncate_fraction=0.01) == []
