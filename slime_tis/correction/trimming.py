"""Second-moment trimming: the tokens with the largest squared log-ratio leave until the rest is close enough.

Source: "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?"
(https://arxiv.org/abs/2510.01161), section 4.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slime_tis.correction.statistics import Reduction
from slime_tis.correction.token_pass import TokenPass

DIGIT_BITS = 9
"""Bits of the limit that a round of the search over ranks finds: seven rounds for the 63 of a float64 without sign."""
INFINITY_BITS = 0x7FF0 << 48
"""+inf as an integer; the bits beyond it are no numbers."""


def trim_second_moment(passes: list[TokenPass], limit: Tensor, kept: int, trimmed: int) -> list[TokenPass]:
    """Rejects the tokens whose Δ² is at or above the limit.

    Args:
        passes: Of all chunks, made with a second-moment bound.
        limit: Scalar, as `second_moment_limit` finds it for the global batch.
        kept: Column of the table that counts kept tokens.
        trimmed: Column that counts trimmed tokens.
    """
    return [_apply(part, part.squares_RK, limit, kept, trimmed) for part in passes if part.squares_RK is not None]


def limit_of_batch(
    passes: list[TokenPass], bound: float, device: torch.device, *reductions: Reduction | None
) -> Tensor:
    """`second_moment_limit` of all chunks, and of all ranks that the reductions given join."""
    squares = [part.squares_RK.reshape(-1) for part in passes if part.squares_RK is not None]
    flat_N = torch.cat([torch.zeros(0, device=device), *squares])
    return second_moment_limit(flat_N, bound, [reduction for reduction in reductions if reduction is not None])


def second_moment_limit(squares_N: Tensor, bound: float, reductions: Sequence[Reduction] = ()) -> Tensor:
    """The smallest Δ² that has to leave, +inf where none has to.

    limit = min {v : mean(Δ² ≤ v) > bound}: with Δ² sorted upwards, the mean of the first m grows with m, and the
    first value that brings it above the bound leaves with all that are larger. Tokens that tie with it leave too,
    so that their order does not matter.

    Args:
        squares_N: Δ² of this rank's valid tokens; +inf or NaN at others, which are never counted.
        bound: On the mean over the tokens that are left.
        reductions: Each sums a float64 [512, 2] table over the ranks that share the batch, in a number of rounds
            that does not depend on the data; none on one rank. Tokens are not gathered.

    Returns:
        float64 scalar, the same on all ranks. Nothing synchronises with the host.
    """
    ordered = squares_N.nan_to_num(torch.inf, torch.inf).sort().values.to(torch.float64)
    below = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
    if reductions:
        return _search(ordered, below, bound, reductions)
    counts = torch.arange(1, ordered.numel() + 1, dtype=torch.float64, device=ordered.device)
    within = (below[1:] / counts <= bound).sum()
    beyond = torch.cat([ordered, ordered.new_full((1,), torch.inf)])
    return beyond.index_select(0, within.reshape(1))[0]


def _search(ordered_N: Tensor, below: Tensor, bound: float, reductions: Sequence[Reduction]) -> Tensor:
    """The largest v with mean(Δ² < v) ≤ bound, its bits found from the highest down, some a round.

    It is the limit: all Δ² below it are within the bound, and together with those that equal it they are not. Floats
    that are not negative are ordered as their bits are. A round asks, for every value of the next bits, how many
    tokens of all ranks lie below, and for the sum of their Δ².

    Args:
        ordered_N: Δ² of this rank, ascending.
        below: [N + 1], the sum of the first 0, 1, …, N of them.
    """
    digits = torch.arange(1 << DIGIT_BITS, device=ordered_N.device)
    found = digits[:1]
    for shift in range(63 - DIGIT_BITS, -1, -DIGIT_BITS):
        candidates = (found + (digits << shift)).clamp_max(INFINITY_BITS)
        counts = torch.searchsorted(ordered_N, candidates.view(torch.float64))
        table = torch.stack([counts.to(torch.float64), below.index_select(0, counts)], 1)
        for reduction in reductions:
            table = reduction(table)
        within = table[:, 1] / table[:, 0].clamp_min(1) <= bound
        last = within.sum().sub(1).clamp_min(0)  # the first was within a round ago, but for rounding between ranks
        found = candidates.index_select(0, last.reshape(1))
    return found.view(torch.float64)[0]


def _apply(part: TokenPass, squares_RK: Tensor, limit: Tensor, kept: int, trimmed: int) -> TokenPass:
    beyond = (squares_RK >= limit.to(squares_RK)) & squares_RK.isfinite()
    keep = part.keep_RK & ~beyond
    table = part.table_S.clone()
    for column, block in ((kept, keep), (trimmed, beyond)):
        rows = block.sum(-1, dtype=torch.float64)
        table[:, column] = table.new_zeros(table.shape[0]).index_add_(0, part.sequence_R, rows)
    return replace(part, keep_RK=keep, table_S=table)
