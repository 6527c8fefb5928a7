"""Measures `slime-tis diagnose` on faults that were written down before its rules were tuned.

    python -m studies.diagnosis.held_out.run --seeds 100 --modes dump start last \
        --results studies/diagnosis/results_held_out_before.csv

Seeds 100 to 102 are for development: whoever tunes the diagnosis may look at their answers. Seeds
200 to 204 are held out and are run once, at the end. The generator itself, with the answers that
it accepts, stays as it is.

Modes: *dump* (nothing else), *start* (`--hf-checkpoint` with the weights of the dump's first step,
while training moved on) and *last* (those of its last step, and the start as
`--other-checkpoint`). A dump without token ids is diagnosed in mode *dump* only.

Grades of the first finding: *right* (an accepted cause, or `unexplained` for a fault without a
name), *near* (a cause that helps; for healthy runs the wrong precision), *unexplained*, *missed*
(`healthy`) and *misleading* (any other cause).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from examples.tables import read_rows
from slime_tis.analysis.report.report_commands import diagnosis
from studies.diagnosis.held_out.dumps import Case, cases, make, write_dump
from studies.diagnosis.held_out.models import SMOLLM2, World, make_smollm2, make_tiny
from studies.diagnosis.held_out.planted import FAULTS

DEVELOPMENT = (100, 101, 102)
HELD_OUT = (200, 201, 202, 203, 204)
MODES = ("dump", "start", "last")
GRADES = ("right", "near", "unexplained", "missed", "misleading")
KINDS = ("named", "coming", "unnamed", "pair", "healthy")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One diagnosis."""

    seed: int
    family: str
    planted: str
    kind: str
    scope: str
    side: str
    hidden: str
    mode: str
    mean_abs_log_ratio: float
    cause: str
    detail: str
    confidence: float
    second: str
    """Cause of the second finding: the first candidate after `unexplained`."""
    proven: int
    """1 if the first cause is proven by scoring again."""
    grade: str
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(1)
    rows = []
    if options.results.exists():
        rows = read_rows(options.results, Row)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for group in options.models:
            with tempfile.TemporaryDirectory() as folder:
                rows += measure(options, seed, group, Path(folder), done(rows))
    print(summary(rows))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[100])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--models", nargs="+", choices=("tiny", SMOLLM2), default=["tiny"])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these (default all)")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="only these kinds"
    )
    parser.add_argument(
        "--results", type=Path, required=True, help="CSV that gets a row for each diagnosis"
    )
    return parser.parse_args(argv)


Key = tuple[int, str, str, str]


def key_of(row: Row) -> Key:
    return (row.seed, row.family, row.planted, row.mode)


def done(rows: Iterable[Row]) -> set[Key]:
    return {key_of(row) for row in rows}


def measure(
    options: argparse.Namespace, seed: int, group: str, folder: Path, finished: set[Key]
) -> list[Row]:
    """Diagnoses the cases of a seed that have no row yet, and appends their rows to the file."""
    worlds: dict[str, World] = {}
    rows = []
    for case in cases(seed, group):
        if case.kind not in options.kinds or (options.only and case.planted not in options.only):
            continue
        missing = []
        for mode in modes_of(case, options.modes):
            if (seed, case.family, case.planted, mode) not in finished:
                missing.append(mode)
        if not missing:
            continue
        if case.family not in worlds:
            worlds[case.family] = make_world(seed, case.family, folder / case.family)
        world = worlds[case.family]
        path = folder / "dump.parquet"
        write_dump(case, make(case, world), path)
        for mode in missing:
            row = ask(case, world, path, mode)
            append(options.results, row)
            rows.append(row)
            print(
                f"{row.seed} {row.family} {mode}: {row.planted} → {row.cause}"
                f" {row.confidence:.0%}: {row.grade}, {row.seconds:.1f} s",
                flush=True,
            )
    return rows


def make_world(seed: int, family: str, directory: Path) -> World:
    if family == SMOLLM2:
        return make_smollm2(seed, directory)
    return make_tiny(seed, family, directory)


def modes_of(case: Case, modes: Sequence[str]) -> list[str]:
    if case.hidden == "tokens":
        return [mode for mode in modes if mode == "dump"]
    return list(modes)


def ask(case: Case, world: World, path: Path, mode: str) -> Row:
    """Diagnoses a dump in one mode."""
    arguments: dict[str, Any] = {}
    if mode == "start":
        arguments = {"hf_checkpoint": str(world.directory / "start")}
    elif mode == "last":
        arguments = {
            "hf_checkpoint": str(world.directory / "last"),
            "other_checkpoints": [str(world.directory / "start")],
        }
    start = time.perf_counter()
    answer = json.loads(diagnosis(str(path), as_json=True, **arguments))
    seconds = time.perf_counter() - start
    findings = answer["findings"]
    first = findings[0]
    proof = answer.get("proof") or {}
    detail = precision_of(first, proof)
    second = findings[1]["cause"] if len(findings) > 1 else ""
    return Row(
        seed=case.seed,
        family=case.family,
        planted=case.planted,
        kind=case.kind,
        scope=case.scope,
        side=" ".join(case.sides),
        hidden=case.hidden,
        mode=mode,
        mean_abs_log_ratio=answer.get("mean_abs_log_ratio") or 0.0,
        cause=first["cause"],
        detail=detail,
        confidence=first["confidence"],
        second=second,
        proven=int(bool(proof.get("is_proven"))),
        grade=grade(case, first["cause"], detail),
        seconds=seconds,
    )


def precision_of(finding: dict[str, Any], proof: dict[str, Any]) -> str:
    """The finding's detail; a rounding that scoring again names has its precision there."""
    detail = finding.get("detail") or ""
    explanations = proof.get("explanations") or []
    if not detail and "rounding" in proof.get("causes", []) and explanations:
        return explanations[0]["name"]
    return detail


def grade(case: Case, cause: str, detail: str) -> str:
    """The grade of a first finding."""
    if case.precision is not None:
        return healthy_grade(case.precision.accepts, cause, detail)
    accepts: set[str] = set()
    near: set[str] = set()
    for name in case.names:
        accepts |= FAULTS[name].accepts
        near |= FAULTS[name].near
    if case.scope == "server" and case.shows_servers:
        accepts.add("worker")
    if cause in accepts:
        return "right"
    if cause in near:
        return "near"
    if cause == "unexplained":
        return "right" if case.kind == "unnamed" else "unexplained"
    return "missed" if cause == "healthy" else "misleading"


def healthy_grade(precisions: frozenset[str], cause: str, detail: str) -> str:
    if cause == "healthy":
        return "right"
    if cause == "unexplained":
        return "unexplained"
    if cause != "rounding" or not precisions:
        return "misleading"
    is_named = any(precision in detail for precision in precisions)
    return "right" if is_named else "near"


def append(path: Path, row: Row) -> None:
    names = [field.name for field in fields(Row)]
    is_new = not path.exists()
    values = []
    for name in names:
        value = getattr(row, name)
        values.append(f"{value:.4g}" if isinstance(value, float) else value)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(names)
        writer.writerow(values)


# Tables


def wilson(count: int, total: int) -> tuple[float, float]:
    """95 % interval of a share.

      (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n),   z = 1.96

    Source: "Probable Inference, the Law of Succession, and Statistical Inference", Wilson (1927).
    """
    z = 1.959964
    share = count / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    low = max((middle - half) / scale, 0.0)
    high = min((middle + half) / scale, 1.0)
    return low, high


def summary(rows: Sequence[Row]) -> str:
    lines = []
    groups = (("tiny models", False), ("SmolLM2-135M", True))
    for title, is_smollm2 in groups:
        for mode in MODES:
            of_mode = []
            for row in rows:
                if row.mode == mode and (row.family == SMOLLM2) == is_smollm2:
                    of_mode.append(row)
            if of_mode:
                lines += [f"{title}, mode {mode}:", "", *table(of_mode), ""]
                lines += [*reliability(of_mode), "", times(of_mode), ""]
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> list[str]:
    """Grades by kind, with the interval of `right`."""
    lines = [
        "| kind | dumps | right | near | unexplained | missed | misleading |",
        "|---|---|---|---|---|---|---|",
    ]
    groups = [(kind, [row for row in rows if row.kind == kind]) for kind in KINDS]
    groups.append(("all faulty", [row for row in rows if row.kind != "healthy"]))
    for name, group in groups:
        if group:
            cells = []
            for each in GRADES:
                count = sum(row.grade == each for row in group)
                text = f"{count} ({count / len(group):.0%})"
                if each in ("right", "misleading"):
                    low, high = wilson(count, len(group))
                    text = f"{count} ({count / len(group):.0%} [{low:.0%}, {high:.0%}])"
                cells.append(text)
            lines.append(f"| {name} | {len(group)} | {' | '.join(cells)} |")
    return lines


def reliability(rows: Sequence[Row]) -> list[str]:
    """How often named causes are right, by their confidence."""
    lines = ["| confidence | causes named | right | interval |", "|---|---|---|---|"]
    for low, high in ((0.0, 0.7), (0.7, 0.9), (0.9, 0.95), (0.95, 1.01)):
        answers = []
        for row in rows:
            is_named = row.cause not in ("healthy", "unexplained")
            if is_named and low <= row.confidence < high:
                answers.append(row)
        if answers:
            right = sum(row.grade == "right" for row in answers)
            bounds = wilson(right, len(answers))
            lines.append(
                f"| {low:.2f} to {min(high, 1):.2f} | {len(answers)} |"
                f" {right} ({right / len(answers):.0%}) | [{bounds[0]:.0%}, {bounds[1]:.0%}] |"
            )
    return lines


def times(rows: Sequence[Row]) -> str:
    seconds = sorted(row.seconds for row in rows)
    median = statistics.median(seconds)
    late = seconds[int(0.9 * (len(seconds) - 1))]
    return f"Seconds per diagnosis: median {median:.2f}, 90th percentile {late:.2f}."


if __name__ == "__main__":
    sys.exit(main())
