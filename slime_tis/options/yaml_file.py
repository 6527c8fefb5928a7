"""The YAML file of --custom-config-path: options by name, and verl's blocks.

Hydra overrides on the command line change the values of verl's blocks.
"""

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
"""Plain scalars that YAML reads as null."""
ACTOR = "actor_rollout_ref.actor"
"""The block of verl's configuration for the policy loss."""
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
"""The option that verl's correction needs; here rollouts always have log-probs."""


def read_yaml(
    path: Path | None,
    overrides: Mapping[str, str],
    options: Mapping[str, Option],
    aliases: Mapping[str, str],
) -> dict[str, Given]:
    """Reads the options of a YAML file, also those of user functions.

    YAML's own types are not used: scalars stay text and are read as on the command line.

    Args:
        path: The file, or None if there are only overrides.
        overrides: Texts of Hydra overrides by dotted key; they replace values of verl's blocks.
        options: The options that the file may have, by name.
        aliases: Present names of options by old name.

    Raises:
        ValueError: The file cannot be read, or a key or value is wrong.
    """
    document = {}
    location = ""
    if path is not None:
        document = read_document(path)
        location = f" in {_shown(path)}"
    blocks = {key: value for key, value in document.items() if key in BLOCKS}
    verl = from_verl(blocks, overrides, location)
    values = {}
    for name, entry in verl.items():
        values[name] = read_given(entry.label, options[name], entry.value, entry.source)
    for key, value in document.items():
        if key in blocks:
            continue
        label = quoted(key)[1:-1] + location
        name = key.replace("-", "_")
        name = aliases.get(name, name)
        if name not in options:
            values[name] = _user_option(label, key, path, (*options, *aliases))
            continue
        given = read_given(label, options[name], value, Source.YAML)
        other = values.setdefault(name, given)
        # A key may repeat a value of the verl block, and an override replaces both.
        is_override = name in verl and other.source == Source.COMMAND_LINE
        repeats_verl = name in verl and other.value == given.value
        if other is not given and not is_override and not repeats_verl:
            raise ValueError(
                f"{label} gives {name} a second time, besides {other.label}; remove one of the two."
            )
    return values


def _user_option(label: str, key: str, path: Path | None, names: Sequence[str]) -> Given:
    """Returns an option of a user function in its YAML type.

    Raises:
        ValueError: The key is a misspelled option of this program, or JSON cannot hold the value.
    """
    match = similar(key, names)
    # Without a file there are only overrides, whose options this program knows.
    assert path is not None
    text = path.read_text(encoding="utf-8")
    # Safe, because the loader makes only YAML's types, and _read_document has checked the file.
    document = yaml.load(text, _UserLoader)
    # The loader reads some keys in another type, such as `on` and `1`; user functions need names.
    is_name = key.isidentifier() and key in document
    if match is not None or key == "custom_config_path" or not is_name:
        hint = "--help lists the options."
        if match is not None:
            hint = f"did you mean {match}?"
        raise ValueError(f"{label} is not an option; {hint}")
    value = document[key]
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        kind = type(value).__name__
        raise ValueError(
            f"{label} is a {kind}; give a number, text, a list or a mapping."
        ) from None
    return Given(value=value, label=label, source=Source.YAML)


def read_document(path: Path, flag: str = "--custom-config-path") -> dict[str, Any]:
    """Returns the file of `flag` with its scalars as text; refuses aliases and deep nesting."""
    label = f"{flag} is {quoted(str(path))}"
    if not path.is_file():
        raise ValueError(f"{label} but there is no such file; give a YAML file.")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{label} but it has {size} bytes; at most {MAX_BYTES} are read.")
    try:
        text = path.read_text(encoding="utf-8")
        _check_nesting(text, path)
        # BaseLoader leaves scalars as text, for the rules of the command line.
        root = yaml.compose(text, yaml.BaseLoader)
        document = None
        if root is not None:
            document = _plain(root, _shown(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        # PyYAML calls a text <unicode string>, and puts positions on separate lines.
        reason = " ".join(str(error).replace("<unicode string>", "the file").split())
        raise ValueError(f"{label} but it is not YAML: {quoted(reason, 220)[1:-1]}.") from None
    # The file is empty, or has only a null.
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ValueError(f"{label} but it contains no keys; write one `key: value` per line.")
    return document


def _check_nesting(text: str, path: Path) -> None:
    """Refuses aliases, which can expand to any size, and deep nesting, which exhausts the stack."""
    depth = 0
    for event in yaml.parse(text):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
            raise ValueError(
                f"{_shown(path)}, {_line(event)}: an alias or more than {MAX_DEPTH} levels are not"
                " read; write the values out."
            )


def _plain(node: Any, file: str) -> Any:
    """Returns a node as mappings, lists, text and None; unlike PyYAML, refuses repeated keys."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, file) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        # A quoted scalar has a style and is text, also "null" and "".
        if node.style is None and node.value.lower() in YAML_NULLS:
            return None
        return node.value
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
    """Returns a path for messages, without quotes."""
    return quoted(str(path))[1:-1]


class _UserLoader(yaml.SafeLoader):
    """Reads YAML's types, and 1e-4 as a number, which YAML 1.1 reads as text."""


_UserLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    # First characters of such a scalar.
    list("-+.0123456789"),
)


def _line(marked: Any) -> str:
    """Returns the line of a node or an event for messages."""
    return f"line {marked.start_mark.line + 1}"


def from_verl(
    blocks: Mapping[str, Any], overrides: Mapping[str, str], location: str
) -> dict[str, Given]:
    """Returns this program's options for verl's blocks and Hydra overrides, as texts.

    Args:
        blocks: verl's top-level blocks by name.
        overrides: Texts by dotted key; they replace the blocks' values.
        location: The blocks' file, for messages.

    Raises:
        ValueError: A key or a value has no counterpart here.
    """
    entries = {}
    for name, block in blocks.items():
        for key, value in _leaves(name, block).items():
            label = quoted(key)[1:-1] + location
            entries[key] = Given(value=value, label=label, source=Source.YAML)
    for key, text in overrides.items():
        entries[key] = Given(value=text, label=key, source=Source.COMMAND_LINE)
    correction_block = {}
    actor_block = {}
    for key, entry in entries.items():
        parent, _, name = key.rpartition(".")
        actor_key = key.removeprefix(f"{ACTOR}.")
        if parent == CORRECTION:
            correction_block[name] = entry
        elif actor_key in (LOSS_MODE, *ACTOR_NAMES):
            actor_block[actor_key] = entry
        elif not is_unset(entry.value) and not (key == LOG_PROBS and _switch(entry)):
            raise ValueError(
                f"{entry.label} is {quoted(entry.value)} but is not read; of verl's options"
                f" {CORRECTION}.*, {LOG_PROBS}=True and {ACTOR}.NAME with"
                f" {', '.join((LOSS_MODE, *ACTOR_NAMES))} are."
            )
    losses = _losses(actor_block)
    correction = _correction(correction_block)
    if "policy_loss" in correction and "policy_loss" in losses:
        raise ValueError(
            f"{correction['policy_loss'].label} replaces {losses['policy_loss'].label};"
            " drop one of them."
        )
    return losses | correction


def _leaves(key: str, value: Any) -> dict[str, Any]:
    """Returns the values of nested mappings by their dotted keys."""
    if not isinstance(value, dict):
        return {key: value}
    leaves: dict[str, Any] = {}
    for name, item in value.items():
        leaves |= _leaves(f"{key}.{name}", item)
    return leaves


def _losses(block: Mapping[str, Given]) -> dict[str, Given]:
    """Returns the options of the policy loss for verl's actor block."""
    values = {}
    for key, entry in block.items():
        values[key] = entry.value
        if is_unset(entry.value):
            values[key] = None
    options = translate_actor(values, lambda key: block[key].label)
    return {name: replace(block[key], value=str(value)) for name, (value, key) in options.items()}


def _correction(block: Mapping[str, Given]) -> dict[str, Given]:
    """Returns the options of verl's rollout_correction block, in its older and newer keys."""
    values: dict[str, Any] = {}
    for key, entry in block.items():
        if key not in NAMES:
            raise ValueError(f"{entry.label} is not an option; {nearest(key, NAMES)}")
        if is_unset(entry.value):
            values[key] = None
        elif key in SWITCHES:
            values[key] = _switch(entry)
        else:
            values[key] = entry.value
    try:
        options = translate(values, lambda key: block[key].label)
    # A bound is a list or a mapping in place of a number.
    except TypeError as error:
        raise ValueError(str(error)) from None
    correction = {}
    for name, (value, key) in options.items():
        # `read_given` takes texts, or a list of texts.
        if isinstance(value, bool):
            value = str(value)
        correction[name] = replace(block[key], value=value)
    return correction


def _switch(entry: Given) -> bool:
    """Returns the value of a switch; raises ValueError for another value."""
    text = ""  # no switch, for a list or a mapping
    if isinstance(entry.value, str):
        text = entry.value
    try:
        return read_switch(text)
    except ValueError:
        raise ValueError(
            f"{entry.label} is {quoted(entry.value)} but must be true or false."
        ) from None
