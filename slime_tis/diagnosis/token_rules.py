"""Rules that blame certain tokens: placeholders, broken tokens, and samples whose log-probs are out of line.

Each returns its finding, or None, and the tokens that it accounts for; later rules look at the others.
"""

import numpy as np
from numpy.typing import NDArray

from slime_tis.diagnosis.causes import Finding
from slime_tis.diagnosis.tokens import Floats, Mask, Tokens, ramp

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
MIN_SAVED = 4.0
"""Nats that the lags of a sample have to save."""
CERTAIN_LEFT, MAX_LEFT = 0.35, 0.6
"""Shares of the shifted tokens' mismatch that may be left, where little is saved and where more is: tokens of text that
was tokenised again follow other tokens, and their log-probs agree only nearly."""
OUTSIDE = 1.0
"""Nats that a token costs whose partner lies outside of the sample."""
MAX_ALIGNED = 192
"""Samples that are aligned, those of the largest mismatch."""
ALIGNED_TOKENS = 1024
"""First tokens of a sample that are aligned."""

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
    ordinary = np.quantile(tokens.size[tokens.finite], 0.95) if tokens.finite.any() else 0.0
    bound = max(BROKEN_SIZE, BROKEN_TIMES * ordinary)
    outlying = tokens.finite & (tokens.size >= min(bound, 10.0))
    found = broken | outlying
    if not found.any() or (not broken.any() and (bound > 10 or found.mean() > MAX_BROKEN)):
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
            f"{outlying.sum()} tokens ({100 * outlying.mean():.2g}%) have Δ of up to {worst:+.1f} nats".replace(
                "-", "−"
            )
        )
        evidence.append(f"95% of the others differ by less than {ordinary:.2g} nats")
    few = ramp(outlying.mean(), MAX_BROKEN, 0.02) if not broken.any() else 1.0
    finding = Finding(
        cause="broken_tokens",
        confidence=0.95 if broken.any() else 0.55 + 0.35 * few,
        share=_share(tokens, found, total),
        evidence=tuple(evidence),
    )
    return finding, found


def misaligned(tokens: Tokens, total: float) -> Verdict:
    """Samples whose log-probs agree after a shift: of the whole sample, or from some token on (tokenised again)."""
    found = np.zeros(len(tokens), bool)
    lags: list[int] = []
    changes = aligned = 0
    for rows in _worst_samples(tokens):
        train, rollout = tokens.train[rows], tokens.rollout[rows]
        path, gain, left = best_lags(train, rollout)
        aligned += 1
        shifted = path != 0
        if shifted.sum() < 4 or gain < MIN_SAVED or left > (CERTAIN_LEFT if gain < 1.5 * MIN_SAVED else MAX_LEFT):
            continue
        found[rows[shifted]] = True
        lags.append(int(np.median(path[shifted])))
        changes += bool((~shifted[: max(len(path) // 2, 1)]).sum() >= 2 or len(np.unique(path[shifted])) > 1)
    if not lags or len(lags) < max(2, 0.02 * len(np.unique(tokens.sample))):
        return None, np.zeros(len(tokens), bool)
    again = changes > 0.4 * len(lags)
    lag = int(np.median(lags))
    where = "from some token on" if again else "as a whole"
    finding = Finding(
        cause="retokenised" if again else "shifted_tokens",
        confidence=0.75 + 0.2 * ramp(len(lags), 2, 12),
        share=_share(tokens, found, total),
        evidence=(
            f"the log-probs of {len(lags)} of the {aligned} worst samples agree after a shift {where}",
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
        The lags; the nats saved by them; and what is left where a token is shifted, as a share of what was there.
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
    shifted = path > 0
    there = cost_TK[shifted, 0].sum()
    left = float(chosen[shifted].sum() / there) if there > 0 else 1.0
    return np.array(LAGS)[path], float(cost_TK[:, 0].sum() - chosen.sum()), left


def _worst_samples(tokens: Tokens) -> list[NDArray[np.int64]]:
    """Rows of the samples of largest mismatch, each in the order of its tokens."""
    if not len(tokens):
        return []
    _, starts, lengths = np.unique(tokens.sample, return_index=True, return_counts=True)
    mean_S = np.add.reduceat(tokens.size, starts) / lengths
    worst = np.argsort(-mean_S)[:MAX_ALIGNED]
    return [
        np.arange(starts[i], starts[i] + min(lengths[i], ALIGNED_TOKENS))
        for i in worst
        if mean_S[i] > 0.1 and lengths[i] >= 6
    ]


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
