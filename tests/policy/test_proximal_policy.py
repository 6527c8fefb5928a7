"""Which forward passes the options ask for."""

import pytest

from slime_tis.correction import RolloutCorrectionConfig
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.proximal_policy import (
    clip_is_inactive,
    needs_global_batch,
    needs_old_log_probs,
    uses_recomputed_old_policy,
)

NORMALIZES = {"use_tis": True, "tis_batch_normalize": True}
TRIMS = {"rs_second_moment_bound": 0.1}
ADAPTS = {"use_rs": True, "rs_level": "geometric", "rs_z_score": 3.0}
BYPASS = {"use_rollout_logprobs": True, "policy_loss": "reinforce"}
INTERPOLATES = {"old_logprobs": "interpolate"}
# options: what is needed of the global batch; the loss uses a recomputed π_old with 1 step, with 2; pass with 1
CASES = {
    "nothing": ({}, False, False, True, False),
    "batch-normalise without TIS": ({"tis_batch_normalize": True}, False, False, True, False),
    "batch-normalise": (NORMALIZES, True, True, True, True),
    "trimming": (TRIMS, True, True, True, True),
    "z-score": (ADAPTS, True, True, True, True),
    "metrics": ({"get_mismatch_metrics": True}, False, False, True, False),
    "bypass": (BYPASS, False, False, False, False),
    "bypass with metrics": ({**BYPASS, "get_mismatch_metrics": True}, False, False, False, False),
    "bypass, batch-normalise": ({**BYPASS, **NORMALIZES}, True, False, False, False),
    "bypass, z-score": ({**BYPASS, **ADAPTS}, True, False, False, False),
    "interpolated, trimming": ({**INTERPOLATES, **TRIMS}, True, False, False, False),
}


@pytest.mark.parametrize(("options", "of_batch", "once", "twice", "forward"), CASES.values(), ids=CASES)
def test_forward_passes(options, of_batch, once, twice, forward):
    config = RolloutCorrectionConfig(**options)
    assert needs_global_batch(config) == of_batch
    assert [uses_recomputed_old_policy(config, steps) for steps in (1, 2)] == [once, twice]
    assert needs_old_log_probs(config, 1, PolicyConfig()) == forward
    assert needs_old_log_probs(config, 2, PolicyConfig()) == (twice or config.get_mismatch_metrics)
    for policy in ({"reject_before_advantage": True}, {"advantage_estimator": "optimal_token_baseline"}):
        assert needs_old_log_probs(config, 1, PolicyConfig(**policy))


@pytest.mark.parametrize(
    ("options", "once"),
    [({}, True), (NORMALIZES, True), (BYPASS, False), (INTERPOLATES, False)],
    ids=["decoupled", "batch-normalised", "bypass", "interpolated"],
)
def test_the_clip_acts_unless_the_policy_is_its_own_old_policy(options, once):
    config = RolloutCorrectionConfig(**options)
    assert [clip_is_inactive(config, steps) for steps in (1, 2)] == [once, False]
