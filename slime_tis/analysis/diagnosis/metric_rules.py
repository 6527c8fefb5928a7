"""Rules of the diagnosis on the metrics of a run, in a log or a metrics.jsonl.

rows → series of finite values → named statistics → findings

`RUN_RULES` apply with and without tokens. `MISMATCH_METRICS` have limits and growth rules, which
judge a run without tokens. Health needs at least one of them, finite and in enough steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from slime_tis.health import MAX_K3, METRIC_PREFIXES, Finding, Rows, Rule, Values, evaluate, ramp

LARGEST_VALUE = 1e12
"""A metric above it counts as not finite. No mean over tokens reaches it, and its square is still a
float."""
ROUNDING = 1e-6
"""Error of a mean in fp32; a value this far beyond a bound is possible."""
MIN_STEPS = 9
"""A run is healthy, or its metrics grow, on this number of finite values: three for each third of
the run."""
MIN_NAMED_CONFIDENCE = 0.7
"""Below this confidence several causes share the pattern: the answer is `unexplained`, with them as
candidates."""
CERTAIN = 0.95
"""Confidence of a fact that needs no interpretation, such as a NaN."""


@dataclass(frozen=True, kw_only=True)
class MismatchMetric:
    """A metric that compares the log-probs of both engines, and what its size means."""

    name: str
    """Our name; a name without a slash has one of METRIC_PREFIXES."""
    label: str
    """The metric in words."""
    lowest: float = 0.0
    """Smallest possible value."""
    highest: float = math.inf
    distance: Callable[[float], float] = float
    """The size of the mismatch from the value; 0 is agreement."""
    noise: float
    """Smallest mean distance that is a visible mismatch. Two fp32 engines stay below it."""
    largest: float
    """Largest distance that low precision or weights of a few steps ago make."""
    growth: tuple[float, float]
    """Growth from the first to the last third of a run, as a factor: above the first number the
    engines may drift apart, from the second on they do. With weights that are never updated, abs(Δ)
    grows 2 to 5 times and k3 ≈ Δ²/2 grows 5 to 19 times."""
    late_growth: float = 1.6
    """The same from the second third to the last one, from which on growth is certain; a jump has
    ended before."""
    grown: float
    """Smallest mean distance in the last third that counts as grown."""
    shows_health: bool = True
    """Whether a small value shows that the engines agree. Means of Δ cancel, and a correlation
    ignores scale."""


ABS = "train_rollout_logprob_abs_diff"
K3 = "mismatch_k3_kl"
K1 = "mismatch_kl"
PROBABILITIES = "training/rollout_probs_diff_mean"
PEARSON = "training/rollout_actor_probs_pearson_corr"
MISMATCH_METRICS = (
    # For normal noise k3 = π/4 · (mean abs(Δ))², so the limits of k3 and abs(Δ) are the same.
    MismatchMetric(
        name=ABS,
        label="mean abs(Δ) (nats)",
        noise=2e-3,
        largest=0.25,
        growth=(3, 8),
        late_growth=1.8,
        grown=0.01,
    ),
    MismatchMetric(
        name=K3, label="k3 (nats per token)", noise=3e-6, largest=MAX_K3, growth=(2, 4), grown=1e-4
    ),
    MismatchMetric(
        name=K1,
        label="the mean of −Δ, k1 (nats per token)",
        lowest=-math.inf,
        distance=abs,
        noise=1e-3,
        largest=MAX_K3,
        growth=(2, 4),
        grown=1e-3,
        shows_health=False,
    ),
    # verl's default log. Its guide calls a mean above 0.01 an anomaly; an fp8 rollout makes 0.012.
    MismatchMetric(
        name=PROBABILITIES,
        label="the mean difference of the probabilities",
        highest=1.0,
        noise=1e-3,
        largest=0.05,
        growth=(3, 8),
        grown=3e-3,
    ),
    MismatchMetric(
        name=PEARSON,
        label="1 − the Pearson correlation of the probabilities",
        lowest=-1.0,
        highest=1.0,
        distance=lambda value: 1 - value,
        noise=1e-3,
        largest=0.01,
        growth=(2, 4),
        grown=3e-3,
        shows_health=False,
    ),
)
OTHER_SERIES = (
    "nonfinite_token_fraction",
    "rollout/update_received",
    "rollout/weight_staleness",
    "mismatch_k3_kl_staleness_0",
    "train/entropy_gap",
    "train/without_replay/mismatch_k3_kl",
    "train/with_replay/mismatch_k3_kl",
)
SERIES = (*(metric.name for metric in MISMATCH_METRICS), *OTHER_SERIES)
"""Metrics that the rules use; a name without a slash is a metric of the correction, under any of
its prefixes."""
RATIOS = {
    "staleness ratio": (K3, "mismatch_k3_kl_staleness_0"),
    "replay ratio": ("train/without_replay/mismatch_k3_kl", "train/with_replay/mismatch_k3_kl"),
}
NO_MISMATCH_METRIC = (
    "no mismatch metric is in it: mean abs(Δ), k3, or verl's difference of the probabilities "
    "(docs/diagnosis.md lists the names of each framework)"
)


def logged_values(rows: Rows, name: str) -> list[tuple[float, float]]:
    """Step and value of each row that has a metric, finite or not."""
    names = (name,) if "/" in name else tuple(prefix + name for prefix in METRIC_PREFIXES)
    values: list[tuple[float, float]] = []
    for row in rows:
        value = next((row[key] for key in names if isinstance(row.get(key), int | float)), None)
        if value is not None:
            values.append((float(row.get("step", len(values))), float(value)))
    return values


def is_usable(value: float) -> bool:
    """Whether a metric is finite and not absurdly large."""
    return abs(value) <= LARGEST_VALUE


def series_of(rows: Rows, name: str) -> list[float]:
    """The finite values of a metric, in the order of the rows."""
    return [value for _, value in logged_values(rows, name) if is_usable(value)]


def run_statistics(rows: Rows) -> dict[str, float]:
    """Named statistics of a run's metrics. A statistic is missing if its metrics are.

    Statistics of a mismatch metric are of its `distance`.
    """
    series = {name: series_of(rows, name) for name in SERIES}
    for metric in MISMATCH_METRICS:
        series[metric.name] = [metric.distance(value) for value in series[metric.name]]
    values: dict[str, float] = {}
    for name, numbers in series.items():
        values[f"count {name}"] = float(len(numbers))
        if numbers:
            values[f"mean {name}"] = fmean(numbers)
            values[f"max {name}"] = max(numbers)
    for metric in MISMATCH_METRICS:
        values |= _thirds(metric.name, series[metric.name])
        above = [value for value in series[metric.name] if value > metric.largest]
        values[f"share above the limit of {metric.name}"] = len(above) / max(
            len(series[metric.name]), 1
        )
    gaps = series["train/entropy_gap"]
    if len(gaps) >= 5:
        mean = fmean(gaps)
        error = (fmean((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 + 1e-9
        values["gap in standard errors"] = mean / error
    for ratio, names in RATIOS.items():
        numerator, denominator = (values.get(f"mean {name}") for name in names)
        if numerator is not None and denominator is not None:
            values[ratio] = numerator / max(denominator, 1e-12)
    return values


def _thirds(name: str, numbers: list[float]) -> dict[str, float]:
    """Means of the first, second and last third of a run; nothing for a short one."""
    third = len(numbers) // 3
    if len(numbers) < MIN_STEPS:
        return {}
    return {
        f"first third of {name}": fmean(numbers[:third]),
        f"second third of {name}": fmean(numbers[third:-third]),
        f"last third of {name}": fmean(numbers[-third:]),
    }


def _growth(metric: MismatchMetric, values: Values) -> float:
    """Confidence that a mismatch grows over a run although the weights count as current."""
    first, middle, last = (
        values[f"{part} third of {metric.name}"] for part in ("first", "second", "last")
    )
    if values.get("max rollout/weight_staleness", 0) > 0 or first <= 0 or last < metric.grown:
        return 0.0
    low, high = metric.growth
    return 0.7 * min(
        ramp(last, low * first, high * first), ramp(last, 1.2 * middle, metric.late_growth * middle)
    )


def _growth_rule(metric: MismatchMetric) -> Rule:
    name = metric.name
    return Rule(
        cause="weights_not_updated",
        metric=f"last third of {name}",
        condition=lambda _, values, __: _growth(metric, values),
        message=(
            f"{metric.label} grows from {{values[first third of {name}]:.2g}} over {{values[second"
            f" third of {name}]:.2g}} to {{value:.2g}}, but the weights count as current"
        ),
    )


def _noise_rule(metric: MismatchMetric) -> Rule:
    return Rule(
        cause="rounding",
        metric=f"mean {metric.name}",
        condition=lambda value, *_: 0.35 * (value >= metric.noise),
        message=(
            f"{metric.label} is {{value:.2g}} on average; dumps of tokens show what it depends on"
        ),
        share=0.3,
        detail="or another cause",
    )


def _limit_rule(metric: MismatchMetric) -> Rule:
    name = metric.name
    return Rule(
        cause="unexplained",
        metric=f"max {name}",
        condition=lambda value, *_: MIN_NAMED_CONFIDENCE * (value > metric.largest),
        message=(
            f"{metric.label} is up to {{value:.3g}}, above {metric.largest:g} in {{values[share"
            f" above the limit of {name}]:.0%}} of the steps: more than low precision or weights of"
            " a few steps ago make"
        ),
    )


def _has_mismatch(values: Values) -> bool:
    return any(f"mean {metric.name}" in values for metric in MISMATCH_METRICS)


STALENESS = (
    "the sampling weights are {values[mean rollout/weight_staleness]:.1f} optimizer steps behind on"
    " average"
)
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
            (value <= 0.5 and values["count rollout/update_received"] >= 3)
            * (0.5 + 0.4 * ramp(value, 0.5, 0.1))
        ),
        message="after rounding, {value:.0%} of the weight updates arrive in the rollout engine",
    ),
    _growth_rule(MISMATCH_METRICS[0]),
    Rule(
        cause="stale_weights",
        metric="staleness ratio",
        condition=lambda value, values, _: (
            0.9 * (values["mean rollout/weight_staleness"] > 0) * ramp(value, 1.0, 2.0)
        ),
        message=STALENESS
        + "\nk3 of all tokens is {value:.1f} times as large as for tokens from current weights",
    ),
    Rule(
        cause="stale_weights",
        metric="mean rollout/weight_staleness",
        condition=lambda value, values, _: (
            0.7 * (value > 0 and _has_mismatch(values) and "staleness ratio" not in values)
        ),
        message=STALENESS,
    ),
    Rule(
        cause="truncated_sampling",
        metric="gap in standard errors",
        condition=lambda value, values, _: (
            0.7 * (value >= 5 and values["mean train/entropy_gap"] >= 0.02)
        ),
        message=(
            "train/entropy_gap is {values[mean train/entropy_gap]:+.3f} on average, {value:.0f}"
            " standard errors above 0"
        ),
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
    _noise_rule(MISMATCH_METRICS[0]),
)
"""Rules on `run_statistics`; the first rule of a cause whose condition holds makes its finding."""


def metric_findings(rows: Rows) -> list[Finding]:
    """All findings on a run without tokens: of RUN_RULES, and of the rules of each mismatch metric."""
    values = run_statistics(rows)
    findings = [finding for finding in evaluate(RUN_RULES, values).values() if finding is not None]
    too_large: list[str] = []
    for metric in MISMATCH_METRICS:
        rules = (_growth_rule(metric), _noise_rule(metric), _limit_rule(metric))
        for finding in evaluate(rules, values).values():
            if finding is None:
                continue
            if finding.cause == "unexplained":
                too_large += finding.evidence
            else:
                findings.append(finding)
    best: dict[str, Finding] = {}
    for finding in findings:
        known = best.get(finding.cause)
        if known is None or finding.confidence > known.confidence:
            best[finding.cause] = finding
    if too_large:
        best.pop("rounding", None)  # no precision makes a mismatch of this size
        growing = best.get("weights_not_updated")
        if (
            growing is not None and growing.confidence >= MIN_NAMED_CONFIDENCE
        ):  # its mismatch has no limit
            best["weights_not_updated"] = replace(growing, evidence=(*growing.evidence, *too_large))
        else:
            best["unexplained"] = Finding(
                "unexplained", tuple(too_large), MIN_NAMED_CONFIDENCE, share=0.5
            )
    if facts := invalid_values(rows):
        best["broken_metrics"] = Finding("broken_metrics", tuple(facts), CERTAIN, share=0.0)
    return list(best.values())


def invalid_values(rows: Rows, names: tuple[str, ...] = SERIES) -> list[str]:
    """One sentence for each metric with values that are not finite, and for each with impossible values."""
    bounds = {metric.name: (metric.lowest, metric.highest) for metric in MISMATCH_METRICS}
    facts = []
    for name in names:
        values = logged_values(rows, name)
        infinite = [step for step, value in values if not is_usable(value)]
        if infinite:
            share = len(infinite) / len(values)
            facts.append(
                f"{name} is not finite in {len(infinite)} of {len(values)} steps ({share:.0%}),"
                f" first at step {infinite[0]:.0f}"
            )
        lowest, highest = bounds.get(name, (-math.inf, math.inf))
        finite = [(step, value) for step, value in values if is_usable(value)]
        below = [(step, value) for step, value in finite if value < lowest - ROUNDING]
        above = [(step, value) for step, value in finite if value > highest + ROUNDING]
        for impossible, words in ((below, f"below {lowest:g}"), (above, f"above {highest:g}")):
            if impossible:
                step, value = impossible[0]
                facts.append(
                    f"{name} is {value:.3g} at step {step:.0f}; it is {words} in {len(impossible)}"
                    f" of {len(values)} steps, which is impossible"
                )
    return facts


def health(rows: Rows) -> Finding:
    """The result for metrics without a finding: `healthy` with its evidence, or `not_measured` with the reason."""
    series = {metric: series_of(rows, metric.name) for metric in MISMATCH_METRICS}
    judged = [
        metric
        for metric, values in series.items()
        if metric.shows_health and len(values) >= MIN_STEPS
    ]
    if judged:
        facts = []
        for metric in judged:
            values = series[metric]
            facts.append(
                f"judged by {metric.label}: {fmean(values):.2g} on average over {len(values)}"
                f" steps, {max(values):.2g} at most; below {metric.noise:g} it is noise of fp32"
            )
        return Finding("healthy", tuple(facts), 0.9)
    logged = [(metric, values) for metric, values in series.items() if values]
    facts = []
    for metric, values in logged:
        if not metric.shows_health:
            facts.append(
                f"{metric.label} is in the log, but a small value does not show that the engines"
                " agree"
            )
        else:
            facts.append(f"{metric.label} is in {len(values)} steps, fewer than {MIN_STEPS}")
    return Finding("not_measured", tuple(facts) or (NO_MISMATCH_METRIC,), 0.0, 0.0)
