"""Tokens with a large covariance of log-prob and advantage over the global batch, for the losses clip_cov and kl_cov.

Shapes: suffix _L per response token of this rank, packed; any shape does, as long as all agree.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_tis.correction.context_parallel import ONE_RANK, Ranks
from slime_tis.correction.rules import order_statistic
from slime_tis.policy.config import CovarianceRule


@dataclass(frozen=True, kw_only=True)
class CovarianceLimit:
    """The selection in a global batch by c_t = (A_t − mean A)(log π_t − mean log π); float64 scalars."""

    rule: CovarianceRule
    mean_advantage: Tensor
    mean_log_prob: Tensor
    highest: Tensor
    """Largest c inside the bounds."""
    gap: Tensor
    """Tokens inside the bounds with highest − c at most this are selected."""

    def selects(self, log_probs_L: Tensor, advantages_L: Tensor) -> Tensor:
        """bool [L], the selected tokens."""
        gap_L = self.highest - self.candidates(log_probs_L, advantages_L)
        return (gap_L <= self.gap) & gap_L.isfinite()

    def candidates(self, log_probs_L: Tensor, advantages_L: Tensor) -> Tensor:
        """c of tokens inside the bounds, −inf elsewhere, float64 [L]."""
        c_L = (advantages_L.double() - self.mean_advantage) * (log_probs_L.double() - self.mean_log_prob)
        return torch.where((c_L > self.rule.lower) & (c_L < self.rule.upper), c_L, -math.inf)


def covariance_limit(
    log_probs_L: Tensor, advantages_L: Tensor, mask_L: Tensor, rule: CovarianceRule, ranks: Ranks = ONE_RANK
) -> CovarianceLimit:
    """The selection in the tokens of the mask with a finite log-prob, of all ranks; without a host synchronisation."""
    log_probs_L = torch.where(mask_L > 0, log_probs_L.detach(), math.nan)
    counts_L = log_probs_L.isfinite()
    values = torch.stack([torch.ones_like(log_probs_L), advantages_L, log_probs_L]).double()
    count, advantage, log_prob = ranks.all_reduce(torch.where(counts_L, values, 0.0).flatten(1).sum(1)).unbind()
    n = count.clamp_min(1)
    zero = torch.zeros_like(n)
    limit = CovarianceLimit(
        rule=rule, mean_advantage=advantage / n, mean_log_prob=log_prob / n, highest=zero, gap=zero + math.inf
    )
    c_N = torch.where(counts_L, limit.candidates(log_probs_L, advantages_L), -math.inf).flatten()
    highest = ranks.all_reduce(torch.cat([c_N, c_N.new_full((1,), -math.inf)]).amax(), "max")
    index = (rule.share * count + 1e-9).floor().clamp_min(1) - 1
    return replace(limit, highest=highest, gap=order_statistic(highest - c_N, index, ranks))
