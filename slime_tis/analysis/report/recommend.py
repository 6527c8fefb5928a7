"""`slime-tis recommend`: the correction that the comparison study supports for a run or a dump.

Run or dump → cause, conditions and size of the mismatch → nearest column of the study → method
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slime_tis.analysis.diagnosis import CAUSES, Diagnosis, diagnose
from slime_tis.analysis.diagnosis.precision_noise import possible_precisions
from slime_tis.analysis.diagnosis.trained_tokens import MIN_TOKENS, Tokens, tokens_of
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.report.comparison_study import (
    MARGIN,
    PRECISION_CLASSES,
    SAME_AGE,
    STANDARD,
    Cell,
    Column,
    Conditions,
    age_doublings,
    best_cell,
    nearest_column,
    record,
    study,
)
from slime_tis.analysis.report.mismatch_plots import summary
from slime_tis.analysis.report.report_inputs import open_source

COVERED_CAUSES = ("rounding", "stale_weights")
"""Causes that the columns of the study have. Other causes are faults to be fixed."""
MIN_SIGN_SHARE = 0.2
"""Smallest share of the mismatch that each sign of Δ has in noise. A setting that differs, such as
top-p, makes Δ of one sign."""
UNMOVED = 0.1
"""Mean abs(log π_θ − log π_old) in the first step of a rollout, at most, as a share of that in the
median later step. It is 0 if both passes have the same kernels."""
SAME_SIZE = 2.0
"""Factor outside a column's range of σ√T up to which sizes count as equal."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Cause, conditions and size of the mismatch between training and rollout."""

    cause: str
    """A key of `CAUSES`, or for an unexplained mismatch the cause that it is taken for."""
    is_certain: bool = True
    """Whether the diagnosis names this cause."""
    conditions: Conditions
    has_ages: bool = True
    """Whether the age of the weights is known; otherwise it is assumed to be 0."""
    youngest: int = 0
    """Smallest number of optimizer steps between sampling and training."""
    k3: float
    """Mean of exp(Δ) − 1 − Δ over trained tokens, nats."""
    sigma: float
    """σ√T: standard deviation of a response's log-ratio, √(2·k3·tokens)."""
    tokens: float
    """Mean number of trained tokens of a response."""


def measured(
    table: TokenTable, result: Diagnosis, options: Mapping[str, Any] | None = None
) -> Mismatch:
    """Returns the mismatch of a table, which must have a valid token.

    Args:
        table: Tokens of a dump.
        result: Diagnosis of the table.
        options: Options in the config.yaml of the run, if there is one.
    """
    k3 = summary(table)["k3"]
    tokens = float(table.valid.sum() / len(np.unique(table.sample[table.valid])))
    ages = np.zeros(0, np.int32)
    if table.step is not None and table.weight_version is not None:
        # A version of −1 is unknown.
        has_age = table.valid & (table.weight_version >= 0)
        ages = (table.step[table.sample] - table.weight_version)[has_age]
    # Dumps of servers have no precision, and other trainers may have other names.
    precision = table.metadata.get("rollout_precision")
    stale_servers = 0.0
    if result.server:
        of_server = table.of_worker(result.server)
        stale_servers = float(of_server.valid.sum() / table.valid.sum())
    if precision not in PRECISION_CLASSES:
        precision = None
    conditions = Conditions(
        age=int(ages.max(initial=0)),
        precision=precision,
        steps=_steps_per_rollout(table, options or {}),
        stale_servers=stale_servers,
    )
    cause = result.cause
    if table.valid.sum() < MIN_TOKENS:
        cause = "not_measured"
    elif cause == "unexplained":
        cause = _probable_cause(tokens_of(table), result, is_old=conditions.age > 0)
    youngest = 0
    if len(ages):
        youngest = int(ages.min())
    return Mismatch(
        cause=cause,
        is_certain=cause in (result.cause, "not_measured"),
        conditions=conditions,
        has_ages=len(ages) > 0,
        youngest=youngest,
        k3=k3,
        sigma=math.sqrt(2 * k3 * tokens),
        tokens=tokens,
    )


def _steps_per_rollout(table: TokenTable, options: Mapping[str, Any]) -> int:
    """Returns the optimizer steps per rollout, from the run's options or from the log-probs.

    π_old is the policy at the first step of a rollout, so π_θ = π_old holds in these steps only.
    Without a recomputed π_old, a rollout counts as one step.
    """
    steps = options.get("num_steps_per_rollout")
    if isinstance(steps, int) and steps > 0:
        return steps
    if table.step is None or table.metadata.get("old_policy") != "recomputed":
        return 1
    difference = np.abs(table.train_log_prob - table.old_log_prob)[table.valid]
    step = table.step[table.sample][table.valid]
    _, step_N = np.unique(step, return_inverse=True)
    moved = np.bincount(step_N, difference) / np.bincount(step_N)
    if not moved.any():
        return 1
    # The size of a later step's change depends on the learning rate, so that no fixed bound holds.
    is_first = moved < UNMOVED * np.median(moved[moved > 0])
    if not is_first.any():
        return 1
    return max(round(len(moved) / int(is_first.sum())), 1)


def _probable_cause(tokens: Tokens, result: Diagnosis, *, is_old: bool) -> str:
    """Returns the cause that an unexplained mismatch is taken for; `unexplained` if there is none.

    The first candidate of the diagnosis must be old weights or low precision, if there is one. Δ
    must have both signs. Without old weights, its size must be one that low precision makes.
    """
    candidates = [finding.cause for finding in result.findings[1:]]
    if candidates and candidates[0] not in COVERED_CAUSES:
        return "unexplained"
    # Without log-probs of both engines, Δ has no sign.
    tokens = tokens.only(tokens.finite)
    positive = float(tokens.size[tokens.log_ratio > 0].sum() / max(tokens.size.sum(), 1e-12))
    if not MIN_SIGN_SHARE <= positive <= 1 - MIN_SIGN_SHARE:
        return "unexplained"
    if is_old and "stale_weights" in candidates:
        return "stale_weights"
    if not possible_precisions(tokens.of_newest_weights().noise):
        return "unexplained"
    return "rounding"


def is_negligible(mismatch: Mismatch, columns: Sequence[Column]) -> bool:
    """Whether the engines differ less than in every column with one step per rollout."""
    lows = [column.sigma[0] for column in columns if column.covers and column.conditions.steps == 1]
    return mismatch.sigma < min(lows, default=0.0)


def recommendation(mismatch: Mismatch, columns: Sequence[Column]) -> str:
    """Returns flags with their reason and evidence, or why the study supports none."""
    if mismatch.cause == "not_measured":
        return (
            f"No recommendation: it needs at least {MIN_TOKENS} trained tokens with log-probs of"
            " both engines."
        )
    # A fault may make a mismatch of any size, so it is handled before the size.
    is_fault = mismatch.cause not in (*COVERED_CAUSES, "healthy")
    if is_fault:
        return _fault(mismatch, columns)
    if mismatch.cause == "healthy":
        return f"No correction is needed: the diagnosis finds no mismatch ({_size(mismatch)})."
    if is_negligible(mismatch, columns):
        return (
            f"No correction is needed: the engines differ by {_size(mismatch)}, less than in any"
            " column of the study."
        )
    if mismatch.cause == "stale_weights" and mismatch.conditions.age == 0:
        # The metrics of the run show old weights, and its tokens do not.
        return (
            f"The age of the weights is unknown: {_size(mismatch)}. Write weight_versions and step"
            " into the dump (docs/dumps.md)."
        )
    column = nearest_column(mismatch.conditions, mismatch.sigma, columns)
    if column is None:
        return (
            f"The study does not cover this mismatch: {_size(mismatch)}. `slime-tis what-if`"
            " compares corrections on these tokens; docs/choosing.md has rules."
        )
    first = best_cell(column, columns, mismatch.conditions)
    lines = [first.flags]
    if first.method == STANDARD:
        lines = ["No correction: the study does not show that one helps here."]
    lines.append(f"Mismatch: {_size(mismatch)}.")
    if not mismatch.is_certain:
        title = CAUSES[mismatch.cause].title
        lines.append(
            f"The diagnosis is not certain. Size and signs are those of: {title}. Prove it with"
            " `slime-tis diagnose --hf-checkpoint DIR`."
        )
    lines.append(_place(mismatch, column))
    lines += _evidence(first, column, columns)
    lines.append(
        f"Limits: {first.seeds} seeds of one small task with {column.tokens} tokens per response,"
        f" here {mismatch.tokens:,.0f}: studies/comparison/README.md"
    )
    return "\n".join(lines)


def _fault(mismatch: Mismatch, columns: Sequence[Column]) -> str:
    """Returns the advice to fix a fault; for a deviating server also a method until then."""
    title, advice = CAUSES[mismatch.cause]
    text = f"No correction: fix the cause first. Diagnosis: {title} ({_size(mismatch)}). {advice}"
    if mismatch.cause != "worker":
        return text
    column = nearest_column(mismatch.conditions, mismatch.sigma, columns)
    if column is None:
        return text
    first = best_cell(column, columns, mismatch.conditions)
    return (
        f"{text}\nUntil then, if this server has old weights: {first.flags} ({first.method}:"
        f" {_gap_in_words(first)} in the column {column.name!r})."
    )


def _size(mismatch: Mismatch) -> str:
    """Returns conditions and size of the mismatch in words."""
    conditions = mismatch.conditions
    if not mismatch.has_ages:
        ages = "weights of unknown age (the dump lacks weight_versions or step), taken as current"
    elif conditions.age == 0:
        ages = "current weights"
    elif mismatch.youngest == conditions.age:
        ages = f"all weights {_steps(conditions.age)} old"
    else:
        ages = f"weights up to {_steps(conditions.age)} old"
    parts = [ages, f"rollout precision {conditions.precision or 'unknown'}"]
    if conditions.steps > 1:
        parts.append(f"{conditions.steps} steps per rollout")
    if conditions.stale_servers > 0:
        parts.append(f"one server with {conditions.stale_servers:.0%} of the tokens")
    parts.append(f"k3 {mismatch.k3:.2g} nats per token")
    parts.append(f"σ√T {mismatch.sigma:.2g}")
    return ", ".join(parts)


def _place(mismatch: Mismatch, column: Column) -> str:
    """Returns the column, and how its conditions differ from the mismatch."""
    differences = _differences(mismatch, column)
    text = f"Column of the study: {column.name!r}."
    if differences:
        text = (
            f"Extrapolation: the nearest column of the study is {column.name!r}, which has"
            f" {'; '.join(differences)}."
        )
    if mismatch.conditions.precision is None:
        text += (
            f" The rollout engine's precision is unknown; this column has"
            f" {column.conditions.precision}. `--rollout-precision` states it."
        )
    return text


def _differences(mismatch: Mismatch, column: Column) -> list[str]:
    """Returns the conditions of a column that differ from those of the mismatch."""
    own = mismatch.conditions
    theirs = column.conditions
    differences = []
    if abs(age_doublings(own, theirs)) > SAME_AGE:
        differences.append(f"weights up to {_steps(theirs.age)} old, here {own.age}")
    if mismatch.youngest > 0:
        differences.append(f"weights of age 0 to {theirs.age}, here none below {mismatch.youngest}")
    if own.precision is not None and own.precision != theirs.precision:
        differences.append(f"precision {theirs.precision}, here {own.precision}")
    if own.steps != theirs.steps:
        differences.append(f"{theirs.steps} steps per rollout, here {own.steps}")
    low, high = column.sigma
    if not low / SAME_SIZE <= mismatch.sigma <= high * SAME_SIZE:
        differences.append(f"σ√T {low:.2g} to {high:.2g}, here {mismatch.sigma:.2g}")
    return differences


def _evidence(first: Cell, column: Column, columns: Sequence[Column]) -> list[str]:
    """Returns the results of the recommended method and those of all other methods."""
    standard = column.cell(STANDARD)
    sentences = [f"Evidence: {first.method} is {_gap_in_words(first)}."]
    if standard is not None and standard != first:
        sentences.append(f"Standard PPO is {_gap_in_words(standard)}.")
    method_record = record(first.method, columns)
    if method_record is not None and first.method != STANDARD:
        sentences.append(
            f"Over its {method_record.columns} columns, {first.method} loses"
            f" {method_record.mean:.0%} on average and at most {method_record.worst:.0%}"
            f" ({method_record.worst_column})."
        )
    lines = [" ".join(sentences)]
    others = []
    for cell in column.cells:
        if cell != first and cell.gap <= MARGIN:
            others.append(f"{cell.method} {cell.gap:.0%}")
    if others:
        lines.append(f"Loss of the others within {MARGIN:.0%} of the best: {'; '.join(others)}.")
    return lines


def _gap_in_words(cell: Cell) -> str:
    """Returns the distance from the best method of the column with its interval."""
    if cell.gap == 0 and cell.gap_low == cell.gap_high:
        return "the best method of this column"
    # A negative end means that the method may be better than the best mean of the column.
    interval = f"95% interval {_percent(cell.gap_low)} to {_percent(cell.gap_high)}"
    return f"{_percent(cell.gap)} below the column's best accuracy ({interval})"


def _steps(count: int) -> str:
    if count == 1:
        return "1 step"
    return f"{count} steps"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("-", "−")


def recommend(path: str, rollout_precision: str = "") -> str:
    """Returns the recommendation for a run or a dump.

    Args:
        path: Run directory or dump.
        rollout_precision: Key of `PRECISION_CLASSES` that replaces the precision in the dump; empty
            for that of the dump.

    Raises:
        ValueError: the path has no trained tokens.
    """
    source = open_source(path)
    table = source.tokens()
    if rollout_precision:
        metadata = {**table.metadata, "rollout_precision": rollout_precision}
        table = replace(table, metadata=metadata)
    mismatch = measured(table, diagnose(table, source.metrics), source.options)
    return recommendation(mismatch, study())
