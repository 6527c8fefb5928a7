"""The metrics.jsonl of a run directory: one JSON object per optimizer step."""

import json
from pathlib import Path

CONFIG, METRICS = "config.yaml", "metrics.jsonl"
"""Files of a run directory that other programs read."""


def metrics_before(path: Path, step: int, *, evaluates_again: bool = False) -> list[str]:
    """Returns the lines of a metrics.jsonl before a step, without a truncated last line.

    Args:
        path: The metrics.jsonl.
        step: First step that will be logged again.
        evaluates_again: Whether an earlier resumption's row of its evaluation at the step before is dropped, too.
    """
    kept = []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8").strip()
            row = json.loads(text)
            repeated = (
                evaluates_again
                and row["step"] == step - 1
                and all(name == "step" or name.startswith("eval/") for name in row)
            )
            if row["step"] < step and not repeated:
                kept.append(text + "\n")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise ValueError(
                f"{path}, line {number}, is not the metrics of a step ({type(error).__name__}: {error}); "
                "remove that line, or give another --output-dir."
            ) from None
    return kept
