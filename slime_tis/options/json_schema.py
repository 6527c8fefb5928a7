"""The JSON Schema of the YAML file of --custom-config-path, for editors.

An editor completes the names of options, shows their help, and marks values out of their limits.
The program's own rules are stricter: they also refuse options without effect.
"""

import math
from collections.abc import Callable
from dataclasses import MISSING
from typing import Any

from slime_tis.correction.config import PRESETS
from slime_tis.integrations.verl_config import ACTOR_NAMES, LOSS_MODE, NAMES
from slime_tis.options.command_line import CommandLine, needs_of
from slime_tis.options.fields import FieldType, Limits
from slime_tis.options.values import NULLS, SWITCHES, Option

Schema = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
"""The dialect; yaml-language-server reads it, too."""
LARGEST = 1.7976931348623157e308
"""The largest double. JSON has no infinity; .inf in YAML is above this number."""
INFINITY: Schema = {"exclusiveMinimum": LARGEST}
DEFINITIONS: dict[str, Schema] = {
    "switch": {"anyOf": [{"type": "boolean"}, {"enum": [*SWITCHES]}]},
    # The program reads `wandb_group: 7` as the text 7.
    "text": {"type": ["string", "number", "boolean"], "pattern": r"\S"},
    # A blank text, such as a newline, counts.
    "verbatim": {"type": ["string", "number", "boolean"], "minLength": 1},
    "unset": {"enum": [None, *NULLS]},
}
"""Schemas that many options share."""
CUSTOM_FUNCTION = "FUNCTION"
"""Placeholder of a user function, which may read options that the program does not know."""


def yaml_schema(line: CommandLine) -> Schema:
    """Returns the schema of the options of a program, in the order of --help."""
    properties: dict[str, Schema] = {}
    functions = []
    for option in line.options.values():
        # A YAML file cannot name another one.
        if option.name == "custom_config_path":
            continue
        properties[option.name] = _property(line, option)
        if option.metavar == CUSTOM_FUNCTION:
            functions.append({"required": [option.name]})
    for old, new in line.aliases.items():
        properties[old] = properties[new] | {
            "description": f"Old name of {new}.",
            "deprecated": True,
        }
    properties |= _verl_blocks()
    # The program also reads names with hyphens, which are not listed.
    known_names = {"anyOf": [{"enum": [*properties]}, {"pattern": "-"}]}
    return {
        "$schema": DRAFT,
        "title": "Options of slime-tis train",
        "description": "The YAML file of --custom-config-path.",
        "type": ["object", "null"],
        "$defs": DEFINITIONS,
        "properties": properties,
        "if": {"not": {"anyOf": functions}},
        "then": {"propertyNames": known_names},
    }


def _property(line: CommandLine, option: Option) -> Schema:
    """Returns the schema of an option's value."""
    text = "text"
    if option.verbatim:
        text = "verbatim"
    values = _field(option.type, text)
    if option.name == "rollout_correction_preset":
        values = [{"enum": [*PRESETS]}]
    schema: Schema = {"description": _description(line, option), "anyOf": values}
    if option.default is MISSING:
        # A text may also be the word none, which resets an option.
        schema["not"] = _defined("unset")
        return schema
    values.append(_defined("unset"))
    if option.default not in (None, math.inf, -math.inf):
        schema["default"] = option.default
    return schema


def _description(line: CommandLine, option: Option) -> str:
    """Returns the help of an option, its limits and the flags that it needs."""
    text = option.help
    limits = option.type.limits
    if limits is not None:
        text += f" Limits: {limits}."
    needs = [str(need) for need in needs_of(line, option.name) if need.suggested]
    if needs:
        text += f" Needs {' or '.join(needs)}."
    return text


def _field(field: FieldType, text: str) -> list[Schema]:
    """Returns the alternatives of a value: one item, or a list of items or a mapping.

    `text` names the shared schema of a text.
    """
    items = _item(field)
    if items == [_defined("text")]:
        items = [_defined(text)]
    if not field.is_list:
        return items
    several: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    if field.item is not str:
        return [*items, several]
    # `eval_prompt_data: {aime: a.jsonl}` names the prompt files.
    named = {"type": "object", "minProperties": 1, "additionalProperties": {"anyOf": items}}
    return [*items, several, named]


def _item(field: FieldType) -> list[Schema]:
    """Returns the alternatives of a scalar."""
    if field.choices:
        # A choice such as `off` is Boolean in YAML 1.1, but text in YAML 1.2 and in this program.
        return [{"enum": [*field.choices]}]
    return TYPES[field.item](field.limits)


def _switch(limits: Limits | None) -> list[Schema]:
    """Returns the alternatives of a bool, which has no limits."""
    return [_defined("switch")]


def _integer(limits: Limits | None) -> list[Schema]:
    """Returns the alternatives of an int."""
    return _number("integer", limits)


def _float(limits: Limits | None) -> list[Schema]:
    """Returns the alternatives of a float."""
    return _number("number", limits)


def _number(kind: str, limits: Limits | None) -> list[Schema]:
    """Returns the range of a number, and the allowed values beyond the range."""
    within: Schema = {"type": kind, "maximum": LARGEST, "minimum": -LARGEST}
    if limits is None:
        return [within]
    bounds = {
        "minimum": limits.ge,
        "exclusiveMinimum": limits.gt,
        "maximum": limits.le,
        "exclusiveMaximum": limits.lt,
    }
    within |= {keyword: bound for keyword, bound in bounds.items() if bound is not None}
    alternatives = [within]
    for value in limits.also:
        if math.isinf(value):
            alternatives += [{"type": "number"} | INFINITY, {"enum": ["inf"]}]
        else:
            alternatives.append({"const": value})
    return alternatives


def _text(limits: Limits | None) -> list[Schema]:
    """Returns the alternatives of a str, which has no limits."""
    return [_defined("text")]


TYPES: dict[type, Callable[[Limits | None], list[Schema]]] = {
    bool: _switch,
    int: _integer,
    float: _float,
    str: _text,
}
"""The alternatives of a scalar, by the type of a field."""


def _defined(name: str) -> Schema:
    """Returns a reference to a shared schema."""
    return {"$ref": f"#/$defs/{name}"}


def _verl_blocks() -> dict[str, Schema]:
    """Returns the schemas of verl's blocks, whose values are checked by the program only."""
    correction: Schema = {}
    for key, name in NAMES.items():
        correction[key] = {"description": f"{name} here."}
    actor: Schema = {}
    for key in (LOSS_MODE, *ACTOR_NAMES):
        name, _, nested = key.partition(".")
        description = f"{ACTOR_NAMES.get(key, 'policy_loss')} here."
        if nested:
            block = actor.setdefault(name, {"type": "object", "properties": {}})
            block["properties"][nested] = {"description": description}
        else:
            actor[name] = {"description": description}
    return {
        "algorithm": _block("rollout_correction", correction),
        "actor_rollout_ref": _block("actor", actor),
    }


def _block(name: str, properties: Schema) -> Schema:
    """Returns the schema of a block of verl with one block in it."""
    inner = {"type": ["object", "null"], "properties": properties}
    return {
        "description": "Block of a configuration of verl.",
        "type": ["object", "null"],
        "properties": {name: inner},
    }
