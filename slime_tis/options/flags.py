"""The words of a command line as flags and their values."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """A flag as it was written, `--name` or `--name=value`, with the words that follow it."""

    word: str
    following: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The flag without a value."""
        return self.word.partition("=")[0]

    @property
    def values(self) -> tuple[str, ...]:
        """The words after the flag, and before them the text after an equals sign."""
        _, equals, value = self.word.partition("=")
        return (value, *self.following) if equals else self.following


def flags_of(words: Iterable[str]) -> list[Flag]:
    """Returns each word that begins with two hyphens, and the words after it; words before them have no flag."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for word in words:
        if word.startswith("--"):
            found.append((word, []))
        else:
            found[-1][1].append(word)
    return [Flag(word, tuple(following)) for word, following in found]
