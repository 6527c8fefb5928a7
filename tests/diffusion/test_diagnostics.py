"""Warnings about metrics: which, when, and each once."""

import pytest

from slime_tis import RolloutCorrectionConfig
from slime_tis.diffusion import Diagnostics

CONFIG = RolloutCorrectionConfig(use_tis=True, use_rs=True)


def said(diagnostics, steps, prefix="rollout_corr/", **metrics):
    row = {
        prefix + name: value for name, value in {"gradient_kept_fraction": 0.9, **metrics}.items()
    }
    return [(step, message) for step in range(1, steps + 1) for message in diagnostics.check(row)]


def test_warnings_appear_at_their_limits_once():
    assert said(Diagnostics(CONFIG), 9, rejected_sequence_fraction=0.5) == []
    assert said(Diagnostics(CONFIG), 60, rejected_sequence_fraction=0.05) == []
    diagnostics = Diagnostics(CONFIG)
    assert said(diagnostics, 9, rejected_sequence_fraction=0.5) + said(diagnostics, 1) == []
    assert said(diagnostics, 9, rejected_sequence_fraction=0.5) == []
    assert len(said(diagnostics, 1, rejected_sequence_fraction=0.5)) == 1
    ((step, message),) = said(Diagnostics(CONFIG), 5, mismatch_log_ppl_abs_diff=1.31)
    assert step == 1 and message.startswith(
        "mismatch_log_ppl_abs_diff is 1.31 nats at step 1, above 1: rollout and"
    )
    assert said(Diagnostics(CONFIG), 60, mismatch_log_ppl_abs_diff=1.0) == []
    late = Diagnostics(CONFIG)
    said(late, 50)
    assert said(late, 5, mismatch_log_ppl_abs_diff=9.0) == []
    ((step, message),) = said(
        Diagnostics(CONFIG), 60, rejected_sequence_fraction=0.06, gradient_kept_fraction=0.95
    )
    assert step == 10 and message.startswith("6.0% of the sequences lost a step to rejection")
    metrics = {
        "rejected_sequence_fraction": 0.3,
        "mismatch_log_ppl_abs_diff": 2.0,
        "mis_truncate_fraction": 0.1,
    }
    assert [step for step, _ in said(Diagnostics(CONFIG), 60, **metrics)] == [1, 10, 10]


def test_the_fix_fits_the_configuration():
    config = RolloutCorrectionConfig(
        use_rollout_logprobs=True, use_rs=True, rejection_normalizer="original"
    )
    metrics = {"rejected_sequence_fraction": 0.2, "gradient_kept_fraction": 0.83}
    ((_, message),) = said(Diagnostics(config), 10, "actor/rollout_corr/", **metrics)
    assert "The gradient is shrunk to 83% by it; --rejection-normalizer kept" in message
    assert "Without --use-rollout-logprobs rejection compares π_old" in message
    assert said(Diagnostics(config), 10, "rollout_corr/", **metrics) == [], (
        "the metrics of another mode"
    )


@pytest.mark.parametrize(
    ("mode", "metric", "expected"),
    [
        ("truncate", "mis_truncate_fraction", 1),
        ("clip", "mis_clip_fraction_high", 1),
        ("mask", "mis_mask_fraction_high", 0),
    ],
)
def test_a_largest_weight_at_its_bound_is_said(mode, metric, expected):
    config = RolloutCorrectionConfig(use_tis=True, tis_mode=mode, tis_upper_bound=3.0)
    found = said(Diagnostics(config), 50, **{metric: 0.01})
    assert [step for step, _ in found] == [10] * expected
    assert all(
        s.startswith("The largest weight was at its bound --tis-upper-bound 3 in each")
        for _, s in found
    )
    late = Diagnostics(config)
    said(late, 45)
    assert said(late, 20, **{metric: 0.01}) == []
