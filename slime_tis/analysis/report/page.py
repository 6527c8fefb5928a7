"""The page of a report: its data, and the HTML file that shows them."""

from __future__ import annotations

import base64
import html
import json
import math
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
from slime_tis.analysis.report.groups import group_runs
from slime_tis.analysis.report.plots import Plot
from slime_tis.analysis.report.source import Source
from slime_tis.errors import quoted_path
from slime_tis.files import write_atomically

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
        "worst": [] if first.table is None else _with_text(shape.worst_tokens(first.table), decode),
        "samples": None if shown is None else samples.payload(shown, decode),
        "what_if": what_if,
        "notes": {
            "overview": "" if has_metrics else "A dump has no metrics. Give the run directory to see them.",
            "shape": " ".join(dict.fromkeys(_sampled(source.table) or source.note for source in sources)).strip(),
            "samples": first.note or _omitted(first.table, shown),
            "what_if": first.note or what_if["note"],
        },
    }


def render(data: dict[str, Any]) -> str:
    """The page as self-contained HTML."""
    shown = data["samples"]
    parts = {
        "STYLE": _resource("page.css"),
        "DATA": _json({name: value for name, value in data.items() if name != "samples"}),
        "SCRIPT": _resource("page.js"),
        "TOKENS": "" if shown is None else _deflated(samples.packed(_finite(shown))),
        "SAMPLES": _resource("samples.js"),
        "PLOTLY": _deflated(get_plotlyjs().encode()),
        "PLOTS": _resource("plots.js"),
    }
    page = _resource("page.html")
    pieces = []
    for name, part in parts.items():  # in the order of the page, so that no placeholder in the data is replaced
        before, page = page.split(f"/*{name}*/", 1)
        pieces += [before, part]
    return "".join([*pieces, page])


def check_output(path: str | Path) -> None:
    """Checks that a page can be written."""
    out = Path(path)
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
        raise _unwritable(out, error) from error


def write_page(path: str | Path, data: dict[str, Any]) -> None:
    """Writes the page atomically; replaces an earlier report."""
    check_output(path)
    page = render(data)
    try:
        write_atomically(path, page)
    except OSError as error:
        raise _unwritable(Path(path), error) from error


def _unwritable(out: Path, error: OSError) -> ValueError:
    return ValueError(f"--out {quoted_path(out)} cannot be written: {error.strerror or error}; give another --out.")


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


def _resource(name: str) -> str:
    return resources("slime_tis.analysis.report").joinpath(name).read_text(encoding="utf-8")


def _shapes(sources: Sequence[Source]) -> list[Plot]:
    """Plots of the first table, with the lines of the other tables added."""
    tables = [(html.escape(source.name), source.table) for source in sources if source.table is not None]
    if len(tables) < 2:
        return _with_lines(shape.plots(tables[0][1])) if tables else []
    drawn: dict[str, Plot] = {}
    for index, (name, table) in enumerate(tables):
        for plot in shape.plots(table, index, name):
            if plot.id not in drawn:
                drawn[plot.id] = plot
            elif plot.id != "density":
                drawn[plot.id].traces.extend(plot.traces)
    return _with_lines(list(drawn.values()))


def _with_lines(drawn: list[Plot]) -> list[Plot]:
    """The plots that have a line of more than one point."""
    return [plot for plot in drawn if any(len(trace["x"]) > 1 for trace in plot.traces)]


def _facts(table: TokenTable | None) -> list[dict[str, str]]:
    numbers = {} if table is None else shape.summary(table)
    optional = ("tokens_without_log_prob",)
    shown = [key for key in FACTS if key in numbers and (numbers[key] or key not in optional)]
    return [{"name": FACTS[key][0], "value": FACTS[key][1].format(numbers[key])} for key in shown]


def _with_text(worst: list[dict[str, Any]], decode: samples.Decode | None) -> list[dict[str, Any]]:
    texts = [""] * len(worst) if decode is None else decode([row["token"] for row in worst])
    return [{**row, "text": text} for row, text in zip(worst, texts, strict=True)]


def _subtitle(source: Source) -> str:
    """Path, optimizer steps (rows with more than an evaluation) and tokens."""
    steps = sum(any(not name.startswith(("eval/", "step")) for name in row) for row in source.metrics)
    parts = [f"{steps:,} steps"] if source.metrics else []
    if source.table is not None:
        parts.append(f"{source.table.tokens:,} tokens of {len(source.table):,} samples")
    return f"{source.path}: {', '.join(parts) or 'empty'}"


def _sampled(table: TokenTable | None) -> str:
    size = None if table is None else table.metadata.get("sampled")
    if table is None or not size:
        return ""
    return f"Computed on a random part of the dump: {len(table):,} of {size['samples']:,} samples."


def _omitted(table: TokenTable | None, shown: TokenTable | None) -> str:
    if table is None or shown is None or len(shown) == len(table):
        return ""
    return f"The page has {len(shown):,} of {len(table):,} samples: the worst samples, and a random part of the others."
