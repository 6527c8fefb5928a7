"""Which samples carry the mismatch, and their common properties.

A fault of one server, prompt or turn shows here even if no rule knows its pattern.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    """Returns how many samples carry 90 % of Σ abs(Δ), and the common property of its tokens.

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
    size_S = np.bincount(index, size)
    largest_first = np.sort(size_S)[::-1]
    carried = largest_first.cumsum()
    count = int(np.searchsorted(carried, CARRIED * total)) + 1
    share = count / len(samples)
    sentence = f"{count} of {len(samples)} samples carry {CARRIED:.0%} of the mismatch"
    properties = list(_properties(tokens, index, size / total))
    common = _common_property(properties, size / total)
    if common:
        return f"{sentence}; {common}"
    if share >= SPREAD_OUT:
        return f"{sentence}: it is spread over them"
    # A dict keeps the order of the kinds, and each kind once.
    kinds = dict.fromkeys(each.kind for each in properties)
    compared = ", ".join(kinds)
    return f"{sentence}, without a common property (compared: {compared})"


def affected(tokens: Tokens) -> Mask:
    """Returns the tokens [N] of samples that have a mismatch.

    If a fault changes some samples only, the others hide its pattern. All tokens are returned if
    fewer than MIN_CLEAN of the samples are clean, or if the age of the weights may explain which.
    """
    # Samples of the newest weights have less mismatch without being free of the fault.
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


@dataclass(frozen=True, kw_only=True)
class _Property:
    """A property that tokens may have in common."""

    kind: str
    """The kind, such as "step"."""
    words: str
    """The property of tokens in words, such as "of step 3"."""
    chosen: Mask
    """[N] tokens that have it."""


def _common_property(properties: Sequence[_Property], weight: Floats) -> str:
    """Returns the property of the smallest part of the tokens that carries most of the mismatch.

    Args:
        properties: The properties that are compared.
        weight: [N] share of the mismatch.
    """
    # Only a property of fewer tokens can have the required lift.
    best = ""
    smallest = COMMON / MIN_LIFT
    for each in properties:
        carried = float(weight[each.chosen].sum())
        part = float(each.chosen.mean())
        if carried >= COMMON and part <= smallest and carried >= MIN_LIFT * part:
            smallest = part
            best = f"{carried:.0%} of it is in tokens {each.words}, {part:.0%} of all tokens"
    return best


def _properties(tokens: Tokens, index: Integers, weight: Floats) -> Iterator[_Property]:
    """Yields the properties that the dump shows.

    Only the value of a column that carries most can carry nearly all of the mismatch.

    Args:
        tokens: The trained tokens.
        index: [N] index of the sample that a token belongs to.
        weight: [N] share of the mismatch.
    """
    columns = {
        "step": tokens.step,
        "weight version": tokens.version,
        "turn": tokens.turn,
        "prompt": tokens.group,
        "token id": tokens.token,
    }
    for kind, column in columns.items():
        if column is not None:
            value, chosen = _heaviest(column, weight)
            yield _Property(kind=kind, words=f"of {kind} {value}", chosen=chosen)
    if tokens.worker is not None:
        value, chosen = _heaviest(tokens.worker, weight)
        name = worker_name(tokens.workers, value)
        yield _Property(kind="server", words=f"of {name}", chosen=chosen)
    first = tokens.position == 0
    # No sample has the number -1, so the last token of all ends its sample, too.
    last = np.diff(tokens.sample, append=-1) != 0
    yield _Property(kind="position", words="at the first position", chosen=first)
    yield _Property(kind="position", words="at the last position", chosen=last)
    length = np.bincount(index)[index]
    for kind, values in (("position", tokens.position), ("response length", length)):
        edges = np.quantile(values, np.linspace(0, 1, QUARTERS + 1))
        low = values <= edges[1]
        high = values >= edges[-2]
        yield _Property(kind=kind, words=f"in the lowest quarter of the {kind}", chosen=low)
        yield _Property(kind=kind, words=f"in the highest quarter of the {kind}", chosen=high)


def _heaviest(column: Integers, weight: Floats) -> tuple[int, Mask]:
    """Returns the value of a column that carries most, and its tokens [N]."""
    values, value_N = np.unique(column, return_inverse=True)
    largest = int(np.bincount(value_N, weight).argmax())
    return int(values[largest]), value_N == largest
