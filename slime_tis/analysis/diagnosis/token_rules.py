"""Rules that blame certain tokens: placeholders, broken tokens, and samples whose log-probs are out of line.

Each returns its finding, or None, and the tokens that it accounts for; later rules look at the others.
"""

import numpy as np
from numpy.typing import NDArray

from slime_tis.analysis.diagnosis.tokens import MAX_SIZE, MIN_TOKENS, Floats, Mask, Tokens, ramp
from slime_tis.rules import Finding

MIN_RUN = 2.5
"""Mean length of the runs of placeholders from which they are segments (tool output), and not single broken tokens."""
PLACEHOLDER_SIZE = 0.02
"""abs(Δ) above which a repeated log-prob is not a coincidence, nats."""
MIN_PLACEHOLDER = 1.0
"""abs(Δ) that a quarter of the placeholders exceeds, nats; one token left by a top-p above 0.4 is below it."""
BROKEN_SIZE = 3.0
"""abs(Δ) of a broken token, nats, where the others are far below it."""
BROKEN_TIMES = 12.0
"""How many times the 95 % quantile of the others a broken token is."""
MAX_BROKEN = 0.05
"""Share of tokens up to which they are few."""
LAGS = (0, -1, 1, -2, 2, -3, 3, 4, 5, 6)
"""Shifts in tokens that are tried."""
SWITCH = 4.0
"""Nats that a change of the lag within a sample costs."""
OUTSIDE = 1.0
"""Nats that a token costs whose partner lies outside of the sample."""
MIN_SAVED = 4.0
"""Nats that the lags of a sample have to save."""
CERTAIN_LEFT, MAX_LEFT = 0.35, 0.6
"""Shares of the shifted tokens' mismatch that may be left, where little is saved and where more is: tokens of text that
was tokenised again follow other tokens, and their log-probs agree only nearly."""
MAX_ALIGNED = 192
"""Samples that are aligned."""
MIN_ALIGNED_TOKENS, ALIGNED_TOKENS = 6, 1024
"""Tokens that a sample has to have for that, and its first ones that are aligned."""

Verdict = tuple[Finding | None, Mask]


def mask_mistake(tokens: Tokens, total: float) -> Verdict:
    """Trained tokens in runs whose rollout log-prob is missing, or one number that many tokens share."""
    missing = ~np.isfinite(tokens.rollout)
    common, count = _common_value(tokens)
    repeated = (tokens.rollout == common) & (tokens.size > PLACEHOLDER_SIZE) if count else np.zeros(len(tokens), bool)
    if repeated.any() and np.quantile(tokens.size[repeated], 0.75) < MIN_PLACEHOLDER:
        repeated[:] = False  # truncated sampling reports 0 where it left one token
    runs = _run_lengths(tokens, missing | repeated)
    found = (missing | repeated) & (runs >= 2)
    if found.sum() < 3 or found.sum() < 0.5 * (missing | repeated).sum() or runs[found].mean() < MIN_RUN:
        return None, np.zeros(len(tokens), bool)
    what = "no log-prob at all" if missing[found].mean() > 0.5 else f"the log-prob {common:.6g} exactly"
    finding = Finding(
        cause="mask_mistake",
        confidence=0.95,
        share=_share(tokens, found, total),
        evidence=(
            f"{found.sum()} of {len(tokens)} trained tokens ({found.mean():.2%}) have {what} from the rollout engine",
            f"they come in runs, of {_mean_run(tokens, found):.1f} tokens on average",
        ),
    )
    return finding, found


def broken_tokens(tokens: Tokens, total: float) -> Verdict:
    """Few tokens that are NaN, infinite or nats away while the others agree."""
    broken = ~tokens.finite
    ordinary_N = _ordinary_size(tokens)
    bound_N = np.maximum(BROKEN_SIZE, BROKEN_TIMES * ordinary_N)
    outlying = tokens.finite & (tokens.size >= np.minimum(bound_N, MAX_SIZE))
    if not broken.any():
        outlying &= bound_N <= MAX_SIZE
    found = broken | outlying
    if not found.any() or (not broken.any() and found.mean() > MAX_BROKEN):
        return None, np.zeros(len(tokens), bool)
    evidence = []
    if broken.any():
        evidence.append(
            f"{broken.sum()} of {len(tokens)} trained tokens ({100 * broken.mean():.2g}%) are NaN or infinite"
        )
    if outlying.any():
        log_ratio = tokens.log_ratio[outlying]
        worst = log_ratio[np.argmax(np.abs(log_ratio))]
        evidence.append(
            f"{outlying.sum()} token{'' if outlying.sum() == 1 else 's'} ({100 * outlying.mean():.2g}%) "
            f"with Δ of up to {worst:+.1f} nats".replace("-", "−")
        )
        evidence.append(f"95% of the others differ by less than {ordinary_N[outlying].max():.2g} nats")
    few = ramp(outlying.mean(), MAX_BROKEN, 0.02) if not broken.any() else 1.0
    finding = Finding(
        cause="broken_tokens",
        confidence=0.95 if broken.any() else 0.55 + 0.35 * few,
        share=_share(tokens, found, total),
        evidence=tuple(evidence),
    )
    return finding, found


def misaligned(tokens: Tokens, total: float) -> Verdict:
    """Samples whose log-probs agree after a shift: of the whole sample, or from some token on (tokenised again).

    Of many suspects the worst and a part of the others are tried. Those that are not, or are too short, count as
    shifted where most of the others are.
    """
    found = np.zeros(len(tokens), bool)
    suspects = _suspects(tokens)
    long = [i for i, rows in enumerate(suspects) if len(rows) >= MIN_ALIGNED_TOKENS]
    worst, rest = long[: MAX_ALIGNED // 2], long[MAX_ALIGNED // 2 :]
    others = rest[:: -(-len(rest) // (MAX_ALIGNED // 2)) or 1]
    lags: dict[int, int] = {}
    changes = 0
    for i in [*worst, *others]:
        rows, tail = np.split(suspects[i], [ALIGNED_TOKENS])
        path, gain, left = best_lags(tokens.train[rows], tokens.rollout[rows])
        shifted = path != 0
        if shifted.sum() < 4 or gain < MIN_SAVED or left > (CERTAIN_LEFT if gain < 1.5 * MIN_SAVED else MAX_LEFT):
            continue
        found[rows[shifted]] = True
        found[tail] = shifted[-1]
        lags[i] = int(np.median(path[shifted]))
        changes += bool((~shifted[: max(len(path) // 2, 1)]).sum() >= 2 or len(np.unique(path[shifted])) > 1)
    tried = others or worst
    usual = sum(i in lags for i in tried) / max(len(tried), 1)
    untried = set(range(len(suspects))).difference(worst, others)
    if not lags or len(lags) + usual * len(untried) < max(2, 0.02 * len(np.unique(tokens.sample))):
        return None, np.zeros(len(tokens), bool)
    if usual > 0.5:
        for i in untried:
            found[suspects[i]] = True
    again = changes > 0.4 * len(lags)
    lag = int(np.median(list(lags.values())))
    where = "from some token on" if again else "as a whole"
    number = len(worst) + len(others)
    finding = Finding(
        cause="retokenised" if again else "shifted_tokens",
        confidence=0.75 + 0.2 * ramp(len(lags), 2, 12),
        share=_share(tokens, found, total),
        evidence=(
            f"the log-probs of {len(lags)} of {number} samples of large mismatch agree after a shift {where}",
            f"the usual shift is {lag:+d} tokens",
        ),
        detail="" if again else f"by {lag:+d}",
    )
    return finding, found


def best_lags(train: Floats, rollout: Floats) -> tuple[NDArray[np.int64], float, float]:
    """Lags k_t that bring log π_train(t) and log π_rollout(t + k_t) of a sample together.

    Dynamic programming over the tokens: min over k of Σ_t min(abs(train_t − rollout_{t+k_t}), 5) plus a cost for each
    change of k.

    Returns:
        The lags; the nats that they save, and what they leave as a share of what was there, both over the tokens that
        are shifted and whose partner lies in the sample: others speak for no lag.
    """
    tokens = len(train)
    cost_TK = np.full((tokens, len(LAGS)), OUTSIDE)
    for column, lag in enumerate(LAGS):
        low, high = max(0, -lag), min(tokens, tokens - lag)
        if high > low:
            difference = np.abs(train[low:high] - rollout[low + lag : high + lag])
            cost_TK[low:high, column] = np.minimum(np.nan_to_num(difference, nan=OUTSIDE, posinf=5.0), 5.0)
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
    there, left = cost_TK[paired, 0].sum(), chosen[paired].sum()
    return lags, float(there - left), float(left / there) if there > 0 else 1.0


def _suspects(tokens: Tokens) -> list[NDArray[np.int64]]:
    """Rows of the samples of large mismatch, the worst first, each in the order of its tokens."""
    if not len(tokens):
        return []
    _, starts, lengths = np.unique(tokens.sample, return_index=True, return_counts=True)
    mean_S = np.add.reduceat(tokens.size, starts) / lengths
    return [np.arange(starts[i], starts[i] + lengths[i]) for i in np.argsort(-mean_S) if mean_S[i] > 0.1]


def _ordinary_size(tokens: Tokens) -> Floats:
    """[N] abs(Δ) that 95 % of the tokens do not exceed, nats; of older weights, 95 % of those of the same step and age.

    One long step of the optimizer moves the tokens that weights of before sampled by nats, in that step alone.
    """
    sizes = tokens.size[tokens.finite]
    ordinary_N = np.full(len(tokens), np.quantile(sizes, 0.95) if len(sizes) else 0.0)
    if tokens.staleness is None or tokens.step is None:
        return ordinary_N
    stale = (tokens.staleness > 0) & tokens.finite
    places = np.stack([tokens.step, tokens.staleness])[:, stale]
    _, group, counts = np.unique(places, axis=1, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(stale)[np.argsort(group.ravel(), kind="stable")]
    for members in np.split(rows, np.cumsum(counts)[:-1]):
        if len(members) >= MIN_TOKENS:
            ordinary_N[members] = np.quantile(tokens.size[members], 0.95)
    return ordinary_N


def _common_value(tokens: Tokens) -> tuple[float, int]:
    """The rollout log-prob that most of the tokens with a mismatch share; 0 tokens where it is too rare."""
    suspects = tokens.rollout[np.isfinite(tokens.rollout) & (tokens.size > PLACEHOLDER_SIZE)]
    if not len(suspects):
        return 0.0, 0
    values, counts = np.unique(suspects, return_counts=True)
    most = int(counts.argmax())
    return float(values[most]), int(counts[most]) if counts[most] >= 3 else 0


def _run_lengths(tokens: Tokens, chosen: Mask) -> NDArray[np.int64]:
    """[N] length of the run of chosen neighbours in one sample that a token is in; 0 where it is not chosen."""
    if not len(chosen):
        return np.zeros(0, np.int64)
    adjacent = (np.diff(tokens.sample) == 0) & (np.diff(tokens.position) == 1) & (chosen[1:] == chosen[:-1])
    run = np.concatenate([[0], np.cumsum(~adjacent)])
    return np.where(chosen, np.bincount(run)[run], 0)


def _mean_run(tokens: Tokens, chosen: Mask) -> float:
    runs = _run_lengths(tokens, chosen)[chosen]
    return float(len(runs) / (1 / runs).sum())


def _share(tokens: Tokens, chosen: Mask, total: float) -> float:
    return float(tokens.size[chosen].sum() / total) if total > 0 else 0.0
