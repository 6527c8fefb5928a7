"""The one pass over the tokens of a chunk: weights, verdicts, and row sums for all metrics.

`token_pass` reads a chunk once and returns two blocks and a table with one row per sequence. The
later steps need only the table.

Shapes: suffix _RK is [rows, row width], _R per row, _S per sequence.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.layout import Chunk
from slime_tis.correction.modes import LEVELS, Criterion
from slime_tis.correction.ratio import (
    TOKEN_LEVELS,
    Tokens,
    bounded_log_ratio,
    indicator,
    log_ratios,
    safe_exp,
    weight_bounds,
)
from slime_tis.correction.rejection import (
    accepted,
    catastrophic_tokens,
    clamped_k3_of,
    token_statistic,
)
from slime_tis.correction.sums import SequenceSums, WeightSums, sequence_columns, stacked


@dataclass(frozen=True)
class TokenPass:
    """The result of one pass over a chunk."""

    weight_RK: Tensor
    """Bounded weight of the token, 0 at invalid tokens. If the level is sequence-wide, it is 1 at
    valid tokens."""
    accepted_RK: Tensor
    """bool, True at valid tokens that no per-token criterion rejects."""
    squares_RK: Tensor | None
    """Δ² at valid tokens and +inf elsewhere; None without second-moment trimming."""
    table_S: Tensor
    """`SequenceSums` of the chunk's sequences as columns, float64."""
    extremes: Tensor | None
    """Extremes of the weights of the chunk's valid tokens; None without token weights.

    [0] and [1] are the smallest and largest weight before the mode, +inf and 0 without valid
    tokens. [2] is the largest weight after the mode if the mode is mask or the bounds depend on the
    advantage, else [1] again. [3] exists only if the bounds depend on the advantage: the smallest
    weight after the mode."""
    sequence_R: Tensor
    """Which sequence of the chunk owns the row."""


LOWEST_BOUND = 1e-30
"""A lower bound that is below every weight and above 0 in float32."""


def token_pass(config: RolloutCorrectionConfig, chunk: Chunk) -> TokenPass:
    """Weights, verdicts and row sums of one chunk in torch operations, on any device.

    Raises:
        ValueError: if a token is not finite under the "raise" policy.
    """
    tokens = log_ratios(chunk, config.nonfinite_policy)
    bounded = bounded_log_ratio(tokens.log_ratio_RK, out=tokens.scratch_RK)
    raw = None
    if config.has_token_weights:
        raw = _raw_weight(config, tokens, chunk, bounded)
    # expm1, not exp − 1, has full relative accuracy for any small Δ. It is summed here, because
    # the next user of the scratch buffer overwrites it.
    ratio_minus_1 = bounded.expm1_()
    ratio_minus_1_R = ratio_minus_1.sum(-1)
    ratio_minus_1_squared_R = _sum_of_squares(ratio_minus_1)
    weight = tokens.valid_RK
    extremes = None
    weight_sums = None
    if raw is not None:
        weight, extremes, weight_sums = _weigh(config, tokens, chunk, raw)
        # Its memory is reused for the next temporary.
        del raw
    rs_accepted, criteria = _apply_criteria(config.rejections, tokens, chunk)
    accepted = rs_accepted
    if config.has_token_weights and config.mode.rejects:
        accepted = rs_accepted * indicator(torch.gt, weight, 0.0)
    masked_in_R = tokens.masked_in_RK.sum(-1)
    valid_R = tokens.valid_R
    if not config.touches_loss:
        # Only metrics: the loss keeps all tokens, also non-finite ones.
        weight = tokens.masked_in_RK
        accepted = tokens.masked_in_RK
    rs_accepted_R = _row_sum(rs_accepted, tokens.valid_RK, valid_R)
    accepted_R = _row_sum(accepted, rs_accepted, rs_accepted_R)
    if tokens.nonfinite_RK is None:
        nonfinite_R = masked_in_R - valid_R
    else:
        nonfinite_R = tokens.nonfinite_RK.sum(-1)
    clamped_k3_R = None
    if config.adaptive:
        clamped_k3_R = clamped_k3_of(tokens.log_ratio_RK).sum(-1)
    abs_log_ratio_R = torch.abs(tokens.log_ratio_RK, out=tokens.scratch_RK).sum(-1)
    catastrophic_R = None
    if config.vetoes:
        catastrophic_R = catastrophic_tokens(config, tokens).sum(-1)
    squares = None
    trimmed_R = None
    if config.rs_second_moment_bound is not None:
        squares = torch.where(tokens.valid_RK > 0, tokens.log_ratio_RK.square(), torch.inf)
        # `trim` fills the column in, when the limit of the global batch is known.
        trimmed_R = torch.zeros_like(valid_R)
    advantage_R = None
    if config.signs_bounds:
        advantage_R = _advantage_sums(chunk, tokens)
    sums_R = SequenceSums(
        masked_in=masked_in_R,
        valid=valid_R,
        nonfinite=nonfinite_R,
        train=tokens.train_R,
        log_ratio=tokens.log_ratio_RK.sum(-1),
        abs_log_ratio=abs_log_ratio_R,
        ratio_minus_1=ratio_minus_1_R,
        ratio_minus_1_squared=ratio_minus_1_squared_R,
        rs_accepted=rs_accepted_R,
        accepted=accepted_R,
        weights=weight_sums,
        criteria=criteria,
        clamped_k3=clamped_k3_R,
        catastrophic=catastrophic_R,
        trimmed=trimmed_R,
        advantage=advantage_R,
    )
    table_R = stacked(sums_R).to(torch.float64)
    table_S = table_R.new_zeros(chunk.sequences, table_R.shape[1])
    return TokenPass(
        weight_RK=weight,
        accepted_RK=accepted.bool(),
        squares_RK=squares,
        table_S=table_S.index_add_(0, chunk.sequence_R, table_R),
        extremes=extremes,
        sequence_R=chunk.sequence_R,
    )


def _row_sum(x_RK: Tensor, known_RK: Tensor, known_R: Tensor) -> Tensor:
    """Σ x per row; the known sum if x is the tensor that was summed before."""
    # The same object tells that no criterion and no mode rejected.
    if x_RK is known_RK:
        return known_R
    return x_RK.sum(-1)


def _advantage_sums(chunk: Chunk, tokens: Tokens) -> Tensor:
    """Σ A per row over valid tokens, whose sign selects the bounds of a sequence's weight."""
    assert chunk.advantage_RK is not None
    advantage_RK = torch.where(tokens.valid_RK > 0, chunk.advantage_RK, 0.0)
    return advantage_RK.nan_to_num(0.0).sum(-1)


def trim(config: RolloutCorrectionConfig, part: TokenPass, limit: Tensor) -> TokenPass:
    """The pass without the tokens whose Δ² is at or above `rejection.second_moment_limit`."""
    assert part.squares_RK is not None, "called without a second-moment bound"
    # A limit of +inf drops nothing, and invalid tokens are +inf, too.
    beyond_RK = (part.squares_RK >= limit.to(part.squares_RK)) & part.squares_RK.isfinite()
    accepted_RK = part.accepted_RK & ~beyond_RK
    table_S = part.table_S.clone()
    columns = sequence_columns(config)
    assert columns.trimmed is not None
    # Columns are views, so the sums are written into the table.
    accepted_S = table_S[:, columns.accepted]
    accepted_R = accepted_RK.sum(-1, dtype=torch.float64)
    accepted_S.zero_().index_add_(0, part.sequence_R, accepted_R)
    trimmed_S = table_S[:, columns.trimmed]
    trimmed_R = beyond_RK.sum(-1, dtype=torch.float64)
    trimmed_S.zero_().index_add_(0, part.sequence_R, trimmed_R)
    return replace(part, accepted_RK=accepted_RK, table_S=table_S)


def _apply_criteria(
    criteria: tuple[Criterion, ...], tokens: Tokens, chunk: Chunk
) -> tuple[Tensor, dict[str, Tensor]]:
    """1.0 at valid tokens that all per-token criteria accept, and the row sums of the criteria."""
    accepted_RK = tokens.valid_RK
    sums = {}
    for criterion in criteria:
        if criterion.uses_log_ratio:
            # The sequence pass decides from Σ Δ.
            continue
        statistic = token_statistic(criterion, tokens, chunk)
        if criterion.sums_divergence:
            sums[criterion.name] = statistic.sum(-1)
            continue
        within = accepted(criterion, statistic).to(tokens.valid_RK.dtype).mul_(tokens.valid_RK)
        sums[criterion.name] = tokens.valid_R - within.sum(-1)
        if criterion.per_token:
            # The first criterion needs no product, since `within` is 0 at invalid tokens.
            if accepted_RK is tokens.valid_RK:
                accepted_RK = within
            else:
                accepted_RK = accepted_RK * within
    return accepted_RK, sums


def _raw_weight(
    config: RolloutCorrectionConfig, tokens: Tokens, chunk: Chunk, bounded: Tensor
) -> Tensor:
    """Weight of every token before the mode; not masked.

    Args:
        config: The options.
        tokens: The tokens.
        chunk: Their chunk.
        bounded: `bounded_log_ratio` of the tokens.
    """
    aggregation = LEVELS[config.tis_level].aggregation
    if aggregation == "token":
        # As `safe_exp`, whose clamp would be a second pass over the block.
        return bounded.exp()
    return safe_exp(TOKEN_LEVELS[aggregation](tokens, chunk))


def _weigh(
    config: RolloutCorrectionConfig, tokens: Tokens, chunk: Chunk, raw: Tensor
) -> tuple[Tensor, Tensor, WeightSums[Tensor]]:
    """Weight of every token, the extremes as in `TokenPass`, and row sums; overwrites `raw`."""
    valid = tokens.valid_RK
    scratch = tokens.scratch_RK
    # Invalid tokens have x/0 = +inf, and so do not count in the minimum.
    lowest = torch.div(raw, valid, out=scratch).amin()
    raw.mul_(valid)
    lower, upper = weight_bounds(config, chunk.advantage_RK)
    weight = config.mode.bound(raw, lower, upper)
    if config.mode.has_lower_bound and not config.mode.rejects:
        # The lower bound would also raise invalid tokens from 0.
        weight.mul_(valid)
    highest = raw.amax()
    largest_weight = highest
    if config.mode.rejects or config.signs_bounds:
        largest_weight = weight.amax()
    extremes = [lowest, highest, largest_weight]
    if config.signs_bounds:
        extremes.append(torch.where(valid > 0, weight, torch.inf).amin())
    invalid_R = valid.shape[-1] - tokens.valid_R  # their ratio of 0 is below any bound
    high_R = indicator(torch.gt, raw, upper, scratch).sum(-1)
    # Above 0, so that exactly the invalid tokens are below it, too.
    if isinstance(lower, Tensor):
        lower = lower.clamp_min(LOWEST_BOUND)
    else:
        lower = max(lower, LOWEST_BOUND)
    low_R = indicator(torch.lt, raw, lower, scratch).sum(-1).sub_(invalid_R)
    # `scratch` is overwritten below, so each sum is taken before the next difference
    minus_1 = torch.sub(weight, valid, out=scratch)
    minus_1_R = minus_1.sum(-1)
    minus_1_squared_R = _sum_of_squares(minus_1)
    before_minus_1_R = None
    if config.tis_level != "token":
        before_minus_1_R = torch.sub(raw, valid, out=scratch).sum(-1)
    sums_R = WeightSums(
        before=raw.sum(-1),
        before_minus_1=before_minus_1_R,
        total=weight.sum(-1),
        total_squared=_sum_of_squares(weight),
        minus_1=minus_1_R,
        minus_1_squared=minus_1_squared_R,
        high=high_R,
        low=low_R,
    )
    return weight, torch.stack(extremes), sums_R


def _sum_of_squares(x_RK: Tensor) -> Tensor:
    """Σ x² per row; the norm needs no temporary of the size of x."""
    norm_R: Tensor = torch.linalg.vector_norm(x_RK, dim=-1)
    return norm_R.square_()
