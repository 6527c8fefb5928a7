"""Rules of the diagnosis on the metrics of a run, in a log or a metrics.jsonl.

rows → series of finite values → named statistics → findings

`RUN_RULES` apply with and without tokens. Limits and growth of the `MISMATCH_METRICS` judge a run
without tokens, and one whose tokens show no mismatch. A run without tokens is healthy only if one
of these metrics is finite in enough steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from slime_tis.health import MAX_K3, METRIC_PREFIXES, Finding, Rows, Rule, Values, evaluate, ramp

LARGEST_VALUE = 1e12
"""A larger metric counts as not finite. No mean over tokens reaches it, and its square is still a
float."""
ROUNDING = 1e-6
"""Error of a mean in fp32; a value this far beyond a bound is possible."""
MIN_STEPS = 9
"""Smallest number of finite values that show health or growth: three for each third of the run."""
MIN_NAMED_CONFIDENCE = 0.7
"""Below this confidence several causes share the pattern. The answer is `unexplained`, and these
causes are candidates."""
MIN_GAPS = 5
"""Smallest number of values of train/entropy_gap that have a standard error."""
CERTAIN = 0.95
"""Confidence of a fact that needs no interpretation, such as a NaN."""


@dataclass(frozen=True, kw_only=True)
class MismatchMetric:
    """A metric that compares the log-probs of both engines, with its limits."""

    name: str
    """Our name; a name without a slash has one of METRIC_PREFIXES."""
    label: str
    """The metric in words."""
    lowest: float = 0.0
    """Smallest possible value."""
    highest: float = math.inf
    """Largest possible value."""
    distance: Callable[[float], float] = float
    """Size of the mismatch as a function of the value; 0 is agreement."""
    noise: float
    """Smallest mean distance that is a visible mismatch; two fp32 engines stay below it."""
    largest: float
    """Largest distance that low precision or weights of a few steps ago cause."""
    growth: tuple[float, float]
    """Growth from the first to the last third of a run, as a factor, for no and for full
    confidence. With weights that are never updated, abs(Δ) grows 2 to 5 times and k3 ≈ Δ²/2 grows 5
    to 19 times."""
    late_growth: float = 1.6
    """Growth from the second to the last third, as a factor, for full confidence. A single jump has
    ended before."""
    grown: float
    """Smallest mean distance in the last third that counts as grown."""
    shows_health: bool = True
    """Whether a small value shows that the engines agree. Means of Δ cancel, and a correlation
    ignores scale."""


EARLY_LATE_GROWTH = 1.2
"""Growth from the second to the last third, as a factor, for no confidence."""
ABS = "train_rollout_logprob_abs_diff"
"""Metric of the mean abs(Δ)."""
K3 = "mismatch_k3_kl"
"""Metric of the k3 estimate of the KL."""
K1 = "mismatch_kl"
"""Metric of the k1 estimate of the KL."""
PROBABILITIES = "training/rollout_probs_diff_mean"
"""Metric of verl, the mean abs(π_train − π_rollout)."""
PEARSON = "training/rollout_actor_probs_pearson_corr"
"""Metric of verl, the correlation of the probabilities."""
# For normal noise k3 = π/4 · (mean abs(Δ))², so the limits of k3 and abs(Δ) are the same.
ABS_METRIC = MismatchMetric(
    name=ABS,
    label="mean abs(Δ) (nats)",
    noise=2e-3,
    largest=0.25,
    growth=(3, 8),
    late_growth=1.8,
    grown=0.01,
)
MISMATCH_METRICS = (
    ABS_METRIC,
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
"""Metrics that rules use without a limit of the mismatch."""
SERIES = (*(metric.name for metric in MISMATCH_METRICS), *OTHER_SERIES)
"""Metrics that the rules use. A name without a slash is a metric of the correction, which has any
of the METRIC_PREFIXES."""
RATIOS = {
    "staleness ratio": (K3, "mismatch_k3_kl_staleness_0"),
    "replay ratio": ("train/without_replay/mismatch_k3_kl", "train/with_replay/mismatch_k3_kl"),
}
"""Statistics that are the ratio of two metrics' means."""
NO_MISMATCH_METRIC = (
    "no mismatch metric is in it: mean abs(Δ), k3, or verl's difference of the probabilities "
    "(docs/diagnosis.md lists the names of each framework)"
)
ALWAYS_0 = (
    "it is always 0, as with --true-on-policy; a metric that compares one engine's log-probs with"
    " themselves looks the same"
)


def logged_values(rows: Rows, name: str) -> list[tuple[float, float]]:
    """Returns step and value of the rows that have a metric, finite or not."""
    names = [name]
    if "/" not in name:
        names = [prefix + name for prefix in METRIC_PREFIXES]
    values: list[tuple[float, float]] = []
    for row in rows:
        numbers = [row[key] for key in names if isinstance(row.get(key), int | float)]
        if numbers:
            step = row.get("step", len(values))
            values.append((float(step), float(numbers[0])))
    return values


def is_usable(value: float) -> bool:
    """Whether a metric is finite and not absurdly large."""
    return abs(value) <= LARGEST_VALUE


def series_of(rows: Rows, name: str) -> list[float]:
    """Returns the finite values of a metric, in the order of the rows."""
    return [value for _, value in logged_values(rows, name) if is_usable(value)]


def run_statistics(rows: Rows) -> dict[str, float]:
    """Returns named statistics of a run's metrics. A statistic is missing if its metrics are.

    For mismatch metrics, `distance` replaces the value.
    """
    series = {name: series_of(rows, name) for name in SERIES}
    for metric in MISMATCH_METRICS:
        series[metric.name] = [metric.distance(value) for value in series[metric.name]]
    statistics: dict[str, float] = {}
    for name, values in series.items():
        statistics[f"count {name}"] = float(len(values))
        if values:
            statistics[f"mean {name}"] = fmean(values)
            statistics[f"max {name}"] = max(values)
    for metric in MISMATCH_METRICS:
        values = series[metric.name]
        statistics |= _thirds(metric.name, values)
        above = sum(value > metric.largest for value in values)
        statistics[f"share above the limit of {metric.name}"] = above / max(len(values), 1)
    gaps = series["train/entropy_gap"]
    if len(gaps) >= MIN_GAPS:
        mean = fmean(gaps)
        variance = fmean((gap - mean) ** 2 for gap in gaps)
        # The addend avoids a division by 0 if all gaps are equal.
        error = (variance / len(gaps)) ** 0.5 + 1e-9
        statistics["gap in standard errors"] = mean / error
    for ratio, (numerator, denominator) in RATIOS.items():
        if f"mean {numerator}" in statistics and f"mean {denominator}" in statistics:
            mean = max(statistics[f"mean {denominator}"], 1e-12)
            statistics[ratio] = statistics[f"mean {numerator}"] / mean
    return statistics


def _thirds(name: str, values: list[float]) -> dict[str, float]:
    """Returns the means of a run's thirds; nothing for a short run."""
    if len(values) < MIN_STEPS:
        return {}
    third = len(values) // 3
    return {
        f"first third of {name}": fmean(values[:third]),
        f"second third of {name}": fmean(values[third:-third]),
        f"last third of {name}": fmean(values[-third:]),
    }


def _growth(metric: MismatchMetric, values: Values) -> float:
    """Returns the confidence that a mismatch grows although the weights count as current."""
    first = values[f"first third of {metric.name}"]
    second = values[f"second third of {metric.name}"]
    last = values[f"last third of {metric.name}"]
    if values.get("max rollout/weight_staleness", 0) > 0 or first <= 0 or last < metric.grown:
        return 0.0
    low, high = metric.growth
    growth = ramp(last, low * first, high * first)
    late_growth = ramp(last, EARLY_LATE_GROWTH * second, metric.late_growth * second)
    return 0.7 * min(growth, late_growth)


def _growth_rule(metric: MismatchMetric) -> Rule:
    """Returns the rule that a mismatch metric grows."""
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
    """Returns the rule that a mismatch metric is visible."""
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
    """Returns the rule that a mismatch metric is too large for precision and staleness."""
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
    """Whether the run has any mismatch metric."""
    return any(f"mean {metric.name}" in values for metric in MISMATCH_METRICS)


STALENESS = (
    "the sampling weights are {values[mean rollout/weight_staleness]:.1f} optimizer steps behind on"
    " average"
)
"""Evidence of both rules on stale weights."""
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
    _growth_rule(ABS_METRIC),
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
    _noise_rule(ABS_METRIC),
)
"""Rules on `run_statistics`. Of several rules of a cause, the first one that holds is used."""


def metric_findings(rows: Rows) -> list[Finding]:
    """Returns all findings on a run without tokens.

    They come from RUN_RULES and from the rules on mismatch metrics.
    """
    values = run_statistics(rows)
    findings = list(evaluate(RUN_RULES, values).values())
    for metric in MISMATCH_METRICS:
        rules = (_growth_rule(metric), _noise_rule(metric), _limit_rule(metric))
        findings += evaluate(rules, values).values()
    too_large: list[str] = []
    best: dict[str, Finding] = {}
    for finding in findings:
        if finding is None:
            continue
        if finding.cause == "unexplained":
            too_large += finding.evidence
        elif finding.cause not in best or finding.confidence > best[finding.cause].confidence:
            best[finding.cause] = finding
    if too_large:
        # No precision makes a mismatch of this size.
        best.pop("rounding", None)
        growing = best.get("weights_not_updated")
        if growing is not None and growing.confidence >= MIN_NAMED_CONFIDENCE:
            # The mismatch of weights that are never updated has no limit.
            best["weights_not_updated"] = replace(growing, evidence=(*growing.evidence, *too_large))
        else:
            best["unexplained"] = Finding(
                "unexplained", tuple(too_large), MIN_NAMED_CONFIDENCE, share=0.5
            )
    facts = invalid_values(rows)
    if facts:
        best["broken_metrics"] = Finding("broken_metrics", tuple(facts), CERTAIN, share=0.0)
    return list(best.values())


def invalid_values(rows: Rows, names: tuple[str, ...] = SERIES) -> list[str]:
    """Returns a sentence for each metric with values that are not finite, or impossible."""
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
    """Returns the result for metrics without a finding.

    It is `healthy` with its evidence, or `not_measured` with the reason.
    """
    judged = []
    too_few = []
    for metric in MISMATCH_METRICS:
        values = series_of(rows, metric.name)
        if not values:
            continue
        if not metric.shows_health:
            too_few.append(
                f"{metric.label} is in the log, but a small value does not show that the engines"
                " agree"
            )
        elif len(values) < MIN_STEPS:
            too_few.append(f"{metric.label} is in {len(values)} steps, fewer than {MIN_STEPS}")
        else:
            fact = (
                f"judged by {metric.label}: {fmean(values):.2g} on average over {len(values)}"
                f" steps, {max(values):.2g} at most; below {metric.noise:g} it is noise of fp32"
            )
            if not any(values):
                fact += f"; {ALWAYS_0}"
            judged.append(fact)
    if judged:
        return Finding("healthy", tuple(judged), 0.9)
    return Finding("not_measured", tuple(too_few) or (NO_MISMATCH_METRIC,), 0.0, 0.0)
