"""The overview of a run from its metrics.jsonl: what it learned, how far apart the engines were, and the warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime_tis.analysis.report.plots import COLORS, Plot, axis, line
from slime_tis.rules import METRIC_PREFIXES, STEP_RULES, evaluate

Rows = Sequence[Mapping[str, Any]]
Series = tuple[str, list[int], list[float]]
"""Label, steps and values of a metric."""
HEALTH = "health/"
MAX_POINTS = 2_000
"""Points of a line; of more, the smallest and the largest of each of half as many stretches of steps."""
MAX_SERIES = 24
"""Lines of a panel of one run, where each evaluation set has one."""
MAX_WARNINGS = 200
"""Warnings that are listed, the first ones."""

PANELS: tuple[tuple[str, str, str, dict[str, str], bool], ...] = (
    (
        "reward",
        "Reward and held-out accuracy",
        "Whether the run learns, and whether what it learns holds on prompts that it was not trained on.",
        {"rollout/raw_reward": "rollout reward", "eval/": "held-out"},
        False,
    ),
    (
        "mismatch",
        "Mismatch per token",
        "How far apart the engines are: k3 estimates the KL divergence in nats, χ² the second moment of the weights.",
        {"*mismatch_k3_kl": "k3", "*mismatch_chi2_token": "χ²", "*train_rollout_logprob_abs_diff": "mean abs(Δ)"},
        True,
    ),
    (
        "perplexity",
        "Perplexity ratio",
        "Perplexity of the samples under training over that under the rollout engine: 1 is equal.",
        {"*mismatch_ppl_ratio": "ratio"},
        False,
    ),
    (
        "ess",
        "Effective sample size and weights",
        "The share of the batch that carries the gradient, and the mean importance weight before and after its bounds.",
        {
            "*mis_eff_sample_size": "effective sample size",
            "*mis_mean_is_weight_before_clip": "mean weight",
            "*mis_ratio_mean_after_mis": "mean bounded weight",
        },
        False,
    ),
    (
        "rejections",
        "Rejections",
        "The share of tokens or sequences that the correction took out of the loss.",
        {
            "*mis_rs_masked_fraction": "tokens rejected",
            "*mis_catastrophic_seq_fraction": "sequences vetoed",
            "*mis_mask_fraction_high": "weights masked",
        },
        False,
    ),
    (
        "gradient",
        "Gradient norm",
        "A spike announces a collapse, often together with χ².",
        {"train/grad_norm": "gradient norm"},
        False,
    ),
    (
        "staleness",
        "Weight age",
        "Optimizer steps that the weights which sampled were behind, on average.",
        {"rollout/weight_staleness": "weight age"},
        False,
    ),
    (
        "entropy",
        "Entropy",
        "Entropy of the policy in nats: near zero it samples the same answers again.",
        {"train/entropy_loss": "entropy"},
        False,
    ),
)
"""Panels: id, title, what it says, metrics and their labels, whether the axis is logarithmic. A * means any prefix of
the correction's metrics, a name that ends in / all metrics below it."""


def plots(runs: Sequence[tuple[str, Rows]]) -> list[Plot]:
    """One plot for each panel that a run logged something of; several runs are drawn over each other.

    Args:
        runs: Names of the runs, and the rows of their metrics.jsonl.
    """
    drawn = []
    for key, title, says, wanted, log in PANELS:
        traces = []
        colors: dict[str, int] = {}  # a metric has one colour in all runs; those after the first are dashed
        for place, (run, rows) in enumerate(runs):
            for label, steps, values in map(_thinned, _chosen(rows, wanted, log)[:MAX_SERIES]):
                shown = line(
                    steps, values, f"{run}: {label}" if len(runs) > 1 else label, colors.setdefault(label, len(colors))
                )
                if place:
                    shown["line"] = {**shown["line"], "dash": "dash"}
                traces.append(shown | ({"mode": "lines+markers"} if len(steps) < 40 else {}))
        if not traces:
            continue
        layout: dict[str, Any] = {"xaxis": axis("step"), "yaxis": axis("", log=log)}
        if len(runs) == 1:
            layout["shapes"] = [_mark(step) for step in sorted({w["step"] for w in warnings(runs[0][1])})]
        drawn.append(Plot(id=f"run-{key}", title=title, says=says, traces=traces, layout=layout))
    return drawn


def warnings(rows: Rows) -> list[dict[str, Any]]:
    """The first health warnings of a run: name, steps, and the message where the metrics still give it."""
    found: list[dict[str, Any]] = []
    latest: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name in (name for name in row if name.startswith(HEALTH)):
            rule = name.removeprefix(HEALTH)
            if not row[name]:
                latest.pop(rule, None)
            elif rule in latest:
                latest[rule]["last"] = row["step"]
            elif len(found) < MAX_WARNINGS:
                latest[rule] = {"name": rule, "step": row["step"], "last": row["step"], "message": _message(rule, row)}
                found.append(latest[rule])
    return found


def last_values(rows: Rows) -> dict[str, float]:
    """The last value of each metric of the panels."""
    values: dict[str, float] = {}
    for _, _, _, wanted, log in PANELS:
        for label, _, series in _chosen(rows, wanted, log):
            values[label] = series[-1]
    return values


def _message(rule: str, row: Mapping[str, Any]) -> str:
    known = {name: value for name, value in row.items() if isinstance(value, int | float)}
    finding = evaluate(STEP_RULES, known).get(rule)
    return "" if finding is None else str(finding)


def _mark(step: int) -> dict[str, Any]:
    style = {"color": COLORS[1], "width": 1, "dash": "dot"}
    return {"type": "line", "x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper", "line": style, "opacity": 0.7}


def _thinned(series: Series) -> Series:
    """The series with at most MAX_POINTS points, its spikes among them."""
    label, steps, values = series
    if len(steps) <= MAX_POINTS:
        return series
    stretches = np.array_split(np.arange(len(steps)), MAX_POINTS // 2)
    number = np.array(values)
    ends = ({int(part[number[part].argmin()]), int(part[number[part].argmax()])} for part in stretches)
    chosen = sorted(place for pair in ends for place in pair)
    return label, [steps[i] for i in chosen], [values[i] for i in chosen]


def _chosen(rows: Rows, wanted: Mapping[str, str], positive: bool) -> list[Series]:
    """Label, steps and values of the wanted metrics that were logged."""
    series = []
    for name, label in wanted.items():
        if name.endswith("/"):
            below = sorted({key for row in rows for key in row if key.startswith(name) and key.count("/") == 1})
            chosen: list[tuple[tuple[str, ...], str]] = [((key,), f"{label} {key.removeprefix(name)}") for key in below]
        else:
            starred = tuple(name.replace("*", prefix) for prefix in METRIC_PREFIXES)
            chosen = [(starred if name.startswith("*") else (name,), label)]
        for keys, text in chosen:
            points = [(row["step"], row[key]) for row in rows for key in keys if isinstance(row.get(key), int | float)]
            points = [(step, value) for step, value in points if value > 0 or not positive]
            if points:
                series.append((text, [step for step, _ in points], [float(value) for _, value in points]))
    return series
