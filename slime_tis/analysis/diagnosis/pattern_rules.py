"""Rules on the pattern of the mismatch over all tokens: its sign, and the variables and tokens it depends on.

Some rules use identities of importance sampling.

Each rule returns a finding with the share of these tokens' mismatch, or None. Confidence 0 means
that it is absent.
"""

import numpy as np

from slime_tis.analysis.diagnosis.trained_tokens import MIN_TOKENS, Floats, Mask, Tokens, mean_of
from slime_tis.health import NEGLIGIBLE_DIFFERENCE, Finding, ramp

MIN_LOG_MASS = -4.0
"""Smallest plausible logarithm of the mass that top-p or top-k keeps."""
MIN_CLASS = 0.03
"""Smallest share of the mismatch of the tokens that a penalty or a bias makes less likely, and of
the others."""
MIN_BIASED = 8
"""Smallest number of tokens with a biased id."""
CANDIDATES = 3
"""Token ids that a bias is tried on, for each sign."""
LARGEST_EXPONENT = 2.0
ONLY_REPORTED = "only the reported log-probs are wrong"
MIN_REPEATED = 20
"""Smallest number of tokens that other samples have after the same tokens."""
STANDARD_ERRORS = 5.0
"""Distance from 1 at which a mean ratio is not 1."""


def truncated_sampling(tokens: Tokens) -> Finding | None:
    """Δ = log(kept mass) ≤ 0: the rollout engine divides by the mass that top-p or top-k kept, training does not."""
    log_ratio = tokens.log_ratio
    negative, positive = -log_ratio[log_ratio < 0].sum(), log_ratio[log_ratio > 0].sum()
    one_sided = float(negative / (negative + positive))
    lowest = float(np.quantile(log_ratio, 0.002))
    confidence = ramp(one_sided, 0.86, 0.97) * ramp(lowest, MIN_LOG_MASS, MIN_LOG_MASS + 1.5)
    signs = (
        f"{one_sided:.1%} of the mismatch is negative: tokens are less likely in training, almost"
        " never more likely"
    )
    if not confidence:  # nearly all of the mass was removed
        deep = (
            f"0.2 % of the tokens have Δ below {lowest:.3f}: a likely token was never sampled there"
        )
        detail = "a banned token or a minimum length"
        few = ramp(float(np.median(np.abs(log_ratio)) / np.abs(log_ratio).mean()), 0.4, 0.2)
        return Finding(
            "penalty", (signs, deep), 0.9 * few * ramp(one_sided, 0.95, 0.99), one_sided, detail
        )
    evidence = (
        signs,
        f"99.8 % of the tokens have Δ above {lowest:.3f}, a kept mass above {np.exp(lowest):.2f}",
    )
    return Finding("truncated_sampling", evidence, 0.96 * confidence, one_sided)


def sharper_sampling(tokens: Tokens) -> Finding | None:
    """E[log π_train + entropy] > 0: tokens are more likely than samples of the trained distribution."""
    known = tokens.only(np.isfinite(tokens.surprise))
    gap, error = mean_of(known.surprise, known.sample)
    if len(known) < MIN_TOKENS or gap < 0.01:
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
    detail = "or a lower temperature, not in the reported log-probs"
    return Finding("truncated_sampling", evidence, 0.7 * ramp(significance, 4.5, 9.0), 0.0, detail)


def temperature(tokens: Tokens) -> Finding:
    """Δ is a function of log p + entropy: d log p / dβ = (log p + H)/β for the inverse temperature β.

    The next term of the series, half of the variance of log p times (β − 1)², is positive at every
    token.
    """
    log_ratio, size = tokens.log_ratio, np.abs(tokens.log_ratio)
    has_entropy = bool(np.isfinite(tokens.surprise).all())
    surprise = tokens.surprise if has_entropy else tokens.train
    design = np.stack(
        [surprise, surprise**2, *([] if has_entropy else [np.ones(len(tokens))])], axis=1
    )
    weight = 1 / np.sqrt(size.mean() + size)[:, None]  # limits the influence of a few large tokens
    solution, *_ = np.linalg.lstsq(design * weight, log_ratio * weight[:, 0], rcond=None)
    residual = (((log_ratio - design @ solution) * weight[:, 0]) ** 2).sum()
    explained = 1 - float(residual / ((log_ratio * weight[:, 0]) ** 2).sum())
    slope = float(solution[0])
    confidence = ramp(explained, 0.93, 0.97)
    if has_entropy:
        rest = log_ratio - slope * surprise
        negative = float(np.maximum(-rest, 0).sum() / max(np.abs(rest).sum(), 1e-12))
        confidence = max(confidence, ramp(explained, 0.75, 0.85) * ramp(negative, 0.3, 0.1))
    ratio = 1 / max(1 - slope, 0.05)
    variable = "log p + entropy" if has_entropy else "log p"
    evidence = (
        (
            f"{explained:.0%} of the variance of Δ depends on {variable}, as with a different"
            " temperature"
        ),
        f"slope {slope:+.3f}: rollout temperature / training temperature is about {ratio:.2f}",
    )
    return Finding(
        "temperature", evidence, 0.85 * confidence, explained, f"rollout/training ≈ {ratio:.2f}"
    )


def stale_weights(tokens: Tokens) -> Finding | None:
    """abs(Δ) is larger for tokens from older weights, or all tokens come from old weights."""
    staleness = tokens.staleness
    if staleness is None or staleness.max() <= 0:
        return None
    old = staleness > staleness.min()
    behind = f"the sampling weights are {staleness.mean():.1f} optimizer steps behind on average"
    if not old.any():
        return Finding(
            "stale_weights",
            (behind, "all tokens have the same age, so precision may contribute"),
            0.62,
        )
    if min(old.sum(), (~old).sum()) < MIN_TOKENS:
        return None
    ratio = _noise(tokens.only(old)) / max(_noise(tokens.only(~old)), 1e-9)
    confidence = max(ramp(ratio, 1.3, 2.5), 0.6 if staleness.min() > 0 else 0.0)
    share = float(tokens.size[old].sum() / tokens.size.sum())
    evidence = (
        behind,
        (
            f"abs(Δ) of tokens from older weights is {ratio:.1f} times as large as from the newest"
            " weights"
        ),
    )
    return Finding("stale_weights", evidence, 0.93 * confidence, share)


def weights_not_updated(tokens: Tokens) -> Finding | None:
    """abs(Δ) grows from step to step although the weights count as current."""
    if tokens.step is None:
        return None
    steps = np.unique(tokens.step)
    if len(steps) < 4:
        return None
    size = np.array([_median_noise(tokens.only(tokens.step == step)) for step in steps])
    third = max(len(steps) // 3, 1)
    first, last = float(size[:third].mean()), float(size[-third:].mean())
    growth = ramp(last / max(first, 1e-9), 1.35, 2.0) * ramp(_rank_correlation(size), 0.4, 0.75)
    stuck = tokens.version is not None and len(np.unique(tokens.version)) == 1
    ages_differ = tokens.staleness is not None and len(np.unique(tokens.staleness)) > 1
    if growth == 0 or (ages_differ and not stuck):
        return None
    evidence = [
        f"abs(Δ) relative to 1 − p grows from {first:.2g} in the first steps to {last:.2g} in the"
        " last steps"
    ]
    if stuck:
        evidence.append("all tokens have the same weight version")
    elif tokens.staleness is not None:
        evidence.append(
            f"the reported staleness is {tokens.staleness.mean():.1f} steps in every step"
        )
    return Finding("weights_not_updated", tuple(evidence), (0.95 if stuck else 0.65) * growth)


def position(tokens: Tokens) -> Finding | None:
    """abs(Δ) relative to 1 − p grows over the response (drift) or falls (different prompt)."""
    # an update moves some positions more than others, and partial rollouts start with their oldest
    # tokens
    newest = _of_newest_weights(tokens)
    edges = np.unique(np.quantile(newest.position, np.linspace(0, 1, 7)).astype(np.int64))
    if len(edges) < 4 or len(newest) < 10 * MIN_TOKENS:
        return None
    bins = np.clip(np.searchsorted(edges, newest.position, side="right") - 1, 0, len(edges) - 2)
    size = np.array([_median_noise(newest.only(bins == i)) for i in range(len(edges) - 1)])
    rank, later = _rank_correlation(size), float(np.median(size[1:]))
    values = (
        f"{size[0]:.2g} at the first tokens, {later:.2g} later and {size[-1]:.2g} at the last"
        " tokens"
    )
    if size[0] < size[1:].min():
        confidence = ramp(later / max(float(size[0]), 1e-9), 1.5, 2.2)
        cause, evidence = (
            "position_drift",
            f"abs(Δ) relative to 1 − p grows over the response: {values}",
        )
    else:
        confidence = ramp(size[0] / max(size[-1], 1e-9), 1.5, 2.5) * ramp(-rank, 0.5, 0.8)
        cause, evidence = (
            "other_prompt",
            f"abs(Δ) relative to 1 − p falls like the influence of the prompt: {values}",
        )
    return Finding(
        cause, (evidence,), 0.6 * confidence, float(newest.size.sum() / tokens.size.sum())
    )


def moe_routing(tokens: Tokens) -> Finding | None:
    """A mixture of experts in which most tokens agree and some jump, as with different experts."""
    if not tokens.has_experts:
        return None
    tail = concentration(np.abs(tokens.log_ratio) / tokens.uncertainty)
    evidence = (
        "the model is a mixture of experts",
        f"a tenth of the tokens has {tail:.0%} of the mismatch relative to 1 − p",
    )
    return Finding("moe_routing", evidence, 0.5 + 0.45 * ramp(tail, 0.35, 0.6), min(tail, 1.0))


def rounding(tokens: Tokens) -> Finding | None:
    """Noise of both signs without a pattern: low precision of weights, activations or reported log-probs.

    The noise is measured on tokens from the newest weights, and assumed to be equal on the others.
    """
    newest = _of_newest_weights(tokens)
    if len(newest) < MIN_TOKENS:
        newest = tokens
    mean = float(np.abs(newest.log_ratio).mean())
    if mean < NEGLIGIBLE_DIFFERENCE:
        return None
    noise = _noise(newest)
    share = min(noise / _noise(tokens), 1.0)
    where = "" if len(newest) == len(tokens) else " on tokens from the newest weights"
    size = (
        f"abs(Δ) is {mean:.2g} nats on average{where}, {noise:.2g} relative to 1 − p, with both"
        " signs"
    )
    if grid := reported_grid(tokens.rollout) or reported_grid(tokens.train):
        rounded = f"all log-probs are {grid} numbers: they were rounded when they were reported"
        return Finding("rounding", (size, rounded), 0.8, share, grid)
    kind = (
        "bf16"
        if noise < 0.006
        else "bf16 or int8"
        if noise < 0.025
        else "fp8"
        if noise < 0.4
        else ""
    )
    if not kind:
        return Finding("unexplained", (size, "no precision makes this much noise"), 0.5, share)
    detail, statement, fits = named_precision(tokens.precisions, kind)
    evidence = (size, f"the size fits {kind} weights", *([statement] if statement else []))
    if tokens.precisions[1] and not fits:
        return Finding("unexplained", evidence, 0.5, share)
    return Finding("rounding", evidence, 0.75 if fits else 0.55, share, detail)


FITS = {
    "bf16": ("bf16", "bf16 or int8"),
    "fp16": ("bf16",),
    "int8": ("bf16", "bf16 or int8", "fp8"),
    "fp8": ("bf16 or int8", "fp8"),
}
"""Possible noise of each precision; int8 and fp8 depend on the spread of the weights."""


def named_precision(precisions: tuple[str, str], size: str) -> tuple[str, str, bool]:
    """The precision that explains noise of a size, a statement about the run's precisions, and whether they fit."""
    train, rollout = precisions
    named = (
        f"the run uses {train or 'an unknown precision'} for training and {rollout} for the rollout"
        " engine"
    )
    if not rollout:
        return size, "", False
    for precision in (rollout, train):
        if size in FITS.get(precision, ()):
            return precision, f"{named}, which fits", True
    if rollout in FITS or train in FITS:
        return size, f"{named}, which makes noise of another size: look for a second cause", False
    return (
        size,
        f"{named}: something else rounds, such as a cache, a kernel or a reduced matrix product",
        False,
    )


def reported_grid(log_probs: Floats) -> str:
    """The 16-bit type that represents all log-probs exactly, or an empty string."""
    values = log_probs[np.isfinite(log_probs) & (log_probs != 0)].astype(np.float32)
    if len(values) < MIN_TOKENS:
        return ""
    bits = values.view(np.uint32)
    if ((bits & 0xFFFF) == 0).mean() > 0.99:
        return "bf16"
    return "fp16" if (values.astype(np.float16).astype(np.float32) == values).mean() > 0.99 else ""


def concentration(size: Floats) -> float:
    """Share of the largest tenth in the sum."""
    ordered = np.sort(size)[::-1]
    return float(ordered[: max(len(ordered) // 10, 1)].sum() / max(ordered.sum(), 1e-12))


def penalty(tokens: Tokens) -> Finding | None:
    """A penalty lowers tokens that came before, and raises all others: Δ ≤ 0 for the others.

    Δ of the lowered tokens is positive unless likelier tokens are lowered even more. A repetition
    penalty below 1 exchanges the signs.
    """
    if tokens.repeats is None:
        return None
    places = {"in the response": tokens.repeats > 0}
    if tokens.in_prompt is not None:
        places["in the prompt or the response"] = tokens.repeats + tokens.in_prompt > 0
    confidence, place, sign = max(
        (_opposite_signs(sign * tokens.log_ratio, seen), place, sign)
        for place, seen in places.items()
        for sign in (1, -1)
    )
    if sign > 0:
        chosen_sign = "positive"
        other_sign = "negative"
    else:
        chosen_sign = "negative"
        other_sign = "positive"
    evidence = (
        f"Δ is {chosen_sign} for tokens that came before {place}, and {other_sign} for all others",
    )
    return Finding("penalty", evidence, 0.95 * confidence)


def logit_bias(tokens: Tokens) -> Finding | None:
    """A bias of one token id: its tokens have Δ of one sign, and all other tokens Δ of the other sign."""
    if tokens.token is None:
        return None
    ids, index, counts = np.unique(tokens.token, return_inverse=True, return_counts=True)
    best = (0.0, 0, 1)
    for sign in (1, -1):
        positive = np.bincount(index, np.maximum(sign * tokens.log_ratio, 0), len(ids))
        for i in np.argsort(-np.where(counts >= MIN_BIASED, positive, -1))[:CANDIDATES].tolist():
            best = max(best, (_opposite_signs(sign * tokens.log_ratio, index == i), i, sign))
    confidence, i, sign = best
    if sign > 0:
        chosen_sign = "positive"
        other_sign = "negative"
    else:
        chosen_sign = "negative"
        other_sign = "positive"
    evidence = (f"Δ is {chosen_sign} for token {ids[i]}, and {other_sign} for all others",)
    return Finding("penalty", evidence, 0.95 * confidence, detail=f"bias of token {ids[i]}")


def _opposite_signs(log_ratio: Floats, chosen: Mask) -> float:
    """Confidence that Δ is mostly positive for the chosen tokens, and always negative for the others."""
    chosen_size, other_size = (np.abs(log_ratio[part]).sum() for part in (chosen, ~chosen))
    if min(chosen.sum(), (~chosen).sum()) < MIN_BIASED or min(
        chosen_size, other_size
    ) < MIN_CLASS * (chosen_size + other_size):
        return 0.0
    positive = np.maximum(log_ratio[chosen], 0).sum() / chosen_size
    negative = np.maximum(-log_ratio[~chosen], 0).sum() / other_size
    return min(ramp(float(positive), 0.4, 0.55), ramp(float(negative), 0.9, 0.97))


def another_model(tokens: Tokens) -> Finding | None:
    """The tokens are samples of training's distribution, and another model computed the reported log-probs.

    With ρ = π_train/π_rollout, E[ρ] = 1 for tokens that were sampled from π_rollout. Here E[1/ρ] =
    1 instead. Both are bounded, so that E ≤ 1.
    """
    gap, gap_error = mean_of(tokens.surprise, tokens.sample)
    if len(tokens) < 10 * MIN_TOKENS or abs(gap) > 3 * gap_error:  # NaN without entropy
        return None
    size = np.sort(tokens.size)
    is_few = size[: int(0.95 * len(size))].sum() < 0.2 * size.sum()  # broken tokens
    if is_few or temperature(tokens).confidence > 0:
        return None
    higher, lower = _bounded(tokens.log_ratio), _bounded(-tokens.log_ratio)
    ratio, error = mean_of(higher, tokens.sample)
    inverse, inverse_error = mean_of(lower, tokens.sample)
    difference, difference_error = mean_of(higher - lower, tokens.sample)
    is_larger = (
        ratio - 1 > STANDARD_ERRORS * error and difference > STANDARD_ERRORS * difference_error
    )
    if not is_larger or inverse - 1 > 3 * inverse_error:
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


def sampling(tokens: Tokens) -> str:
    """Which distribution the tokens are samples of, in words; empty if the tokens do not show it."""
    tokens = tokens.only(tokens.finite)
    gap, gap_error = mean_of(tokens.surprise, tokens.sample)
    if len(tokens) < 10 * MIN_TOKENS or not np.isfinite(gap):
        return ""
    ratio, error = mean_of(_bounded(tokens.log_ratio), tokens.sample)
    is_reported = ratio - 1 <= 3 * error
    if is_reported == (abs(gap) <= 3 * gap_error):  # both distributions are too close, or none fits
        return ""
    mean = f"the mean of min(π_train/π_rollout, e²) is {ratio:.3f} ± {error:.3f}"
    if is_reported:
        return (
            f"the tokens are samples of the reported distribution ({mean}): the engines' networks"
            " or inputs differ"
        )
    return f"the tokens are samples of training's distribution ({mean}): {ONLY_REPORTED}"


def _bounded(log_ratio: Floats) -> Floats:
    """min(ρ, e²), whose mean is at most 1 if the mean of ρ is 1, and which has no heavy tail."""
    bounded: Floats = np.exp(np.minimum(log_ratio, LARGEST_EXPONENT))
    return bounded


def decoding(tokens: Tokens) -> Finding | None:
    """The first token of the responses agrees exactly, and later ones do not: reading the prompt is not the problem."""
    tokens = tokens.only(
        tokens.uncertainty > 0.05
    )  # a certain first token, such as a tag, always agrees
    first = tokens.position == 0
    is_penalized = (
        found := penalty(tokens)
    ) is not None and found.confidence > 0  # the first token has no penalty
    if is_penalized or first.sum() < 10 or (~first).sum() < 10 * MIN_TOKENS:
        return None
    at_first = float(np.abs(tokens.log_ratio[first]).mean())
    later = float(np.median(np.abs(tokens.log_ratio[~first])))
    if not later > NEGLIGIBLE_DIFFERENCE:
        return None
    evidence = (
        (
            f"abs(Δ) is {at_first:.2g} nats at the first token, and its median is {later:.2g}"
            " later: the engines agree on the prompt and differ on sampled tokens"
        ),
    )
    return Finding(
        "position_drift",
        evidence,
        0.9 * ramp(at_first / later, 0.02, 0.01),
        1.0,
        "after the first token",
    )


def unstable(tokens: Tokens) -> Finding | None:
    """One engine gives different log-probs for the same token after the same tokens."""
    if tokens.context is None or ONLY_REPORTED in sampling(tokens):
        return None
    key = [
        column
        for column in (tokens.context, tokens.version, tokens.step, tokens.worker)
        if column is not None
    ]
    _, group, counts = np.unique(np.stack(key), axis=1, return_inverse=True, return_counts=True)
    repeated = counts[group] > 1
    if repeated.sum() < MIN_REPEATED:
        return None
    size = np.abs(tokens.log_ratio[repeated]).mean()
    correction = np.sqrt(counts / np.maximum(counts - 1, 1))[group]
    spreads = {}
    for name, column in (("training", tokens.train), ("the rollout engine", tokens.rollout)):
        mean = np.bincount(group, column) / counts
        spreads[name] = float((np.abs(column - mean[group]) * correction)[repeated].mean())
    engine = max(spreads, key=lambda name: spreads[name])
    if size < NEGLIGIBLE_DIFFERENCE:
        return None
    share = min(spreads[engine] / size, 1.0)
    evidence = (
        (
            f"{engine} gives log-probs that differ by {spreads[engine]:.2g} nats for the same token"
            f" after the same tokens ({repeated.sum()} tokens); abs(Δ) of these tokens is"
            f" {size:.2g}"
        ),
    )
    return Finding("dropout", evidence, 0.85 * ramp(share, 0.25, 0.5), share, f"in {engine}")


def _of_newest_weights(tokens: Tokens) -> Tokens:
    """Tokens from the newest weights; all tokens if their age is unknown."""
    return (
        tokens
        if tokens.staleness is None
        else tokens.only(tokens.staleness == tokens.staleness.min())
    )


def _noise(tokens: Tokens) -> float:
    """Σ abs(Δ) / Σ (1 − p): the mismatch normalized by the uncertainty of the tokens."""
    return float(np.abs(tokens.log_ratio).sum() / max(tokens.uncertainty.sum(), 1e-12))


def _median_noise(tokens: Tokens) -> float:
    """Median of abs(Δ)/(1 − p) over uncertain tokens; robust against outliers."""
    uncertain = tokens.uncertainty > 0.05
    relative = np.abs(tokens.log_ratio) / tokens.uncertainty
    return float(np.median(relative[uncertain])) if uncertain.any() else 0.0


def _rank_correlation(values: Floats) -> float:
    """Spearman's correlation of values with their index."""
    ranks = np.argsort(np.argsort(values))
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])


RULES = (
    weights_not_updated,
    stale_weights,
    another_model,
    penalty,
    logit_bias,
    decoding,
    unstable,
    temperature,
    truncated_sampling,
    position,
    moe_routing,
    rounding,
)
"""Rules on the tokens that the token rules leave."""
