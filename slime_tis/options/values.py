"""A config field as an option; one rule reads its value from the text of the command line and of YAML."""

import dataclasses
import difflib
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import IntEnum
from typing import Any

from slime_tis.errors import quoted
from slime_tis.options.fields import FieldType, field_docs, field_types

SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
MAX_LISTED, MAX_COMPARED = 250, 80
"""Characters of a list of names in a message, and of an unknown word."""
SIMILARITY = 0.8
"""Smallest ratio of `difflib` for a suggestion."""
NULLS = ("~", "null", "none")
"""Words that unset an option."""
MAX_TEXT, MAX_NUMBER = 4096, 400
"""Characters of a text (the longest path of Linux) and of a number."""

BLOCKS = ("algorithm", "actor_rollout_ref")
"""Top-level keys of a verl configuration that are read."""

OVERRIDE = re.compile(rf"\+{{0,2}}((?:{'|'.join(BLOCKS)})(?:\.\w+)+)=(.*)", re.DOTALL)
"""A Hydra override of a verl command line: `algorithm.rollout_correction.bypass_mode=True`."""

CORRECTION = "algorithm.rollout_correction"


class Source(IntEnum):
    """Where a value is given; a larger one overrides a smaller one."""

    PRESET = 1
    YAML = 2
    COMMAND_LINE = 3


@dataclass(frozen=True, kw_only=True)
class Given:
    """A value of an option and its source; `label` is its name in messages: `--lr`, or `lr in run.yaml`."""

    value: Any
    label: str
    source: Source
    unset: bool = False
    """Whether the source says `none`, which overrides other sources with the default."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field of a config; metavar, needs and suffices as in `slime_tis.options.fields.option`."""

    name: str
    type: FieldType
    default: Any
    """Default of the field; MISSING for a required option."""
    help: str
    """The docstring under the field, on one line."""
    group: str = "options"
    metavar: str = ""
    needs: tuple[str, ...] = ()
    suffices: tuple[str, ...] = ()
    advice: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What to do instead of values of other programs, by value; for messages."""

    @property
    def default_text(self) -> str:
        """The default in the words of --help."""
        if self.default is MISSING:
            return "required"
        if self.type.kind is bool and self.default is not None:
            return f"default: {'on' if self.default else 'off'}"
        return "default: unset" if self.default is None else f"default: {self.default}"


def declare_options(configs: Sequence[type]) -> dict[str, Option]:
    """Returns the fields of dataclasses, with a docstring under each field, as options by name."""
    options = {}
    for config in configs:
        types, docs = field_types(config), field_docs(config)
        for field in dataclasses.fields(config):
            kind, text = types[field.name], docs[field.name]
            options[field.name] = Option(
                name=field.name, type=kind, default=field.default, help=text, **field.metadata
            )
    return options


def read_given(label: str, option: Option, value: Any, source: Source) -> Given:
    """Reads the value of an option from text, None, or a list or mapping of texts; none gives the default."""
    if is_unset(value):
        if option.default is MISSING:
            raise ValueError(f"{label} is unset but must be {option.type}.")
        return Given(value=option.default, label=label, source=source, unset=True)
    items = [value] if isinstance(value, str) else value
    if not items or any(isinstance(item, str) and not item.strip() for item in items):
        raise ValueError(f"{label} is empty but must be {option.type}; write none to unset it.")
    try:
        return Given(value=_read_kind(option.type, value), label=label, source=source)
    except _UnfitText as error:
        raise ValueError(f"{label} is {quoted(value)} but {error}.") from None
    except ValueError:
        advice = option.advice.get(value) if isinstance(value, str) else None
        hint = "" if advice is None else f"; {advice}"
        raise ValueError(f"{label} is {quoted(value)} but must be {option.type}{hint}.") from None


def is_unset(value: Any) -> bool:
    """Whether a value takes an option back to its default: None, or the word none, ~ or null, also alone in a list."""
    if isinstance(value, list | tuple) and len(value) == 1:
        (value,) = value
    return value is None or (isinstance(value, str) and value.strip().lower() in NULLS)


def read_switch(text: str) -> bool:
    """Reads true, yes, on, false, no or off in any case."""
    if text.strip().lower() not in SWITCHES:
        raise ValueError(text)
    return SWITCHES[text.strip().lower()]


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns a command line without Hydra overrides of verl's blocks, and their text by dotted key."""
    matches = [(word, OVERRIDE.fullmatch(word)) for word in argv]
    overrides = {match[1]: match[2].strip("'\"") for _, match in matches if match}
    return [word for word, match in matches if not match], overrides


def nearest(word: str, known: Iterable[str]) -> str:
    """The hint for an unknown word: one that is similar, or all of them where none is and they are few."""
    known = list(known)
    match = similar(word, known)
    if match is not None:
        return f"did you mean {match}?"
    listed = ", ".join(known)
    return f"known are {listed}." if len(listed) <= MAX_LISTED else "--help lists what there is."


def similar(word: str, known: Iterable[str]) -> str | None:
    """Returns the known word that is most similar to a misspelled or cut one, or None."""
    word, known = word[:MAX_COMPARED], list(known)
    longer = [name for name in known if len(word) > 5 and name.startswith(word)]
    return next(
        iter(difflib.get_close_matches(word, known, n=1, cutoff=SIMILARITY) or longer), None
    )


class _UnfitText(ValueError):
    """A text that no option may be."""


def _read_kind(kind: FieldType, value: Any) -> Any:
    if isinstance(value, dict) and kind.is_list:
        value = [part for pair in value.items() for part in pair]
    texts = value if kind.is_list and not isinstance(value, str) else [value]
    if not all(
        isinstance(text, str) and (not kind.choices or text in kind.choices) for text in texts
    ):
        raise ValueError(value)
    items = tuple(text if kind.choices else READERS[kind.item](text) for text in texts)
    return items if kind.is_list else items[0]


def _read_int(text: str) -> int:
    if len(text) > MAX_NUMBER or not re.fullmatch(r"\s*[-+]?[0-9]+\s*", text):
        raise ValueError(text)
    return int(text)


def _read_float(text: str) -> float:
    if len(text) > MAX_NUMBER or "_" in text or not text.isascii():
        raise ValueError(text)
    number = float(text.lower().replace(".inf", "inf"))
    if math.isnan(number) or (math.isinf(number) and "inf" not in text.lower()):
        raise ValueError(text)
    return number


def _read_text(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise _UnfitText(f"may have {MAX_TEXT} characters at most")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise _UnfitText("must be text without control characters and in UTF-8")
    return text


READERS: dict[Any, Callable[[str], Any]] = {
    bool: read_switch,
    int: _read_int,
    float: _read_float,
    str: _read_text,
}
