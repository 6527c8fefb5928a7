"""A command line made of options: titled groups of flags, YAML and presets, read by one rule.

A flag is a field of a config: the field gives its name, type, choices and default, the docstring under the
field is its help. Every source is read by the same rules, so a YAML file may hold whatever a flag may hold.

Precedence: command line > YAML (`--custom-config-path`) > preset (`--rollout-correction-preset`) > defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_origin

from slime_tis.correction.config import (
    LEVELS,
    MODES,
    NONFINITE_POLICIES,
    NORMALIZERS,
    OLD_LOGPROBS,
    POLICY_LOSSES,
)
from slime_tis.correction.presets import PRESETS, preset_values
from slime_tis.options import LONGEST, Option, nearest, read_value
from slime_tis.yaml_options import read_yaml


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where options come from besides the command line."""

    use_rollout_correction: bool = False
    """Turn the correction on as preset or YAML say, and as --use-tis where neither says anything."""

    rollout_correction_preset: str | None = None
    """Name of a preset of correction options, for example decoupled_token_is."""

    custom_config_path: str | None = None
    """YAML file of options, with flag names as keys or verl's algorithm.rollout_correction block."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The flags of a program."""

    options: Mapping[str, Option]
    """By name."""

    groups: Mapping[str, str]
    """Titled groups of --help, and the options of each in their order there."""

    aliases: Mapping[str, str]
    """Old names of options and the name each one has now; both are read on the command line and in YAML."""

    metavars: Mapping[str, str]
    """What --help shows as the value, and the options it stands for; numbers show N (whole) or X."""


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
"""Names that options of the correction have elsewhere."""

CORRECTION_SWITCHES = {
    "use_tis",
    "use_rs",
    "rollout_rs",
    "rs_veto_threshold",
    "rs_veto_upper_threshold",
    "rs_second_moment_bound",
}
"""Options that say what --use-rollout-correction turns on."""

CORRECTION_CHOICES: dict[str, Sequence[str]] = {
    "tis_mode": MODES,
    "tis_level": LEVELS,
    "rs_level": LEVELS,
    "rejection_normalizer": NORMALIZERS,
    "nonfinite_policy": NONFINITE_POLICIES,
    "old_logprobs": OLD_LOGPROBS,
    "policy_loss": POLICY_LOSSES,
}
"""What --help shows as the values of options whose type is text and whose config checks them."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument ").replace(": ", " ", 1) + ".")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        values = "" if action.nargs == 0 else f" {action.metavar}"
        return ", ".join(action.option_strings) + values


def make_parser(line: CommandLine, *, prog: str, usage: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command line: titled groups of flags, whose values it keeps as text."""
    parser = _Parser(
        prog=prog,
        usage=usage,
        description=description,
        epilog="Every switch has a --no- form, and the value none unsets an option, so that the command line "
        "can take back what YAML or a preset says.",
        formatter_class=_HelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for title, names in line.groups.items():
        group = parser.add_argument_group(title)
        for name in names.split():
            _add_flag(group, line, line.options[name])
    return parser


def _add_flag(group: argparse._ArgumentGroup, line: CommandLine, option: Option) -> None:
    names = [option.name, *(old for old, new in line.aliases.items() if new == option.name)]
    text = f"{option.help} ({option.default_text})".replace("%", "%%")
    if option.kind is bool:
        _add_switch(group, option, names, text)
        return
    group.add_argument(
        *map(flag, names),
        dest=option.name,
        nargs="+" if get_origin(option.kind) is tuple else None,
        metavar=_metavar(line, option),
        help=text,
    )


def _add_switch(group: argparse._ArgumentGroup, option: Option, names: list[str], text: str) -> None:
    """Both forms of a switch; the help shows the one that departs from the default."""
    for value, prefix in ((True, ""), (False, "no_")):
        group.add_argument(
            *(flag(prefix + name) for name in names),
            dest=option.name,
            action="store_const",
            const=str(value),
            help=argparse.SUPPRESS if option.default == value else text,
        )


def _metavar(line: CommandLine, option: Option) -> str:
    choices = option.choices or CORRECTION_CHOICES.get(option.name)
    if choices:
        return "{" + ",".join(choices) + "}"
    named = (metavar for metavar, names in line.metavars.items() if option.name in names.split())
    return next(named, "X" if option.kind in (float, str) else "N")


def read_flags(line: CommandLine, parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """The values that the flags of a command line give, by option."""
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [token.split("=")[0] for token in unknown if token.startswith("-")] or unknown
        flags = list(map(flag, (*line.options, *line.aliases)))
        raise ValueError("\n".join(f"{name[:LONGEST]} is not a flag; {nearest(name, flags)}" for name in names))
    return {name: read_value(flag(name), line.options[name], text) for name, text in vars(known).items()}


def merge_sources(line: CommandLine, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by precedence: command line, then YAML, then preset; defaults are the configs' own.

    Args:
        line: the flags, those of `SourceConfig` and `RolloutCorrectionConfig` among them.
        given: the values of the command line.

    Raises:
        ValueError: one sentence, for what YAML or preset say wrongly, or an option that no source gives.
    """
    path = given.get("custom_config_path")
    in_yaml = {name: option for name, option in line.options.items() if name != "custom_config_path"}
    values = {**({} if path is None else read_yaml(Path(path), in_yaml, line.aliases)), **given}
    preset = values.get("rollout_correction_preset")
    if preset is not None:
        if preset not in PRESETS:
            raise ValueError(f"--rollout-correction-preset is {preset!r}; {nearest(preset, PRESETS)}")
        chosen = preset_values(preset, values).items()
        values = {**{name: read_value(name, line.options[name], str(value)) for name, value in chosen}, **values}
    says_something = preset is not None or not CORRECTION_SWITCHES.isdisjoint(values)
    if values.get("use_rollout_correction") and not says_something:
        values["use_tis"] = True
    if values.get("tis_lower_bound") == 0 and values.get("tis_mode", "truncate") == "truncate":
        values["tis_lower_bound"] = None  # slime's default of --tis-clip-low: no lower bound
    for option in line.options.values():
        if option.default is MISSING and option.name not in values:
            raise ValueError(
                f"{flag(option.name)} is unset but required; add {flag(option.name)} {_metavar(line, option)}."
            )
    return values


Room = TypeVar("Room")


def build(config: type[Room], values: Mapping[str, Any]) -> Room:
    """A config from those of the values that are its fields."""
    names = [field.name for field in dataclasses.fields(config) if field.name in values]  # type: ignore[arg-type]
    return config(**{name: values[name] for name in names})


def flag(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-")
