"""Second-moment trimming: the tokens with the largest squared log-ratio leave until the rest is close enough.

Source: "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?"
(https://arxiv.org/abs/2510.01161), section 4.
"""

from dataclasses import replace

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.ranks import ONE_RANK, Ranks
from slime_tis.correction.selection import largest_value
from slime_tis.correction.sums import named, sequence_columns
from slime_tis.correction.token_pass import TokenPass


def trim_second_moment(config: RolloutCorrectionConfig, passes: list[TokenPass], limit: Tensor) -> list[TokenPass]:
    """Rejects the tokens whose Δ² is at or above the limit.

    Args:
        config: The options, with a second-moment bound.
        passes: Of all chunks.
        limit: Scalar, as `second_moment_limit` finds it for the global batch.
    """
    return [_trim(config, part, part.squares_RK, limit) for part in passes if part.squares_RK is not None]


def limit_of_batch(passes: list[TokenPass], bound: float, device: torch.device, ranks: Ranks) -> Tensor:
    """`second_moment_limit` of all chunks of all ranks."""
    squares = [part.squares_RK.reshape(-1) for part in passes if part.squares_RK is not None]
    flat_N = torch.cat([torch.zeros(0, device=device), *squares])
    return second_moment_limit(flat_N, bound, ranks)


def second_moment_limit(squares_N: Tensor, bound: float, ranks: Ranks = ONE_RANK) -> Tensor:
    """The smallest Δ² that has to leave, +inf where none has to.

    limit = min {v : mean(Δ² ≤ v) > bound}: with Δ² sorted upwards, the mean of the first m grows with m, and the
    first value that brings it above the bound leaves with all that are larger. Tokens that tie with it leave too,
    so that their order does not matter.

    Args:
        squares_N: Δ² of this rank's valid tokens; +inf or NaN at others, which are never counted.
        bound: On the mean over the tokens that are left.
        ranks: That share the batch; a float64 [512, 2] table is summed over them in a number of rounds that does
            not depend on the data. Tokens are not gathered.

    Returns:
        float64 scalar, the same on all ranks. Nothing synchronises with the host.
    """
    ordered = squares_N.nan_to_num(torch.inf, torch.inf).sort().values.to(torch.float64)
    if not ranks.is_one:  # all Δ² below the limit are within the bound, and with the values equal to it they are not
        return largest_value(ordered, ordered, lambda count, total: total / count.clamp_min(1) <= bound, ranks)
    counts = torch.arange(1, ordered.numel() + 1, dtype=torch.float64, device=ordered.device)
    within = (ordered.cumsum(0) / counts <= bound).sum()
    beyond = torch.cat([ordered, ordered.new_full((1,), torch.inf)])
    return beyond.index_select(0, within.reshape(1))[0]


def _trim(config: RolloutCorrectionConfig, part: TokenPass, squares_RK: Tensor, limit: Tensor) -> TokenPass:
    beyond_RK = (squares_RK >= limit.to(squares_RK)) & squares_RK.isfinite()
    accepted_RK = part.accepted_RK & ~beyond_RK
    table_S = part.table_S.clone()
    sums_S = named(sequence_columns(config), table_S.unbind(1))
    assert sums_S.trimmed is not None, "called without a second-moment bound"
    for sum_S, block_RK in ((sums_S.accepted, accepted_RK), (sums_S.trimmed, beyond_RK)):
        sum_S.zero_().index_add_(0, part.sequence_R, block_RK.sum(-1, dtype=torch.float64))
    return replace(part, accepted_RK=accepted_RK, table_S=table_S)
