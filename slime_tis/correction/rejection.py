"""Which tokens and sequences leave the loss: rejection criteria, the veto, adaptive bounds, second-moment trimming.

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
"""k3 is measured with Δ clamped to ±1, ratios of 1/e to e, where healthy tokens lie down to fp8.
Rejected tokens must not widen the bounds: a token of +20 nats would raise the plain mean by e^20/N,
now by 0.7/N."""
LOG_PROB_TOLERANCE = 5e-5
"""Mean log-ratio, in nats per token, that is never a reason to reject: float32 log-probs of large
vocabularies differ by 1e-5 to 2e-5 with one sign, which over thousands of otherwise equal tokens is
many deviations of nothing."""
SMALLEST_K3 = 1e-12
"""Divisor where two engines agree exactly; their deviations are 0 by the tolerance above."""
LARGEST_Z_SCORE = 1e18
"""No sequence comes near, with 1e6 nats per token and a k3 of 1e-12 neither; a larger bound would
overflow sums."""
SCORE_TOLERANCE = 1e-5
"""Scores this close, relatively, are equal: a sum is rounded differently where micro-batches are
cut differently."""
DIGIT_BITS = 9
"""Bits of the result that one round of the search finds: seven rounds for the 63 of a float64
without sign."""
INFINITY_BITS = 0x7FF0 << 48
"""+inf as an integer; larger integers are not numbers."""


def k3_divergence(tokens: Tokens, chunk: Chunk) -> Tensor:
    """exp(Δ) − Δ − 1, with Δ at most 20."""
    bounded = tokens.log_ratio_RK.clamp(max=LOG_RATIO_BOUND)
    return torch.expm1(bounded).sub_(bounded)


DIVERGENCES: dict[str, Callable[[Tokens, Chunk], Tensor]] = {
    "k1": TOKEN_LEVELS["token"],
    "k2": lambda tokens, chunk: tokens.log_ratio_RK.square().mul_(0.5),
    "k3": k3_divergence,
    "error": (
        lambda tokens, chunk: (
            tokens.log_ratio_RK.abs().clamp_(max=LOG_RATIO_BOUND).exp_().mul_(tokens.valid_RK)
        )
    ),
}
"""The divergence of each token by the name that `modes.CRITERIA` has for it, 0 where the token is
not valid.

Source: "Approximating KL Divergence", Schulman 2020 (http://joschu.net/blog/kl-approx.html). error
    = exp(|Δ|): NeMo-RL,
nemo_rl/algorithms/grpo.py, seq_logprob_error_threshold.
"""


def divergence_statistic(criterion: Criterion, tokens: Tokens, chunk: Chunk) -> Tensor:
    """D_t of the divergence mask, float64; 0 where the token is not valid or a log-prob is not finite.

    With direction away D_t is 0 where the advantage does not push the policy further away, and at
    negative advantages it is scaled to the bound of positive ones.
    """
    current_RK = chunk.train_RK if chunk.current_RK is None else chunk.current_RK
    anchor_RK = chunk.rollout_RK if criterion.anchor == "rollout" else chunk.train_RK
    counts_RK = (tokens.valid_RK > 0) & is_log_prob(current_RK) & is_log_prob(anchor_RK)
    log_p, log_q = (torch.where(counts_RK, values_RK, 0.0) for values_RK in (current_RK, anchor_RK))
    divergence_RK = BINARY_DIVERGENCES[criterion.divergence](log_p, log_q)
    if criterion.bound_negative is None:
        return divergence_RK
    assert chunk.advantage_RK is not None
    scale_RK = torch.where(chunk.advantage_RK < 0, criterion.upper / criterion.bound_negative, 1.0)
    return torch.where(chunk.advantage_RK * (log_p - log_q) > 0, divergence_RK * scale_RK, 0.0)


def token_statistic(criterion: Criterion, tokens: Tokens, chunk: Chunk) -> Tensor:
    """The per-token quantity of a criterion: L_t at the level for k1, else the divergence of the token."""
    if criterion.anchor is not None:
        return divergence_statistic(criterion, tokens, chunk)
    if criterion.divergence == "k1" and criterion.per_token:
        return TOKEN_LEVELS[criterion.aggregation](tokens, chunk)
    return DIVERGENCES[criterion.divergence](tokens, chunk)


def accepted(criterion: Criterion, statistic: Tensor) -> Tensor:
    """1.0 where a statistic (of any shape) lies within the bounds of the criterion, which for k1 are logarithms."""
    if criterion.lower is None:
        return indicator(torch.le, statistic, criterion.upper)
    log_lower, log_upper = criterion.log_bounds
    within = indicator(torch.le, statistic, log_upper)
    return within.mul_(indicator(torch.ge, statistic, log_lower)) if criterion.lower else within


def catastrophic_tokens(config: RolloutCorrectionConfig, tokens: Tokens) -> Tensor:
    """1.0 at tokens whose unclamped ratio is below the veto threshold or above the upper one, 0 elsewhere."""
    below = above = None
    if config.rs_veto_threshold is not None:
        below = indicator(
            torch.lt, tokens.log_ratio_RK, math.log(config.rs_veto_threshold), tokens.scratch_RK
        )
    if config.rs_veto_upper_threshold is not None:
        above = indicator(torch.gt, tokens.log_ratio_RK, math.log(config.rs_veto_upper_threshold))
    verdicts = [verdict for verdict in (below, above) if verdict is not None]
    return verdicts[0] if len(verdicts) == 1 else verdicts[0].add_(verdicts[1])


def sequence_accepted(
    criterion: Criterion, sums_S: SequenceSums[Tensor], bounds: "AdaptiveBounds | None" = None
) -> Tensor:
    """1.0 for each sequence that a sequence-wide criterion accepts, or that has no valid token.

    The maximum goes by the number of tokens out of bounds, so that context parallelism needs a sum
    over ranks only.
    """
    if criterion.adaptive:
        assert bounds is not None, "called without the bounds of the global batch"
        return bounds.accepted(sums_S)
    if criterion.aggregation == "max":
        return indicator(torch.eq, sums_S.criteria[criterion.name], 0.0)
    total = sums_S.log_ratio if criterion.uses_log_ratio else sums_S.criteria[criterion.name]
    statistic = sequence_log_weights(criterion.aggregation, total, sums_S.valid)
    return torch.where(sums_S.valid > 0, accepted(criterion, statistic), 1.0)


@dataclass(frozen=True)
class AdaptiveBounds:
    """Rejection bounds of the sequences of one global batch; float64 scalars, the same on all ranks.

    They follow the length of a sequence and the noise of the batch. Sampled by π_rollout, Δ_t has
    mean −KL_t and variance about 2·KL_t, and Σ_t (Δ_t + KL_t) is a martingale, so that the
    variances add up. With k3 for the KL of an average token, a sequence of n tokens has

        Σ_t Δ_t ≈ −k3·n ± √(2·k3·n),        mean_t Δ_t ≈ −k3 ± √(2·k3/n)

    and is judged by its number of these deviations:  z = |Σ_t Δ_t + k3·n| / √(2·k3·n). No fixed bound does that: one
    that is wide at 3,000 tokens is narrow at 12. Sum (sequence level) and mean (geometric level) have the same z.
    examples/rejection_bounds/README.md has the simulation.
    """

    k3: Tensor
    """Noise in nats per token: mean over tokens of exp(Δ) − 1 − Δ with Δ clamped to ±`K3_RANGE`."""
    z_score: Tensor
    """Deviations from −k3·n that a sequence may have: `rs_z_score`, or computed from
    `rs_target_fraction`."""
    median_length: Tensor
    """Valid tokens of the median sequence, at which the bounds are reported."""

    def accepted(self, sums_S: SequenceSums[Tensor]) -> Tensor:
        """1.0 for each sequence within the bounds, as a sequence without valid tokens is."""
        return (_z_scores(sums_S.valid, sums_S.log_ratio, self.k3) <= self.z_score).to(
            torch.float64
        )

    def log_bounds(self, level: str) -> tuple[Tensor, Tensor]:
        """Logarithms of the lower and upper bound on the ratio of a sequence of median length.

        Args:
            level: "geometric" for the bounds of exp(mean Δ), "sequence" for bounds of exp(Σ Δ).
        """
        n = self.median_length
        half = self.z_score * (2 * self.k3 / n.clamp_min(1)).sqrt() + LOG_PROB_TOLERANCE
        scale = n if level == "sequence" else torch.ones_like(n)
        return scale * (-self.k3 - half), scale * (-self.k3 + half)


def adaptive_bounds(
    config: RolloutCorrectionConfig, tables: Sequence[SequenceSums[Tensor]], ranks: Ranks = ONE_RANK
) -> AdaptiveBounds:
    """The bounds of a global batch from the tables of its micro-batches.

    Args: config: With `rs_z_score` or `rs_target_fraction`. tables: `Correction.sequence_sums` of
        each micro-batch of this rank, made under the same config. ranks: That share the batch;
        small tables are summed over the data-parallel ones.

    Returns:
        For the `GlobalBatch` of each of the micro-batches. Nothing synchronises with the host.

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
    ranks = replace(ranks, context=None)  # the tables are of whole sequences
    nonempty, tokens, total = ranks.over_data(
        torch.stack([(n > 0).sum(), n.sum(), clamped_k3.sum()])
    ).unbind()
    k3 = total / tokens.clamp_min(1)
    median_length = order_statistic(_where_positive(n, n), (nonempty - 1).div(2).floor(), ranks)
    if config.rs_z_score is not None:
        z_score = torch.full_like(k3, min(config.rs_z_score, LARGEST_Z_SCORE))
    else:
        assert config.rs_target_fraction is not None
        rejected = (
            config.rs_target_fraction * nonempty + 1e-9
        ).floor()  # 0.29 · 100 is 28.999999999999996
        scores = _where_positive(n, _z_scores(n, log_ratio, k3))
        z_score = order_statistic(scores, nonempty - 1 - rejected, ranks) * (1 + SCORE_TOLERANCE)
    return AdaptiveBounds(k3, z_score, median_length)


def clamped_k3_of(log_ratio: Tensor) -> Tensor:
    """exp(Δ) − 1 − Δ of Δ clamped to ±`K3_RANGE`, in float64: float32 would keep three digits of it at 1e-4."""
    clamped = log_ratio.to(torch.float64).clamp(-K3_RANGE, K3_RANGE)
    return torch.expm1(clamped).sub_(clamped)


def _z_scores(n_S: Tensor, log_ratio_S: Tensor, k3: Tensor) -> Tensor:
    """z = max(|Σ_t Δ_t + k3·n| − tolerance·n, 0) / √(2·k3·n) of each sequence, 0 where it has no valid token."""
    beyond_S = (log_ratio_S + k3 * n_S).abs() - LOG_PROB_TOLERANCE * n_S
    return beyond_S.clamp_min(0) / (2 * k3.clamp_min(SMALLEST_K3) * n_S.clamp_min(1)).sqrt()


def _where_positive(x_S: Tensor, values_S: Tensor) -> Tensor:
    """The values where x > 0, +inf elsewhere, which no order statistic counts."""
    return torch.where(x_S > 0, values_S, math.inf)


def second_moment_limit(squares_N: Tensor, bound: float, ranks: Ranks = ONE_RANK) -> Tensor:
    """The smallest Δ² that has to leave, +inf where none has to.

    limit = min {v : mean(Δ² ≤ v) > bound}: with Δ² sorted upwards, the mean of the first m grows with m, and the
    first value that brings it above the bound leaves with all that are larger. Tokens that tie with it leave too,
    so that their order does not matter.

    Source: "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?"
    (https://arxiv.org/abs/2510.01161), section 4.

    Args: squares_N: Δ² of this rank's valid tokens; +inf or NaN at others, which are never counted.
        bound: On the mean over the remaining tokens. ranks: That share the batch; a float64 [512,
        2] table is summed over them in a number of rounds that does
            not depend on the data. Tokens are not gathered.

    Returns:
        float64 scalar, the same on all ranks. Nothing synchronises with the host.
    """
    ordered = squares_N.nan_to_num(torch.inf, torch.inf).sort().values.to(torch.float64)
    if (
        not ranks.is_one
    ):  # all Δ² below the limit are within the bound, and with the values equal to it they are not
        return largest_value(
            ordered, ordered, lambda count, total: total / count.clamp_min(1) <= bound, ranks
        )
    counts = torch.arange(1, ordered.numel() + 1, dtype=torch.float64, device=ordered.device)
    within = (ordered.cumsum(0) / counts <= bound).sum()
    beyond = torch.cat([ordered, ordered.new_full((1,), torch.inf)])
    return beyond.index_select(0, within.reshape(1))[0]


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
    ordered_N: Tensor, terms_N: Tensor, holds: Callable[[Tensor, Tensor], Tensor], ranks: Ranks
) -> Tensor:
    """The largest v for which `holds(count, total)` of the values below v, +inf if it holds for all of them.

    The bits of v are found from the highest down, some in each round: non-negative floats are
    ordered as their bits. A round asks, for every value of the next bits, how many values of all
    ranks lie below, and for the sum of their terms.

    Args: ordered_N: This rank's values, float64, not negative, ascending. terms_N: float64, the
        contribution of each to the total. holds: Count and total of the values below each of 512
        candidates to bool [512]; once false for a
            candidate it is false for all larger ones.
        ranks: As of `order_statistic`.
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
        last = (
            below.sum().sub(1).clamp_min(0)
        )  # the first was within a round ago, but for rounding between ranks
        bits = candidates.index_select(0, last.reshape(1))
    return bits.view(torch.float64)[0]
