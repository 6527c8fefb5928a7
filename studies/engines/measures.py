"""Compares the log-probs that two engines give to the same tokens.

    Δ   = log π_second − log π_first
    k3  = mean of exp(Δ) − 1 − Δ                       (Schulman, http://joschu.net/blog/kl-approx.html)
    KL  = Σ_u p_u · log(p_u / q_u)

Positions are response tokens. KL is taken at each position over the union u of both engines' 8
likeliest tokens, with all other tokens as one outcome. It is at most the divergence over the
complete vocabulary (data processing inequality).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LIKELIEST = 8
"""Likeliest tokens of each engine whose union is compared."""
SMALLEST_REST = 1e-5
"""Probability of all other tokens below which it is rounding noise of the float32 log-probs."""

Top = Mapping[int, float]
"""Log-probs of an engine's likeliest next tokens, by token id."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two engines on the same tokens, in nats."""

    tokens: int
    """Tokens to which both engines give a probability."""
    outside: int
    """Tokens that only one engine keeps after top-p; not in the other fields."""
    mean_abs: float
    max_abs: float
    k3: float
    kl: float | None
    """Mean over positions; None if an engine's likeliest tokens were not recorded."""


def compare(
    first: Sequence[float],
    second: Sequence[float],
    first_top: Sequence[Top] = (),
    second_top: Sequence[Top] = (),
) -> Difference:
    """Compares two engines on the same tokens.

    Args:
        first: Log-probs of the tokens, nats; −inf for tokens that truncation removes.
        second: The same by the other engine.
        first_top: Likeliest tokens at each position; empty if they were not recorded.
        second_top: The same by the other engine.

    Raises:
        ValueError: The lengths differ, a log-prob is NaN, or no token is left to compare.
    """
    if len(first) != len(second):
        raise ValueError(f"the engines scored {len(first)} and {len(second)} tokens.")
    first_N = np.asarray(first, np.float64)
    second_N = np.asarray(second, np.float64)
    if np.isnan(first_N).any() or np.isnan(second_N).any():
        raise ValueError("an engine gave the log-prob NaN.")
    kept_N = np.isfinite(first_N) & np.isfinite(second_N)
    if not kept_N.any():
        raise ValueError("the engines share no token with a probability.")
    delta = second_N[kept_N] - first_N[kept_N]
    return Difference(
        tokens=int(kept_N.sum()),
        outside=int((~kept_N).sum()),
        mean_abs=float(np.abs(delta).mean()),
        max_abs=float(np.abs(delta).max()),
        k3=float((np.expm1(delta) - delta).mean()),
        kl=_mean_kl(first_top, second_top),
    )


def _mean_kl(first_top: Sequence[Top], second_top: Sequence[Top]) -> float | None:
    """Returns the mean of `kl_divergence` over positions, without infinite ones."""
    if not first_top or not second_top:
        return None
    divergences = []
    for first, second in zip(first_top, second_top, strict=True):
        divergence = kl_divergence(first, second)
        if math.isfinite(divergence):
            divergences.append(divergence)
    if not divergences:
        return None
    return sum(divergences) / len(divergences)


def kl_divergence(first: Top, second: Top) -> float:
    """Returns KL(first ‖ second) over the union of their 8 likeliest tokens and the rest, nats.

    A term is p·(d + exp(−d) − 1) with d = log p − log q. The sum of p·(exp(−d) − 1) = q − p is zero
    over a complete distribution, so the total is the divergence. No term is negative, and rounding
    of log-probs enters squared.

    Args:
        first: At least the 8 likeliest tokens, or all tokens that truncation keeps.
        second: The same by the other engine. A token of the union that one engine did not record
            belongs to the rest.
    """
    union = set(likeliest(first)) | set(likeliest(second))
    known = [token for token in union if token in first and token in second]
    total = 0.0
    first_rest = 1.0
    second_rest = 1.0
    for token in known:
        d = first[token] - second[token]
        p = math.exp(first[token])
        total += p * (d + math.expm1(-d))
        first_rest -= p
        second_rest -= math.exp(second[token])
    if max(first_rest, second_rest) <= SMALLEST_REST:
        return total
    if first_rest <= SMALLEST_REST:
        # No outcome of the first engine is in the rest: the term is q − p with p = 0.
        return total + second_rest
    if second_rest <= SMALLEST_REST:
        return math.inf
    d = math.log(first_rest / second_rest)
    return total + first_rest * (d + math.expm1(-d))


def likeliest(top: Top) -> list[int]:
    """Returns the 8 likeliest tokens."""
    return sorted(top, key=lambda token: -top[token])[:LIKELIEST]


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the number of tokens with which both texts begin."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
