"""verl's rollout-correction options, in a YAML block or as Hydra overrides, as options of ours."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime_tis.cli.options import Source, is_unset, nearest, read_switch
from slime_tis.errors import quoted

BLOCKS = ("algorithm", "actor_rollout_ref")
"""Top-level keys of a verl configuration of which something is read."""

OVERRIDE = re.compile(rf"\+{{0,2}}((?:{'|'.join(BLOCKS)})(?:\.\w+)+)=(.*)", re.DOTALL)
"""A Hydra override of a verl command line: `algorithm.rollout_correction.bypass_mode=True`."""

CORRECTION = "algorithm.rollout_correction"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
"""The option that verl's correction asks for; here rollouts always have log-probs."""

VERL_NAMES = {
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
"""Keys of verl's algorithm.rollout_correction block and the option each one is here."""

VERL_SWITCHES = {
    "bypass_mode": ("false", "true"),
    "bypass_old_logprob_for_rollout": ("false", "true"),
    "use_policy_gradient": ("ppo", "reinforce"),
    "use_pure_rollout_correction": ("ppo", "reinforce"),
}
"""Switches of verl, and what each one is here when it is off and when it is on."""

WEIGHT_LEVELS = ("token", "sequence")
"""Values of rollout_is."""

REJECTION_LEVELS = ("token", "sequence", "geometric")
"""Values of rollout_rs in verl's older keys; in the newer ones it is a list of criteria."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A value as it is written in a file or an override, not yet read."""

    value: Any
    """Text, None, or a list or mapping of them."""

    label: str
    """What messages call it."""

    source: Source
    """Where it was written."""


def is_override(word: str) -> bool:
    """Whether a word of a command line is a Hydra override of verl's blocks."""
    return OVERRIDE.fullmatch(word) is not None


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Takes Hydra overrides of verl's blocks off a command line.

    Returns:
        The rest of the command line, and the overrides' text by dotted key; of a key that is given twice, the last.
    """
    matches = [(word, OVERRIDE.fullmatch(word)) for word in argv]
    overrides = {match[1]: match[2].strip("'\"") for _, match in matches if match}
    return [word for word, match in matches if not match], overrides


def from_verl(blocks: Mapping[str, Any], overrides: Mapping[str, str], place: str) -> dict[str, Entry]:
    """The options of ours that verl's blocks give, by name, not yet read.

    Args:
        blocks: top-level keys of a YAML document among BLOCKS.
        overrides: dotted keys and text, which replace what the blocks say.
        place: what follows the key in messages, for example ` in run.yaml`.

    Raises:
        ValueError: a key that is not read, or keys that contradict each other.
    """
    entries = {
        key: Entry(value=value, label=quoted(key)[1:-1] + place, source=Source.YAML)
        for name, block in blocks.items()
        for key, value in _leaves(name, block).items()
    }
    entries |= {key: Entry(value=text, label=key, source=Source.COMMAND_LINE) for key, text in overrides.items()}
    block = {}
    for key, entry in entries.items():
        parent, _, name = key.rpartition(".")
        if parent == CORRECTION:
            block[name] = entry
        elif key == LOG_PROBS:
            _check_log_probs(entry)
        elif not (key in (*BLOCKS, CORRECTION) and is_unset(entry.value)):
            raise ValueError(
                f"{entry.label} is not read: of verl's options {CORRECTION}.* and {LOG_PROBS} are; give it as a flag."
            )
    return _correction(block)


def _leaves(key: str, value: Any) -> dict[str, Any]:
    """The values of nested mappings by their dotted keys."""
    if not isinstance(value, dict):
        return {key: value}
    return {leaf: part for name in value for leaf, part in _leaves(f"{key}.{name}", value[name]).items()}


def _check_log_probs(entry: Entry) -> None:
    if not is_unset(entry.value) and not _switch(entry):
        raise ValueError(
            f"{entry.label} is {quoted(entry.value)} but rollouts here always have log-probs; "
            "make it true or leave it out."
        )


def _correction(block: Mapping[str, Entry]) -> dict[str, Entry]:
    """The rollout_correction block, in verl's older and newer keys."""
    options: dict[str, Entry] = {}
    for key, entry in block.items():
        if key not in VERL_NAMES:
            raise ValueError(f"{entry.label} is not an option; {nearest(key, VERL_NAMES)}")
        if is_unset(entry.value):
            continue
        option, entry = VERL_NAMES[key], _translated(key, entry)
        other = options.get(option)
        if other is not None and other.value != entry.value:
            raise ValueError(f"{entry.label} contradicts {other.label}; leave one of the two out.")
        options[option] = entry
    return _weights(block, options) | _rejection(block, options)


def _translated(key: str, entry: Entry) -> Entry:
    if key in VERL_SWITCHES:
        return replace(entry, value=VERL_SWITCHES[key][_switch(entry)])
    return replace(entry, value="ppo") if key == "loss_type" and entry.value == "ppo_clip" else entry


def _weights(block: Mapping[str, Entry], options: Mapping[str, Entry]) -> dict[str, Entry]:
    """The options of the importance weights, of the loss and of the old policy."""
    found = {name: entry for name, entry in options.items() if not name.startswith("rs_")}
    if "rs_veto_threshold" in options:
        found["rs_veto_threshold"] = options["rs_veto_threshold"]
    level, bound = block.get("rollout_is"), options.get("tis_upper_bound")
    if level is None:
        return found
    if not is_unset(level.value) and level.value not in WEIGHT_LEVELS:
        raise ValueError(
            f"{level.label} is {quoted(level.value)} but must be null, token or sequence; "
            "tis_level outside of verl's block takes more."
        )
    applied = not is_unset(level.value) and not _bypasses_with_ratio(options)
    found["use_tis"] = replace(level, value=str(applied))  # in bypass PPO verl measures the weights, as we do
    if bound is not None and isinstance(bound.value, str) and "_" in bound.value:
        lower, upper = bound.value.split("_", 1)
        found["tis_upper_bound"] = replace(bound, value=upper)
        if applied:  # IcePop, whose tokens stay in the denominator
            found["tis_lower_bound"] = replace(bound, value=lower)
            found["tis_mode"] = replace(bound, value="mask")
            found["rejection_normalizer"] = replace(bound, value="original")
    return found


def _bypasses_with_ratio(options: Mapping[str, Entry]) -> bool:
    """Whether the loss's own ratio is π_θ/π_rollout, so that weights would correct twice."""
    bypass, loss = options.get("use_rollout_logprobs"), options.get("policy_loss")
    return bypass is not None and bypass.value == "true" and (loss is None or loss.value == "ppo")


def _rejection(block: Mapping[str, Entry], options: Mapping[str, Entry]) -> dict[str, Entry]:
    """The options of the rejection: a level with its bounds, or a list of criteria."""
    bounds = {name: options[name] for name in ("rs_lower_bound", "rs_upper_bound") if name in options}
    chosen = block.get("rollout_rs")
    if chosen is None:
        return bounds
    if is_unset(chosen.value):
        return {"use_rs": replace(chosen, value="false"), **bounds}
    if "rs_upper_bound" not in bounds:
        raise ValueError(
            f"{chosen.label} is {quoted(chosen.value)} but rollout_rs_threshold is unset; add it, as verl requires too."
        )
    if chosen.value in REJECTION_LEVELS:
        return {"use_rs": replace(chosen, value="true"), "rs_level": chosen, **bounds}
    if "rs_lower_bound" in bounds:
        raise ValueError(
            f"{bounds['rs_lower_bound'].label} belongs to rollout_rs {', '.join(REJECTION_LEVELS)}; "
            "for criteria write lower_upper into rollout_rs_threshold."
        )
    return {
        "use_rs": replace(chosen, value="false"),
        "rollout_rs": chosen,
        "rollout_rs_threshold": bounds["rs_upper_bound"],
    }


def _switch(entry: Entry) -> bool:
    try:
        return read_switch(entry.value if isinstance(entry.value, str) else "")
    except ValueError:
        raise ValueError(f"{entry.label} is {quoted(entry.value)} but must be true or false.") from None
