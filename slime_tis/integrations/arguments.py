"""The rollout correction's flags for another trainer's argparse parser.

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
"""slime's option names → our names. A later alias of the same option has priority."""

HOST_DEFAULTS = "rollout_correction_host_defaults"
"""Attribute of the parsed arguments: the host parser's defaults of correction options, by name.

argparse does not tell whether the command line had a flag. A value that differs from the host's
default must come from the command line.
"""


def add_rollout_correction_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every field of `RolloutCorrectionConfig`, also under slime's names.

    A flag that the parser defines already keeps its definition and its default, for example slime's
    `--use-tis` and `--tis-clip`. Added flags have no default: `rollout_correction_config` uses the
    config's. The parsed arguments get the additional attribute `rollout_correction_host_defaults`.

    Args:
        parser: Another trainer's parser, which has all its flags already.

    Raises:
        ValueError: The parser has a flag of the same name that takes another kind of value.
    """
    # argparse has no public way to ask.
    host_actions = parser._option_string_actions
    group = parser.add_argument_group("rollout correction (slime_tis)")
    docs = field_docs(RolloutCorrectionConfig)
    for name, field in field_types(RolloutCorrectionConfig).items():
        if flag(name) in host_actions:
            _check_definition(host_actions[flag(name)], name, field)
            continue
        flags = [flag(name)]
        for alias in _aliases(name):
            if flag(alias) not in host_actions:
                flags.append(flag(alias))
        group.add_argument(
            *flags,
            dest=name,
            default=argparse.SUPPRESS,
            # argparse formats help texts with %.
            help=docs[name].replace("%", "%%"),
            **_reader(field),
        )
    host_defaults = {}
    for name in [*field_types(RolloutCorrectionConfig), *CORRECTION_ALIASES]:
        default = parser.get_default(name)
        if default is not None:
            host_defaults[name] = default
    parser.set_defaults(**{HOST_DEFAULTS: host_defaults})


def _reader(field: FieldType) -> dict[str, Any]:
    """The arguments by which argparse reads the values of a field."""
    if field.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if field.choices:
        return {"type": str, "choices": field.choices}
    return {"type": field.item}


def rollout_correction_config(
    args: argparse.Namespace | Mapping[str, Any],
) -> RolloutCorrectionConfig:
    """Returns the correction that parsed arguments describe.

    Each option is read under our name, then under slime's names, else it has its default. A value
    of the command line has priority over a default of the host's parser. None counts as unset.

    Args:
        args: Arguments of a parser with `add_rollout_correction_arguments`; or an object or mapping
            with the same names, for example `vars(args)` or an omegaconf node.

    Raises:
        TypeError: `args` is neither an object with attributes nor a mapping.
        ValueError: `args` has none of the options, a value is out of its limits, or two options
            exclude each other.
    """
    if not isinstance(args, Mapping) and not hasattr(args, "__dict__"):
        raise TypeError(
            f"rollout_correction_config got {type(args).__name__}; pass the result of"
            " parser.parse_args(), or a mapping of the same names, for example vars(args)."
        )
    names = [HOST_DEFAULTS, *field_types(RolloutCorrectionConfig), *CORRECTION_ALIASES]
    present = [name for name in names if _has(args, name)]
    if not present:
        raise ValueError(
            "rollout_correction_config found none of the correction's options in the"
            f" {type(args).__name__}, for example use_tis; call"
            " add_rollout_correction_arguments(parser) before parse_args(), or pass the part of"
            " the configuration that has these options."
        )
    return RolloutCorrectionConfig(**given_options(args))


def given_options(args: argparse.Namespace | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the correction options that are set, under our names."""
    host_defaults = _value(args, HOST_DEFAULTS) or {}
    options = {}
    for name in field_types(RolloutCorrectionConfig):
        defaults = []
        explicit = []
        for alias in [name, *reversed(_aliases(name))]:
            value = _value(args, alias)
            if value is None:
                continue
            if value == host_defaults.get(alias):
                defaults.append(value)
            else:
                explicit.append(value)
        values = explicit + defaults
        if values:
            options[name] = values[0]
    return options


def _aliases(name: str) -> list[str]:
    """slime's names of an option."""
    return [alias for alias, option in CORRECTION_ALIASES.items() if option == name]


def _has(args: argparse.Namespace | Mapping[str, Any], name: str) -> bool:
    """Whether arguments or a mapping have an option."""
    if isinstance(args, Mapping):
        return name in args
    return hasattr(args, name)


def _value(args: argparse.Namespace | Mapping[str, Any], name: str) -> Any:
    """The value of an option; None if it is missing."""
    if isinstance(args, Mapping):
        return args.get(name)
    return getattr(args, name, None)


def _check_definition(action: argparse.Action, name: str, field: FieldType) -> None:
    """Refuses a flag of the parser that takes another kind of value than the field."""
    # argparse gives flags without a value, such as those of `store_true`, nargs 0.
    is_switch = action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
    if action.dest != name or is_switch != (field.kind is bool):
        kind = "an option with a value"
        if is_switch:
            kind = "a switch"
        raise ValueError(
            f"{flag(name)} of the parser is {kind} for {action.dest!r}, but slime_tis needs"
            f" {name!r}, {field}; rename the parser's flag."
        )
