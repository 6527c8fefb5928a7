"""Rules that read token ids and prompts, and rules on the identities of importance sampling.

Each rule returns a finding with the share of these tokens' mismatch, or None. Confidence 0 means that it is absent.
"""

import numpy as np

from slime_tis.analysis.diagnosis.form_rules import temperature
from slime_tis.analysis.diagnosis.tokens import MIN_TOKENS, Floats, Mask, Tokens, mean_of, ramp
from slime_tis.rules import NEGLIGIBLE_DIFFERENCE, Finding

MIN_CLASS = 0.03
"""Smallest share of the mismatch of the tokens that a penalty or a bias makes less likely, and of the others."""
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


def penalty(tokens: Tokens) -> Finding | None:
    """A penalty lowers tokens that came before, and raises all others: Δ ≤ 0 for the others.

    Δ of the lowered tokens is positive unless likelier tokens are lowered even more. A repetition penalty below 1
    exchanges the signs.
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
    words = ("positive", "negative")[::sign]
    evidence = (f"Δ is {words[0]} for tokens that came before {place}, and {words[1]} for all others",)
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
    words = ("positive", "negative")[::sign]
    evidence = (f"Δ is {words[0]} for token {ids[i]}, and {words[1]} for all others",)
    return Finding("penalty", evidence, 0.95 * confidence, detail=f"bias of token {ids[i]}")


def _opposite_signs(log_ratio: Floats, chosen: Mask) -> float:
    """Confidence that Δ is mostly positive for the chosen tokens, and always negative for the others."""
    chosen_size, other_size = (np.abs(log_ratio[part]).sum() for part in (chosen, ~chosen))
    if min(chosen.sum(), (~chosen).sum()) < MIN_BIASED or min(chosen_size, other_size) < MIN_CLASS * (
        chosen_size + other_size
    ):
        return 0.0
    positive = np.maximum(log_ratio[chosen], 0).sum() / chosen_size
    negative = np.maximum(-log_ratio[~chosen], 0).sum() / other_size
    return min(ramp(float(positive), 0.4, 0.55), ramp(float(negative), 0.9, 0.97))


def another_model(tokens: Tokens) -> Finding | None:
    """The tokens are samples of training's distribution, and another model computed the reported log-probs.

    With ρ = π_train/π_rollout, E[ρ] = 1 for tokens that were sampled from π_rollout. Here E[1/ρ] = 1 instead. Both are
    bounded, so that E ≤ 1.
    """
    gap, gap_error = mean_of(tokens, tokens.surprise)
    if len(tokens) < 10 * MIN_TOKENS or abs(gap) > 3 * gap_error:  # NaN without entropy
        return None
    size = np.sort(tokens.size)
    is_few = size[: int(0.95 * len(size))].sum() < 0.2 * size.sum()  # broken tokens
    if is_few or temperature(tokens).confidence > 0:
        return None
    ratio, error = mean_of(tokens, _bounded(tokens.log_ratio))
    inverse, inverse_error = mean_of(tokens, _bounded(-tokens.log_ratio))
    difference, difference_error = mean_of(tokens, _bounded(tokens.log_ratio) - _bounded(-tokens.log_ratio))
    is_larger = ratio - 1 > STANDARD_ERRORS * error and difference > STANDARD_ERRORS * difference_error
    if not is_larger or inverse - 1 > 3 * inverse_error:
        return None
    evidence = (
        f"the tokens are samples of training's distribution: the mean of min(π_rollout/π_train, e²) is {inverse:.3f} ± "
        f"{inverse_error:.3f}, as for log-probs of another model on these tokens",
        f"they are no samples of the reported distribution: the mean of min(π_train/π_rollout, e²) is {ratio:.2f} ± "
        f"{error:.2f}, above 1",
    )
    return Finding("other_model", evidence, 0.9)


def sampling(tokens: Tokens) -> str:
    """Which distribution the tokens are samples of, in words; empty if the tokens do not show it."""
    tokens = tokens.only(tokens.finite)
    gap, gap_error = mean_of(tokens, tokens.surprise)
    if len(tokens) < 10 * MIN_TOKENS or not np.isfinite(gap):
        return ""
    ratio, error = mean_of(tokens, _bounded(tokens.log_ratio))
    is_reported = ratio - 1 <= 3 * error
    if is_reported == (abs(gap) <= 3 * gap_error):  # both distributions are too close, or none fits
        return ""
    mean = f"the mean of min(π_train/π_rollout, e²) is {ratio:.3f} ± {error:.3f}"
    if is_reported:
        return f"the tokens are samples of the reported distribution ({mean}): the engines' networks or inputs differ"
    return f"the tokens are samples of training's distribution ({mean}): {ONLY_REPORTED}"


def _bounded(log_ratio: Floats) -> Floats:
    """min(ρ, e²), whose mean is at most 1 if the mean of ρ is 1, and which has no heavy tail."""
    bounded: Floats = np.exp(np.minimum(log_ratio, LARGEST_EXPONENT))
    return bounded


def decoding(tokens: Tokens) -> Finding | None:
    """The first token of the responses agrees exactly, and later ones do not: reading the prompt is not the problem."""
    tokens = tokens.only(tokens.uncertainty > 0.05)  # a certain first token, such as a tag, always agrees
    first = tokens.position == 0
    is_penalized = (found := penalty(tokens)) is not None and found.confidence > 0  # the first token has no penalty
    if is_penalized or first.sum() < 10 or (~first).sum() < 10 * MIN_TOKENS:
        return None
    at_first = float(np.abs(tokens.log_ratio[first]).mean())
    later = float(np.median(np.abs(tokens.log_ratio[~first])))
    if not later > NEGLIGIBLE_DIFFERENCE:
        return None
    evidence = (
        f"abs(Δ) is {at_first:.2g} nats at the first token, and its median is {later:.2g} later: the engines agree on "
        "the prompt and differ on sampled tokens",
    )
    return Finding("position_drift", evidence, 0.9 * ramp(at_first / later, 0.02, 0.01), 1.0, "after the first token")


def unstable(tokens: Tokens) -> Finding | None:
    """One engine gives different log-probs for the same token after the same tokens."""
    if tokens.context is None or ONLY_REPORTED in sampling(tokens):
        return None
    key = [column for column in (tokens.context, tokens.version, tokens.step, tokens.worker) if column is not None]
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
        f"{engine} gives log-probs that differ by {spreads[engine]:.2g} nats for the same token after the same tokens "
        f"({repeated.sum()} tokens); abs(Δ) of these tokens is {size:.2g}",
    )
    return Finding("dropout", evidence, 0.85 * ramp(share, 0.25, 0.5), share, f"in {engine}")
