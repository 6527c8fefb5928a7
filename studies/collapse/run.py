"""Runs train.py over a study's grid, several runs at a time; writes a row per run to results.csv.

    python -m studies.collapse.run                  # every scenario and correction, one seed
    python -m studies.collapse.run --seeds 0 1 2    # the whole grid
    python -m studies.collapse.run --study studies/real_model --missing --jobs 1

Finished runs with the same flags are not repeated: a second call resumes an interrupted study. A
run's row replaces its previous row in results.csv. With --missing, runs that have a row with the
same flags are skipped.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.provenance import machine
from examples.tables import write_rows
from slime_tis.atomic_files import write_atomically
from slime_tis.progress import print_line, tracked
from slime_tis.trainer.cli.train_arguments import configure
from studies.collapse.cases import Case, Grid, Study
from studies.collapse.report import draw, table
from studies.collapse.results import Row, read_metrics, read_table, summarize

FINISHED = "finished.json"
"""Written below a run's directory when it has ended: its flags, and what of its row is not in
metrics.jsonl."""
LOG = "train.log"
LAST_LINES = 5
"""Lines of a failed run's log that are shown."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        grid = Grid.load(options.study)
        rows = read_table(options.results)
        cases = grid.chosen(options.scenarios, options.corrections).cases(
            sorted({*options.seeds}), options.more
        )
        if options.missing:
            cases = [case for case in cases if not is_in(rows, case)]
        for case in cases:
            configure(
                case.command(options.runs / case.name), {}
            )  # what train.py would refuse, before any run
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{len(cases)} runs, {options.jobs} at a time; logs and metrics of each below"
        f" {options.runs}",
        flush=True,
    )
    found: list[Row] = []
    try:
        finished = run_all(cases, options.runs, options.jobs)
        for row in tracked(finished, "runs", len(cases)):
            found.append(row)
            rows[row.key] = row
            write_rows(
                options.results, Row, sorted(rows.values(), key=lambda row: grid.position(row.key))
            )
            print_line(f"{len(found)}/{len(cases)}  {summary_line(row)}")
    except KeyboardInterrupt:
        print("interrupted; the same command resumes the study.", file=sys.stderr)
        return 128 + signal.SIGINT
    if found:
        found.sort(key=lambda row: grid.position(row.key))
        picture = draw(found, options.runs / "study.png", grid.draws)
        print(f"\n{table(found)}\n\n{options.results}\n{picture}")
    return 0 if len(found) == len(cases) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.collapse.run", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--study",
        type=Path,
        default=Study().directory,
        help="directory of the study's train.yaml and grid.yaml",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        help="one run of each case per seed (default 0)",
    )
    parser.add_argument(
        "--scenarios", nargs="+", metavar="NAME", help="scenarios of grid.yaml to run (default all)"
    )
    parser.add_argument(
        "--corrections",
        nargs="+",
        metavar="NAME",
        help="corrections of grid.yaml to run (default all)",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time (default the cores)"
    )
    parser.add_argument(
        "--missing", action="store_true", help="only runs without a row in the table"
    )
    parser.add_argument(
        "--results", type=Path, help="table that the rows go to (default the study's results.csv)"
    )
    parser.add_argument(
        "--runs", type=Path, help="directory of the runs' own directories (default runs/STUDY)"
    )
    parser.add_argument("more", nargs="*", help="after --: flags of train.py for every run")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; it must be at least 1.")
    if not (options.study / "grid.yaml").is_file():
        parser.error(f"--study is {options.study}, where there is no grid.yaml.")
    study = Study(options.study.resolve())
    options.study, options.results, options.runs = (
        study,
        options.results or study.results,
        options.runs or study.runs,
    )
    return options


def is_in(rows: Mapping[tuple[str, str, int], Row], case: Case) -> bool:
    """Whether the table has a row of this run, with these flags."""
    return case.key in rows and rows[case.key].flags == " ".join(case.flags)


def run_all(cases: Sequence[Case], runs: Path, jobs: int) -> Iterator[Row]:
    """The rows of the runs as they end; one that fails is reported on stderr and has none."""
    processes: set[subprocess.Popen[bytes]] = set()
    before = signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that the runs end too
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run, case, runs / case.name, processes) for case in cases]
        try:
            for future in as_completed(futures):
                try:
                    yield future.result()
                except RuntimeError as error:
                    print_line(f"error: {error}", sys.stderr)
        finally:
            for future in futures:
                future.cancel()
            for process in list(processes):
                process.terminate()
            signal.signal(signal.SIGTERM, before)


def run(case: Case, directory: Path, processes: set[subprocess.Popen[bytes]]) -> Row:
    """Runs a case in a separate process, unless it is finished.

    Args:
        case: what to run.
        directory: of its reports.
        processes: running processes; this one is added while it runs.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    command = case.command(directory)
    finished = directory / FINISHED
    if facts := facts_of(finished, command):
        return summarize(read_metrics(directory), **facts)
    directory.mkdir(parents=True, exist_ok=True)
    finished.unlink(missing_ok=True)
    start = time.monotonic()
    with open(directory / LOG, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, *case.program, *command],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        processes.add(process)
        status = process.wait()
        processes.discard(process)
    if status:
        last = (
            (directory / LOG)
            .read_text(encoding="utf-8", errors="replace")
            .splitlines()[-LAST_LINES:]
        )
        raise RuntimeError(
            f"{case.name} ended with status {status}; {directory / LOG} ends with:\n"
            + "\n".join(last)
        )
    facts = {
        "scenario": case.scenario,
        "correction": case.correction,
        "seed": case.seed,
        "seconds": time.monotonic() - start,
        "flags": " ".join(case.flags),
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores of {machine()}",
        "versions": versions(),
    }
    write_atomically(finished, json.dumps({"command": command, "facts": facts}, indent=2) + "\n")
    return summarize(read_metrics(directory), **facts)


def facts_of(finished: Path, command: Sequence[str]) -> dict[str, Any]:
    """What was written when a run with this command ended; nothing if none did."""
    if not finished.exists():
        return {}
    found = json.loads(finished.read_text(encoding="utf-8"))
    return found["facts"] if found["command"] == list(command) else {}


def summary_line(row: Row) -> str:
    """One line about a run."""
    collapsed = (
        ""
        if row.collapse_step is None
        else f", less than half of its best at step {row.collapse_step}"
    )
    accuracy = f"accuracy {row.accuracy[0][1]:.2f} -> {row.final_accuracy:.2f}"
    return (
        f"{row.scenario}, {row.correction}, seed {row.seed}: {accuracy}{collapsed}"
        f" ({row.seconds:.0f} s)"
    )


def versions() -> str:
    """Of Python and of the libraries that train."""
    libraries = (
        f"{name} {version(name)}"
        for name in ("slime_tis", "torch", "megatron-core", "transformers")
    )
    return f"python {platform.python_version()}, {', '.join(libraries)}"


if __name__ == "__main__":
    sys.exit(main())
