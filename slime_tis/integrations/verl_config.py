"""verl's options as ours: tables of names, verl's RolloutCorrectionConfig, and verl's presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from numbers import Real
from typing import Any

from slime_tis.correction import PRESETS
from slime_tis.correction import RolloutCorrectionConfig as Config
from slime_tis.errors import quoted

NAMES = {
    "rollout_is": "tis_level",
    "rollout_is_threshold": "tis_upper_bound",
    "rollout_is_batch_normalize": "tis_batch_normalize",
    "rollout_rs": "rs_level",
    "rollout_rs_threshold": "rs_upper_bound",
    "rollout_rs_threshold_lower": "rs_lower_bound",
    "rollout_token_veto_threshold": "rs_veto_threshold",
    "bypass_mode": "use_rollout_logprobs",
    "bypass_old_logprob_for_rollout": "use_rollout_logprobs",
    "use_policy_gradient": "policy_loss",
    "use_pure_rollout_correction": "policy_loss",
    "loss_type": "policy_loss",
}
"""Keys of verl's algorithm.rollout_correction block, in all versions of verl → our option."""

SWITCHES: dict[str, tuple[bool | str, bool | str]] = {
    "rollout_is_batch_normalize": (False, True),
    "bypass_mode": (False, True),
    "bypass_old_logprob_for_rollout": (False, True),
    "use_policy_gradient": ("ppo", "reinforce"),
    "use_pure_rollout_correction": ("ppo", "reinforce"),
}
"""Keys that are switches → our values for off and on."""

BOUNDS = (
    "rollout_is_threshold",
    "rollout_rs_threshold",
    "rollout_rs_threshold_lower",
    "rollout_token_veto_threshold",
)
"""Keys whose value is a number, or text with several numbers."""

LOSSES = {"ppo_clip": "ppo", "reinforce": "reinforce"}
"""Values of loss_type → our policy_loss."""

LOSS_MODE = "policy_loss.loss_mode"
"""Key of verl's actor block for the policy loss."""

_DPPO: dict[str, str | float] = {
    "policy_loss": "cispo",
    "eps_clip": 1.0,
    "eps_clip_high": 2.0,
    "divergence_mask_anchor": "old",
    "divergence_mask_bound": 0.2,
}
LOSS_MODES: dict[str, dict[str, str | float]] = {
    "vanilla": {"policy_loss": "ppo", "eps_clip_c": 3.0},
    "dppo_tv": {**_DPPO, "divergence_mask": "binary_tv"},
    "dppo_kl": {**_DPPO, "divergence_mask": "binary_kl"},
    "kl_cov": {"policy_loss": "kl_cov", "kl_cov_coef": 0.1},
    "gspo": {"policy_loss": "gspo"},
    "sapo": {"policy_loss": "sapo"},
    "vespo": {"policy_loss": "vespo"},
    "cispo": {"policy_loss": "cispo"},
    "clip_cov": {"policy_loss": "clip_cov"},
    "dro": {"policy_loss": "dro"},
}
"""Values of `LOSS_MODE` → our options, with those of verl's defaults that differ from ours."""

ACTOR_NAMES = {
    "clip_ratio": "eps_clip",
    "clip_ratio_low": "eps_clip",
    "clip_ratio_high": "eps_clip_high",
    "clip_ratio_c": "eps_clip_c",
    "policy_loss.dro_beta": "dro_beta",
    "policy_loss.clip_cov_ratio": "cov_ratio",
    "policy_loss.clip_cov_lb": "clip_cov_lower_bound",
    "policy_loss.clip_cov_ub": "clip_cov_upper_bound",
    "policy_loss.kl_cov_ratio": "cov_ratio",
    "policy_loss.ppo_kl_coef": "kl_cov_coef",
    "tau_pos": "sapo_tau_pos",
    "tau_neg": "sapo_tau_neg",
    "policy_loss.tau_pos": "sapo_tau_pos",
    "policy_loss.tau_neg": "sapo_tau_neg",
    "loss_agg_mode": "calculate_per_token_loss",
}
"""Keys of verl's actor_rollout_ref.actor block besides `LOSS_MODE` → our option."""

DPPO_NAMES = {
    "clip_ratio": "divergence_mask_bound",
    "clip_ratio_low": "divergence_mask_bound_negative",
    "clip_ratio_high": "divergence_mask_bound",
    "clip_ratio_c": "eps_clip_high",
}
"""The same for the loss modes dppo_tv and dppo_kl, whose eps_clip_high is clip_ratio_c − 1."""

LOSS_AGGREGATIONS = {"token-mean": True, "seq-mean-token-mean": False}
"""Values of loss_agg_mode → whether the mean is over all tokens of the batch."""

SEQUENCE_MEAN_MODES = ("gspo", "sapo")
"""Loss modes that ignore loss_agg_mode: verl averages over sequences."""

DUAL_CLIP_MODES = ("vanilla", "dppo_tv", "dppo_kl")
"""Loss modes that read clip_ratio_c."""

CLIPPING_MODES = (*DUAL_CLIP_MODES, "gspo", "cispo", "clip_cov")
"""Loss modes that read clip_ratio, clip_ratio_low and clip_ratio_high."""

CLIP_RATIO_HIGH = 0.2
"""verl's default of clip_ratio_high."""

WEIGHT_LEVELS = ("token", "sequence")
"""Values of rollout_is."""

REJECTION_LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Values of rollout_rs in older versions of verl → criterion in the newest version."""

THRESHOLDS = {
    "threshold": "tis_upper_bound",
    "is_threshold": "tis_upper_bound",
    "threshold_lower": "tis_lower_bound",
    "rs_threshold": "rollout_rs_threshold",
    "veto_threshold": "rs_veto_threshold",
}
"""Arguments of verl's presets → our option."""

Translated = dict[str, tuple[Any, str]]
"""Our option → value, and verl's key that the value comes from."""


def translate(block: Mapping[str, Any], label: Callable[[str], str] = str) -> Translated:
    """Translates verl's correction options to ours.

    Args:
        block: Values by verl's key, which is in `NAMES`: True or False for `SWITCHES`, else text or
            a number; None if unset.
        label: Returns the name of a key in messages.

    Raises:
        TypeError: A bound is neither a number nor text.
        ValueError: Options contradict each other, or verl does not have a value.
    """
    options: Translated = {}
    for key, value in block.items():
        if value is None:
            continue
        value = _block_value(key, value, label)
        other, other_key = options.setdefault(NAMES[key], (value, key))
        if other_key != key and other != value:
            raise ValueError(f"{label(key)} contradicts {label(other_key)}; remove one of the two.")
    weights = _weights(block, options, label)
    bounds: Translated = {}
    for name in ("rs_lower_bound", "rs_upper_bound"):
        if name in options:
            bounds[name] = options.pop(name)
    # `_rejection` has it, or criteria instead.
    options.pop("rs_level", None)
    options |= weights
    options |= _rejection(block, bounds, label)
    # verl divides by the accepted tokens if anything rejects.
    for key in ("rollout_rs", "rollout_token_veto_threshold"):
        if block.get(key) is not None:
            options.setdefault("rejection_normalizer", ("kept", key))
    return options


def _block_value(key: str, value: Any, label: Callable[[str], str]) -> Any:
    """Returns our value for a value of verl's rollout_correction block."""
    if key in SWITCHES:
        return SWITCHES[key][value]
    if key == "loss_type" and isinstance(value, str):
        return LOSSES.get(value, value)
    if key in BOUNDS and isinstance(value, bool):
        raise TypeError(f"{label(key)} must be a number or text, not a boolean.")
    if key in BOUNDS and not isinstance(value, Real | str):
        raise TypeError(f"{label(key)} must be a number or text, not a {type(value).__name__}.")
    return value


def translate_actor(
    values: Mapping[str, str | float | None], label: Callable[[str], str] = str
) -> dict[str, tuple[str | float, str]]:
    """Translates verl's options of the policy loss to ours.

    Args:
        values: Values by verl's key, `LOSS_MODE` or a key in `ACTOR_NAMES`; None if unset.
        label: Returns the name of a key in messages.

    Returns:
        Our option → value, and verl's key that the value comes from.

    Raises:
        ValueError: The loss mode or loss_agg_mode is unknown, a clip ratio is not a number, or two
            keys of the same option contradict each other.
    """
    mode = values.get(LOSS_MODE)
    if mode is not None and mode not in LOSS_MODES:
        raise ValueError(
            f"{label(LOSS_MODE)} is {quoted(mode)} but must be one of {', '.join(LOSS_MODES)}."
        )
    options = {name: (value, LOSS_MODE) for name, value in LOSS_MODES.get(str(mode), {}).items()}
    is_dppo = "divergence_mask" in options
    names = ACTOR_NAMES
    if is_dppo:
        names = {**ACTOR_NAMES, **DPPO_NAMES}
    for key, value in values.items():
        if value is None or key == LOSS_MODE or _is_ignored(key, str(mode or "vanilla")):
            continue
        name = names[key]
        value = _actor_value(key, value, str(mode), label)
        other, other_key = options.get(name, (value, LOSS_MODE))
        if other_key not in (LOSS_MODE, "clip_ratio") and str(other) != str(value):
            # clip_ratio_low and clip_ratio_high replace clip_ratio, also if it comes after them.
            if key == "clip_ratio":
                continue
            raise ValueError(f"{label(key)} contradicts {label(other_key)}; remove one of the two.")
        options[name] = (value, key)
    _, key_of_clip = options.get("eps_clip", (None, ""))
    has_one_side = key_of_clip == "clip_ratio_low" and not is_dppo
    # Without clip_ratio, the upper clip is verl's default, not the lower one as here.
    if has_one_side and values.get("clip_ratio") is None:
        options.setdefault("eps_clip_high", (CLIP_RATIO_HIGH, "clip_ratio_low"))
    return options


def _actor_value(
    key: str, value: str | float, mode: str, label: Callable[[str], str]
) -> str | float:
    """Returns our value for a value of verl's actor block."""
    is_dppo = mode in ("dppo_tv", "dppo_kl")
    if key == "loss_agg_mode":
        return _aggregation(value, mode, label)
    if is_dppo and key == "clip_ratio_c":
        return _clip_ratio(label(key), value) - 1
    if not is_dppo and key == "clip_ratio_low":
        # Ratios are above 0, so a lower clip of 1 or more is no bound.
        return min(_clip_ratio(label(key), value), 1.0)
    return value


def _clip_ratio(label: str, value: str | float) -> float:
    """Returns a clip ratio as a number; raises ValueError for another text."""
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{label} is {quoted(value)} but must be a number.") from None


def _is_ignored(key: str, mode: str) -> bool:
    """Whether verl's loss mode ignores a key, as we then do."""
    if key == "clip_ratio_c":
        return mode not in DUAL_CLIP_MODES
    if key.startswith("clip_ratio"):
        return mode not in CLIPPING_MODES
    return ACTOR_NAMES[key].startswith("sapo_") and mode != "sapo"


def _aggregation(value: str | float, mode: str, label: Callable[[str], str]) -> bool:
    """Returns calculate_per_token_loss for loss_agg_mode."""
    if value not in LOSS_AGGREGATIONS:
        raise ValueError(
            f"{label('loss_agg_mode')} is {quoted(value)} but must be one of"
            f" {', '.join(LOSS_AGGREGATIONS)}: other sums divide by the longest response or by"
            " nothing; slime_tis.policy.reducers has dr_grpo for"
            " --custom-pg-loss-reducer-function-path."
        )
    return LOSS_AGGREGATIONS[str(value)] and mode not in SEQUENCE_MEAN_MODES


def _weights(
    block: Mapping[str, Any], options: Translated, label: Callable[[str], str]
) -> Translated:
    """The options of the weights; `options` are those that `block` names directly."""
    if "rollout_is" not in block:
        return {}
    level = block["rollout_is"]
    if level not in (None, *WEIGHT_LEVELS):
        raise ValueError(
            f"{label('rollout_is')} is {quoted(level)} but must be null, token or sequence; "
            "tis_level outside of verl's block takes more."
        )
    is_bypass, _ = options.get("use_rollout_logprobs", (False, ""))
    policy_loss, _ = options.get("policy_loss", ("ppo", ""))
    # In bypass mode the ratio of PPO contains the weight, and verl only measures weights.
    applied = level is not None and not (is_bypass is True and policy_loss == "ppo")
    weights: Translated = {"use_tis": (applied, "rollout_is")}
    key = "rollout_is_threshold"
    bound = block.get(key)
    if isinstance(bound, str) and "_" in bound:
        lower, upper = bound.split("_", 1)
        weights["tis_upper_bound"] = (upper, key)
        if applied:
            # IcePop: tokens out of the bounds stay in the denominator.
            weights["tis_lower_bound"] = (lower, key)
            weights["tis_mode"] = ("mask", key)
    return weights


def _rejection(
    block: Mapping[str, Any], bounds: Translated, label: Callable[[str], str]
) -> Translated:
    """The options of the rejection: a level and bounds, or a list of criteria."""
    if "rollout_rs" not in block:
        return bounds
    key = "rollout_rs"
    rule = block[key]
    if rule is None:
        return {"use_rs": (False, key), **bounds}
    if "rs_upper_bound" not in bounds:
        raise ValueError(
            f"{label(key)} is {quoted(rule)} but rollout_rs_threshold is unset; add it, as verl"
            " requires too."
        )
    threshold, upper_key = bounds["rs_upper_bound"]
    if not (isinstance(rule, str) and rule in REJECTION_LEVELS):
        if "rs_lower_bound" in bounds:
            raise ValueError(
                f"{label(bounds['rs_lower_bound'][1])} belongs to rollout_rs"
                f" {', '.join(REJECTION_LEVELS)}; for criteria write lower_upper into"
                " rollout_rs_threshold."
            )
        return {
            "use_rs": (False, key),
            "rollout_rs": (rule, key),
            "rollout_rs_threshold": (threshold, upper_key),
        }
    if isinstance(threshold, str) and "_" in threshold:
        if "rs_lower_bound" in bounds:
            raise ValueError(
                f"{label(upper_key)} is {quoted(threshold)}, which has a lower bound, and so has "
                f"{label(bounds['rs_lower_bound'][1])}; remove one of the two."
            )
        lower, upper = threshold.split("_", 1)
        bounds = {"rs_lower_bound": (lower, upper_key), "rs_upper_bound": (upper, upper_key)}
    return {"use_rs": (True, key), "rs_level": (rule, key), **bounds}


def _preset(
    name: str, *arguments: str
) -> classmethod[RolloutCorrectionConfig, ..., RolloutCorrectionConfig]:
    """Returns a constructor for a preset of `PRESETS` in which each argument replaces an option."""
    parameters = [
        Parameter(argument, Parameter.POSITIONAL_OR_KEYWORD) for argument in ("cls", *arguments)
    ]
    signature = Signature(parameters)

    def build(
        cls: type[RolloutCorrectionConfig], *args: str | float | None, **kwargs: str | float | None
    ) -> RolloutCorrectionConfig:
        options = dict(PRESETS[name])
        for argument, value in signature.bind_partial(cls, *args, **kwargs).arguments.items():
            if argument != "cls":
                options[THRESHOLDS[argument]] = value
        return cls(**_verl_options(options))

    build.__name__ = name
    build.__doc__ = f"verl's preset {name}."
    # help() and IDEs show this signature instead of *args and **kwargs.
    build.__signature__ = signature  # type: ignore[attr-defined]
    return classmethod(build)


def _verl_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Our options of a preset as verl's options."""
    upper = options.get("tis_upper_bound", Config.tis_upper_bound)
    verl_options = {
        "rollout_is": options.get("tis_level"),
        "rollout_is_threshold": upper,
        "rollout_token_veto_threshold": options.get("rs_veto_threshold"),
        "bypass_mode": options.get("use_rollout_logprobs", False),
        "loss_type": "ppo_clip",
    }
    if "tis_lower_bound" in options:
        verl_options["rollout_is_threshold"] = f"{options['tis_lower_bound']}_{upper}"
    if options.get("policy_loss") == "reinforce":
        verl_options["loss_type"] = "reinforce"
    if "rs_level" in options:
        verl_options["rollout_rs"] = REJECTION_LEVELS[options["rs_level"]]
        bounds = f"{options['rs_lower_bound']}_{options['rs_upper_bound']}"
        verl_options["rollout_rs_threshold"] = bounds
    for name in ("rollout_rs", "rollout_rs_threshold"):
        if name in options:
            verl_options[name] = options[name]
    return verl_options


@dataclass
class RolloutCorrectionConfig:
    """Options of verl's `algorithm.rollout_correction`, in the newest and older spellings.

    verl's presets are class methods with verl's arguments: `decoupled_token_is(threshold=3.0)`.
    """

    rollout_is: str | None = "sequence"
    """Level of the weights: token, sequence, or None for none."""
    rollout_is_threshold: str | float = 2.0
    """Upper bound, or `lower_upper` for IcePop."""
    rollout_is_batch_normalize: bool = False
    """Divide by the mean weight of the batch."""
    rollout_rs: str | None = None
    """Comma-separated criteria, or in the older API a level: token, sequence, geometric."""
    rollout_rs_threshold: str | float | None = None
    """One threshold or one per criterion; an upper bound in the older API."""
    rollout_rs_threshold_lower: float | None = None
    """Lower bound in the older API; 1/upper when None."""
    rollout_token_veto_threshold: float | None = None
    """Reject a sequence with a token ratio below this."""
    bypass_mode: bool = False
    """Take the rollout log-probs as the old ones."""
    bypass_old_logprob_for_rollout: bool = False
    """Older spelling of `bypass_mode`."""
    loss_type: str = "ppo_clip"
    """ppo_clip, or reinforce (in bypass mode)."""
    use_policy_gradient: bool = False
    """Older spelling of `loss_type="reinforce"`."""
    use_pure_rollout_correction: bool = False
    """Oldest spelling of `loss_type="reinforce"`."""

    def __post_init__(self) -> None:
        self.bypass_mode = self.bypass_mode or self.bypass_old_logprob_for_rollout
        if self.use_policy_gradient or self.use_pure_rollout_correction:
            self.loss_type = "reinforce"
        if self.loss_type not in LOSSES:
            raise ValueError(f"loss_type is {self.loss_type!r}; choose {' or '.join(LOSSES)}.")
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError("loss_type reinforce needs bypass_mode=True; set it, or use ppo_clip.")

    def get(self, name: str, default: Any = None) -> Any:
        """A field by name, as from verl's dictionary-like config."""
        return vars(self).get(name, default)

    def to_config(self) -> Config:
        """The same correction as this library's configuration.

        In bypass mode with the PPO loss, weights are only measured, as in verl.
        """
        # __post_init__ has copied the older spellings to the newest ones.
        older_names = (
            "bypass_old_logprob_for_rollout",
            "use_policy_gradient",
            "use_pure_rollout_correction",
        )
        options = {name: getattr(self, name) for name in NAMES if name not in older_names}
        return Config(**config_fields(options), get_mismatch_metrics=True)

    decoupled_token_is = _preset("decoupled_token_is", "threshold")
    decoupled_seq_is = _preset("decoupled_seq_is", "threshold")
    decoupled_token_icepop = _preset("decoupled_token_icepop", "threshold", "threshold_lower")
    decoupled_seq_is_rs = _preset("decoupled_seq_is_rs", "is_threshold", "rs_threshold")
    decoupled_geo_rs = _preset("decoupled_geo_rs", "rs_threshold", "veto_threshold")
    decoupled_geo_rs_seq_tis = _preset("decoupled_geo_rs_seq_tis", "is_threshold", "rs_threshold")
    decoupled_geo_rs_token_tis = _preset(
        "decoupled_geo_rs_token_tis", "is_threshold", "rs_threshold"
    )
    decoupled_k3_rs = _preset("decoupled_k3_rs", "rs_threshold")
    decoupled_k3_rs_seq_tis = _preset("decoupled_k3_rs_seq_tis", "is_threshold", "rs_threshold")
    decoupled_k3_rs_token_tis = _preset("decoupled_k3_rs_token_tis", "is_threshold", "rs_threshold")
    ppo_is_bypass = _preset("ppo_is_bypass", "threshold")
    bypass_ppo_clip = _preset("bypass_ppo_clip")
    bypass_ppo_clip_geo_rs = _preset("bypass_ppo_clip_geo_rs", "rs_threshold")
    bypass_ppo_clip_k3_rs = _preset("bypass_ppo_clip_k3_rs", "rs_threshold")
    bypass_pg_is = _preset("bypass_pg_is", "threshold")
    pg_is = _preset("pg_is", "threshold")
    bypass_pg_token_icepop = _preset("bypass_pg_token_icepop", "threshold", "threshold_lower")
    bypass_pg_geo_rs = _preset("bypass_pg_geo_rs", "rs_threshold")
    pg_rs = _preset("pg_rs", "rs_threshold", "veto_threshold")
    bypass_pg_geo_rs_seq_tis = _preset("bypass_pg_geo_rs_seq_tis", "is_threshold", "rs_threshold")
    bypass_pg_geo_rs_token_tis = _preset(
        "bypass_pg_geo_rs_token_tis", "is_threshold", "rs_threshold"
    )
    disabled = _preset("disabled")


def config_fields(verl_options: Mapping[str, Any]) -> dict[str, Any]:
    """verl's options as fields of our configuration; bounds become numbers."""
    block = dict(verl_options)
    for name in SWITCHES:
        if name in block:
            block[name] = bool(block[name])
    options = {name: value for name, (value, _) in translate(block).items()}
    for name in ("tis_lower_bound", "tis_upper_bound", "rs_lower_bound", "rs_upper_bound"):
        if isinstance(options.get(name), str):
            options[name] = _number(name, options[name])
    if not options.get("use_tis"):
        # Weights that are only measured are measured before normalisation.
        options.pop("tis_batch_normalize", None)
    return options


def _number(name: str, text: str) -> float:
    """The number of a bound; raises ValueError for another text."""
    try:
        # Python reads 0.5_2 as 0.52.
        if "_" not in text:
            return float(text)
    except ValueError:
        pass
    raise ValueError(
        f"{name} is {quoted(text)}, which is not a number; give 2.0, or '0.5_5.0' for two bounds."
    )
