"""Log-ratios of the training and the rollout policy, without non-finite values, and their levels.

Shapes: suffix _RK is [rows, row width] of a `Chunk`, _S is per sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.correction.config import LOG_PROB_LIMIT, RolloutCorrectionConfig
from slime_tis.correction.layout import LONGEST_SEQUENCE, Chunk

Bound = float | Tensor
"""One bound for all values, or a tensor of bounds with the values' shape."""

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ±20 nats before exp (ratios 2e-9 to 5e8). This only prevents overflow;
it is not a modelling choice."""
FLOAT16_LOG_RATIO_BOUND = 8.0
"""The same in float16, whose largest number is e^11: a ratio of e^8 times an advantage of 20 still
fits."""
LOG_RATIO_LIMIT = 1e6
"""A difference of log-densities of this size is treated as non-finite. Log-densities of continuous
samples may have any size themselves; log-probs of tokens are below `LOG_PROB_LIMIT`, and so differ
by less than this."""

LARGEST_FLOAT32 = torch.finfo(torch.float32).max
LARGEST_ROW_SUM = 1e30
"""Row sums of log-probs are clamped to this. Log-densities of −3e38 in both policies have a ratio
of 1, but their sum would overflow."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a chunk, with finite log-ratios. All fields are 0 at invalid tokens."""

    masked_in_RK: Tensor
    """1.0 at the tokens of the loss mask."""
    valid_RK: Tensor
    """1.0 at usable tokens of the loss mask, which are all its tokens under the neutral policy."""
    nonfinite_RK: Tensor | None
    """1.0 at tokens of the loss mask with a non-finite log-ratio; None if that is simply masked_in
    − valid."""
    valid_R: Tensor
    """Number of valid tokens of the row."""
    train_R: Tensor
    """Σ log π_train of the row, over tokens with a finite log-ratio."""
    log_ratio_RK: Tensor
    """Δ = log π_train − log π_rollout."""
    scratch_RK: Tensor
    """Scratch buffer for temporaries, reused because it is still in cache."""


def log_ratios(chunk: Chunk, nonfinite_policy: str) -> Tokens:
    """Δ_t = where(valid, log π_train − log π_rollout, 0), with handled non-finite tokens.

    "reject" makes a non-finite token invalid, "neutral" gives it Δ = 0, and "raise" raises a
    ValueError.
    """
    # Products with a float mask, and `nan_to_num` because inf·0 is NaN: these vectorise on a CPU,
    # `where` and bool tensors do not.
    difference = chunk.train_RK - chunk.rollout_RK
    if chunk.are_densities:
        size = difference.abs()
        limit = LOG_RATIO_LIMIT
    else:
        # `maximum` is NaN if one of both is NaN, and NaN is not below the limit
        size = chunk.train_RK.abs()
        torch.maximum(size, chunk.rollout_RK.abs(), out=size)
        limit = LOG_PROB_LIMIT
    finite = size.lt_(limit).mul_(chunk.mask_RK)
    log_ratio = difference.mul_(finite).nan_to_num_(0.0)
    if nonfinite_policy == "raise":
        _raise_nonfinite(chunk, chunk.mask_RK - finite)
    if nonfinite_policy == "neutral":
        valid = chunk.mask_RK
        nonfinite = chunk.mask_RK - finite
    else:
        valid = finite
        nonfinite = None
    # Log-probs at other tokens may have any value.
    scratch = torch.mul(chunk.train_RK, finite)
    # The products are finite or NaN; `nansum` saves the pass of `nan_to_num` over the block.
    train = scratch.nansum(-1).nan_to_num_(0.0).clamp_(-LARGEST_ROW_SUM, LARGEST_ROW_SUM)
    return Tokens(
        masked_in_RK=chunk.mask_RK,
        valid_RK=valid,
        nonfinite_RK=nonfinite,
        valid_R=valid.sum(-1),
        train_R=train,
        log_ratio_RK=log_ratio,
        scratch_RK=scratch,
    )


def sequence_log_weights(aggregation: str, log_ratio_sum_S: Tensor, valid_S: Tensor) -> Tensor:
    """L of a sequence: Σ_t Δ_t for "sum", Σ_t Δ_t / n for "mean"; 0 if it has no valid token."""
    if aggregation == "sum":
        return log_ratio_sum_S
    return log_ratio_sum_S / valid_S.clamp_min(1)


def is_log_prob(log_probs: Tensor) -> Tensor:
    """Whether values can be log-probs (bool): finite, and no engine's code for minus infinity."""
    return log_probs.abs() < LOG_PROB_LIMIT


def within_bound(log_probs: Tensor, other: Tensor) -> Tensor:
    """Log-probs within 20 nats of `other`; `other` itself if one of both is unusable.

    For losses of other libraries, which take exp of the difference without a bound.
    """
    difference = log_probs - other
    moved = other + difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # other + (x − other) may differ from x in the last bit, so near values are taken as they are.
    moved = torch.where(difference.abs() <= LOG_RATIO_BOUND, log_probs, moved)
    return torch.where(is_log_prob(log_probs) & is_log_prob(other), moved, other)


def safe_exp(log_weight: Tensor) -> Tensor:
    """exp(clamp(L, −20, 20)), with a gradient of 0 outside; ±8 in float16.

    All ratios of the library come from here or from `bounded_log_ratio`. exp of a log-ratio above
    88 overflows float32, and an infinite ratio makes the gradient NaN even if a clip or a mask
    multiplies it with 0.
    """
    bound = LOG_RATIO_BOUND
    if log_weight.dtype == torch.float16:
        bound = FLOAT16_LOG_RATIO_BOUND
    return log_weight.clamp(-bound, bound).exp_()


def bounded_log_ratio(log_ratio: Tensor, out: Tensor) -> Tensor:
    """clamp(Δ, −20, 20), written to `out`."""
    return torch.clamp(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND, out=out)


def indicator(
    compare: Callable[..., Tensor], x: Tensor, bound: Bound, out: Tensor | None = None
) -> Tensor:
    """1.0 if `compare(x, bound)` holds, else 0.0, in the dtype of x; written to `out` if given."""
    # A comparison into floats vectorises on a CPU; a comparison into bools, and their sum, do not.
    if not isinstance(bound, Tensor):
        bound = in_float32(bound)
    if out is None:
        out = torch.empty_like(x)
    return compare(x, bound, out=out)


def in_float32(bound: float) -> float:
    """The bound, clamped to float32's range: torch refuses larger numbers in comparisons."""
    return max(-LARGEST_FLOAT32, min(bound, LARGEST_FLOAT32))


def weight_bounds(config: RolloutCorrectionConfig, advantage: Tensor | None) -> tuple[Bound, Bound]:
    """Lower and upper bound of the weights.

    They are tensors of the advantage's shape if the bounds depend on its sign, else numbers.
    """
    lower, upper = map(in_float32, config.is_bounds)
    if not config.signs_bounds:
        return lower, upper
    assert advantage is not None, "called without advantages"
    lower_negative, upper_negative = map(in_float32, config.is_bounds_negative)
    is_negative = advantage < 0
    lowers = torch.full_like(advantage, lower).masked_fill_(is_negative, lower_negative)
    uppers = torch.full_like(advantage, upper).masked_fill_(is_negative, upper_negative)
    return lowers, uppers


def prefix_sums(tokens: Tokens, chunk: Chunk) -> Tensor:
    """Σ_{s≤t} Δ_s: "Eligibility Traces for Off-Policy Policy Evaluation", Precup et al. 2000."""
    order_R = chunk.order()
    sequence_R = chunk.sequence_R.index_select(0, order_R)
    # float64, because a sum over a long sequence in float32 loses the digits of a single Δ.
    within_row = tokens.log_ratio_RK.cumsum(-1, dtype=torch.float64)
    totals = within_row[:, -1].index_select(0, order_R)
    before_row = totals.cumsum(0) - totals
    # Rows are sorted by sequence, so this finds the first row of every row's sequence.
    first_row = torch.searchsorted(sequence_R, sequence_R)
    # Minus the value at the sequence's first row: sums do not cross sequences.
    carried = before_row - before_row.index_select(0, first_row)
    carried_R = torch.empty_like(carried).index_copy_(0, order_R, carried)
    within_row += carried_R[:, None]
    return within_row.to(tokens.log_ratio_RK.dtype)


def segment_sums(tokens: Tokens, chunk: Chunk) -> Tensor:
    """Σ Δ over the turn of t: the contiguous run of tokens of the loss mask that contains t."""
    order_R = chunk.order()
    sequence_R = chunk.sequence_R.index_select(0, order_R)
    inside = tokens.masked_in_RK.index_select(0, order_R)
    log_ratio = tokens.log_ratio_RK.index_select(0, order_R)
    # A run starts at a token of the mask whose predecessor in the sequence is not in the mask.
    shifted = torch.cat([inside.new_zeros(1), inside.view(-1)])[:-1]
    previous = shifted.view(inside.shape)
    previous_sequence_R = torch.cat([sequence_R.new_full((1,), -1), sequence_R])[:-1]
    new_sequence = previous_sequence_R.ne(sequence_R)
    previous[:, 0].mul_(new_sequence.logical_not())
    starts = inside * (1 - previous)
    # Numbers of runs from 1. float64 counts exactly, and float32 only up to 2²⁴.
    run = starts.view(-1).cumsum(0, dtype=torch.float64).to(torch.int64)
    # Sized by the tokens: the number of runs is known only on the device.
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
    """Raises a ValueError that names the first non-finite token; synchronises with the host."""
    if not nonfinite_RK.any():
        return
    rows, columns = nonfinite_RK.nonzero().unbind(1)
    # Rows are not in the order of sequences: boundary rows come last.
    order = chunk.sequence_R[rows] * LONGEST_SEQUENCE + chunk.offset_R[rows] + columns
    first = int(order.argmin())
    row = int(rows[first])
    column = int(columns[first])
    sequence = int(chunk.sequence_R[row])
    position = int(chunk.offset_R[row]) + column
    raise ValueError(
        f"sequence {chunk.first + sequence}, position {position}: train log-prob"
        f" {chunk.train_RK[row, column].item()}, rollout log-prob"
        f" {chunk.rollout_RK[row, column].item()}; fix the sample or choose --nonfinite-policy"
        " reject or neutral."
    )
