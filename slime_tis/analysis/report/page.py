"""The page: what is in it as plain data, and the one HTML file that shows it."""

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
"""What a page of this program has in its first lines, by which it may replace it."""
MARK_WITHIN = 400
"""Bytes from the start in which the mark is."""


def page_data(
    sources: Sequence[Source], decode: samples.Decode | None = None, *, with_samples: bool = True
) -> dict[str, Any]:
    """Everything that the page shows, as JSON takes it, but for `samples`, which `samples.packed` takes.

    Args:
        sources: One run or dump, or two that are compared: samples, worst tokens and what-if are those of the first.
        decode: Texts of token ids; None shows the ids.
        with_samples: Whether the samples are part of it.
    """
    first = sources[0]
    whatever = what_if_rows.section(first.table)
    shown = None if first.table is None or not with_samples else samples.chosen_samples(first.table)
    return {
        "title": f"{len(sources)} runs" if len(sources) > 2 else " and ".join(source.name for source in sources),
        "subtitle": _subtitle(sources),
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
        "what_if": whatever,
        "notes": {
            "overview": ""
            if any(source.metrics for source in sources)
            else "A dump has no metrics. Give the run directory to see them.",
            "shape": " ".join(dict.fromkeys(_sampled(source.table) or source.note for source in sources)).strip(),
            "samples": first.note or _left_out(first.table, shown),
            "what_if": first.note or whatever["note"],
        },
    }


def render(data: dict[str, Any]) -> str:
    """The page as HTML, without a reference to anything outside of it."""
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
    for name, part in parts.items():  # as they come in the page; each is looked for after the last
        before, page = page.split(f"/*{name}*/", 1)
        pieces += [before, part]
    return "".join([*pieces, page])


def check_output(path: str | Path) -> None:
    """Checks that a page can be written.

    Raises:
        ValueError: There is something there that is not a page of this program, or it cannot be written.
    """
    place = Path(path)
    if place.is_symlink() or place.exists():
        if not place.is_file():
            raise ValueError(f"--out {quoted_path(place)} is not a file; give the name of one.")
        with open(place, "rb") as file:
            start = file.read(MARK_WITHIN)
        if MARK.encode() not in start:
            raise ValueError(
                f"--out {quoted_path(place)} exists and is not a report; remove it, or give another --out."
            )
    elif not place.parent.is_dir():
        raise ValueError(f"--out {quoted_path(place)} is in a directory that does not exist; make it, or give another.")
    try:
        with TemporaryFile(dir=place.parent):  # permissions alone do not say it: /sys, a read-only mount
            pass
    except OSError as error:
        raise _unwritten(place, error) from error


def write_page(path: str | Path, data: dict[str, Any]) -> None:
    """Writes the page, whole or not at all, in the place of nothing or of an earlier one.

    Raises:
        ValueError: as `check_output`, or writing failed.
    """
    check_output(path)
    page = render(data)
    try:
        write_atomically(path, page)
    except OSError as error:
        raise _unwritten(Path(path), error) from error


def _unwritten(place: Path, error: OSError) -> ValueError:
    return ValueError(f"--out {quoted_path(place)} cannot be written: {error.strerror or error}; give another --out.")


def _deflated(content: bytes) -> str:
    """Base64 of zlib data, which page.js inflates."""
    return base64.b64encode(zlib.compress(content)).decode()


def _json(data: Any) -> str:
    """JSON that no parser of HTML takes for the end of its element."""
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
    facts: list[tuple[str, str]] = []
    if table is not None:
        numbers = shape.summary(table)
        facts += [("trained tokens", f"{numbers['trained_tokens']:,}"), ("samples", f"{numbers['samples']:,}")]
        for key, label in (
            ("mean_abs_log_ratio", "mean abs(Δ), nats"),
            ("p99_abs_log_ratio", "99% quantile, nats"),
            ("max_abs_log_ratio", "largest, nats"),
            ("k3", "k3, nats per token"),
        ):
            if key in numbers:
                facts.append((label, f"{numbers[key]:.3g}"))
        if numbers["tokens_without_log_prob"]:
            facts.append(("without a log-prob", f"{numbers['tokens_without_log_prob']:,}"))
    return [{"name": name, "value": value} for name, value in facts]


def _with_text(worst: list[dict[str, Any]], decode: samples.Decode | None) -> list[dict[str, Any]]:
    texts = [""] * len(worst) if decode is None else decode([row["token"] for row in worst])
    return [{**row, "text": text} for row, text in zip(worst, texts, strict=True)]


def _subtitle(sources: Sequence[Source]) -> list[str]:
    parts = []
    for source in sources:
        found = [f"{_steps(source):,} steps"] if source.metrics else []
        if source.table is not None:
            found.append(f"{source.table.tokens:,} tokens of {len(source.table):,} samples")
        parts.append(f"{source.path}: {', '.join(found) or 'nothing'}")
    return parts


def _steps(source: Source) -> int:
    """Optimizer steps that the metrics are of: rows that have more than an evaluation."""
    return sum(any(not name.startswith(("eval/", "step")) for name in row) for row in source.metrics)


def _sampled(table: TokenTable | None) -> str:
    whole = None if table is None else table.metadata.get("sampled")
    if table is None or not whole:
        return ""
    return f"Computed on a random part of the dump: {len(table):,} of {whole['samples']:,} samples."


def _left_out(table: TokenTable | None, shown: TokenTable | None) -> str:
    if table is None or shown is None or len(shown) == len(table):
        return ""
    return f"The page has {len(shown):,} of {len(table):,} samples: the worst samples, and a random part of the others."
