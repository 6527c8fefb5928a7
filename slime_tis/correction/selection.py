"""Order statistics of values that several ranks share, found without gathering them.

Shapes: suffix _N is per value of this rank.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slime_tis.correction.ranks import ONE_RANK, Ranks

DIGIT_BITS = 9
"""Bits of the result that one round of the search finds: seven rounds for the 63 of a float64 without sign."""
INFINITY_BITS = 0x7FF0 << 48
"""+inf as an integer; the bits beyond it are not numbers."""


def order_statistic(values_N: Tensor, index: Tensor, ranks: Ranks = ONE_RANK) -> Tensor:
    """The value at `index` of all ranks' values in ascending order; +inf beyond the last one, 0 before the first.

    Args:
        values_N: This rank's values, not negative; +inf and NaN are not counted.
        index: Scalar, counted from 0.
        ranks: That share the values; each round sums a float64 [512, 2] table over them.

    Returns:
        float64 scalar, the same on all ranks. Nothing synchronises with the host.
    """
    ordered = values_N.to(torch.float64).nan_to_num(torch.inf, torch.inf).sort().values
    return largest_value(ordered, torch.zeros_like(ordered), lambda count, _: count <= index, ranks)


def largest_value(
    ordered_N: Tensor,
    terms_N: Tensor,
    holds: Callable[[Tensor, Tensor], Tensor],
    ranks: Ranks = ONE_RANK,
) -> Tensor:
    """The largest v for which `holds(count, total)` of the values below v, +inf if it holds for all of them.

    The bits of v are found from the highest down, some in each round: floats that are not negative are ordered as
    their bits are. A round asks, for every value of the next bits, how many values of all ranks lie below, and for
    the sum of their terms.

    Args:
        ordered_N: This rank's values, float64, not negative, ascending.
        terms_N: float64, what each of them adds to the total.
        holds: Count and total of the values below each of 512 candidates to bool [512]; once false for a
            candidate it is false for all larger ones.
        ranks: As of `order_statistic`.

    Returns:
        float64 scalar, the same on all ranks. Nothing synchronises with the host.
    """
    total = torch.cat([terms_N.new_zeros(1), terms_N.cumsum(0)])
    digits = torch.arange(1 << DIGIT_BITS, device=ordered_N.device)
    found = digits[:1]
    for shift in range(63 - DIGIT_BITS, -1, -DIGIT_BITS):
        candidates = (found + (digits << shift)).clamp_max(INFINITY_BITS)
        counts = torch.searchsorted(ordered_N, candidates.view(torch.float64))
        table = torch.stack([counts.to(torch.float64), total.index_select(0, counts)], 1)
        table = ranks.all_reduce(table)
        below = holds(table[:, 0], table[:, 1])
        last = below.sum().sub(1).clamp_min(0)  # the first was within a round ago, but for rounding between ranks
        found = candidates.index_select(0, last.reshape(1))
    return found.view(torch.float64)[0]
