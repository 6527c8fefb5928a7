"""The one pass over the tokens of a chunk: weight, verdict, and the row sums of everything that is measured.

`token_pass` reads a chunk once and returns two blocks and a table; all that follows works on that
table, one row per sequence.

Shapes: suffix _RK is [rows, row width], _R per row, _S per sequence.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.layout import Chunk, PackedChunk
from slime_tis.correction.modes import LEVELS, Criterion
from slime_tis.correction.ratio import (
    TOKEN_LEVELS,
    Tokens,
    indicator,
    log_ratios,
    safe_exp,
    safe_expm1,
    weight_bounds,
)
from slime_tis.correction.rejection import (
    accepted,
    catastrophic_tokens,
    clamped_k3_of,
    token_statistic,
)
from slime_tis.correction.sums import SequenceSums, WeightSums, named, sequence_columns, stacked


@dataclass(frozen=True)
class TokenPass:
    """The result of one pass over a chunk."""

    weight_RK: Tensor
    """Bounded weight of the token, 0 at invalid tokens; 1 at valid ones where the level is
    sequence-wide."""
    accepted_RK: Tensor
    """bool, True at valid tokens that no per-token criterion rejects."""
    squares_RK: Tensor | None
    """Δ² at valid tokens and +inf elsewhere, for second-moment trimming alone."""
    table_S: Tensor
    """`SequenceSums` of the chunk's sequences as columns, float64."""
    extremes: Tensor | None
    """[3]: smallest and largest weight of the chunk's valid tokens before the mode, and largest
    inside the bounds in mask mode (in other modes, before the mode too); +inf and 0 without valid
    tokens. None without token weights. [4] where the bounds depend on the advantage: the largest
    and the smallest weight after the mode."""
    sequence_R: Tensor
    """Which sequence of the chunk owns the row."""


LOWEST_BOUND = 1e-30
"""A lower bound that is below every weight and above 0 in float32."""


def token_pass(config: RolloutCorrectionConfig, packed: PackedChunk) -> TokenPass:
    """Weights, verdicts and row sums of one chunk in torch operations, on any device.

    Raises:
        ValueError: if a token is not finite under the "raise" policy.
    """
    chunk = packed.blocks()
    tokens = log_ratios(chunk, config.nonfinite_policy)
    weight, extremes, weight_sums = tokens.valid_RK, None, None
    if config.has_token_weights:
        weight, extremes, weight_sums = _weigh(config, tokens, chunk)
    ratio_minus_1 = safe_expm1(tokens.log_ratio_RK)
    rs_accepted, criteria = _apply_criteria(config.rejections, tokens, chunk)
    accepted = rs_accepted
    if config.has_token_weights and config.mode.rejects:
        accepted = rs_accepted * indicator(torch.gt, weight, 0.0)
    masked_in_R, valid_R = tokens.masked_in_RK.sum(-1), tokens.valid_R
    rs_accepted_R = valid_R if rs_accepted is tokens.valid_RK else rs_accepted.sum(-1)
    if not config.touches_loss:
        weight = accepted = tokens.masked_in_RK
    trims = config.rs_second_moment_bound is not None
    advantage_R = None
    if config.signs_bounds:
        assert chunk.advantage_RK is not None
        advantage_R = (
            torch.where(tokens.valid_RK > 0, chunk.advantage_RK, 0.0).nan_to_num(0.0).sum(-1)
        )
    sums_R = SequenceSums(
        masked_in=masked_in_R,
        valid=valid_R,
        nonfinite=(
            masked_in_R - valid_R if tokens.nonfinite_RK is None else tokens.nonfinite_RK.sum(-1)
        ),
        train=tokens.train_R,
        log_ratio=tokens.log_ratio_RK.sum(-1),
        abs_log_ratio=torch.abs(tokens.log_ratio_RK, out=tokens.scratch_RK).sum(-1),
        ratio_minus_1=ratio_minus_1.sum(-1),
        ratio_minus_1_squared=_sum_of_squares(ratio_minus_1),
        rs_accepted=rs_accepted_R,
        accepted=rs_accepted_R if accepted is rs_accepted else accepted.sum(-1),
        weights=weight_sums,
        criteria=criteria,
        clamped_k3=clamped_k3_of(tokens.log_ratio_RK).sum(-1) if config.adaptive else None,
        catastrophic=catastrophic_tokens(config, tokens).sum(-1) if config.vetoes else None,
        trimmed=torch.zeros_like(valid_R) if trims else None,
        advantage=advantage_R,
    )
    table_R = stacked(sums_R).to(torch.float64)
    table_S = torch.zeros(
        packed.rows.end_S.numel(), table_R.shape[1], dtype=torch.float64, device=table_R.device
    )
    return TokenPass(
        weight_RK=weight,
        accepted_RK=accepted.bool(),
        squares_RK=(
            torch.where(tokens.valid_RK > 0, tokens.log_ratio_RK.square(), torch.inf)
            if trims
            else None
        ),
        table_S=table_S.index_add_(0, chunk.sequence_R, table_R),
        extremes=extremes,
        sequence_R=chunk.sequence_R,
    )


def trim(config: RolloutCorrectionConfig, part: TokenPass, limit: Tensor) -> TokenPass:
    """The pass without the tokens whose Δ² is at or above the limit, as `rules.second_moment_limit` has it."""
    assert part.squares_RK is not None, "called without a second-moment bound"
    beyond_RK = (part.squares_RK >= limit.to(part.squares_RK)) & part.squares_RK.isfinite()
    accepted_RK = part.accepted_RK & ~beyond_RK
    table_S = part.table_S.clone()
    sums_S: SequenceSums[Tensor] = named(sequence_columns(config), table_S.unbind(1))
    assert sums_S.trimmed is not None
    for sum_S, block_RK in ((sums_S.accepted, accepted_RK), (sums_S.trimmed, beyond_RK)):
        sum_S.zero_().index_add_(0, part.sequence_R, block_RK.sum(-1, dtype=torch.float64))
    return replace(part, accepted_RK=accepted_RK, table_S=table_S)


def _apply_criteria(
    criteria: tuple[Criterion, ...], tokens: Tokens, chunk: Chunk
) -> tuple[Tensor, dict[str, Tensor]]:
    """1.0 at valid tokens that all per-token criteria accept, and the row sums of the criteria."""
    accepted_RK, sums = tokens.valid_RK, {}
    for criterion in criteria:
        if criterion.uses_log_ratio:
            continue
        statistic = token_statistic(criterion, tokens, chunk)
        if criterion.sums_divergence:
            sums[criterion.name] = statistic.sum(-1)
            continue
        within = accepted(criterion, statistic).to(tokens.valid_RK.dtype).mul_(tokens.valid_RK)
        sums[criterion.name] = tokens.valid_R - within.sum(-1)
        if criterion.per_token:
            accepted_RK = within if accepted_RK is tokens.valid_RK else accepted_RK * within
    return accepted_RK, sums


def _weigh(
    config: RolloutCorrectionConfig, tokens: Tokens, chunk: Chunk
) -> tuple[Tensor, Tensor, WeightSums[Tensor]]:
    """Weight of every token, the extremes, and row sums."""
    valid, scratch = tokens.valid_RK, tokens.scratch_RK
    raw = safe_exp(TOKEN_LEVELS[LEVELS[config.tis_level].aggregation](tokens, chunk))
    lowest = torch.div(raw, valid, out=scratch).amin()  # x/0 is +inf: no minimum
    raw.mul_(valid)
    lower, upper = weight_bounds(config, chunk.advantage_RK)
    weight = config.mode.bound(raw, lower, upper)
    if (
        config.mode.has_lower_bound and not config.mode.rejects
    ):  # it raises the 0 of invalid tokens, too
        weight.mul_(valid)
    highest = raw.amax()
    extremes = [
        lowest,
        highest,
        weight.amax() if config.mode.rejects or config.signs_bounds else highest,
    ]
    if config.signs_bounds:
        extremes.append(torch.where(valid > 0, weight, torch.inf).amin())
    invalid_R = valid.shape[-1] - tokens.valid_R  # their ratio of 0 is below any bound
    high_R = indicator(torch.gt, raw, upper, scratch).sum(-1)
    lower = lower.clamp_min(LOWEST_BOUND) if isinstance(lower, Tensor) else max(lower, LOWEST_BOUND)
    low_R = indicator(torch.lt, raw, lower, scratch).sum(-1).sub_(invalid_R)
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
    norm_R: Tensor = torch.linalg.vector_norm(x_RK, dim=-1)
    return norm_R.square_()
