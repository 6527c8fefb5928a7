"""Fault tests: many hostile inputs per test, and a table of tries and failures per kind at the end of the session."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

COUNTS = "fault tries"


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

    def check(self, at_least: int) -> None:
        """Fails with the first failures, or where fewer than `at_least` tries were made."""
        shown = "\n".join(self.failures[:20])
        assert not self.failures, f"{len(self.failures)} of {self.tries} tries of {self.kind} failed:\n{shown}"
        assert self.tries >= at_least, f"only {self.tries} tries of {self.kind}, not {at_least}"


@pytest.fixture
def tally(request: pytest.FixtureRequest, record_property: Any) -> Iterator[Any]:
    """`tally(kind)` gives the Tally of a kind, which the table at the end of the session counts."""
    made: list[Tally] = []

    def make(kind: str) -> Tally:
        made.append(Tally(kind))
        return made[-1]

    yield make
    for kind in made:  # a property of the report, which pytest-xdist carries from its workers to the main process
        record_property(COUNTS, (kind.kind, kind.tries, len(kind.failures)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints tries and failures per kind."""
    tries: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == COUNTS and report.when == "teardown":
                    tries[value[0]] += value[1]
                    failures[value[0]] += value[2]
    if tries:
        terminalreporter.section("faults")
        for kind in sorted(tries):
            terminalreporter.write_line(f"{kind:<60} tries {tries[kind]:>6}  failures {failures[kind]:>4}")
        terminalreporter.write_line(f"{'all':<60} tries {tries.total():>6}  failures {failures.total():>4}")
