"""summary.png: four panels that show whether a run learns and whether its rollouts match its training.

`python -m slime_tis.trainer.reporting.summary RUN_DIR` redraws it from metrics.jsonl.
"""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_tis.files import atomic_path
from slime_tis.metrics_file import METRICS
from slime_tis.rules import METRIC_PREFIXES
from slime_tis.trainer.reporting.run_directory import SUMMARY

Series = list[tuple[int, float]]
MIN_SMOOTHED_POINTS = 40
"""Number of points from which a series is smoothed."""

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A title, and on each axis a label and the series by metric name; NAME/ means every metric directly below it."""

    title: str
    left_label: str
    left: dict[str, str]
    right_label: str = ""
    right: dict[str, str] = field(default_factory=dict)


def _under_any_prefix(labels: dict[str, str]) -> dict[str, str]:
    """Returns metrics of the correction and their labels, under every prefix that they may have."""
    return {prefix + name: label for prefix in METRIC_PREFIXES for name, label in labels.items()}


PANELS = (
    Panel(
        title="Reward and held-out accuracy",
        left_label="share",
        left={"rollout/raw_reward": "rollout reward", "eval/": "held-out"},
    ),
    Panel(
        title="Mismatch of training and rollout log-probs",
        left_label="mean |Δ|, nats",
        left=_under_any_prefix({"train_rollout_logprob_abs_diff": "mean |Δ|"}),
        right_label="KL, nats",
        right=_under_any_prefix({"mismatch_kl": "KL", "mismatch_k3_kl": "k3 KL"}),
    ),
    Panel(
        title="Weights and rejections",
        left_label="mean weight, share",
        left=_under_any_prefix(
            {
                "mis_mean_is_weight_before_clip": "mean weight before bounds",
                "mis_ratio_mean_after_mis": "after bounds",
                "mis_eff_sample_size": "effective sample size",
            }
        ),
        right_label="share rejected",
        right=_under_any_prefix(
            {"mis_rs_masked_fraction": "tokens rejected by RS", "mis_catastrophic_seq_fraction": "sequences vetoed"}
        ),
    ),
    Panel(
        title="Gradient norm and loss",
        left_label="gradient norm",
        left={"train/grad_norm": "gradient norm"},
        right_label="loss",
        right={"train/loss": "loss"},
    ),
)


def plot_summary(run_directory: Path) -> Path:
    """Draws summary.png of a run from its metrics.jsonl and returns its path; missing series are skipped."""
    import matplotlib  # slow to import, and needed once per run

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = read_series(run_directory / METRICS)
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        _draw_panel(axis, panel, series)
    path = run_directory / SUMMARY
    with atomic_path(path) as partial:
        figure.savefig(partial, dpi=110, format="png")
    pyplot.close(figure)
    return path


def read_series(path: Path) -> dict[str, Series]:
    """Returns the finite values of each metric in a metrics.jsonl, as (step, value) pairs in order."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the directory of a run, which contains {METRICS}.")
    series: dict[str, Series] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        step = row.pop("step")
        for name, value in row.items():
            if value is not None:
                series.setdefault(name, []).append((step, value))
    return series


def _draw_panel(axis: Any, panel: Panel, series: dict[str, Series]) -> None:
    colors = itertools.cycle(COLORS)
    handles = _draw_lines(axis, panel.left_label, _chosen(panel.left, series), colors, "-")
    right = _chosen(panel.right, series)
    if right:
        handles += _draw_lines(axis.twinx(), panel.right_label, right, colors, "--")
    axis.set_title(panel.title, loc="left", fontweight="bold", pad=36)
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    if not handles:
        axis.text(0.5, 0.5, "not logged in this run", ha="center", va="center", transform=axis.transAxes)
        return
    legend = axis.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, frameon=False, fontsize=8
    )
    legend.set_in_layout(False)  # the title's padding leaves space for it; a wide legend must not shrink its panel


def _draw_lines(axis: Any, label: str, lines: dict[str, Series], colors: Iterator[str], style: str) -> list[Any]:
    """Draws each series as a line; a long one faintly, with its running mean on top."""
    axis.set_ylabel(label)
    axis.yaxis.set_major_formatter("{x:.4g}")  # an exponent for the whole axis would overlap the legend
    handles = []
    for (name, points), color in zip(lines.items(), colors, strict=False):
        steps, values = [step for step, _ in points], [value for _, value in points]
        long = len(points) >= MIN_SMOOTHED_POINTS
        if long:
            axis.plot(steps, values, style, color=color, linewidth=0.8, alpha=0.3)
            values = running_mean(values, reach=len(values) // 10)
        marker = None if long else "o"
        handles += axis.plot(steps, values, style, color=color, label=name, linewidth=1.6, marker=marker, markersize=4)
    return handles


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Returns the mean of each value with up to `reach` neighbours on either side."""
    windows = (values[max(index - reach, 0) : index + reach + 1] for index in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _chosen(wanted: dict[str, str], series: dict[str, Series]) -> dict[str, Series]:
    """Returns the logged series by label; those below NAME/ append their own name."""
    chosen: dict[str, Series] = {}
    for name, label in wanted.items():
        if not name.endswith("/"):
            chosen |= {label: series[name]} if name in series else {}
            continue
        below = {metric.removeprefix(name): points for metric, points in series.items() if metric.startswith(name)}
        chosen |= {f"{label} {rest}": points for rest, points in below.items() if "/" not in rest}
    return chosen


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m slime_tis.trainer.reporting.summary RUN_DIR")
    try:
        print(plot_summary(Path(sys.argv[1])))
    except ValueError as error:
        sys.exit(str(error))
