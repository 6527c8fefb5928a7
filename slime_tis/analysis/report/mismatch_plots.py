"""Plots for plotly.js: the distribution of abs(Δ), and the variables that it depends on.

Shapes: suffix _N the valid tokens of a table.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_tis.analysis.dumps.table import TokenTable

Array = NDArray[Any]
COLORS = ("#3b6ea5", "#c0572b", "#3f8f5f", "#8a5ea8", "#a8832a", "#4a9aa8")
"""Line colors, readable on white and on black."""
BINS = 24
"""Bins of the horizontal axis."""
CELLS = 72
"""Cells of the density, along each axis."""
WORST_TOKENS = 25
"""Rows of the table of the worst token ids."""
MIN_COUNT = 3
"""Tokens that a bin or a token id must have to be shown."""
VARIABLES: dict[str, tuple[str, str]] = {
    "position": (
        "position in the response, tokens",
        "Whether the mismatch grows along the response, for example by an inexact KV cache.",
    ),
    "length": (
        "response length, tokens",
        "Whether longer responses have a larger mismatch per token.",
    ),
    "turn": ("turn", "Whether later turns have a larger mismatch."),
    "worker": ("rollout server", "Whether one server has a larger mismatch than the others."),
    "age": (
        "weight age, optimizer steps",
        (
            "Whether tokens from older weights have a larger mismatch. Age 0 shows the precision of"
            " the engines alone."
        ),
    ),
    "entropy": (
        "entropy of the training distribution, nats",
        (
            "Whether uncertain tokens have a larger mismatch, which rounding and a different"
            " temperature cause."
        ),
    ),
}
"""Variables that abs(Δ) is plotted against, with label and description."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot."""

    id: str
    """Id of the element in the page."""
    title: str
    says: str
    """Description, one or two sentences."""
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    wide: bool = False
    """Whether the plot takes the full width of the page."""


def line(x: Any, y: Any, name: str, color: int = 0, **more: Any) -> dict[str, Any]:
    """Returns a line; `color` is an index into `COLORS`, modulo its length."""
    style = {"color": COLORS[color % len(COLORS)], "width": 1.6}
    return {
        "type": "scatter",
        "mode": "lines",
        "x": plain(x),
        "y": plain(y),
        "name": name,
        "line": style,
        **more,
    }


def axis(title: str, *, log: bool = False) -> dict[str, Any]:
    """Returns an axis with a title."""
    # plotly's automargin needs a distance between title and ticks.
    layout: dict[str, Any] = {"title": {"text": title, "standoff": 8}}
    if not log:
        return layout | {"type": "linear"}
    # By default, plotly labels ticks between powers of ten by their digit: a small 2 for 0.02.
    return layout | {"type": "log", "tickformat": "~g", "nticks": 3}


def plain(values: Any) -> list[Any]:
    """Returns numbers for JSON: floats rounded to five digits, None if not finite."""
    numbers: list[Any] = np.asarray(values).tolist()
    for index, number in enumerate(numbers):
        if isinstance(number, float):
            # JSON has no NaN. Five digits keep the page small.
            numbers[index] = None
            if math.isfinite(number):
                numbers[index] = float(f"{number:.5g}")
    return numbers


def plots(table: TokenTable, color: int = 0, name: str = "") -> list[Plot]:
    """Returns the plots of a table's mismatch. Variables without a column are skipped.

    Args:
        table: The tokens.
        color: Color of the lines, an index into `COLORS`.
        name: Name before each series; empty for a single table.
    """
    valid = table.valid
    if not valid.any():
        return []
    log_ratio = table.log_ratio[valid]
    prefix = ""
    if name:
        prefix = f"{name}, "
    drawn = [
        _density(table.policy_log_prob[valid], table.rollout_log_prob[valid]),
        _tail(log_ratio, color, prefix),
    ]
    size = np.abs(log_ratio)
    for variable, column in _variables(table).items():
        drawn += _against(variable, column[valid], size, color, prefix)
    return drawn


def _variables(table: TokenTable) -> dict[str, Array]:
    """[N] columns by their key in `VARIABLES`, in the order of the plots."""
    columns: dict[str, Array] = {
        "position": table.position,
        "length": table.response_length[table.sample],
    }
    if table.turn is not None:
        columns["turn"] = table.turn
    if table.rollout_worker is not None and len(np.unique(table.rollout_worker)) > 1:
        columns["worker"] = table.rollout_worker
    if table.weight_version is not None and table.step is not None:
        age = table.step[table.sample] - table.weight_version.astype(np.float64)
        columns["age"] = np.where(table.weight_version < 0, np.nan, age)
    if table.entropy is not None:
        columns["entropy"] = table.entropy
    return columns


def summary(table: TokenTable) -> dict[str, Any]:
    """Returns numbers of samples and tokens, k3 and statistics of abs(Δ)."""
    log_ratio = table.log_ratio[table.valid].astype(np.float64)
    trained = int((table.loss_mask > 0).sum())
    numbers = {"samples": len(table), "tokens": table.tokens, "trained_tokens": trained}
    numbers["tokens_without_log_prob"] = trained - len(log_ratio)
    if not len(log_ratio):
        return numbers
    size = np.abs(log_ratio)
    capped = np.minimum(log_ratio, 20)  # exp(20) is the largest ratio, as in train/mismatch_k3_kl
    return numbers | {
        "mean_abs_log_ratio": float(size.mean()),
        "median_abs_log_ratio": float(np.median(size)),
        "p99_abs_log_ratio": float(np.quantile(size, 0.99)),
        "max_abs_log_ratio": float(size.max()),
        "mean_log_ratio": float(log_ratio.mean()),
        "k3": float((np.expm1(capped) - log_ratio).mean()),
    }


def worst_tokens(table: TokenTable) -> list[dict[str, Any]]:
    """Returns the token ids with the largest mean abs(Δ); each has at least MIN_COUNT tokens."""
    if table.token is None:
        return []
    valid = table.valid
    ids, index, counts = np.unique(table.token[valid], return_inverse=True, return_counts=True)
    size = np.abs(table.log_ratio[valid])
    mean = np.bincount(index, size, len(ids)) / np.maximum(counts, 1)
    largest = np.zeros(len(ids))
    np.maximum.at(largest, index, size)
    # Rare ids come last, whatever their mean.
    rank = np.where(counts >= MIN_COUNT, mean, -1)
    order = np.argsort(-rank)[:WORST_TOKENS]
    rows = []
    for i in order[counts[order] >= MIN_COUNT]:
        row = {
            "token": int(ids[i]),
            "count": int(counts[i]),
            "mean": float(mean[i]),
            "max": float(largest[i]),
        }
        rows.append(row)
    return rows


def _density(train_N: Array, rollout_N: Array) -> Plot:
    """The number of tokens by both log-probs, as a heat map."""
    # The rarest tokens are drawn at the edge, so that they do not squeeze all others into a corner.
    smallest = np.quantile(np.minimum(train_N, rollout_N), 0.0005)
    low = float(max(smallest, -40.0)) - 1e-3
    edges = np.linspace(low, 0, CELLS + 1)
    counts, _, _ = np.histogram2d(
        np.clip(train_N, low, 0), np.clip(rollout_N, low, 0), bins=[edges, edges]
    )
    centers = plain((edges[1:] + edges[:-1]) / 2)
    with np.errstate(divide="ignore"):
        log_counts = np.log10(counts)
    # plotly has no logarithmic color scale: cells hold log10(tokens).
    ticks = list(range(int(log_counts.max()) + 1))
    heatmap = {
        "type": "heatmap",
        "x": centers,
        "y": centers,
        "z": [plain(row) for row in log_counts],
        "customdata": counts.astype(int).tolist(),
        "hovertemplate": (
            "rollout %{x:.2f}<br>training %{y:.2f}<br>%{customdata:,} tokens<extra></extra>"
        ),
        "hoverongaps": False,
        "colorscale": "Viridis",
        "colorbar": {
            "thickness": 8,
            "outlinewidth": 0,
            "tickvals": ticks,
            "ticktext": [f"{10**t:,}" for t in ticks],
        },
        "showlegend": False,
    }
    diagonal = line([low, 0], [low, 0], "equal", 1, hoverinfo="skip", showlegend=False)
    no_grid = {"showgrid": False, "zeroline": False}
    return Plot(
        id="density",
        title="Training and rollout log-probs",
        says=(
            "Tokens on the diagonal have equal log-probs in both engines. The color is the number"
            " of tokens."
        ),
        traces=[heatmap, diagonal],
        layout={
            "xaxis": axis("log π rollout, nats") | no_grid,
            "yaxis": axis("log π train, nats") | no_grid,
        },
    )


def _tail(log_ratio_N: Array, color: int, prefix: str) -> Plot:
    """The share of tokens above each size of Δ, one line per sign."""
    traces = []
    for sign, label, dash in ((-1, "Δ < 0", "dot"), (1, "Δ > 0", "solid")):
        size = np.sort(np.maximum(sign * log_ratio_N, 0))
        low = max(float(size[-1]) * 1e-5, 1e-7)
        x = np.geomspace(low, max(float(size[-1]), low * 2), 80)
        share = 1 - np.searchsorted(size, x, side="left") / len(size)
        positive = share > 0
        trace = line(x[positive], share[positive], f"{prefix}{label}", color)
        trace["line"]["dash"] = dash
        traces.append(trace)
    return Plot(
        id="tail",
        title="Tails",
        says=(
            "Share of tokens whose mismatch has at least this size, for each sign. Both axes are"
            " logarithmic."
        ),
        traces=traces,
        layout={
            "xaxis": axis("abs(Δ), nats", log=True),
            "yaxis": axis("share of tokens", log=True),
        },
    )


def _against(variable: str, value_N: Array, size_N: Array, color: int, prefix: str) -> list[Plot]:
    """Mean and 99 % quantile of abs(Δ) in bins of a variable; no plot without a full bin."""
    finite = np.isfinite(value_N)
    value = value_N[finite]
    size = size_N[finite]
    if not len(value):
        return []
    levels = np.unique(value)
    if len(levels) <= BINS:
        centers = levels.astype(np.float64)
        index = np.searchsorted(levels, value)
    else:
        # Quantiles of the distinct values: all bins cover about as many.
        edges = np.unique(np.quantile(levels, np.linspace(0, 1, BINS + 1)))
        index = np.clip(np.searchsorted(edges, value, side="right") - 1, 0, len(edges) - 2)
        centers = (edges[1:] + edges[:-1]) / 2
    counts = np.bincount(index, minlength=len(centers))
    bins = np.flatnonzero(counts >= MIN_COUNT)
    if not len(bins):
        return []
    # abs(Δ) per bin, in the order of the bins.
    pieces = np.split(size[np.argsort(index, kind="stable")], np.cumsum(counts)[:-1])
    mean = np.array([pieces[i].mean(dtype=np.float64) for i in bins])
    high = np.array([np.quantile(pieces[i], 0.99) for i in bins])
    hover = {
        "customdata": plain(counts[bins]),
        "hovertemplate": "%{x:.4g}: %{y:.3g} nats<br>%{customdata} tokens",
    }
    mean_line = line(centers[bins], mean, f"{prefix}mean", color, **hover)
    mean_line["mode"] = "lines+markers"
    high_line = line(centers[bins], high, f"{prefix}99% quantile", color, opacity=0.6, **hover)
    label, description = VARIABLES[variable]
    layout = {"xaxis": axis(label), "yaxis": axis("abs(Δ), nats", log=bool((mean > 0).all()))}
    return [
        Plot(
            id=f"by-{variable}",
            title=f"abs(Δ) by {label.split(',')[0]}",
            says=description,
            traces=[mean_line, high_line],
            layout=layout,
        )
    ]
