"""What the metrics of a run show about the causes of its mismatch, where there are no dumps or beside them."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from slime_tis.analysis.diagnosis.causes import Finding
from slime_tis.analysis.diagnosis.tokens import ramp

Rows = Sequence[Mapping[str, Any]]
PREFIXES = ("train/", "rollout_corr/", "actor/rollout_corr/")
"""Prefixes under which metrics of a correction are logged."""


def findings(rows: Rows) -> list[Finding]:
    """The findings of all rules on the rows of a metrics.jsonl."""
    return [finding for rule in RULES if (finding := rule(rows)) is not None]


def series(rows: Rows, name: str) -> list[float]:
    """The finite values of a metric of the correction, under any of its prefixes, or of another metric by its name."""
    names = (name,) if "/" in name else tuple(prefix + name for prefix in PREFIXES)
    values = (next((row[key] for key in names if isinstance(row.get(key), (int, float))), None) for row in rows)
    return [float(value) for value in values if value is not None]


def _broken(rows: Rows) -> Finding | None:
    shares = series(rows, "nonfinite_token_fraction")
    if not shares or max(shares) == 0:
        return None
    return Finding(
        cause="broken_tokens",
        confidence=0.9,
        share=0.5,
        evidence=(f"up to {max(shares):.3%} of the tokens of a step have no finite log-prob",),
    )


def _not_received(rows: Rows) -> Finding | None:
    received = series(rows, "rollout/update_received")
    if len(received) < 3 or fmean(received) > 0.5:
        return None
    return Finding(
        cause="weights_not_updated",
        confidence=0.5 + 0.4 * ramp(fmean(received), 0.5, 0.1),
        share=0.5,
        evidence=(f"rounding let {fmean(received):.0%} of the updates of the weights arrive in the rollout engine",),
    )


def _grows(rows: Rows) -> Finding | None:
    size, staleness = series(rows, "train_rollout_logprob_abs_diff"), series(rows, "rollout/weight_staleness")
    third = len(size) // 3
    if third < 3 or (staleness and max(staleness) > 0):
        return None
    first, middle, last = fmean(size[:third]), fmean(size[third:-third]), fmean(size[-third:])
    confidence = min(ramp(last, 3 * first, 8 * first), ramp(last, 1.2 * middle, 1.8 * middle)) if first > 0 else 0.0
    if confidence == 0 or last < 0.01:
        return None
    return Finding(
        cause="weights_not_updated",
        confidence=0.7 * confidence,
        share=0.5,
        evidence=(
            f"mean abs(Δ) grows from {first:.2g} over {middle:.2g} to {last:.2g}, while the weights count as new",
        ),
    )


def _stale(rows: Rows) -> Finding | None:
    staleness = series(rows, "rollout/weight_staleness")
    fresh, size = series(rows, "mismatch_k3_kl_staleness_0"), series(rows, "mismatch_k3_kl")
    if not staleness or fmean(staleness) <= 0 or not size:
        return None
    evidence = [f"the weights that sampled are {fmean(staleness):.1f} optimizer steps behind on average"]
    confidence = 0.6
    if fresh:
        times = fmean(size) / max(fmean(fresh), 1e-12)
        evidence.append(f"k3 of all tokens is {times:.1f} times that of the tokens of current weights")
        confidence = 0.9 * ramp(times, 1.0, 2.0)
    return Finding(cause="stale_weights", confidence=confidence, share=0.5, evidence=tuple(evidence))


def _truncated(rows: Rows) -> Finding | None:
    gaps = series(rows, "train/entropy_gap")
    if len(gaps) < 5:
        return None
    mean = fmean(gaps)
    error = (fmean((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 + 1e-9
    if mean < 0.02 or mean / error < 5:
        return None
    return Finding(
        cause="truncated_sampling",
        confidence=0.7,
        share=0.3,
        evidence=(f"train/entropy_gap is {mean:+.3f} on average, {mean / error:.0f} standard errors above 0",),
        detail="or a lower temperature",
    )


def _routing(rows: Rows) -> Finding | None:
    without = series(rows, "train/without_replay/mismatch_k3_kl")
    replayed = series(rows, "train/with_replay/mismatch_k3_kl")
    if without and replayed and fmean(without) > 2 * fmean(replayed):
        return Finding(
            cause="moe_routing",
            confidence=0.6,
            share=0.3,
            evidence=(f"without replay k3 is {fmean(without) / max(fmean(replayed), 1e-12):.1f} times that with it",),
        )
    return None


def _precision(rows: Rows) -> Finding | None:
    size = series(rows, "train_rollout_logprob_abs_diff")
    if not size or fmean(size) < 2e-3:
        return None
    return Finding(
        cause="rounding",
        confidence=0.35,
        share=0.3,
        evidence=(f"mean abs(Δ) is {fmean(size):.2g} nats; dumps of tokens show what it depends on",),
        detail="or another cause",
    )


RULES = (_broken, _not_received, _grows, _stale, _truncated, _routing, _precision)
