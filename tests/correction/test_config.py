"""The configuration: defaults, bounds, criteria, presets, and what is refused in one message."""

import dataclasses

import pytest

from slime_tis.correction import PRESETS, Criterion, RolloutCorrectionConfig, parse_criteria


def test_a_default_configuration_corrects_nothing():
    config = RolloutCorrectionConfig()
    assert not config.corrects
    assert not config.needs_rollout_log_probs
    assert config.rejections == ()
    assert config.is_bounds == (0.5, 2.0)


def test_fields_are_frozen():
    config = RolloutCorrectionConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.use_tis = True


def test_fields_are_keyword_only():
    with pytest.raises(TypeError):
        RolloutCorrectionConfig(True)


def test_an_upper_bound_of_1_is_its_own_reciprocal():
    config = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1.0)
    assert config.is_bounds == (1.0, 1.0)


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


TOKEN_K1 = Criterion(name="token_k1", aggregation="token", divergence="k1", lower=0.5, upper=2.0)
SEQ_MAX_K3 = Criterion(
    name="seq_max_k3", aggregation="max", divergence="k3", lower=None, upper=0.01
)


def test_repeated_criteria_are_parsed_once():
    criteria = parse_criteria("token_k1, seq_max_k3 ,token_k1", "0.5_2.0,0.01")
    assert criteria == (TOKEN_K1, SEQ_MAX_K3)


@pytest.mark.parametrize(
    ("threshold", "lower"),
    [(4.0, 0.25), ("0_4.0", 0.0), ("0.1_4.0", 0.1)],
    ids=["reciprocal of the upper bound", "0", "given"],
)
def test_the_lower_bound_of_k1(threshold, lower):
    (criterion,) = parse_criteria("seq_sum_k1", threshold)
    assert (criterion.lower, criterion.upper) == (lower, 4.0)


def test_one_threshold_holds_for_all_criteria():
    criteria = parse_criteria("token_k2,seq_mean_k3", "0.1")
    assert [criterion.upper for criterion in criteria] == [0.1, 0.1]


@pytest.mark.parametrize(("names", "threshold"), [(None, None), ("", "1.0")], ids=["none", "empty"])
def test_no_names_are_no_criteria(names, threshold):
    assert parse_criteria(names, threshold) == ()


GEOMETRIC = {"use_rs": True, "rs_level": "geometric"}


CLIP = {"use_tis": True, "tis_mode": "clip"}


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({}, (0.5, 2.0)),
        ({"tis_upper_bound_negative": 4.0}, (0.25, 4.0)),
        ({"tis_lower_bound": 0.1}, (0.1, 2.0)),
        ({"tis_lower_bound_negative": 0.3}, (0.3, 2.0)),
        ({"tis_lower_bound": 0.1, "tis_lower_bound_negative": 0}, (0.0, 2.0)),
    ],
    ids=["none given", "upper", "lower of both signs", "lower", "no lower"],
)
def test_bounds_at_negative_advantages(options, bounds):
    config = RolloutCorrectionConfig(**CLIP, **options)
    assert config.is_bounds_negative == bounds


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
def test_meaningless_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message) as refusal:
        RolloutCorrectionConfig(**options)
    assert len(str(refusal.value)) < 400
    assert "\n" not in str(refusal.value)


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


@pytest.mark.parametrize("name", PRESETS)
def test_options_of_every_preset(name):
    config = RolloutCorrectionConfig.preset(name)
    criteria = tuple((c.name, c.lower, c.upper) for c in config.rejections)
    level = config.tis_level if config.use_tis else None
    options = (
        config.use_rollout_logprobs,
        config.policy_loss,
        level,
        config.tis_mode,
        criteria,
        config.rs_veto_threshold,
    )
    assert options == EXPECTED[name]


def test_no_expected_preset_is_missing():
    assert set(PRESETS) == set(EXPECTED)


def test_the_preset_without_correction_reads_rollout_log_probs():
    assert RolloutCorrectionConfig.preset("disabled").needs_rollout_log_probs


def test_icepop_masks_beyond_a_half_or_five():
    assert RolloutCorrectionConfig.preset("decoupled_token_icepop").is_bounds == (0.5, 5.0)


def test_an_option_overrides_its_preset():
    config = RolloutCorrectionConfig.preset("decoupled_token_is", tis_upper_bound=3.0)
    assert config.tis_upper_bound == 3.0


def test_adaptive_bounds_replace_the_fixed_ones_of_a_preset():
    config = RolloutCorrectionConfig.preset("decoupled_geo_rs", rs_target_fraction=0.05)
    assert config.rs_target_fraction == 0.05
    assert config.rs_lower_bound is None
    assert config.rs_upper_bound is None


def test_fixed_bounds_replace_the_adaptive_ones_of_a_preset():
    config = RolloutCorrectionConfig.preset("decoupled_geo_rs_adaptive", rs_upper_bound=1.2)
    assert config.rs_z_score is None
    assert not config.adaptive
    assert config.rs_bounds[1] == 1.2


def test_an_unknown_preset_is_refused():
    message = "--rollout-correction-preset is 'tis'; choose one of decoupled_token_is"
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig.preset("tis")


@pytest.mark.parametrize(
    ("options", "corrects"),
    [
        ({"use_tis": True}, True),
        ({"use_rs": True}, True),
        ({"rs_veto_threshold": 1e-4}, True),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}, True),
        ({"rs_second_moment_bound": 0.04}, True),
        ({**GEOMETRIC, "rs_z_score": 3.0}, True),
        ({"use_rollout_logprobs": True}, False),
        ({"get_mismatch_metrics": True}, False),
        ({"old_logprobs": "interpolate"}, False),
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
def test_options_that_read_rollout_log_probs(options, corrects):
    config = RolloutCorrectionConfig(**options)
    assert config.needs_rollout_log_probs
    assert config.corrects == corrects
