"""Plants faults in tiny models, diagnoses the dumps, and counts how often the cause comes first.

    python -m studies.diagnosis.run                     # the reported seeds
    python -m studies.diagnosis.run --seeds 0 1 2 3     # the seeds that tuned the thresholds

Dumps are kept below --dumps and not made again; results.csv gets a row for each.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.tables import write_rows
from slime_tis.analysis.diagnosis import diagnose
from slime_tis.analysis.dumps.files import parquet_tables, write
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.progress import Progress, print_line
from studies.diagnosis.faults import FAULTS, HEALTHY, healthy
from studies.diagnosis.world import World, make_world

HERE = Path(__file__).parent
RESULTS = HERE / "results.csv"
DUMPS = Path("runs/studies/diagnosis")
TUNED = (0, 1, 2, 3)
REPORTED = (10, 11, 12, 13, 14)
STRENGTHS = ("small", "medium", "large")
DENSE = ("llama", "qwen3")
MOE = "qwen3_moe"


@dataclass(frozen=True)
class Case:
    """A fault in one model."""

    fault: str
    strength: int
    seed: int
    family: str

    @property
    def cause(self) -> str:
        """The planted cause."""
        return FAULTS[self.fault][0] if self.fault in FAULTS else "healthy"

    def path(self, dumps: Path) -> Path:
        """Its dump."""
        return (
            dumps
            / f"{self.seed}-{self.family}"
            / f"{self.fault.replace(' ', '_').replace(',', '')}-{self.strength}.parquet"
        )


@dataclass(frozen=True)
class Row:
    """What was found in a case."""

    fault: str
    cause: str
    strength: str
    seed: int
    family: str
    mean_abs_log_ratio: float
    found: str
    second: str
    named: bool
    """Whether the cause is the answer, and not a candidate after `unexplained`."""
    detail: str
    right_detail: str
    confidence: float

    @property
    def right(self) -> bool:
        """Whether the planted cause comes first, as the answer or as a candidate."""
        return self.found == self.cause


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(1)
    rows = []
    count = sum(len(list(cases(seed, options.strengths))) for seed in options.seeds)
    with Progress("dumps", count) as progress:
        for seed in options.seeds:
            for case, table in tables(seed, options.strengths, options.dumps):
                rows.append(examine(case, table))
                progress.update()
            right = sum(row.right for row in rows if row.seed == seed)
            seen = sum(row.seed == seed for row in rows)
            print_line(f"seed {seed}: {right} of {seen} right")
    if options.results:
        write_rows(options.results, Row, rows)
    print(summary(rows, {fault: cause for fault, (cause, _, _) in FAULTS.items()}))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=REPORTED)
    parser.add_argument("--strengths", type=int, nargs="+", default=(0, 1, 2), choices=(0, 1, 2))
    parser.add_argument("--dumps", type=Path, default=DUMPS)
    parser.add_argument("--results", type=Path, default=None, help=f"for example {RESULTS}")
    return parser.parse_args(argv)


def cases(seed: int, strengths: Sequence[int]) -> Iterator[Case]:
    """Returns a seed's cases: every fault in a model that can have it, and healthy runs of both."""
    dense = DENSE[seed % 2]
    for family in (dense, MOE):
        for strength in range(HEALTHY):
            yield Case("healthy", strength, seed, family)
    for fault, (cause, _, _) in FAULTS.items():
        for strength in strengths:
            yield Case(fault, strength, seed, MOE if cause == "moe_routing" else dense)


def tables(seed: int, strengths: Sequence[int], dumps: Path) -> Iterator[tuple[Case, TokenTable]]:
    """The dumps of a seed, made where they are missing."""
    worlds: dict[str, World] = {}
    for case in cases(seed, strengths):
        path = case.path(dumps)
        if not path.exists():
            if case.family not in worlds:
                worlds[case.family] = make_world(seed, case.family)
            fault = healthy if case.fault == "healthy" else FAULTS[case.fault][2]
            write(path, fault(worlds[case.family], case.strength))
        yield case, TokenTable.concatenate(list(parquet_tables(path)))


def examine(case: Case, table: TokenTable) -> Row:
    found = diagnose(table)
    candidates = [finding for finding in found.findings if finding.cause != "unexplained"]
    first, second = [*(candidates or found.findings[:1]), None][:2]
    assert first is not None
    return Row(
        fault=case.fault,
        cause=case.cause,
        strength="" if case.fault not in FAULTS else STRENGTHS[case.strength],
        seed=case.seed,
        family=case.family,
        mean_abs_log_ratio=float(f"{found.mean_abs_log_ratio:.4g}"),
        found=first.cause,
        second="" if second is None else second.cause,
        named=found.cause == first.cause,
        detail=first.detail,
        right_detail="" if case.fault not in FAULTS else FAULTS[case.fault][1],
        confidence=round(first.confidence, 3),
    )


def summary(rows: Sequence[Row], causes: Mapping[str, str]) -> str:
    """Returns Markdown: right answers by fault, confusion at medium strength, forms of rounding.

    Args:
        rows: of the cases.
        causes: planted cause by fault, in the order of the table.
    """
    planted = [row for row in rows if row.fault != "healthy"]
    lines = [
        "| planted | cause | small | medium | large | named instead |",
        "|---|---|---|---|---|---|",
    ]
    for fault, cause in causes.items():
        of_fault = [row for row in planted if row.fault == fault]
        shares = [
            _share([row for row in of_fault if row.strength == strength]) for strength in STRENGTHS
        ]
        wrong = Counter(row.found for row in of_fault if not row.right)
        instead = ", ".join(f"`{name}` {count}" for name, count in wrong.most_common())
        lines.append(f"| {fault} | `{cause}` | {' | '.join(shares)} | {instead} |")
    totals = [
        _share([row for row in planted if row.strength == strength]) for strength in STRENGTHS
    ]
    lines.append(f"| **all** | | {' | '.join(totals)} | |")
    healthy_rows = [row for row in rows if row.fault == "healthy"]
    alarms = sum(not row.right for row in healthy_rows)
    lines += ["", f"False alarms: {alarms} of {len(healthy_rows)} healthy runs.", ""]
    return "\n".join(lines + _confusion(planted) + _forms(planted))


def _confusion(rows: Sequence[Row]) -> list[str]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row.strength == "medium":
            counts[row.cause][row.found] += 1
    names = [*counts, *sorted({name for count in counts.values() for name in count} - set(counts))]
    lines = ["| planted \\ named | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [
        f"| {cause} | " + " | ".join(str(counts[cause][name] or "·") for name in names) + " |"
        for cause in counts
    ]
    return [*lines, ""]


def _forms(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| rounding to | named bf16 | int8 | bf16 or int8 | fp8 | another cause |",
        "|---|---|---|---|---|---|",
    ]
    for form in ("bf16", "int8", "fp8"):
        found = [row for row in rows if row.right_detail == form]
        named = [
            sum(row.right and row.detail == name for row in found)
            for name in ("bf16", "int8", "bf16 or int8", "fp8")
        ]
        lines.append(
            f"| {form} | {' | '.join(map(str, named))} | {sum(not row.right for row in found)} |"
        )
    return lines


def _share(rows: Sequence[Row]) -> str:
    return f"{sum(row.right for row in rows)}/{len(rows)}" if rows else "–"


if __name__ == "__main__":
    sys.exit(main())
