"""Columns of the comparison study, their distance from a mismatch, and the method they support.

`slime-tis recommend` reads them. A gap is 1 − accuracy / accuracy of the column's best method: the
share of the best method's accuracy that a method loses.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from slime_tis.analysis.report.student_t import t_quantile

STANDARD = "standard PPO"
"""The study's method without a correction."""
MARGIN = 0.1
"""Largest gap of a method that is recommended."""
PRECISION_CLASSES = {"fp32": 0, "fp16": 0, "bf16": 1, "int8": 1, "fp8": 2, "int4": 3}
"""Classes of a rollout engine's precision by the mismatch that it makes. On SmolLM2, k3 is below
2e-5 in class 0, 1e-3 to 4e-3 in class 1, and 2e-2 for fp8 (studies/real_model). int4 has no number
that holds for all models: its mismatch depends on the size of a group with one scale."""
STEPS_WEIGHT = 2.0
"""Distance per doubling of the optimizer steps per rollout, where a doubling of the age counts 1.
The steps change the methods themselves: between the steps of a rollout, decoupled corrections are
standard PPO."""
SAME_AGE = 0.5
"""Doublings of 1 + age up to which ages count as equal."""
MIN_RECORD = 2
"""Smallest number of columns in the record of a method."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method under one mismatch of the study. Intervals are 95 % intervals of Student's t."""

    method: str
    flags: str
    seeds: int
    relative: float
    """Accuracy relative to on-policy training, the geometric mean over the seeds."""
    low: float
    high: float
    """Interval of `relative`."""
    gap: float
    """Share of the best method's accuracy that is lost; 0 for the best method."""
    gap_low: float
    gap_high: float
    """Interval of `gap`, from differences by seed."""
    is_worse: bool
    """Whether a test finds the method worse than the best one (5 % per column)."""
    collapsed: int
    """Number of seeds that collapsed."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions of a run that its user knows."""

    age: int
    """Largest number of optimizer steps between sampling and training."""
    precision: str | None
    """Precision of the rollout engine, a key of `PRECISION_CLASSES`; None if unknown."""
    steps: int
    """Optimizer steps per rollout."""
    stale_servers: float
    """Share of the tokens from servers that missed weight updates."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One mismatch of the study."""

    name: str
    covers: bool
    """Whether recommendations use the column. All columns count in the record of a method."""
    conditions: Conditions
    sigma: tuple[float, float]
    """Smallest and largest σ√T of the methods, √(2·k3·tokens) of their mean k3."""
    tokens: int
    """Mean number of tokens of a response."""
    cells: tuple[Cell, ...]
    """The methods, the best first."""

    def cell(self, method: str) -> Cell | None:
        """Returns the cell of a method; None if it did not run in this column."""
        for cell in self.cells:
            if cell.method == method:
                return cell
        return None

    @property
    def center(self) -> float:
        """Geometric mean of the smallest and the largest σ√T."""
        low, high = self.sigma
        return math.sqrt(low * high)


@dataclass(frozen=True, kw_only=True)
class Record:
    """Gaps of a method over the columns in which it ran."""

    columns: int
    mean: float
    high: float
    """Upper end of the 95 % interval of the mean, with the columns as the sample."""
    worst: float
    worst_column: str


def study() -> list[Column]:
    """Returns the columns of the study, which studies/comparison/compare.py wrote."""
    file = files("slime_tis.analysis.report") / "comparison_study.json"
    columns = []
    for values in json.loads(file.read_text(encoding="utf-8")):
        values["sigma"] = tuple(values["sigma"])
        values["conditions"] = Conditions(**values["conditions"])
        values["cells"] = tuple(Cell(**cell) for cell in values["cells"])
        columns.append(Column(**values))
    return columns


def nearest_column(
    conditions: Conditions, sigma: float, columns: Sequence[Column]
) -> Column | None:
    """Returns the column with the nearest conditions; the nearest σ√T breaks ties.

    Columns of another kind do not count. The kinds are old weights, current weights, and servers
    that missed updates.

    Returns:
        The column; None if no column is of this kind.
    """
    nearest = None
    smallest = (math.inf, math.inf)
    for column in columns:
        if not column.covers or _kind(column.conditions) != _kind(conditions):
            continue
        # σ√T of a column is a result of the methods in it, so it only breaks ties.
        ratio = 0.0
        if sigma > 0:
            ratio = abs(math.log(sigma / column.center))
        candidate = (distance(conditions, column.conditions), ratio)
        if candidate < smallest:
            smallest = candidate
            nearest = column
    return nearest


def _kind(conditions: Conditions) -> str:
    """Returns the kind of mismatch, because methods that help with one kind fail with another."""
    if conditions.stale_servers > 0:
        return "stale servers"
    if conditions.age > 0:
        return "old weights"
    return "current weights"


def distance(conditions: Conditions, of_column: Conditions) -> float:
    """Returns how far two conditions of one kind are apart.

    A doubling of 1 + age, a doubling of the share of stale servers and a class of
    `PRECISION_CLASSES` count 1. A doubling of the steps per rollout counts `STEPS_WEIGHT`. An
    unknown precision counts 0.
    """
    total = STEPS_WEIGHT * abs(math.log2(conditions.steps / of_column.steps))
    if conditions.stale_servers > 0:
        # The weights of a stale server may have any age.
        total += abs(math.log2(conditions.stale_servers / of_column.stale_servers))
    else:
        total += abs(age_doublings(conditions, of_column))
    if conditions.precision is not None and of_column.precision is not None:
        own_class = PRECISION_CLASSES[conditions.precision]
        total += abs(own_class - PRECISION_CLASSES[of_column.precision])
    return total


def age_doublings(conditions: Conditions, of_column: Conditions) -> float:
    """Returns how often 1 + age doubles from a column to the conditions; below 0 if it halves."""
    return math.log2((1 + conditions.age) / (1 + of_column.age))


def best_cell(column: Column, columns: Sequence[Column], conditions: Conditions) -> Cell:
    """Returns the method of a column that is recommended under some conditions.

    Standard PPO if its gap is at most `MARGIN` and the interval of the gap reaches 0: it needs no
    flags. Otherwise, of the methods within `MARGIN`, the one whose record over all columns has the
    smallest upper end. A method that ran in few columns has a wide interval, so that a lack of
    tests does not count in its favor.
    """
    near = [cell for cell in column.cells if cell.gap <= MARGIN]
    # Older weights do more harm, so that the harmlessness of newer ones proves nothing.
    is_older = age_doublings(conditions, column.conditions) > SAME_AGE
    for cell in near:
        if cell.method == STANDARD and cell.gap_low <= 0 and not is_older:
            return cell

    def worst_mean_gap(cell: Cell) -> tuple[float, float]:
        method_record = record(cell.method, columns)
        if method_record is None:
            return math.inf, cell.gap
        return method_record.high, cell.gap

    others = [cell for cell in near if cell.method != STANDARD]
    # Standard PPO may be the only method of the column.
    return min(others or near, key=worst_mean_gap)


def record(method: str, columns: Sequence[Column]) -> Record | None:
    """Returns the gaps of a method over its columns; None if it ran in fewer than `MIN_RECORD`."""
    gaps = {}
    for column in columns:
        cell = column.cell(method)
        if cell is not None:
            gaps[column.name] = cell.gap
    if len(gaps) < MIN_RECORD:
        return None
    count = len(gaps)
    mean = sum(gaps.values()) / count
    variance = sum((gap - mean) ** 2 for gap in gaps.values()) / (count - 1)
    quantile = t_quantile(0.95, count - 1)
    worst_column = max(gaps, key=lambda name: gaps[name])
    return Record(
        columns=count,
        mean=mean,
        high=mean + quantile * math.sqrt(variance / count),
        worst=gaps[worst_column],
        worst_column=worst_column,
    )
