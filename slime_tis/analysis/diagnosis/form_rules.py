"""Rules that look at the form of the mismatch of all tokens: its sign, and what it depends on.

Each is a function of the tokens that returns its finding with the share of the mismatch of these tokens, or None.
"""

import numpy as np

from slime_tis.analysis.diagnosis.tokens import MIN_TOKENS, Floats, Tokens, ramp
from slime_tis.rules import Finding

NEGLIGIBLE = 2e-4
"""Mean abs(Δ) below which nothing needs to change, nats: what two fp32 engines with other kernels leave."""


def truncated_sampling(tokens: Tokens) -> Finding | None:
    """Δ = log(kept mass) ≤ 0: the rollout engine divides by the mass that top-p or top-k kept, training does not."""
    log_ratio = tokens.log_ratio
    negative, positive = -log_ratio[log_ratio < 0].sum(), log_ratio[log_ratio > 0].sum()
    one_sided = negative / (negative + positive)
    confidence = ramp(one_sided, 0.86, 0.97)
    if confidence == 0:
        return None
    least = float(np.quantile(log_ratio, 0.002))
    return Finding(
        cause="truncated_sampling",
        confidence=0.96 * confidence,
        share=float(one_sided),
        evidence=(
            f"{one_sided:.1%} of the mismatch is negative: training finds tokens less likely, almost never likelier",
            f"99.8 % of the tokens have Δ above {least:.3f}, that is a kept mass above {np.exp(least):.2f}",
        ),
    )


def sharper_sampling(tokens: Tokens) -> Finding | None:
    """E[log π_train + entropy] > 0: tokens are likelier than those of the distribution that is trained."""
    if tokens.entropy is None:
        return None
    gap = (tokens.train + tokens.entropy)[tokens.finite & np.isfinite(tokens.entropy)]
    if len(gap) < MIN_TOKENS:
        return None
    error = gap.std() / np.sqrt(len(gap)) + 1e-9
    significance = gap.mean() / error
    confidence = ramp(significance, 4.5, 9.0)
    if confidence == 0 or gap.mean() < 0.01:
        return None
    return Finding(
        cause="truncated_sampling",
        confidence=0.7 * confidence,
        share=0.0,
        evidence=(
            f"log π_train + entropy is {gap.mean():+.3f} on average where 0 is expected, {significance:.0f} standard "
            "errors away: sampling is sharper than the distribution that is trained",
            "the reported log-probs do not show it: they are those before truncation, or before the temperature",
        ),
        detail="or a lower temperature, not in the reported log-probs",
    )


def temperature(tokens: Tokens) -> Finding | None:
    """Δ is a function of log p + entropy, d log p / dβ = (log p + H)/β of the inverse temperature β."""
    log_ratio, size = tokens.log_ratio, np.abs(tokens.log_ratio)
    with_entropy = tokens.entropy is not None and bool(np.isfinite(tokens.entropy).all())
    surprise = tokens.train + tokens.entropy if with_entropy and tokens.entropy is not None else tokens.train
    columns = [surprise, surprise**2] if with_entropy else [np.ones(len(tokens)), surprise, surprise**2]
    design = np.stack(columns, axis=1)
    weight = 1 / np.sqrt(size.mean() + size)[:, None]  # so that few large tokens do not make the fit
    solution, *_ = np.linalg.lstsq(design * weight, log_ratio * weight[:, 0], rcond=None)
    left = (((log_ratio - design @ solution) * weight[:, 0]) ** 2).sum()
    explained = 1 - float(left / ((log_ratio * weight[:, 0]) ** 2).sum())
    slope = float(solution[0 if with_entropy else 1])
    low, high = (0.55, 0.85) if with_entropy else (0.6, 0.85)
    confidence = ramp(explained, low, high)
    if confidence == 0:
        return None
    ratio = 1 / max(1 - slope, 0.05)
    return Finding(
        cause="temperature",
        confidence=0.92 * confidence,
        share=explained,
        evidence=(
            f"{explained:.0%} of the variance of Δ follows from "
            + (
                "log p + entropy, as under another temperature"
                if with_entropy
                else "log p, as under another temperature"
            ),
            f"slope {slope:+.3f}: the rollout's temperature over that of training is about {ratio:.2f}",
        ),
        detail=f"rollout/training ≈ {ratio:.2f}",
    )


def stale_weights(tokens: Tokens) -> Finding | None:
    """abs(Δ) is larger for tokens of older weights; or all tokens are of weights that are behind."""
    staleness = tokens.staleness
    if staleness is None or staleness.max() <= 0:
        return None
    old = staleness > staleness.min()
    behind = f"the weights that sampled are {staleness.mean():.1f} optimizer steps behind on average"
    if not old.any():
        return Finding(
            cause="stale_weights",
            confidence=0.62,
            share=1.0,
            evidence=(behind, "all tokens are equally old, so precision may have a part in it"),
        )
    if min(old.sum(), (~old).sum()) < MIN_TOKENS:
        return None
    new_size, old_size = _noise(tokens.only(~old)), _noise(tokens.only(old))
    times = old_size / max(new_size, 1e-9)
    confidence = ramp(times, 1.3, 2.5)
    if staleness.min() > 0:
        confidence = max(confidence, 0.6)
    if confidence == 0:
        return None
    return Finding(
        cause="stale_weights",
        confidence=0.93 * confidence,
        share=float(tokens.size[old].sum() / tokens.size.sum()),
        evidence=(behind, f"abs(Δ) of the tokens of older weights is {times:.1f} times that of the newest ones"),
    )


def weights_not_updated(tokens: Tokens) -> Finding | None:
    """abs(Δ) grows from step to step, though the weights are said to be new."""
    if tokens.step is None:
        return None
    steps = np.unique(tokens.step)
    if len(steps) < 4:
        return None
    size = np.array([_median_noise(tokens.only(tokens.step == step)) for step in steps])
    third = max(len(steps) // 3, 1)
    first, last = float(size[:third].mean()), float(size[-third:].mean())
    grows = ramp(last / max(first, 1e-9), 1.35, 2.0) * ramp(_rank_correlation(size), 0.4, 0.75)
    stuck = tokens.version is not None and len(np.unique(tokens.version)) == 1
    ages_differ = tokens.staleness is not None and len(np.unique(tokens.staleness)) > 1
    if grows == 0 or (ages_differ and not stuck):
        return None
    evidence = [f"abs(Δ) grows from {first:.2g} in the first steps to {last:.2g} in the last ones, relative to 1 − p"]
    if stuck:
        evidence.append("all tokens name the same version of the weights")
    elif tokens.staleness is not None:
        evidence.append(f"the weights are said to be {tokens.staleness.mean():.1f} steps behind in every step")
    return Finding(cause="weights_not_updated", confidence=0.95 * grows, share=1.0, evidence=tuple(evidence))


def position(tokens: Tokens) -> Finding | None:
    """abs(Δ), relative to 1 − p, rises over the response (drift) or falls (another prompt)."""
    # an update moves some positions more than others, and partial rollouts have their older tokens first
    chosen = _of_newest_weights(tokens)
    edges = np.unique(np.quantile(chosen.position, np.linspace(0, 1, 7)).astype(np.int64))
    if len(edges) < 4 or len(chosen) < 10 * MIN_TOKENS:
        return None
    bins = np.clip(np.searchsorted(edges, chosen.position, side="right") - 1, 0, len(edges) - 2)
    size = np.array([_median_noise(chosen.only(bins == i)) for i in range(len(edges) - 1)])
    rank, later = _rank_correlation(size), float(np.median(size[1:]))
    ends = f"{size[0]:.2g} at the first tokens, {later:.2g} later on and {size[-1]:.2g} at the last ones"
    if size[0] < size[1:].min():
        confidence = ramp(later / max(float(size[0]), 1e-9), 1.5, 2.2)
        cause, statement = "position_drift", f"abs(Δ) relative to 1 − p grows over the response: {ends}"
    else:
        confidence = ramp(size[0] / max(size[-1], 1e-9), 1.5, 2.5) * ramp(-rank, 0.5, 0.8)
        cause, statement = "other_prompt", f"abs(Δ) relative to 1 − p falls, as the prompt's influence fades: {ends}"
    if confidence == 0:
        return None
    share = float(chosen.size.sum() / tokens.size.sum())
    return Finding(cause=cause, confidence=0.9 * confidence, share=share, evidence=(statement,))


def moe_routing(tokens: Tokens) -> Finding | None:
    """A mixture of experts in which most tokens agree and the others jump, as where another expert is chosen."""
    if not tokens.has_experts:
        return None
    relative = np.abs(tokens.log_ratio) / tokens.uncertainty
    tail = concentration(relative)
    confidence = 0.5 + 0.45 * ramp(tail, 0.35, 0.6)
    return Finding(
        cause="moe_routing",
        confidence=confidence,
        share=float(np.clip(tail, 0, 1)),
        evidence=(
            "the model is a mixture of experts",
            f"a tenth of the tokens carries {tail:.0%} of the mismatch relative to 1 − p",
        ),
    )


def rounding(tokens: Tokens) -> Finding | None:
    """Noise of both signs that depends on nothing: low precision of weights, activations or reported log-probs.

    It is measured on the tokens of the newest weights, and taken to be as large on the others.
    """
    newest = _of_newest_weights(tokens)
    if len(newest) < MIN_TOKENS:
        newest = tokens
    mean = float(np.abs(newest.log_ratio).mean())
    if mean < NEGLIGIBLE:
        return None
    noise = _noise(newest)
    share = min(noise / _noise(tokens), 1.0)
    grid = reported_grid(tokens.rollout)
    grid = grid or reported_grid(tokens.train)
    kind = grid or ("bf16" if noise < 0.006 else "bf16 or int8" if noise < 0.025 else "fp8" if noise < 0.4 else "")
    where = "" if len(newest) == len(tokens) else " on the tokens of the newest weights"
    evidence = [f"abs(Δ) is {mean:.2g} nats on average{where}, {noise:.2g} relative to 1 − p, with both signs"]
    if grid:
        evidence.append(f"log-probs are numbers of {grid}: they were rounded when they were reported")
    else:
        evidence.append(f"its size is that of {kind} weights" if kind else "no precision makes as much")
    if not kind:
        return Finding(cause="unexplained", confidence=0.5, share=share, evidence=tuple(evidence))
    confidence = 0.8 if grid else 0.6
    if not grid:
        kind, statement, fits = named_precision(tokens.precisions, kind)
        evidence += [statement] if statement else []
        confidence = 0.75 if fits else confidence
    return Finding(cause="rounding", confidence=confidence, share=share, evidence=tuple(evidence), detail=kind)


FITS = {
    "bf16": ("bf16", "bf16 or int8"),
    "fp16": ("bf16",),
    "int8": ("bf16", "bf16 or int8", "fp8"),
    "fp8": ("bf16 or int8", "fp8"),
}
"""Sizes of noise that each precision of an engine can make; int8 and fp8 depend on the spread of the weights."""


def named_precision(precisions: tuple[str, str], size: str) -> tuple[str, str, bool]:
    """The form of rounding by the precisions that a run names, or by the size alone; what they say; whether they fit.

    Args:
        precisions: of the training and of the rollout engine.
        size: form by the size of the noise.
    """
    train, rollout = precisions
    if not rollout:
        return size, "", False
    said = f"the run names {train or 'no precision'} for training and {rollout} for the rollout engine"
    fitting = [precision for precision in (rollout, train) if size in FITS.get(precision, ())]
    if fitting:
        return fitting[0], f"{said}, which fits", True
    if rollout in FITS or train in FITS:
        return size, f"{said}, which makes noise of another size: look for a second cause", False
    return size, f"{said}: what rounds is something else, such as a cache, a kernel or a reduced matrix product", False


def reported_grid(log_probs: Floats) -> str:
    """The type of 16 bits whose numbers all log-probs are; empty where they are not."""
    values = log_probs[np.isfinite(log_probs) & (log_probs != 0)].astype(np.float32)
    if len(values) < MIN_TOKENS:
        return ""
    bits = values.view(np.uint32)
    if ((bits & 0xFFFF) == 0).mean() > 0.99:
        return "bf16"
    return "fp16" if (values.astype(np.float16).astype(np.float32) == values).mean() > 0.99 else ""


def concentration(size: Floats) -> float:
    """Share of a sum that its largest tenth has."""
    ordered = np.sort(size)[::-1]
    return float(ordered[: max(len(ordered) // 10, 1)].sum() / max(ordered.sum(), 1e-12))


def _of_newest_weights(tokens: Tokens) -> Tokens:
    """The tokens that the newest weights sampled; all of them where their age is not known."""
    return tokens if tokens.staleness is None else tokens.only(tokens.staleness == tokens.staleness.min())


def _noise(tokens: Tokens) -> float:
    """Σ abs(Δ) over Σ (1 − p): the mismatch with the certainty of the tokens taken out."""
    return float(np.abs(tokens.log_ratio).sum() / max(tokens.uncertainty.sum(), 1e-12))


def _median_noise(tokens: Tokens) -> float:
    """Median of abs(Δ)/(1 − p) over the tokens that are not certain, which few tokens do not move."""
    uncertain = tokens.uncertainty > 0.05
    relative = np.abs(tokens.log_ratio) / tokens.uncertainty
    return float(np.median(relative[uncertain])) if uncertain.any() else 0.0


def _rank_correlation(values: Floats) -> float:
    """Spearman's correlation of some values with their places."""
    ranks = np.argsort(np.argsort(values))
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])
