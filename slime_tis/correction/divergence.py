"""Binary divergences between two policies at the sampled token, for divergence masks.

A token is read as a coin: sampled with probability p, not sampled with 1 − p. All functions take
log-probs and compute in float64, so no clamp is needed and equal policies have a divergence of
exactly 0.

All functions take tensors of any shape.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

LOG_MIN_COMPLEMENT = -25 * math.log(2)
"""Smallest log(1 − p). A float32 log-prob of exactly 0 stands for 1 − p of up to 2⁻²⁵; without this
limit the KL of such a token would be infinite."""


def log_complement(log_p: Tensor) -> Tensor:
    """Returns log(1 − p) in float64, at least −25·log 2, from log p ≤ 0."""
    log_p = log_p.double()
    # Each form is exact on one side of p = 1/2 and cancels on the other.
    near_one = log_p > -math.log(2)
    exact = torch.where(near_one, (-torch.expm1(log_p)).log(), torch.log1p(-log_p.exp()))
    return exact.clamp_min(LOG_MIN_COMPLEMENT)


def binary_tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Returns the total variation |p − q| of the two coins, in float64."""
    # exp of the larger one times a factor in [0, 1]: nothing overflows if one of both is −800
    log_p = log_p.double()
    log_q = log_q.double()
    return torch.maximum(log_p, log_q).exp() * -torch.expm1(-(log_p - log_q).abs())


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Returns KL(q ‖ p) = q·log(q/p) + (1 − q)·log((1 − q)/(1 − p)), nats, float64, at least 0."""
    log_p = log_p.double()
    log_q = log_q.double()
    rest_p = log_complement(log_p)
    rest_q = log_complement(log_q)
    sampled = log_q.exp() * (log_q - log_p)
    not_sampled = rest_q.exp() * (rest_q - rest_p)
    # Below 0 only by rounding.
    return (sampled + not_sampled).clamp_min(0)


def binary_kl_max(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Returns the larger of KL(p ‖ q) and KL(q ‖ p)."""
    return torch.maximum(binary_kl(log_p, log_q), binary_kl(log_q, log_p))


BINARY_DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary_tv": binary_tv,
    "binary_kl": binary_kl,
    "binary_kl_max": binary_kl_max,
}
"""Divergences of --divergence-mask, as functions of log π (current policy) and log μ (anchor).

Sources: "Rethinking the Trust Region in LLM Reinforcement Learning" (DPPO, Qi, Zhou et al.,
https://arxiv.org/abs/2602.04879), eq. 12 to 14; KPop (https://ringtech.notion.site/kpop) for the
maximum of both directions.
"""
