"""verl's configuration class: presets, both spellings, and the way to ours."""

import pytest

from slime_tis import PRESETS, RolloutCorrectionConfig
from slime_tis.correction.config import POLICY_PRESETS
from slime_tis.integrations.verl_config import RolloutCorrectionConfig as VerlConfig

OURS = {*POLICY_PRESETS, "seq_mask_tis", *(name for name in PRESETS if name.endswith("_adaptive"))}
VERL_PRESETS = [name for name in PRESETS if name not in OURS]


@pytest.mark.parametrize("name", VERL_PRESETS)
def test_presets_say_what_ours_say(name):
    """The same rejection, weights and mode; verl's criteria are named token_k1 where ours are named by level."""
    ours, theirs = RolloutCorrectionConfig.preset(name), getattr(VerlConfig, name)().to_config()
    for field in (
        "use_tis",
        "use_rollout_logprobs",
        "policy_loss",
        "rs_veto_threshold",
        "rejection_normalizer",
    ):
        assert getattr(ours, field) == getattr(theirs, field), field
    if ours.use_tis:
        assert (ours.tis_level, ours.tis_mode, ours.is_bounds) == (
            theirs.tis_level,
            theirs.tis_mode,
            theirs.is_bounds,
        )
    bounds = [
        [(c.aggregation, c.divergence, c.lower, c.upper) for c in x.rejections]
        for x in (ours, theirs)
    ]
    assert bounds[0] == bounds[1]


def test_older_spelling():
    old = VerlConfig(
        rollout_is=None,
        rollout_rs="geometric",
        rollout_rs_threshold=1.001,
        rollout_rs_threshold_lower=0.999,
        rollout_token_veto_threshold=1e-4,
        bypass_old_logprob_for_rollout=True,
        use_pure_rollout_correction=True,
    )
    assert old.bypass_mode and old.loss_type == "reinforce"
    config = old.to_config()
    assert config.rs_level == "geometric" and config.rs_bounds == (0.999, 1.001)
    assert (
        config.use_rollout_logprobs
        and config.policy_loss == "reinforce"
        and config.rs_veto_threshold == 1e-4
    )
    assert VerlConfig(bypass_mode=True, use_policy_gradient=True).loss_type == "reinforce"


def test_arguments_of_presets():
    config = VerlConfig.decoupled_seq_is_rs(is_threshold=3.0, rs_threshold="0.4_4.0").to_config()
    assert config.tis_upper_bound == 3.0 and config.rejections[0].upper == 4.0
    assert VerlConfig.pg_rs(veto_threshold=None).to_config().rs_veto_threshold is None
    assert VerlConfig.decoupled_token_icepop(4.0, 0.25).to_config().is_bounds == (0.25, 4.0)
    assert VerlConfig.decoupled_k3_rs(rs_threshold=0.02).to_config().rejections[0].upper == 0.02
    measured = VerlConfig.ppo_is_bypass(threshold=3.0).to_config()
    assert not measured.use_tis and (measured.tis_level, measured.tis_upper_bound) == ("token", 3.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'treshold'"):
        VerlConfig.pg_is(treshold=3.0)


def test_what_means_nothing_is_refused():
    with pytest.raises(ValueError, match="loss_type is 'dpo'; choose ppo_clip or reinforce"):
        VerlConfig(loss_type="dpo")
    with pytest.raises(
        ValueError,
        match="rollout_rs_threshold_lower belongs to rollout_rs token, sequence, geometric",
    ):
        VerlConfig(
            rollout_rs="token_k1", rollout_rs_threshold=2.0, rollout_rs_threshold_lower=0.5
        ).to_config()
    with pytest.raises(ValueError, match="loss_type reinforce needs bypass_mode=True"):
        VerlConfig(loss_type="reinforce")
