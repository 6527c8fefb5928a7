"""Named configurations as overrides of the defaults.

They are verl's presets in its old and new spelling, with verl's numbers, and those with adaptive bounds, which verl
does not have.
"""

from collections.abc import Mapping

Preset = dict[str, bool | str | float]

_BYPASS: Preset = {"use_rollout_logprobs": True}
_PURE_GRADIENT: Preset = {"use_rollout_logprobs": True, "policy_loss": "reinforce"}
_TOKEN_IS: Preset = {"use_tis": True, "tis_level": "token"}
_SEQUENCE_IS: Preset = {"use_tis": True, "tis_level": "sequence"}
# IcePop zeroes the weight and keeps the token in the denominator, hence the original normalizer.
_TOKEN_ICEPOP: Preset = {
    **_TOKEN_IS,
    "tis_mode": "mask",
    "tis_lower_bound": 0.5,
    "tis_upper_bound": 5.0,
    "rejection_normalizer": "original",
}
_GEOMETRIC_RS: Preset = {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.999, "rs_upper_bound": 1.001}
_ADAPTIVE_RS: Preset = {"use_rs": True, "rs_level": "geometric", "rs_z_score": 3.0}
_K3_RS: Preset = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_VETO: Preset = {"rs_veto_threshold": 1e-4}

PRESETS: dict[str, Preset] = {
    "decoupled_token_is": _TOKEN_IS,
    "decoupled_seq_is": _SEQUENCE_IS,
    "decoupled_seq_is_rs": {
        **_SEQUENCE_IS,
        "use_rs": True,
        "rs_level": "sequence",
        "rs_lower_bound": 0.5,
        "rs_upper_bound": 2.0,
    },
    "decoupled_geo_rs": {**_GEOMETRIC_RS, **_VETO},
    "ppo_is_bypass": {**_BYPASS, "tis_level": "token"},  # of the weights that are measured
    "pg_is": {**_PURE_GRADIENT, **_SEQUENCE_IS},
    "pg_rs": {**_PURE_GRADIENT, **_GEOMETRIC_RS, **_VETO},
    "disabled": {"get_mismatch_metrics": True},
    "decoupled_token_icepop": _TOKEN_ICEPOP,
    "decoupled_geo_rs_seq_tis": {**_SEQUENCE_IS, **_GEOMETRIC_RS},
    "decoupled_geo_rs_token_tis": {**_TOKEN_IS, **_GEOMETRIC_RS},
    "decoupled_k3_rs": _K3_RS,
    "decoupled_k3_rs_seq_tis": {**_SEQUENCE_IS, **_K3_RS},
    "decoupled_k3_rs_token_tis": {**_TOKEN_IS, **_K3_RS},
    "bypass_ppo_clip": _BYPASS,
    "bypass_ppo_clip_geo_rs": {**_BYPASS, **_GEOMETRIC_RS},
    "bypass_ppo_clip_k3_rs": {**_BYPASS, **_K3_RS},
    "bypass_pg_is": {**_PURE_GRADIENT, **_SEQUENCE_IS},
    "bypass_pg_token_icepop": {**_PURE_GRADIENT, **_TOKEN_ICEPOP},
    "bypass_pg_geo_rs": {**_PURE_GRADIENT, **_GEOMETRIC_RS},
    "bypass_pg_geo_rs_seq_tis": {**_PURE_GRADIENT, **_SEQUENCE_IS, **_GEOMETRIC_RS},
    "bypass_pg_geo_rs_token_tis": {**_PURE_GRADIENT, **_TOKEN_IS, **_GEOMETRIC_RS},
    "decoupled_geo_rs_adaptive": {**_ADAPTIVE_RS, **_VETO},
    "decoupled_geo_rs_token_tis_adaptive": {**_TOKEN_IS, **_ADAPTIVE_RS, **_VETO},
    "bypass_ppo_clip_geo_rs_adaptive": {**_BYPASS, **_ADAPTIVE_RS, **_VETO},
}

FIXED_BOUNDS = ("rs_lower_bound", "rs_upper_bound")
ADAPTIVE_BOUNDS = ("rs_z_score", "rs_target_fraction")


def preset_values(name: str, given: Mapping[str, object]) -> Preset:
    """The options of a preset, without the rejection bounds of one kind where `given` has the other kind."""
    values = dict(PRESETS[name])
    for theirs, replaced in ((FIXED_BOUNDS, ADAPTIVE_BOUNDS), (ADAPTIVE_BOUNDS, FIXED_BOUNDS)):
        if any(given.get(field) is not None for field in theirs):
            values = {field: value for field, value in values.items() if field not in replaced}
    return values
