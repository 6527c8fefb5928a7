"""`slime-tis recommend`: the correction that the comparison study supports for a run or a dump.

Run or dump → cause and size of the mismatch → column of the study with the same cause and size →
best methods of that column
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from slime_tis.analysis.diagnosis import CAUSES, Diagnosis, diagnose
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.report.mismatch_plots import summary
from slime_tis.analysis.report.report_inputs import open_source

NOISE = ("rounding", "healthy")
"""Causes in which the engines differ only in precision, without old weights."""
TOLERANCE = 2.0
"""A column covers mismatches up to this factor outside its range."""
STANDARD = "standard PPO"
"""The study's method without a correction."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method under one mismatch of the study."""

    method: str
    flags: str
    seeds: int
    relative: float
    """Accuracy relative to on-policy training."""
    low: float
    high: float
    """95 % interval of `relative`."""
    tied: bool
    """Whether the study cannot distinguish the method from the best one."""
    collapsed: int
    """Number of seeds that collapsed."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One mismatch of the study."""

    name: str
    covers: bool
    """Whether recommendations use the column. All columns count in the record of a method."""
    stale: bool
    """Whether old weights sampled the responses."""
    sigma: tuple[float, float]
    """Smallest and largest `Mismatch.sigma` of the methods."""
    standard: float
    """Relative accuracy of standard PPO."""
    cells: tuple[Cell, ...]
    """The methods, the best first."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Cause and size of the mismatch between training and rollout."""

    cause: str
    """A key of `CAUSES`."""
    k3: float
    """Mean of exp(Δ) − 1 − Δ over trained tokens, nats."""
    sigma: float
    """Standard deviation of a response's log-ratio, √(2·k3·tokens)."""
    age: int
    """Largest number of optimizer steps between sampling and training; 0 if unknown."""

    @property
    def stale(self) -> bool:
        """Whether old weights sampled the responses."""
        return self.cause == "stale_weights" or (self.age > 1 and self.cause == "rounding")


def measured(table: TokenTable, result: Diagnosis) -> Mismatch:
    """Returns the mismatch of a table, which must have a valid token, from its diagnosis."""
    k3 = summary(table)["k3"]
    mean_length = table.valid.sum() / len(np.unique(table.sample[table.valid]))
    age = 0
    if table.step is not None and table.weight_version is not None:
        ages = table.step[table.sample] - table.weight_version
        has_age = table.valid & (table.weight_version >= 0)
        age = int(ages[has_age].max(initial=0))
    return Mismatch(cause=result.cause, k3=k3, sigma=math.sqrt(2 * k3 * mean_length), age=age)


def study() -> list[Column]:
    """Returns the columns of the study, which studies/comparison/compare.py wrote."""
    file = files("slime_tis.analysis.report") / "comparison_study.json"
    columns = []
    for values in json.loads(file.read_text(encoding="utf-8")):
        values["sigma"] = tuple(values["sigma"])
        values["cells"] = tuple(Cell(**cell) for cell in values["cells"])
        columns.append(Column(**values))
    return columns


def column_for(mismatch: Mismatch, columns: Sequence[Column]) -> Column | None:
    """Returns the column of the same kind with the nearest range of σ√T.

    None if no range is within `TOLERANCE`.
    """
    nearest = None
    smallest_factor = math.inf
    if mismatch.sigma == 0:  # the engines are equal
        return None
    for column in columns:
        if not column.covers or column.stale != mismatch.stale:
            continue
        low, high = column.sigma
        factor = max(low / mismatch.sigma, mismatch.sigma / high, 1.0)
        if factor <= TOLERANCE and factor < smallest_factor:
            nearest = column
            smallest_factor = factor
    return nearest


def is_negligible(mismatch: Mismatch, columns: Sequence[Column]) -> bool:
    """Whether the engines differ less than in every column without old weights."""
    lows = [column.sigma[0] for column in columns if column.covers and not column.stale]
    return not mismatch.stale and mismatch.sigma < min(lows, default=0.0)


def best_cell(column: Column, columns: Sequence[Column]) -> Cell:
    """Returns the recommended method of a column, one of those tied with the best.

    Standard PPO if it is tied: it needs no flags. Otherwise the method that loses in the fewest
    columns, then the one tied in the most columns, then the most accurate one in this column.
    """

    def merit(cell: Cell) -> tuple[bool, int, int, float]:
        wins, losses = _record(cell.method, columns)
        return cell.method == STANDARD, -losses, wins, cell.relative

    tied = [cell for cell in column.cells if cell.tied]
    return max(tied, key=merit)


def _record(method: str, columns: Sequence[Column]) -> tuple[int, int]:
    """Number of columns in which a method is tied with the best one, and in which it loses."""
    wins = 0
    losses = 0
    for column in columns:
        for cell in column.cells:
            if cell.method == method:
                wins += cell.tied
                losses += not cell.tied
    return wins, losses


def recommendation(mismatch: Mismatch, columns: Sequence[Column]) -> str:
    """Returns flags with their reason and evidence, or why the study supports none."""
    size = f"k3 {mismatch.k3:.2g} nats per token, σ√T {mismatch.sigma:.2g}"
    if mismatch.age:
        size += f", weights up to {mismatch.age} steps old"
    if mismatch.cause not in (*NOISE, "stale_weights"):
        title, advice = CAUSES[mismatch.cause]
        return f"No correction: fix the cause first. Diagnosis: {title} ({size}). {advice}"
    if is_negligible(mismatch, columns):
        return (
            f"No correction is needed: the engines differ by {size}, less than in any column of the"
            " study."
        )
    column = column_for(mismatch, columns)
    if column is None:
        kind = "stale weights" if mismatch.stale else "precision"
        return (
            f"The study does not cover this mismatch: {kind}, {size}. `slime-tis what-if` compares"
            " corrections on these tokens; docs/choosing.md has rules."
        )
    first = best_cell(column, columns)
    limits = f"{first.seeds} seeds of one small task: studies/comparison/README.md"
    if first.method == STANDARD:
        return (
            f"No correction is needed: {size} is in the study's column {column.name!r}, where"
            f" standard PPO cannot be told apart from the best method. {limits}"
        )
    others = [cell.method for cell in column.cells if cell.tied and cell != first]
    low, high = column.sigma
    wins, losses = _record(first.method, columns)
    evidence = (
        f"Evidence: {first.method} reaches {first.relative:.2f} [{first.low:.2f},"
        f" {first.high:.2f}] of on-policy accuracy, standard PPO {column.standard:.2f}. It is"
        f" among the best methods in {wins} of the {wins + losses} columns that have it."
    )
    lines = [
        first.flags,
        f"Mismatch: {size}. Column of the study: {column.name!r} (σ√T {low:.2g} to {high:.2g}).",
        evidence,
    ]
    if others:
        lines.append(f"Not told apart from it: {'; '.join(others)}.")
    lines.append(limits)
    return "\n".join(lines)


def recommend(path: str) -> str:
    """Returns the recommendation for a run or a dump.

    Raises:
        ValueError: the path has no trained tokens.
    """
    source = open_source(path)
    table = source.tokens()
    return recommendation(measured(table, diagnose(table, source.metrics)), study())
