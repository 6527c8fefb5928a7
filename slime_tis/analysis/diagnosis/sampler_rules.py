"""Rules on settings of the sampler: truncation, temperature, penalties and biases.

Each rule returns a finding with its share of these tokens' mismatch, or None. Confidence 0 means
that the setting is absent. The number before a `ramp` is the rule's largest confidence.
"""

import numpy as np

from slime_tis.analysis.diagnosis.trained_tokens import MIN_TOKENS, Floats, Mask, Tokens, mean_of
from slime_tis.health import Finding, ramp

ONE_SIDED = (0.86, 0.97)
"""Negative share of the mismatch for no confidence and for full confidence in a truncation."""
LOWEST_LOG_MASS = (-2.0, -1.3)
"""Logarithm of the smallest mass that top-p or top-k keeps, for no and for full confidence."""
LOWEST_QUANTILE = 0.002
"""Quantile of Δ that counts as the smallest one; a few broken tokens may be below it."""
BANNED_MEDIAN = (0.4, 0.2)
"""Median of abs(Δ) as a multiple of the mean, for no and for full confidence in a banned token: few
tokens have most of the mismatch."""
BANNED_ONE_SIDED = (0.95, 0.99)
"""Negative share of the mismatch, for no and for full confidence in a banned token."""


KEPT_ALONE = 1e-6
"""Largest abs(log p) of a token that truncation kept alone: the engine reports exactly 0."""
TRUNCATED_PEAK = (-0.5, -1e-3)
"""Range of log π_train in which truncation may keep a token alone while training sees the rest."""
MIN_KEPT_ALONE = 3
"""Smallest number of such tokens that shows top-p or min-p."""
PEAKED = float(np.log(0.7))
"""Log-prob from which on a token is much likelier than all others."""
AGREEING_PEAKS = (0.15, 0.08)
"""Mean abs(Δ) of such tokens as a multiple of the other tokens', for no and for full confidence in
top-k."""
MIN_OF_OTHERS = 0.2
"""Smallest share of the mismatch of tokens that were not kept alone. Otherwise the zeros are
placeholders."""
DEEP_MASS = (-0.1, -0.3)
"""Quantile of Δ from which on a mass without such tokens is that of top-k, for no and for full
confidence. More rows in training's softmax keep a larger mass."""


def truncated_sampling(tokens: Tokens) -> Finding | None:
    """Δ = log(kept mass) ≤ 0: the rollout engine divides by the mass that top-p or top-k kept.

    Training does not. A much smaller mass is that of a banned token, or of a minimum length.
    """
    log_ratio = tokens.log_ratio
    negative = -log_ratio[log_ratio < 0].sum()
    positive = log_ratio[log_ratio > 0].sum()
    one_sided = float(negative / (negative + positive))
    lowest = float(np.quantile(log_ratio, LOWEST_QUANTILE))
    signs = (
        f"{one_sided:.1%} of the mismatch is negative: tokens are less likely in training, almost"
        " never more likely"
    )
    confidence = ramp(one_sided, *ONE_SIDED) * ramp(lowest, *LOWEST_LOG_MASS)
    if confidence:
        mass = (
            f"99.8 % of the tokens have Δ above {lowest:.3f}, a kept mass above"
            f" {np.exp(lowest):.2f}"
        )
        confidence *= _renormalized(tokens, lowest)
        return Finding("truncated_sampling", (signs, mass), 0.96 * confidence, one_sided)
    likeliest = argmax_log_probs(tokens)
    if likeliest is not None and likeliest.confidence > 0:
        return None
    deep = f"0.2 % of the tokens have Δ below {lowest:.3f}: a likely token was never sampled there"
    median = float(np.median(np.abs(log_ratio)) / np.abs(log_ratio).mean())
    return Finding(
        "penalty",
        (signs, deep),
        confidence=0.9 * ramp(median, *BANNED_MEDIAN) * ramp(one_sided, *BANNED_ONE_SIDED),
        share=one_sided,
        detail="a banned token or a minimum length",
    )


def _renormalized(tokens: Tokens, lowest: float) -> float:
    """Returns the confidence, from 0.7 to 1, that a mass below 1 comes from truncation.

    Additional rows in training's softmax, a smoothed softmax or a constant have the same sign. But
    truncation keeps nearly all of the mass where one token is likely. And top-p and min-p keep a
    likely token alone, and then its log-prob is exactly 0.
    """
    low, high = TRUNCATED_PEAK
    is_certain = np.abs(tokens.rollout) <= KEPT_ALONE
    alone = (tokens.train > low) & (tokens.train < high) & is_certain
    others = float(tokens.size[~is_certain].sum() / tokens.size.sum())
    if alone.sum() >= MIN_KEPT_ALONE and others >= MIN_OF_OTHERS:
        return 1.0
    likely = np.maximum(tokens.train, tokens.rollout) > PEAKED
    if alone.any() or likely.all() or not likely.any():
        return 0.7
    at_peaks = float(tokens.size[likely].mean() / max(tokens.size[~likely].mean(), 1e-12))
    return 0.7 + 0.3 * ramp(lowest, *DEEP_MASS) * ramp(at_peaks, *AGREEING_PEAKS)


MIN_ALONE_RATIO = 0.1
"""Smallest number of tokens that only training reports as certain, as a multiple of those that both
engines report as certain."""


def log_probs_before_truncation(tokens: Tokens) -> Finding | None:
    """Training applies the sampler's top-p or top-k; the reported log-probs were taken before it.

    Where truncation keeps one token, training's log-prob is exactly 0 and the reported one is not.
    A much lower temperature of training makes such zeros, too, so `temperature` has precedence.
    """
    low, high = TRUNCATED_PEAK
    is_certain = np.abs(tokens.train) <= KEPT_ALONE
    alone = (tokens.rollout > low) & (tokens.rollout < high) & is_certain
    others = float(tokens.size[~is_certain].sum() / tokens.size.sum())
    if alone.sum() < MIN_KEPT_ALONE or others < MIN_OF_OTHERS:
        return None
    # An engine that truncates as well reports 0 for nearly all of these tokens.
    both = is_certain & (np.abs(tokens.rollout) <= KEPT_ALONE)
    if alone.sum() < MIN_ALONE_RATIO * both.sum():
        return None
    if temperature(tokens).confidence > 0:
        return None
    evidence = (
        (
            f"{alone.sum()} tokens have the log-prob 0 in training, as if top-p or top-k kept only"
            f" them, and {tokens.rollout[alone].mean():.2g} on average in the rollout engine"
        ),
        "the reported log-probs were taken before truncation, and maybe before the temperature",
    )
    detail = "training applies it, the reported log-probs do not"
    return Finding("truncated_sampling", evidence, confidence=0.92, detail=detail)


LIKELY = float(np.log(0.55))
"""Log-prob from which on a token is certainly the likeliest one; 0.5 plus noise."""
UNLIKELY = float(np.log(0.2))
"""Log-prob up to which a sampled token is rarely the likeliest one."""
MIN_OF_KIND = 15
"""Smallest number of likely and of unlikely tokens."""
LIKELY_AGREES = (0.1, 0.02)
"""Mean abs(Δ) of the likely tokens as a multiple of the unlikely tokens', for no and for full
confidence."""
HIGHER_REPORTED = (0.8, 0.95)
"""Share of the unlikely tokens whose reported log-prob is higher by a tenth of a nat, for no and
for full confidence."""
COMPATIBLE_SUM = 1.02
"""Largest sum of the probabilities of two different tokens, plus noise."""
MIN_COMPATIBLE = 0.98
"""Smallest share of the tokens that must fit the probability of a likeliest token."""


def argmax_log_probs(tokens: Tokens) -> Finding | None:
    """The engine reports the likeliest token's log-prob: equal if that token was sampled.

    The likeliest token has at least the probability e^−H, with H the entropy, and together with
    another token at most 1.
    """
    likely = tokens.train > LIKELY
    unlikely = tokens.train < UNLIKELY
    if min(likely.sum(), unlikely.sum()) < MIN_OF_KIND:
        return None
    size = np.abs(tokens.log_ratio)
    agreement = size[likely].mean() / max(size[unlikely].mean(), 1e-12)
    higher = float((tokens.log_ratio[unlikely] < -0.1).mean())
    differs = tokens.log_ratio < -0.1
    if not differs.any():
        return None
    sums = np.exp(tokens.train[differs]) + np.exp(tokens.rollout[differs])
    fits = float((sums <= COMPATIBLE_SUM).mean())
    if tokens.entropy is not None:
        above = tokens.rollout >= -tokens.entropy - 0.05
        fits = min(fits, float(above.mean()))
    if fits < MIN_COMPATIBLE:
        return None
    evidence = (
        (
            f"abs(Δ) is {size[likely].mean():.2g} nats for tokens that are certainly the likeliest,"
            f" and {size[unlikely].mean():.2g} for unlikely tokens"
        ),
        (
            f"{higher:.0%} of the unlikely tokens have a higher log-prob in the rollout engine, as"
            " high as that of the likeliest token"
        ),
    )
    confidence = ramp(float(agreement), *LIKELY_AGREES) * ramp(higher, *HIGHER_REPORTED)
    return Finding("argmax_log_prob", evidence, 0.92 * confidence)


MIN_GAP = 0.01
"""Smallest mean of log π_train + entropy that shows sharper sampling, nats."""
GAP_SIGNIFICANCE = (4.5, 9.0)
"""The same in standard errors, for no and for full confidence."""


def sharper_sampling(tokens: Tokens) -> Finding | None:
    """E[log π_train + entropy] > 0: tokens are likelier than samples of training's distribution."""
    measured = tokens.only(np.isfinite(tokens.surprise))
    gap, error = mean_of(measured.surprise, measured.sample)
    if len(measured) < MIN_TOKENS or gap < MIN_GAP:
        return None
    significance = gap / (error + 1e-9)
    evidence = (
        (
            f"log π_train + entropy is {gap:+.3f} on average instead of 0, a difference of"
            f" {significance:.0f} standard errors: sampling is sharper than the trained"
            " distribution"
        ),
        (
            "the reported log-probs do not show it: they were taken before truncation or before the"
            " temperature"
        ),
    )
    return Finding(
        "truncated_sampling",
        evidence,
        confidence=0.7 * ramp(significance, *GAP_SIGNIFICANCE),
        share=0.0,
        detail="or a lower temperature, not in the reported log-probs",
    )


EXPLAINED = (0.93, 0.97)
"""Share of the variance of Δ that a temperature explains, for no and for full confidence."""
EXPLAINED_BY_SERIES = (0.75, 0.85)
"""The same if the remainder has the sign of the series' next term."""
LARGEST_TEMPERATURE = 5.0
"""Largest ratio of the temperatures, in either direction, that is a setting."""
NEGATIVE_REMAINDER = (0.3, 0.1)
"""Negative share of the remainder, for no and for full confidence in the next term's sign."""


def temperature(tokens: Tokens) -> Finding:
    """Δ is a function of log p + entropy: d log p / dβ = (log p + H)/β, with β = 1/temperature.

    The next term of the series, half of the variance of log p times (β − 1)², is positive at every
    token.
    """
    log_ratio = tokens.log_ratio
    size = np.abs(log_ratio)
    has_entropy = bool(np.isfinite(tokens.surprise).all())
    if has_entropy:
        variable = "log p + entropy"
        columns = [tokens.surprise, tokens.surprise**2]
    else:
        variable = "log p"
        columns = [tokens.train, tokens.train**2, np.ones(len(tokens))]
    design = np.stack(columns, axis=1)
    # Limits the influence of a few large tokens.
    weight = 1 / np.sqrt(size.mean() + size)
    solution, *_ = np.linalg.lstsq(design * weight[:, None], log_ratio * weight, rcond=None)
    residual = (log_ratio - design @ solution) * weight
    total = log_ratio * weight
    explained = 1 - float((residual**2).sum() / (total**2).sum())
    slope = float(solution[0])
    confidence = ramp(explained, *EXPLAINED)
    if has_entropy:
        remainder = log_ratio - slope * tokens.surprise
        negative = np.maximum(-remainder, 0).sum() / max(np.abs(remainder).sum(), 1e-12)
        follows_series = ramp(float(negative), *NEGATIVE_REMAINDER)
        confidence = max(confidence, ramp(explained, *EXPLAINED_BY_SERIES) * follows_series)
    # slope = 1 − T_train/T_rollout for small differences; the bound keeps the ratio finite.
    ratio = 1 / max(1 - slope, 0.05)
    if not 1 / LARGEST_TEMPERATURE <= ratio <= LARGEST_TEMPERATURE:
        confidence = 0.0
    evidence = (
        (
            f"{explained:.0%} of the variance of Δ depends on {variable}, as with a different"
            " temperature"
        ),
        f"slope {slope:+.3f}: rollout temperature / training temperature is about {ratio:.2f}",
    )
    return Finding(
        "temperature",
        evidence,
        confidence=0.85 * confidence,
        share=explained,
        detail=f"rollout/training ≈ {ratio:.2f}",
    )


MIN_BIASED = 8
"""Smallest number of tokens with a biased id."""
MIN_CLASS = 0.03
"""Smallest share of the mismatch that the changed tokens have, and that the others have."""
LARGEST_OF_OTHERS = 1.0
"""Largest mean abs(Δ) of unchanged tokens, nats: they only share the mass that others lost."""
POSITIVE_CHANGED = (0.4, 0.55)
"""Positive share of the changed tokens' mismatch, for no and for full confidence. Δ of a lowered
token is negative if likelier tokens are lowered even more."""
NEGATIVE_OTHERS = (0.9, 0.97)
"""Negative share of the unchanged tokens' mismatch, for no and for full confidence."""


def penalty(tokens: Tokens) -> Finding | None:
    """A penalty lowers tokens that came before, and raises all others: Δ ≤ 0 for the others.

    A repetition penalty below 1 exchanges the signs.
    """
    if tokens.repeats is None:
        return None
    came_before = {"in the response": tokens.repeats > 0}
    if tokens.in_prompt is not None:
        came_before["in the prompt or the response"] = tokens.repeats + tokens.in_prompt > 0
    candidates = []
    for text, changed in came_before.items():
        for sign in (1, -1):
            candidates.append((_opposite_signs(sign * tokens.log_ratio, changed), text, sign))
    confidence, text, sign = max(candidates)
    evidence = (_signs_in_words(sign, f"tokens that came before {text}"),)
    return Finding("penalty", evidence, 0.95 * confidence)


CANDIDATES = 3
"""Number of token ids that are tried for a bias, for each sign."""


def logit_bias(tokens: Tokens) -> Finding | None:
    """A bias of one token id: Δ has one sign for it, and the other sign for all other tokens."""
    if tokens.token is None:
        return None
    ids, index, counts = np.unique(tokens.token, return_inverse=True, return_counts=True)
    candidates = [(0.0, 0, 1)]
    for sign in (1, -1):
        size = np.bincount(index, np.maximum(sign * tokens.log_ratio, 0), len(ids))
        # Rare ids come last in the order below.
        size[counts < MIN_BIASED] = -1
        for i in np.argsort(-size)[:CANDIDATES].tolist():
            candidates.append((_opposite_signs(sign * tokens.log_ratio, index == i), i, sign))
    confidence, i, sign = max(candidates)
    evidence = (_signs_in_words(sign, f"token {ids[i]}"),)
    return Finding("penalty", evidence, 0.95 * confidence, detail=f"bias of token {ids[i]}")


def _opposite_signs(log_ratio: Floats, changed: Mask) -> float:
    """Returns the confidence that Δ is mostly positive if changed, and else always negative."""
    if min(changed.sum(), (~changed).sum()) < MIN_BIASED:
        return 0.0
    changed_size = np.abs(log_ratio[changed]).sum()
    other_size = np.abs(log_ratio[~changed]).sum()
    # Not `<`, which would let two sizes of 0 pass and divide by them.
    if min(changed_size, other_size) <= MIN_CLASS * (changed_size + other_size):
        return 0.0
    if other_size > LARGEST_OF_OTHERS * (~changed).sum():
        return 0.0
    positive = np.maximum(log_ratio[changed], 0).sum() / changed_size
    negative = np.maximum(-log_ratio[~changed], 0).sum() / other_size
    return min(ramp(float(positive), *POSITIVE_CHANGED), ramp(float(negative), *NEGATIVE_OTHERS))


def _signs_in_words(sign: int, changed: str) -> str:
    """Returns which tokens have a positive Δ, and which a negative one."""
    if sign > 0:
        return f"Δ is positive for {changed}, and negative for all others"
    return f"Δ is negative for {changed}, and positive for all others"
