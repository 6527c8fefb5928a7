"""The overview of runs: plots of metrics, also over several seeds, and health warnings."""

import html
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from slime_tis.analysis.report.mismatch_plots import COLORS, Plot, axis, line
from slime_tis.analysis.report.report_inputs import Source
from slime_tis.errors import one_line
from slime_tis.health import METRIC_PREFIXES, STEP_RULES, Rows, evaluate

MEMBER_OPACITY = 0.4
"""Opacity of the line of one run of a group, next to the group's mean."""
PER_RUN_OPTIONS = (
    "seed",
    "rollout_seed",
    "output_dir",
    "save",
    "load",
    "save_hf",
    "wandb_dir",
    "wandb_group",
    "dump_details",
    "save_debug_rollout_data",
    "save_debug_train_data",
    "sglang_log_dir",
    "sglang_weight_dir",
    "tb_experiment_name",
)
"""Options that may differ between runs of one group."""
DASHES = ("solid", "dash", "dot", "dashdot")
"""Line styles of the metrics of one panel."""
MAX_POINTS = 2_000
"""Points of a line. A longer line is split into MAX_POINTS/2 stretches; each keeps its smallest and
its largest point."""
MAX_POINTS_WITH_MARKERS = 39
"""Points of a line that is drawn with a marker at each point."""
MAX_WARNINGS = 200
"""Warnings of a run that the page lists, the earliest ones."""
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
"""Panels: id, title, description, and metrics with labels. A * stands for any of
METRIC_PREFIXES. A name that ends in / means all metrics directly below it."""


class Points(NamedTuple):
    """A metric over the steps that all runs of a group logged."""

    steps: list[int]
    mean: list[float]
    members: list[list[float]]
    """[runs][steps] values per run."""


class Group(NamedTuple):
    """Runs that differ only in `PER_RUN_OPTIONS`.

    A single run gives the group its name. The name of several runs lists the options that differ
    between groups.
    """

    name: str
    sources: list[Source]


def configuration(source: Source) -> dict[str, Any]:
    """Returns the options of a run, without `PER_RUN_OPTIONS`."""
    options = {}
    for name, value in source.options.items():
        if name not in PER_RUN_OPTIONS:
            options[str(name)] = value  # YAML keys may be numbers
    return options


def group_runs(sources: Sequence[Source]) -> list[Group]:
    """Groups sources by their configuration, in order.

    A source without a configuration forms a separate group.
    """
    groups: dict[str, tuple[dict[str, Any], list[Source]]] = {}
    for index, source in enumerate(sources):
        options = configuration(source)
        # Values of a YAML file may be lists, so the options themselves cannot be a key.
        key = str(sorted(map(repr, options.items())) or index)
        groups.setdefault(key, (options, []))[1].append(source)

    configs = [options for options, _ in groups.values()]
    differing = set()
    for options in configs:
        for name, value in options.items():
            if any(value != other.get(name) for other in configs):
                differing.add(name)

    named = []
    for options, members in groups.values():
        name = members[0].name
        if len(members) > 1:
            text = ", ".join(f"{key}={options[key]}" for key in options if key in differing)
            name = f"{one_line(text or name, 60)} ({len(members)} runs)"
        named.append(Group(name, members))
    return named


def group_points(curves: Sequence[Mapping[int, float]]) -> Points:
    """Returns the mean and the values of all runs, at their common steps."""
    steps = sorted(set.intersection(*map(set, curves)))
    members = [[curve[step] for step in steps] for curve in curves]
    # Runs may log inf and −inf, or values whose sum overflows; the page leaves such means out.
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.mean(members, axis=0)
    return Points(steps=steps, mean=mean.tolist(), members=members)


def plots(groups: Sequence[Group]) -> list[Plot]:
    """Returns one plot for each panel with logged metrics.

    A single group has one color per metric. Several groups have one color each, and one line style
    per metric. A group's line is the mean over its runs, and each run is a thin line.
    """
    drawn = []
    for key, title, description, names in PANELS:
        traces = _panel_traces(groups, names, is_log=key in LOG_PANELS)
        if not traces:
            continue
        layout: dict[str, Any] = {"xaxis": axis("step"), "yaxis": axis("", log=key in LOG_PANELS)}
        if len(groups) == 1 and len(groups[0].sources) == 1:
            layout["shapes"] = _warning_lines(groups[0].sources[0].metrics)
        drawn.append(
            Plot(id=f"run-{key}", title=title, says=description, traces=traces, layout=layout)
        )
    return drawn


def _panel_traces(
    groups: Sequence[Group], names: Mapping[str, str], *, is_log: bool
) -> list[dict[str, Any]]:
    """The lines of all groups in one panel.

    Args:
        groups: Groups of runs.
        names: The panel's metrics with their labels.
        is_log: Whether the vertical axis is logarithmic.
    """
    traces = []
    ranks: dict[str, int] = {}  # a label has the same style in all groups
    for index, group in enumerate(groups):
        curves_of_label: dict[str, list[dict[int, float]]] = {}
        for source in group.sources:
            for label, curve in _curves(source.metrics, names, positive=is_log).items():
                curves_of_label.setdefault(label, []).append(curve)
        for label, curves in curves_of_label.items():
            rank = ranks.setdefault(label, len(ranks))
            points = group_points(curves)
            if not points.steps:  # the runs have no common step
                continue
            name = label
            color = rank
            dash = "solid"
            if len(groups) > 1:
                name = f"{group.name}: {label}"
                color = index
                dash = DASHES[rank % len(DASHES)]
            traces += _mean_and_members(
                _thinned(points), name=html.escape(name), color=color, dash=dash
            )
    return traces


def _warning_lines(rows: Rows) -> list[dict[str, Any]]:
    """A vertical line at each step at which a health warning starts."""
    shapes = []
    for step in sorted({warning["step"] for warning in warnings(rows)}):
        shapes.append(
            {
                "type": "line",
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "opacity": 0.7,
                "line": {"color": COLORS[1], "width": 1, "dash": "dot"},
                "x0": step,
                "x1": step,
            }
        )
    return shapes


def _mean_and_members(points: Points, *, name: str, color: int, dash: str) -> list[dict[str, Any]]:
    """Returns the line of the mean, and before it a thin line per run if there are several."""
    mean = line(points.steps, points.mean, name, color)
    mean["line"]["dash"] = dash
    if len(points.steps) <= MAX_POINTS_WITH_MARKERS:
        mean["mode"] = "lines+markers"
    if len(points.members) == 1:
        return [mean]
    traces = []
    for values in points.members:
        # The legend and the pointer's label would repeat the group's name for every run.
        quiet = {"opacity": MEMBER_OPACITY, "showlegend": False, "hoverinfo": "skip"}
        member = line(points.steps, values, name, color, **quiet)
        member["line"] |= {"width": 0.8, "dash": dash}
        traces.append(member)
    mean["line"]["width"] = 2.2
    return [*traces, mean]


def warnings(rows: Rows) -> list[dict[str, Any]]:
    """Returns the first MAX_WARNINGS health warnings of a run.

    A warning has a name, its first and last step, and a message. Consecutive rows with the same
    warning count as one.
    """
    listed: list[dict[str, Any]] = []
    current: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name in row:
            if not name.startswith("health/"):
                continue
            rule = name.removeprefix("health/")
            if not row[name]:
                current.pop(rule, None)
            elif rule in current:
                current[rule]["last"] = row["step"]
            elif len(listed) < MAX_WARNINGS:
                values = {key: row[key] for key in row if row[key] is not None}
                finding = evaluate(STEP_RULES, values).get(rule)
                current[rule] = {
                    "name": rule,
                    "step": row["step"],
                    "last": row["step"],
                    "message": str(finding or ""),
                }
                listed.append(current[rule])
    return listed


def last_values(rows: Rows) -> dict[str, float]:
    """Returns the last values of the panels' metrics, by label."""
    values = {}
    for key, _, _, names in PANELS:
        for label, curve in _curves(rows, names, positive=key in LOG_PANELS).items():
            values[label] = curve[max(curve)]
    return values


def _thinned(points: Points) -> Points:
    """At most MAX_POINTS points: each stretch of steps keeps its smallest and largest mean."""
    if len(points.steps) <= MAX_POINTS:
        return points
    mean = np.array(points.mean)
    kept: set[int] = set()
    for stretch in np.array_split(np.arange(len(mean)), MAX_POINTS // 2):
        values = mean[stretch]
        kept.add(int(stretch[values.argmin()]))
        kept.add(int(stretch[values.argmax()]))
    order = sorted(kept)
    return Points(
        steps=[points.steps[index] for index in order],
        mean=[points.mean[index] for index in order],
        members=[[values[index] for index in order] for values in points.members],
    )


def _curves(rows: Rows, names: Mapping[str, str], *, positive: bool) -> dict[str, dict[int, float]]:
    """Label → step → value of the logged metrics; with `positive`, only values above 0."""
    curves = {}
    for label, keys in _keys_by_label(rows, names).items():
        curve = {}
        for row in rows:
            # Later keys replace earlier ones; a run logs under one prefix only.
            for key in keys:
                if row.get(key) is not None:
                    curve[row["step"]] = float(row[key])
        if positive:
            curve = {step: value for step, value in curve.items() if value > 0}
        if curve:
            curves[label] = curve
    return curves


def _keys_by_label(rows: Rows, names: Mapping[str, str]) -> dict[str, list[str]]:
    """Label → keys in the rows; `PANELS` explains * and / in the names."""
    keys_of_label: dict[str, list[str]] = {}
    for name, label in names.items():
        if not name.endswith("/"):
            keys_of_label[label] = [name.replace("*", prefix) for prefix in METRIC_PREFIXES]
            continue
        for key in sorted(set().union(*rows)):
            if key.startswith(name) and key.count("/") == 1:
                keys_of_label[f"{label} {key.removeprefix(name)}"] = [key]
    return keys_of_label
