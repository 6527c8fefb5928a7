"""The heat map of the page."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import numpy as np

from slime_tis.analysis.report.comparison_study import MARGIN, Column
from slime_tis.atomic_files import atomic_file

DARK = 0.6
"""Relative accuracy below which the color is so dark that the text is white."""


def draw(compared: Sequence[Column], path: Path) -> Path:
    """Draws relative accuracy by method and column; a dot marks gaps of at most `MARGIN`."""
    import matplotlib  # slow to import

    matplotlib.use("agg")
    from matplotlib import pyplot

    names: dict[str, None] = {}
    for column in compared:
        for cell in column.cells:
            names[cell.method] = None
    methods = [*names]
    values = np.full((len(methods), len(compared)), np.nan)
    width = 3.2 + 1.1 * len(compared)
    height = 1 + 0.24 * len(methods)
    figure, axes = pyplot.subplots(figsize=(width, height))
    for x, column in enumerate(compared):
        for cell in column.cells:
            y = methods.index(cell.method)
            values[y, x] = cell.relative
            text = f"{cell.relative:.2f}"
            if cell.gap <= MARGIN:
                text += " ●"
            color = "white" if cell.relative < DARK else "black"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color=color)
    axes.imshow(values, aspect="auto", vmin=0.2, vmax=1.1, cmap="viridis")
    labels = [fill(column.name, 16) for column in compared]
    axes.set_xticks(range(len(compared)), labels, fontsize=8)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    axes.tick_params(length=0)
    axes.set_xlabel(
        f"accuracy relative to on-policy training; ● within {MARGIN:.0%} of the column's best",
        fontsize=8,
    )
    figure.tight_layout()
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=130)
    pyplot.close(figure)
    return path
