"""Compares both engines' likeliest next tokens, and names the sampler's setting that changes them.

d = log π_train − log π_rollout of the K likeliest tokens at each position. A penalty changes tokens
that came before, a bias few token ids. Truncation or banned tokens change all d of a position by
one amount. A temperature changes d in proportion to log π_train. Precision, weights and prompts
leave no such pattern.

Shapes: P positions, K tokens; NaN if a position has fewer tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_tis.health import NEGLIGIBLE_DIFFERENCE

Array = NDArray[Any]

MAX_RESIDUAL = 0.03
"""Largest share of the difference that a pattern may leave unexplained."""
MAX_NOISY_RESIDUAL = 0.1
"""The same limit if the remainder is below the engines' noise."""
ONE_SIGN = 0.9
"""Smallest |Σd| / Σ|d| of differences that have one sign."""
MIN_CHANGED = 4
"""Smallest number of tokens that a penalty or a bias must have changed."""
MIN_UNCHANGED = 16
"""Smallest number of tokens that a penalty or a bias must have left unchanged."""
MAX_BIASED = 3
"""Largest number of token ids with a bias."""
MAX_TEMPERATURE = 5.0
"""Largest ratio of one temperature to the other."""
MIN_DISTANCE = 1e-6
"""Smallest distance of a token's log-prob to the likeliest one's that gives a slope, nats."""
REMAINING = 1e-6
"""Smallest probability of all tokens outside of the K likeliest ones."""


@dataclass(frozen=True)
class Position:
    """The likeliest next tokens after a text."""

    text: Sequence[int]
    train: Mapping[int, float]
    """Log-probs by the training engine, by token id."""
    rollout: Mapping[int, float]
    """Log-probs of the same tokens by the rollout engine."""


@dataclass(frozen=True, kw_only=True)
class TopTokens:
    """The difference of both engines' likeliest tokens."""

    size: str
    """In words: mean KL(π_train ‖ π_rollout), nats, with all other tokens as one; mean probability
    of the K tokens in training; largest |d|."""
    cause: str
    """A cause of `diagnose.CAUSES`; empty if no setting of the sampler explains the difference."""
    evidence: str
    """The pattern of the differences, as a sentence."""


@dataclass(frozen=True)
class _Pattern:
    """The effect of a setting of the sampler."""

    cause: str
    evidence: str
    size: float
    """Mean |d| that the pattern explains, nats."""
    residual: float
    """Mean |d| that the pattern leaves, nats."""

    def holds(self, noise: float) -> bool:
        """Whether the pattern explains enough; `noise` is the engines' mean |d|, nats."""
        bound = min(max(MAX_RESIDUAL * self.size, noise), MAX_NOISY_RESIDUAL * self.size)
        return self.size >= NEGLIGIBLE_DIFFERENCE and self.residual <= bound


def compare_top_tokens(positions: Sequence[Position], noise: float) -> TopTokens:
    """Compares the likeliest tokens of both engines.

    Args:
        positions: At least one.
        noise: Mean |d| that the precision of the engines explains, nats.
    """
    width = max(len(position.train) for position in positions)
    shape = (len(positions), width)
    token = np.full(shape, np.nan)
    train = np.full(shape, np.nan)
    rollout = np.full(shape, np.nan)
    came_before = np.zeros(shape, bool)
    for row, position in enumerate(positions):
        columns = slice(len(position.train))
        token[row, columns] = list(position.train)
        train[row, columns] = list(position.train.values())
        rollout[row, columns] = [position.rollout[each] for each in position.train]
        came_before[row] = np.isin(token[row], list(position.text))
    pattern = _best_pattern(token, train, train - rollout, came_before, noise)
    size = _size_in_words(train, rollout)
    return TopTokens(size=size, cause=pattern.cause, evidence=pattern.evidence)


def _size_in_words(train: Array, rollout: Array) -> str:
    """Returns mass, KL divergence and largest difference of log-probs [P, K]."""
    p = np.exp(train)
    q = np.exp(rollout)
    d = train - rollout
    # Rounding can make the sum of the likeliest slightly larger than 1.
    p_rest = np.maximum(1 - np.nansum(p, 1), REMAINING)
    q_rest = np.maximum(1 - np.nansum(q, 1), REMAINING)
    kl = float(np.mean(np.nansum(p * d, 1) + p_rest * np.log(p_rest / q_rest)))
    mass = float(np.nansum(p, 1).mean())
    largest = float(np.nanmax(np.abs(d)))
    positions, width = train.shape
    return (
        f"the {width} likeliest tokens at {positions} positions ({mass:.0%} of the probability)"
        f" have a KL divergence of {kl:.2g} nats and differ by at most {largest:.2g}"
    )


def _best_pattern(
    token: Array, train: Array, d: Array, came_before: Array, noise: float
) -> _Pattern:
    """Returns the pattern with the smallest residual; one without a cause if none holds."""
    mean = _mean(d)
    if mean >= NEGLIGIBLE_DIFFERENCE:
        patterns = (
            _truncation(d),
            _penalty(d, came_before),
            *_biases(token, d),
            _temperature(train, d),
        )
        holding = []
        for pattern in patterns:
            if pattern is not None and pattern.holds(noise):
                holding.append(pattern)
        if holding:
            return min(holding, key=lambda pattern: pattern.residual / pattern.size)
    if mean < max(noise, NEGLIGIBLE_DIFFERENCE):
        evidence = (
            "they agree, so a larger mismatch of the sampled tokens comes from how these are"
            " reported"
        )
    else:
        evidence = (
            "no setting of the sampler makes this pattern: weights, input, settings or precision of"
            " a network differ"
        )
    return _Pattern(cause="", evidence=evidence, size=0.0, residual=mean)


def _centered(d: Array, reference: Array | None = None) -> Array:
    """Returns d [P, K] minus its median at each position, over the reference tokens [P, K].

    The normalization of the log-probs adds a constant to all d of a position.
    """
    chosen = d
    if reference is not None:
        chosen = np.where(reference, d, np.nan)
    centered: Array = d - np.nanmedian(chosen, 1, keepdims=True)
    return centered


def _truncation(d: Array) -> _Pattern | None:
    """All tokens of a position differ by one amount, and are less likely in training."""
    if np.nansum(d) >= -ONE_SIGN * np.nansum(np.abs(d)):
        return None
    evidence = (
        "the tokens of a position differ by one amount: the rollout engine omits other tokens"
    )
    return _Pattern("truncated_sampling", evidence, _mean(d), _mean(_centered(d)))


def _penalty(d: Array, came_before: Array) -> _Pattern | None:
    """Only tokens that came before differ."""
    is_new = np.isfinite(d) & ~came_before
    # A single reference token would be centered to 0.
    usable = is_new.sum(1) >= 2
    if not usable.any():
        return None
    left = _centered(d[usable], is_new[usable])
    old = left[came_before[usable] & np.isfinite(left)]
    new = left[is_new[usable]]
    if len(old) < MIN_CHANGED or len(new) < MIN_UNCHANGED:
        return None
    if abs(old.sum()) < ONE_SIGN * np.abs(old).sum():
        return None
    setting = "prefers repeated tokens"
    if old.sum() > 0:
        setting = "applies a penalty to repeated tokens"
    evidence = (
        f"only tokens that came before differ, by {abs(old.mean()):.2g} nats on average: the"
        f" rollout engine {setting}"
    )
    return _Pattern("penalty", evidence, _mean(old), _mean(new))


def _biases(token: Array, d: Array) -> Iterator[_Pattern]:
    """Only a few token ids differ, each by one amount. Yields a pattern for 1, 2 … token ids."""
    is_other = np.isfinite(d)
    chosen: list[int] = []
    for _ in range(MAX_BIASED):
        left = np.abs(_centered(d, is_other))
        totals: dict[int, float] = {}
        for token_id, size in zip(token[is_other], left[is_other], strict=True):
            totals[int(token_id)] = totals.get(int(token_id), 0.0) + float(size)
        largest = max(totals, key=lambda token_id: totals[token_id])
        chosen.append(largest)
        # The remaining tokens become the reference, and the next candidate is looked for.
        is_other &= token != largest
        if (is_other.sum(1) < 2).any() or is_other.sum() < MIN_UNCHANGED:
            return
        left = _centered(d, is_other)
        residuals = [left[is_other]]
        biases = []
        changed = 0
        for token_id in chosen:
            values = left[token == token_id]
            median = np.median(values)
            biases.append(float(np.abs(median)))
            residuals.append(values - median)
            changed += len(values)
        if changed >= MIN_CHANGED:
            evidence = (
                f"only token ids {chosen} differ: the rollout engine adds a bias to their logits"
            )
            yield _Pattern("penalty", evidence, min(biases), _mean(np.concatenate(residuals)))


def _temperature(train: Array, d: Array) -> _Pattern | None:
    """d is proportional to log π_train, up to one constant per position."""
    # A line through the likeliest token, which is the first one.
    x = train - train[:, :1]
    y = d - d[:, :1]
    counts = np.abs(x) > MIN_DISTANCE
    slope = 0.0
    if counts.any():
        # A median, because a penalty or a bias changes single tokens by nats.
        slope = _weighted_median(y[counts] / x[counts], np.abs(x[counts]))
    if not 1 / MAX_TEMPERATURE <= 1 - slope <= MAX_TEMPERATURE:
        return None
    evidence = (
        f"differences grow with the log-probs: the rollout engine samples at {1 / (1 - slope):.3g}"
        " times the training temperature, or scales its logits"
    )
    residual = _mean(_centered(d - slope * train))
    return _Pattern("temperature", evidence, _mean(_centered(d)), residual)


def _mean(values: Array) -> float:
    """Returns the mean absolute value, without NaN."""
    return float(np.nanmean(np.abs(values)))


def _weighted_median(values: Array, weights: Array) -> float:
    """Returns the value at which half of the weight is reached."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    middle = np.searchsorted(total, total[-1] / 2)
    return float(values[order][middle])
