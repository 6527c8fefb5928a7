"""Counts verdicts of the runs by the rule of README.md, and writes its tables.

python -m studies.live_alarms.count   # part of `make docs`
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from studies.live_alarms.faults import FAULTS, GENERAL, HEALTHY

HERE = Path(__file__).parent
DOCS_PAGE = HERE.parents[1] / "docs" / "adapters.md"
"""The page of the documentation that has the totals."""
PROGRAMS = ("slime_tis", "martingale")
START = "<!-- tables of live alarms: make docs -->"
"""A page's tables follow this line."""
END = "<!-- end of tables of live alarms -->"
"""The tables end before this line."""


@dataclass(frozen=True)
class Run:
    """The alarms of both programs in one run."""

    kind: str
    """fault or healthy."""
    case: str
    seed: int
    alarms: dict[str, list[tuple[str, int]]]
    """By program: (name, step) per alarm, ordered by step."""


@dataclass(frozen=True)
class Verdict:
    """A program's result for a planted fault."""

    word: str
    """right, noticed, wrong or missed."""
    after: int | None = None
    """Optimizer steps from the first faulty batch to the first right alarm."""
    names: tuple[str, ...] = ()
    """Alarms from the first faulty batch on, each once."""


def read_runs(path: Path) -> list[Run]:
    runs = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            alarms: dict[str, list[tuple[str, int]]] = {program: [] for program in PROGRAMS}
            for text in row["alarms"].split():
                program, rest = text.split(":")
                name, step = rest.split("@")
                alarms[program].append((name, int(step)))
            runs.append(Run(row["kind"], row["case"], int(row["seed"]), alarms))
    return runs


def verdict(
    alarms: Iterable[tuple[str, int]],
    first_step: int,
    right: frozenset[str],
    general: frozenset[str],
) -> Verdict:
    """Applies rules 1, 3 and 4 of the page to one program in one faulty run."""
    later = [(name, step) for name, step in alarms if step >= first_step]
    names = tuple(dict.fromkeys(name for name, _ in later))
    for name, step in later:
        if name in right:
            return Verdict("right", step - first_step, names)
    if not names:
        return Verdict("missed")
    if set(names) <= general:
        return Verdict("noticed", None, names)
    return Verdict("wrong", None, names)


def early_alarms(alarms: Iterable[tuple[str, int]], first_step: int) -> list[str]:
    """Alarms before the first faulty batch: false alarms by rule 2."""
    return [name for name, step in alarms if step < first_step]


def cell(verdicts: list[Verdict]) -> str:
    """One program's cell: verdicts of all seeds, the delay, and the alarms."""
    words = []
    for word in ("right", "noticed", "wrong", "missed"):
        number = sum(verdict.word == word for verdict in verdicts)
        if number == len(verdicts):
            words.append(word)
        elif number:
            words.append(f"{word} {number} of {len(verdicts)}")
    text = ", ".join(words)
    delays = sorted(verdict.after for verdict in verdicts if verdict.after is not None)
    if delays:
        after = str(delays[0])
        if delays[-1] != delays[0]:
            after += f" to {delays[-1]}"
        text += f", after {after}"
    names = dict.fromkeys(name for verdict in verdicts for name in verdict.names)
    if names:
        text += ": " + ", ".join(f"`{name}`" for name in names)
    return text


def totals(runs: list[Run]) -> str:
    """The table of verdicts over all faults, and of false alarms."""
    verdicts = fault_verdicts(runs)
    false_alarms = healthy_alarms(runs)
    lines = ["| | slime_tis | martingale 0.2.0 |", "|---|---|---|"]
    for word in ("right", "noticed", "wrong", "missed"):
        counts = []
        for program in PROGRAMS:
            all_verdicts: list[Verdict] = []
            for case in FAULTS:
                all_verdicts += verdicts[case, program]
            number = sum(found.word == word for found in all_verdicts)
            counts.append(f"{number} of {len(all_verdicts)}")
        lines.append(f"| faulty runs, {word} | {' | '.join(counts)} |")
    counts = []
    for program in PROGRAMS:
        marks: list[str] = []
        for case in HEALTHY:
            marks += false_alarms[case, program]
        number = sum(names != "" for names in marks)
        counts.append(f"{number} of {len(marks)}")
    lines.append(f"| healthy runs with a false alarm | {' | '.join(counts)} |")
    counts = [str(runs_with_early_alarms(runs, program)) for program in PROGRAMS]
    lines.append(f"| faulty runs with an alarm before the fault | {' | '.join(counts)} |")
    return "\n".join(lines)


def tables(runs: list[Run]) -> str:
    """The tables of the page: totals, faults, healthy runs."""
    verdicts = fault_verdicts(runs)
    false_alarms = healthy_alarms(runs)
    lines = [totals(runs), "", "| fault | slime_tis | martingale |", "|---|---|---|"]
    for case in FAULTS:
        cells = [cell(verdicts[case, program]) for program in PROGRAMS]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    lines += ["", "| healthy run | slime_tis | martingale |", "|---|---|---|"]
    for case in HEALTHY:
        cells = [healthy_cell(false_alarms[case, program]) for program in PROGRAMS]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fault_verdicts(runs: list[Run]) -> dict[tuple[str, str], list[Verdict]]:
    """(fault, program) → the verdicts of all seeds."""
    verdicts: dict[tuple[str, str], list[Verdict]] = {}
    for run in runs:
        if run.kind != "fault":
            continue
        case = FAULTS[run.case]
        right = {"slime_tis": case.ours, "martingale": case.martingale}
        for program in PROGRAMS:
            found = verdict(run.alarms[program], case.first_step, right[program], GENERAL[program])
            verdicts.setdefault((run.case, program), []).append(found)
    return verdicts


def healthy_alarms(runs: list[Run]) -> dict[tuple[str, str], list[str]]:
    """(healthy run, program) → alarm names per seed, empty without an alarm."""
    alarms: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        if run.kind != "healthy":
            continue
        for program in PROGRAMS:
            names = dict.fromkeys(f"`{name}`" for name, _ in run.alarms[program])
            alarms.setdefault((run.case, program), []).append(", ".join(names))
    return alarms


def runs_with_early_alarms(runs: list[Run], program: str) -> int:
    number = 0
    for run in runs:
        if run.kind == "fault":
            first_step = FAULTS[run.case].first_step
            number += bool(early_alarms(run.alarms[program], first_step))
    return number


def healthy_cell(marks: list[str]) -> str:
    names = [name for name in marks if name]
    if not names:
        return "–"
    return f"{len(names)} of {len(marks)}: {'; '.join(dict.fromkeys(names))}"


def page_tables() -> str:
    """Everything between the marks of the page."""
    first = tables(read_runs(HERE / "results.csv"))
    second = tables(read_runs(HERE / "results_second.csv"))
    return f"{first}\n\n### Second world\n\n{second}"


def write_between_marks(page: Path, text: str) -> None:
    before, _, rest = page.read_text().partition(START)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{START}\n{text}\n{END}{after}")


def main() -> None:
    write_between_marks(HERE / "README.md", page_tables())
    write_between_marks(DOCS_PAGE, totals(read_runs(HERE / "results.csv")))


if __name__ == "__main__":
    main()
