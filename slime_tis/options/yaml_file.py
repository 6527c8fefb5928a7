"""Options from a YAML file: flag names as keys, and verl's blocks, there or as Hydra overrides."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from slime_tis.errors import quoted
from slime_tis.integrations.verl_config import (
    ACTOR_NAMES,
    LOSS_MODE,
    NAMES,
    SWITCHES,
    translate,
    translate_actor,
)
from slime_tis.options.flags import BLOCKS, CORRECTION
from slime_tis.options.values import (
    Given,
    Option,
    Source,
    is_unset,
    nearest,
    read_given,
    read_switch,
    similar,
)

MAX_BYTES = 64 * 1024
"""Size of a configuration; one with every option is below 8 KiB."""
MAX_DEPTH = 8
"""Levels of nesting; verl's block has three."""

YAML_NULLS = ("", "~", "null")
ACTOR = "actor_rollout_ref.actor"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
"""The option that verl's correction asks for; here rollouts always have log-probs."""


def read_yaml(
    path: Path | None,
    overrides: Mapping[str, str],
    options: Mapping[str, Option],
    aliases: Mapping[str, str],
) -> dict[str, Given]:
    """Reads the options of a YAML file, user functions' included, with Hydra overrides over its verl blocks.

    YAML's own typing is omitted: scalars stay text and are read as on the command line.
    """
    document = {} if path is None else _read_document(path)
    place = "" if path is None else f" in {_shown(path)}"
    blocks = {name: value for name, value in document.items() if name in BLOCKS}
    verl = from_verl(blocks, overrides, place)
    values = {
        name: read_given(entry.label, options[name], entry.value, entry.source)
        for name, entry in verl.items()
    }
    for key in [key for key in document if key not in BLOCKS]:
        name = aliases.get(key.replace("-", "_"), key.replace("-", "_"))
        label = quoted(key)[1:-1] + place
        if name not in options:
            values[name] = _user_option(label, key, path, (*options, *aliases))
            continue
        given = read_given(label, options[name], document[key], Source.YAML)
        other = values.get(name)
        if other is not None and (
            name not in verl or (other.source == Source.YAML and other.value != given.value)
        ):
            raise ValueError(
                f"{label} gives {name} a second time, besides {other.label}; remove one of the two."
            )
        values.setdefault(name, given)
    return values


def _user_option(label: str, key: str, path: Path | None, known: Sequence[str]) -> Given:
    """Returns an option of a user function in its YAML type; refuses misspelled options and values without JSON."""
    match = similar(key, known)
    assert path is not None  # overrides set options of verl's blocks only
    document = yaml.load(
        path.read_text(encoding="utf-8"), _UserLoader
    )  # a safe loader; _read_document checked it
    if (
        match is not None
        or key == "custom_config_path"
        or not key.isidentifier()
        or key not in document
    ):
        hint = "--help lists the options." if match is None else f"did you mean {match}?"
        raise ValueError(f"{label} is not an option; {hint}")
    value = document[key]
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{label} is a {type(value).__name__}; give a number, text, a list or a mapping."
        ) from None
    return Given(value=value, label=label, source=Source.YAML)


def _read_document(path: Path) -> dict[str, Any]:
    """Returns the file with its scalars as text; refuses aliases and deep nesting."""
    label = f"--custom-config-path is {quoted(str(path))}"
    if not path.is_file():
        raise ValueError(f"{label} but there is no such file; give a YAML file.")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(
            f"{label} but it has {path.stat().st_size} bytes; at most {MAX_BYTES} are read."
        )
    try:
        text = path.read_text(encoding="utf-8")
        depth = 0
        for event in yaml.parse(text):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
                refused = (
                    f"an alias or more than {MAX_DEPTH} levels are not read; write the values out"
                )
                raise ValueError(f"{_shown(path)}, {_line(event)}: {refused}.")
        root = yaml.compose(text, yaml.BaseLoader)
        document = None if root is None else _plain(root, _shown(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).replace("<unicode string>", "the file").split())
        raise ValueError(f"{label} but it is not YAML: {quoted(reason, 220)[1:-1]}.") from None
    if document is not None and not isinstance(document, dict):
        raise ValueError(f"{label} but it contains no keys; write one `key: value` per line.")
    return document or {}


def _plain(node: Any, file: str) -> Any:
    """Returns a node as mappings, lists and text, null as None; refuses keys that are repeated or no words."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, file) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        return None if node.style is None and node.value.lower() in YAML_NULLS else node.value
    lines: dict[str, str] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"{file}, {_line(key)}: a key must be a word; write `key: value`.")
        if key.value in lines:
            raise ValueError(
                f"{file}, {_line(key)}: {quoted(key.value)} is given a second time, after"
                f" {lines[key.value]}; remove one of the two."
            )
        lines[key.value] = _line(key)
    return {key.value: _plain(value, file) for key, value in node.value}


def _shown(path: Path) -> str:
    return quoted(str(path))[1:-1]


class _UserLoader(yaml.SafeLoader):
    """YAML's types; 1e-4 is a number, which YAML 1.1 reads as text."""


_UserLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _line(marked: Any) -> str:
    return f"line {marked.start_mark.line + 1}"


def from_verl(
    blocks: Mapping[str, Any], overrides: Mapping[str, str], where: str
) -> dict[str, Given]:
    """Returns this program's options of verl's blocks, not yet read; overrides replace what the blocks say."""
    entries = {
        key: Given(value=value, label=quoted(key)[1:-1] + where, source=Source.YAML)
        for name, block in blocks.items()
        for key, value in _leaves(name, block).items()
    }
    entries |= {
        key: Given(value=text, label=key, source=Source.COMMAND_LINE)
        for key, text in overrides.items()
    }
    block, actor = {}, {}
    for key, entry in entries.items():
        parent, _, name = key.rpartition(".")
        if parent == CORRECTION:
            block[name] = entry
        elif key.removeprefix(f"{ACTOR}.") in (LOSS_MODE, *ACTOR_NAMES):
            actor[key.removeprefix(f"{ACTOR}.")] = entry
        elif not is_unset(entry.value) and not (key == LOG_PROBS and _switch(entry)):
            raise ValueError(
                f"{entry.label} is {quoted(entry.value)} but is not read; of verl's options"
                f" {CORRECTION}.*, {LOG_PROBS}=True and {ACTOR}.NAME with"
                f" {', '.join((LOSS_MODE, *ACTOR_NAMES))} are."
            )
    options = translate_actor(
        {key: None if is_unset(entry.value) else entry.value for key, entry in actor.items()},
        lambda key: actor[key].label,
    )
    losses = {name: replace(actor[key], value=str(value)) for name, (value, key) in options.items()}
    correction = _correction(block)
    if "policy_loss" in correction and "policy_loss" in losses:
        raise ValueError(
            f"{correction['policy_loss'].label} replaces {losses['policy_loss'].label}; drop one of"
            " them."
        )
    return losses | correction


def _leaves(key: str, value: Any) -> dict[str, Any]:
    """The values of nested mappings by their dotted keys."""
    if not isinstance(value, dict):
        return {key: value}
    return {
        leaf: part for name in value for leaf, part in _leaves(f"{key}.{name}", value[name]).items()
    }


def _correction(block: Mapping[str, Given]) -> dict[str, Given]:
    """The rollout_correction block, in verl's older and newer keys."""
    values: dict[str, Any] = {}
    for key, entry in block.items():
        if key not in NAMES:
            raise ValueError(f"{entry.label} is not an option; {nearest(key, NAMES)}")
        is_switch = key in SWITCHES
        values[key] = (
            None if is_unset(entry.value) else _switch(entry) if is_switch else entry.value
        )
    try:
        options = translate(values, lambda key: block[key].label)
    except TypeError as error:  # a list where verl has a number
        raise ValueError(str(error)) from None
    return {
        name: replace(block[key], value=str(value) if isinstance(value, bool) else value)
        for name, (value, key) in options.items()
    }


def _switch(entry: Given) -> bool:
    try:
        return read_switch(entry.value if isinstance(entry.value, str) else "")
    except ValueError:
        raise ValueError(
            f"{entry.label} is {quoted(entry.value)} but must be true or false."
        ) from None
