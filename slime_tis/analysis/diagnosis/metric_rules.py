"""Rules on the metrics of a whole run, for runs without dumps and in addition to them."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from slime_tis.analysis.diagnosis.tokens import ramp
from slime_tis.rules import METRIC_PREFIXES, Finding, Rule, Values, evaluate

Rows = Sequence[Mapping[str, Any]]


def findings(rows: Rows) -> list[Finding]:
    """Findings of the rows of a metrics.jsonl."""
    return [finding for finding in evaluate(RUN_RULES, run_statistics(rows)).values() if finding is not None]


def run_statistics(rows: Rows) -> dict[str, float]:
    """Named statistics of a run's metrics. A statistic is missing if its metrics are."""
    series = {name: series_of(rows, name) for name in SERIES}
    values = {f"count {name}": float(len(numbers)) for name, numbers in series.items()}
    for name, numbers in series.items():
        if numbers:
            values |= {f"mean {name}": fmean(numbers), f"max {name}": max(numbers)}
    size, gaps = series["train_rollout_logprob_abs_diff"], series["train/entropy_gap"]
    if (third := len(size) // 3) >= 3:
        parts = {"first third": size[:third], "second third": size[third:-third], "last third": size[-third:]}
        values |= {name: fmean(part) for name, part in parts.items()}
    if len(gaps) >= 5:
        mean = fmean(gaps)
        error = (fmean((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 + 1e-9
        values["gap in standard errors"] = mean / error
    for ratio, names in RATIOS.items():
        numerator, denominator = (values.get(f"mean {name}") for name in names)
        if numerator is not None and denominator is not None:
            values[ratio] = numerator / max(denominator, 1e-12)
    return values


SERIES = (
    "nonfinite_token_fraction",
    "rollout/update_received",
    "train_rollout_logprob_abs_diff",
    "rollout/weight_staleness",
    "mismatch_k3_kl",
    "mismatch_k3_kl_staleness_0",
    "train/entropy_gap",
    "train/without_replay/mismatch_k3_kl",
    "train/with_replay/mismatch_k3_kl",
)
"""Metrics that the rules use; a name without a slash is a metric of the correction, under any of its prefixes."""
RATIOS = {
    "staleness ratio": ("mismatch_k3_kl", "mismatch_k3_kl_staleness_0"),
    "replay ratio": ("train/without_replay/mismatch_k3_kl", "train/with_replay/mismatch_k3_kl"),
}


def series_of(rows: Rows, name: str) -> list[float]:
    """The finite values of a metric."""
    names = (name,) if "/" in name else tuple(prefix + name for prefix in METRIC_PREFIXES)
    values = (next((row[key] for key in names if isinstance(row.get(key), int | float)), None) for row in rows)
    return [float(value) for value in values if value is not None]


def _growth(values: Values) -> float:
    """Confidence that abs(Δ) grows over a run although the weights count as current."""
    first, middle, last = (values[f"{name} third"] for name in ("first", "second", "last"))
    if values.get("max rollout/weight_staleness", 0) > 0 or first <= 0 or last < 0.01:
        return 0.0
    return 0.7 * min(ramp(last, 3 * first, 8 * first), ramp(last, 1.2 * middle, 1.8 * middle))


STALENESS = "the sampling weights are {values[mean rollout/weight_staleness]:.1f} optimizer steps behind on average"
RUN_RULES = (
    Rule(
        cause="broken_tokens",
        metric="max nonfinite_token_fraction",
        condition=lambda value, *_: 0.9 * (value > 0),
        message="up to {value:.3%} of the tokens of a step have no finite log-prob",
    ),
    Rule(
        cause="weights_not_updated",
        metric="mean rollout/update_received",
        condition=lambda value, values, _: (
            (value <= 0.5 and values["count rollout/update_received"] >= 3) * (0.5 + 0.4 * ramp(value, 0.5, 0.1))
        ),
        message="after rounding, {value:.0%} of the weight updates arrive in the rollout engine",
    ),
    Rule(
        cause="weights_not_updated",
        metric="last third",
        condition=lambda _, values, __: _growth(values),
        message="mean abs(Δ) grows from {values[first third]:.2g} over {values[second third]:.2g} to {value:.2g}, but "
        "the weights count as current",
    ),
    Rule(
        cause="stale_weights",
        metric="staleness ratio",
        condition=lambda value, values, _: 0.9 * (values["mean rollout/weight_staleness"] > 0) * ramp(value, 1.0, 2.0),
        message=STALENESS + "\nk3 of all tokens is {value:.1f} times as large as for tokens from current weights",
    ),
    Rule(
        cause="stale_weights",
        metric="mean mismatch_k3_kl",
        condition=lambda _, values, __: (
            0.7 * (values["mean rollout/weight_staleness"] > 0 and "staleness ratio" not in values)
        ),
        message=STALENESS,
    ),
    Rule(
        cause="truncated_sampling",
        metric="gap in standard errors",
        condition=lambda value, values, _: 0.7 * (value >= 5 and values["mean train/entropy_gap"] >= 0.02),
        message="train/entropy_gap is {values[mean train/entropy_gap]:+.3f} on average, {value:.0f} standard errors "
        "above 0",
        share=0.3,
        detail="or a lower temperature",
    ),
    Rule(
        cause="moe_routing",
        metric="replay ratio",
        condition=lambda value, *_: 0.7 * (value > 2),
        message="without replay, k3 is {value:.1f} times as large as with replay",
        share=0.3,
    ),
    Rule(
        cause="rounding",
        metric="mean train_rollout_logprob_abs_diff",
        condition=lambda value, *_: 0.35 * (value >= 2e-3),
        message="mean abs(Δ) is {value:.2g} nats; dumps of tokens show what it depends on",
        share=0.3,
        detail="or another cause",
    ),
)
"""The first rule of a cause whose condition holds makes its finding."""
