"""Log-ratios between the training and the rollout policy, with handled non-finite tokens, aggregated at a level.

Shapes: suffix _RK is [rows, row width] of a `Chunk`, _S is per sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.correction.config import LOG_PROB_LIMIT, RolloutCorrectionConfig
from slime_tis.correction.layout import LONGEST_SEQUENCE, Chunk

Bound = float | Tensor
"""A bound of all values, or a tensor of their shape."""

LOG_RATIO_BOUND = 20.0
"""exp is taken of log-ratios clamped to ±20 (2e-9 to 5e8): against overflow, never a modelling
choice."""
FLOAT16_LOG_RATIO_BOUND = 8.0
"""The same in float16, which ends at e^11: a ratio of e^8 leaves room for an advantage of 20."""
LOG_RATIO_LIMIT = 1e6
"""A difference of log-densities of this size is treated as non-finite. Log-densities of continuous
samples may have any size themselves; log-probs of tokens are below `LOG_PROB_LIMIT`, and so differ
by less than this."""

LARGEST_FLOAT32 = torch.finfo(torch.float32).max
LARGEST_ROW_SUM = 1e30
"""Two log-probs of −3e38 make a ratio of 1 and a sum that overflows; sums of rows are kept below
this."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a chunk, their log-ratio finite. Everything is 0 where `valid_RK` is."""

    masked_in_RK: Tensor
    """1.0 where the loss mask is."""
    valid_RK: Tensor
    """1.0 where the loss mask is and the token may be used: all of it under the neutral policy."""
    nonfinite_RK: Tensor | None
    """1.0 where the loss mask is and the log-ratio is not finite; None where that is masked_in −
    valid."""
    valid_R: Tensor
    """Number of valid tokens of the row."""
    train_R: Tensor
    """Σ log π_train of the row, over the tokens whose log-ratio is finite."""
    log_ratio_RK: Tensor
    """Δ = log π_train − log π_rollout."""
    scratch_RK: Tensor
    """Memory for temporaries: what is in the cache already is faster than what is new."""


def log_ratios(chunk: Chunk, nonfinite_policy: str) -> Tokens:
    """Δ_t = where(valid, log π_train − log π_rollout, 0), with handled non-finite tokens.

    "reject" makes a non-finite token invalid, "neutral" gives it Δ = 0, and "raise" refuses it with
    a ValueError. Multiplication with a mask and `nan_to_num` (inf·0 is NaN) vectorise on a CPU;
    `where` and boolean tensors do not.
    """
    difference = chunk.train_RK - chunk.rollout_RK
    if chunk.are_densities:
        finite = difference.abs().lt_(LOG_RATIO_LIMIT).mul_(chunk.mask_RK)
    else:
        larger = torch.maximum(
            chunk.train_RK.abs(), chunk.rollout_RK.abs()
        )  # NaN if one of them is
        finite = larger.lt_(LOG_PROB_LIMIT).mul_(chunk.mask_RK)
    log_ratio = difference.mul_(finite).nan_to_num_(0.0)
    if nonfinite_policy == "raise":
        _raise_nonfinite(chunk, chunk.mask_RK - finite)
    valid = chunk.mask_RK if nonfinite_policy == "neutral" else finite
    scratch = torch.mul(chunk.train_RK, finite).nan_to_num_(0.0)
    train = scratch.sum(-1).nan_to_num_(0.0).clamp_(-LARGEST_ROW_SUM, LARGEST_ROW_SUM)
    nonfinite = chunk.mask_RK - finite if nonfinite_policy == "neutral" else None
    return Tokens(chunk.mask_RK, valid, nonfinite, valid.sum(-1), train, log_ratio, scratch)


def sequence_log_weights(aggregation: str, log_ratio_sum_S: Tensor, valid_S: Tensor) -> Tensor:
    """L of a whole sequence: "sum" Σ_t Δ_t, or "mean" Σ_t Δ_t / n, 0 where there is no valid token."""
    return log_ratio_sum_S if aggregation == "sum" else log_ratio_sum_S / valid_S.clamp_min(1)


def is_log_prob(log_probs: Tensor) -> Tensor:
    """Bool: whether each value can be a log-prob: finite, and not an engine's code for minus infinity."""
    return log_probs.abs() < LOG_PROB_LIMIT


def within_bound(log_probs: Tensor, other: Tensor) -> Tensor:
    """The log-probs, moved to at most 20 nats from `other`; equal to `other` where one of both is not a log-prob.

    For losses of other libraries, which take exp of the difference without a bound.
    """
    difference = log_probs - other
    moved = other + difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    moved = torch.where(difference.abs() <= LOG_RATIO_BOUND, log_probs, moved)
    return torch.where(is_log_prob(log_probs) & is_log_prob(other), moved, other)


def safe_exp(log_weight: Tensor) -> Tensor:
    """exp(clamp(L, −20, 20)), with a gradient of 0 outside; ±8 in float16.

    Every ratio of the library comes from here or from `safe_expm1`: exp of a log-ratio beyond 88
    overflows float32, and an infinite ratio makes the gradient NaN even where a clip or a mask
    multiplies it with 0.
    """
    bound = FLOAT16_LOG_RATIO_BOUND if log_weight.dtype == torch.float16 else LOG_RATIO_BOUND
    return log_weight.clamp(-bound, bound).exp_()


def safe_expm1(log_ratio: Tensor) -> Tensor:
    """ρ − 1 = expm1(clamp(Δ, −20, 20)), with the relative accuracy of the dtype however small Δ is."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expm1_()


def indicator(
    compare: Callable[..., Tensor], x: Tensor, bound: Bound, out: Tensor | None = None
) -> Tensor:
    """1.0 where `compare(x, bound)` holds, 0.0 elsewhere, in the dtype of x, written to `out` if given.

    A comparison written into floats vectorises on a CPU; one into bools, and sums of bools, do not.
    """
    if not isinstance(bound, Tensor):
        bound = in_float32(bound)
    return compare(x, bound, out=torch.empty_like(x) if out is None else out)


def in_float32(bound: float) -> float:
    """A bound as float32 can hold it: torch refuses larger numbers, and no weight or divergence reaches them."""
    return max(-LARGEST_FLOAT32, min(bound, LARGEST_FLOAT32))


def weight_bounds(config: RolloutCorrectionConfig, advantage: Tensor | None) -> tuple[Bound, Bound]:
    """Lower and upper bound of the weights, as tensors of the advantage's shape where they depend on its sign."""
    lower, upper = map(in_float32, config.is_bounds)
    if not config.signs_bounds:
        return lower, upper
    assert advantage is not None, "called without advantages"
    pairs = zip((lower, upper), map(in_float32, config.is_bounds_negative), strict=True)
    lowers, uppers = (
        torch.full_like(advantage, x).masked_fill_(advantage < 0, negative) for x, negative in pairs
    )
    return lowers, uppers


def prefix_sums(tokens: Tokens, chunk: Chunk) -> Tensor:
    """Σ_{s≤t} Δ_s: "Eligibility Traces for Off-Policy Policy Evaluation", Precup et al. 2000."""
    order_R = chunk.order()
    sequence_R = chunk.sequence_R.index_select(0, order_R)
    within_row = tokens.log_ratio_RK.cumsum(-1, dtype=torch.float64)
    totals = within_row[:, -1].index_select(0, order_R)
    before_row = totals.cumsum(0) - totals
    carried = before_row - before_row.index_select(0, torch.searchsorted(sequence_R, sequence_R))
    within_row += torch.empty_like(carried).index_copy_(0, order_R, carried)[:, None]
    return within_row.to(tokens.log_ratio_RK.dtype)


def segment_sums(tokens: Tokens, chunk: Chunk) -> Tensor:
    """Σ Δ over the contiguous run of the loss mask around t, a turn."""
    order_R = chunk.order()
    sequence_R = chunk.sequence_R.index_select(0, order_R)
    inside = tokens.masked_in_RK.index_select(0, order_R)
    log_ratio = tokens.log_ratio_RK.index_select(0, order_R)
    previous = torch.cat([inside.new_zeros(1), inside.view(-1)])[:-1].view(inside.shape)
    new_sequence = torch.cat([sequence_R.new_full((1,), -1), sequence_R])[:-1].ne(sequence_R)
    previous[:, 0].mul_(new_sequence.logical_not())
    starts = inside * (1 - previous)
    run = starts.view(-1).cumsum(0, dtype=torch.float64).to(torch.int64)
    sums = torch.zeros(run.numel() + 1, dtype=torch.float64, device=run.device)
    sums.index_add_(0, run, log_ratio.view(-1).to(torch.float64))
    of_run = sums.index_select(0, run).view(inside.shape).to(log_ratio.dtype)
    return log_ratio.index_copy_(0, order_R, of_run)


TOKEN_LEVELS: dict[str, Callable[[Tokens, Chunk], Tensor]] = {
    "token": lambda tokens, chunk: tokens.log_ratio_RK,
    "prefix": prefix_sums,
    "segment": segment_sums,
}
"""L_t of the aggregations with a log-weight per token."""


def _raise_nonfinite(chunk: Chunk, nonfinite_RK: Tensor) -> None:
    """Names the first such token; the one deliberate synchronisation with the host."""
    if not nonfinite_RK.any():
        return
    rows, columns = nonfinite_RK.nonzero().unbind(1)
    first = int(
        (chunk.sequence_R[rows] * LONGEST_SEQUENCE + chunk.offset_R[rows] + columns).argmin()
    )
    row, column = int(rows[first]), int(columns[first])
    sequence, position = int(chunk.sequence_R[row]), int(chunk.offset_R[row]) + column
    raise ValueError(
        f"sequence {chunk.first + sequence}, position {position}: train log-prob"
        f" {chunk.train_RK[row, column].item()}, rollout log-prob"
        f" {chunk.rollout_RK[row, column].item()}; fix the sample or choose --nonfinite-policy"
        " reject or neutral."
    )
