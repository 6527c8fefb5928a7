"""The overview of runs from their metrics.jsonl: plots of runs and of groups of seeds, and health warnings."""

import html
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from slime_tis.analysis.report.mismatch_plots import COLORS, Plot, axis, line
from slime_tis.analysis.report.report_inputs import Source
from slime_tis.errors import one_line
from slime_tis.health import METRIC_PREFIXES, STEP_RULES, Rows, evaluate

Points = tuple[list[int], list[float], list[float], list[float]]
"""Steps, and the median, lowest and highest value over the runs of a group."""
PER_RUN_OPTIONS = (
    *("seed", "rollout_seed", "output_dir", "save", "load", "save_hf", "wandb_dir", "wandb_group"),
    *(
        "dump_details",
        "save_debug_rollout_data",
        "save_debug_train_data",
        "sglang_log_dir",
        "sglang_weight_dir",
    ),
    "tb_experiment_name",
)
"""Options that differ between runs of one configuration."""
DASHES = ("solid", "dash", "dot", "dashdot")
MAX_POINTS = 2_000
"""Points of a line. A longer line keeps the smallest and the largest point of each of MAX_POINTS/2
stretches."""
MAX_WARNINGS = 200
"""Listed warnings of a run, the earliest ones."""
LOG_PANELS = ("mismatch",)
"""Panels with a logarithmic axis."""
PANELS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    (
        "reward",
        "Reward and held-out accuracy",
        "Whether the run learns, and whether it generalizes to held-out prompts.",
        {"rollout/raw_reward": "rollout reward", "eval/": "held-out"},
    ),
    (
        "mismatch",
        "Mismatch per token",
        (
            "k3 estimates the KL divergence between the engines in nats, χ² the second moment of"
            " the weights."
        ),
        {
            "*mismatch_k3_kl": "k3",
            "*mismatch_chi2_token": "χ²",
            "*train_rollout_logprob_abs_diff": "mean abs(Δ)",
        },
    ),
    (
        "perplexity",
        "Perplexity ratio",
        (
            "Perplexity of the samples in training divided by perplexity in the rollout engine. 1"
            " means equal."
        ),
        {"*mismatch_ppl_ratio": "ratio"},
    ),
    (
        "ess",
        "Effective sample size and weights",
        (
            "Share of the batch that carries the gradient, and the mean importance weight before"
            " and after its bounds."
        ),
        {
            "*mis_eff_sample_size": "effective sample size",
            "*mis_mean_is_weight_before_clip": "mean weight",
            "*mis_ratio_mean_after_mis": "mean bounded weight",
        },
    ),
    (
        "rejections",
        "Rejections",
        "Share of tokens or sequences that the correction removed from the loss.",
        {
            "*mis_rs_masked_fraction": "tokens rejected",
            "*mis_catastrophic_seq_fraction": "sequences vetoed",
            "*mis_mask_fraction_high": "weights masked",
        },
    ),
    (
        "gradient",
        "Gradient norm",
        "A spike often precedes a collapse, together with a spike of χ².",
        {"train/grad_norm": "gradient norm"},
    ),
    (
        "staleness",
        "Weight age",
        "Mean number of optimizer steps between the sampling weights and the trained weights.",
        {"rollout/weight_staleness": "weight age"},
    ),
    (
        "entropy",
        "Entropy",
        "Entropy of the policy in nats. Near zero, the policy repeats the same answers.",
        {"train/entropy_loss": "entropy"},
    ),
)
"""Panels: id, title, description, metrics with labels. A * stands for any of METRIC_PREFIXES, and a
name that ends in / for all metrics directly below it."""


class Group(NamedTuple):
    """Runs that differ only in `PER_RUN_OPTIONS`; the name of several has the options that differ between groups."""

    name: str
    sources: list[Source]


def configuration(source: Source) -> dict[str, Any]:
    """The options of a run, without `PER_RUN_OPTIONS`."""
    return {
        str(name): value for name, value in source.options.items() if name not in PER_RUN_OPTIONS
    }


def group_runs(sources: Sequence[Source]) -> list[Group]:
    """Groups sources by their configuration, in order. A source without a configuration forms a separate group."""
    groups: dict[str, tuple[dict[str, Any], list[Source]]] = {}
    for index, source in enumerate(sources):
        options = configuration(source)
        key = str(sorted(map(repr, options.items())) or index)
        groups.setdefault(key, (options, []))[1].append(source)
    configs = [options for options, _ in groups.values()]
    differing = {
        name
        for each in configs
        for name in each
        if any(each[name] != other.get(name) for other in configs)
    }
    named = []
    for options, members in groups.values():
        text = ", ".join(f"{name}={value}" for name, value in options.items() if name in differing)
        several = f"{one_line(text or members[0].name, 60)} ({len(members)} runs)"
        named.append(Group(members[0].name if len(members) == 1 else several, members))
    return named


def spread(curves: Sequence[Mapping[int, float]]) -> Points:
    """Steps that all curves have, and at each step the median, the lowest and the highest value."""
    steps = sorted(set.intersection(*map(set, curves)))
    columns = [[curve[step] for curve in curves] for step in steps]
    return (
        steps,
        list(map(statistics.median, columns)),
        list(map(min, columns)),
        list(map(max, columns)),
    )


def plots(groups: Sequence[Group]) -> list[Plot]:
    """One plot for each panel with logged metrics.

    A single group has one color per metric. Several groups have one color each, and one line style
    per metric. The line of a group is the median of its runs, and a band shows their range.
    """
    drawn = []
    for key, title, says, names in PANELS:
        traces = []
        labels: dict[str, int] = {}
        for index, group in enumerate(groups):
            curves = [
                _curves(source.metrics, names, positive=key in LOG_PANELS)
                for source in group.sources
            ]
            for label in dict.fromkeys(label for curve in curves for label in curve):
                rank = labels.setdefault(label, len(labels))
                points = spread([curve[label] for curve in curves if label in curve])
                if not points[0]:
                    continue
                name = (
                    html.escape(f"{group.name}: {label}") if len(groups) > 1 else html.escape(label)
                )
                color, dash = (
                    (index, DASHES[rank % len(DASHES)]) if len(groups) > 1 else (rank, "solid")
                )
                traces += _median_and_range(
                    _thinned(points), name, color, dash, with_range=len(curves) > 1
                )
        if not traces:
            continue
        layout: dict[str, Any] = {"xaxis": axis("step"), "yaxis": axis("", log=key in LOG_PANELS)}
        if len(groups) == len(groups[0].sources) == 1:
            starts = sorted({warning["step"] for warning in warnings(groups[0].sources[0].metrics)})
            vertical = {"type": "line", "y0": 0, "y1": 1, "yref": "paper", "opacity": 0.7}
            vertical["line"] = {"color": COLORS[1], "width": 1, "dash": "dot"}
            layout["shapes"] = [{**vertical, "x0": step, "x1": step} for step in starts]
        drawn.append(Plot(id=f"run-{key}", title=title, says=says, traces=traces, layout=layout))
    return drawn


def _median_and_range(
    points: Points, name: str, color: int, dash: str, *, with_range: bool
) -> list[dict[str, Any]]:
    steps, median, low, high = points
    traces = [line(steps, median, name, color)]
    traces[0]["line"]["dash"] = dash
    if len(steps) < 40:
        traces[0]["mode"] = "lines+markers"
    if not with_range:
        return traces
    edge = {"mode": "lines", "showlegend": False, "hoverinfo": "skip"}
    lowest, highest = (line(steps, values, name, color, **edge) for values in (low, high))
    lowest["line"]["width"] = highest["line"]["width"] = 0
    return [
        lowest,
        {**highest, "fill": "tonexty", "fillcolor": COLORS[color % len(COLORS)] + "26"},
        *traces,
    ]


def warnings(rows: Rows) -> list[dict[str, Any]]:
    """The first health warnings of a run: name, first and last step, and message."""
    listed: list[dict[str, Any]] = []
    latest: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name in (name for name in row if name.startswith("health/")):
            rule = name.removeprefix("health/")
            if not row[name]:
                latest.pop(rule, None)
            elif rule in latest:
                latest[rule]["last"] = row["step"]
            elif len(listed) < MAX_WARNINGS:
                finding = evaluate(
                    STEP_RULES, {key: row[key] for key in row if row[key] is not None}
                ).get(rule)
                latest[rule] = {
                    "name": rule,
                    "step": row["step"],
                    "last": row["step"],
                    "message": str(finding or ""),
                }
                listed.append(latest[rule])
    return listed


def last_values(rows: Rows) -> dict[str, float]:
    """The last value of each metric of the panels."""
    curves = (_curves(rows, names, positive=key in LOG_PANELS) for key, _, _, names in PANELS)
    return {label: curve[max(curve)] for panel in curves for label, curve in panel.items()}


def _thinned(points: Points) -> Points:
    """At most MAX_POINTS points, with the smallest and the largest median of each stretch of steps."""
    median = np.array(points[1])
    if len(median) <= MAX_POINTS:
        return points
    stretches = np.array_split(np.arange(len(median)), MAX_POINTS // 2)
    kept = {
        int(index)
        for part in stretches
        for index in (part[median[part].argmin()], part[median[part].argmax()])
    }
    order = sorted(kept)
    low, middle, high = (
        [column[index] for index in order] for column in (points[2], points[1], points[3])
    )
    return [points[0][index] for index in order], middle, low, high


def _curves(rows: Rows, names: Mapping[str, str], *, positive: bool) -> dict[str, dict[int, float]]:
    """Label → step → value of the logged metrics; a logarithmic panel takes positive values only."""
    curves: dict[str, dict[int, float]] = {}
    for name, label in names.items():
        keys_of = {label: tuple(name.replace("*", prefix) for prefix in METRIC_PREFIXES)}
        if name.endswith("/"):
            below = sorted(
                {key for row in rows for key in row if key.startswith(name) and key.count("/") == 1}
            )
            keys_of = {f"{label} {key.removeprefix(name)}": (key,) for key in below}
        for text, keys in keys_of.items():
            values = {
                row["step"]: float(row[key])
                for row in rows
                for key in keys
                if row.get(key) is not None
            }
            curves[text] = {
                step: value for step, value in values.items() if value > 0 or not positive
            }
    return {label: values for label, values in curves.items() if values}
