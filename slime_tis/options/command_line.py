"""A command line whose flags are the fields of configs; a field's docstring is its help.

Precedence, highest first: command line, YAML (`--custom-config-path`), preset
(`--rollout-correction-preset`), default.
"""

import argparse
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slime_tis.correction.config import PRESETS, preset_values
from slime_tis.errors import quoted
from slime_tis.options import fields
from slime_tis.options.fields import flag
from slime_tis.options.flags import CORRECTION, Flag, flags_of, split_overrides, with_replaced_flags
from slime_tis.options.values import Given, Option, Source, nearest, read_given

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
    """The options of a program."""

    options: Mapping[str, Option]
    """Options by name."""
    aliases: Mapping[str, str]
    """Present names of options by old name."""

    @property
    def spellings(self) -> dict[str, tuple[Option, bool]]:
        """The option of every flag, and whether the flag turns the option off."""
        names = {name: name for name in self.options} | dict(self.aliases)
        spellings = {}
        for name, option_name in names.items():
            option = self.options[option_name]
            spellings[flag(name)] = (option, False)
            if option.type.kind is bool:
                spellings[flag(f"no_{name}")] = (option, True)
        return spellings

    @property
    def groups(self) -> dict[str, list[Option]]:
        """Options by the title of the group, in the order of --help."""
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
    """An option that gives another option an effect."""

    option: str
    value: str
    """The required value, of a list one item; empty if any value except false, 0 and none is
    enough."""
    suggested: bool
    """Whether --help and messages name the option."""

    def met_by(self, value: Any) -> bool:
        """Whether a value of the option meets the need."""
        if not self.value:
            return bool(value)
        if isinstance(value, tuple):
            return self.value in value
        return str(value) == self.value

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
    """Shows the value of an option once, after its names; argparse repeats it after each name."""

    def __init__(self, prog: str) -> None:
        # With argparse's 24 columns, most helps would begin below their flags.
        super().__init__(prog, max_help_position=34)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        if action.nargs == 0:
            return names
        return f"{names} {action.metavar}"


def make_parser(
    line: CommandLine, *, prog: str, usage: str, description: str
) -> argparse.ArgumentParser:
    """Returns a parser that prints the --help of a command line, in titled groups of flags."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=(
            "Every switch has a --no- form, and the value none resets an option to its default, so"
            " that the command line can undo YAML and presets. The presets are"
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
    """Adds an option with its old names to the --help."""
    old_names = [old for old, new in line.aliases.items() if new == option.name]
    names = [option.name, *old_names]
    flags = [flag(name) for name in names]
    notes = "; ".join(help_notes(line, option))
    # argparse formats the help with the operator %.
    text = f"{option.help} ({notes})".replace("%", "%%")
    if option.type.kind is not bool:
        group.add_argument(*flags, dest=option.name, metavar=_metavar(option), help=text)
        return
    opposites = [flag(f"no_{name}") for name in names]
    if option.default:
        # Only the --no- form changes the default, so --help shows it.
        group.add_argument(*flags, *opposites, action="store_true", help=text)
    else:
        group.add_argument(*flags, action="store_true", help=text)
        group.add_argument(*opposites, action="store_true", help=argparse.SUPPRESS)


def help_notes(line: CommandLine, option: Option) -> list[str]:
    """Returns the default, the limits and the needs of an option for --help."""
    notes = [option.default_text]
    if option.type.limits is not None:
        notes.append(str(option.type.limits))
    needs = needs_of(line, option.name)
    if needs:
        notes.append(f"needs {_alternatives(needs)}")
    return notes


def _metavar(option: Option) -> str:
    """Returns the placeholder of an option's value in --help."""
    if option.type.choices:
        return "{" + ",".join(option.type.choices) + "}"
    if option.metavar:
        return option.metavar
    if option.type.kind in (float, str):
        return "X"
    return "N"


def split_words(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[list[Flag], dict[str, str]]:
    """Splits a command line; -h and --help print the help and exit.

    Returns:
        The flags with their words, and the texts of Hydra overrides by dotted key.
    """
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        raise SystemExit(0)
    words, overrides = split_overrides(argv)
    return flags_of(words), overrides


def read_flags(line: CommandLine, flags: Sequence[Flag], overrides: Mapping[str, str]) -> Flags:
    """Reads the values of flags; the last of several equal flags counts.

    Raises:
        ValueError: A word is not a flag, or a value is missing or wrong.
    """
    spellings = line.spellings
    texts: dict[str, Any] = {}
    first_names: dict[str, str] = {}
    strays: list[str] = []
    for item in flags:
        if not item.name:
            # The words before the first flag belong to none.
            strays += item.values
            continue
        if item.name not in spellings:
            strays.append(item.name)
            continue
        option, is_off = spellings[item.name]
        if not is_off:
            # Neither an old nor a new name has priority; a --no- form may follow, as an override.
            first = first_names.setdefault(option.name, item.name)
            if first != item.name:
                raise ValueError(f"{first} and {item.name} are one option; remove one of the two.")
        if option.name == "custom_config_path" and option.name in texts:
            raise ValueError("--custom-config-path is given twice; merge the two files into one.")
        values = _values_of(item, option, is_off)
        if option.type.is_list:
            texts[option.name] = list(values)
        else:
            texts[option.name] = values[0]
            strays += values[1:]
    if strays:
        raise ValueError("\n".join(_not_a_flag(line, word) for word in strays))
    given = {}
    for name, text in texts.items():
        given[name] = read_given(flag(name), line.options[name], text, Source.COMMAND_LINE)
    return Flags(given=given, overrides=dict(overrides))


def _values_of(item: Flag, option: Option, is_off: bool) -> tuple[str, ...]:
    """Returns the words of a flag's value, at least one; a bare switch is true or false.

    Raises:
        ValueError: A --no- form has a value, or another flag has none.
    """
    if is_off and "=" in item.word:
        raise ValueError(f"{item.name} takes no value.")
    if is_off:
        return ("false", *item.values)
    if option.type.kind is bool and not item.values:
        return ("true",)
    if not item.values:
        raise ValueError(f"{item.name} has no value; add {item.name} {_metavar(option)}.")
    return item.values


def _not_a_flag(line: CommandLine, word: str) -> str:
    """Returns the message about a word that is neither a flag nor its value."""
    shown = quoted(word)[1:-1] or "An empty word"
    key, equals, _ = word.partition("=")
    if equals and "." in key and not word.startswith("-"):
        return f"{shown} is an override of Hydra; only {CORRECTION}.KEY=VALUE is read. Use a flag."
    flags = [flag(name) for name in (*line.options, *line.aliases)]
    return f"{shown} is not a flag; {nearest(key, flags)}"


def merge_sources(line: CommandLine, flags: Flags) -> dict[str, Given]:
    """Returns the given options that have an effect; sources override each other.

    The order is command line, YAML, preset.

    Raises:
        ValueError: A value of YAML or of a preset is wrong, a required option is missing, or an
            option has no effect.
    """
    given = _with_preset(line, _with_yaml(line, flags))
    _turn_on_weights(given)
    for option in line.options.values():
        if option.default is MISSING and option.name not in given:
            name = flag(option.name)
            raise ValueError(f"{name} is unset but required; add {name} {_metavar(option)}.")
    return _with_effect(line, given)


@contextmanager
def naming_sources(given: Mapping[str, Given]) -> Iterator[None]:
    """Adds to a ValueError the names that the user wrote for its flags, if they are other names."""
    try:
        yield
    except ValueError as error:
        flags = re.findall(r"--[\w-]+", str(error))
        labels = []
        for name, entry in given.items():
            # The label is `--lr`, or `lr in run.yaml`: the user wrote its first word.
            label_name = entry.label.split()[0].lstrip("-").replace("-", "_")
            if flag(name) in flags and label_name != name:
                labels.append(f"{flag(name)} is {entry.label}")
        if not labels:
            raise ValueError(str(error)) from None
        raise ValueError(f"{error} ({', '.join(labels)})") from None


def _with_yaml(line: CommandLine, flags: Flags) -> dict[str, Given]:
    """Returns the values of YAML and of Hydra overrides, overridden by flags."""
    path = flags.given.get("custom_config_path")
    file = None
    if path is not None and not path.unset:
        file = Path(path.value)
    if file is None and not flags.overrides:
        return dict(flags.given)
    # Imported only for YAML, because --help must work without PyYAML.
    from slime_tis.options.yaml_file import read_yaml

    options = dict(line.options)
    # A YAML file cannot name another one.
    del options["custom_config_path"]
    given = read_yaml(file, flags.overrides, options, line.aliases)
    merged = dict(given)
    for name, entry in flags.given.items():
        merged[name] = entry
        other = given.get(name)
        if other is None:
            continue
        # A Hydra override is on the command line, too, so neither has priority.
        if other.source == Source.COMMAND_LINE and other.value != entry.value:
            raise ValueError(
                f"{entry.label} and {other.label} are one option; remove one of the two."
            )
        if other.source == Source.YAML and entry.extends and not other.unset:
            merged[name] = replace(entry, value=with_replaced_flags(other.value, entry.value))
    return merged


def _with_preset(line: CommandLine, given: Mapping[str, Given]) -> dict[str, Given]:
    """Returns the values of the named preset, overridden by the given values."""
    entry = given.get("rollout_correction_preset")
    if entry is None or entry.unset:
        return dict(given)
    preset = entry.value
    if preset not in PRESETS:
        raise ValueError(
            f"--rollout-correction-preset is {quoted(preset)}; {nearest(preset, PRESETS)}"
        )
    explicit_values = {name: explicit.value for name, explicit in given.items()}
    chosen = {}
    for name, value in preset_values(preset, explicit_values).items():
        label = f"{name} of the preset {preset}"
        # As text, like the words of every other source.
        chosen[name] = read_given(label, line.options[name], str(value), Source.PRESET)
    return {**chosen, **given}


def _turn_on_weights(given: dict[str, Given]) -> None:
    """Sets use_tis if --use-rollout-correction is on.

    Raises:
        ValueError: The same or an overridden source turns weights off, or the preset has none.
    """
    switch = given.get("use_rollout_correction")
    preset = given.get("rollout_correction_preset")
    weights = given.get("use_tis")
    if switch is None or not switch.value:
        return
    if weights is not None:
        if weights.value or weights.source > switch.source:
            return
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
    """Returns the options that have an effect.

    An option is left out if its switch was turned off by the same source, as in a template, or by
    a source that overrides it.

    Raises:
        ValueError: Another option has no effect.
    """
    values = {name: option.default for name, option in line.options.items()}
    values |= {name: entry.value for name, entry in given.items()}
    effective = {}
    for name, entry in given.items():
        unmet = unmet_needs(line, name, values)
        if entry.unset or not unmet:
            effective[name] = entry
        elif not any(_turned_off(given.get(need.option), entry) for need in unmet):
            raise ValueError(_without_effect(entry, unmet))
    return effective


def _without_effect(entry: Given, unmet: Sequence[Need]) -> str:
    """Returns the message about an option without effect."""
    value = quoted(entry.value)
    if entry.value is True:
        value = "set"
    suggestions = [need for need in unmet if need.suggested]
    addition = "one of them"
    if len(suggestions) == 1:
        addition = "it"
    return (
        f"{entry.label} is {value} but has no effect without {_alternatives(unmet)}; "
        f"add {addition} or remove {entry.label.split()[0]}."
    )


def _turned_off(switch: Given | None, entry: Given) -> bool:
    """Whether an option's source turned the switch off, or an overriding source set it."""
    if switch is None:
        return False
    if switch.source > entry.source:
        return True
    return switch.source == entry.source and switch.value in (False, None)


def unmet_needs(line: CommandLine, name: str, values: Mapping[str, Any]) -> list[Need]:
    """Returns the flags that would give an option an effect under `values`; empty if it has one."""
    needs = needs_of(line, name)
    met = [need for need in needs if need.met_by(values[need.option])]
    if not met:
        return needs
    # A needed option may have no effect itself, as --tis-level without --use-tis.
    further = [unmet_needs(line, need.option, values) for need in met]
    if [] in further:
        return []
    return further[0]


def needs_of(line: CommandLine, name: str) -> list[Need]:
    """Returns the flags of this command line that give an option an effect."""
    option = line.options.get(name)
    # Options of user functions have no declaration, and so no needs.
    if option is None:
        return []
    needs = []
    for word in (*option.needs, *option.suffices):
        needed_flag, _, value = word.partition("=")
        needed = needed_flag.removeprefix("--").replace("-", "_")
        # Programs other than train.py lack some options.
        if needed in line.options:
            needs.append(Need(option=needed, value=value, suggested=word in option.needs))
    return needs


def _alternatives(needs: Sequence[Need]) -> str:
    """Returns the suggested flags as text: `--a, --b or --c`."""
    *first, last = [str(need) for need in needs if need.suggested]
    if not first:
        return last
    return f"{', '.join(first)} or {last}"


ConfigT = TypeVar("ConfigT")


def build(config: type[ConfigT], given: Mapping[str, Given]) -> ConfigT:
    """Returns a config whose fields have the given values; other fields have their defaults."""
    values = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        if field.name in given:
            values[field.name] = given[field.name].value
    return config(**values)
