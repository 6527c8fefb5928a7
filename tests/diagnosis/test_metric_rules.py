"""The diagnosis of a run from its metrics: healthy, not healthy, or not measured."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from slime_tis.analysis.diagnosis import diagnose
from slime_tis.analysis.diagnosis.diagnosis_text import as_text
from slime_tis.analysis.diagnosis.metric_rules import SERIES, invalid_values, series_of

ABS = "train/train_rollout_logprob_abs_diff"
K3 = "train/mismatch_k3_kl"
K1 = "train/mismatch_kl"
PROBABILITIES = "training/rollout_probs_diff_mean"
PEARSON = "training/rollout_actor_probs_pearson_corr"
STALENESS = "rollout/weight_staleness"
STEPS = 12
"""Steps of a run with constant metrics."""

Rows = list[dict[str, Any]]


def constant(metrics: Mapping[str, Any]) -> Rows:
    """Rows with the same values in every step."""
    return [{"step": step, **metrics} for step in range(STEPS)]


def one(name: str, *values: Any) -> Rows:
    """Rows of one metric with these values, or with one value in every step."""
    if len(values) == 1:
        return constant({name: values[0]})
    return [{"step": step, name: value} for step, value in enumerate(values)]


def causes(rows: Rows) -> list[str]:
    return [finding.cause for finding in diagnose(None, rows).findings]


CONSTANT = {
    "broken": ({"train/nonfinite_token_fraction": 0.02}, "broken_tokens", 0.9, "2.000%"),
    "received": (
        {"rollout/update_received": 0.3},
        "weights_not_updated",
        0.7,
        "30% of the weight updates",
    ),
    "stale": (
        {
            "train/mismatch_k3_kl": 0.02,
            "train/mismatch_k3_kl_staleness_0": 0.001,
            "rollout/weight_staleness": 2.0,
        },
        "stale_weights",
        0.9,
        "20.0 times",
    ),
    "stale without ages": (
        {K3: 0.02, "rollout/weight_staleness": 2.0},
        "stale_weights",
        0.7,
        "2.0 optimizer steps",
    ),
    "stale with abs(Δ)": (
        {ABS: 0.02, "rollout/weight_staleness": 2.0},
        "stale_weights",
        0.7,
        "2.0 optimizer steps",
    ),
    "truncated": ({"train/entropy_gap": 0.1}, "truncated_sampling", 0.7, "+0.100 on average"),
    "routing": (
        {"train/without_replay/mismatch_k3_kl": 0.3, "train/with_replay/mismatch_k3_kl": 0.1},
        "moe_routing",
        0.7,
        "3.0 times",
    ),
    "noise of abs(Δ)": ({ABS: 0.01}, "unexplained", 0.35, "precision of the engines"),
    "noise of k3": ({K3: 1e-3}, "unexplained", 0.35, "precision of the engines"),
    "noise of probabilities": (
        {PROBABILITIES: 0.003},
        "unexplained",
        0.35,
        "precision of the engines",
    ),
    "abs(Δ) too large": ({ABS: 2.0}, "unexplained", 0.7, "above 0.25 in 100% of the steps"),
    "k3 too large": ({K3: 10.0}, "unexplained", 0.7, "above 0.05 in 100% of the steps"),
    "k1 too large": ({K1: -0.2}, "unexplained", 0.7, "up to 0.2, above 0.05"),
    "probabilities too far": ({PROBABILITIES: 0.3}, "unexplained", 0.7, "above 0.05"),
    "no correlation": ({PEARSON: 0.6}, "unexplained", 0.7, "up to 0.4, above 0.01"),
}


@pytest.mark.parametrize(
    ("metrics", "cause", "confidence", "text"), CONSTANT.values(), ids=CONSTANT
)
def test_constant_metrics_name_the_cause(
    metrics: dict[str, float], cause: str, confidence: float, text: str
) -> None:
    # A step may lack values.
    incomplete = dict.fromkeys(metrics)
    result = diagnose(None, [*constant(metrics), incomplete])
    assert (result.cause, result.tokens) == (cause, 0)
    assert result.findings[0].confidence == pytest.approx(confidence)
    assert text in result.findings[0].evidence[-1]


GROWING = {
    "abs(Δ) 4 times every 8 steps": (ABS, [2 ** (step // 4) / 100 for step in range(24)]),
    "k3 by 10 % a step": (K3, [1e-3 * 1.1**step for step in range(60)]),
    "k3 from 5e-4 to 5e-3": (K3, [5e-4 + 4.5e-3 * step / 19 for step in range(20)]),
    "k3 linear from 0": (K3, [1e-4 * step for step in range(1, 41)]),
    "probabilities by 9 % a step": (PROBABILITIES, [0.002 * 1.09**step for step in range(40)]),
    "1 − correlation": (PEARSON, [1 - 0.001 * 1.1**step for step in range(40)]),
}


@pytest.mark.parametrize(("name", "values"), GROWING.values(), ids=GROWING)
def test_a_growing_mismatch_is_a_missing_update(name: str, values: list[float]) -> None:
    first = diagnose(None, one(name, *values)).findings[0]
    assert first.cause == "weights_not_updated"
    assert first.confidence == pytest.approx(0.7)


@pytest.mark.parametrize(("name", "values"), GROWING.values(), ids=GROWING)
def test_one_value_that_is_not_finite_hides_no_growth(name: str, values: list[float]) -> None:
    values = list(values)
    values[2] = math.nan
    assert {"weights_not_updated", "broken_metrics"} <= set(causes(one(name, *values)))


def test_slow_growth_is_a_candidate() -> None:
    values = [1e-3 + 4e-3 * step / 39 for step in range(40)]
    first, *candidates = causes(one(K3, *values))
    assert first == "unexplained"
    assert "weights_not_updated" in candidates


def test_old_weights_explain_growth() -> None:
    rows = []
    for step in range(STEPS):
        rows.append({"step": step, K3: 1e-3 * 1.5**step, STALENESS: 2.0})
    assert causes(rows)[0] == "stale_weights"


def test_a_size_that_no_age_explains_is_named() -> None:
    assert causes(constant({K3: 10.0, STALENESS: 1.0})) == ["stale_weights", "unexplained"]


HEALTHY = {
    "abs(Δ)": (ABS, 1e-4),
    "k3": (K3, 1e-7),
    "probabilities": (PROBABILITIES, 1e-4),
    "zero": (K3, 0.0),
}


@pytest.mark.parametrize(("name", "value"), HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_run_names_its_metric(name: str, value: float) -> None:
    (finding,) = diagnose(None, one(name, value)).findings
    assert finding.cause == "healthy"
    assert "judged by" in finding.evidence[0]
    assert "12 steps" in finding.evidence[0]


NOT_MEASURED = {
    "no mismatch metric": (one("loss", 0.1), "no mismatch metric"),
    "two steps": (one(K3, 1e-7, 1e-7), "2 steps, fewer than 9"),
    "only k1": (one(K1, 1e-9), "does not show that the engines agree"),
    "only a correlation": (one(PEARSON, 0.99999), "does not show that the engines agree"),
    "only values of null": (one(K3, None), "no mismatch metric"),
    "text": (one(K3, "1e-7"), "no mismatch metric"),
}


@pytest.mark.parametrize(("run", "words"), NOT_MEASURED.values(), ids=NOT_MEASURED)
def test_an_unmeasured_mismatch_has_a_reason(run: Rows, words: str) -> None:
    result = diagnose(None, run)
    assert (result.cause, result.findings[0].confidence) == ("not_measured", 0.0)
    assert words in result.findings[0].evidence[0]


@pytest.mark.parametrize("run", [run for run, _ in NOT_MEASURED.values()], ids=NOT_MEASURED)
def test_an_unmeasured_mismatch_is_not_judged(run: Rows) -> None:
    text = as_text(diagnose(None, run), "a run")
    assert "healthy" not in text
    assert "confidence" not in text


INVALID = {
    "all NaN": (one(K3, math.nan), "not finite in 12 of 12 steps (100%), first at step 0"),
    "infinite in a step": (
        one(ABS, *[1e-4] * 11, math.inf),
        "not finite in 1 of 12 steps (8%), first at step 11",
    ),
    "−∞ and ∞": (one(K3, math.inf, -math.inf, *[1e-7] * 10), "not finite in 2 of 12 steps"),
    "absurdly large": (one(K3, 1e308), "not finite in 12 of 12 steps"),
    "k3 below 0": (one(K3, -1.0), "below 0 in 12 of 12 steps, which is impossible"),
    "abs(Δ) below 0": (
        one(ABS, *[1e-4] * 11, -0.1),
        "is -0.1 at step 11; it is below 0 in 1 of 12",
    ),
    "probability above 1": (one(PROBABILITIES, 1.5), "above 1 in 12 of 12"),
    "correlation above 1": (one(PEARSON, 1.5), "above 1 in 12 of 12"),
    "correlation below −1": (one(PEARSON, -2.0), "below -1 in 12 of 12"),
}


@pytest.mark.parametrize(("run", "words"), INVALID.values(), ids=INVALID)
def test_invalid_values_are_a_finding(run: Rows, words: str) -> None:
    findings = diagnose(None, run).findings
    (broken,) = [finding for finding in findings if finding.cause == "broken_metrics"]
    assert words in broken.evidence[0]


@pytest.mark.parametrize("run", [run for run, _ in INVALID.values()], ids=INVALID)
def test_invalid_values_are_never_healthy(run: Rows) -> None:
    assert "healthy" not in causes(run)


def test_a_metric_that_is_always_0_may_compare_an_engine_with_itself() -> None:
    (finding,) = diagnose(None, one(K3, 0.0)).findings
    assert finding.cause == "healthy"
    assert "one engine's log-probs with themselves" in finding.evidence[0]


def test_rounding_below_zero_is_possible() -> None:
    assert invalid_values(one(K3, -1e-8)) == []


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e12, 0.0, -1.0], ids=repr
)
def test_any_value_of_any_metric_has_a_diagnosis(name: str, value: float) -> None:
    if "/" not in name:
        name = f"correction/{name}"
    result = diagnose(None, one(name, value) + one(name, 1e-3))
    assert math.isfinite(result.findings[0].confidence)


@pytest.mark.parametrize(
    "prefix", ["train/", "rollout_corr/", "actor/rollout_corr/", "correction/"]
)
def test_metrics_are_known_under_each_prefix(prefix: str) -> None:
    run = one(f"{prefix}mismatch_k3_kl", 0.02, math.nan, 0.01)
    assert series_of(run, "mismatch_k3_kl") == [0.02, 0.01]


def test_a_share_is_shown_only_for_tokens() -> None:
    text = as_text(diagnose(None, one(K3, 10.0)), "a run")
    assert "confidence 70%" in text
    assert "of the mismatch" not in text
