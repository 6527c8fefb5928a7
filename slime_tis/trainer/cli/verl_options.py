"""verl's rollout-correction options in a YAML block or as Hydra overrides: text, and where it was written."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_tis.errors import quoted
from slime_tis.integrations.verl_config import NAMES, SWITCHES, translate
from slime_tis.trainer.cli.options import Given, Source, is_unset, nearest, read_switch

BLOCKS = ("algorithm", "actor_rollout_ref")
"""Top-level keys of a verl configuration that are read."""

OVERRIDE = re.compile(rf"\+{{0,2}}((?:{'|'.join(BLOCKS)})(?:\.\w+)+)=(.*)", re.DOTALL)
"""A Hydra override of a verl command line: `algorithm.rollout_correction.bypass_mode=True`."""

CORRECTION = "algorithm.rollout_correction"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
"""The option that verl's correction asks for; here rollouts always have log-probs."""


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


def from_verl(blocks: Mapping[str, Any], overrides: Mapping[str, str], place: str) -> dict[str, Given]:
    """The options of ours that verl's blocks give, by name, not yet read.

    Args:
        blocks: top-level keys of a YAML document among BLOCKS.
        overrides: dotted keys and text, which replace what the blocks say.
        place: what follows the key in messages, for example ` in run.yaml`.

    Raises:
        ValueError: a key that is not read, or keys that contradict each other.
    """
    entries = {
        key: Given(value=value, label=quoted(key)[1:-1] + place, source=Source.YAML)
        for name, block in blocks.items()
        for key, value in _leaves(name, block).items()
    }
    entries |= {key: Given(value=text, label=key, source=Source.COMMAND_LINE) for key, text in overrides.items()}
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


def _check_log_probs(entry: Given) -> None:
    if not is_unset(entry.value) and not _switch(entry):
        raise ValueError(
            f"{entry.label} is {quoted(entry.value)} but rollouts here always have log-probs; "
            "make it true or remove it."
        )


def _correction(block: Mapping[str, Given]) -> dict[str, Given]:
    """The rollout_correction block, in verl's older and newer keys."""
    values: dict[str, Any] = {}
    for key, entry in block.items():
        if key not in NAMES:
            raise ValueError(f"{entry.label} is not an option; {nearest(key, NAMES)}")
        is_switch = key in SWITCHES
        values[key] = None if is_unset(entry.value) else _switch(entry) if is_switch else entry.value
    return {
        name: replace(block[key], value=str(value) if isinstance(value, bool) else value)
        for name, (value, key) in translate(values, lambda key: block[key].label).items()
    }


def _switch(entry: Given) -> bool:
    try:
        return read_switch(entry.value if isinstance(entry.value, str) else "")
    except ValueError:
        raise ValueError(f"{entry.label} is {quoted(entry.value)} but must be true or false.") from None
