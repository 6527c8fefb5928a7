"""Rules on servers and single tokens: other units, placeholders and broken tokens.

Each rule returns a finding and the tokens it explains, or None. Later rules see the other tokens.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_tis.analysis.diagnosis.metric_rules import CERTAIN
from slime_tis.analysis.diagnosis.sampler_rules import KEPT_ALONE, TRUNCATED_PEAK
from slime_tis.analysis.diagnosis.shift_rules import exchanged, misaligned
from slime_tis.analysis.diagnosis.trained_tokens import (
    MAX_SIZE,
    MIN_TOKENS,
    Floats,
    Integers,
    Mask,
    Tokens,
    Verdict,
)
from slime_tis.analysis.dumps.table import worker_name
from slime_tis.health import NEGLIGIBLE_DIFFERENCE, Finding, ramp

MIN_WORKER_RATIO = 1.3
"""Smallest ratio of a deviating server's noise to the other servers'."""
PERMUTATIONS = 999
"""Random assignments of samples to servers. A server deviates if its ratio is above the largest
ratio of every assignment."""


def deviating_worker(tokens: Tokens) -> Verdict:
    """One of several rollout servers differs more; the share is the excess over the others.

    Tokens of an unknown server are not compared.
    """
    if tokens.worker is None:
        return None
    compared = tokens.only(tokens.worker >= 0)
    assert compared.worker is not None
    # Tokens of a sample are not independent, so a unit is the part that one server sampled.
    unit_key = np.stack([compared.worker, compared.sample])
    units, unit_N = np.unique(unit_key, axis=1, return_inverse=True)
    names, worker = np.unique(units[0], return_inverse=True)
    if len(names) < 2:
        return None
    size = np.bincount(unit_N, compared.size)
    uncertainty = np.bincount(unit_N, compared.uncertainty)
    # The argsort of an argsort gives ranks; from 1, so that a mean is never 0.
    rank = np.argsort(np.argsort(size / uncertainty)) + 1.0
    chance = np.random.default_rng(0)
    noise = _relative_to_others(size, uncertainty, worker)
    # Ranks show a wrong server also if several servers are wrong.
    for value, weight in ((size, uncertainty), (rank, np.ones(len(rank)))):
        ratio = _relative_to_others(value, weight, worker)
        worst = int(ratio.argmax())
        of_worst = compared.worker == names[worst]
        is_large = compared.size[of_worst].mean() >= NEGLIGIBLE_DIFFERENCE
        if noise[worst] < MIN_WORKER_RATIO or not is_large:
            continue
        if _happens_by_chance(value, weight, worker, ratio[worst], chance):
            continue
        name = worker_name(tokens.workers, int(names[worst]))
        evidence = (
            (
                f"{name} sampled {of_worst.mean():.0%} of the tokens; abs(Δ) relative to 1 − p is"
                f" {min(noise[worst], 1e3):.1f} times as large as of the other"
                f" {len(names) - 1} servers"
            ),
            f"no random assignment of samples to servers of {PERMUTATIONS} makes such a difference",
        )
        share = (1 - 1 / noise[worst]) * compared.size[of_worst].sum() / tokens.size.sum()
        finding = Finding("worker", evidence, 0.95, float(share), detail=name)
        return finding, tokens.worker == names[worst]
    return None


def _relative_to_others(value: NDArray[Any], weight: NDArray[Any], worker: Integers) -> Floats:
    """Returns each server's weighted mean of a value relative to the other servers' mean."""
    values = np.bincount(worker, value)
    weights = np.bincount(worker, weight)
    others = (values.sum() - values) / np.maximum(weights.sum() - weights, 1e-12)
    ratio: Floats = values / np.maximum(weights, 1e-12) / np.maximum(others, 1e-12)
    return ratio


def _happens_by_chance(
    value: NDArray[Any],
    weight: NDArray[Any],
    worker: Integers,
    largest: float,
    chance: np.random.Generator,
) -> bool:
    """Whether a random assignment of units to servers makes a ratio as large."""
    for _ in range(PERMUTATIONS):
        ratio = _relative_to_others(value, weight, chance.permutation(worker))
        # Negated, so that NaN counts as chance.
        if not ratio.max() < largest:
            return True
    return False


MAX_POSITIVE = 0.05
"""Largest share of log-probs above 0. With more, the numbers are no log-probs."""
POSITIVE = 1e-3
"""Smallest log-prob that counts as above 0, nats; rounding makes smaller ones."""
MAX_CONVERTED = 0.02
"""Largest remaining share of the mismatch of log-probs in another unit."""
MAX_CONSTANT_SPREAD = 1e-3
"""The same if a positive constant was added: top-p adds nearly one constant to every log-prob."""
SAME_UNIT = 0.01
"""Largest distance of the factor from 1 if only a constant was added."""
MIN_BOUNDED = 0.9
"""Smallest share of the tokens at a lower bound that training finds less likely."""


def converted(tokens: Tokens) -> Verdict:
    """Reported numbers are no log-probs, or differ from them by a constant, a factor or a bound."""
    is_small = np.abs(tokens.log_ratio).mean() < NEGLIGIBLE_DIFFERENCE
    if tokens.finite.sum() < MIN_TOKENS or is_small:
        return None
    for rule in (_not_log_probs, _another_unit, _cumulative, _bounded):
        verdict = rule(tokens)
        if verdict is not None:
            return verdict
    return None


def _not_log_probs(tokens: Tokens) -> Verdict:
    """Many of the reported numbers are above 0."""
    positive = (tokens.rollout[tokens.finite] > POSITIVE).mean()
    if positive <= MAX_POSITIVE:
        return None
    text = f"{positive:.0%} of the rollout engine's log-probs are above 0, so they are no log-probs"
    return Finding("broken_tokens", (text,), 0.95), np.ones(len(tokens), bool)


def _another_unit(tokens: Tokens) -> Verdict:
    """The reported numbers are a line through training's log-probs, found by least squares."""
    finite = tokens.only(tokens.finite)
    design = np.stack([finite.train, np.ones(len(finite))], axis=1)
    (factor, offset), *_ = np.linalg.lstsq(design, finite.rollout, rcond=None)
    residual = np.abs(finite.rollout - factor * finite.train - offset).sum()
    remaining = residual / finite.size.sum()
    if remaining >= MAX_CONVERTED:
        return _partly_another_unit(tokens)
    is_constant = abs(factor - 1) < SAME_UNIT and offset > 0
    if is_constant and remaining > MAX_CONSTANT_SPREAD:
        # The logarithm of the mass that top-p or min-p kept.
        return None
    text = (
        f"the rollout engine reports {factor:.4g} · log π_train {offset:+.3g}: another base,"
        " unit or constant"
    )
    return Finding("broken_tokens", (text,), 0.95), np.ones(len(tokens), bool)


def _partly_another_unit(tokens: Tokens) -> Verdict:
    """Some tokens, such as those of one server, have log-probs times a factor."""
    visible = tokens.finite & (tokens.train < -PLACEHOLDER_SIZE)
    wrong = visible & (tokens.size > PLACEHOLDER_SIZE)
    if wrong.sum() < MIN_TOKENS:
        return None
    factor = float(np.median(tokens.rollout[wrong] / tokens.train[wrong]))
    error = np.abs(tokens.rollout - factor * tokens.train)
    is_multiple = wrong & (error < FACTOR_ERROR * np.abs(tokens.train))
    is_factor = factor > MIN_FACTOR and abs(factor - 1) > SAME_FACTOR
    if not is_factor or is_multiple.sum() < MIN_MULTIPLES * wrong.sum():
        return None
    text = (
        f"the rollout engine reports {factor:.4g} · log π_train for {is_multiple.sum()} of"
        f" {wrong.sum()} tokens with a mismatch: another base or unit"
    )
    return Finding("broken_tokens", (text,), 0.95), is_multiple


def _cumulative(tokens: Tokens) -> Verdict:
    """The rollout log-prob of a token is the sum of the log-probs up to it."""
    is_first = np.diff(tokens.sample, prepend=-1) != 0
    before = np.where(is_first, 0.0, np.roll(tokens.rollout, 1))
    # inf − inf is NaN, and tokens that are not finite do not count below.
    with np.errstate(invalid="ignore"):
        error = np.abs(tokens.rollout - before - tokens.train)
    is_sum = tokens.finite & (error < FACTOR_ERROR * np.maximum(-tokens.rollout, 1.0))
    wrong = tokens.finite & (tokens.size > PLACEHOLDER_SIZE)
    explained = is_sum & wrong
    if explained.sum() < max(MIN_TOKENS, MIN_MULTIPLES * wrong.sum()):
        return None
    text = (
        f"the rollout engine reports sums of the log-probs up to each token ({explained.sum()} of"
        f" {wrong.sum()} tokens with a mismatch)"
    )
    return Finding("broken_tokens", (text,), 0.95), explained


def _bounded(tokens: Tokens) -> Verdict:
    """Unlikely tokens share one log-prob, which no reported log-prob falls below."""
    wrong = tokens.finite & (tokens.size > PLACEHOLDER_SIZE)
    values, counts = np.unique(tokens.rollout[wrong], return_counts=True)
    if counts.max(initial=0) < MIN_TOKENS:
        return None
    lowest = values[counts.argmax()]
    at_bound = tokens.finite & (tokens.rollout == lowest)
    # Other samples may come from a server without the bound.
    bounded_samples = np.isin(tokens.sample, tokens.sample[at_bound])
    is_lowest = tokens.rollout[bounded_samples & tokens.finite].min() >= lowest
    below = wrong & at_bound & (tokens.train < lowest)
    if not is_lowest or below.sum() <= MIN_BOUNDED * (wrong & at_bound).sum():
        return None
    text = (
        f"{at_bound.mean():.1%} of the tokens have the smallest log-prob, {lowest:.4g}: it is a"
        " lower bound"
    )
    return Finding("broken_tokens", (text,), 0.95), at_bound


MARKED_IDS = 8
"""Number of token ids that are checked for a placeholder: those with the most wrong tokens."""
FACTOR_ERROR = 0.01
"""Largest relative error of a log-prob that is a multiple of the other engine's."""
MIN_FACTOR = 0.1
"""Smallest factor of another unit; a placeholder of 0 is no multiple."""
SAME_FACTOR = 0.05
"""Distance of a factor from 1 up to which it is noise."""
MIN_MULTIPLES = 0.9
"""Smallest share of the tokens with a mismatch that must have the factor."""
PLACEHOLDER_SIZE = 0.02
"""Smallest abs(Δ) of a placeholder, nats."""
MIN_PLACEHOLDER = 1.0
"""Smallest 75 % quantile of the placeholders' abs(Δ), nats. A single token that top-p ≥ 0.4 keeps
is below it: truncated sampling reports 0 for it."""
MIN_PLACEHOLDERS = 3
"""Smallest number of tokens with a placeholder."""
MIN_MARKED = 8
"""Smallest number of tokens with a placeholder that need not be in runs, if no others are wrong."""
MAX_PLACEHOLDERS = 0.4
"""Largest share of tokens with a placeholder; greedy sampling reports 0 for all."""
MIN_IN_RUNS = 0.5
"""Smallest share of the placeholders that are in runs of two or more."""
MIN_RUN = 2.5
"""Smallest mean run length of tokens without a log-prob in segments such as tool output."""


def mask_mistake(tokens: Tokens) -> Verdict:
    """Runs of trained tokens have no rollout log-prob, or one that many tokens share."""
    missing = ~np.isfinite(tokens.rollout)
    is_large = tokens.size > PLACEHOLDER_SIZE
    values, counts = np.unique(tokens.rollout[~missing & is_large], return_counts=True)
    placeholder = np.nan
    if counts.max(initial=0) >= MIN_PLACEHOLDERS:
        placeholder = values[counts.argmax()]
    repeated = (tokens.rollout == placeholder) & is_large
    if _is_kept_alone(tokens, repeated):
        repeated[:] = False
    # If no other token has a mismatch, single and small ones are no accident either.
    least = max(MIN_MARKED, MIN_MULTIPLES * (missing | is_large).sum())
    is_sole = least <= (repeated & tokens.finite).sum() <= MAX_PLACEHOLDERS * len(tokens)
    is_small = repeated.any() and np.quantile(tokens.size[repeated], 0.75) < MIN_PLACEHOLDER
    if is_small and not is_sole:
        repeated[:] = False
    chosen = missing | repeated
    run_N = _run_lengths(tokens, chosen)
    mask = chosen & ((run_N >= 2) | is_sole)
    if mask.sum() < max(MIN_PLACEHOLDERS, MIN_IN_RUNS * chosen.sum()):
        return None
    value = f"exactly the log-prob {placeholder:.6g}"
    if missing[mask].mean() > 0.5:
        value = "no log-prob"
        if run_N[mask].mean() < MIN_RUN:
            # A kernel may give NaN for two neighbors.
            return None
    # Each token of a run of n counts as 1/n runs.
    runs = (1 / run_N[mask]).sum()
    evidence = (
        (
            f"{mask.sum()} of {len(tokens)} trained tokens ({mask.mean():.2%}) have {value} from"
            " the rollout engine"
        ),
        f"they form runs of {mask.sum() / runs:.1f} tokens on average",
    )
    return Finding("mask_mistake", evidence, 0.95), mask


def _is_kept_alone(tokens: Tokens, repeated: Mask) -> bool:
    """Whether truncation explains a repeated log-prob of 0: it kept one likely token alone.

    Placeholders of 0 also replace log-probs of tokens that training finds unlikely.
    """
    if not repeated.any():
        return False
    lowest, _ = TRUNCATED_PEAK
    is_zero = np.abs(tokens.rollout[repeated]) <= KEPT_ALONE
    is_likely = tokens.train[repeated] > lowest
    return bool((is_zero & is_likely).all())


def _run_lengths(tokens: Tokens, chosen: Mask) -> Integers:
    """Returns the lengths [N] of the tokens' runs: neighbors that are all chosen, or all not."""
    if not len(tokens):
        return np.zeros(0, np.int64)
    is_next = (np.diff(tokens.sample) == 0) & (np.diff(tokens.position) == 1)
    continues = is_next & (chosen[1:] == chosen[:-1])
    run_N = np.cumsum(np.append(False, ~continues))
    lengths: Integers = np.bincount(run_N)[run_N]
    return lengths


BROKEN_SIZE = 3.0
"""Smallest abs(Δ) of a broken token, nats."""
BROKEN_RATIO = 12.0
"""Smallest ratio of a broken token's abs(Δ) to the 95 % quantile of other tokens."""
MAX_BROKEN = 0.05
"""Largest share of broken tokens."""
IMPOSSIBLE = -25.0
"""Log-prob of a token that no engine samples: 2^18 token ids of this log-prob together are less
likely than 1e-5."""
ORDINARY_MEAN = (0.1, 0.02)
"""Mean abs(Δ) of all unbroken tokens, nats, for the smallest and for the largest confidence in
broken tokens whose log-probs are possible."""


def broken_tokens(tokens: Tokens) -> Verdict:
    """A few tokens are NaN, infinite or nats apart while the others agree."""
    broken = ~tokens.finite
    ordinary_N = _ordinary_size(tokens)
    bound_N = np.maximum(BROKEN_SIZE, BROKEN_RATIO * ordinary_N)
    outlying = tokens.finite & (tokens.size >= np.minimum(bound_N, MAX_SIZE))
    # No size is above MAX_SIZE, so without a NaN such a bound shows nothing.
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
    is_impossible = float(tokens.rollout[outlying].min(initial=0.0)) < IMPOSSIBLE
    if broken.any() or is_impossible:
        confidence = 0.95
    else:
        ordinary = float(np.abs(tokens.log_ratio[~mask]).mean())
        confidence = 0.5 + 0.15 * ramp(ordinary, *ORDINARY_MEAN)
    return Finding("broken_tokens", tuple(evidence), confidence), mask


def _ordinary_size(tokens: Tokens) -> Floats:
    """Returns the 95 % quantile [N] of abs(Δ), nats.

    For tokens from older weights, it is that of the tokens of the same step and age: a single long
    optimizer step moves tokens from older weights by nats, in that step only.
    """
    sizes = tokens.size[tokens.finite]
    ordinary_N = np.zeros(len(tokens))
    if len(sizes):
        ordinary_N[:] = np.quantile(sizes, 0.95)
    if tokens.staleness is None or tokens.step is None:
        return ordinary_N
    stale = (tokens.staleness > 0) & tokens.finite
    step_and_age = np.stack([tokens.step, tokens.staleness])[:, stale]
    _, group, counts = np.unique(step_and_age, axis=1, return_inverse=True, return_counts=True)
    # Sorted by group, members of a group are adjacent.
    rows = np.flatnonzero(stale)[np.argsort(group.ravel(), kind="stable")]
    ends = np.cumsum(counts)
    for members in np.split(rows, ends[:-1]):
        if len(members) >= MIN_TOKENS:
            ordinary_N[members] = np.quantile(tokens.size[members], 0.95)
    return ordinary_N


MIN_EQUAL = 0.8
"""Smallest share of a group's wrong tokens that have the placeholder."""
MAX_ELSEWHERE = 0.1
"""Largest share of a placeholder's tokens that lie outside of the group that it marks. Truncated
sampling reports exactly 0 for any token that it kept alone."""


def placeholder(tokens: Tokens) -> Verdict:
    """Tokens of one id, or at one end of the responses, have the same rollout log-prob.

    An engine that appends the end token, for example, reports 0 for it.
    """
    wrong = tokens.finite & (tokens.size > PLACEHOLDER_SIZE)
    for name, group in _marked_groups(tokens, wrong):
        values, counts = np.unique(tokens.rollout[group & wrong], return_counts=True)
        if counts.max(initial=0) < max(MIN_PLACEHOLDERS, MIN_EQUAL * (group & wrong).sum()):
            continue
        value = values[counts.argmax()]
        marked = group & (tokens.rollout == value)
        elsewhere = (tokens.rollout == value) & ~group
        if elsewhere.sum() > MAX_ELSEWHERE * marked.sum():
            continue
        text = (
            f"the rollout engine reports exactly {value:.6g} for {marked.sum()} of"
            f" {group.sum()} tokens {name}"
        )
        return Finding("placeholder_log_prob", (text,), CERTAIN, detail=name), marked
    return None


def _marked_groups(tokens: Tokens, wrong: Mask) -> Iterator[tuple[str, Mask]]:
    """Yields groups of tokens that an engine may treat differently, with their names.

    Args:
        tokens: The trained tokens.
        wrong: [N] tokens with a mismatch.
    """
    starts = np.diff(tokens.sample, prepend=-1) != 0
    ends = np.diff(tokens.sample, append=-1) != 0
    yield "at the first position", starts
    yield "at the last position", ends
    if tokens.token is not None:
        ids, counts = np.unique(tokens.token[wrong], return_counts=True)
        for i in np.argsort(-counts)[:MARKED_IDS]:
            yield f"with the id {ids[i]}", tokens.token == ids[i]


RULES = (converted, placeholder, mask_mistake, exchanged, misaligned, broken_tokens)
"""Each removes the tokens that it explains, in this order."""
