"""Second-moment trimming: the tokens with the largest squared log-ratio leave until the rest is close enough."""

from dataclasses import replace

import torch
from torch import Tensor

from slime_tis.correction.token_pass import TokenPass


def trim_second_moment(passes: list[TokenPass], bound: float, kept: int, trimmed: int) -> list[TokenPass]:
    """Rejects tokens with Δ² at or above the limit that brings the mean of the rest to `bound` or below.

    Taken over the tokens of this call on this rank, so that it depends on how a batch is cut into micro-batches.

    Source: "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?"
    (https://arxiv.org/abs/2510.01161), section 4.

    Args:
        passes: Of all chunks, made with a second-moment bound.
        bound: On the mean of Δ² over the tokens that are left.
        kept: Column of the table that counts kept tokens.
        trimmed: Column that counts trimmed tokens.
    """
    squares = [part.squares_RK for part in passes if part.squares_RK is not None]
    if not squares:
        return passes
    limit = second_moment_limit(torch.cat([block.reshape(-1) for block in squares]), bound)
    return [_apply(part, block, limit, kept, trimmed) for part, block in zip(passes, squares, strict=True)]


def second_moment_limit(squares_N: Tensor, bound: float) -> Tensor:
    """The smallest Δ² that has to leave, +inf where none has to.

    With Δ² sorted upwards, the mean of the first m grows with m; the limit is the first value after the longest
    prefix whose mean is at most `bound`. All tokens that tie with it leave, so that their order does not matter.

    Args:
        squares_N: Δ² of valid tokens; +inf at others, which sort last and are never counted.
        bound: On the mean.
    """
    ordered = squares_N.sort().values.to(torch.float64)
    counts = torch.arange(1, ordered.numel() + 1, dtype=torch.float64, device=ordered.device)
    within = (ordered.cumsum(0) / counts <= bound).sum()
    beyond = torch.cat([ordered, ordered.new_full((1,), torch.inf)])
    return beyond.index_select(0, within.reshape(1))[0]


def _apply(part: TokenPass, squares_RK: Tensor, limit: Tensor, kept: int, trimmed: int) -> TokenPass:
    beyond = (squares_RK >= limit.to(squares_RK.dtype)) & squares_RK.isfinite()
    keep = part.keep_RK & ~beyond
    table = part.table_S.clone()
    for column, block in ((kept, keep), (trimmed, beyond)):
        rows = block.sum(-1, dtype=torch.float64)
        table[:, column] = table.new_zeros(table.shape[0]).index_add_(0, part.sequence_R, rows)
    return replace(part, keep_RK=keep, table_S=table)
