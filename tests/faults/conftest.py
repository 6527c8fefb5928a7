"""Fault tests: many hostile inputs per test."""

from dataclasses import dataclass, field

import pytest


@dataclass
class Tally:
    """Tries of one kind of fault, and their failures."""

    kind: str
    tries: int = 0
    failures: list[str] = field(default_factory=list)

    def record(self, attempt: str, failure: str | None = None) -> None:
        """Counts one try; `failure` is None for a success."""
        self.tries += 1
        if failure is not None:
            self.failures.append(f"{attempt}: {failure}")

    def check(self, at_least: int = 1) -> None:
        """Fails with the first failures, or where fewer than `at_least` tries were made."""
        shown = "\n".join(self.failures[:20])
        assert not self.failures, f"{len(self.failures)} of {self.tries} tries of {self.kind} failed:\n{shown}"
        assert self.tries >= at_least, f"only {self.tries} tries of {self.kind}, not {at_least}"


@pytest.fixture
def tally() -> type[Tally]:
    """`tally(kind)` counts the tries of a kind of fault."""
    return Tally
