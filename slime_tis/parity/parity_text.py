"""The comparison in words: one sentence, tables, JSON."""

import math
from collections.abc import Sequence
from typing import Any

from slime_tis.parity.comparison import Comparison, Difference, OperationDifference
from slime_tis.parity.executions import EXECUTIONS
from slime_tis.parity.recording import HEAD, LAYER_END, Recording

SHOWN_SHAPES = 4
"""Shapes of passes that are listed."""
COLUMNS = ("", "differ", "max |Δ|", "relative", "bits", "own |Δ|", "dtypes")
"""Columns of the tables. `own |Δ|` is the difference with the reference's inputs."""


def sentence(comparison: Comparison) -> str:
    """Returns the result in one sentence, with a second one on the sizes of own differences."""
    names = f"{comparison.reference.name} and {comparison.other.name}"
    precision = _precisions(comparison)
    log_probs = comparison.log_probs
    first = comparison.first
    if comparison.is_equal:
        size = f"{log_probs.tokens} log-probs"
        if comparison.operations:
            size += f" and the results of {len(comparison.operations)} operations"
        return f"{names} are equal bit by bit in {precision}: {size}."
    if first is None:
        return _without_operation(comparison, names, precision)
    difference = first.difference
    text = (
        f"{first.operation}: {names} differ in {precision}, {_largest(difference)}"
        f" ({difference.share:.2%} of its values). No recorded operation before it differs"
        f"{_cause(first)}."
    )
    fault = comparison.later_fault
    if fault is not None and fault.own is not None:
        text += (
            f" The largest own difference is that of {fault.operation}: {_largest(fault.own)},"
            f" {_relative(fault.own)} of its size."
        )
    if comparison.is_rounding:
        text += " Rounding explains the own differences of all operations."
    if log_probs.difference.is_equal and log_probs.tokens:
        text += " All log-probs are equal."
    return text


def _without_operation(comparison: Comparison, names: str, precision: str) -> str:
    """The sentence if log-probs differ, but no recorded operation."""
    log_probs = comparison.log_probs
    differing = log_probs.difference
    text = (
        f"{differing.differing} of {log_probs.tokens} log-probs of {names} differ in {precision},"
        f" {_largest(differing)}."
    )
    if not comparison.operations:
        return f"{text} The operation is unknown, because one side reveals no hidden states."
    if comparison.operations[-1].operation.name == HEAD:
        return f"{text} All operations up to the logits are equal: the log-softmax differs."
    return f"{text} All recorded operations are equal: the output layer or log-softmax differs."


def _precisions(comparison: Comparison) -> str:
    first = comparison.reference.precision
    second = comparison.other.precision
    return first if first == second else f"{first} and {second}"


def _largest(difference: Difference) -> str:
    if difference.nan:
        return f"NaN in {difference.nan} values"
    return f"at most {difference.largest:.2g}"


def _relative(difference: Difference) -> str:
    return f"{difference.relative:.2g}"


def _cause(row: OperationDifference) -> str:
    """Whether the first difference is the operation's own; empty if that was not measured."""
    if row.own is None:
        return ""
    if row.own.is_equal:
        return (
            ", but in another run, with the reference's inputs, it is equal: the execution does not"
            " repeat its results, or an operation that is not recorded differs"
        )
    return ", and with the reference's inputs it still differs: the difference is its own"


def text(comparison: Comparison) -> str:
    """Returns the sentence, facts and tables."""
    blocks = [sentence(comparison)]
    if comparison.cause:
        blocks.append(comparison.cause)
    blocks.append("\n".join(facts(comparison)))
    rows = comparison.hidden_states
    if rows:
        blocks.append(table("hidden states", rows))
    shown = set()
    for row in (comparison.first, comparison.later_fault):
        if row is not None and row.operation.layer is not None:
            shown.add(row.operation.layer)
    for layer in sorted(shown):
        blocks.append(table(f"layer {layer}", comparison.within(layer)))
    return "\n\n".join(blocks)


def facts(comparison: Comparison) -> list[str]:
    """Returns lines on the executions and their log-probs."""
    samples = comparison.samples
    lines = [
        f"{len(samples)} samples, {samples.total} tokens",
        _side("reference", comparison.reference),
        _side("other", comparison.other),
    ]
    log_probs = comparison.log_probs
    differing = log_probs.difference
    line = f"log-probs  {differing.differing} of {log_probs.tokens} tokens differ"
    if not differing.is_equal:
        assert differing.token is not None
        sample, position = samples.position_of(differing.token)
        line += (
            f", mean abs(Δ) {log_probs.mean:.2g}, max {differing.largest:.2g} nats, first: sample"
            f" {sample}, position {position}"
        )
    lines.append(line)
    if log_probs.kl_mean is not None:
        lines.append(
            f"KL         mean {log_probs.kl_mean:.2g}, max {log_probs.kl_max:.2g} nats per token"
        )
    return lines


def _side(role: str, recording: Recording) -> str:
    title = EXECUTIONS[recording.name].title
    line = f"{role:10} {recording.name} ({title}), {recording.precision}"
    if recording.shapes:
        line += f"; passes of {_shapes(recording)}"
    return line


def _shapes(recording: Recording) -> str:
    """Lists sequences × columns of the passes."""
    parts = []
    for (sequences, columns), count in list(recording.shapes.items())[:SHOWN_SHAPES]:
        times = f" ({count} times)" if count > 1 else ""
        parts.append(f"{sequences}×{columns}{times}")
    if len(recording.shapes) > SHOWN_SHAPES:
        parts.append("others")
    return ", ".join(parts)


def table(title: str, rows: Sequence[OperationDifference]) -> str:
    """Returns a table of operations as lines of text."""
    cells: list[tuple[str, ...]] = [(title, *COLUMNS[1:])]
    for row in rows:
        cells.append(row_cells(row))
    widths = []
    for column in range(len(COLUMNS)):
        widths.append(max(len(texts[column]) for texts in cells))
    lines = []
    for texts in cells:
        aligned = [texts[0].ljust(widths[0])]
        for column in range(1, len(COLUMNS)):
            aligned.append(texts[column].rjust(widths[column]))
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def row_cells(row: OperationDifference) -> tuple[str, ...]:
    """Returns the cells of one operation, in the order of COLUMNS."""
    difference = row.difference
    own = "–"
    if row.own is not None:
        own = "equal" if row.own.is_equal else f"{row.own.largest:.2g}"
    # The end of a layer stands for the layer, also among the hidden states.
    name = row.operation.name
    if name == LAYER_END:
        name = f"layer {row.operation.layer}"
    dtype, other_dtype = row.dtypes
    dtypes = dtype if dtype == other_dtype else f"{dtype}, {other_dtype}"
    if difference.is_equal:
        return name, "equal", "", "", "", own, dtypes
    return (
        name,
        f"{difference.share:.2%}",
        f"{difference.largest:.2g}",
        _relative(difference),
        f"{difference.bits:.0f}",
        own,
        dtypes,
    )


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns the comparison as JSON values; numbers that are not finite become text."""
    log_probs = comparison.log_probs
    first = comparison.first
    fault = comparison.later_fault
    operations = []
    for row in comparison.operations:
        operations.append(
            {
                **_operation_json(row),
                "dtypes": list(row.dtypes),
                **_difference_json(comparison, row.difference),
                "own": None if row.own is None else _difference_json(comparison, row.own),
            }
        )
    return {
        "sentence": sentence(comparison),
        "cause": comparison.cause or None,
        "is_equal": comparison.is_equal,
        "reference": _side_json(comparison.reference),
        "other": _side_json(comparison.other),
        "samples": len(comparison.samples),
        "tokens": comparison.samples.total,
        "log_probs": {
            "tokens": log_probs.tokens,
            "mean": _number(log_probs.mean),
            "kl_mean": _number(log_probs.kl_mean),
            "kl_max": _number(log_probs.kl_max),
            **_difference_json(comparison, log_probs.difference),
        },
        "first": None if first is None else _operation_json(first),
        "largest_own": None if fault is None else _operation_json(fault),
        "operations": operations,
    }


def _operation_json(row: OperationDifference) -> dict[str, Any]:
    return {"operation": row.operation.name, "layer": row.operation.layer}


def _side_json(recording: Recording) -> dict[str, Any]:
    shapes = []
    for shape, count in recording.shapes.items():
        shapes.append({"sequences": shape[0], "columns": shape[1], "passes": count})
    return {"execution": recording.name, "precision": recording.precision, "shapes": shapes}


def _difference_json(comparison: Comparison, difference: Difference) -> dict[str, Any]:
    first = None
    if difference.token is not None:
        sample, position = comparison.samples.position_of(difference.token)
        first = {"sample": sample, "position": position}
    return {
        "values": difference.values,
        "differing": difference.differing,
        "nan": difference.nan,
        "largest": _number(difference.largest),
        "relative": _number(difference.relative),
        "first_token": first,
    }


def _number(value: float | None) -> float | str | None:
    """JSON has no NaN and no infinity."""
    if value is None or math.isfinite(value):
        return value
    return str(value)
