"""Losses per token: pure functions of log-probs and advantages, before weights, masks and means.

Shapes: suffix _L is the response tokens, packed. Any other shape works, too, if all agree.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, maximum, minimum, where, zeros_like

from slime_tis.correction.config import LOG_PROB_LIMIT
from slime_tis.correction.context_parallel import ONE_RANK, Ranks
from slime_tis.correction.divergence import binary_tv
from slime_tis.correction.ratio import (
    FLOAT16_LOG_RATIO_BOUND,
    LOG_RATIO_BOUND,
    is_log_prob,
    safe_exp,
)
from slime_tis.correction.rejection import order_statistic
from slime_tis.policy.config import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class TokenLossInputs:
    """Inputs of a loss per token."""

    log_probs_L: Tensor
    """log π_θ, with gradient."""
    old_log_probs_L: Tensor
    """log π_old, without gradient."""
    advantages_L: Tensor
    over_sequence: Callable[..., Tensor]
    """Mean or sum (`mean=False`) of values [L] over the accepted tokens of complete sequences, at
    all tokens of the sequence; a context-parallel collective."""
    prefix_sums: Callable[[Tensor], Tensor]
    """Sums of values [L] over the accepted tokens of a complete sequence up to every token; also a
    context-parallel collective."""
    config: PolicyConfig
    selected_L: Tensor | None = None
    """bool: tokens with a large covariance, for clip_cov and kl_cov."""

    @property
    def policies(self) -> tuple[Tensor, Tensor, Tensor]:
        """log π_θ, log π_old and the advantages as arguments of a loss."""
        return self.log_probs_L, self.old_log_probs_L, self.advantages_L

    @property
    def bounded_log_ratio_L(self) -> Tensor:
        """log π_θ − log π_old within ±20, without gradient."""
        log_ratio_L = bounded(self.log_probs_L.detach() - self.old_log_probs_L)
        return log_ratio_L.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @property
    def clip_range(self) -> dict[str, Any]:
        """ε_low and ε_high as arguments of a loss."""
        return {"clip_low": self.config.eps_clip, "clip_high": self.config.clip_high}


def bounded(log_values: Tensor) -> Tensor:
    """Log-probs, or differences of two, within ±9984: larger values are codes for minus infinity.

    NaN becomes 0, ±inf the bound; the gradient there is 0. Other values keep all bits. In float16,
    which ends at 65504, the bound is ±512.
    """
    bound = LOG_PROB_LIMIT
    if log_values.dtype == torch.float16:
        bound = 512.0
    return log_values.nan_to_num(0.0, bound, -bound).clamp(-bound, bound)


def policy_ratio(log_prob_L: Tensor, old_log_prob_L: Tensor) -> Tensor:
    """π_θ/π_old with log r bounded to ±20; 1 if log r is NaN.

    The gradient is r within the bound, 0 outside. Source of the bound: verl, core_algos.py,
    compute_policy_loss_vanilla.
    """
    log_ratio_L = bounded(log_prob_L - old_log_prob_L)
    if log_prob_L.dtype == torch.float16:
        # The gradient is float16 even if the ratio is float32, so it must fit as well.
        log_ratio_L = log_ratio_L.clamp(-FLOAT16_LOG_RATIO_BOUND, FLOAT16_LOG_RATIO_BOUND)
    return safe_exp(log_ratio_L)


TokenLoss = Callable[[TokenLossInputs], tuple[Tensor, Tensor]]
"""Returns (loss_L, clipped_L): the losses, and 1.0 at tokens whose gradient a clip removes."""


def ppo_clip(
    log_prob_L: Tensor,
    old_log_prob_L: Tensor,
    advantage_L: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate objective, with asymmetric and dual clipping.

        r_t = π_θ / π_old,   L_t = −min(r_t A_t, clip(r_t, 1−ε_low, 1+ε_high) A_t);
        if A_t < 0:  min(L_t, −c A_t)

    Source: "Proximal Policy Optimization Algorithms", Schulman et al.
    (https://arxiv.org/abs/1707.06347), eq. 7; asymmetric range: "DAPO", Yu et al.
    (https://arxiv.org/abs/2503.14476), eq. 10; dual clip: "Mastering Complex Control in MOBA
    Games", Ye et al. (https://arxiv.org/abs/1912.09729), eq. 5.

    Args:
        log_prob_L: log π_θ, with gradient.
        old_log_prob_L: log π_old, without gradient.
        advantage_L: Advantages.
        clip_low: ε_low, distance below 1.
        clip_high: ε_high, distance above 1.
        dual_clip: c > 1, or None for no dual clip.

    Returns:
        (loss_L, clipped_L): the losses, and 1.0 at tokens whose gradient a clip removes.
    """
    ratio_L = policy_ratio(log_prob_L, old_log_prob_L)
    return _clipped(ratio_L, ratio_L.clamp(1 - clip_low, 1 + clip_high), advantage_L, dual_clip)


def gspo(
    log_prob_L: Tensor,
    mean_log_ratio_L: Tensor,
    advantage_L: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Sequence-level clipped objective: the ratio is the geometric mean over the sequence.

        s = exp(mean_t log(π_θ/π_old)),   s_t = sg(s) π_θ / sg(π_θ),
        L_t = −min(s_t A_t, clip(s_t, 1−ε_low, 1+ε_high) A_t)

    Averaged over the tokens of a sequence, it has the gradient of −min(s A, clip(s) A). No gradient
    crosses context-parallel ranks.

    Source: "Group Sequence Policy Optimization", Zheng et al. (https://arxiv.org/abs/2507.18071),
    eq. 5, 7 and 13.

    Args and returns as `ppo_clip`; `mean_log_ratio_L` is the sequence's mean of log π_θ − log
    π_old, at all tokens of the sequence, without gradient. The paper's clip ranges are about 3e-4.
    """
    # log π_θ − sg(log π_θ) carries the gradient. Both are bounded, because inf − inf is NaN.
    ratio_L = safe_exp(
        bounded(mean_log_ratio_L) + bounded(log_prob_L) - bounded(log_prob_L.detach())
    )
    return _clipped(ratio_L, ratio_L.clamp(1 - clip_low, 1 + clip_high), advantage_L, None)


def cispo(
    log_prob_L: Tensor,
    old_log_prob_L: Tensor,
    advantage_L: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Policy gradient with clipped importance weights: clipped tokens keep a gradient.

        L_t = −sg(clip(r_t, 1−ε_low, 1+ε_high)) A_t log π_θ

    Source: "MiniMax-M1", MiniMax (https://arxiv.org/abs/2506.13585), eq. 4 and 5.

    Args and returns as `ppo_clip`; a `clip_low` of 1 or more is no lower bound.
    """
    # Detached: the weight is a constant, and only log π_θ carries the gradient.
    ratio_L = policy_ratio(log_prob_L.detach(), old_log_prob_L)
    weight_L = ratio_L.clamp(1 - clip_low, 1 + clip_high)
    return -weight_L * advantage_L * bounded(log_prob_L), (weight_L != ratio_L).to(ratio_L.dtype)


def aspo(
    log_prob_L: Tensor,
    old_log_prob_L: Tensor,
    advantage_L: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Policy gradient with the ratio as weight, inverted at positive advantages.

    Rare tokens with a positive advantage gain most.

        L_t = −sg(u_t) A_t π_θ/sg(π_θ),   u_t = min(1/r_t, c) if A_t ≥ 0, else min(r_t, c);
        no gradient if A_t ≥ 0 and r_t > 1+ε_high, or A_t < 0 and r_t < 1−ε_low

    Source: "ASPO", Wang et al. (https://arxiv.org/abs/2510.06062); Archer2.0, core_algos.py.

    Args and returns as `ppo_clip`; `dual_clip` bounds the weight and keeps the gradient. It is 3 in
    the source.
    """
    log_ratio_L = bounded(log_prob_L.detach() - old_log_prob_L)
    positive_L = advantage_L >= 0
    weight_L = safe_exp(where(positive_L, -log_ratio_L, log_ratio_L))
    if dual_clip is not None:
        weight_L = weight_L.clamp_max(dual_clip)
    ratio_L = safe_exp(log_ratio_L)
    clipped_L = where(positive_L, ratio_L > 1 + clip_high, ratio_L < 1 - clip_low)
    # Without gradient, but with its value: the loss is reported, too.
    log_prob_L = where(clipped_L, log_prob_L.detach(), log_prob_L)
    # π_θ/sg(π_θ) is 1, with the gradient of log π_θ.
    own_ratio_L = policy_ratio(bounded(log_prob_L), bounded(log_prob_L.detach()))
    loss_L = -weight_L * advantage_L * own_ratio_L
    return loss_L, clipped_L.to(loss_L.dtype)


def sapo(
    log_prob_L: Tensor,
    old_log_prob_L: Tensor,
    advantage_L: Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
) -> Tensor:
    """Soft gate instead of a clip: the gradient vanishes smoothly away from ratio 1.

        L_t = −(4/τ) σ(τ (r_t − 1)) A_t,   τ = τ_pos if A_t > 0, else τ_neg

    Source: "Soft Adaptive Policy Optimization", Gao et al. (https://arxiv.org/abs/2511.20347), eq.
    5 and 6.
    """
    ratio_L = policy_ratio(log_prob_L, old_log_prob_L)
    tau_L = where(advantage_L > 0, tau_positive, tau_negative)
    return -(4 / tau_L) * (tau_L * (ratio_L - 1)).sigmoid() * advantage_L


def vespo(log_prob_L: Tensor, sequence_log_ratio_L: Tensor, advantage_L: Tensor) -> Tensor:
    """Policy gradient with a gamma-shaped weight of the sequence ratio W, which peaks near 1.

        L_t = −sg(W^k e^{λ(1 − W)}) A_t log π_θ,   log W = clamp(Σ_t log(π_θ/π_old), log 1e-8, 20),
        (k, λ) = (2, 3) if A_t ≥ 0, else (3, 2)

    Source: "VESPO", Shen et al. (https://arxiv.org/abs/2602.10693); k and λ as in TRL,
        grpo_trainer.py, get_gamma_weights.

    Args:
        log_prob_L: log π_θ, with gradient.
        sequence_log_ratio_L: The complete sequence's Σ_t log(π_θ/π_old), at all tokens of the
            sequence, without gradient; terms are clamped to ±20.
        advantage_L: Advantages.
    """
    log_w_L = sequence_log_ratio_L.double().nan_to_num(0.0).clamp(math.log(1e-8), 20)
    positive_L = advantage_L >= 0
    shape_L = where(positive_L, 2.0, 3.0)  # k of the paper
    rate_L = where(positive_L, 3.0, 2.0)  # λ of the paper
    weight_L = (shape_L * log_w_L + rate_L * -log_w_L.expm1()).exp()
    return -weight_L.to(log_prob_L.dtype) * advantage_L * bounded(log_prob_L)


def clip_cov(
    log_prob_L: Tensor,
    old_log_prob_L: Tensor,
    advantage_L: Tensor,
    selected_L: Tensor | None,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """PPO without the selected tokens; `config.COVARIANCE_LOSSES` has the source.

    Args and returns as `ppo_clip`; `selected_L` is bool.
    """
    assert selected_L is not None
    loss_L, clipped_L = ppo_clip(
        log_prob_L, old_log_prob_L, advantage_L, clip_low=clip_low, clip_high=clip_high
    )
    dropped_L = selected_L & (clipped_L == 0)
    return where(dropped_L, 0.0, loss_L), where(dropped_L, 1.0, clipped_L)


def kl_cov(
    log_prob_L: Tensor,
    old_log_prob_L: Tensor,
    advantage_L: Tensor,
    selected_L: Tensor | None,
    *,
    coef: float,
) -> Tensor:
    """−r_t A_t, plus β |log r_t| at selected tokens; `config.COVARIANCE_LOSSES` has the source.

    Args as `clip_cov`; `coef` is β.
    """
    assert selected_L is not None
    log_ratio_L = bounded(log_prob_L - old_log_prob_L)
    penalty_L = where(selected_L, coef * log_ratio_L.abs(), 0.0)
    return -safe_exp(log_ratio_L) * advantage_L + penalty_L


@dataclass(frozen=True, kw_only=True)
class CovarianceLimit:
    """Selection in a global batch by c_t = (A_t − mean A)(log π_t − mean log π).

    Tensors are float64 scalars.
    """

    bounds: tuple[float, float]
    """Tokens with c out of these bounds are never selected."""
    mean_advantage: Tensor
    mean_log_prob: Tensor
    highest: Tensor
    """Largest c within the bounds."""
    gap: Tensor
    """Largest highest − c of a selected token."""

    def selects(self, log_probs_L: Tensor, advantages_L: Tensor) -> Tensor:
        """bool [L], the selected tokens."""
        gap_L = self.highest - self.candidates(log_probs_L, advantages_L)
        return (gap_L <= self.gap) & gap_L.isfinite()

    def candidates(self, log_probs_L: Tensor, advantages_L: Tensor) -> Tensor:
        """c of tokens within the bounds, −inf at other tokens, float64 [L]."""
        c_L = (advantages_L.double() - self.mean_advantage) * (
            log_probs_L.double() - self.mean_log_prob
        )
        is_candidate_L = is_log_prob(log_probs_L) & (c_L > self.bounds[0]) & (c_L < self.bounds[1])
        return torch.where(is_candidate_L, c_L, -math.inf)


def covariance_limit(
    log_probs_L: Tensor,
    advantages_L: Tensor,
    mask_L: Tensor,
    config: PolicyConfig,
    name: str,
    ranks: Ranks = ONE_RANK,
) -> CovarianceLimit:
    """Selection of clip_cov (within its bounds) or kl_cov, without a host synchronisation.

    It selects among the masked-in tokens with a log-prob on all ranks.
    """
    bounds = (-math.inf, math.inf)
    if name == "clip_cov":
        bounds = (config.clip_cov_lower_bound, config.clip_cov_upper_bound)
    log_probs_L = torch.where(mask_L > 0, log_probs_L.detach(), math.nan)
    counts_L = is_log_prob(log_probs_L)
    values = torch.stack([torch.ones_like(log_probs_L), advantages_L, log_probs_L]).double()
    local_sums = torch.where(counts_L, values, 0.0).flatten(1).sum(1)
    count, advantage, log_prob = ranks.all_reduce(local_sums).unbind()
    n = count.clamp_min(1)
    zero = torch.zeros_like(n)
    limit = CovarianceLimit(
        bounds=bounds,
        mean_advantage=advantage / n,
        mean_log_prob=log_prob / n,
        highest=zero,
        gap=zero + math.inf,
    )
    c_N = torch.where(counts_L, limit.candidates(log_probs_L, advantages_L), -math.inf).flatten()
    # One more −inf: amax refuses an empty tensor, and a rank may have no tokens.
    highest = ranks.all_reduce(torch.cat([c_N, c_N.new_full((1,), -math.inf)]).amax(), "max")
    # 1e-9 against rounding: 0.29 · 100 is 28.999…. At least one token is selected, as in verl.
    index = (config.cov_ratio * count + 1e-9).floor().clamp_min(1) - 1
    return replace(limit, highest=highest, gap=order_statistic(highest - c_N, index, ranks))


def ctpo(x: TokenLossInputs) -> tuple[Tensor, Tensor]:
    """PPO with the ratio of the prefix up to the token; the clip range grows with the position t.

        s_t = min(Π_{i≤t} π_θ/π_old, e^10), with the gradient of token t only;
        bounds (1−ε_low)^√t, (1+ε_high)^√t and c^√t

    Source: "Rethinking Importance Sampling in LLM Policy Optimization", Zhang et al.
        (https://arxiv.org/abs/2605.07331);
    horizon-llm/CTPO, core_algos.py, cum-token-cumprod-la, whose bounds are e^(−0.025√t) and
    e^(0.05√t).
    """
    log_prob_L = bounded(x.log_probs_L.detach())
    own_log_ratio_L = bounded(log_prob_L - x.old_log_probs_L)
    prefix_L = x.prefix_sums(own_log_ratio_L.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    highest = 10.0
    if log_prob_L.dtype == torch.float16:
        highest = FLOAT16_LOG_RATIO_BOUND
    # No lower bound, as in the authors' code: a small ratio does not overflow.
    log_ratio_L = prefix_L + bounded(x.log_probs_L) - log_prob_L
    ratio_L = log_ratio_L.clamp_max(highest).exp()
    power_L = x.prefix_sums(torch.ones_like(log_prob_L)).sqrt()
    lowest_L = (1 - x.config.eps_clip) ** power_L
    highest_L = (1 + x.config.clip_high) ** power_L
    dual_clip_L = None
    if x.config.eps_clip_c is not None:
        dual_clip_L = x.config.eps_clip_c**power_L
    return _clipped(ratio_L, ratio_L.clamp(lowest_L, highest_L), x.advantages_L, dual_clip_L)


CPPO_LOWEST_WEIGHT = 0.8
"""Weight w_t of the last token of a sequence in `cppo`; the first one has 1."""


def cppo(x: TokenLossInputs) -> tuple[Tensor, Tensor]:
    """Policy gradient without tokens that exceed a divergence threshold or their prefix's budget.

        L_t = −M_t r_t A_t,
        M_t = 1 if A_t (r_t − 1) ≤ 0, or w_t D_t ≤ δ and S_t ≤ δ + δ_b W_{t−1},
        S_t = Σ_{i≤t} w_i D_i,   W_t = Σ_{i≤t} w_i,   D = |π_θ − π_old|,
        w_t from 1 at t = 1 to 0.8 at the end

    δ is `eps_clip`, δ_b is `experimental_cppo_budget`.

    Source: "Beyond Uniform Token-Level Trust Region", Mao et al.
    (https://arxiv.org/abs/2606.10968), eq. 8 to 11, with the binary total variation of section 4.3.
    """
    log_prob_L = bounded(x.log_probs_L.detach())
    old_log_prob_L = bounded(x.old_log_probs_L)
    one_L = torch.ones_like(log_prob_L, dtype=torch.float64)
    position_L = x.prefix_sums(one_L)
    length_L = x.over_sequence(one_L, mean=False)
    weight_L = 1 - (1 - CPPO_LOWEST_WEIGHT) * (position_L - 1) / (length_L - 1).clamp_min(1)
    divergence_L = weight_L * binary_tv(log_prob_L, old_log_prob_L)
    # W_{t−1} is the sum of the weights before the token.
    earlier_L = x.prefix_sums(weight_L) - weight_L
    budget_L = x.config.eps_clip + x.config.experimental_cppo_budget * earlier_L
    inside_L = (divergence_L <= x.config.eps_clip) & (x.prefix_sums(divergence_L) <= budget_L)
    # r − 1 has the sign of log r.
    moves_back_L = x.advantages_L * (log_prob_L - old_log_prob_L) <= 0
    kept_L = inside_L | moves_back_L
    ratio_L = policy_ratio(x.log_probs_L, x.old_log_probs_L)
    loss_L = where(kept_L, -ratio_L * x.advantages_L, 0.0)
    return loss_L, (~kept_L).to(loss_L.dtype)


def dro(log_prob_L: Tensor, old_log_prob_L: Tensor, advantage_L: Tensor, *, beta: float) -> Tensor:
    """Policy gradient with a quadratic pull to the old policy.

        L_t = −A_t log π_θ + (β/2) (log π_θ − log π_old)²

    Source: "Kimi k1.5" (https://arxiv.org/abs/2501.12599), section 2.3.2, per token as in verl's
    and tinker's `dro`.
    """
    pull_L = beta / 2 * _squared(log_prob_L - old_log_prob_L)
    return -advantage_L * bounded(log_prob_L) + pull_L


def _clipped(
    ratio_L: Tensor, bounded_L: Tensor, advantage_L: Tensor, dual_clip: float | Tensor | None
) -> tuple[Tensor, Tensor]:
    """The pessimistic loss of a ratio and its clipped value, and 1.0 at tokens without gradient."""
    plain_L = -ratio_L * advantage_L
    clipped_L = -bounded_L * advantage_L
    loss_L = maximum(plain_L, clipped_L)
    touched_L = clipped_L > plain_L
    if dual_clip is not None:
        bound_L = -dual_clip * advantage_L
        touched_L = touched_L | ((advantage_L < 0) & (bound_L < loss_L))
        loss_L = where(advantage_L < 0, minimum(loss_L, bound_L), loss_L)
    return loss_L, touched_L.detach().to(loss_L.dtype)


def reinforce(log_prob_L: Tensor, advantage_L: Tensor) -> Tensor:
    """Policy gradient without clipping: L_t = −A_t log π_θ(t).

    Source: "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement
    Learning", Williams, 1992 (https://doi.org/10.1007/BF00992696).
    """
    return -advantage_L * bounded(log_prob_L)


def kl_estimate(
    log_prob_L: Tensor, reference_log_prob_L: Tensor, kind: str, ratio_L: Tensor | None = None
) -> Tensor:
    """Estimate of KL(π_θ ‖ π_ref) on tokens sampled from π_θ, or with a ratio from another policy.

        d = log π_θ − log π_ref:   k1 = d,   k2 = d²/2,   k3 = e^{−d} + d − 1,
        low_var_kl = k3 clamped to [−10, 10]

    For tokens sampled from π_old and r = π_θ/π_old, r·k1 and r·k3 are unbiased. In k3, d < −20
    counts as −20 and has gradient 0: e^{−d} would overflow, and the gradient of d without it would
    push the policy further away.

    Source: "Approximating KL Divergence", Schulman (http://joschu.net/blog/kl-approx.html); the
    ratio: "DeepSeek-V3.2" (https://arxiv.org/abs/2512.02556), section 3.1, clamped after the
    multiplication as in slime's ppo_utils.py.

    Args:
        log_prob_L: log π_θ, with gradient.
        reference_log_prob_L: log π_ref.
        kind: k1, k2, k3 or low_var_kl.
        ratio_L: π_θ/π_old, with gradient; None for 1.

    Raises:
        ValueError: The kind is unknown.
    """
    difference_L = bounded(log_prob_L - reference_log_prob_L)
    estimates = {"k1": _k1, "k2": _k2, "k3": _k3, "low_var_kl": _k3}
    if kind not in estimates:
        raise ValueError(f"kl_loss_type must be k1, k2, k3 or low_var_kl, got {kind!r}")
    kl_L = estimates[kind](difference_L)
    if ratio_L is not None:
        # float16 ends at 65504, and the product of both bounds is larger.
        largest = torch.finfo(kl_L.dtype).max / 4
        kl_L = (ratio_L * kl_L).clamp(-largest, largest)
    if kind == "low_var_kl":
        kl_L = kl_L.clamp(-10, 10)
    return kl_L


def _k1(difference_L: Tensor) -> Tensor:
    """d."""
    return difference_L


def _k2(difference_L: Tensor) -> Tensor:
    """d²/2."""
    return _squared(difference_L) / 2


def _squared(difference_L: Tensor) -> Tensor:
    """d², bounded; the gradient is 0 beyond the bound."""
    # float16 ends at 65504, so 256² would overflow.
    bound = LOG_PROB_LIMIT
    if difference_L.dtype == torch.float16:
        bound = 128.0
    return bounded(difference_L).clamp(-bound, bound).square()


def _k3(difference_L: Tensor) -> Tensor:
    """e^{−d} + d − 1; expm1 keeps the digits of small d."""
    bound = LOG_RATIO_BOUND
    if difference_L.dtype == torch.float16:
        bound = FLOAT16_LOG_RATIO_BOUND
    difference_L = difference_L.clamp_min(-bound)
    return (-difference_L).expm1() + difference_L


def _unclipped(loss_L: Tensor) -> tuple[Tensor, Tensor]:
    """A loss that clips no token."""
    return loss_L, zeros_like(loss_L.detach())


LOSSES: dict[str, TokenLoss] = {
    "ppo": lambda x: ppo_clip(*x.policies, **x.clip_range, dual_clip=x.config.eps_clip_c),
    "gspo": lambda x: gspo(
        x.log_probs_L,
        x.over_sequence(bounded(x.log_probs_L.detach() - x.old_log_probs_L), mean=True),
        x.advantages_L,
        **x.clip_range,
    ),
    "cispo": lambda x: cispo(*x.policies, **x.clip_range),
    "aspo": lambda x: aspo(*x.policies, **x.clip_range, dual_clip=x.config.eps_clip_c),
    "sapo": lambda x: _unclipped(
        sapo(*x.policies, tau_positive=x.config.sapo_tau_pos, tau_negative=x.config.sapo_tau_neg)
    ),
    "vespo": lambda x: _unclipped(
        vespo(
            x.log_probs_L,
            x.over_sequence(x.bounded_log_ratio_L, mean=False),
            x.advantages_L,
        )
    ),
    "clip_cov": lambda x: clip_cov(*x.policies, x.selected_L, **x.clip_range),
    "kl_cov": lambda x: _unclipped(kl_cov(*x.policies, x.selected_L, coef=x.config.kl_cov_coef)),
    "experimental_ctpo": ctpo,
    "experimental_cppo": cppo,
    "dro": lambda x: _unclipped(dro(*x.policies, beta=x.config.dro_beta)),
    "reinforce": lambda x: _unclipped(reinforce(x.log_probs_L, x.advantages_L)),
}
"""Losses by their command-line name (--policy-loss)."""
