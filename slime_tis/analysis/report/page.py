"""The page of a report: its data, and the HTML file that shows them."""

from __future__ import annotations

import base64
import html
import json
import math
import re
import zlib
from collections.abc import Sequence
from importlib.resources import files as resources
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from plotly.offline import get_plotlyjs

from slime_tis.analysis.diagnosis import diagnose
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.report import overview, samples, shape, what_if_rows
from slime_tis.analysis.report.overview import group_runs
from slime_tis.analysis.report.plots import Plot
from slime_tis.analysis.report.source import Source
from slime_tis.errors import quoted_path

MARK = '<meta name="generator" content="slime-tis report">'
"""Marks a page of this program, which another report may replace."""
MARK_WITHIN = 400
"""The mark is within this number of bytes from the start."""
FACTS = {
    "trained_tokens": ("trained tokens", "{:,}"),
    "samples": ("samples", "{:,}"),
    "mean_abs_log_ratio": ("mean abs(Δ), nats", "{:.3g}"),
    "p99_abs_log_ratio": ("99% quantile, nats", "{:.3g}"),
    "max_abs_log_ratio": ("largest, nats", "{:.3g}"),
    "k3": ("k3, nats per token", "{:.3g}"),
    "tokens_without_log_prob": ("without a log-prob", "{:,}"),
}
"""Label and format of the numbers above the plots of the mismatch."""


def page_data(
    sources: Sequence[Source], decode: samples.Decode | None = None, *, with_samples: bool = True
) -> dict[str, Any]:
    """All data of the page as JSON values, except `samples`, which `samples.packed` converts."""
    first = sources[0]
    what_if = what_if_rows.section(first.table)
    shown = None if first.table is None or not with_samples else samples.chosen_samples(first.table)
    worst = [] if first.table is None else shape.worst_tokens(first.table)
    texts = [""] * len(worst) if decode is None else decode([row["token"] for row in worst])
    omitted = ""
    if first.table is not None and shown is not None and len(shown) < len(first.table):
        omitted = f"The page has {len(shown):,} of {len(first.table):,} samples: the worst, and random others."
    has_metrics = any(source.metrics for source in sources)
    return {
        "title": f"{len(sources)} runs" if len(sources) > 2 else " and ".join(source.name for source in sources),
        "subtitle": [_subtitle(source) for source in sources],
        "diagnoses": [{"name": source.name, **diagnose(source.table, source.metrics).as_json()} for source in sources],
        "overview": [plot.as_json() for plot in overview.plots(group_runs(sources))],
        "warnings": [
            {**warning, "name": warning["name"] if len(sources) == 1 else f"{source.name}: {warning['name']}"}
            for source in sources
            for warning in overview.warnings(source.metrics)
        ],
        "shape": [plot.as_json() for plot in _shapes(sources)],
        "facts": [{"name": source.name, "facts": _facts(source.table)} for source in sources],
        "worst": [{**row, "text": text} for row, text in zip(worst, texts, strict=True)],
        "samples": None if shown is None else samples.payload(shown, decode),
        "what_if": what_if,
        "notes": {
            "overview": "" if has_metrics else "A dump has no metrics. Give the run directory to see them.",
            "shape": " ".join(dict.fromkeys(_sampled(source) or source.note for source in sources)).strip(),
            "samples": first.note or omitted,
            "what_if": first.note or what_if["note"],
        },
    }


def render(data: dict[str, Any]) -> str:
    """The page as self-contained HTML."""
    shown = data["samples"]
    files = {
        path.name: path.read_text(encoding="utf-8")
        for path in resources("slime_tis.analysis.report").iterdir()
        if path.name.endswith((".css", ".html", ".js"))
    }
    parts = {
        "STYLE": files["page.css"],
        "DATA": _json({name: value for name, value in data.items() if name != "samples"}),
        "SCRIPT": files["page.js"],
        "TOKENS": "" if shown is None else _deflated(samples.packed(_finite(shown))),
        "SAMPLES": files["samples.js"],
        "PLOTLY": _deflated(get_plotlyjs().encode()),
        "PLOTS": files["plots.js"],
    }
    pieces = re.split(r"/\*([A-Z]+)\*/", files["page.html"])
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def check_output(out: Path) -> None:
    """Checks that a page can be written: the path is free or a report."""
    if out.is_symlink() or out.exists():
        if not out.is_file():
            raise ValueError(f"--out {quoted_path(out)} is not a file; give a file name.")
        with open(out, "rb") as file:
            start = file.read(MARK_WITHIN)
        if MARK.encode() not in start:
            raise ValueError(f"--out {quoted_path(out)} exists and is not a report; remove it, or give another --out.")
    elif not out.parent.is_dir():
        raise ValueError(f"--out {quoted_path(out)} is in a directory that does not exist; create it first.")
    try:
        with TemporaryFile(dir=out.parent):  # permissions do not show /sys or a read-only mount
            pass
    except OSError as error:
        problem = error.strerror or error
        raise ValueError(f"--out {quoted_path(out)} cannot be written: {problem}; give another --out.") from error


def _deflated(content: bytes) -> str:
    """Base64 of zlib data, which page.js inflates."""
    return base64.b64encode(zlib.compress(content)).decode()


def _json(data: Any) -> str:
    """JSON that cannot end its HTML element."""
    text = json.dumps(_finite(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _shapes(sources: Sequence[Source]) -> list[Plot]:
    """Plots of the first table, with the lines of the other tables added; without plots of single points."""
    tables = [(html.escape(source.name), source.table) for source in sources if source.table is not None]
    drawn: dict[str, Plot] = {}
    for index, (name, table) in enumerate(tables):
        for plot in shape.plots(table, index, name if len(tables) > 1 else ""):
            if plot.id not in drawn:
                drawn[plot.id] = plot
            elif plot.id != "density":
                drawn[plot.id].traces.extend(plot.traces)
    return [plot for plot in drawn.values() if any(len(trace["x"]) > 1 for trace in plot.traces)]


def _facts(table: TokenTable | None) -> list[dict[str, str]]:
    numbers = {} if table is None else shape.summary(table)
    shown = [key for key in FACTS if key in numbers and (numbers[key] or key != "tokens_without_log_prob")]
    return [{"name": FACTS[key][0], "value": FACTS[key][1].format(numbers[key])} for key in shown]


def _subtitle(source: Source) -> str:
    """Path, optimizer steps (rows with more than an evaluation) and tokens."""
    steps = sum(any(not name.startswith(("eval/", "step")) for name in row) for row in source.metrics)
    parts = [f"{steps:,} steps"] if source.metrics else []
    if source.table is not None:
        parts.append(f"{source.table.tokens:,} tokens of {len(source.table):,} samples")
    return f"{source.path}: {', '.join(parts) or 'empty'}"


def _sampled(source: Source) -> str:
    size = None if source.table is None else source.table.metadata.get("sampled")
    return f"Computed on a random part of the dump's {size['samples']:,} samples." if size else ""
