"""The page of a report: its data, and the HTML file that shows them."""

import base64
import html
import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs

from slime_tis.analysis.diagnosis.diagnose import OVERLAP, Diagnosis, certainty, diagnose
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.dumps.what_if import MAX_TOKENS, WhatIf, by_cosine, what_if
from slime_tis.analysis.report import mismatch_plots, overview, page_samples
from slime_tis.analysis.report.mismatch_plots import COLORS, Plot, axis, plain
from slime_tis.analysis.report.recommend import measured, recommendation, study
from slime_tis.analysis.report.report_inputs import Source
from slime_tis.errors import quoted_path

MARK = '<meta name="generator" content="slime-tis report">'
"""Marks a page of this program. A new report replaces only pages with this mark."""
MARK_WITHIN = 400
"""The mark lies within this number of bytes from the start of the page."""
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
COLUMNS = {
    "name": ("correction", None),
    "kept": ("kept", "share of trained tokens that the correction keeps"),
    "ess": ("ESS", "effective sample size of the kept tokens, (Σw)² / (n · Σw²)"),
    "weight_mean": ("mean weight", "mean weight after its bounds"),
    "weight_max": ("largest weight", "largest weight after its bounds"),
    "cosine": (
        "cosine",
        "cosine between the correction's gradient and the exact one; 1 is no bias",
    ),
    "norm_ratio": ("norm ratio", "norm of the correction's gradient divided by the exact one's"),
    "sequence_cosine": (
        "cosine, sequences",
        "cosine against the gradient with exact ratios of sequences",
    ),
    "flags": ("flags", None),
}
"""Title and meaning of the columns of the table in the page; those without a meaning are text."""
PICTURES = {
    "position_drift": "by-position",
    "other_prompt": "by-position",
    "stale_weights": "by-age",
    "worker": "by-worker",
    "temperature": "by-entropy",
    "rounding": "by-entropy",
    "weights_not_updated": "run-mismatch",
}
"""The plot that shows a cause; the density shows the others."""
ORDER = (
    "Rows are ordered by cosine, the closest to the exact gradient first. This order is no"
    " recommendation: the tokens of a dump cannot show which correction prevents a later collapse."
    " A report on one run has the recommended correction in its first section."
)
BATCHWISE = "batch normalisation, second-moment trimming, adaptive bounds"
"""Corrections that are applied to each step separately."""
MIN_PLOTTED = 1e-4
"""Smaller biases and losses are drawn at this value, because both axes are logarithmic."""


def page_data(
    sources: Sequence[Source],
    decode: page_samples.Decode | None = None,
    *,
    with_samples: bool = True,
) -> dict[str, Any]:
    """All data of the page as JSON values, except `samples`, which `page_samples.packed` converts."""
    first = sources[0]
    what_if_data = _what_if(first.table)
    shown = (
        None
        if first.table is None or not with_samples
        else page_samples.chosen_samples(first.table)
    )
    worst = [] if first.table is None else mismatch_plots.worst_tokens(first.table)
    texts = [""] * len(worst) if decode is None else decode([row["token"] for row in worst])
    omitted = ""
    if first.table is not None and shown is not None and len(shown) < len(first.table):
        omitted = (
            f"The page has {len(shown):,} of {len(first.table):,} samples: the worst, and random"
            " others."
        )
    has_metrics = any(source.metrics for source in sources)
    results = [diagnose(source.table, source.metrics) for source in sources]
    diagnoses = [
        _diagnosis(source, result) for source, result in zip(sources, results, strict=True)
    ]
    advice = None
    if len(sources) == 1 and first.table is not None and first.table.valid.any():
        advice = recommendation(measured(first.table, results[0]), study())
    drawn = [
        asdict(plot) for plot in (*overview.plots(overview.group_runs(sources)), *_shapes(sources))
    ]
    return {
        "title": (
            f"{len(sources)} runs"
            if len(sources) > 2
            else " and ".join(source.name for source in sources)
        ),
        "subtitle": [_subtitle(source) for source in sources],
        "verdict": _verdict(diagnoses[0]["findings"], drawn) if len(sources) == 1 else None,
        "diagnoses": diagnoses,
        "recommendation": advice,
        "overview": [plot for plot in drawn if plot["id"].startswith("run-")],
        "warnings": [
            {
                **warning,
                "name": (
                    warning["name"] if len(sources) == 1 else f"{source.name}: {warning['name']}"
                ),
            }
            for source in sources
            for warning in overview.warnings(source.metrics)
        ],
        "shape": [plot for plot in drawn if not plot["id"].startswith("run-")],
        "facts": [{"name": source.name, "facts": _facts(source.table)} for source in sources],
        "worst": [{**row, "text": text} for row, text in zip(worst, texts, strict=True)],
        "samples": None if shown is None else page_samples.payload(shown, decode),
        "what_if": what_if_data,
        "notes": {
            "overview": (
                "" if has_metrics else "A dump has no metrics. Give the run directory to see them."
            ),
            "shape": (
                " ".join(
                    dict.fromkeys(_sampled(source) or source.note for source in sources)
                ).strip()
            ),
            "samples": first.note or omitted,
            "what_if": first.note or what_if_data["note"],
        },
    }


def _diagnosis(source: Source, result: Diagnosis) -> dict[str, Any]:
    """The findings of a source, each with its confidence and share in words."""
    data = {"name": source.name, **result.as_json()}
    for shown, finding in zip(data["findings"], result.findings, strict=True):
        shown["certainty"] = certainty(finding, has_tokens=result.tokens > 0)
    data["note"] = OVERLAP if result.overlaps else ""
    return data


def _verdict(findings: Sequence[dict[str, Any]], plots: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first finding in a sentence, and the plot that shows it."""
    finding, *others = findings
    sentence = f"Likeliest cause: {finding['title']} (confidence {finding['confidence']:.0%})."
    if finding["cause"] == "healthy":
        sentence = "The engines agree."
    elif finding["cause"] == "not_measured":
        sentence = "The mismatch was not measured."
    elif finding["cause"] == "broken_metrics":
        sentence = "Metrics of the mismatch are not finite or impossible."
    elif finding["cause"] == "unexplained":
        candidates = ", ".join(dict.fromkeys(other["title"] for other in others))
        sentence = (
            f"The tokens do not show the cause{candidates and f'; candidates: {candidates}'}."
        )
    by_id = {plot["id"]: plot for plot in plots}
    picture = by_id.get(PICTURES.get(finding["cause"], "density")) or by_id.get("density")
    return {"sentence": sentence, "plot": picture and {**picture, "id": "verdict"}}


def _what_if(table: TokenTable | None) -> dict[str, Any]:
    """Rows, columns, plots and a note of the section; empty without tokens."""
    columns = [
        {"key": key, "title": title, "text": says is None, "says": says}
        for key, (title, says) in COLUMNS.items()
    ]
    empty: dict[str, Any] = {"rows": [], "columns": columns, "plots": [], "note": ""}
    if table is None or not table.valid.any():
        return empty
    try:
        results = by_cosine(what_if(table))
    except ValueError as error:
        return {**empty, "note": str(error)}
    rows = [{key: getattr(result, key) for key in COLUMNS} for result in results]
    plots = [asdict(plot) for plot in _pareto(results)]
    notes = [ORDER if plots else "The dump has no advantages, so gradients cannot be compared."]
    if table.tokens > MAX_TOKENS:
        notes.append(
            f"Computed on a random part of the samples with at most {MAX_TOKENS:,} tokens."
        )
    used = max(result.steps or 0 for result in results)
    steps = 1 if table.step is None else len(np.unique(table.step))
    if used < steps:
        notes.append(
            f"Whole-batch corrections ({BATCHWISE}) were computed on {used} of {steps:,} steps."
        )
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
        "marker": {
            "size": 9,
            "color": [COLORS[1] if good else COLORS[0] for good in best],
            "opacity": 0.8,
        },
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
    }
    layout = {
        "xaxis": axis("lost sample, 1 − kept · ESS", log=True),
        "yaxis": axis("bias, 1 − cosine", log=True),
    }
    says = (
        "Each point is a correction: the angle between its gradient and the exact one, and the"
        f" share of the effective sample it loses (both at least {MIN_PLOTTED:g}). No correction"
        " beats an orange point in both. Click a point for its flags."
    )
    return [
        Plot(
            id="pareto",
            title="Bias against variance",
            says=says,
            traces=[trace],
            layout=layout,
            wide=True,
        )
    ]


def _front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether no other point is at least as good in both and better in one."""
    return [not any(a <= x and b <= y and (a < x or b < y) for a, b in points) for x, y in points]


def render(data: dict[str, Any]) -> str:
    """The page as self-contained HTML."""
    shown = data["samples"]
    files = resources("slime_tis.analysis.report")
    parts = {
        "STYLE": (files / "page.css").read_text("utf-8"),
        "DATA": _json({name: value for name, value in data.items() if name != "samples"}),
        "SCRIPT": (files / "page.js").read_text("utf-8"),
        "TOKENS": "" if shown is None else _deflated(page_samples.packed(_finite(shown))),
        "SAMPLES": (files / "samples.js").read_text("utf-8"),
        "PLOTLY": _deflated(get_plotlyjs().encode()),
        "PLOTS": (files / "plots.js").read_text("utf-8"),
    }
    pieces = re.split(r"/\*([A-Z]+)\*/", (files / "page.html").read_text("utf-8"))
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def check_output(out: Path) -> None:
    """Checks that the path is free or a report."""
    if out.is_symlink() or out.exists():
        if not out.is_file():
            raise ValueError(f"--out {quoted_path(out)} is not a file; give a file name.")
        with open(out, "rb") as file:
            start = file.read(MARK_WITHIN)
        if MARK.encode() not in start:
            raise ValueError(
                f"--out {quoted_path(out)} exists and is not a report; remove it, or give another"
                " --out."
            )
    elif not out.parent.is_dir():
        raise ValueError(
            f"--out {quoted_path(out)} is in a directory that does not exist; create it first."
        )


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
    tables = [
        (html.escape(source.name), source.table) for source in sources if source.table is not None
    ]
    drawn: dict[str, Plot] = {}
    for index, (name, table) in enumerate(tables):
        for plot in mismatch_plots.plots(table, index, name if len(tables) > 1 else ""):
            if plot.id not in drawn:
                drawn[plot.id] = plot
            elif plot.id != "density":
                drawn[plot.id].traces.extend(plot.traces)
    return [plot for plot in drawn.values() if any(len(trace["x"]) > 1 for trace in plot.traces)]


def _facts(table: TokenTable | None) -> list[dict[str, str]]:
    numbers = {} if table is None else mismatch_plots.summary(table)
    shown = [
        key
        for key in FACTS
        if key in numbers and (numbers[key] or key != "tokens_without_log_prob")
    ]
    return [{"name": FACTS[key][0], "value": FACTS[key][1].format(numbers[key])} for key in shown]


def _subtitle(source: Source) -> str:
    """Path, optimizer steps (rows that are not only an evaluation) and tokens."""
    steps = 0
    for row in source.metrics:
        names = [name for name in row if name != "step"]
        is_evaluation = bool(names) and all(name.startswith("eval/") for name in names)
        steps += not is_evaluation
    parts = [f"{steps:,} steps"] if source.metrics else []
    if source.table is not None:
        parts.append(f"{source.table.tokens:,} tokens of {len(source.table):,} samples")
    return f"{source.path}: {', '.join(parts) or 'empty'}"


def _sampled(source: Source) -> str:
    size = None if source.table is None else source.table.metadata.get("sampled")
    return f"Computed on a random part of the dump's {size['samples']:,} samples." if size else ""
