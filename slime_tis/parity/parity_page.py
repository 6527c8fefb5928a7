"""The comparison as one HTML file: the sentence, two heat maps of operations, and tables."""

import html
import math
from collections.abc import Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from slime_tis.analysis.report.mismatch_plots import COLORS
from slime_tis.analysis.report.page import MARK
from slime_tis.atomic_files import write_atomically
from slime_tis.parity.comparison import Comparison, OperationDifference
from slime_tis.parity.parity_text import COLUMNS, facts, row_cells, sentence
from slime_tis.parity.recording import EMBEDDING, FINAL_NORM, HEAD, IN_A_LAYER

LOWEST = -9.0
"""Decimal exponent at the lower end of the colors; fp32 rounds at −7."""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{mark}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Parity report</title>
<style>{style}</style>
</head>
<body>
<header><h1>Parity of executions</h1><p id="subtitle">{subtitle}</p></header>
<main>
{sections}
</main>
</body>
</html>
"""


def write_page(path: Path, checkpoint: str, comparisons: Sequence[Comparison]) -> None:
    """Writes the report."""
    style = (resources("slime_tis.analysis.report") / "page.css").read_text("utf-8")
    sections: list[str] = []
    for comparison in comparisons:
        # plotly.js is embedded once.
        sections.append(_section(comparison, with_plotly=not sections))
    page = PAGE.format(
        mark=MARK, style=style, subtitle=html.escape(checkpoint), sections="\n".join(sections)
    )
    write_atomically(path, page)


def _section(comparison: Comparison, *, with_plotly: bool) -> str:
    title = f"{comparison.reference.name} and {comparison.other.name}"
    verdict = f"<p>{html.escape(sentence(comparison))}</p>"
    if comparison.cause:
        verdict += f"<p>{html.escape(comparison.cause)}</p>"
    parts = [
        f"<section><h2>{html.escape(title)}</h2>",
        f'<div id="verdict">{verdict}</div>',
        f"<pre>{html.escape(chr(10).join(facts(comparison)))}</pre>",
    ]
    for index, figure in enumerate(_figures(comparison)):
        script = with_plotly and index == 0
        part = figure.to_html(
            full_html=False, include_plotlyjs=script, config={"displayModeBar": False}
        )
        parts.append(part)
    if comparison.operations:
        parts.append(_table(comparison.operations))
    parts.append("</section>")
    return "\n".join(parts)


def _figures(comparison: Comparison) -> list[go.Figure]:
    figures = []
    operations = comparison.operations
    if operations:
        relative = {row.operation: row.difference.relative for row in operations}
        figures.append(_heat_map("Difference, max |Δ| / max |reference|", operations, relative))
    own = {row.operation: row.own.relative for row in operations if row.own is not None}
    if own:
        figures.append(_heat_map("Own difference, with the reference's inputs", operations, own))
    figures.append(_log_probs(comparison))
    return figures


def _heat_map(
    title: str, operations: Sequence[OperationDifference], relative: dict[Any, float]
) -> go.Figure:
    """Operations (rows) by layers (columns); the color is log10 of the relative difference."""
    order = (EMBEDDING, *IN_A_LAYER, FINAL_NORM, HEAD)
    present = {row.operation.name for row in operations}
    names = [name for name in order if name in present]
    numbers = sorted({row.operation.layer for row in operations if row.operation.layer is not None})
    columns = [f"layer {number}" for number in numbers] or [""]
    colors: list[list[float | None]] = [[None] * len(columns) for _ in names]
    texts = [[""] * len(columns) for _ in names]
    for operation, value in relative.items():
        row = names.index(operation.name)
        column = 0 if operation.layer is None else numbers.index(operation.layer)
        # NaN and infinity have the color of the largest difference.
        exponent = 0.0
        if value == 0:
            exponent = LOWEST
        elif math.isfinite(value):
            exponent = min(max(math.log10(value), LOWEST), 0.0)
        colors[row][column] = exponent
        texts[row][column] = "equal" if value == 0 else f"{value:.2g}"
    heat_map = go.Heatmap(
        z=colors,
        x=columns,
        y=names,
        text=texts,
        texttemplate="%{text}" if len(columns) <= 8 else None,
        zmin=LOWEST,
        zmax=0.0,
        colorscale=[[0, "#3f8f5f"], [0.3, "#e8e2c8"], [1, COLORS[1]]],
        colorbar={"title": "log10"},
        hovertemplate="%{y} of %{x}: %{text}<extra></extra>",
    )
    figure = go.Figure(heat_map)
    figure.update_yaxes(autorange="reversed")
    return _styled(figure, title, height=160 + 22 * len(names))


def _log_probs(comparison: Comparison) -> go.Figure:
    """abs(Δ) against the position of the token."""
    reference = comparison.reference
    other = comparison.other
    positions = []
    sizes = []
    for token in (reference.is_scored_T & other.is_scored_T).nonzero().squeeze(1).tolist():
        size = float((reference.log_probs_T[token] - other.log_probs_T[token]).abs())
        _, position = comparison.samples.position_of(token)
        positions.append(position)
        # A logarithmic axis has no 0.
        sizes.append(size if size > 0 else None)
    points = go.Scatter(x=positions, y=sizes, mode="markers", marker={"color": COLORS[0]})
    figure = go.Figure(points)
    figure.update_xaxes(title="position in the sample, tokens")
    figure.update_yaxes(title="abs(Δ), nats", type="log", exponentformat="power")
    return _styled(figure, "Log-probs of tokens that differ", height=320)


def _styled(figure: go.Figure, title: str, *, height: int) -> go.Figure:
    # Transparent, with a grey that is readable on white and on black.
    figure.update_layout(
        title=title,
        height=height,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#808890"},
        margin={"l": 160, "r": 12, "t": 40, "b": 40},
    )
    return figure


def _table(operations: Sequence[OperationDifference]) -> str:
    cells = ["<tr>"]
    for name in COLUMNS:
        cells.append(f"<th>{html.escape(name)}</th>")
    cells.append("</tr>")
    for row in operations:
        cells.append("<tr>")
        _name, *values = row_cells(row)
        for value in (str(row.operation), *values):
            cells.append(f"<td>{html.escape(value)}</td>")
        cells.append("</tr>")
    return f'<div class="scroll"><table>{"".join(cells)}</table></div>'
