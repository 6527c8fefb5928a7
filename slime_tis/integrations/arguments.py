"""The flags of the rollout correction for the argparse parser of another trainer.

parser = slime's, miles' or any Megatron-style parser
add_rollout_correction_arguments(parser)
config = rollout_correction_config(parser.parse_args())
"""

import argparse
from collections.abc import Mapping
from typing import Any

from slime_tis.correction import RolloutCorrectionConfig
from slime_tis.options.fields import FieldType, field_docs, field_types, flag

CORRECTION_ALIASES = {
    "tis_clip": "tis_upper_bound",
    "tis_clip_low": "tis_lower_bound",
    "mis_mode": "tis_mode",
    "mis_level": "tis_level",
    "mis_lower_bound": "tis_lower_bound",
    "mis_upper_bound": "tis_upper_bound",
    "mis_batch_normalize": "tis_batch_normalize",
    "mis_veto_threshold": "rs_veto_threshold",
}
"""slime's names of options, and the names here."""

HOST_DEFAULTS = "rollout_correction_host_defaults"
"""Attribute of the parsed arguments: the defaults of the host's flags that are options of the
correction, by name.

argparse does not say whether a value was given on the command line. A value that differs from its
default was.
"""


def add_rollout_correction_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every field of `RolloutCorrectionConfig`, and slime's names of these flags.

    A flag that the parser defines already keeps its definition and its default, for example slime's
    `--use-tis` and `--tis-clip`. Added flags have no default: `rollout_correction_config` uses the
    config's. The parsed arguments get the further attribute `rollout_correction_host_defaults`.

    Args:
        parser: The parser of another trainer; call this after it has its own flags.

    Raises:
        ValueError: The parser has a flag of the same name that takes another kind of value.
    """
    known = parser._option_string_actions  # argparse has no public way to ask
    group = parser.add_argument_group("rollout correction (slime_tis)")
    docs = field_docs(RolloutCorrectionConfig)
    for name, field in field_types(RolloutCorrectionConfig).items():
        if flag(name) in known:
            _check_definition(known[flag(name)], name, field)
            continue
        old_names = [
            flag(old)
            for old, new in CORRECTION_ALIASES.items()
            if new == name and flag(old) not in known
        ]
        options: dict[str, Any] = {"type": field.item, "choices": field.choices or None}
        if field.kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif field.choices:
            options["type"] = str
        help_text = docs[name].replace("%", "%%")
        group.add_argument(
            flag(name), *old_names, dest=name, default=argparse.SUPPRESS, help=help_text, **options
        )
    names = [*field_types(RolloutCorrectionConfig), *CORRECTION_ALIASES]
    host_defaults = {
        name: parser.get_default(name) for name in names if parser.get_default(name) is not None
    }
    parser.set_defaults(**{HOST_DEFAULTS: host_defaults})


def rollout_correction_config(
    args: argparse.Namespace | Mapping[str, Any],
) -> RolloutCorrectionConfig:
    """Returns the correction that parsed arguments describe.

    A field takes the attribute of its name, else the attribute of slime's name, else its default. A
    value of the command line has priority over a default of the host's parser. None counts as
    unset.

    Args:
        args: Arguments of a parser with `add_rollout_correction_arguments`; or an object or mapping
            with the same names, for example `vars(args)` or an omegaconf node.

    Raises:
        TypeError: The argument is neither an object with attributes nor a mapping.
        ValueError: It has none of the options, a value is out of its limits, or options exclude
            each other.
    """
    if not isinstance(args, Mapping) and not hasattr(args, "__dict__"):
        raise TypeError(
            f"rollout_correction_config got {type(args).__name__}; pass the result of"
            " parser.parse_args(), or a mapping of the same names, for example vars(args)."
        )
    names = [HOST_DEFAULTS, *field_types(RolloutCorrectionConfig), *CORRECTION_ALIASES]
    if not any(_has(args, name) for name in names):
        raise ValueError(
            "rollout_correction_config found none of the correction's options in the"
            f" {type(args).__name__}, for example use_tis; call"
            " add_rollout_correction_arguments(parser) before parse_args(), or pass the part of"
            " the configuration that has these options."
        )
    return RolloutCorrectionConfig(**given_options(args))


def given_options(args: argparse.Namespace | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that are options of the correction, under their own names, without None."""
    host_defaults = _value(args, HOST_DEFAULTS) or {}
    options = {}
    for name in field_types(RolloutCorrectionConfig):
        aliases = [old for old, new in CORRECTION_ALIASES.items() if new == name]
        values = {alias: _value(args, alias) for alias in [name, *reversed(aliases)]}
        values = {alias: value for alias, value in values.items() if value is not None}
        explicit = [value for alias, value in values.items() if value != host_defaults.get(alias)]
        chosen = explicit or list(values.values())
        if chosen:
            options[name] = chosen[0]
    return options


def _has(args: argparse.Namespace | Mapping[str, Any], name: str) -> bool:
    return name in args if isinstance(args, Mapping) else hasattr(args, name)


def _value(args: argparse.Namespace | Mapping[str, Any], name: str) -> Any:
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)


def _check_definition(action: argparse.Action, name: str, field: FieldType) -> None:
    is_switch = action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
    if action.dest != name or is_switch != (field.kind is bool):
        kind = "a switch" if is_switch else "an option with a value"
        raise ValueError(
            f"{flag(name)} of the parser is {kind} for {action.dest!r}, but slime_tis needs"
            f" {name!r}, {field}; rename the parser's flag."
        )
