"""The plots of the page, as Plotly takes them: plain dictionaries, which the page draws."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLORS = ("#3b6ea5", "#c0572b", "#3f8f5f", "#8a5ea8", "#a8832a", "#4a9aa8")
"""Colours of series, readable on white and on black."""

VIRIDIS = (
    *((68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141), (39, 173, 129)),
    *((92, 200, 99), (170, 220, 50), (253, 231, 37)),
)
"""Matplotlib's colour map at nine even steps."""
COLOR_SCALE = [[place / (len(VIRIDIS) - 1), f"rgb{color}"] for place, color in enumerate(VIRIDIS)]
"""The same, as Plotly takes it."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot."""

    id: str
    """Of its element in the page."""
    title: str
    says: str
    """What it shows, in one plain statement."""
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    wide: bool = False
    """Whether it takes the whole width."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def line(x: Any, y: Any, name: str, color: int = 0, **more: Any) -> dict[str, Any]:
    """A line; `color` is a place in `COLORS`."""
    style = {"color": COLORS[color % len(COLORS)], "width": 1.6}
    return {"type": "scatter", "mode": "lines", "x": plain(x), "y": plain(y), "name": name, "line": style, **more}


def axis(title: str, *, log: bool = False) -> dict[str, Any]:
    """An axis with its title; a logarithmic one with whole numbers at its ticks: 0.02 in place of a small 2."""
    title_of = {"text": title, "standoff": 8}  # with which automargin keeps it off the ticks
    return {"title": title_of, **({"type": "log", "tickformat": "~g"} if log else {"type": "linear"})}


def plain(values: Any) -> list[Any]:
    """Numbers as JSON takes them, five digits long; None where they are not finite."""
    if isinstance(values, np.ndarray) or (values and isinstance(values[0], float | np.floating)):
        array = np.asarray(values)
        if array.dtype.kind == "f":
            return [float(f"{value:.5g}") if np.isfinite(value) else None for value in array.tolist()]
        return list(array.tolist())
    return [value.item() if isinstance(value, np.generic) else value for value in values]


def density_image(places: NDArray[np.floating[Any]]) -> str:
    """A PNG of one pixel per cell, as a URI that has it all; Plotly's basic bundle draws no heatmaps.

    Args:
        places: [rows, columns] in `VIRIDIS`, from 0 to 1; transparent where they are not finite.
    """
    there = np.isfinite(places)
    share = np.where(there, places, 0.0)
    steps = np.linspace(0, 1, len(VIRIDIS))
    channels = [np.interp(share, steps, values) for values in zip(*VIRIDIS, strict=True)]
    pixels = np.stack([*channels, there * 255.0], axis=-1).round().astype(np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # each after the number of its filter
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 6, 0, 0, 0)  # 8 bits, RGB and alpha
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    ]
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
