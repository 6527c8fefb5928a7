"""Options by name, and their values.

The same rules read the text of a command line, of YAML, of a preset and of a Hydra override.
"""

import dataclasses
import difflib
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import IntEnum
from itertools import chain
from typing import Any

from slime_tis.errors import quoted
from slime_tis.options.fields import FieldType, field_docs, field_types

SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""Words for switches; YAML 1.1 reads the same ones as Booleans."""
NULLS = ("~", "null", "none")
"""Words that unset an option."""
MAX_TEXT = 4096
"""Characters of a text: the longest path of Linux."""
MAX_NUMBER = 400
"""Characters of a number; 5e-324 without an exponent has 326."""
MAX_LISTED = 250
"""Characters of a list of names in a message."""
MAX_COMPARED = 80
"""Characters of an unknown word that are compared; difflib is quadratic in its length."""
SIMILARITY = 0.8
"""Smallest ratio of `difflib` for a suggestion."""


class Source(IntEnum):
    """Where a value is given; a larger one overrides a smaller one."""

    PRESET = 1
    YAML = 2
    COMMAND_LINE = 3


@dataclass(frozen=True, kw_only=True)
class Given:
    """A value of an option, with its source."""

    value: Any
    label: str
    """Its name in messages: `--lr`, or `lr in run.yaml`."""
    source: Source
    unset: bool = False
    """Whether the source has `none`, which takes the default instead of other sources' values."""
    extends: bool = False
    """Whether the value, a list of flags, replaces only YAML's flags of the same names."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field of a config; the fields after `group` are as in `slime_tis.options.fields.option`."""

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
    verbatim: bool = False
    advice: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What a message advises instead of slime's values, by value."""

    @property
    def default_text(self) -> str:
        """The default in the words of --help."""
        if self.default is MISSING:
            return "required"
        if self.default is None:
            return "default: unset"
        if self.default is True:
            return "default: on"
        if self.default is False:
            return "default: off"
        return f"default: {self.default}"


def declare_options(configs: Sequence[type]) -> dict[str, Option]:
    """Returns the fields of dataclasses, with a docstring under each field, as options by name."""
    options = {}
    for config in configs:
        types = field_types(config)
        docs = field_docs(config)
        for field in dataclasses.fields(config):
            options[field.name] = Option(
                name=field.name,
                type=types[field.name],
                default=field.default,
                help=docs[field.name],
                **field.metadata,
            )
    return options


def read_given(label: str, option: Option, value: Any, source: Source) -> Given:
    """Reads the value of an option; None and the word none give the default.

    Args:
        label: The option's name in messages.
        option: The option.
        value: Text, None, or a list or mapping of texts.
        source: Where the value is given.

    Raises:
        ValueError: The value is empty, has another type than the option, or is no valid text.
    """
    if is_unset(value):
        if option.default is MISSING:
            raise ValueError(f"{label} is unset but must be {option.type}.")
        return Given(value=option.default, label=label, source=source, unset=True)
    if _has_blank(value, verbatim=option.verbatim):
        raise ValueError(f"{label} is empty but must be {option.type}; write none to unset it.")
    try:
        read_value = _read_value(option.type, value, verbatim=option.verbatim)
        return Given(value=read_value, label=label, source=source)
    except _UnfitText as error:
        raise ValueError(f"{label} is {quoted(value)} but {error}.") from None
    except ValueError:
        # A list or a mapping in place of a text cannot be a key of `advice`.
        hint = ""
        if isinstance(value, str) and value in option.advice:
            hint = f"; {option.advice[value]}"
        raise ValueError(f"{label} is {quoted(value)} but must be {option.type}{hint}.") from None


def _has_blank(value: Any, *, verbatim: bool) -> bool:
    """Whether a value or one item is empty; a blank text is empty unless verbatim."""
    texts = value
    if isinstance(value, str):
        texts = [value]
    if not texts:
        return True
    for text in texts:
        # Other types than text are refused later, with the type in the message.
        if not isinstance(text, str):
            continue
        content = text
        if not verbatim:
            content = text.strip()
        if not content:
            return True
    return False


def is_unset(value: Any) -> bool:
    """Whether a value resets an option: None, none, ~ or null, also as the only item of a list."""
    if isinstance(value, list | tuple) and len(value) == 1:
        (value,) = value
    if isinstance(value, str):
        return value.strip().lower() in NULLS
    return value is None


def read_switch(text: str) -> bool:
    """Reads true, yes, on, false, no or off in any case; raises ValueError for other texts."""
    word = text.strip().lower()
    if word not in SWITCHES:
        raise ValueError(text)
    return SWITCHES[word]


def nearest(word: str, names: Iterable[str]) -> str:
    """Returns a hint for an unknown word: the most similar name, or all names if they are few."""
    names = list(names)
    match = similar(word, names)
    if match is not None:
        return f"did you mean {match}?"
    listed = ", ".join(names)
    if len(listed) <= MAX_LISTED:
        return f"known are {listed}."
    return "--help lists what there is."


def similar(word: str, names: Iterable[str]) -> str | None:
    """Returns the name that is most similar to a misspelled or shortened word, or None."""
    word = word[:MAX_COMPARED]
    names = list(names)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=SIMILARITY)
    if matches:
        return matches[0]
    # argparse accepts a prefix of a flag; here it is only a suggestion.
    for name in names:
        # Shorter words begin too many names.
        if len(word) > 5 and name.startswith(word):
            return name
    return None


class _UnfitText(ValueError):
    """A text that no option accepts; the message continues `--name is 'text' but`."""


def _read_value(kind: FieldType, value: Any, *, verbatim: bool) -> Any:
    """Returns a value in the type of a field; raises ValueError if it has another type."""
    if not kind.is_list:
        return _read_item(kind, value, verbatim=verbatim)
    if isinstance(value, dict):
        # `eval_prompt_data: {aime: a.jsonl}` in YAML is `--eval-prompt-data aime a.jsonl`.
        value = list(chain.from_iterable(value.items()))
    texts = value
    if isinstance(value, str):
        texts = [value]
    items = [_read_item(kind, text, verbatim=verbatim) for text in texts]
    return tuple(items)


def _read_item(kind: FieldType, text: Any, *, verbatim: bool) -> Any:
    """Returns a text as a value, or as one item of a list."""
    if not isinstance(text, str):
        raise ValueError(text)
    if verbatim:
        return _read_text(text, refused=("Cs",))
    if not kind.choices:
        return READERS[kind.item](text)
    if text not in kind.choices:
        raise ValueError(text)
    return text


def _read_int(text: str) -> int:
    """Returns an integer in decimal digits; raises ValueError for another text."""
    # int() also accepts underscores and digits of other scripts.
    if len(text) > MAX_NUMBER or not re.fullmatch(r"\s*[-+]?[0-9]+\s*", text):
        raise ValueError(text)
    return int(text)


def _read_float(text: str) -> float:
    """Returns a number or infinity; raises ValueError for NaN, an overflow or another text."""
    # float() also accepts underscores and digits of other scripts.
    if len(text) > MAX_NUMBER or "_" in text or not text.isascii():
        raise ValueError(text)
    # YAML writes infinity as .inf.
    number = float(text.lower().replace(".inf", "inf"))
    overflows = math.isinf(number) and "inf" not in text.lower()
    if math.isnan(number) or overflows:
        raise ValueError(text)
    return number


def _read_text(text: str, refused: tuple[str, ...] = ("Cc", "Cs")) -> str:
    """Returns a text; refuses long ones, and characters of the refused Unicode categories."""
    if len(text) > MAX_TEXT:
        raise _UnfitText(f"may have {MAX_TEXT} characters at most")
    # Cc: control characters. Cs: surrogates, by which Python passes on bytes that are not UTF-8.
    if any(unicodedata.category(character) in refused for character in text):
        raise _UnfitText("must be text without control characters and in UTF-8")
    return text


READERS: dict[Any, Callable[[str], Any]] = {
    bool: read_switch,
    int: _read_int,
    float: _read_float,
    str: _read_text,
}
