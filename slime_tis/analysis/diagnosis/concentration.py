"""Which samples carry the mismatch, and what they have in common.

A fault of one server, prompt or turn shows here even if no rule knows its pattern.
"""

from collections.abc import Iterator

import numpy as np

from slime_tis.analysis.diagnosis.trained_tokens import Floats, Integers, Mask, Tokens
from slime_tis.analysis.dumps.table import worker_name

CARRIED = 0.9
"""Share of Σ min(abs(Δ), 10) that the named samples carry."""
MIN_SAMPLES = 8
"""Smallest number of samples whose concentration is stated."""
SPREAD_OUT = 0.5
"""Share of the samples from which on the mismatch is spread over all of them. With equal noise
everywhere, 90 % of the mismatch takes about 80 % of the samples."""
COMMON = 0.8
"""Smallest share of the mismatch that tokens with one common property carry."""
MIN_LIFT = 2.0
"""Smallest ratio of that share to the property's share of the tokens."""
CLEAN = 0.1
"""Noise of a sample without a mismatch, as a multiple of all tokens' noise."""
MIN_CLEAN = 0.15
"""Smallest share of clean samples from which on a fault changes only a part of them."""
QUARTERS = 4
"""Number of parts that lengths and positions are divided into."""


def concentration(tokens: Tokens) -> str:
    """Returns the share of the samples that carries 90 % of Σ abs(Δ), and what its tokens share.

    Args:
        tokens: The trained tokens of a dump.

    Returns:
        One sentence; empty for fewer than MIN_SAMPLES samples, or without a mismatch.
    """
    samples, index = np.unique(tokens.sample, return_inverse=True)
    size = tokens.size
    total = float(size.sum())
    if len(samples) < MIN_SAMPLES or total == 0:
        return ""
    ordered = np.sort(np.bincount(index, size))[::-1]
    count = int(np.searchsorted(ordered.cumsum(), CARRIED * total)) + 1
    share = count / len(samples)
    sentence = f"{count} of {len(samples)} samples carry {CARRIED:.0%} of the mismatch"
    common = _common_property(tokens, index, size / total)
    if common:
        return f"{sentence}; {common}"
    if share >= SPREAD_OUT:
        return f"{sentence}: it is spread over them"
    return f"{sentence}; no server, prompt, turn, length, position or step is common to them"


def affected(tokens: Tokens) -> Mask:
    """Returns the tokens [N] of samples that have a mismatch.

    If a fault changes some samples only, the others hide its pattern. All tokens are returned if
    fewer than MIN_CLEAN of the samples are clean, or if the age of the weights may explain which.
    """
    if tokens.staleness is not None and len(np.unique(tokens.staleness)) > 1:
        return np.ones(len(tokens), bool)
    samples, index = np.unique(tokens.sample, return_inverse=True)
    size = np.bincount(index, tokens.size)
    uncertainty = np.bincount(index, tokens.uncertainty)
    noise = size / np.maximum(uncertainty, 1e-12)
    is_clean = noise < CLEAN * size.sum() / max(float(uncertainty.sum()), 1e-12)
    if is_clean.sum() < MIN_CLEAN * len(samples):
        return np.ones(len(tokens), bool)
    chosen: Mask = ~is_clean[index]
    return chosen


def _common_property(tokens: Tokens, index: Integers, weight: Floats) -> str:
    """Returns the property of the smallest part of the tokens that carries most of the mismatch.

    Args:
        tokens: The trained tokens.
        index: [N] index of each token's sample.
        weight: [N] share of the mismatch.
    """
    best = ""
    smallest = COMMON / MIN_LIFT
    for name, chosen in _properties(tokens, index, weight):
        carried = float(weight[chosen].sum())
        part = float(chosen.mean())
        if carried >= COMMON and part <= smallest and carried >= MIN_LIFT * part:
            smallest = part
            best = f"{carried:.0%} of it is in tokens {name}, {part:.0%} of all tokens"
    return best


def _properties(tokens: Tokens, index: Integers, weight: Floats) -> Iterator[tuple[str, Mask]]:
    """Yields properties of tokens in words, with the tokens [N] that have them.

    Of each column only the value that carries most can carry nearly all of the mismatch.
    """
    columns = {
        "of step": tokens.step,
        "of weight version": tokens.version,
        "of turn": tokens.turn,
        "of the group (prompt)": tokens.group,
        "of server": tokens.worker,
        "with the id": tokens.token,
    }
    for name, column in columns.items():
        if column is None:
            continue
        values, value_N = np.unique(column, return_inverse=True)
        largest = int(np.bincount(value_N, weight).argmax())
        value = str(values[largest])
        if column is tokens.worker:
            value = worker_name(tokens.workers, int(values[largest])).removeprefix("server ")
        yield f"{name} {value}", value_N == largest
    yield "at the first position", tokens.position == 0
    yield "at the last position", np.diff(tokens.sample, append=-1) != 0
    length = np.bincount(index)[index]
    for name, values in (("the response length", length), ("the position", tokens.position)):
        edges = np.quantile(values, np.linspace(0, 1, QUARTERS + 1))
        yield f"in the lowest quarter of {name}", values <= edges[1]
        yield f"in the highest quarter of {name}", values >= edges[-2]
