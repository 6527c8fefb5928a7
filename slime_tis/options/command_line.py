"""A command line whose flags are the fields of configs; a field's docstring is its help.

Precedence: command line > YAML (`--custom-config-path`) > preset (`--rollout-correction-preset`) >
    defaults.
"""

import argparse
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slime_tis.correction.config import PRESETS, preset_values
from slime_tis.errors import quoted
from slime_tis.options import fields
from slime_tis.options.fields import flag
from slime_tis.options.flags import CORRECTION, Flag, flags_of, split_overrides
from slime_tis.options.values import (
    Given,
    Option,
    Source,
    nearest,
    read_given,
)

correction_option = partial(fields.option, group="rollout correction")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where options come from besides the command line."""

    use_rollout_correction: bool = correction_option(False)
    """Same as --use-tis, as in slime."""
    rollout_correction_preset: str | None = correction_option(None, metavar="NAME")
    """Preset of correction options, for example decoupled_token_is."""
    custom_config_path: str | None = correction_option(None, metavar="FILE.yaml")
    """YAML file of options or of verl's algorithm.rollout_correction block."""


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """The user's code for the correction; the program for diffusion has none."""

    custom_tis_function_path: str | None = correction_option(None, metavar="FUNCTION")
    """User function for the correction."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The options of a program by name, and old names of options."""

    options: Mapping[str, Option]
    aliases: Mapping[str, str]

    @property
    def spellings(self) -> dict[str, tuple[Option, bool]]:
        """Every flag with its option, and whether it turns the option off."""
        names = {**{name: name for name in self.options}, **self.aliases}
        found = {flag(name): (self.options[option], False) for name, option in names.items()}
        switches = [
            name for name, option in names.items() if self.options[option].type.kind is bool
        ]
        return found | {flag(f"no_{name}"): (self.options[names[name]], True) for name in switches}

    @property
    def groups(self) -> dict[str, list[Option]]:
        """The options of each titled group, in the order of --help."""
        groups: dict[str, list[Option]] = {}
        for option in self.options.values():
            groups.setdefault(option.group, []).append(option)
        return groups


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Values of flags by option, and texts of Hydra overrides by dotted key."""

    given: dict[str, Given]
    overrides: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Need:
    """An option, and its value or an empty text for any, that gives another option an effect."""

    option: str
    value: str
    suggested: bool
    """Whether --help and messages name it."""

    def met_by(self, value: Any) -> bool:
        """Returns whether a value of the option is the needed one."""
        return str(value) == self.value if self.value else bool(value)

    def __str__(self) -> str:
        """The flag with its value."""
        return f"{flag(self.option)} {self.value}".strip()


CORRECTION_SWITCHES = (
    "use_tis",
    "use_rs",
    "rollout_rs",
    "rs_veto_threshold",
    "rs_veto_upper_threshold",
    "rs_second_moment_bound",
    "divergence_mask",
)
"""Options that make the correction act on the loss."""


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        values = "" if action.nargs == 0 else f" {action.metavar}"
        return ", ".join(action.option_strings) + values


def make_parser(
    line: CommandLine, *, prog: str, usage: str, description: str
) -> argparse.ArgumentParser:
    """The --help of a command line, in titled groups of flags."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=(
            "Every switch has a --no- form, and the value none takes an option back to its"
            " default, so that the command line can undo what YAML or a preset says. Presets:"
            f" {', '.join(PRESETS)}."
        ),
        formatter_class=_HelpFormatter,
    )
    for title, options in line.groups.items():
        group = parser.add_argument_group(title)
        for option in options:
            _add_flag(group, line, option)
    return parser


def _add_flag(group: argparse._ArgumentGroup, line: CommandLine, option: Option) -> None:
    names = [option.name, *(old for old, new in line.aliases.items() if new == option.name)]
    text = f"{option.help} ({'; '.join(help_notes(line, option))})".replace("%", "%%")
    if option.type.kind is bool:
        opposites = [flag(f"no_{name}") for name in names]
        if option.default:  # the form that changes something is shown, too
            group.add_argument(*map(flag, names), *opposites, action="store_true", help=text)
        else:
            group.add_argument(*map(flag, names), action="store_true", help=text)
            group.add_argument(*opposites, action="store_true", help=argparse.SUPPRESS)
        return
    group.add_argument(*map(flag, names), dest=option.name, metavar=_metavar(option), help=text)


def help_notes(line: CommandLine, option: Option) -> list[str]:
    """Returns the default, the limits and the needs of an option for --help."""
    needs = needs_of(line, option.name)
    limits = [] if option.type.limits is None else [str(option.type.limits)]
    return [option.default_text, *limits, *([f"needs {_alternatives(needs)}"] if needs else [])]


def _metavar(option: Option) -> str:
    if option.type.choices:
        return "{" + ",".join(option.type.choices) + "}"
    return option.metavar or ("X" if option.type.kind in (float, str) else "N")


def split_words(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[list[Flag], dict[str, str]]:
    """Returns flags with their words, and Hydra overrides of verl's options; --help prints the help and exits."""
    if not {"-h", "--help"}.isdisjoint(argv):
        parser.print_help()
        raise SystemExit(0)
    words, overrides = split_overrides(argv)
    return flags_of(words), overrides


def read_flags(line: CommandLine, flags: Sequence[Flag], overrides: Mapping[str, str]) -> Flags:
    """Reads values of flags; refuses wrong ones with a ValueError."""
    spellings, first = line.spellings, dict[str, str]()
    texts: dict[str, Any] = {}
    strays: list[str] = []
    for one in flags:
        if one.name not in spellings:
            strays += [one.name] if one.name else one.values
            continue
        option, is_off = spellings[one.name]
        if (
            not is_off and first.setdefault(option.name, one.name) != one.name
        ):  # the precedence would be arbitrary
            raise ValueError(
                f"{first[option.name]} and {one.name} are one option; remove one of the two."
            )
        if option.name == "custom_config_path" and option.name in texts:
            raise ValueError("--custom-config-path is given twice; merge the two files into one.")
        if is_off and "=" in one.word:
            raise ValueError(f"{one.name} takes no value.")
        values = one.values
        if option.type.kind is bool:
            values = ("false", *values) if is_off else values or ("true",)
        if not values:
            raise ValueError(f"{one.name} has no value; add {one.name} {_metavar(option)}.")
        texts[option.name] = list(values) if option.type.is_list else values[0]
        strays += () if option.type.is_list else values[1:]
    if strays:
        raise ValueError("\n".join(_not_a_flag(line, word) for word in strays))
    given = {
        name: read_given(flag(name), line.options[name], text, Source.COMMAND_LINE)
        for name, text in texts.items()
    }
    return Flags(given=given, overrides=dict(overrides))


def _not_a_flag(line: CommandLine, word: str) -> str:
    shown = quoted(word)[1:-1] or "An empty word"
    if "=" in word and "." in word.split("=")[0] and not word.startswith("-"):
        return f"{shown} is an override of Hydra; only {CORRECTION}.KEY=VALUE is read. Use a flag."
    return (
        f"{shown} is not a flag;"
        f" {nearest(word.split('=')[0], map(flag, (*line.options, *line.aliases)))}"
    )


def merge_sources(line: CommandLine, flags: Flags) -> dict[str, Given]:
    """Returns values by precedence: command line, YAML, preset; refuses wrong, missing and ineffective options."""
    given = _with_preset(line, _with_yaml(line, flags))
    _turn_on_weights(given)
    for option in line.options.values():
        if option.default is MISSING and option.name not in given:
            raise ValueError(
                f"{flag(option.name)} is unset but required; add {flag(option.name)}"
                f" {_metavar(option)}."
            )
    return _with_effect(line, given)


@contextmanager
def naming_sources(given: Mapping[str, Given]) -> Iterator[None]:
    """Adds to a refusal the names under which its flags were given."""
    try:
        yield
    except ValueError as error:
        named = re.findall(r"--[\w-]+", str(error))
        written = [
            f"{flag(name)} is {one.label}"
            for name, one in given.items()
            if flag(name) in named and one.label.split()[0].lstrip("-").replace("-", "_") != name
        ]
        raise ValueError(f"{error} ({', '.join(written)})" if written else str(error)) from None


def _with_yaml(line: CommandLine, flags: Flags) -> dict[str, Given]:
    """Returns the values of YAML, overridden by the command line."""
    path = flags.given.get("custom_config_path")
    in_yaml = {
        name: option for name, option in line.options.items() if name != "custom_config_path"
    }
    file = None if path is None or path.unset else Path(path.value)
    given: dict[str, Given] = {}
    if file is not None or flags.overrides:
        from slime_tis.options.yaml_file import read_yaml  # PyYAML: --help works without it

        given = read_yaml(file, flags.overrides, in_yaml, line.aliases)
    for name, one in flags.given.items():
        other = given.get(name)
        if other is not None and other.source == Source.COMMAND_LINE and other.value != one.value:
            raise ValueError(
                f"{one.label} and {other.label} are one option; remove one of the two."
            )
    return {**given, **flags.given}


def _with_preset(line: CommandLine, given: Mapping[str, Given]) -> dict[str, Given]:
    """Returns the values of the named preset, overridden by the given values."""
    preset = given.get("rollout_correction_preset")
    if preset is None or preset.unset:
        return dict(given)
    if preset.value not in PRESETS:
        raise ValueError(
            f"--rollout-correction-preset is {quoted(preset.value)};"
            f" {nearest(preset.value, PRESETS)}"
        )
    chosen = {
        name: read_given(
            f"{name} of the preset {preset.value}", line.options[name], str(value), Source.PRESET
        )
        for name, value in preset_values(
            preset.value, {name: one.value for name, one in given.items()}
        ).items()
    }
    return {**chosen, **given}


def _turn_on_weights(given: dict[str, Given]) -> None:
    """Sets use_tis if --use-rollout-correction is on; refuses an option that says otherwise."""
    switch, preset, weights = (
        given.get(name)
        for name in ("use_rollout_correction", "rollout_correction_preset", "use_tis")
    )
    if switch is None or not switch.value:
        return
    if weights is not None and (weights.value or weights.source > switch.source):
        return
    if weights is not None:
        opposite = f"{weights.label} is off"
    elif preset is not None and not preset.unset:
        opposite = f"the preset {preset.value} has none"
    else:
        given["use_tis"] = switch
        return
    raise ValueError(
        f"{switch.label} turns on importance weights, but {opposite}; "
        "add --use-tis for weights, or remove --use-rollout-correction."
    )


def _with_effect(line: CommandLine, given: Mapping[str, Given]) -> dict[str, Given]:
    """Omits values whose switch is off in the same or an overriding source; refuses others without effect."""
    values = {name: option.default for name, option in line.options.items()}
    values |= {name: one.value for name, one in given.items()}
    effective = {}
    for name, one in given.items():
        unmet = [] if one.unset else unmet_needs(line, name, values)
        if not unmet:
            effective[name] = one
        elif not any(_turned_off(given.get(need.option), one) for need in unmet):
            value = "set" if one.value is True else quoted(one.value)
            which = "it" if sum(need.suggested for need in unmet) == 1 else "one of them"
            raise ValueError(
                f"{one.label} is {value} but has no effect without {_alternatives(unmet)}; "
                f"add {which} or remove {one.label.split()[0]}."
            )
    return effective


def _turned_off(switch: Given | None, one: Given) -> bool:
    """Returns whether an option was overridden, or turned off by the same source, as in a template."""
    if switch is None:
        return False
    return switch.source > one.source or (
        switch.source == one.source and switch.value in (False, None)
    )


def unmet_needs(line: CommandLine, name: str, values: Mapping[str, Any]) -> list[Need]:
    """Returns the flags that would give an option an effect under `values`; empty if it has one."""
    needs = needs_of(line, name)
    met = [need for need in needs if need.met_by(values[need.option])]
    if not met:
        return needs
    further = [unmet_needs(line, need.option, values) for need in met]
    return [] if [] in further else further[0]


def needs_of(line: CommandLine, name: str) -> list[Need]:
    """Returns the flags of this command line that give an option an effect."""
    option, needs = line.options.get(name), []
    for word in (*option.needs, *option.suffices) if option else ():
        needed, _, value = word.removeprefix("--").partition("=")
        suggested = option is not None and word in option.needs
        needs.append(Need(option=needed.replace("-", "_"), value=value, suggested=suggested))
    return [need for need in needs if need.option in line.options]


def _alternatives(needs: Sequence[Need]) -> str:
    *first, last = (str(need) for need in needs if need.suggested)
    return f"{', '.join(first)} or {last}" if first else last


ConfigT = TypeVar("ConfigT")


def build(config: type[ConfigT], given: Mapping[str, Given]) -> ConfigT:
    """A config from the options that are its fields."""
    names = [field.name for field in dataclasses.fields(config) if field.name in given]  # type: ignore[arg-type]
    return config(**{name: given[name].value for name in names})
