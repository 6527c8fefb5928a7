"""verl's rollout-correction options as options of ours: the one table of names, for text and for values."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from slime_tis.errors import quoted


@dataclass(frozen=True, kw_only=True)
class VerlOption:
    """A value of an option of verl's."""

    value: Any
    """True or False for `SWITCHES`, None where the option is unset; else the given text or number."""

    label: str
    """What messages call the option."""


OptionT = TypeVar("OptionT", bound=VerlOption)

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
"""Keys of verl's algorithm.rollout_correction block, of all its generations, and the option each one is here."""

SWITCHES: dict[str, tuple[bool | str, bool | str]] = {
    "rollout_is_batch_normalize": (False, True),
    "bypass_mode": (False, True),
    "bypass_old_logprob_for_rollout": (False, True),
    "use_policy_gradient": ("ppo", "reinforce"),
    "use_pure_rollout_correction": ("ppo", "reinforce"),
}
"""Options that are switches, and their values here when off and on."""

LOSSES = {"ppo_clip": "ppo", "reinforce": "reinforce"}
"""Values of loss_type, and what each one is here."""

WEIGHT_LEVELS = ("token", "sequence")
"""Values of rollout_is."""

REJECTION_LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Values of rollout_rs in the older generations, and the criterion that each one is in the newest."""


def translate(block: Mapping[str, OptionT]) -> dict[str, OptionT]:
    """verl's options as options of ours, by name; unset ones have no part in it.

    Args:
        block: by verl's name, among `NAMES`.

    Raises:
        ValueError: options that contradict each other, or a value that verl does not have.
    """
    options: dict[str, OptionT] = {}
    for key, given in block.items():
        if given.value is None:
            continue
        option, given = NAMES[key], _converted(key, given)
        other = options.get(option)
        if other is not None and other.value != given.value:
            raise ValueError(f"{given.label} contradicts {other.label}; remove one of the two.")
        options[option] = given
    return _weights(block, options) | _rejection(block, options)


def _converted(key: str, given: OptionT) -> OptionT:
    if key in SWITCHES:
        return replace(given, value=SWITCHES[key][given.value])
    if key == "loss_type" and isinstance(given.value, str):
        return replace(given, value=LOSSES.get(given.value, given.value))
    return given


def _weights(block: Mapping[str, OptionT], options: Mapping[str, OptionT]) -> dict[str, OptionT]:
    """The options of the importance weights, of the loss and of the old policy, and the veto."""
    rejection = ("rs_level", "rs_lower_bound", "rs_upper_bound")
    found = {name: given for name, given in options.items() if name not in rejection}
    level, bound = block.get("rollout_is"), options.get("tis_upper_bound")
    if level is None:
        return found
    if level.value not in (None, *WEIGHT_LEVELS):
        raise ValueError(
            f"{level.label} is {quoted(level.value)} but must be null, token or sequence; "
            "tis_level outside of verl's block takes more."
        )
    applied = level.value is not None and not _bypasses_with_ratio(options)
    found["use_tis"] = replace(level, value=applied)  # in bypass PPO verl measures the weights, as we do
    if bound is not None and isinstance(bound.value, str) and "_" in bound.value:
        lower, upper = bound.value.split("_", 1)
        found["tis_upper_bound"] = replace(bound, value=upper)
        if applied:  # IcePop, whose tokens stay in the denominator
            found["tis_lower_bound"] = replace(bound, value=lower)
            found["tis_mode"] = replace(bound, value="mask")
            found["rejection_normalizer"] = replace(bound, value="original")
    return found


def _bypasses_with_ratio(options: Mapping[str, OptionT]) -> bool:
    """Whether the loss's own ratio is π_θ/π_rollout, so that weights would correct twice."""
    bypass, loss = options.get("use_rollout_logprobs"), options.get("policy_loss")
    return bypass is not None and bypass.value is True and (loss is None or loss.value == "ppo")


def _split_bounds(bounds: dict[str, OptionT]) -> dict[str, OptionT]:
    """A level's bounds, with `lower_upper` in the upper one split."""
    pair = bounds["rs_upper_bound"]
    if not (isinstance(pair.value, str) and "_" in pair.value):
        return bounds
    if "rs_lower_bound" in bounds:
        raise ValueError(
            f"{pair.label} is {quoted(pair.value)}, which has a lower bound, and so has "
            f"{bounds['rs_lower_bound'].label}; remove one of the two."
        )
    lower, upper = pair.value.split("_", 1)
    return {"rs_lower_bound": replace(pair, value=lower), "rs_upper_bound": replace(pair, value=upper)}


def _rejection(block: Mapping[str, OptionT], options: Mapping[str, OptionT]) -> dict[str, OptionT]:
    """The options of the rejection: a level with its bounds, or a list of criteria."""
    bounds = {name: options[name] for name in ("rs_lower_bound", "rs_upper_bound") if name in options}
    chosen = block.get("rollout_rs")
    if chosen is None:
        return bounds
    if chosen.value is None:
        return {"use_rs": replace(chosen, value=False), **bounds}
    if "rs_upper_bound" not in bounds:
        raise ValueError(
            f"{chosen.label} is {quoted(chosen.value)} but rollout_rs_threshold is unset; add it, as verl requires too."
        )
    if isinstance(chosen.value, str) and chosen.value in REJECTION_LEVELS:
        bounds = _split_bounds(bounds)
        return {"use_rs": replace(chosen, value=True), "rs_level": chosen, **bounds}
    if "rs_lower_bound" in bounds:
        raise ValueError(
            f"{bounds['rs_lower_bound'].label} belongs to rollout_rs {', '.join(REJECTION_LEVELS)}; "
            "for criteria write lower_upper into rollout_rs_threshold."
        )
    return {
        "use_rs": replace(chosen, value=False),
        "rollout_rs": chosen,
        "rollout_rs_threshold": bounds["rs_upper_bound"],
    }
