"""verl's configuration class: presets, both spellings, and the conversion to our class."""

from typing import Any

import pytest

from slime_tis import PRESETS, RolloutCorrectionConfig
from slime_tis.correction.config import POLICY_PRESETS
from slime_tis.integrations.verl_config import RolloutCorrectionConfig as VerlConfig

OURS = {*POLICY_PRESETS, "seq_mask_tis", *(name for name in PRESETS if name.endswith("_adaptive"))}
VERL_PRESETS = [name for name in PRESETS if name not in OURS]


@pytest.fixture(params=VERL_PRESETS)
def configs(request: pytest.FixtureRequest) -> tuple[RolloutCorrectionConfig, ...]:
    """A preset in our class, and in verl's class converted to ours."""
    ours = RolloutCorrectionConfig.preset(request.param)
    return ours, getattr(VerlConfig, request.param)().to_config()


@pytest.mark.parametrize(
    "field",
    [
        "use_tis",
        "use_rollout_logprobs",
        "policy_loss",
        "rs_veto_threshold",
        "rejection_normalizer",
    ],
)
def test_presets_have_equal_fields(
    configs: tuple[RolloutCorrectionConfig, ...], field: str
) -> None:
    ours, theirs = configs
    assert getattr(ours, field) == getattr(theirs, field)


def weight_fields(config: RolloutCorrectionConfig) -> tuple[Any, ...]:
    """The fields of applied weights."""
    if not config.use_tis:
        return ()
    return config.tis_level, config.tis_mode, config.is_bounds


def test_presets_have_equal_weights(configs: tuple[RolloutCorrectionConfig, ...]) -> None:
    ours, theirs = configs
    assert weight_fields(ours) == weight_fields(theirs)


def rejection_fields(config: RolloutCorrectionConfig) -> list[tuple[Any, ...]]:
    """Criteria without names: verl's token_k1 is the level token here."""
    return [(c.aggregation, c.divergence, c.lower, c.upper) for c in config.rejections]


def test_presets_have_equal_rejection(configs: tuple[RolloutCorrectionConfig, ...]) -> None:
    ours, theirs = configs
    assert rejection_fields(ours) == rejection_fields(theirs)


@pytest.fixture
def older_config() -> VerlConfig:
    return VerlConfig(
        rollout_is=None,
        rollout_rs="geometric",
        rollout_rs_threshold=1.001,
        rollout_rs_threshold_lower=0.999,
        rollout_token_veto_threshold=1e-4,
        bypass_old_logprob_for_rollout=True,
        use_pure_rollout_correction=True,
    )


def test_older_spelling_sets_the_newer_fields(older_config: VerlConfig) -> None:
    assert older_config.bypass_mode
    assert older_config.loss_type == "reinforce"


def test_older_spelling_is_converted(older_config: VerlConfig) -> None:
    config = older_config.to_config()
    assert (config.rs_level, config.rs_bounds) == ("geometric", (0.999, 1.001))
    assert config.use_rollout_logprobs
    assert config.policy_loss == "reinforce"
    assert config.rs_veto_threshold == 1e-4


def test_policy_gradient_is_an_older_spelling_of_reinforce() -> None:
    assert VerlConfig(bypass_mode=True, use_policy_gradient=True).loss_type == "reinforce"


PRESET_ARGUMENTS: dict[str, tuple[VerlConfig, str, Any]] = {
    "weights": (VerlConfig.decoupled_seq_is_rs(is_threshold=3.0), "tis_upper_bound", 3.0),
    "no veto": (VerlConfig.pg_rs(veto_threshold=None), "rs_veto_threshold", None),
    "two bounds": (VerlConfig.decoupled_token_icepop(4.0, 0.25), "is_bounds", (0.25, 4.0)),
    "measured weights": (VerlConfig.ppo_is_bypass(threshold=3.0), "tis_upper_bound", 3.0),
    "level of measured weights": (VerlConfig.ppo_is_bypass(threshold=3.0), "tis_level", "token"),
    "no applied weights": (VerlConfig.ppo_is_bypass(threshold=3.0), "use_tis", False),
}


@pytest.mark.parametrize(
    ("config", "field", "value"), PRESET_ARGUMENTS.values(), ids=PRESET_ARGUMENTS
)
def test_argument_of_a_preset_is_an_option(config: VerlConfig, field: str, value: Any) -> None:
    assert getattr(config.to_config(), field) == value


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        pytest.param(VerlConfig.decoupled_seq_is_rs(rs_threshold="0.4_4.0"), 4.0, id="k1"),
        pytest.param(VerlConfig.decoupled_k3_rs(rs_threshold=0.02), 0.02, id="k3"),
    ],
)
def test_argument_of_a_preset_is_a_rejection_bound(config: VerlConfig, bound: float) -> None:
    assert config.to_config().rejections[0].upper == bound


def test_unknown_argument_of_a_preset_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'treshold'"):
        VerlConfig.pg_is(treshold=3.0)


def test_unknown_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_type is 'dpo'; choose ppo_clip or reinforce"):
        VerlConfig(loss_type="dpo")


def test_lower_threshold_of_a_criterion_is_refused() -> None:
    config = VerlConfig(
        rollout_rs="token_k1", rollout_rs_threshold=2.0, rollout_rs_threshold_lower=0.5
    )
    message = "rollout_rs_threshold_lower belongs to rollout_rs token, sequence, geometric"
    with pytest.raises(ValueError, match=message):
        config.to_config()


def test_reinforce_needs_bypass_mode() -> None:
    with pytest.raises(ValueError, match="loss_type reinforce needs bypass_mode=True"):
        VerlConfig(loss_type="reinforce")
