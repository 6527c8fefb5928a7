"""The page of a report: its data as JSON values, and its HTML file."""

import base64
import html
import json
import math
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs

from slime_tis.analysis.diagnosis.diagnose import Diagnosis, diagnose
from slime_tis.analysis.diagnosis.diagnosis_text import OVERLAP, certainty
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.dumps.what_if import MAX_TOKENS, WhatIf, by_cosine, what_if
from slime_tis.analysis.report import mismatch_plots, overview, page_samples
from slime_tis.analysis.report.comparison_study import study
from slime_tis.analysis.report.mismatch_plots import COLORS, Plot, axis, plain
from slime_tis.analysis.report.recommend import measured, recommendation
from slime_tis.analysis.report.report_inputs import Source
from slime_tis.errors import quoted_path

MARK = '<meta name="generator" content="slime-tis report">'
"""First tag of a report. A new report only overwrites pages with this tag."""
MARK_WITHIN = 400
"""Bytes at the start of a page that are searched for MARK."""
FACTS = {
    "trained_tokens": ("trained tokens", "{:,}"),
    "samples": ("samples", "{:,}"),
    "mean_abs_log_ratio": ("mean abs(Δ), nats", "{:.3g}"),
    "p99_abs_log_ratio": ("99% quantile, nats", "{:.3g}"),
    "max_abs_log_ratio": ("largest, nats", "{:.3g}"),
    "k3": ("k3, nats per token", "{:.3g}"),
    "tokens_without_log_prob": ("without a log-prob", "{:,}"),
}
"""Numbers above the mismatch plots: label and format."""
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
"""Columns of the what-if table: title and tooltip. Those without a tooltip are text."""
PICTURES = {
    "position_drift": "by-position",
    "other_prompt": "by-position",
    "stale_weights": "by-age",
    "worker": "by-worker",
    "temperature": "by-entropy",
    "rounding": "by-entropy",
    "weights_not_updated": "run-mismatch",
}
"""Id of the plot that shows a cause. The density plot shows all other causes."""
ORDER = (
    "Rows are ordered by cosine, the closest to the exact gradient first. This order is no"
    " recommendation: the tokens of a dump cannot show which correction prevents a later collapse."
    " A report on one run has the recommended correction in its first section."
)
BATCHWISE = "batch normalisation, second-moment trimming, adaptive bounds"
"""Corrections that need statistics of a complete batch, so they run on one step at a time."""
MIN_PLOTTED = 1e-4
"""Smallest plotted bias and loss. Both axes are logarithmic, so 0 cannot be drawn."""


def page_data(
    sources: Sequence[Source],
    decode: page_samples.Decode | None = None,
    *,
    with_samples: bool = True,
) -> dict[str, Any]:
    """Returns the data of the page.

    All entries are JSON values, except arrays in `samples`: `page_samples.packed` converts them.

    Args:
        sources: Runs or dumps. Tables of samples and corrections show the first one.
        decode: Function from token ids to texts. Without it, the page shows no token texts.
        with_samples: Whether the page shows samples.
    """
    first = sources[0]
    results = [diagnose(source.table, source.metrics) for source in sources]
    diagnoses = []
    for source, result in zip(sources, results, strict=True):
        diagnoses.append(_diagnosis(source, result))
    run_plots = [asdict(plot) for plot in overview.plots(overview.group_runs(sources))]
    mismatch = [asdict(plot) for plot in _mismatch_plots(sources)]
    verdict = None
    advice = None
    if len(sources) == 1:
        verdict = _verdict(diagnoses[0]["findings"], [*run_plots, *mismatch])
        if first.table is not None and first.table.valid.any():
            size_and_cause = measured(first.table, results[0], first.options)
            advice = recommendation(size_and_cause, study())

    samples = None
    omitted = ""
    if first.table is not None and with_samples:
        shown = page_samples.chosen_samples(first.table)
        samples = page_samples.payload(shown, decode)
        if len(shown) < len(first.table):
            omitted = (
                f"The page has {len(shown):,} of {len(first.table):,} samples: the worst, and"
                " random others."
            )
    what_if_data = _what_if(first.table)
    metrics_note = "A dump has no metrics. Give the run directory to see them."
    if any(source.metrics for source in sources):
        metrics_note = ""
    return {
        "title": _title(sources),
        "subtitle": [_subtitle(source) for source in sources],
        "verdict": verdict,
        "diagnoses": diagnoses,
        "recommendation": advice,
        "overview": run_plots,
        "warnings": _warnings(sources),
        "shape": mismatch,
        "facts": [{"name": source.name, "facts": _facts(source.table)} for source in sources],
        "worst": _worst_tokens(first.table, decode),
        "samples": samples,
        "what_if": what_if_data,
        "notes": {
            "overview": metrics_note,
            "shape": _mismatch_note(sources),
            "samples": first.note or omitted,
            "what_if": first.note or what_if_data["note"],
        },
    }


def _title(sources: Sequence[Source]) -> str:
    """The names of one or two sources, or their number."""
    if len(sources) > 2:
        return f"{len(sources)} runs"
    return " and ".join(source.name for source in sources)


def _warnings(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Health warnings of all runs; the names of several runs precede their warnings."""
    listed = []
    for source in sources:
        for warning in overview.warnings(source.metrics):
            if len(sources) > 1:
                warning["name"] = f"{source.name}: {warning['name']}"
            listed.append(warning)
    return listed


def _worst_tokens(
    table: TokenTable | None, decode: page_samples.Decode | None
) -> list[dict[str, Any]]:
    """The token ids with the largest mismatch, with their texts."""
    if table is None:
        return []
    rows = mismatch_plots.worst_tokens(table)
    texts = [""] * len(rows)
    if decode is not None:
        texts = decode([row["token"] for row in rows])
    for row, text in zip(rows, texts, strict=True):
        row["text"] = text
    return rows


def _diagnosis(source: Source, result: Diagnosis) -> dict[str, Any]:
    """The findings of a source, each with its confidence and share in words."""
    data = {"name": source.name, **result.as_json()}
    for row, finding in zip(data["findings"], result.findings, strict=True):
        row["certainty"] = certainty(finding, has_tokens=result.tokens > 0)
    notes = []
    if result.concentration:
        notes.append(f"Which samples? {result.concentration}.")
    if result.overlaps:
        notes.append(OVERLAP)
    data["note"] = " ".join(notes)
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
        sentence = "The tokens do not show the cause."
        candidates = list(dict.fromkeys(other["title"] for other in others))
        if candidates:
            sentence = f"The tokens do not show the cause; candidates: {', '.join(candidates)}."
    by_id = {plot["id"]: plot for plot in plots}
    name = PICTURES.get(finding["cause"], "density")
    plot = by_id.get(name, by_id.get("density"))
    if plot is not None:
        # The same plot appears again in its section, and ids in a page must differ.
        plot = {**plot, "id": "verdict"}
    return {"sentence": sentence, "plot": plot}


def _what_if(table: TokenTable | None) -> dict[str, Any]:
    """Rows, columns, plots and note of the what-if section; no rows without tokens."""
    columns = []
    for key, (title, meaning) in COLUMNS.items():
        columns.append({"key": key, "title": title, "text": meaning is None, "says": meaning})
    section: dict[str, Any] = {"rows": [], "columns": columns, "plots": [], "note": ""}
    if table is None or not table.valid.any():
        return section
    try:
        results = by_cosine(what_if(table))
    except ValueError as error:
        section["note"] = str(error)
        return section
    for result in results:
        section["rows"].append({key: getattr(result, key) for key in COLUMNS})
    section["plots"] = [asdict(plot) for plot in _pareto(results)]
    notes = [ORDER]
    if not section["plots"]:
        notes = ["The dump has no advantages, so gradients cannot be compared."]
    if table.tokens > MAX_TOKENS:
        notes.append(
            f"Computed on a random part of the samples with at most {MAX_TOKENS:,} tokens."
        )
    used_steps = max(result.steps or 0 for result in results)
    steps = 1
    if table.step is not None:
        steps = len(np.unique(table.step))
    if used_steps < steps:
        notes.append(
            f"Whole-batch corrections ({BATCHWISE}) were computed on {used_steps} of {steps:,}"
            " steps."
        )
    section["note"] = " ".join(notes)
    return section


def _pareto(results: Sequence[WhatIf]) -> list[Plot]:
    """Bias, 1 − cosine, against variance, the lost share of the effective sample.

    No plot if no correction has a cosine.
    """
    rows: list[int] = []
    points: list[tuple[float, float]] = []
    for row, result in enumerate(results):
        if result.cosine is not None:
            rows.append(row)
            points.append((1 - result.cosine, 1 - result.kept * result.ess))
    if not points:
        return []
    labels = []
    for row, (bias, loss) in zip(rows, points, strict=True):
        # Rounding may give a cosine slightly above 1.
        labels.append(f"{results[row].name}<br>bias {max(bias, 0.0):.3g}, lost sample {loss:.3g}")
    colors = []
    for is_best in _front(points):
        color = COLORS[0]
        if is_best:
            color = COLORS[1]
        colors.append(color)
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": plain([max(loss, MIN_PLOTTED) for _, loss in points]),
        "y": plain([max(bias, MIN_PLOTTED) for bias, _ in points]),
        "text": labels,
        "customdata": rows,
        "marker": {"size": 9, "color": colors, "opacity": 0.8},
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
    """Whether no other point is at least as good in both values and better in one."""
    is_best = []
    for x, y in points:
        is_best.append(not any(a <= x and b <= y and (a < x or b < y) for a, b in points))
    return is_best


def render(data: dict[str, Any]) -> str:
    """Returns the page as self-contained HTML."""
    samples = data["samples"]
    tokens = ""
    if samples is not None:
        tokens = _deflated(page_samples.packed(_finite(samples)))
    files = resources("slime_tis.analysis.report")
    parts = {
        "STYLE": (files / "page.css").read_text("utf-8"),
        "DATA": _json({name: value for name, value in data.items() if name != "samples"}),
        "SCRIPT": (files / "page.js").read_text("utf-8"),
        "TOKENS": tokens,
        "SAMPLES": (files / "samples.js").read_text("utf-8"),
        "PLOTLY": _deflated(get_plotlyjs().encode()),
        "PLOTS": (files / "plots.js").read_text("utf-8"),
    }
    template = (files / "page.html").read_text("utf-8")
    # A function, because re would read backslashes in the data as escapes of a template.
    return re.sub(r"/\*([A-Z]+)\*/", lambda mark: parts[mark[1]], template)


def check_output(out: Path) -> None:
    """Checks that the path is free or holds a report.

    Raises:
        ValueError: the path is another file or a directory, or its directory does not exist or
            cannot be written.
    """
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
    # A new file replaces an earlier report, so the permission of the directory counts.
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"--out {quoted_path(out)} is in a directory that cannot be written; give another"
            " --out."
        )


def _deflated(content: bytes) -> str:
    """Compresses data with zlib and encodes it as base64; page.js inflates it."""
    return base64.b64encode(zlib.compress(content)).decode()


def _json(data: Any) -> str:
    """JSON that cannot end its HTML element."""
    text = json.dumps(_finite(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    """Returns a value with None for numbers that JSON does not have."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _mismatch_plots(sources: Sequence[Source]) -> list[Plot]:
    """Mismatch plots; each has the lines of all tables.

    A plot of a single point is left out.
    """
    tables = [source for source in sources if source.table is not None]
    drawn: dict[str, Plot] = {}
    for color, source in enumerate(tables):
        assert source.table is not None
        prefix = ""
        if len(tables) > 1:
            # plotly reads names of series as HTML.
            prefix = html.escape(source.name)
        for plot in mismatch_plots.plots(source.table, color, prefix):
            if plot.id not in drawn:
                drawn[plot.id] = plot
            elif plot.id != "density":  # two heatmaps would cover each other
                drawn[plot.id].traces.extend(plot.traces)
    return [plot for plot in drawn.values() if any(len(trace["x"]) > 1 for trace in plot.traces)]


def _mismatch_note(sources: Sequence[Source]) -> str:
    """For each source, whether its tokens are a random part, or else which data are missing."""
    notes: list[str] = []
    for source in sources:
        note = source.note
        size = None
        if source.table is not None:
            size = source.table.metadata.get("sampled")
        if size:
            note = f"Computed on a random part of the dump's {size['samples']:,} samples."
        if note and note not in notes:
            notes.append(note)
    return " ".join(notes)


def _facts(table: TokenTable | None) -> list[dict[str, str]]:
    """The numbers above the mismatch plots."""
    if table is None:
        return []
    numbers = mismatch_plots.summary(table)
    facts = []
    for key, (label, number_format) in FACTS.items():
        if key not in numbers:  # no valid token
            continue
        if key == "tokens_without_log_prob" and not numbers[key]:
            continue
        facts.append({"name": label, "value": number_format.format(numbers[key])})
    return facts


def _subtitle(source: Source) -> str:
    """Path, number of optimizer steps and number of tokens."""
    parts = []
    if source.metrics:
        steps = 0
        for row in source.metrics:
            names = [name for name in row if name != "step"]
            is_evaluation = bool(names) and all(name.startswith("eval/") for name in names)
            if not is_evaluation:
                steps += 1
        parts.append(f"{steps:,} steps")
    if source.table is not None:
        parts.append(f"{source.table.tokens:,} tokens of {len(source.table):,} samples")
    return f"{source.path}: {', '.join(parts) or 'empty'}"
