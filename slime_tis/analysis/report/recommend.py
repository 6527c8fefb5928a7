"""`slime-tis recommend`: the correction that the comparison study supports for the mismatch of a run or a dump.

Run or dump → diagnosis and size of the mismatch → column of the study with the same cause and size → its best methods
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from slime_tis.analysis.diagnosis import Diagnosis, diagnose
from slime_tis.analysis.diagnosis.diagnose import CAUSES
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.report.source import open_source

NOISE = ("rounding", "healthy")
"""Causes that a correction can treat like the study's engines of lower precision."""
TOLERANCE = 2.0
"""A column covers mismatches up to this factor outside its range."""
STUDY_PAGE = "examples/comparison_study/README.md"


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
        return self.cause == "stale_weights" or (self.age > 1 and self.cause in NOISE)


def measured(table: TokenTable, result: Diagnosis) -> Mismatch:
    """The mismatch of a table with trained tokens, given its diagnosis."""
    delta = table.log_ratio[table.valid].astype(np.float64).clip(-20, 20)
    k3 = float((np.expm1(delta) - delta).mean())
    tokens = table.valid.sum() / len(np.unique(table.sample[table.valid]))
    age = 0
    if table.step is not None and table.weight_version is not None:
        known = table.valid & (table.weight_version >= 0)
        ages = (np.repeat(table.step, table.response_length) - table.weight_version)[known]
        age = int(ages.max(initial=0))
    return Mismatch(cause=result.cause, k3=k3, sigma=math.sqrt(2 * k3 * tokens), age=age)


def study() -> list[dict[str, Any]]:
    """The columns of the comparison study with their best methods; examples/comparison_study/compare.py writes them."""
    text = (files("slime_tis.analysis.report") / "comparison_study.json").read_text(encoding="utf-8")
    columns: list[dict[str, Any]] = json.loads(text)
    return columns


def column_for(mismatch: Mismatch, columns: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The column of the same kind whose range of σ√T is nearest, within `TOLERANCE`; None if the study has none."""

    def factor(column: Mapping[str, Any]) -> float:
        low, high = column["sigma"]
        return max(low / mismatch.sigma, mismatch.sigma / high, 1.0) if mismatch.sigma else math.inf

    same_kind = [column for column in columns if column["stale"] == mismatch.stale]
    nearest = min(same_kind, key=factor, default=None)
    return nearest if nearest is not None and factor(nearest) <= TOLERANCE else None


def recommendation(mismatch: Mismatch, columns: Sequence[Mapping[str, Any]]) -> str:
    """Flags with their reason and evidence, or why the study supports none."""
    size = f"k3 {mismatch.k3:.2g} nats per token, σ√T {mismatch.sigma:.2g}"
    size += f", weights up to {mismatch.age} steps old" if mismatch.age else ""
    if mismatch.cause not in (*NOISE, "stale_weights"):
        title, advice = CAUSES[mismatch.cause]
        return f"No correction: fix the cause first. Diagnosis: {title} ({size}). {advice}"
    lows = [column["sigma"][0] for column in columns if not column["stale"]]
    if not mismatch.stale and mismatch.sigma < min(lows, default=0.0):
        return f"No correction is needed: the engines differ by {size}, less than in any column of the study."
    column = column_for(mismatch, columns)
    if column is None:
        kind = "stale weights" if mismatch.stale else "precision"
        return (
            f"The study does not cover this mismatch: {kind}, {size}. `slime-tis what-if` compares corrections on "
            "these tokens; docs/choosing.md has rules."
        )
    cells = {cell["method"]: cell for cell in column["cells"]}
    if "standard PPO" in cells:
        return (
            f"No correction is needed: {size} is in the study's column {column['name']!r}, where standard PPO cannot "
            f"be told apart from the best method. {_limits(cells['standard PPO'])}"
        )
    wins = {name: sum(name in (cell["method"] for cell in each["cells"]) for each in columns) for name in cells}
    best = max(cells, key=lambda name: (wins[name], cells[name]["relative"]))
    others = [name for name in cells if name != best]
    low, high = column["sigma"]
    lines = [
        cells[best]["flags"],
        f"Mismatch: {size}. Column of the study: {column['name']!r} (σ√T {low:.2g} to {high:.2g}).",
        f"Evidence: {best} reaches {_interval(cells[best])} of on-policy accuracy, standard PPO "
        f"{column['standard']:.2f}. It is among the best methods of {wins[best]} of {len(columns)} columns.",
        f"Not told apart from it: {'; '.join(others)}." if others else "",
        _limits(cells[best]),
    ]
    return "\n".join(filter(None, lines))


def _interval(cell: Mapping[str, Any]) -> str:
    return f"{cell['relative']:.2f} [{cell['low']:.2f}, {cell['high']:.2f}]"


def _limits(cell: Mapping[str, Any]) -> str:
    return f"{cell['seeds']} seeds of one small task: {STUDY_PAGE}"


def recommend(path: str) -> str:
    """The recommendation for a run or a dump.

    Raises:
        ValueError: the path has no dump of tokens.
    """
    source = open_source(path)
    if (text := recommendation_for(source.table, diagnose(source.table, source.metrics))) is None:
        raise ValueError(f"{path} has no dumps of tokens; --save-debug-train-data writes them (docs/dumps.md).")
    return text


def recommendation_for(table: TokenTable | None, result: Diagnosis) -> str | None:
    """The recommendation for a table; None without trained tokens."""
    if table is None or not table.valid.any():
        return None
    return recommendation(measured(table, result), study())
