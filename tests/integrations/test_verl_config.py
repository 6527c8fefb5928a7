"""verl's configuration class: presets, both spellings, and the way to ours."""

import pytest

from slime_tis import PRESETS, RolloutCorrectionConfig
from slime_tis.integrations.verl_config import RolloutCorrectionConfig as VerlConfig


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.endswith("_adaptive")])  # those are ours alone
def test_presets_say_what_ours_say(name: str) -> None:
    """The same rejection, weights and mode; verl's criteria are named token_k1 where ours are named by level."""
    ours, theirs = RolloutCorrectionConfig.preset(name), getattr(VerlConfig, name)().to_config()
    for field in ("use_tis", "use_rollout_logprobs", "policy_loss", "rs_veto_threshold"):
        assert getattr(ours, field) == getattr(theirs, field), field
    if ours.use_tis:
        assert (ours.tis_level, ours.tis_mode, ours.is_bounds) == (theirs.tis_level, theirs.tis_mode, theirs.is_bounds)
    bounds = [[(c.aggregation, c.divergence, c.lower, c.upper) for c in x.rejections] for x in (ours, theirs)]
    assert bounds[0] == bounds[1]


def test_older_spelling() -> None:
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
    assert config.use_rollout_logprobs and config.policy_loss == "reinforce" and config.rs_veto_threshold == 1e-4
    assert VerlConfig(bypass_mode=True, use_policy_gradient=True).loss_type == "reinforce"


def test_arguments_of_presets() -> None:
    config = VerlConfig.decoupled_seq_is_rs(is_threshold=3.0, rs_threshold="0.4_4.0").to_config()
    assert config.tis_upper_bound == 3.0 and config.rejections[0].upper == 4.0
    assert VerlConfig.pg_rs(veto_threshold=None).to_config().rs_veto_threshold is None
    assert VerlConfig.decoupled_token_icepop(4.0, 0.25).to_config().is_bounds == (0.25, 4.0)


def test_reading_by_name() -> None:
    config = VerlConfig.decoupled_token_is()
    assert config.get("rollout_is") == "token" and config.get("nothing", 7) == 7


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_type is 'dpo'; choose ppo_clip or reinforce"):
        VerlConfig(loss_type="dpo")
    with pytest.raises(ValueError, match="loss_type reinforce needs bypass_mode=True"):
        VerlConfig(loss_type="reinforce")
