"""Rules on the weights that sampled: their age, missing updates, or another model.

Each rule returns a finding with its share of these tokens' mismatch, or None. The number before a
`ramp` is the rule's largest confidence.
"""

import numpy as np

from slime_tis.analysis.diagnosis.sampler_rules import temperature
from slime_tis.analysis.diagnosis.trained_tokens import (
    MIN_TOKENS,
    Floats,
    Integers,
    Tokens,
    mean_of,
)
from slime_tis.health import NEGLIGIBLE_DIFFERENCE, Finding, ramp

STALE_NOISE = (1.3, 2.5)
"""Noise of tokens from older weights as a multiple of the newest weights' noise, for no and for
full confidence."""
ALL_OLD_CONFIDENCE = 0.6
"""Confidence that stale weights are a cause if even the newest tokens are old."""


def stale_weights(tokens: Tokens) -> Finding | None:
    """abs(Δ) is larger for tokens from older weights, or all tokens come from old weights."""
    staleness = tokens.staleness
    if staleness is None or staleness.max() <= 0:
        return None
    old = staleness > staleness.min()
    behind = f"the sampling weights are {staleness.mean():.1f} optimizer steps behind on average"
    if not old.any():
        evidence = (behind, "all tokens have the same age, so precision may contribute")
        return Finding("stale_weights", evidence, confidence=0.62)
    if min(old.sum(), (~old).sum()) < MIN_TOKENS:
        return None
    ratio = tokens.only(old).noise / max(tokens.only(~old).noise, 1e-9)
    confidence = ramp(ratio, *STALE_NOISE)
    if staleness.min() > 0:
        confidence = max(confidence, ALL_OLD_CONFIDENCE)
    larger = (
        f"abs(Δ) of tokens from older weights is {ratio:.1f} times as large as from the newest"
        " weights"
    )
    share = float(tokens.size[old].sum() / tokens.size.sum())
    return Finding("stale_weights", (behind, larger), 0.93 * confidence, share)


MIN_GROWN_STEPS = 4
"""Smallest number of steps that show a growth."""
STEP_GROWTH = (1.35, 2.0)
"""Median noise of the last third of the steps as a multiple of the first third's, for no and for
full confidence."""
STEP_CORRELATION = (0.4, 0.75)
"""Spearman's correlation of the noise with the step, for no and for full confidence."""


MIN_VERSION_STEPS = 9
"""Smallest number of steps after which one weight version is a fault: fewer steps may train on one
rollout (--num-steps-per-rollout is 8 at most in practice)."""
EQUAL_FIRST = 1e-5
"""Largest mean abs(Δ) of the first step for which the engines started with equal weights, nats."""
LATER_RATIO = 30.0
"""Smallest ratio of the second step's mean abs(Δ) to the first step's that only weights explain."""
GROWING = 1.3
"""Ratio of the largest to the second step's mean abs(Δ) from which on the mismatch grows."""


def weights_not_updated(tokens: Tokens) -> Finding | None:
    """abs(Δ) grows from step to step although the weights count as current."""
    if tokens.step is None:
        return None
    steps = np.unique(tokens.step)
    staleness = tokens.staleness
    ages_differ = staleness is not None and len(np.unique(staleness)) > 1
    has_one_version = tokens.version is not None and len(np.unique(tokens.version)) == 1
    if ages_differ and not (has_one_version and len(steps) >= MIN_VERSION_STEPS):
        # The reported age explains the growth.
        return None
    deduced = _equal_at_first(tokens, steps)
    if deduced is not None:
        return deduced
    if len(steps) < MIN_GROWN_STEPS:
        return None
    noise = np.array([tokens.only(tokens.step == step).median_noise for step in steps])
    third = max(len(steps) // 3, 1)
    first = float(noise[:third].mean())
    last = float(noise[-third:].mean())
    growth = ramp(last / max(first, 1e-9), *STEP_GROWTH)
    growth *= ramp(rank_correlation(noise), *STEP_CORRELATION)
    if growth == 0:
        return None
    evidence = [
        f"abs(Δ) relative to 1 − p grows from {first:.2g} in the first steps to {last:.2g} in the"
        " last steps"
    ]
    confidence = 0.65 * growth
    if has_one_version:
        evidence.append(f"all tokens of {len(steps)} steps have the same weight version")
        if len(steps) >= MIN_VERSION_STEPS:
            confidence = 0.95 * growth
    elif staleness is not None:
        evidence.append(f"the reported staleness is {staleness.mean():.1f} steps in every step")
    return Finding("weights_not_updated", tuple(evidence), confidence)


def _equal_at_first(tokens: Tokens, steps: Integers) -> Finding | None:
    """The engines agree in the first step and differ later, so that only their weights differ.

    Everything else that makes a mismatch is there in the first step as well.
    """
    sizes = []
    for step in steps:
        of_step = tokens.only(tokens.step == step)
        if len(of_step) < MIN_TOKENS:
            return None
        sizes.append(float(of_step.size.mean()))
    if len(sizes) < 2:
        return None
    first, second, *_ = sizes
    least = max(LATER_RATIO * first, NEGLIGIBLE_DIFFERENCE)
    # If the second step agrees, too, an update did arrive, and something else began later.
    if first > EQUAL_FIRST or second < least:
        return None
    later = max(sizes[1:])
    confidence = 0.65
    if later > GROWING * second:
        # A changed setting makes a constant mismatch, and so do weights of the step before.
        confidence = 0.92
    evidence = (
        f"abs(Δ) is {first:.2g} nats in the first step and up to {later:.2g} later: the engines"
        " compute the same function of their weights, so the weights differ"
    )
    return Finding("weights_not_updated", (evidence,), confidence)


def rank_correlation(values: Floats) -> float:
    """Returns Spearman's correlation of values with their index."""
    # The argsort of an argsort gives the ranks of the values.
    ranks = np.argsort(np.argsort(values))
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])


LARGEST_EXPONENT = 2.0
"""Bound of log ρ in the mean of the ratio ρ, nats: without it, a few tokens determine the mean."""
STANDARD_ERRORS = 5.0
"""Distance from 1, in standard errors, from which on a mean ratio is above 1."""
COMPATIBLE_ERRORS = 3.0
"""Distance, in standard errors, up to which a mean may have its expected value."""
MOST_TOKENS = 0.95
"""Share of the tokens that must have a part of the mismatch. Otherwise the others are broken."""
MOST_TOKENS_SHARE = 0.2
"""Smallest share of the mismatch that these tokens have."""
LARGEST_OF_MODELS = 4.0
"""Largest mean abs(Δ) of two language models on the samples of one of them, nats."""
ONLY_REPORTED = "only the reported log-probs are wrong"


def another_model(tokens: Tokens) -> Finding | None:
    """The tokens are samples of training's distribution; another model made the log-probs.

    With ρ = π_train/π_rollout, E[ρ] = 1 for tokens that were sampled from π_rollout. Here E[1/ρ] =
    1 instead. Both are bounded, so that E ≤ 1.
    """
    gap, gap_error = mean_of(tokens.surprise, tokens.sample)
    # Without entropy the gap is NaN: then nothing shows whose samples the tokens are.
    is_not_trained = not abs(gap) <= COMPATIBLE_ERRORS * gap_error
    if len(tokens) < 10 * MIN_TOKENS or is_not_trained:
        return None
    if tokens.size.mean() > LARGEST_OF_MODELS:
        return None
    ordered = np.sort(tokens.size)
    most = ordered[: int(MOST_TOKENS * len(ordered))]
    are_few_broken = most.sum() < MOST_TOKENS_SHARE * ordered.sum()
    if are_few_broken or temperature(tokens).confidence > 0:
        return None
    ratios = _bounded_ratio(tokens.log_ratio)
    inverse_ratios = _bounded_ratio(-tokens.log_ratio)
    ratio, error = mean_of(ratios, tokens.sample)
    inverse, inverse_error = mean_of(inverse_ratios, tokens.sample)
    difference, difference_error = mean_of(ratios - inverse_ratios, tokens.sample)
    is_above_1 = ratio - 1 > STANDARD_ERRORS * error
    is_above_inverse = difference > STANDARD_ERRORS * difference_error
    is_inverse_at_1 = inverse - 1 <= COMPATIBLE_ERRORS * inverse_error
    if not (is_above_1 and is_above_inverse and is_inverse_at_1):
        return None
    evidence = (
        (
            "the tokens are samples of training's distribution: the mean of min(π_rollout/π_train,"
            f" e²) is {inverse:.3f} ± {inverse_error:.3f}, as for log-probs of another model on"
            " these tokens"
        ),
        (
            "they are no samples of the reported distribution: the mean of min(π_train/π_rollout,"
            f" e²) is {ratio:.2f} ± {error:.2f}, above 1"
        ),
    )
    return Finding("other_model", evidence, 0.9)


def sampled_distribution(tokens: Tokens) -> str:
    """Returns which distribution the tokens are samples of, in words; empty if it is unclear."""
    tokens = tokens.only(tokens.finite)
    gap, gap_error = mean_of(tokens.surprise, tokens.sample)
    if len(tokens) < 10 * MIN_TOKENS or not np.isfinite(gap):
        return ""
    ratio, error = mean_of(_bounded_ratio(tokens.log_ratio), tokens.sample)
    is_reported = ratio - 1 <= COMPATIBLE_ERRORS * error
    is_trained = abs(gap) <= COMPATIBLE_ERRORS * gap_error
    if is_reported == is_trained:
        # Both distributions are too close, or none fits.
        return ""
    mean = f"the mean of min(π_train/π_rollout, e²) is {ratio:.3f} ± {error:.3f}"
    if is_reported:
        return (
            f"the tokens are samples of the reported distribution ({mean}): the engines' networks"
            " or inputs differ"
        )
    return f"the tokens are samples of training's distribution ({mean}): {ONLY_REPORTED}"


def _bounded_ratio(log_ratio: Floats) -> Floats:
    """Returns min(ρ, e²), whose mean is at most 1 if the mean of ρ is 1."""
    bounded: Floats = np.exp(np.minimum(log_ratio, LARGEST_EXPONENT))
    return bounded
