"""The words of a command line: flags with their values, and Hydra overrides of verl's options."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CORRECTION = "algorithm.rollout_correction"
"""The block of verl's configuration for the rollout correction."""

BLOCKS = ("algorithm", "actor_rollout_ref")
"""Top-level keys of a verl configuration that are read."""

OVERRIDE = re.compile(rf"\+{{0,2}}((?:{'|'.join(BLOCKS)})(?:\.\w+)+)=(.*)", re.DOTALL)
"""A Hydra override of a verl command line: `algorithm.rollout_correction.bypass_mode=True`.

Hydra writes + for a new key and ++ for a new or an old one.
"""

SHORT_FLAG = re.compile("-[A-Za-z]")
"""The beginning of a flag with one hyphen; a negative number is a value."""


@dataclass(frozen=True)
class Flag:
    """A flag of a command line."""

    word: str
    """The flag as the user wrote it: `--name` or `--name=value`."""
    following: tuple[str, ...] = ()
    """The words up to the next flag."""

    @property
    def name(self) -> str:
        """The flag without a value."""
        return self.word.partition("=")[0]

    @property
    def values(self) -> tuple[str, ...]:
        """The text after an equals sign, then the words after the flag."""
        _, equals, value = self.word.partition("=")
        if not equals:
            return self.following
        return (value, *self.following)


def flags_of(words: Iterable[str]) -> list[Flag]:
    """Splits words at each word that begins with two hyphens.

    The first item has an empty word and the words before the first flag.
    """
    groups: list[tuple[str, list[str]]] = [("", [])]
    for word in words:
        if word.startswith("--"):
            groups.append((word, []))
        else:
            _, following = groups[-1]
            following.append(word)
    return [Flag(word, tuple(following)) for word, following in groups]


def with_replaced_flags(words: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """Returns `words` without the flags that `others` has too, and then `others`."""
    # The words before the first flag are an item without a flag, and stay.
    replaced = {one.name for one in flags_of(others)} - {""}
    kept: list[str] = []
    for one in flags_of(words):
        # Such a word is another flag, such as -tp: both stay, and programs take the last value.
        has_short_flag = any(SHORT_FLAG.match(word) for word in one.following)
        if one.name in replaced and not has_short_flag:
            continue
        if one.word:
            kept.append(one.word)
        kept += one.following
    return (*kept, *others)


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Splits Hydra overrides of verl's blocks off a command line.

    Returns:
        The other words, and the texts of the overrides by dotted key.
    """
    words = []
    overrides = {}
    for word in argv:
        match = OVERRIDE.fullmatch(word)
        if match is None:
            words.append(word)
        else:
            # Hydra's grammar allows quotes around a value.
            overrides[match[1]] = match[2].strip("'\"")
    return words, overrides
