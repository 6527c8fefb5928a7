"""Writes one table of all speed benchmarks, and the part of it that README.md quotes.

    python -m benchmarks.summary

Reads whole_step.csv, decode.csv and correction.csv. `table.md` has every measured row, in one
section per processor, since rows of different processors are not comparable. README.md has the rows
of `README_ROWS` from the newest run of each subject that includes a peer.
"""

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.provenance import ROOT

RESULTS = ROOT / "benchmarks"
TABLE = RESULTS / "table.md"
README = ROOT / "README.md"
QUOTED = re.compile(r"(<!-- benchmarks.summary -->\n).*?(<!-- end -->)", re.S)
"""The part of README.md that this program writes."""
INTRODUCTION = """# Benchmark results

Written by `python -m benchmarks.summary` from the CSV files in this directory.
[Benchmarks](README.md) says what each one measures. Compare only rows of one run: one processor,
date and commit. The range is from the lowest to the highest round; for `correct()`, from the 20 %
to the 80 % quantile of the rounds.
"""
DECODING = "decoding, SmolLM2, {precision}"
STEPS = {
    "sort_digits": "training step, sort digits",
    "smollm2": "training step, SmolLM2",
}
UNITS = {"cpu": "s (CPU)", "wall": "s (wall)"}
OURS = "slime_tis, decoupled TIS + RS + veto"
STEP_ROWS = (OURS, "hand-written loop, own decode", "hand-written loop", "TRL GRPOTrainer")
DECODING_ROWS = ("slime_tis, in-process engine", "vLLM, CPU build, eager")
README_ROWS = {
    "training step, sort digits": STEP_ROWS,
    "training step, SmolLM2": STEP_ROWS,
    DECODING.format(precision="fp32"): DECODING_ROWS,
    DECODING.format(precision="bf16"): DECODING_ROWS,
    "correct(), 512 x 2048 tokens": ("ours, token, lists", "verl 0.9.1"),
}
"""The subjects and contenders that README.md quotes, ours first. The quoted run includes the last
contender, a peer."""
QUOTED_THREADS = "1"
"""Threads of the runs that README.md quotes."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One row of a result file."""

    subject: str
    contender: str
    processor: str
    threads: str
    unit: str
    median: float
    lowest: float | None
    """The lowest value over rounds; None if it was not recorded, or there was one round."""
    highest: float | None
    date: str
    commit: str

    @property
    def run(self) -> tuple[str, ...]:
        """What the rows of one run have in common."""
        return (self.date, self.commit, self.processor, self.subject, self.unit, self.threads)


def number(text: str) -> float | None:
    """A number of a result file; None if the field is empty."""
    if not text:
        return None
    return float(text)


def rows_of(name: str) -> Iterator[dict[str, str]]:
    """The rows of a result file in this directory."""
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def whole_steps() -> Iterator[Measurement]:
    """Seconds of a complete training step."""
    for row in rows_of("whole_step.csv"):
        unit = UNITS[row["clock"]]
        yield Measurement(
            subject=STEPS[row["task"]],
            contender=row["contender"],
            processor=row["machine"],
            threads=row["threads"],
            unit=unit,
            median=float(row["median_step_s"]),
            lowest=number(row["fastest_step_s"]),
            highest=number(row["slowest_step_s"]),
            date=row["date"],
            commit=row["commit"],
        )


def decoding() -> Iterator[Measurement]:
    """Tokens per CPU second of decoding."""
    for row in rows_of("decode.csv"):
        yield Measurement(
            subject=DECODING.format(precision=row["precision"]),
            contender=row["contender"],
            processor=row["machine"],
            threads=row["threads"],
            unit="tokens per CPU s",
            median=float(row["median_tokens_per_cpu_s"]),
            lowest=number(row["slowest"]),
            highest=number(row["fastest"]),
            date=row["date"],
            commit=row["commit"],
        )


def corrections() -> Iterator[Measurement]:
    """Milliseconds of one call of `correct`, without the row of the memory copy."""
    for row in rows_of("correction.csv"):
        if row["contender"] == "copy":
            continue
        yield Measurement(
            subject=f"correct(), {row['size']} tokens",
            contender=row["contender"],
            processor=row["machine"],
            threads="1",
            unit="ms (CPU)",
            median=float(row["median_ms"]),
            lowest=number(row["p20_ms"]),
            highest=number(row["p80_ms"]),
            date=row["date"],
            commit=row["commit"],
        )


def three_digits(value: float) -> str:
    """The value with three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def line(row: Measurement) -> str:
    """One line of the page's tables."""
    spread = ""
    if row.lowest is not None and row.highest is not None:
        spread = f"{three_digits(row.lowest)} to {three_digits(row.highest)}"
    median = f"{three_digits(row.median)} {row.unit}"
    cells = [row.subject, row.contender, median, spread, row.threads, row.date, row.commit]
    return "| " + " | ".join(cells) + " |"


def table(rows: Iterable[Measurement]) -> list[str]:
    """The lines of a Markdown table."""
    columns = ["subject", "contender", "median", "range", "threads", "date", "commit"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines.extend(line(row) for row in rows)
    return lines


def measurements() -> list[Measurement]:
    """All rows of the result files."""
    return [*whole_steps(), *decoding(), *corrections()]


def quoted(rows: list[Measurement]) -> list[Measurement]:
    """The rows of README.md: the newest run of each subject with its peer, per processor maker.

    Only runs with `QUOTED_THREADS` count.
    """
    chosen = []
    for subject, contenders in README_ROWS.items():
        newest: dict[str, Measurement] = {}
        for row in rows:
            if row.subject != subject or row.contender != contenders[-1]:
                continue
            if row.threads != QUOTED_THREADS:
                continue
            maker = row.processor.split()[0]
            # Of two runs of one day, the later one in the file counts.
            if maker not in newest or row.date >= newest[maker].date:
                newest[maker] = row
        runs = [row.run for row in newest.values()]
        quotable = [row for row in rows if row.run in runs and row.contender in contenders]
        # A line of README.md begins with ours, in whatever order the script measured.
        quotable.sort(key=lambda row: (runs.index(row.run), row.contender != contenders[0]))
        chosen += quotable
    return chosen


def complete_table(rows: list[Measurement]) -> str:
    """The page of all rows, one section per processor; in a section, newest runs first."""
    text = INTRODUCTION
    processors = dict.fromkeys(row.processor for row in reversed(rows))
    for processor in processors:
        own = [row for row in rows if row.processor == processor]
        # Sorting is stable: rows of a run stay in the order of the file.
        own.sort(key=lambda row: (row.subject, row.date), reverse=True)
        text += f"\n## {processor}\n\n" + "\n".join(table(own)) + "\n"
    return text


def quoted_line(run: list[Measurement]) -> str:
    """One line of README.md: our median of a run, then those of its peers."""
    ours, *peers = run
    others = [f"{peer.contender} {three_digits(peer.median)}" for peer in peers]
    cells = [f"{ours.subject}, {ours.unit}", three_digits(ours.median), "; ".join(others)]
    cells += [ours.processor, ours.date]
    return "| " + " | ".join(cells) + " |"


def quotation(rows: list[Measurement]) -> str:
    """The table of README.md, which has one line for each run."""
    lines = ["| subject | slime_tis | others | processor | date |", "|---|---|---|---|---|"]
    for _, run in groupby(quoted(rows), key=lambda row: row.run):
        lines.append(quoted_line(list(run)))
    return "\n".join(lines) + "\n"


def with_quotation(page: str, rows: list[Measurement]) -> str:
    """README.md with the table between its two comments.

    Raises:
        ValueError: the page lacks the comments.
    """
    text, replaced = QUOTED.subn(lambda match: match[1] + quotation(rows) + match[2], page)
    if replaced != 1:
        raise ValueError(
            f"README.md has {replaced} places for the benchmarks; put the lines"
            " <!-- benchmarks.summary --> and <!-- end --> around its table once."
        )
    return text


def main(table_path: Path = TABLE, readme: Path = README) -> None:
    """Writes both pages."""
    rows = measurements()
    table_path.write_text(complete_table(rows), encoding="utf-8")
    readme.write_text(with_quotation(readme.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
