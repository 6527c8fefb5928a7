"""The configuration: defaults, bounds, criteria, presets, and what is refused in one message."""

import dataclasses
from typing import Any

import pytest

from slime_tis.correction import PRESETS, Criterion, RolloutCorrectionConfig, parse_criteria


def test_defaults_do_nothing() -> None:
    config = RolloutCorrectionConfig()
    assert not config.corrects and not config.needs_rollout_log_probs and config.rejections == ()
    assert config.is_bounds == (0.5, 2.0)


def test_it_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RolloutCorrectionConfig().use_tis = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        RolloutCorrectionConfig(True)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({}, (0.5, 2.0)),
        ({"tis_upper_bound": 4.0}, (0.25, 4.0)),
        ({"tis_lower_bound": 0.1}, (0.1, 2.0)),
        ({"rs_upper_bound": 5.0}, (0.2, 5.0)),
        ({"rs_lower_bound": 0.3}, (0.3, 2.0)),
        ({"rs_lower_bound": 0}, (0.0, 2.0)),
        ({"tis_lower_bound": 0}, (0.0, 2.0)),
        ({"rs_lower_bound": 0.3, "rs_upper_bound": 3.0, "tis_upper_bound": 7.0}, (0.3, 3.0)),
    ],
    ids=["none given", "IS upper", "IS lower", "RS upper", "RS lower", "no RS lower", "no IS lower", "RS both"],
)
def test_missing_bounds(options: dict[str, Any], bounds: tuple[float, float]) -> None:
    config = RolloutCorrectionConfig(use_rs=True, **options)
    assert config.rs_bounds == pytest.approx(bounds)
    assert config.rejections == (
        Criterion(name="token", aggregation="token", divergence="k1", lower=bounds[0], upper=bounds[1]),
    )


def test_criteria() -> None:
    found = parse_criteria("token_k1, seq_max_k3 ,token_k1", "0.5_2.0,0.01")
    assert found == (
        Criterion(name="token_k1", aggregation="token", divergence="k1", lower=0.5, upper=2.0),
        Criterion(name="seq_max_k3", aggregation="max", divergence="k3", lower=None, upper=0.01),
    )
    assert parse_criteria("seq_sum_k1", 4.0)[0].lower == 0.25
    assert parse_criteria("seq_sum_k1", "0_4.0")[0].lower == 0.0
    assert [c.upper for c in parse_criteria("token_k2,seq_mean_k3", "0.1")] == [0.1, 0.1]
    assert parse_criteria(None, None) == () == parse_criteria("", "1.0")


GEOMETRIC = {"use_rs": True, "rs_level": "geometric"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tis_mode": "icepop"}, "--tis-mode is 'icepop' but must be one of truncate, clip, mask"),
        ({"rs_level": "word"}, "--rs-level is 'word' but must be one of token, sequence, geometric, prefix, segment"),
        ({"tis_upper_bound": 0.0}, "--tis-upper-bound is 0.0 but must be above 0 and finite"),
        ({"tis_upper_bound": float("inf")}, "--tis-upper-bound is inf"),
        ({"tis_upper_bound": float("nan")}, "--tis-upper-bound is nan"),
        ({"rs_lower_bound": -1.0}, "--rs-lower-bound is -1.0"),
        ({"tis_upper_bound": "1e-4"}, "--tis-upper-bound is '1e-4' but must be a number"),
        ({"tis_upper_bound": True}, "--tis-upper-bound is True but must be a number"),
        (
            {"use_tis": True, "tis_mode": "clip", "tis_lower_bound": 3.0},
            "--tis-lower-bound 3.0 is not below --tis-upper-bound 2.0",
        ),
        ({"use_rs": True, "rs_lower_bound": 2.0}, "--rs-lower-bound: the lower bound 2.0 of token is not below"),
        ({"rs_veto_threshold": 1.5}, "--rs-veto-threshold is 1.5 but must be above 0 and below 1; 1e-4 is customary"),
        (
            {"rs_veto_upper_threshold": 0.5},
            "--rs-veto-upper-threshold is 0.5 but must be above 1 and finite; 100 is customary",
        ),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "--rollout-rs names 'token_k4'; choose from token_k1"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1}, "'seq_max_k1'.* --rs-veto-threshold"),
        ({"rollout_rs": "token_k1"}, "--rollout-rs token_k1 needs --rollout-rs-threshold"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"}, "gives 3 values for 2 criteria"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}, "give a single upper bound"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "low_high"}, "is not a number; write 0.5_2.0"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2.0_0.5"}, "the lower bound 2.0 of token_k1 is not below"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "-1"}, "give finite numbers above 0"),
        (
            {"use_tis": True, "use_rollout_logprobs": True},
            "--use-rollout-logprobs with --use-tis applies the correction",
        ),
        ({"use_rollout_logprobs": True, "old_logprobs": "interpolate"}, "--old-logprobs interpolate has no meaning"),
        ({"rs_z_score": 3.0}, "--rs-z-score acts on the rejection of --use-rs, which is off; add --use-rs, or drop"),
        ({"use_rs": True, "rs_z_score": 3.0}, "--rs-level is token; choose --rs-level geometric or sequence"),
        ({**GEOMETRIC, "rs_z_score": 0.0}, "--rs-z-score is 0.0 but must be above 0 and finite"),
        ({**GEOMETRIC, "rs_target_fraction": True}, "--rs-target-fraction is True but must be a number"),
        (
            {**GEOMETRIC, "rs_target_fraction": 2.0},
            "--rs-target-fraction is 2.0 but must be above 0 and below 1; 0.02 is customary",
        ),
        ({**GEOMETRIC, "rs_z_score": 3.0, "rs_target_fraction": 0.1}, "both say what is rejected; drop one of them"),
        (
            {**GEOMETRIC, "rs_z_score": 3.0, "rs_lower_bound": 0.9, "rs_upper_bound": 1.1},
            "replaces fixed bounds; drop --rs-lower-bound and --rs-upper-bound, or --rs-z-score",
        ),
    ],
    ids=[
        "mode",
        "level",
        "IS upper 0",
        "IS upper infinite",
        "IS upper NaN",
        "RS lower negative",
        "IS upper text",
        "IS upper truth",
        "IS bounds reversed",
        "RS bounds equal",
        "veto above 1",
        "upper veto below 1",
        "unknown divergence",
        "unknown aggregation",
        "no threshold",
        "three thresholds of two",
        "range of k2",
        "range of words",
        "range reversed",
        "negative threshold",
        "bypass corrected twice",
        "interpolated and bypass",
        "z-score without RS",
        "z-score at token level",
        "z-score 0",
        "target fraction truth",
        "target fraction above 1",
        "z-score and target fraction",
        "z-score and bounds",
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig(**options)


def test_a_truncation_bound_of_one_is_allowed() -> None:
    assert RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1.0).is_bounds == (1.0, 1.0)


ADAPTIVE = (("geometric", None, float("inf")),)
# name: (bypass, loss, IS level or None, mode, RS criteria, veto)
EXPECTED = {
    "decoupled_token_is": (False, "ppo", "token", "truncate", (), None),
    "decoupled_seq_is": (False, "ppo", "sequence", "truncate", (), None),
    "decoupled_seq_is_rs": (False, "ppo", "sequence", "truncate", (("sequence", 0.5, 2.0),), None),
    "decoupled_geo_rs": (False, "ppo", None, "truncate", (("geometric", 0.999, 1.001),), 1e-4),
    "ppo_is_bypass": (True, "ppo", None, "truncate", (), None),
    "pg_is": (True, "reinforce", "sequence", "truncate", (), None),
    "pg_rs": (True, "reinforce", None, "truncate", (("geometric", 0.999, 1.001),), 1e-4),
    "disabled": (False, "ppo", None, "truncate", (), None),
    "decoupled_token_icepop": (False, "ppo", "token", "mask", (), None),
    "decoupled_geo_rs_seq_tis": (False, "ppo", "sequence", "truncate", (("geometric", 0.999, 1.001),), None),
    "decoupled_geo_rs_token_tis": (False, "ppo", "token", "truncate", (("geometric", 0.999, 1.001),), None),
    "decoupled_k3_rs": (False, "ppo", None, "truncate", (("seq_mean_k3", None, 0.01),), None),
    "decoupled_k3_rs_seq_tis": (False, "ppo", "sequence", "truncate", (("seq_mean_k3", None, 0.01),), None),
    "decoupled_k3_rs_token_tis": (False, "ppo", "token", "truncate", (("seq_mean_k3", None, 0.01),), None),
    "bypass_ppo_clip": (True, "ppo", None, "truncate", (), None),
    "bypass_ppo_clip_geo_rs": (True, "ppo", None, "truncate", (("geometric", 0.999, 1.001),), None),
    "bypass_ppo_clip_k3_rs": (True, "ppo", None, "truncate", (("seq_mean_k3", None, 0.01),), None),
    "bypass_pg_is": (True, "reinforce", "sequence", "truncate", (), None),
    "bypass_pg_token_icepop": (True, "reinforce", "token", "mask", (), None),
    "bypass_pg_geo_rs": (True, "reinforce", None, "truncate", (("geometric", 0.999, 1.001),), None),
    "bypass_pg_geo_rs_seq_tis": (True, "reinforce", "sequence", "truncate", (("geometric", 0.999, 1.001),), None),
    "bypass_pg_geo_rs_token_tis": (True, "reinforce", "token", "truncate", (("geometric", 0.999, 1.001),), None),
    "decoupled_geo_rs_adaptive": (False, "ppo", None, "truncate", ADAPTIVE, 1e-4),
    "decoupled_geo_rs_token_tis_adaptive": (False, "ppo", "token", "truncate", ADAPTIVE, 1e-4),
    "bypass_ppo_clip_geo_rs_adaptive": (True, "ppo", None, "truncate", ADAPTIVE, 1e-4),
}


def test_every_preset() -> None:
    assert set(PRESETS) == set(EXPECTED)
    for name, expected in EXPECTED.items():
        config = RolloutCorrectionConfig.preset(name)
        criteria = tuple((c.name, c.lower, c.upper) for c in config.rejections)
        level = config.tis_level if config.use_tis else None
        found = (
            config.use_rollout_logprobs,
            config.policy_loss,
            level,
            config.tis_mode,
            criteria,
            config.rs_veto_threshold,
        )
        assert found == expected, name
    assert RolloutCorrectionConfig.preset("disabled").needs_rollout_log_probs
    assert RolloutCorrectionConfig.preset("decoupled_token_icepop").is_bounds == (0.5, 5.0)


def test_preset_overrides_and_unknown_presets() -> None:
    assert RolloutCorrectionConfig.preset("decoupled_token_is", tis_upper_bound=3.0).tis_upper_bound == 3.0
    fitted = RolloutCorrectionConfig.preset("decoupled_geo_rs", rs_target_fraction=0.05)
    assert fitted.rs_target_fraction == 0.05 and fitted.rs_lower_bound is None and fitted.rs_upper_bound is None
    fixed = RolloutCorrectionConfig.preset("decoupled_geo_rs_adaptive", rs_upper_bound=1.2)
    assert fixed.rs_z_score is None and not fixed.adaptive and fixed.rs_bounds[1] == 1.2
    with pytest.raises(ValueError, match="--rollout-correction-preset is 'tis'; choose one of decoupled_token_is"):
        RolloutCorrectionConfig.preset("tis")


@pytest.mark.parametrize(
    ("options", "corrects", "needs"),
    [
        ({"use_tis": True}, True, True),
        ({"use_rs": True}, True, True),
        ({"rs_veto_threshold": 1e-4}, True, True),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}, True, True),
        ({"rs_second_moment_bound": 0.04}, True, True),
        ({**GEOMETRIC, "rs_z_score": 3.0}, True, True),
        ({"use_rollout_logprobs": True}, False, True),
        ({"get_mismatch_metrics": True}, False, True),
        ({"old_logprobs": "interpolate"}, False, True),
    ],
    ids=["TIS", "RS", "veto", "verl's RS", "trimming", "z-score", "bypass", "metrics", "interpolated"],
)
def test_what_needs_what(options: dict[str, Any], corrects: bool, needs: bool) -> None:
    config = RolloutCorrectionConfig(**options)
    assert (config.corrects, config.needs_rollout_log_probs) == (corrects, needs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tis_upper_bound": 10**400},
            "(401 characters) but must be above 0",
        ),
        ({"tis_upper_bound": None}, "is None but must be a number"),
        ({"use_tis": "false"}, "must be true or false"),
        (
            {"rollout_rs": ["token_k1"]},
            "give names separated by commas",
        ),
        (
            {"tis_mode": "x" * 1000},
            "(1002 characters) but must be one of truncate, clip, mask",
        ),
    ],
    ids=["a number beyond floats", "no bound", "a word for a switch", "a list of criteria", "a long word"],
)
def test_values_of_another_kind_are_refused_in_one_short_line(options: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        RolloutCorrectionConfig(**options)
    assert message in str(error.value) and len(str(error.value)) < 200
