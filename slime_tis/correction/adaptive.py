"""Rejection bounds that follow the length of a sequence and the noise of the global batch.

Sampled by π_rollout, Δ_t has mean −KL_t and variance about 2·KL_t, and Σ_t (Δ_t + KL_t) is a martingale, so that the
variances add up. With k3 for the KL of an average token, a sequence of n tokens has

    Σ_t Δ_t ≈ −k3·n ± √(2·k3·n),        mean_t Δ_t ≈ −k3 ± √(2·k3/n)

and is judged by how many of these deviations it is away:  z = |Σ_t Δ_t + k3·n| / √(2·k3·n). No fixed bound does that:
one that is wide at 3,000 tokens is narrow at 12. The sum (sequence level) and the mean (geometric level) have the
same z. examples/rejection_bounds/README.md has the simulation.

Shapes: suffix _S is per sequence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.ranks import ONE_RANK, Ranks
from slime_tis.correction.selection import order_statistic
from slime_tis.correction.sums import SequenceSums

K3_RANGE = 1.0
"""k3 is measured with Δ clamped to ±1, ratios of 1/e to e, where healthy tokens lie down to fp8. What is to be rejected
must not widen the bounds it is rejected by: a token of +20 nats would raise the plain mean by e^20/N, now by 0.7/N."""
LOG_PROB_TOLERANCE = 5e-5
"""Mean log-ratio, in nats per token, that is never a reason to reject: float32 log-probs of large vocabularies differ
by 1e-5 to 2e-5 with one sign, which over thousands of otherwise equal tokens is many deviations of nothing."""
SMALLEST_K3 = 1e-12
"""Divisor where two engines agree exactly; their deviations are 0 by the tolerance above."""
LARGEST_Z_SCORE = 1e18
"""No sequence comes near, with 1e6 nats per token and a k3 of 1e-12 neither; a larger bound would overflow sums."""
TIE = 1e-5
"""Scores this close, relatively, are equal: a sum is rounded differently where micro-batches are cut differently."""


@dataclass(frozen=True)
class AdaptiveBounds:
    """Rejection bounds of the sequences of one global batch; float64 scalars, the same on all ranks."""

    k3: Tensor
    """Noise in nats per token: mean over tokens of exp(Δ) − 1 − Δ with Δ clamped to ±`K3_RANGE`."""
    z_score: Tensor
    """Deviations from −k3·n that a sequence may have: `rs_z_score`, or what `rs_target_fraction` comes to."""
    median_length: Tensor
    """Valid tokens of the median sequence, at which the bounds are reported."""

    def accepted(self, sums_S: SequenceSums[Tensor]) -> Tensor:
        """1.0 for each sequence within the bounds, as a sequence without valid tokens is."""
        return (_z_scores(sums_S.valid, sums_S.log_ratio, self.k3) <= self.z_score).to(torch.float64)

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

    Args:
        config: With `rs_z_score` or `rs_target_fraction`.
        tables: `Correction.sequence_sums` of each micro-batch of this rank, made under the same config.
        ranks: That share the batch; small tables are summed over the data-parallel ones.

    Returns:
        For the `GlobalBatch` of each of the micro-batches. Nothing synchronises with the host.

    Raises:
        ValueError: if the config has neither option, or there is no table.
    """
    if not config.adaptive:
        raise ValueError("adaptive bounds need --rs-z-score or --rs-target-fraction; set one of them in the config.")
    if not tables:
        raise ValueError("adaptive_bounds got no table; pass Correction.sequence_sums of each micro-batch.")
    n = torch.cat([table.valid for table in tables])
    log_ratio = torch.cat([table.log_ratio for table in tables])
    clamped_k3 = torch.cat([table.clamped_k3 for table in tables if table.clamped_k3 is not None])
    ranks = replace(ranks, context=None)  # the tables are of whole sequences
    nonempty, tokens, total = ranks.over_data(torch.stack([(n > 0).sum(), n.sum(), clamped_k3.sum()])).unbind()
    k3 = total / tokens.clamp_min(1)
    median_length = order_statistic(_where_positive(n, n), (nonempty - 1).div(2).floor(), ranks)
    if config.rs_z_score is not None:
        z_score = torch.full_like(k3, min(config.rs_z_score, LARGEST_Z_SCORE))
    else:
        assert config.rs_target_fraction is not None
        rejected = (config.rs_target_fraction * nonempty + 1e-9).floor()  # 0.29 · 100 is 28.999999999999996
        scores = _where_positive(n, _z_scores(n, log_ratio, k3))
        z_score = order_statistic(scores, nonempty - 1 - rejected, ranks) * (1 + TIE)
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
