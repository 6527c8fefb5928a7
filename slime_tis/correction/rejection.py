"""Rejection of tokens and sequences: criteria, veto, adaptive bounds, second-moment trimming.

Shapes: suffix _RK is [rows, row width] of a `Chunk`, _S per sequence, _N per value of this rank.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.context_parallel import ONE_RANK, Ranks
from slime_tis.correction.divergence import BINARY_DIVERGENCES
from slime_tis.correction.layout import Chunk
from slime_tis.correction.modes import Criterion
from slime_tis.correction.ratio import (
    LOG_RATIO_BOUND,
    TOKEN_LEVELS,
    Tokens,
    indicator,
    is_log_prob,
    sequence_log_weights,
)
from slime_tis.correction.sums import SequenceSums

K3_RANGE = 1.0
"""k3 is measured with Δ clamped to ±1 (ratios of 1/e to e), which covers healthy tokens even in
fp8. Outliers must not widen the bounds that should reject them: a token of +20 nats would raise the
plain mean by e^20/N, with the clamp by 0.7/N."""
LOG_PROB_TOLERANCE = 5e-5
"""A mean log-ratio up to this, in nats per token, never rejects. Float32 log-probs of large
vocabularies differ by 1e-5 to 2e-5, always with the same sign. Over thousands of otherwise equal
tokens that would be many standard deviations, because the deviation is nearly 0."""
SMALLEST_K3 = 1e-12
"""Smallest k3 as a divisor, for engines that agree exactly; the tolerance above makes their z 0."""
LARGEST_Z_SCORE = 1e18
"""Largest z-score bound. No sequence reaches it, not even with 1e6 nats per token and a k3 of
1e-12; larger bounds would overflow sums."""
SCORE_TOLERANCE = 1e-5
"""Scores with a relative difference up to this are equal: another cut into micro-batches rounds
sums differently."""
DIGIT_BITS = 9
"""Bits of the result that one round of the search finds: seven rounds for the 63 of a float64
without sign."""
INFINITY_BITS = 0x7FF0 << 48
"""+inf as an integer; larger integers are not numbers."""


def k3_divergence(tokens: Tokens, chunk: Chunk) -> Tensor:
    """exp(Δ) − Δ − 1, with Δ at most 20."""
    bounded = tokens.log_ratio_RK.clamp(max=LOG_RATIO_BOUND)
    return torch.expm1(bounded).sub_(bounded)


def absolute_error(tokens: Tokens, chunk: Chunk) -> Tensor:
    """exp(|Δ|), with |Δ| at most 20."""
    error = tokens.log_ratio_RK.abs().clamp_(max=LOG_RATIO_BOUND).exp_()
    # Invalid tokens have Δ = 0, and exp(0) is 1.
    return error.mul_(tokens.valid_RK)


DIVERGENCES: dict[str, Callable[[Tokens, Chunk], Tensor]] = {
    "k1": TOKEN_LEVELS["token"],
    "k2": lambda tokens, chunk: tokens.log_ratio_RK.square().mul_(0.5),
    "k3": k3_divergence,
    "error": absolute_error,
}
"""Per-token divergences by their names in `modes.CRITERIA`; 0 at invalid tokens.

Source: "Approximating KL Divergence", Schulman 2020 (http://joschu.net/blog/kl-approx.html).
error = exp(|Δ|) is NeMo-RL's, nemo_rl/algorithms/grpo.py, seq_logprob_error_threshold.
"""


def divergence_statistic(criterion: Criterion, tokens: Tokens, chunk: Chunk) -> Tensor:
    """D_t of the divergence mask, float64; 0 if the token is invalid or a log-prob is not finite.

    With direction away, D_t is 0 unless the advantage pushes the policy further away. At negative
    advantages D_t is scaled, so that the bound of positive advantages applies to both.
    """
    current_RK = chunk.current_RK
    if current_RK is None:
        current_RK = chunk.train_RK
    anchor_RK = chunk.train_RK
    if criterion.anchor == "rollout":
        anchor_RK = chunk.rollout_RK
    counts_RK = (tokens.valid_RK > 0) & is_log_prob(current_RK) & is_log_prob(anchor_RK)
    log_p = torch.where(counts_RK, current_RK, 0.0)
    log_q = torch.where(counts_RK, anchor_RK, 0.0)
    divergence_RK = BINARY_DIVERGENCES[criterion.divergence](log_p, log_q)
    if criterion.bound_negative is None:
        return divergence_RK
    assert chunk.advantage_RK is not None
    scale_RK = torch.where(chunk.advantage_RK < 0, criterion.upper / criterion.bound_negative, 1.0)
    # A > 0 raises π and A < 0 lowers it: with the sign of log π/μ it moves away from μ
    moves_away_RK = chunk.advantage_RK * (log_p - log_q) > 0
    return torch.where(moves_away_RK, divergence_RK * scale_RK, 0.0)


def token_statistic(criterion: Criterion, tokens: Tokens, chunk: Chunk) -> Tensor:
    """The bounded value per token: L_t at the criterion's level for k1, else the divergence."""
    if criterion.anchor is not None:
        return divergence_statistic(criterion, tokens, chunk)
    if criterion.divergence == "k1" and criterion.per_token:
        return TOKEN_LEVELS[criterion.aggregation](tokens, chunk)
    return DIVERGENCES[criterion.divergence](tokens, chunk)


def accepted(criterion: Criterion, statistic: Tensor) -> Tensor:
    """1.0 if a statistic is within the criterion's bounds (log-bounds for k1), else 0.0."""
    if criterion.lower is None:
        return indicator(torch.le, statistic, criterion.upper)
    log_lower, log_upper = criterion.log_bounds
    within = indicator(torch.le, statistic, log_upper)
    # A lower bound of 0 is none.
    if criterion.lower:
        within.mul_(indicator(torch.ge, statistic, log_lower))
    return within


def catastrophic_tokens(config: RolloutCorrectionConfig, tokens: Tokens) -> Tensor:
    """1.0 at tokens whose unclamped ratio is below the veto threshold or above the upper one."""
    catastrophic = None
    if config.rs_veto_threshold is not None:
        log_lower = math.log(config.rs_veto_threshold)
        catastrophic = indicator(torch.lt, tokens.log_ratio_RK, log_lower, tokens.scratch_RK)
    if config.rs_veto_upper_threshold is not None:
        log_upper = math.log(config.rs_veto_upper_threshold)
        # Not into the scratch buffer, which may have the result of the lower threshold.
        above = indicator(torch.gt, tokens.log_ratio_RK, log_upper)
        if catastrophic is not None:
            above.add_(catastrophic)
        catastrophic = above
    assert catastrophic is not None, "called without a veto"
    return catastrophic


def sequence_accepted(
    criterion: Criterion, sums_S: SequenceSums[Tensor], bounds: "AdaptiveBounds | None" = None
) -> Tensor:
    """1.0 for each sequence that a sequence-wide criterion accepts; empty sequences are accepted.

    A maximum is compared by counting tokens out of bounds, which context-parallel ranks can sum.
    """
    if criterion.adaptive:
        assert bounds is not None, "called without the bounds of the global batch"
        return bounds.accepted(sums_S)
    if criterion.aggregation == "max":
        return indicator(torch.eq, sums_S.criteria[criterion.name], 0.0)
    if criterion.uses_log_ratio:
        total = sums_S.log_ratio
    else:
        total = sums_S.criteria[criterion.name]
    statistic = sequence_log_weights(criterion.aggregation, total, sums_S.valid)
    return torch.where(sums_S.valid > 0, accepted(criterion, statistic), 1.0)


@dataclass(frozen=True)
class AdaptiveBounds:
    """Rejection bounds for the sequences of a global batch; float64 scalars, equal on all ranks.

    They adapt to the length of a sequence and the noise of the batch. Under π_rollout, Δ_t has mean
    −KL_t and variance about 2·KL_t. Σ_t (Δ_t + KL_t) is a martingale, so variances add up. With k3
    as the KL of an average token, a sequence of n tokens has

        Σ_t Δ_t ≈ −k3·n ± √(2·k3·n),        mean_t Δ_t ≈ −k3 ± √(2·k3/n)

    and the bound is on its number of standard deviations, z = |Σ_t Δ_t + k3·n| / √(2·k3·n). A fixed
    bound cannot do that: if it is wide at 3,000 tokens, it is narrow at 12. Sum (sequence level)
    and mean (geometric level) have the same z. studies/rejection_bounds/README.md has the
    simulation.
    """

    k3: Tensor
    """Noise in nats per token: mean over tokens of exp(Δ) − 1 − Δ with Δ clamped to ±`K3_RANGE`."""
    z_score: Tensor
    """Deviations from −k3·n that a sequence may have: `rs_z_score`, or computed from
    `rs_target_fraction`."""
    median_length: Tensor
    """Valid tokens of the median sequence, at which the bounds are reported."""

    def accepted(self, sums_S: SequenceSums[Tensor]) -> Tensor:
        """1.0 for each sequence within the bounds; empty sequences are accepted."""
        scores_S = _z_scores(sums_S.valid, sums_S.log_ratio, self.k3)
        return (scores_S <= self.z_score).to(torch.float64)

    def log_bounds(self, level: str) -> tuple[Tensor, Tensor]:
        """Logarithms of the lower and upper bound on the ratio of a sequence of median length.

        Args:
            level: "geometric" for the bounds of exp(mean Δ), "sequence" for bounds of exp(Σ Δ).
        """
        n = self.median_length
        half = self.z_score * (2 * self.k3 / n.clamp_min(1)).sqrt() + LOG_PROB_TOLERANCE
        scale = torch.ones_like(n)
        if level == "sequence":
            scale = n
        return scale * (-self.k3 - half), scale * (-self.k3 + half)


def adaptive_bounds(
    config: RolloutCorrectionConfig, tables: Sequence[SequenceSums[Tensor]], ranks: Ranks = ONE_RANK
) -> AdaptiveBounds:
    """The bounds of a global batch, from the micro-batches' tables.

    Args:
        config: The options, with `rs_z_score` or `rs_target_fraction`.
        tables: `Correction.sequence_sums` of this rank's micro-batches, under the same config.
        ranks: The ranks that share the batch. Data-parallel ranks sum small tables.

    Returns:
        The bounds for the `GlobalBatch` of all micro-batches. There is no host synchronisation.

    Raises:
        ValueError: if the config has neither option, or there is no table.
    """
    if not config.adaptive:
        raise ValueError(
            "adaptive bounds need --rs-z-score or --rs-target-fraction; set one of them in the"
            " config."
        )
    if not tables:
        raise ValueError(
            "adaptive_bounds got no table; pass Correction.sequence_sums of each micro-batch."
        )
    n = torch.cat([table.valid for table in tables])
    log_ratio = torch.cat([table.log_ratio for table in tables])
    clamped_k3 = torch.cat([table.clamped_k3 for table in tables if table.clamped_k3 is not None])
    # The tables already are sums over complete sequences.
    ranks = replace(ranks, context=None)
    totals = ranks.over_data(torch.stack([(n > 0).sum(), n.sum(), clamped_k3.sum()]))
    nonempty, tokens, total_k3 = totals.unbind()
    k3 = total_k3 / tokens.clamp_min(1)
    median_index = (nonempty - 1).div(2).floor()
    median_length = order_statistic(_where_positive(n, n), median_index, ranks)
    if config.rs_z_score is not None:
        z_score = torch.full_like(k3, min(config.rs_z_score, LARGEST_Z_SCORE))
    else:
        assert config.rs_target_fraction is not None
        # 0.29 · 100 is 28.999999999999996 in float64
        rejected = (config.rs_target_fraction * nonempty + 1e-9).floor()
        scores = _where_positive(n, _z_scores(n, log_ratio, k3))
        z_score = order_statistic(scores, nonempty - 1 - rejected, ranks) * (1 + SCORE_TOLERANCE)
    return AdaptiveBounds(k3, z_score, median_length)


def clamped_k3_of(log_ratio: Tensor) -> Tensor:
    """exp(Δ) − 1 − Δ of Δ clamped to ±`K3_RANGE`, in float64."""
    # float32 would keep only three digits at Δ = 1e-4.
    clamped = log_ratio.to(torch.float64).clamp(-K3_RANGE, K3_RANGE)
    return torch.expm1(clamped).sub_(clamped)


def _z_scores(n_S: Tensor, log_ratio_S: Tensor, k3: Tensor) -> Tensor:
    """z = max(|Σ_t Δ_t + k3·n| − tolerance·n, 0)/√(2·k3·n) per sequence; 0 without valid tokens."""
    beyond_S = (log_ratio_S + k3 * n_S).abs() - LOG_PROB_TOLERANCE * n_S
    deviation_S = (2 * k3.clamp_min(SMALLEST_K3) * n_S.clamp_min(1)).sqrt()
    return beyond_S.clamp_min(0) / deviation_S


def _where_positive(x_S: Tensor, values_S: Tensor) -> Tensor:
    """The values where x > 0, else +inf, which order statistics ignore."""
    return torch.where(x_S > 0, values_S, math.inf)


def second_moment_limit(squares_N: Tensor, bound: float, ranks: Ranks = ONE_RANK) -> Tensor:
    """The smallest Δ² to drop, +inf if there is none.

    limit = min {v : mean(Δ² ≤ v) > bound}. With Δ² in ascending order, the mean of the first m
    values grows with m. The first value that raises it above the bound is dropped, and all larger
    values. Ties are dropped as well, so the order of tokens does not matter.

    Source: "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?"
    (https://arxiv.org/abs/2510.01161), section 4.

    Args:
        squares_N: Δ² of this rank's valid tokens; +inf or NaN at others, which do not count.
        bound: Bound on the mean Δ² of the remaining tokens, in nats².
        ranks: The ranks that share the batch. They sum a float64 [512, 2] table in seven rounds,
            whatever the data are. Tokens are not gathered.

    Returns:
        float64 scalar, the same on all ranks. There is no host synchronisation.
    """
    squares_N = squares_N.nan_to_num(torch.inf, torch.inf)
    ordered = squares_N.sort().values.to(torch.float64)
    if not ranks.is_one:

        def is_within_bound(count: Tensor, total: Tensor) -> Tensor:
            return total / count.clamp_min(1) <= bound

        # The limit is the largest v for which the values below v still are within the bound.
        return largest_value(ordered, ordered, is_within_bound, ranks)
    counts = torch.arange(1, ordered.numel() + 1, dtype=torch.float64, device=ordered.device)
    # Means of ascending values ascend, so this counts the leading ones within the bound.
    within = (ordered.cumsum(0) / counts <= bound).sum()
    # The value after the last one, if all are within the bound.
    beyond = torch.cat([ordered, ordered.new_full((1,), torch.inf)])
    return beyond.index_select(0, within.reshape(1))[0]


def order_statistic(values_N: Tensor, index: Tensor, ranks: Ranks = ONE_RANK) -> Tensor:
    """The value at `index` of all ranks' values in ascending order.

    Args:
        values_N: This rank's values, not negative; +inf and NaN are ignored.
        index: Scalar, counted from 0.
        ranks: The ranks that share the values. Each round sums a float64 [512, 2] table.

    Returns:
        float64 scalar, the same on all ranks: +inf after the last value, 0 before the first. There
        is no host synchronisation.
    """
    ordered = values_N.to(torch.float64).nan_to_num(torch.inf, torch.inf).sort().values
    return largest_value(ordered, torch.zeros_like(ordered), lambda count, _: count <= index, ranks)


def largest_value(
    ordered_N: Tensor, terms_N: Tensor, holds: Callable[[Tensor, Tensor], Tensor], ranks: Ranks
) -> Tensor:
    """The largest v for which the values below v satisfy `holds(count, total)`; +inf if all do.

    Non-negative floats are ordered like their bits, so v is found from its highest bits down,
    `DIGIT_BITS` per round. Each round tries all 512 values of the next bits. For each candidate,
    the ranks sum the number and the terms of smaller values.

    Args:
        ordered_N: This rank's values, float64, not negative, ascending.
        terms_N: What each value adds to the total, float64.
        holds: From count and total below each of 512 candidates to bool [512]. If it is false for
            one candidate, it must be false for all larger ones.
        ranks: The ranks that share the values.
    """
    total = torch.cat([terms_N.new_zeros(1), terms_N.cumsum(0)])
    digits = torch.arange(1 << DIGIT_BITS, device=ordered_N.device)
    bits = digits[:1]
    for shift in range(63 - DIGIT_BITS, -1, -DIGIT_BITS):
        candidates = (bits + (digits << shift)).clamp_max(INFINITY_BITS)
        counts = torch.searchsorted(ordered_N, candidates.view(torch.float64))
        table = torch.stack([counts.to(torch.float64), total.index_select(0, counts)], 1)
        table = ranks.all_reduce(table)
        below = holds(table[:, 0], table[:, 1])
        # Candidate 0 held in the previous round, up to rounding across ranks.
        last = below.sum().sub(1).clamp_min(0)
        bits = candidates.index_select(0, last.reshape(1))
    return bits.view(torch.float64)[0]
