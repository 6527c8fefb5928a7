"""verl's rollout-correction options in a YAML block or as Hydra overrides: text, and where it was written."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_tis.errors import quoted
from slime_tis.integrations.verl_config import ACTOR_NAMES, LOSS_MODE, NAMES, SWITCHES, translate, translate_actor
from slime_tis.trainer.cli.options import Given, Source, is_unset, nearest, read_switch

BLOCKS = ("algorithm", "actor_rollout_ref")
"""Top-level keys of a verl configuration that are read."""

OVERRIDE = re.compile(rf"\+{{0,2}}((?:{'|'.join(BLOCKS)})(?:\.\w+)+)=(.*)", re.DOTALL)
"""A Hydra override of a verl command line: `algorithm.rollout_correction.bypass_mode=True`."""

CORRECTION = "algorithm.rollout_correction"
ACTOR = "actor_rollout_ref.actor"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
"""The option that verl's correction asks for; here rollouts always have log-probs."""


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns a command line without Hydra overrides of verl's blocks, and their text by dotted key."""
    matches = [(word, OVERRIDE.fullmatch(word)) for word in argv]
    overrides = {match[1]: match[2].strip("'\"") for _, match in matches if match}
    return [word for word, match in matches if not match], overrides


def from_verl(blocks: Mapping[str, Any], overrides: Mapping[str, str], where: str) -> dict[str, Given]:
    """Returns this program's options of verl's blocks, not yet read; overrides replace what the blocks say."""
    entries = {
        key: Given(value=value, label=quoted(key)[1:-1] + where, source=Source.YAML)
        for name, block in blocks.items()
        for key, value in _leaves(name, block).items()
    }
    entries |= {key: Given(value=text, label=key, source=Source.COMMAND_LINE) for key, text in overrides.items()}
    block, actor = {}, {}
    for key, entry in entries.items():
        parent, _, name = key.rpartition(".")
        if parent == CORRECTION:
            block[name] = entry
        elif key.removeprefix(f"{ACTOR}.") in (LOSS_MODE, *ACTOR_NAMES):
            actor[key.removeprefix(f"{ACTOR}.")] = entry
        elif not is_unset(entry.value) and not (key == LOG_PROBS and _switch(entry)):
            raise ValueError(
                f"{entry.label} is {quoted(entry.value)} but is not read; of verl's options {CORRECTION}.*, "
                f"{LOG_PROBS}=True and {ACTOR}.NAME with {', '.join((LOSS_MODE, *ACTOR_NAMES))} are."
            )
    options = translate_actor(
        {key: None if is_unset(entry.value) else entry.value for key, entry in actor.items()},
        lambda key: actor[key].label,
    )
    losses = {name: replace(actor[key], value=str(value)) for name, (value, key) in options.items()}
    correction = _correction(block)
    if "policy_loss" in correction and "policy_loss" in losses:
        raise ValueError(f"{correction['policy_loss'].label} replaces {losses['policy_loss'].label}; drop one of them.")
    return losses | correction


def _leaves(key: str, value: Any) -> dict[str, Any]:
    """The values of nested mappings by their dotted keys."""
    if not isinstance(value, dict):
        return {key: value}
    return {leaf: part for name in value for leaf, part in _leaves(f"{key}.{name}", value[name]).items()}


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
