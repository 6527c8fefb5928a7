"""Compares the likeliest next tokens of both engines, and names the setting of the sampler that changes them.

d = log π_train − log π_rollout of the K likeliest tokens at each position. A penalty changes tokens
that came before, a bias few token ids, and truncation or banned tokens change all d of a position
by one amount. A temperature changes d in proportion to log π_train. Precision, weights and prompts
leave no such pattern.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_tis.health import NEGLIGIBLE_DIFFERENCE

Array = NDArray[Any]
MAX_RESIDUAL = 0.03
"""Largest part of the difference that a pattern may leave unexplained."""
MAX_NOISY_RESIDUAL = 0.1
"""The same limit if the remainder is below the noise of the engines."""
ONE_SIGN = 0.9
"""Smallest |Σd| / Σ|d| of differences that have one sign."""
MIN_CHANGED = 4
"""Smallest number of tokens that a penalty or a bias must have changed."""
MIN_UNCHANGED = 16
"""Smallest number of tokens that a penalty or a bias must have left unchanged."""
MAX_BIASED = 3
"""Largest number of token ids with a bias."""
MAX_TEMPERATURE = 5.0
"""Largest ratio of the temperatures, or of their inverses."""
REMAINING = 1e-6
"""Smallest mass of the tokens outside of the K likeliest ones."""


@dataclass(frozen=True)
class Position:
    """The likeliest next tokens after a text."""

    text: Sequence[int]
    train: Mapping[int, float]
    """Log-prob of each token by the training engine."""
    rollout: Mapping[int, float]
    """The same by the rollout engine; the same tokens."""


@dataclass(frozen=True, kw_only=True)
class TopTokens:
    """The difference of both engines' likeliest tokens."""

    size: str
    """In words: mean KL(π_train ‖ π_rollout) over the K tokens and all others together, nats; mean
    probability of the K tokens in training; largest |d|."""
    cause: str
    """A cause of `diagnose.CAUSES`; empty if no setting of the sampler explains the difference."""
    evidence: str
    """What the tokens show, as a sentence."""


@dataclass(frozen=True)
class _Pattern:
    cause: str
    evidence: str
    size: float
    """Mean |d| that the pattern explains, nats."""
    residual: float
    """Mean |d| that it leaves, nats."""


def compare_top_tokens(positions: Sequence[Position], noise: float) -> TopTokens:
    """Compares the likeliest tokens; the precision of the engines explains a mean |d| of `noise` nats."""
    width = max(len(position.train) for position in positions)
    token, train, rollout = (np.full((len(positions), width), np.nan) for _ in range(3))
    for row, position in enumerate(positions):
        columns = slice(len(position.train))
        token[row, columns] = list(position.train)
        train[row, columns] = list(position.train.values())
        rollout[row, columns] = [position.rollout[each] for each in position.train]
    d = train - rollout
    p, q = np.exp(train), np.exp(rollout)
    p_rest, q_rest = (np.maximum(1 - np.nansum(each, 1), REMAINING) for each in (p, q))
    kl = float(np.mean(np.nansum(p * d, 1) + p_rest * np.log(p_rest / q_rest)))
    mass, largest = float(np.nansum(p, 1).mean()), float(np.nanmax(np.abs(d)))
    size = (
        f"the {width} likeliest tokens at {len(positions)} positions ({mass:.0%} of the"
        f" probability) have a KL divergence of {kl:.2g} nats and differ by at most {largest:.2g}"
    )
    seen = np.array(
        [np.isin(row, list(each.text)) for row, each in zip(token, positions, strict=True)]
    )
    cause, mean = "", float(np.nanmean(np.abs(d)))
    evidence = (
        "no setting of the sampler makes this pattern: weights, input, settings or precision of a"
        " network differ"
    )
    if mean < max(noise, NEGLIGIBLE_DIFFERENCE):
        evidence = (
            "they agree, so a larger mismatch of the sampled tokens comes from how these are"
            " reported"
        )
    if mean >= NEGLIGIBLE_DIFFERENCE:
        found = [each for each in _patterns(token, train, d, seen) if _holds(each, noise)]
        if found:
            best = min(found, key=lambda each: each.residual / each.size)
            cause, evidence = best.cause, best.evidence
    return TopTokens(size=size, cause=cause, evidence=evidence)


def _holds(pattern: _Pattern, noise: float) -> bool:
    bound = min(max(MAX_RESIDUAL * pattern.size, noise), MAX_NOISY_RESIDUAL * pattern.size)
    return pattern.size >= NEGLIGIBLE_DIFFERENCE and pattern.residual <= bound


def _patterns(token: Array, train: Array, d: Array, seen: Array) -> Iterator[_Pattern]:
    """What each setting of the sampler would explain; d has a free constant at each position, its normalization."""
    centered = d - np.nanmedian(d, 1, keepdims=True)
    if np.nansum(d) < -ONE_SIGN * np.nansum(np.abs(d)):
        words = (
            "the tokens of a position differ by one amount: the rollout engine omits other tokens"
        )
        yield _Pattern("truncated_sampling", words, _mean(d), _mean(centered))
    yield from _penalty(d, seen)
    yield from _bias(token, d)
    x, y = train - train[:, :1], d - d[:, :1]  # a line through the likeliest token
    counts = np.abs(x) > 1e-6
    slope = _weighted_median(y[counts] / x[counts], np.abs(x[counts])) if counts.any() else 0.0
    left = d - slope * train
    if not 1 / MAX_TEMPERATURE <= 1 - slope <= MAX_TEMPERATURE:
        return
    words = (
        f"differences grow with the log-probs: the rollout engine samples at {1 / (1 - slope):.3g}"
        " times the "
    )
    words += "training temperature, or scales its logits"
    yield _Pattern(
        "temperature", words, _mean(centered), _mean(left - np.nanmedian(left, 1, keepdims=True))
    )


def _penalty(d: Array, seen: Array) -> Iterator[_Pattern]:
    """Only tokens that came before differ."""
    is_new = np.isfinite(d) & ~seen
    usable = is_new.sum(1) >= 2
    if not usable.any():
        return
    left = d[usable] - np.nanmedian(np.where(is_new, d, np.nan)[usable], 1, keepdims=True)
    before, new = left[seen[usable] & np.isfinite(left)], left[is_new[usable]]
    if (
        len(before) < MIN_CHANGED
        or len(new) < MIN_UNCHANGED
        or abs(before.sum()) < ONE_SIGN * np.abs(before).sum()
    ):
        return
    words = (
        f"only tokens that came before differ, by {abs(before.mean()):.2g} nats on average: the"
        " rollout engine "
    )
    words += (
        "applies a penalty to repeated tokens" if before.sum() > 0 else "prefers repeated tokens"
    )
    yield _Pattern("penalty", words, _mean(before), _mean(new))


def _bias(token: Array, d: Array) -> Iterator[_Pattern]:
    """Only a few token ids differ, each by one amount."""
    is_other = np.isfinite(d)
    chosen: list[int] = []
    for _ in range(MAX_BIASED):
        left = d - np.nanmedian(np.where(is_other, d, np.nan), 1, keepdims=True)
        totals: dict[int, float] = {}
        for each, value in zip(token[is_other], np.abs(left[is_other]), strict=True):
            totals[int(each)] = totals.get(int(each), 0.0) + float(value)
        chosen.append(max(totals, key=lambda each: totals[each]))
        is_other &= token != chosen[-1]
        if (is_other.sum(1) < 2).any() or is_other.sum() < MIN_UNCHANGED:
            return
        left = d - np.nanmedian(np.where(is_other, d, np.nan), 1, keepdims=True)
        groups = [left[token == each] for each in chosen]
        residual = np.concatenate([left[is_other], *(group - np.median(group) for group in groups)])
        if sum(map(len, groups)) >= MIN_CHANGED:
            words = (
                f"only token ids {chosen} differ: the rollout engine adds a bias to their logits"
            )
            yield _Pattern(
                "penalty", words, min(float(np.abs(np.median(g))) for g in groups), _mean(residual)
            )


def _mean(values: Array) -> float:
    return float(np.nanmean(np.abs(values)))


def _weighted_median(values: Array, weights: Array) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])
