"""`slime-tis recommend`: the correction that the comparison study supports for the mismatch of a run or a dump.

Run or dump → diagnosis and size of the mismatch → column of the study with the same cause and size
→ its best methods
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
"""Causes without old weights or a fault: the engines differ in precision, as in the study."""
TOLERANCE = 2.0
"""A column covers mismatches up to this factor outside its range."""
STANDARD = "standard PPO"


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
    """Bounds of its 95 % interval."""
    tied: bool
    """Whether the method cannot be told apart from the column's best one."""
    collapsed: int
    """Number of seeds that collapsed."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One mismatch of the study."""

    name: str
    covers: bool
    """Whether a user's mismatch is placed here; every column counts in the record of a method."""
    stale: bool
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
        """Whether old weights made the samples."""
        return self.cause == "stale_weights" or (self.age > 1 and self.cause == "rounding")


def measured(table: TokenTable, result: Diagnosis) -> Mismatch:
    """The mismatch of a table with trained tokens, given its diagnosis."""
    k3 = summary(table)["k3"]
    tokens = table.valid.sum() / len(np.unique(table.sample[table.valid]))
    age = 0
    if table.step is not None and table.weight_version is not None:
        known = table.valid & (table.weight_version >= 0)
        ages = (np.repeat(table.step, table.response_length) - table.weight_version)[known]
        age = int(ages.max(initial=0))
    return Mismatch(cause=result.cause, k3=k3, sigma=math.sqrt(2 * k3 * tokens), age=age)


def study() -> list[Column]:
    """The columns of the comparison study; studies/comparison/compare.py writes them."""
    text = (files("slime_tis.analysis.report") / "comparison_study.json").read_text(
        encoding="utf-8"
    )
    return [
        Column(
            **column
            | {
                "sigma": tuple(column["sigma"]),
                "cells": tuple(Cell(**cell) for cell in column["cells"]),
            }
        )
        for column in json.loads(text)
    ]


def column_for(mismatch: Mismatch, columns: Sequence[Column]) -> Column | None:
    """The column of the same kind whose range of σ√T is nearest, within `TOLERANCE`; None if the study has none."""

    def factor(column: Column) -> float:
        low, high = column.sigma
        return max(low / mismatch.sigma, mismatch.sigma / high, 1.0) if mismatch.sigma else math.inf

    same_kind = [column for column in columns if column.covers and column.stale == mismatch.stale]
    nearest = min(same_kind, key=factor, default=None)
    return nearest if nearest is not None and factor(nearest) <= TOLERANCE else None


def is_negligible(mismatch: Mismatch, columns: Sequence[Column]) -> bool:
    """Whether the engines differ by less than in any column without old weights."""
    lows = [column.sigma[0] for column in columns if column.covers and not column.stale]
    return not mismatch.stale and mismatch.sigma < min(lows, default=0.0)


def best_cell(column: Column, columns: Sequence[Column]) -> Cell:
    """Standard PPO if it is tied with the best method of a column; else the tied method that loses in fewest columns.

    Of several such methods, the one that is tied in most columns; then the one with the highest
    accuracy in this one.
    """

    def merit(cell: Cell) -> tuple[bool, int, int, float]:
        wins, losses = _record(cell.method, columns)
        return cell.method == STANDARD, -losses, wins, cell.relative

    return max((cell for cell in column.cells if cell.tied), key=merit)


def _record(method: str, columns: Sequence[Column]) -> tuple[int, int]:
    """Numbers of columns in which a method is tied with the best one, and in which it loses."""
    ties = [cell.tied for column in columns for cell in column.cells if cell.method == method]
    return ties.count(True), ties.count(False)


def recommendation(mismatch: Mismatch, columns: Sequence[Column]) -> str:
    """Flags with their reason and evidence, or why the study supports none."""
    size = f"k3 {mismatch.k3:.2g} nats per token, σ√T {mismatch.sigma:.2g}"
    size += f", weights up to {mismatch.age} steps old" if mismatch.age else ""
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
    lines = [
        first.flags,
        f"Mismatch: {size}. Column of the study: {column.name!r} (σ√T {low:.2g} to {high:.2g}).",
        (
            f"Evidence: {first.method} reaches {first.relative:.2f} [{first.low:.2f},"
            f" {first.high:.2f}] of on-policy accuracy, standard PPO {column.standard:.2f}. It is"
            f" among the best methods in {wins} of the {wins + losses} columns that have it."
        ),
        f"Not told apart from it: {'; '.join(others)}." if others else "",
        limits,
    ]
    return "\n".join(filter(None, lines))


def recommend(path: str) -> str:
    """The recommendation for a run or a dump.

    Raises:
        ValueError: the path has no trained tokens.
    """
    source = open_source(path)
    table = source.tokens()
    return recommendation(measured(table, diagnose(table, source.metrics)), study())
