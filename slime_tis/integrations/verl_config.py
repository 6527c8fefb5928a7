"""verl's rollout-correction options as ours: one table of names, verl's RolloutCorrectionConfig, and its presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
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
"""Keys of verl's algorithm.rollout_correction block, of all its generations, and the option each
one is here."""

SWITCHES: dict[str, tuple[bool | str, bool | str]] = {
    "rollout_is_batch_normalize": (False, True),
    "bypass_mode": (False, True),
    "bypass_old_logprob_for_rollout": (False, True),
    "use_policy_gradient": ("ppo", "reinforce"),
    "use_pure_rollout_correction": ("ppo", "reinforce"),
}
"""Options that are switches, and their values here when off and on."""

BOUNDS = (
    "rollout_is_threshold",
    "rollout_rs_threshold",
    "rollout_rs_threshold_lower",
    "rollout_token_veto_threshold",
)
"""Options that are numbers, or text with several."""

LOSSES = {"ppo_clip": "ppo", "reinforce": "reinforce"}
"""Values of loss_type, and what each one is here."""

LOSS_MODE = "policy_loss.loss_mode"
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
    **{
        name: {"policy_loss": name}
        for name in ("gspo", "sapo", "vespo", "cispo", "clip_cov", "dro")
    },
}
"""Values of `LOSS_MODE`, and the options that each one is here, with verl's defaults where they
differ from ours."""

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
"""Keys of verl's actor_rollout_ref.actor block besides `LOSS_MODE`, and the option each one is
here."""

DPPO_NAMES = {
    "clip_ratio": "divergence_mask_bound",
    "clip_ratio_low": "divergence_mask_bound_negative",
    "clip_ratio_high": "divergence_mask_bound",
    "clip_ratio_c": "eps_clip_high",
}
"""The same keys under the loss modes dppo_tv and dppo_kl, where clip_ratio_c − 1 is meant."""

LOSS_AGGREGATIONS = {"token-mean": True, "seq-mean-token-mean": False}
"""Values of loss_agg_mode, and whether the mean is over all tokens of the batch."""

SEQUENCE_MEAN_MODES = ("gspo", "sapo")
"""Loss modes whose loss verl averages over sequences, whatever loss_agg_mode says."""

DUAL_CLIP_MODES = ("vanilla", "dppo_tv", "dppo_kl")
"""Loss modes that read clip_ratio_c."""

CLIPPING_MODES = (*DUAL_CLIP_MODES, "gspo", "cispo", "clip_cov")
"""Loss modes that read clip_ratio, clip_ratio_low and clip_ratio_high."""

CLIP_RATIO_HIGH = 0.2
"""verl's default of clip_ratio_high."""

WEIGHT_LEVELS = ("token", "sequence")
"""Values of rollout_is."""

REJECTION_LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Values of rollout_rs in the older generations, and the criterion that each one is in the
newest."""

THRESHOLDS = {
    "threshold": "tis_upper_bound",
    "is_threshold": "tis_upper_bound",
    "threshold_lower": "tis_lower_bound",
    "rs_threshold": "rollout_rs_threshold",
    "veto_threshold": "rs_veto_threshold",
}
"""Arguments of verl's presets, and the option that each one replaces."""


def translate(
    block: Mapping[str, Any], label: Callable[[str], str] = str
) -> dict[str, tuple[Any, str]]:
    """verl's options as options of ours: name to the value, and verl's key that it comes from.

    Args:
        block: by verl's key, among `NAMES`: True or False for `SWITCHES`, None where unset, else
            text or a number.
        label: the name of a key in messages.

    Raises:
        TypeError: a value that is a switch where verl has a number or text, or neither.
        ValueError: options that contradict each other, or a value that verl does not have.
    """
    options: dict[str, tuple[Any, str]] = {}
    for key, value in block.items():
        if value is None:
            continue
        if key in SWITCHES:
            value = SWITCHES[key][value]
        elif key == "loss_type" and isinstance(value, str):
            value = LOSSES.get(value, value)
        elif key in BOUNDS and (isinstance(value, bool) or not isinstance(value, Real | str)):
            kind = "a boolean" if isinstance(value, bool) else f"a {type(value).__name__}"
            raise TypeError(f"{label(key)} must be a number or text, not {kind}.")
        other, other_key = options.setdefault(NAMES[key], (value, key))
        if other_key != key and other != value:
            raise ValueError(f"{label(key)} contradicts {label(other_key)}; remove one of the two.")
    rejection: dict[str, tuple[Any, str]] = {
        name: options.pop(name) for name in ("rs_lower_bound", "rs_upper_bound") if name in options
    }
    options.pop("rs_level", None)
    result = {**options, **_weights(block, options, label), **_rejected(block, rejection, label)}
    rejecting = [
        key for key in ("rollout_rs", "rollout_token_veto_threshold") if block.get(key) is not None
    ]
    return (
        {**result, "rejection_normalizer": ("kept", rejecting[0])} if rejecting else result
    )  # verl's token mean


def translate_actor(  # noqa: C901
    values: Mapping[str, str | float | None], label: Callable[[str], str] = str
) -> dict[str, tuple[str | float, str]]:
    """verl's options of the policy loss as options of ours: name to the value, and verl's key that it comes from.

    Args:
        values: by verl's key, `LOSS_MODE` or among `ACTOR_NAMES`; None where unset.
        label: the name of a key in messages.

    Raises:
        ValueError: an unknown loss mode or loss_agg_mode, a clip_ratio_c of dppo or a
            clip_ratio_low that is not a number, or two keys of one option that contradict each
            other.
    """
    mode = values.get(LOSS_MODE)
    if mode is not None and mode not in LOSS_MODES:
        raise ValueError(
            f"{label(LOSS_MODE)} is {quoted(mode)} but must be one of {', '.join(LOSS_MODES)}."
        )
    options = {name: (value, LOSS_MODE) for name, value in LOSS_MODES.get(str(mode), {}).items()}
    is_dppo = "divergence_mask" in options
    names = {**ACTOR_NAMES, **DPPO_NAMES} if is_dppo else ACTOR_NAMES
    for key, value in values.items():
        if value is None or key == LOSS_MODE or _is_ignored(key, str(mode or "vanilla")):
            continue
        name = names[key]
        if key == "loss_agg_mode":
            value = _aggregation(value, str(mode), label)
        elif is_dppo and key == "clip_ratio_c":
            value = _clip_ratio(label(key), value) - 1
        elif not is_dppo and key == "clip_ratio_low":
            value = min(
                _clip_ratio(label(key), value), 1.0
            )  # ratios are above 0: 1 is no bound, as 10 is
        other, other_key = options.get(name, (value, LOSS_MODE))
        if other_key == "clip_ratio":
            pass  # clip_ratio_low and clip_ratio_high replace it
        elif other_key != LOSS_MODE and str(other) != str(value):
            if key == "clip_ratio":
                continue
            raise ValueError(f"{label(key)} contradicts {label(other_key)}; remove one of the two.")
        options[name] = (value, key)
    has_one_side = options.get("eps_clip", (None, ""))[1] == "clip_ratio_low" and not is_dppo
    if has_one_side and values.get("clip_ratio") is None:
        options.setdefault("eps_clip_high", (CLIP_RATIO_HIGH, "clip_ratio_low"))
    return options


def _clip_ratio(label: str, value: str | float) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{label} is {quoted(value)} but must be a number.") from None


def _is_ignored(key: str, mode: str) -> bool:
    """Whether verl's loss mode reads nothing from a key, so that the key has no effect there either."""
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
    block: Mapping[str, Any], options: Mapping[str, tuple[Any, str]], label: Callable[[str], str]
) -> dict[str, tuple[Any, str]]:
    if "rollout_is" not in block:
        return {}
    level, threshold = block["rollout_is"], "rollout_is_threshold"
    if level not in (None, *WEIGHT_LEVELS):
        raise ValueError(
            f"{label('rollout_is')} is {quoted(level)} but must be null, token or sequence; "
            "tis_level outside of verl's block takes more."
        )
    is_bypass = options.get("use_rollout_logprobs", (False, ""))[0] is True
    applied = level is not None and not (
        is_bypass and options.get("policy_loss", ("ppo", ""))[0] == "ppo"
    )
    weights: dict[str, tuple[Any, str]] = {
        "use_tis": (applied, "rollout_is")
    }  # in bypass PPO they are measured only
    bound = block.get(threshold)
    if isinstance(bound, str) and "_" in bound:
        lower, upper = bound.split("_", 1)
        weights["tis_upper_bound"] = (upper, threshold)
        if applied:  # IcePop, whose tokens stay in the denominator
            icepop = {"tis_lower_bound": lower, "tis_mode": "mask"}
            weights |= {name: (value, threshold) for name, value in icepop.items()}
    return weights


def _rejected(
    block: Mapping[str, Any], bounds: dict[str, tuple[Any, str]], label: Callable[[str], str]
) -> dict[str, tuple[Any, str]]:
    """The options of the rejection: a level with its bounds, or a list of criteria."""
    if "rollout_rs" not in block:
        return bounds
    rule, key = block["rollout_rs"], "rollout_rs"
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
    """A constructor of a preset: the options come from `PRESETS`, and each of verl's arguments replaces one."""
    signature = Signature(
        [Parameter(argument, Parameter.POSITIONAL_OR_KEYWORD) for argument in ("cls", *arguments)]
    )

    def build(
        cls: type[RolloutCorrectionConfig], *args: str | float | None, **kwargs: str | float | None
    ) -> RolloutCorrectionConfig:
        given = signature.bind_partial(cls, *args, **kwargs).arguments
        replaced = {THRESHOLDS[key]: value for key, value in given.items() if key != "cls"}
        return cls(**_in_verls_words({**PRESETS[name], **replaced}))

    build.__name__, build.__doc__ = name, f"verl's preset {name}."
    build.__signature__ = signature  # type: ignore[attr-defined]  # what help() and IDEs show
    return classmethod(build)


def _in_verls_words(options: Mapping[str, Any]) -> dict[str, Any]:
    upper = options.get("tis_upper_bound", Config.tis_upper_bound)
    words = {
        "rollout_is": options.get("tis_level"),
        "rollout_is_threshold": (
            f"{options['tis_lower_bound']}_{upper}" if "tis_lower_bound" in options else upper
        ),
        "rollout_token_veto_threshold": options.get("rs_veto_threshold"),
        "bypass_mode": options.get("use_rollout_logprobs", False),
        "loss_type": "reinforce" if options.get("policy_loss") == "reinforce" else "ppo_clip",
    }
    if "rs_level" in options:
        bounds = f"{options['rs_lower_bound']}_{options['rs_upper_bound']}"
        return {
            **words,
            "rollout_rs": REJECTION_LEVELS[options["rs_level"]],
            "rollout_rs_threshold": options.get("rollout_rs_threshold", bounds),
        }
    return words | {
        name: options[name] for name in ("rollout_rs", "rollout_rs_threshold") if name in options
    }


@dataclass
class RolloutCorrectionConfig:
    """Options of `algorithm.rollout_correction` in verl, newest and older spelling, and verl's presets.

    A preset is a class method of its name, whose arguments are verl's:
    `decoupled_token_is(threshold=3.0)`.
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
        return getattr(self, name) if name in {field.name for field in fields(self)} else default

    def to_config(self) -> Config:
        """The same correction as this library's configuration.

        In bypass mode with the PPO loss verl computes weights for its metrics alone, and so they
        are not applied.
        """
        older = (
            "bypass_old_logprob_for_rollout",
            "use_policy_gradient",
            "use_pure_rollout_correction",
        )
        words = {name: getattr(self, name) for name in NAMES if name not in older}
        return Config(**config_fields(words), get_mismatch_metrics=True)

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


def config_fields(words: Mapping[str, Any]) -> dict[str, Any]:
    """verl's options, by name, as fields of our configuration; text of bounds becomes numbers."""
    block = {name: bool(value) if name in SWITCHES else value for name, value in words.items()}
    options = {name: value for name, (value, _) in translate(block).items()}
    for name in ("tis_lower_bound", "tis_upper_bound", "rs_lower_bound", "rs_upper_bound"):
        if isinstance(options.get(name), str):
            options[name] = _number(name, options[name])
    if not options.get("use_tis"):
        options.pop(
            "tis_batch_normalize", None
        )  # weights that are measured alone are so before normalisation
    return options


def _number(name: str, text: str) -> float:
    try:
        if "_" not in text:  # Python reads 0.5_2 as 0.52
            return float(text)
    except ValueError:
        pass
    raise ValueError(
        f"{name} is {quoted(text)}, which is not a number; give 2.0, or '0.5_5.0' for two bounds."
    )
