"""Rules on samples whose log-probs are shifted, or belong to another sample.

Each rule returns a finding and the tokens it explains, or None.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slime_tis.analysis.diagnosis.trained_tokens import Floats, Mask, Tokens, Verdict
from slime_tis.health import Finding, ramp

MIN_SAVED = 4.0
"""Smallest cost reduction that the lags of a shifted sample bring, nats."""
MIN_ALIGNED_TOKENS = 6
"""Smallest length of a sample that is aligned, tokens."""
MAX_RESIDUAL_SMALL = 0.35
"""Largest residual share of the shifted tokens' mismatch, for small reductions."""
MIN_SHIFTED_SAMPLES = 2
"""Smallest number of shifted or exchanged samples."""
MIN_SHIFTED_SHARE = 0.02
"""Smallest share of the samples that are shifted or exchanged."""


def exchanged(tokens: Tokens) -> Verdict:
    """Samples have the log-probs of the next or the previous sample."""
    mask = _matches_sample(tokens, -1) | _matches_sample(tokens, 1)
    # Samples that are farther apart show how many match by chance.
    control = _matches_sample(tokens, -5) | _matches_sample(tokens, 5)
    samples = len(np.unique(tokens.sample[mask]))
    by_chance = len(np.unique(tokens.sample[control]))
    total = len(np.unique(tokens.sample))
    if samples < max(MIN_SHIFTED_SAMPLES, MIN_SHIFTED_SHARE * total, 3 * by_chance):
        return None
    text = f"{samples} of {total} samples have the log-probs of a neighboring sample"
    return Finding("shifted_tokens", (text,), 0.95, detail="exchanged between samples"), mask


def _matches_sample(tokens: Tokens, lag: int) -> Mask:
    """Returns the tokens [N] whose log-probs fit the sample that is `lag` samples later."""
    # Numbers of samples start at 0, so -1 makes the first token a start.
    starts = np.flatnonzero(np.diff(tokens.sample, prepend=-1))
    ends = np.append(starts[1:], len(tokens))
    mask = np.zeros(len(tokens), bool)
    # Without the first or last samples, which have no partner.
    for i in range(max(-lag, 0), len(starts) - max(lag, 0)):
        start = starts[i]
        other_start = starts[i + lag]
        length = min(ends[i] - start, ends[i + lag] - other_start)
        own = slice(start, start + length)
        other = slice(other_start, other_start + length)
        size = np.abs(tokens.train[own] - tokens.rollout[own]).sum()
        if length >= MIN_ALIGNED_TOKENS and size > MIN_SAVED:
            remaining = np.abs(tokens.train[other] - tokens.rollout[own]).sum()
            mask[own] = remaining < MAX_RESIDUAL_SMALL * size
    return mask


MIN_SUSPECT = 0.1
"""Smallest mean abs(Δ) of an aligned sample, nats."""
MAX_ALIGNED = 192
"""Largest number of aligned samples."""
ALIGNED_TOKENS = 1024
"""Number of first tokens of a sample that are aligned."""
CONTROLS = 48
"""Samples that are also aligned with another sample."""
CONTROL_DISTANCE = 7
"""Distance of that other sample in the order of the mismatch."""
CHANCE_RATIO = (0.8, 1.15)
"""Aligned samples per sample that agrees with another one (plus 2), for no and for full
confidence."""
MOST_SHIFTED = 0.5
"""Share of shifted samples from which on suspects that were not aligned count as shifted, too."""
RETOKENIZED_SHARE = 0.4
"""Share of shifted samples whose lag changes, from which on the text was retokenized."""


def misaligned(tokens: Tokens) -> Verdict:
    """Log-probs agree after a shift of complete samples, or of tails (retokenized).

    At most MAX_ALIGNED suspects are aligned: the worst, and every n-th other one. The remaining
    suspects count as shifted if most aligned suspects are. Some are also aligned with another
    sample's log-probs, as a control.
    """
    suspects = _suspects(tokens)
    worst, others = _chosen_to_align(suspects)
    shifted = _aligned(tokens, suspects, worst + others)
    if not shifted:
        return None
    # The worst samples were chosen for their mismatch, so the others show the share better.
    representative = others or worst
    shifted_share = sum(i in shifted for i in representative) / len(representative)
    remaining = set(range(len(suspects))).difference(worst, others)
    samples = len(shifted) + shifted_share * len(remaining)
    if samples < max(MIN_SHIFTED_SAMPLES, MIN_SHIFTED_SHARE * len(np.unique(tokens.sample))):
        return None
    controls = worst[:CONTROLS]
    by_chance = _shifted_by_chance(tokens, suspects, controls)
    shifted_controls = sum(i in shifted for i in controls)
    # Two more by chance, so that one shifted sample of a tiny dump proves nothing.
    confidence = 0.95 * ramp(shifted_controls / (by_chance + 2), *CHANCE_RATIO)
    if not confidence:
        return None
    mask = np.zeros(len(tokens), bool)
    for each in shifted.values():
        mask[each.rows] = True
    if shifted_share > MOST_SHIFTED:
        for i in remaining:
            mask[suspects[i]] = True
    lag = int(np.median([each.lag for each in shifted.values()]))
    changes = sum(each.lag_changes for each in shifted.values())
    # A shift has one lag; retokenized text gains or loses tokens in the middle.
    is_retokenized = changes > RETOKENIZED_SHARE * len(shifted)
    cause = "shifted_tokens"
    detail = f"by {lag:+d}"
    shifted_part = "the whole sample"
    if is_retokenized:
        cause = "retokenised"
        detail = ""
        shifted_part = "their tails"
    aligned = len(worst) + len(others)
    evidence = (
        (
            f"the log-probs of {len(shifted)} of {aligned} samples with a large mismatch agree"
            f" after a shift of {shifted_part}"
        ),
        (
            f"the median shift is {lag:+d} tokens; {by_chance} of {len(controls)} samples agree"
            " with a shifted other sample"
        ),
    )
    return Finding(cause, evidence, confidence, detail=detail), mask


@dataclass(frozen=True)
class _ShiftedSample:
    """A sample whose log-probs agree after a shift."""

    rows: NDArray[np.int64]
    """The shifted tokens, as rows of the dump's tokens."""
    lag: int
    """Median lag of the shifted tokens."""
    lag_changes: bool
    """Whether the lag changes within the sample, as after retokenization."""


def _chosen_to_align(suspects: Sequence[NDArray[np.int64]]) -> tuple[list[int], list[int]]:
    """Returns the indices of the worst suspects, and of every n-th other one."""
    long = [i for i, rows in enumerate(suspects) if len(rows) >= MIN_ALIGNED_TOKENS]
    worst = long[: MAX_ALIGNED // 2]
    rest = long[MAX_ALIGNED // 2 :]
    every = max(1, math.ceil(len(rest) / (MAX_ALIGNED // 2)))
    return worst, rest[::every]


def _aligned(
    tokens: Tokens, suspects: Sequence[NDArray[np.int64]], chosen: Sequence[int]
) -> dict[int, _ShiftedSample]:
    """Returns the chosen suspects that are shifted, by index."""
    shifted_samples = {}
    for i in chosen:
        first_rows = suspects[i][:ALIGNED_TOKENS]
        path = _shifts(tokens.train[first_rows], tokens.rollout[first_rows])
        if path is None:
            continue
        is_shifted = path != 0
        rows = first_rows[is_shifted]
        # The tail of a long sample is not aligned; it continues as the last aligned token does.
        if is_shifted[-1]:
            rows = np.append(rows, suspects[i][ALIGNED_TOKENS:])
        # A shifted sample is shifted from its first token on, except for one that agrees by chance.
        first_half = is_shifted[: max(len(path) // 2, 1)]
        starts_aligned = (~first_half).sum() >= 2
        lags = path[is_shifted]
        shifted_samples[i] = _ShiftedSample(
            rows=rows,
            lag=int(np.median(lags)),
            lag_changes=bool(starts_aligned or len(np.unique(lags)) > 1),
        )
    return shifted_samples


def _shifted_by_chance(
    tokens: Tokens, suspects: Sequence[NDArray[np.int64]], controls: Sequence[int]
) -> int:
    """Returns the number of controls that seem to be shifted against another sample."""
    count = 0
    for i, j in zip(controls, np.roll(controls, CONTROL_DISTANCE), strict=True):
        rows = suspects[i][:ALIGNED_TOKENS]
        other = suspects[j][: len(rows)]
        if _shifts(tokens.train[rows], tokens.rollout[other]) is not None:
            count += 1
    return count


def _suspects(tokens: Tokens) -> list[NDArray[np.int64]]:
    """Returns the rows of the samples with a large mismatch, the largest first."""
    if not len(tokens):
        return []
    _, starts, lengths = np.unique(tokens.sample, return_index=True, return_counts=True)
    mean_S = np.add.reduceat(tokens.size, starts) / lengths
    suspects = []
    for i in np.argsort(-mean_S):
        if mean_S[i] > MIN_SUSPECT:
            suspects.append(np.arange(starts[i], starts[i] + lengths[i]))
    return suspects


MIN_SHIFTED_TOKENS = 4
"""Smallest number of shifted tokens of a shifted sample."""
SMALL_REDUCTION = 1.5
"""A cost reduction below this multiple of MIN_SAVED is small."""
MAX_RESIDUAL = 0.6
"""Largest residual share of the shifted tokens' mismatch, for larger reductions. Retokenized text
follows different tokens, so its log-probs agree only approximately."""


def _shifts(train: Floats, rollout: Floats) -> NDArray[np.int64] | None:
    """Returns the tokens' lags [T]; None if the sample is not shifted.

    The lags of a sample only grow, or only fall.
    """
    length = min(len(train), len(rollout))
    path, saved, residual = best_lags(train[:length], rollout[:length])
    shifted = path != 0
    max_residual = MAX_RESIDUAL
    if saved < SMALL_REDUCTION * MIN_SAVED:
        max_residual = MAX_RESIDUAL_SMALL
    if shifted.sum() < MIN_SHIFTED_TOKENS or saved < MIN_SAVED or residual > max_residual:
        return None
    # Retokenization only inserts or only removes tokens up to a place; both ways is chance.
    direction = np.sign(np.median(path[shifted]))
    if (np.diff(path) * direction < 0).any():
        return None
    return path


LAGS = (0, -1, 1, -2, 2, -3, 3, 4, 5, 6)
"""Candidate shifts in tokens."""
SWITCH = 4.0
"""Cost of a change of the lag within a sample, nats."""
START = 1.0
"""Cost of a lag from the first token on, nats."""
OUTSIDE = 1.0
"""Cost of a token whose partner lies outside of the sample, nats."""
MAX_COST = 5.0
"""Largest cost of a token, nats."""


def best_lags(train: Floats, rollout: Floats) -> tuple[NDArray[np.int64], float, float]:
    """Returns the lags that align log-probs, the cost they save, and the share that remains.

    Lag k_t aligns log π_train(t) with log π_rollout(t + k_t). Dynamic programming over the tokens:
    min over k of Σ_t min(abs(train_t − rollout_{t+k_t}), 5) plus a cost for each change of k. Costs
    are sums in nats over the shifted tokens whose partner lies in the sample.
    """
    tokens = len(train)
    columns = np.arange(len(LAGS))
    cost_TK = _lag_costs(train, rollout)
    # best: the lowest cost of the tokens so far, by the lag of the last token.
    # Column 0 is the lag 0, the only one that costs nothing at the start.
    best = cost_TK[0] + START * (columns > 0)
    came_from = np.zeros((tokens, len(LAGS)), np.int64)
    for t in range(1, tokens):
        cheapest = int(best.argmin())
        switched = best > best[cheapest] + SWITCH
        came_from[t] = np.where(switched, cheapest, columns)
        best = np.where(switched, best[cheapest] + SWITCH, best) + cost_TK[t]
    # Backwards from the cheapest end, to the lag that each token's cost came from.
    path = np.zeros(tokens, np.int64)
    path[-1] = best.argmin()
    for t in range(tokens - 1, 0, -1):
        path[t - 1] = came_from[t, path[t]]
    lags = np.array(LAGS)[path]
    partner = np.arange(tokens) + lags
    # Tokens without a partner have a fixed cost, so they do not show whether log-probs agree.
    paired = (lags != 0) & (partner >= 0) & (partner < tokens)
    before = cost_TK[paired, 0].sum()
    after = cost_TK[np.arange(tokens), path][paired].sum()
    residual = 1.0
    if before > 0:
        residual = float(after / before)
    return lags, float(before - after), residual


def _lag_costs(train: Floats, rollout: Floats) -> Floats:
    """Returns the cost [T, K] by token and lag, nats."""
    tokens = len(train)
    cost_TK = np.full((tokens, len(LAGS)), OUTSIDE)
    for column, lag in enumerate(LAGS):
        # The tokens whose partner, `lag` tokens on, is in the sample.
        low = max(0, -lag)
        high = min(tokens, tokens - lag)
        if high > low:
            difference = np.abs(train[low:high] - rollout[low + lag : high + lag])
            finite = np.nan_to_num(difference, nan=OUTSIDE, posinf=MAX_COST)
            cost_TK[low:high, column] = np.minimum(finite, MAX_COST)
    return cost_TK
