"""Trains sort digits in bf16 without correction, with token TIS, and with --true-on-policy.

    python -m studies.true_on_policy.run               # three seeds
    python -m studies.true_on_policy.run --seeds 3 4

Runs are made one after another. A run that has a row in results.csv with the same flags is skipped,
so a second call continues an interrupted study.
"""

import argparse
import datetime
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.provenance import machine
from examples.tables import read_rows, write_rows
from studies.collapse.cases import Case, Grid, Study
from studies.collapse.results import read_metrics
from studies.collapse.run import versions
from studies.true_on_policy.results import RESULTS, Row, read_steps, summarize

STUDY = Study(Path(__file__).resolve().parent)
STEPS = "measured_steps.jsonl"
"""What `measured` writes below a run's directory."""
LOG = "train.log"
LAST_LINES = 5
"""Lines of a failed run's log that are shown."""


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the runs that are missing; returns the exit status."""
    options = parse(argv)
    grid = Grid.load(STUDY)
    try:
        chosen = grid.chosen(None, options.corrections)
        rows = read_rows(options.results, Row) if options.results.exists() else []
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = {row.key: row for row in rows}
    cases = []
    for case in in_order(chosen, options.seeds):
        row = table.get(case.key)
        if row is None or row.flags != " ".join(case.flags):
            cases.append(case)
    print(f"{len(cases)} runs; logs of each below {options.runs}", flush=True)
    try:
        for case in cases:
            row = run(case, options.runs / case.name)
            table[row.key] = row
            ordered = sorted(table.values(), key=lambda row: grid.position(row.key))
            write_rows(options.results, Row, ordered)
            print(summary_line(row), flush=True)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues the study.", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.true_on_policy.run", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default 0 1 2")
    parser.add_argument(
        "--corrections", nargs="+", metavar="NAME", help="modes of grid.yaml to run (default all)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="table of the rows")
    parser.add_argument(
        "--runs", type=Path, default=STUDY.runs, help="directory of the runs' own directories"
    )
    return parser.parse_args(argv)


def in_order(grid: Grid, seeds: Sequence[int]) -> list[Case]:
    """Returns all runs, in an order that gives every mode a part of a changing load.

    Seeds follow each other, and each seed begins with another mode.
    """
    ordered = []
    for turn, seed in enumerate(seeds):
        cases = grid.cases([seed])
        first = turn % len(cases)
        ordered += cases[first:] + cases[:first]
    return ordered


def run(case: Case, directory: Path) -> Row:
    """Makes a run in a separate process, and returns its row.

    Raises:
        RuntimeError: The run failed; the message has the end of its output.
    """
    directory.mkdir(parents=True, exist_ok=True)
    steps = directory / STEPS
    program = [sys.executable, "-m", "studies.true_on_policy.measured", str(steps)]
    with open(directory / LOG, "wb") as log:
        result = subprocess.run(
            program + case.command(directory),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if result.returncode:
        lines = (directory / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        raise RuntimeError(
            f"{case.name} ended with status {result.returncode}; {directory / LOG} ends with:\n"
            + "\n".join(lines[-LAST_LINES:])
        )
    return summarize(
        read_metrics(directory),
        read_steps(steps),
        scenario=case.scenario,
        correction=case.correction,
        seed=case.seed,
        flags=" ".join(case.flags),
        date=datetime.date.today().isoformat(),
        machine=f"{os.cpu_count()} cores of {machine()}",
        versions=versions(),
    )


def summary_line(row: Row) -> str:
    """One line about a run."""
    return (
        f"{row.scenario}, {row.correction}, seed {row.seed}: accuracy {row.final_accuracy:.3f},"
        f" {row.different} of {row.tokens} tokens differ, {row.cpu_step:.3f} s of CPU per step"
    )


if __name__ == "__main__":
    sys.exit(main())
