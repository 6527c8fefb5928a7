"""Rules on how the engines compute: positions, prompts, experts, precision and unstable kernels.

Each rule returns a finding with its share of these tokens' mismatch, or None. Confidence 0 means
that the fault is absent. The number before a `ramp` is the rule's largest confidence.
"""

import numpy as np

from slime_tis.analysis.diagnosis.precision_noise import NOISE, fits, possible_precisions
from slime_tis.analysis.diagnosis.sampler_rules import penalty
from slime_tis.analysis.diagnosis.trained_tokens import MIN_TOKENS, UNCERTAIN, Floats, Tokens
from slime_tis.analysis.diagnosis.weight_rules import (
    ONLY_REPORTED,
    rank_correlation,
    sampled_distribution,
)
from slime_tis.health import NEGLIGIBLE_DIFFERENCE, Finding, ramp

POSITION_BINS = 6
"""Number of ranges of the position, with equal numbers of tokens."""
MIN_POSITION_BINS = 3
"""Smallest number of different ranges."""
DRIFT = (1.5, 2.2)
"""Median noise of the later ranges as a multiple of the first range's, for no and for full
confidence in a drift."""
FALL = (1.5, 2.5)
"""Median noise of the first range as a multiple of the last range's, for no and for full confidence
in another prompt."""
FALL_CORRELATION = (0.5, 0.8)
"""Negative Spearman's correlation of the noise with the range, for no and for full confidence."""


def position(tokens: Tokens) -> Finding | None:
    """abs(Δ) relative to 1 − p grows over the response (drift) or falls (different prompt)."""
    # An update moves some positions more than others, and partial rollouts start with their oldest
    # tokens.
    newest = tokens.of_newest_weights()
    quantiles = np.linspace(0, 1, POSITION_BINS + 1)
    # Equal edges, which short responses have, count once.
    edges = np.unique(np.quantile(newest.position, quantiles).astype(np.int64))
    bins = len(edges) - 1
    if bins < MIN_POSITION_BINS or len(newest) < 10 * MIN_TOKENS:
        return None
    bin_N = np.searchsorted(edges, newest.position, side="right") - 1
    # The last edge is the largest position, which belongs to the last bin.
    bin_N = np.clip(bin_N, 0, bins - 1)
    noises = []
    for i in range(bins):
        noises.append(newest.only(bin_N == i).median_noise)
    noise = np.array(noises)
    first = noise[0]
    later = float(np.median(noise[1:]))
    last = noise[-1]
    values = f"{first:.2g} at the first tokens, {later:.2g} later and {last:.2g} at the last tokens"
    if first < noise[1:].min():
        cause = "position_drift"
        evidence = f"abs(Δ) relative to 1 − p grows over the response: {values}"
        confidence = ramp(later / max(float(first), 1e-9), *DRIFT)
    else:
        cause = "other_prompt"
        evidence = f"abs(Δ) relative to 1 − p falls like the influence of the prompt: {values}"
        confidence = ramp(first / max(last, 1e-9), *FALL)
        confidence *= ramp(-rank_correlation(noise), *FALL_CORRELATION)
    share = float(newest.size.sum() / tokens.size.sum())
    return Finding(cause, (evidence,), 0.6 * confidence, share)


AGREEING_FIRST = (0.02, 0.01)
"""abs(Δ) of the first token as a multiple of the later median, for no and for full confidence."""
MIN_FIRST_TOKENS = 10
"""Smallest number of first tokens."""


def decoding(tokens: Tokens) -> Finding | None:
    """The first tokens agree exactly, and later ones do not: the engines read the same prompt."""
    tokens = tokens.only(tokens.uncertainty > UNCERTAIN)
    # A penalty does not change the first token either.
    repeated = penalty(tokens)
    if repeated is not None and repeated.confidence > 0:
        return None
    is_first = tokens.position == 0
    if is_first.sum() < MIN_FIRST_TOKENS or (~is_first).sum() < 10 * MIN_TOKENS:
        return None
    first = float(np.abs(tokens.log_ratio[is_first]).mean())
    later = float(np.median(np.abs(tokens.log_ratio[~is_first])))
    if not later > NEGLIGIBLE_DIFFERENCE:
        return None
    evidence = (
        f"abs(Δ) is {first:.2g} nats at the first token, and its median is {later:.2g} later: the"
        " engines agree on the prompt and differ on sampled tokens"
    )
    return Finding(
        "position_drift",
        (evidence,),
        confidence=0.65 * ramp(first / later, *AGREEING_FIRST),
        share=1.0,
        detail="after the first token",
    )


ROUTED_TAIL = (0.35, 0.6)
"""Share of the mismatch that the largest tenth of the tokens has, for the smallest and for the
largest confidence in different experts."""


def moe_routing(tokens: Tokens) -> Finding | None:
    """A mixture of experts in which most tokens agree and some jump, as with different experts."""
    if not tokens.has_experts:
        return None
    tail = share_of_largest_tenth(np.abs(tokens.log_ratio) / tokens.uncertainty)
    evidence = (
        "the model is a mixture of experts",
        f"a tenth of the tokens has {tail:.0%} of the mismatch relative to 1 − p",
    )
    return Finding("moe_routing", evidence, 0.5 + 0.45 * ramp(tail, *ROUTED_TAIL), min(tail, 1.0))


def share_of_largest_tenth(size: Floats) -> float:
    """Returns the share of the largest tenth in the sum."""
    largest_first = np.sort(size)[::-1]
    count = max(len(size) // 10, 1)
    return float(largest_first[:count].sum() / max(size.sum(), 1e-12))


MIN_SIGN_SHARE = 0.1
"""Smallest share of the mismatch that each sign of Δ has in noise."""


def rounding(tokens: Tokens) -> Finding | None:
    """Noise of both signs without a pattern: low precision of weights, activations or log-probs.

    The noise is measured on tokens from the newest weights, and assumed to be equal on the others.
    """
    newest = tokens.of_newest_weights()
    if len(newest) < MIN_TOKENS:
        newest = tokens
    mean = float(np.abs(newest.log_ratio).mean())
    positive = float(np.maximum(newest.log_ratio, 0).mean())
    has_both_signs = MIN_SIGN_SHARE * mean <= positive <= (1 - MIN_SIGN_SHARE) * mean
    if mean < NEGLIGIBLE_DIFFERENCE or not has_both_signs:
        return None
    noise = newest.noise
    share = min(noise / tokens.noise, 1.0)
    subset = ""
    if len(newest) < len(tokens):
        subset = " on tokens from the newest weights"
    size = (
        f"abs(Δ) is {mean:.2g} nats on average{subset}, {noise:.2g} relative to 1 − p, with both"
        " signs"
    )
    grid = reported_grid(tokens.rollout) or reported_grid(tokens.train)
    if grid:
        rounded = f"all log-probs are {grid} numbers: they were rounded when they were reported"
        return Finding("rounding", (size, rounded), 0.8, share, grid)
    train, rollout = tokens.precisions
    named = [name for name in (rollout, train) if fits(name, noise)]
    if rollout and named:
        statement = (
            f"the run uses {train or 'an unknown precision'} for training and {rollout} for the"
            f" rollout engine, and {named[0]} makes noise of this size"
        )
        return Finding("rounding", (size, statement), 0.75, share, named[0])
    possible = possible_precisions(noise)
    if not possible:
        return Finding("unexplained", (size, "no precision makes this much noise"), 0.5, share)
    sizes = ", ".join(f"{name} ({part:.0%})" for name, part in possible.items())
    evidence = [size, f"of the precisions, the size fits {sizes}"]
    if rollout:
        evidence.append(_other_size(train, rollout))
        return Finding("unexplained", tuple(evidence), 0.5, share)
    return Finding("rounding", tuple(evidence), 0.55, share, " or ".join(possible))


def _other_size(train: str, rollout: str) -> str:
    """Returns that the run's precisions do not explain the noise, in words."""
    names = (
        f"the run uses {train or 'an unknown precision'} for training and {rollout} for the rollout"
        " engine"
    )
    if {train, rollout} & NOISE.keys():
        return f"{names}, which make less noise: look for a second cause"
    return f"{names}: something else rounds, such as a cache, a kernel or a reduced matrix product"


MIN_ON_GRID = 0.99
"""Smallest share of log-probs that a 16-bit type represents exactly, if they are of this type."""


def reported_grid(log_probs: Floats) -> str:
    """Returns the 16-bit type that represents all log-probs exactly; empty if none does."""
    values = log_probs[np.isfinite(log_probs) & (log_probs != 0)].astype(np.float32)
    if len(values) < MIN_TOKENS:
        return ""
    # bf16 is the upper half of an fp32 number.
    is_bf16 = (values.view(np.uint32) & 0xFFFF) == 0
    if is_bf16.mean() > MIN_ON_GRID:
        return "bf16"
    is_fp16 = values.astype(np.float16).astype(np.float32) == values
    if is_fp16.mean() > MIN_ON_GRID:
        return "fp16"
    return ""


MIN_REPEATED = 20
"""Smallest number of tokens that other samples have after the same tokens."""
UNSTABLE = (0.25, 0.5)
"""Spread of one engine's log-probs as a share of abs(Δ), for no and for full confidence."""
MAX_OTHER_SPREAD = 0.3
"""Largest spread of the other engine, as a share of the first one's. If both spread, the samples
have different inputs that the token ids do not show, such as images."""
ALL_SAMPLES = (0.5, 0.8)
"""Share of the samples whose noise is at least a fifth of the mean, for no and for full confidence:
dropout changes every sample, and a wrong server only its own."""


def unstable(tokens: Tokens) -> Finding | None:
    """One engine gives different log-probs for the same token after the same tokens."""
    if tokens.context is None or ONLY_REPORTED in sampled_distribution(tokens):
        return None
    key = [tokens.context]
    for column in (tokens.version, tokens.step, tokens.worker):
        if column is not None:
            key.append(column)
    _, group, counts = np.unique(np.stack(key), axis=1, return_inverse=True, return_counts=True)
    repeated = counts[group] > 1
    if repeated.sum() < MIN_REPEATED:
        return None
    size = np.abs(tokens.log_ratio[repeated]).mean()
    if size < NEGLIGIBLE_DIFFERENCE:
        return None
    # The mean of n values is closer to each value than the expectation is.
    correction = np.sqrt(counts / np.maximum(counts - 1, 1))[group]
    spreads = {}
    for name, log_probs in (("training", tokens.train), ("the rollout engine", tokens.rollout)):
        mean = np.bincount(group, log_probs) / counts
        deviation = np.abs(log_probs - mean[group]) * correction
        spreads[name] = float(deviation[repeated].mean())
    engine = max(spreads, key=lambda name: spreads[name])
    spread = spreads[engine]
    if min(spreads.values()) > MAX_OTHER_SPREAD * spread:
        return None
    share = min(spread / size, 1.0)
    evidence = (
        f"{engine} gives log-probs that differ by {spread:.2g} nats for the same token after the"
        f" same tokens ({repeated.sum()} tokens); abs(Δ) of these tokens is {size:.2g}"
    )
    confidence = ramp(share, *UNSTABLE) * ramp(_share_of_noisy_samples(tokens), *ALL_SAMPLES)
    return Finding("dropout", (evidence,), 0.85 * confidence, share, f"in {engine}")


def _share_of_noisy_samples(tokens: Tokens) -> float:
    """Returns the share of the samples whose noise is at least a fifth of all tokens' noise."""
    _, index = np.unique(tokens.sample, return_inverse=True)
    size = np.bincount(index, np.abs(tokens.log_ratio))
    uncertainty = np.bincount(index, tokens.uncertainty)
    return float((size >= 0.2 * tokens.noise * uncertainty).mean())
