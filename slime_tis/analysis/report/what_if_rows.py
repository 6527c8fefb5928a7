"""The what-if section: the table of corrections, and the plot of bias against variance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.dumps.what_if import MAX_TOKENS, WhatIf, what_if
from slime_tis.analysis.report.plots import COLORS, Plot, axis, plain

TITLES = {
    "name": "correction",
    "kept": "kept",
    "ess": "ESS",
    "weight_mean": "mean weight",
    "weight_max": "largest weight",
    "cosine": "cosine",
    "norm_ratio": "norm ratio",
    "sequence_cosine": "cosine, sequences",
    "flags": "flags",
}
"""Columns of the table in the page."""
BATCHWISE = "batch normalisation, second-moment trimming, adaptive bounds"
"""Corrections that are applied to each step separately."""
MIN_PLOTTED = 1e-4
"""Smaller biases and losses are drawn at this value, because both axes are logarithmic."""


def section(table: TokenTable | None) -> dict[str, Any]:
    """Rows, columns, plots and a note of the section; empty without tokens."""
    columns = [{"key": key, "title": title, "text": key in ("name", "flags")} for key, title in TITLES.items()]
    empty: dict[str, Any] = {"rows": [], "columns": columns, "plots": [], "note": ""}
    if table is None or not table.valid.any():
        return empty
    try:
        results = what_if(table)
    except ValueError as error:
        return {**empty, "note": str(error)}
    rows = [{key: getattr(result, key) for key in TITLES} for result in results]
    plots = [plot.as_json() for plot in _pareto(results)]
    notes = [] if plots else ["The dump has no advantages, so gradients cannot be compared."]
    if table.tokens > MAX_TOKENS:
        notes.append(f"Computed on a random part of the samples with at most {MAX_TOKENS:,} tokens.")
    used = max(result.steps or 0 for result in results)
    steps = 1 if table.step is None else len(np.unique(table.step))
    if used < steps:
        notes.append(f"Whole-batch corrections ({BATCHWISE}) were computed on {used} of {steps:,} steps.")
    return {**empty, "rows": rows, "plots": plots, "note": " ".join(notes)}


def _pareto(results: Sequence[WhatIf]) -> list[Plot]:
    """Bias, 1 − cosine, against variance, the lost share of the effective sample."""
    points = [
        (index, 1 - result.cosine, 1 - result.kept * result.ess)
        for index, result in enumerate(results)
        if result.cosine is not None
    ]
    if not points:
        return []
    best = _front([(bias, loss) for _, bias, loss in points])
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": plain([max(loss, MIN_PLOTTED) for _, _, loss in points]),
        "y": plain([max(bias, MIN_PLOTTED) for _, bias, _ in points]),
        "text": [
            f"{results[index].name}<br>bias {max(bias, 0.0):.3g}, lost sample {loss:.3g}"
            for index, bias, loss in points
        ],
        "customdata": [index for index, _, _ in points],
        "marker": {"size": 9, "color": [COLORS[1] if good else COLORS[0] for good in best], "opacity": 0.8},
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
    }
    layout = {"xaxis": axis("lost sample, 1 − kept · ESS", log=True), "yaxis": axis("bias, 1 − cosine", log=True)}
    says = (
        "Each point is a correction: the angle between its gradient and the exact one, and the share of the effective "
        f"sample it loses (both at least {MIN_PLOTTED:g}). No correction beats an orange point in both. Click a point "
        "for its flags."
    )
    return [Plot(id="pareto", title="Bias against variance", says=says, traces=[trace], layout=layout, wide=True)]


def _front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether no other point is at least as good in both and better in one."""
    return [not any(a <= x and b <= y and (a < x or b < y) for a, b in points) for x, y in points]
