"""Rules on single tokens: placeholders, broken tokens, and samples with shifted log-probs.

Each rule returns a finding and the tokens it explains, or None. Later rules see the other tokens.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_tis.analysis.diagnosis.trained_tokens import (
    MAX_SIZE,
    MIN_TOKENS,
    Floats,
    Integers,
    Mask,
    Tokens,
)
from slime_tis.analysis.dumps.table import worker_name
from slime_tis.health import NEGLIGIBLE_DIFFERENCE, Finding, ramp

MIN_RUN = 2.5
"""Smallest mean run length of segments such as tool output; shorter runs are single broken
tokens."""
PLACEHOLDER_SIZE = 0.02
"""Smallest abs(Δ) of a placeholder, nats."""
MIN_PLACEHOLDER = 1.0
"""Smallest 75 % quantile of the placeholders' abs(Δ), nats; a single token kept by top-p ≥ 0.4 is
below it."""
BROKEN_SIZE = 3.0
"""Smallest abs(Δ) of a broken token, nats."""
BROKEN_RATIO = 12.0
"""Smallest ratio of a broken token's abs(Δ) to the 95 % quantile of other tokens."""
IMPOSSIBLE = -25.0
"""Log-prob of a token that no engine samples: 2^18 token ids of this log-prob together are less
likely than 1e-5."""
MAX_BROKEN = 0.05
"""Largest share of broken tokens."""
LAGS = (0, -1, 1, -2, 2, -3, 3, 4, 5, 6)
"""Candidate shifts in tokens."""
SWITCH = 4.0
"""Cost of a change of the lag within a sample, nats."""
OUTSIDE = 1.0
"""Cost of a token whose partner lies outside of the sample, nats."""
MIN_SAVED = 4.0
"""Smallest cost reduction that the lags of a shifted sample bring, nats."""
MAX_RESIDUAL_SMALL = 0.35
"""Largest residual share of the shifted tokens' mismatch, for small reductions."""
MAX_RESIDUAL = 0.6
"""Largest residual share of the shifted tokens' mismatch, for larger reductions. Retokenized text
follows different tokens, so its log-probs agree only approximately."""
MIN_SUSPECT = 0.1
"""Smallest mean abs(Δ) of an aligned sample, nats."""
MAX_ALIGNED = 192
"""Largest number of aligned samples."""
CONTROLS = 48
"""Samples that are also aligned with another sample."""
MIN_ALIGNED_TOKENS = 6
"""Smallest length of a sample that is aligned, tokens."""
ALIGNED_TOKENS = 1024
"""Number of first tokens of a sample that are aligned."""
MAX_CONVERTED = 0.02
"""Largest remaining share of the mismatch of log-probs in another unit."""
MAX_SPREAD = 1e-3
"""The same where a positive constant was added: top-p adds nearly one constant to every
log-prob."""
MIN_WORKER_RATIO = 1.3
"""Smallest ratio of a deviating server's noise to the other servers'."""
PERMUTATIONS = 999
"""Random assignments of samples to servers; a server deviates if its ratio is above the largest
ratio of each."""

Verdict = tuple[Finding, Mask] | None


def deviating_worker(tokens: Tokens) -> Verdict:
    """One of several rollout servers whose tokens differ more; the share is the excess over the other servers.

    Tokens of an unknown server are not compared.
    """
    if tokens.worker is None or len(np.unique(tokens.worker[tokens.worker >= 0])) < 2:
        return None
    every, tokens = tokens, tokens.only(tokens.worker >= 0)
    assert every.worker is not None and tokens.worker is not None
    # the part of a sample that one server sampled is a unit, as its tokens are not independent
    units, unit_N = np.unique(np.stack([tokens.worker, tokens.sample]), axis=1, return_inverse=True)
    names, worker = np.unique(units[0], return_inverse=True)
    size, uncertainty = np.bincount(unit_N, tokens.size), np.bincount(unit_N, tokens.uncertainty)
    rank = np.argsort(np.argsort(size / uncertainty)) + 1.0
    chance = np.random.default_rng(0)

    def ratios(columns: tuple[NDArray[Any], NDArray[Any]], worker: Integers) -> Floats:
        """Mean value, with a weight, of each server relative to the other servers' mean."""
        value, weight = (np.bincount(worker, column, len(names)) for column in columns)
        others = (value.sum() - value) / np.maximum(weight.sum() - weight, 1e-12)
        ratio: Floats = value / np.maximum(weight, 1e-12) / np.maximum(others, 1e-12)
        return ratio

    noise = ratios((size, uncertainty), worker)
    for columns in (
        (size, uncertainty),
        (rank, np.ones(len(rank))),
    ):  # ranks tell several wrong servers
        worst = int((ratio := ratios(columns, worker)).argmax())
        draws = (ratios(columns, chance.permutation(worker)).max() for _ in range(PERMUTATIONS))
        of_worst = tokens.worker == names[worst]
        is_large = (
            noise[worst] >= MIN_WORKER_RATIO
            and tokens.size[of_worst].mean() >= NEGLIGIBLE_DIFFERENCE
        )
        if is_large and all(draw < ratio[worst] for draw in draws):
            break
    else:
        return None
    name = worker_name(tokens.workers, int(names[worst]))
    evidence = (
        (
            f"{name} sampled {of_worst.mean():.0%} of the tokens; abs(Δ) relative to 1 − p is"
            f" {min(noise[worst], 1e3):.1f} times as large as of the other {len(names) - 1} servers"
        ),
        f"no random assignment of samples to servers of {PERMUTATIONS} makes such a difference",
    )
    share = (1 - 1 / noise[worst]) * tokens.size[of_worst].sum() / every.size.sum()
    return (
        Finding("worker", evidence, 0.95, float(share), detail=name),
        every.worker == names[worst],
    )


def converted(tokens: Tokens) -> Verdict:
    """Reported numbers that are no log-probs, or are a constant, a factor or a bound away from log-probs."""
    train, rollout, finite = tokens.train, tokens.rollout, tokens.finite
    everything = np.ones(len(tokens), bool)
    if finite.sum() < MIN_TOKENS or np.abs(tokens.log_ratio).mean() < NEGLIGIBLE_DIFFERENCE:
        return None
    if (positive := (rollout[finite] > 1e-3).mean()) > MAX_BROKEN:
        text = (
            f"{positive:.0%} of the rollout engine's log-probs are above 0, so they are no"
            " log-probs"
        )
        return Finding("broken_tokens", (text,), 0.95), everything
    design = np.stack([train[finite], np.ones(finite.sum())], axis=1)
    (factor, offset), *_ = np.linalg.lstsq(design, rollout[finite], rcond=None)
    left = (
        np.abs(rollout[finite] - factor * train[finite] - offset).sum() / tokens.size[finite].sum()
    )
    is_nearly_constant = (
        abs(factor - 1) < 0.01 and offset > 0 and left > MAX_SPREAD
    )  # log(kept mass) of top-p, min-p
    if left < MAX_CONVERTED and not is_nearly_constant:
        text = (
            f"the rollout engine reports {factor:.4g} · log π_train {offset:+.3g}: another base,"
            " unit or constant"
        )
        return Finding("broken_tokens", (text,), 0.95), everything
    lowest = rollout[finite].min()
    at_bound = finite & (rollout == lowest)
    if at_bound.sum() >= MIN_TOKENS and (train[at_bound] < lowest).mean() > 0.9:
        text = (
            f"{at_bound.mean():.1%} of the tokens have the smallest log-prob, {lowest:.4g}: it is a"
            " lower bound"
        )
        return Finding("broken_tokens", (text,), 0.95), at_bound
    return None


def exchanged(tokens: Tokens) -> Verdict:
    """Samples with the log-probs of the next or the previous sample."""
    starts = np.flatnonzero(np.diff(tokens.sample, prepend=-1))
    ends = np.append(starts[1:], len(tokens))
    masks = {
        lag: np.zeros(len(tokens), bool) for lag in (-1, 1, -5, 5)
    }  # the last two are controls
    for lag, mask in masks.items():
        for i in range(max(-lag, 0), len(starts) - max(lag, 0)):
            n = min(ends[i] - starts[i], ends[i + lag] - starts[i + lag])
            own, other = (
                slice(starts[i], starts[i] + n),
                slice(starts[i + lag], starts[i + lag] + n),
            )
            size = np.abs(tokens.train[own] - tokens.rollout[own]).sum()
            if n >= MIN_ALIGNED_TOKENS and size > MIN_SAVED:
                remaining = np.abs(tokens.train[other] - tokens.rollout[own]).sum()
                mask[own] |= bool(remaining < MAX_RESIDUAL_SMALL * size)
    mask = masks[-1] | masks[1]
    samples, by_chance = (
        len(np.unique(tokens.sample[each])) for each in (mask, masks[-5] | masks[5])
    )
    if samples < max(2, 0.02 * len(starts), 3 * by_chance):
        return None
    text = f"{samples} of {len(starts)} samples have the log-probs of a neighboring sample"
    return Finding("shifted_tokens", (text,), 0.95, detail="exchanged between samples"), mask


def mask_mistake(tokens: Tokens) -> Verdict:
    """Runs of trained tokens whose rollout log-prob is missing, or equals one number that many tokens share."""
    missing = ~np.isfinite(tokens.rollout)
    values, counts = np.unique(
        tokens.rollout[~missing & (tokens.size > PLACEHOLDER_SIZE)], return_counts=True
    )
    common = values[counts.argmax()] if counts.max(initial=0) >= 3 else np.nan
    repeated = (tokens.rollout == common) & (tokens.size > PLACEHOLDER_SIZE)
    if repeated.any() and np.quantile(tokens.size[repeated], 0.75) < MIN_PLACEHOLDER:
        repeated[:] = False  # truncated sampling reports 0 if it keeps one token
    chosen = missing | repeated
    adjacent = (
        (np.diff(tokens.sample) == 0)
        & (np.diff(tokens.position) == 1)
        & (chosen[1:] == chosen[:-1])
    )
    run = np.cumsum(np.append(False, ~adjacent)[: len(tokens)])
    runs = (
        np.bincount(run)[run] if len(tokens) else run
    )  # length of the run that a token belongs to
    mask = chosen & (runs >= 2)
    if mask.sum() < 3 or mask.sum() < 0.5 * chosen.sum() or runs[mask].mean() < MIN_RUN:
        return None
    value = "no log-prob" if missing[mask].mean() > 0.5 else f"exactly the log-prob {common:.6g}"
    evidence = (
        (
            f"{mask.sum()} of {len(tokens)} trained tokens ({mask.mean():.2%}) have {value} from"
            " the rollout engine"
        ),
        f"they form runs of {mask.sum() / (1 / runs[mask]).sum():.1f} tokens on average",
    )
    return Finding("mask_mistake", evidence, 0.95), mask


def broken_tokens(tokens: Tokens) -> Verdict:
    """A few tokens that are NaN, infinite or nats apart while the others agree."""
    broken = ~tokens.finite
    ordinary_N = _ordinary_size(tokens)
    bound_N = np.maximum(BROKEN_SIZE, BROKEN_RATIO * ordinary_N)
    outlying = tokens.finite & (tokens.size >= np.minimum(bound_N, MAX_SIZE))
    if not broken.any():
        outlying &= bound_N <= MAX_SIZE
    mask = broken | outlying
    if not mask.any() or (not broken.any() and mask.mean() > MAX_BROKEN):
        return None
    evidence = []
    if broken.any():
        share = f"{100 * broken.mean():.2g}%"
        evidence.append(
            f"{broken.sum()} of {len(tokens)} trained tokens ({share}) are NaN or infinite"
        )
    if outlying.any():
        log_ratio = tokens.log_ratio[outlying]
        worst = log_ratio[np.argmax(np.abs(log_ratio))]
        share = f"{100 * outlying.mean():.2g}%"
        evidence.append(
            f"{outlying.sum()} of {len(tokens)} tokens ({share}) have Δ of up to {worst:+.1f} nats"
        )
        evidence.append(
            f"95% of the other tokens differ by less than {ordinary_N[outlying].max():.2g} nats"
        )
    ordinary = float(np.abs(tokens.log_ratio[~mask]).mean()) if not mask.all() else np.inf
    impossible = float(tokens.rollout[outlying].min(initial=0.0)) < IMPOSSIBLE
    confidence = 0.95 if broken.any() or impossible else 0.5 + 0.15 * ramp(ordinary, 0.1, 0.02)
    return Finding("broken_tokens", tuple(evidence), confidence), mask


def misaligned(tokens: Tokens) -> Verdict:
    """Samples whose log-probs agree after a shift of the whole sample, or of its tail (retokenized).

    At most MAX_ALIGNED suspects are aligned: the worst, and a part of the others. The remaining
    suspects count as shifted if most aligned suspects are. Some are also aligned with another
    sample's log-probs, as a control.
    """
    mask = np.zeros(len(tokens), bool)
    _, starts, lengths = np.unique(tokens.sample, return_index=True, return_counts=True)
    mean_S = np.add.reduceat(tokens.size, starts) / lengths if len(tokens) else np.zeros(0)
    suspects = [
        np.arange(starts[i], starts[i] + lengths[i])
        for i in np.argsort(-mean_S)
        if mean_S[i] > MIN_SUSPECT
    ]
    long = [i for i, rows in enumerate(suspects) if len(rows) >= MIN_ALIGNED_TOKENS]
    worst, rest = long[: MAX_ALIGNED // 2], long[MAX_ALIGNED // 2 :]
    others = rest[:: -(-len(rest) // (MAX_ALIGNED // 2)) or 1]
    lags: dict[int, int] = {}
    changes = 0
    for i in [*worst, *others]:
        rows, tail = np.split(suspects[i], [ALIGNED_TOKENS])
        path = _shifts(tokens.train[rows], tokens.rollout[rows])
        if path is None:
            continue
        shifted = path != 0
        mask[rows[shifted]] = True
        mask[tail] = shifted[-1]
        lags[i] = int(np.median(path[shifted]))
        changes += bool(
            (~shifted[: max(len(path) // 2, 1)]).sum() >= 2 or len(np.unique(path[shifted])) > 1
        )
    aligned = others or worst
    shifted_share = sum(i in lags for i in aligned) / max(len(aligned), 1)
    remaining = set(range(len(suspects))).difference(worst, others)
    if not lags or len(lags) + shifted_share * len(remaining) < max(
        2, 0.02 * len(np.unique(tokens.sample))
    ):
        return None
    tried = worst[:CONTROLS]
    pairs = (
        (suspects[i][:ALIGNED_TOKENS], suspects[j])
        for i, j in zip(tried, np.roll(tried, 7), strict=True)
    )
    by_chance = sum(
        _shifts(tokens.train[rows], tokens.rollout[other[: len(rows)]]) is not None
        for rows, other in pairs
    )
    confidence = 0.95 * ramp(sum(i in lags for i in tried) / (by_chance + 2), 0.8, 1.15)
    if not confidence:
        return None
    if shifted_share > 0.5:
        for i in remaining:
            mask[suspects[i]] = True
    retokenized = changes > 0.4 * len(lags)
    lag = int(np.median(list(lags.values())))
    evidence = (
        (
            f"the log-probs of {len(lags)} of {len(worst) + len(others)} samples with a large"
            " mismatch agree after a shift of"
            f" {'their tails' if retokenized else 'the whole sample'}"
        ),
        (
            f"the median shift is {lag:+d} tokens; {by_chance} of {len(tried)} samples agree with a"
            " shifted other sample"
        ),
    )
    cause, detail = ("retokenised", "") if retokenized else ("shifted_tokens", f"by {lag:+d}")
    return Finding(cause, evidence, confidence, detail=detail), mask


def _shifts(train: Floats, rollout: Floats) -> NDArray[np.int64] | None:
    """The lag of each token; None if the sample is not shifted. Lags of one sample only grow, or only fall."""
    n = min(len(train), len(rollout))
    path, gain, residual = best_lags(train[:n], rollout[:n])
    shifted = path != 0
    max_residual = MAX_RESIDUAL_SMALL if gain < 1.5 * MIN_SAVED else MAX_RESIDUAL
    if shifted.sum() < 4 or gain < MIN_SAVED or residual > max_residual:
        return None
    grows = (np.diff(path) * np.sign(np.median(path[shifted])) >= 0).all()
    return path if grows else None


def best_lags(train: Floats, rollout: Floats) -> tuple[NDArray[np.int64], float, float]:
    """Lags k_t that align log π_train(t) with log π_rollout(t + k_t), the cost they save, and the share that remains.

    Dynamic programming over the tokens: min over k of Σ_t min(abs(train_t − rollout_{t+k_t}), 5)
    plus a cost for each change of k. Costs are sums in nats over the shifted tokens whose partner
    lies in the sample.
    """
    tokens = len(train)
    cost_TK = np.full((tokens, len(LAGS)), OUTSIDE)
    for column, lag in enumerate(LAGS):
        low, high = max(0, -lag), min(tokens, tokens - lag)
        if high > low:
            difference = np.abs(train[low:high] - rollout[low + lag : high + lag])
            cost_TK[low:high, column] = np.minimum(
                np.nan_to_num(difference, nan=OUTSIDE, posinf=5.0), 5.0
            )
    best = cost_TK[0] + SWITCH * (np.arange(len(LAGS)) > 0) * 0.25
    came_from = np.zeros((tokens, len(LAGS)), np.int64)
    for t in range(1, tokens):
        jump = int(best.argmin())
        switched = best > best[jump] + SWITCH
        came_from[t] = np.where(switched, jump, np.arange(len(LAGS)))
        best = np.where(switched, best[jump] + SWITCH, best) + cost_TK[t]
    path = np.zeros(tokens, np.int64)
    path[-1] = best.argmin()
    for t in range(tokens - 1, 0, -1):
        path[t - 1] = came_from[t, path[t]]
    chosen = cost_TK[np.arange(tokens), path]
    lags = np.array(LAGS)[path]
    partner = np.arange(tokens) + lags
    paired = (lags != 0) & (partner >= 0) & (partner < tokens)
    before, after = cost_TK[paired, 0].sum(), chosen[paired].sum()
    return lags, float(before - after), float(after / before) if before > 0 else 1.0


def _ordinary_size(tokens: Tokens) -> Floats:
    """[N] 95 % quantile of abs(Δ), nats; for tokens from older weights, over the tokens of the same step and age.

    A single long optimizer step moves tokens from older weights by nats, in that step only.
    """
    sizes = tokens.size[tokens.finite]
    ordinary_N = np.full(len(tokens), np.quantile(sizes, 0.95) if len(sizes) else 0.0)
    if tokens.staleness is None or tokens.step is None:
        return ordinary_N
    stale = (tokens.staleness > 0) & tokens.finite
    step_and_age = np.stack([tokens.step, tokens.staleness])[:, stale]
    _, group, counts = np.unique(step_and_age, axis=1, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(stale)[np.argsort(group.ravel(), kind="stable")]
    for members in np.split(rows, np.cumsum(counts)[:-1]):
        if len(members) >= MIN_TOKENS:
            ordinary_N[members] = np.quantile(tokens.size[members], 0.95)
    return ordinary_N


RULES = (converted, mask_mistake, exchanged, misaligned, broken_tokens)
"""Each removes the tokens that it explains, in this order."""
