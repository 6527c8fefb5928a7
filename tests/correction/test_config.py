"""The configuration: defaults, bounds, criteria, presets, and what is refused in one message."""

import dataclasses

import pytest

from slime_tis.correction import PRESETS, Criterion, RolloutCorrectionConfig, parse_criteria


def test_defaults_do_nothing_and_fields_are_frozen_and_keyword_only():
    config = RolloutCorrectionConfig()
    assert not config.corrects and not config.needs_rollout_log_probs and config.rejections == ()
    assert config.is_bounds == (0.5, 2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RolloutCorrectionConfig().use_tis = True
    with pytest.raises(TypeError):
        RolloutCorrectionConfig(True)
    assert RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1.0).is_bounds == (1.0, 1.0)


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
    ids=[
        "none given",
        "IS upper",
        "IS lower",
        "RS upper",
        "RS lower",
        "no RS lower",
        "no IS lower",
        "RS both",
    ],
)
def test_missing_bounds(options, bounds):
    config = RolloutCorrectionConfig(use_rs=True, **options)
    assert config.rs_bounds == pytest.approx(bounds)
    assert config.rejections == (
        Criterion(
            name="token", aggregation="token", divergence="k1", lower=bounds[0], upper=bounds[1]
        ),
    )


def test_criteria():
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


CLIP = {"use_tis": True, "tis_mode": "clip"}
REFUSED = {
    "mode": ({"tis_mode": "icepop"}, "must be one of truncate, clip, mask"),
    "level": ({"rs_level": "word"}, "--rs-level is 'word'"),
    "IS upper 0": ({"tis_upper_bound": 0.0}, "--tis-upper-bound is 0.0"),
    "IS upper NaN": ({"tis_upper_bound": float("nan")}, "--tis-upper-bound is nan"),
    "IS upper beyond floats": ({"tis_upper_bound": 10**400}, r"\(401 characters\)"),
    "IS upper missing": ({"tis_upper_bound": None}, "is None but must be a number"),
    "a word for a switch": ({"use_tis": "false"}, "must be true or false"),
    "a long word": ({"tis_mode": "x" * 1000}, r"\(1002 characters\)"),
    "IS upper text": ({"tis_upper_bound": "1e-4"}, "must be a number"),
    "IS bounds reversed": ({**CLIP, "tis_lower_bound": 3.0}, "--tis-lower-bound 3.0 is not below"),
    "RS bounds equal": (
        {"use_rs": True, "rs_lower_bound": 2.0},
        "--rs-lower-bound: the lower bound 2.0",
    ),
    "veto above 1": ({"rs_veto_threshold": 1.5}, "1e-4 is customary"),
    "upper veto below 1": ({"rs_veto_upper_threshold": 0.5}, "100 is customary"),
    "unknown divergence": (
        {"rollout_rs": "token_k4", "rollout_rs_threshold": 1},
        "'token_k4'; choose from token_k1",
    ),
    "unknown aggregation": (
        {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1},
        "--rs-veto-threshold",
    ),
    "a list of criteria": (
        {"rollout_rs": ["token_k1"], "rollout_rs_threshold": 1},
        "--rollout-rs is",
    ),
    "no threshold": ({"rollout_rs": "token_k1"}, "gives 0 values for 1 criteria"),
    "three thresholds of two": (
        {"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"},
        "gives 3 values",
    ),
    "truth as threshold": (
        {"rollout_rs": "token_k1", "rollout_rs_threshold": True},
        "must be text",
    ),
    "a huge threshold": (
        {"rollout_rs": "token_k1", "rollout_rs_threshold": 10**400},
        "finite numbers above 0",
    ),
    "range of k2": (
        {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"},
        "not a single upper bound",
    ),
    "an error below 1": (
        {"rollout_rs": "seq_mean_error", "rollout_rs_threshold": 0.5},
        "is at least 1",
    ),
    "range of words": (
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "low_high"},
        "write numbers",
    ),
    "range reversed": (
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "2.0_0.5"},
        "lower bound 2.0 of token_k1",
    ),
    "negative threshold": (
        {"rollout_rs": "token_k2", "rollout_rs_threshold": "-1"},
        "finite numbers above 0",
    ),
    "bypass corrected twice": (
        {"use_tis": True, "use_rollout_logprobs": True},
        "applies the correction twice",
    ),
    "interpolated and bypass": (
        {"use_rollout_logprobs": True, "old_logprobs": "interpolate"},
        "has no meaning",
    ),
    "z-score without RS": ({"rs_z_score": 3.0}, "--rs-z-score acts on the rejection of --use-rs"),
    "z-score at token level": (
        {"use_rs": True, "rs_z_score": 3.0},
        "choose --rs-level geometric or sequence",
    ),
    "z-score 0": ({**GEOMETRIC, "rs_z_score": 0.0}, "--rs-z-score is 0.0"),
    "target fraction above 1": ({**GEOMETRIC, "rs_target_fraction": 2.0}, "0.02 is customary"),
    "two targets": (
        {**GEOMETRIC, "rs_z_score": 3.0, "rs_target_fraction": 0.1},
        "both set the rejection bounds",
    ),
    "divergence accepts all": (
        {"divergence_mask": "binary_tv", "divergence_mask_bound": 1.5},
        "accepts all",
    ),
    "sequence with a direction": (
        {"divergence_mask": "binary_kl", "divergence_mask_level": "sequence"},
        "--divergence-mask-direction both",
    ),
    "two bounds without a direction": (
        {
            "divergence_mask": "binary_tv",
            "divergence_mask_direction": "both",
            "divergence_mask_bound_negative": 0.1,
        },
        "--divergence-mask-bound-negative",
    ),
    "divergence of 0": ({"divergence_mask": "binary_tv", "divergence_mask_bound": 0.0}, "above 0"),
    "reversed where negative": (
        {**CLIP, "tis_lower_bound_negative": 3.0},
        "--tis-lower-bound-negative 3.0 is not",
    ),
    "equal where negative": (
        {**CLIP, "tis_mode": "mask", "tis_lower_bound_negative": 2.0},
        "--tis-lower-bound-negative",
    ),
    "truncate where negative": (
        {"use_tis": True, "tis_lower_bound_negative": 0.1},
        "no effect with --tis-mode truncate",
    ),
    "upper bound of 0 where negative": ({**CLIP, "tis_upper_bound_negative": 0.0}, "above 0"),
    "z-score and bounds": (
        {**GEOMETRIC, "rs_z_score": 3.0, "rs_lower_bound": 0.9},
        "drop --rs-lower-bound, or",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_means_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=message) as refusal:
        RolloutCorrectionConfig(**options)
    assert len(str(refusal.value)) < 400 and "\n" not in str(refusal.value)


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
    "decoupled_geo_rs_seq_tis": (
        False,
        "ppo",
        "sequence",
        "truncate",
        (("geometric", 0.999, 1.001),),
        None,
    ),
    "decoupled_geo_rs_token_tis": (
        False,
        "ppo",
        "token",
        "truncate",
        (("geometric", 0.999, 1.001),),
        None,
    ),
    "decoupled_k3_rs": (False, "ppo", None, "truncate", (("seq_mean_k3", None, 0.01),), None),
    "decoupled_k3_rs_seq_tis": (
        False,
        "ppo",
        "sequence",
        "truncate",
        (("seq_mean_k3", None, 0.01),),
        None,
    ),
    "decoupled_k3_rs_token_tis": (
        False,
        "ppo",
        "token",
        "truncate",
        (("seq_mean_k3", None, 0.01),),
        None,
    ),
    "bypass_ppo_clip": (True, "ppo", None, "truncate", (), None),
    "bypass_ppo_clip_geo_rs": (True, "ppo", None, "truncate", (("geometric", 0.999, 1.001),), None),
    "bypass_ppo_clip_k3_rs": (True, "ppo", None, "truncate", (("seq_mean_k3", None, 0.01),), None),
    "bypass_pg_is": (True, "reinforce", "sequence", "truncate", (), None),
    "bypass_pg_token_icepop": (True, "reinforce", "token", "mask", (), None),
    "bypass_pg_geo_rs": (True, "reinforce", None, "truncate", (("geometric", 0.999, 1.001),), None),
    "bypass_pg_geo_rs_seq_tis": (
        True,
        "reinforce",
        "sequence",
        "truncate",
        (("geometric", 0.999, 1.001),),
        None,
    ),
    "bypass_pg_geo_rs_token_tis": (
        True,
        "reinforce",
        "token",
        "truncate",
        (("geometric", 0.999, 1.001),),
        None,
    ),
    "decoupled_geo_rs_adaptive": (False, "ppo", None, "truncate", ADAPTIVE, 1e-4),
    "decoupled_geo_rs_token_tis_adaptive": (False, "ppo", "token", "truncate", ADAPTIVE, 1e-4),
    "bypass_ppo_clip_geo_rs_adaptive": (True, "ppo", None, "truncate", ADAPTIVE, 1e-4),
    "dppo_tv": (True, "reinforce", "token", "truncate", (("divergence_mask", None, 0.2),), None),
    "dppo_kl": (True, "reinforce", "token", "truncate", (("divergence_mask", None, 0.05),), None),
    "ipo": (True, "reinforce", "token", "truncate", (("divergence_mask", None, 0.1),), None),
    "kpop": (True, "reinforce", "token", "truncate", (("divergence_mask", None, 0.1),), None),
    "topr": (True, "reinforce", "geometric", "clip", (), None),
    "seq_mask_tis": (False, "ppo", "token", "truncate", (("geometric", 0.999, 1.002),), None),
}


def test_every_preset_its_overrides_and_unknown_ones():
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
    assert (
        RolloutCorrectionConfig.preset("decoupled_token_is", tis_upper_bound=3.0).tis_upper_bound
        == 3.0
    )
    fitted = RolloutCorrectionConfig.preset("decoupled_geo_rs", rs_target_fraction=0.05)
    assert (
        fitted.rs_target_fraction == 0.05
        and fitted.rs_lower_bound is None
        and fitted.rs_upper_bound is None
    )
    fixed = RolloutCorrectionConfig.preset("decoupled_geo_rs_adaptive", rs_upper_bound=1.2)
    assert fixed.rs_z_score is None and not fixed.adaptive and fixed.rs_bounds[1] == 1.2
    with pytest.raises(
        ValueError, match="--rollout-correction-preset is 'tis'; choose one of decoupled_token_is"
    ):
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
    ids=[
        "TIS",
        "RS",
        "veto",
        "verl's RS",
        "trimming",
        "z-score",
        "bypass",
        "metrics",
        "interpolated",
    ],
)
def test_what_needs_what(options, corrects, needs):
    config = RolloutCorrectionConfig(**options)
    assert (config.corrects, config.needs_rollout_log_probs) == (corrects, needs)
