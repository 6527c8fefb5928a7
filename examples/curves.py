"""Curves of runs, for the pictures of examples."""

import json
from collections.abc import Sequence
from pathlib import Path

from slime_tis.atomic_files import METRICS

Series = list[tuple[int, float]]
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


def read_series(path: Path) -> dict[str, Series]:
    """Returns the finite values of a metrics.jsonl by metric, as ordered (step, value) pairs."""
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; give the directory of a run, which contains {METRICS}."
        )
    series: dict[str, Series] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        step = row.pop("step")
        for name, value in row.items():
            if value is not None:
                series.setdefault(name, []).append((step, value))
    return series


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Returns the mean of each value with up to `reach` neighbours on either side."""
    windows = (values[max(index - reach, 0) : index + reach + 1] for index in range(len(values)))
    return [sum(window) / len(window) for window in windows]
