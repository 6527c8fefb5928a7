"""The flags of the rollout correction for the argparse parser of another trainer.

parser = slime's, miles' or any Megatron-style parser
add_rollout_correction_arguments(parser)
config = rollout_correction_config(parser.parse_args())
"""

import argparse
from typing import Any

from slime_tis.correction import RolloutCorrectionConfig
from slime_tis.limits import FieldType, field_docs, field_types, flag

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


def add_rollout_correction_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every field of `RolloutCorrectionConfig`, and slime's names of these flags.

    A flag that the parser defines already keeps its definition and its default, for example slime's `--use-tis` and
    `--tis-clip`. Added flags have no default: `rollout_correction_config` uses the config's.

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
        old_names = [flag(old) for old, new in CORRECTION_ALIASES.items() if new == name and flag(old) not in known]
        options: dict[str, Any] = {"type": field.item, "choices": field.choices or None}
        if field.kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif field.choices:
            options["type"] = str
        help_text = docs[name].replace("%", "%%")
        group.add_argument(flag(name), *old_names, dest=name, default=argparse.SUPPRESS, help=help_text, **options)


def rollout_correction_config(args: argparse.Namespace) -> RolloutCorrectionConfig:
    """Returns the correction that parsed arguments describe.

    A field takes the attribute of its name, else the attribute of slime's name, else its default. None counts as unset.

    Args:
        args: Arguments of a parser with `add_rollout_correction_arguments`.

    Raises:
        ValueError: A value is out of its limits, or options exclude each other.
    """
    return RolloutCorrectionConfig(**given_options(args))


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the attributes that are options of the correction, under their own or slime's names, without None."""
    attributes = {old: new for old, new in CORRECTION_ALIASES.items() if getattr(args, old, None) is not None}
    attributes |= {name: name for name in field_types(RolloutCorrectionConfig) if getattr(args, name, None) is not None}
    return {new: getattr(args, attribute) for attribute, new in attributes.items()}


def _check_definition(action: argparse.Action, name: str, field: FieldType) -> None:
    is_switch = action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
    if action.dest != name or is_switch != (field.kind is bool):
        kind = "a switch" if is_switch else "an option with a value"
        raise ValueError(
            f"{flag(name)} of the parser is {kind} for {action.dest!r}, but slime_tis needs {name!r}, {field}; rename "
            "the parser's flag."
        )
