"""Plots of the page as plain dictionaries for plotly.js."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

COLORS = ("#3b6ea5", "#c0572b", "#3f8f5f", "#8a5ea8", "#a8832a", "#4a9aa8")
"""Line colors, readable on white and on black."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot."""

    id: str
    """Id of the element in the page."""
    title: str
    says: str
    """Description, one or two sentences."""
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    wide: bool = False
    """Whether the plot takes the whole width."""


def line(x: Any, y: Any, name: str, color: int = 0, **more: Any) -> dict[str, Any]:
    """A line; `color` is an index into `COLORS`."""
    style = {"color": COLORS[color % len(COLORS)], "width": 1.6}
    return {"type": "scatter", "mode": "lines", "x": plain(x), "y": plain(y), "name": name, "line": style, **more}


def axis(title: str, *, log: bool = False) -> dict[str, Any]:
    """An axis with a title; ticks of a logarithmic axis are complete numbers, 0.02 instead of a small 2."""
    title_of = {"text": title, "standoff": 8}  # automargin needs a distance from the ticks
    return {"title": title_of, **({"type": "log", "tickformat": "~g", "nticks": 3} if log else {"type": "linear"})}


def plain(values: Any) -> list[Any]:
    """Numbers for JSON, rounded to five digits; None if not finite."""
    if isinstance(values, np.ndarray) or (values and isinstance(values[0], float | np.floating)):
        array = np.asarray(values)
        if array.dtype.kind == "f":
            return [float(f"{value:.5g}") if np.isfinite(value) else None for value in array.tolist()]
        return list(array.tolist())
    return [value.item() if isinstance(value, np.generic) else value for value in values]
