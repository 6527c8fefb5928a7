"""Losses per token: pure functions of log-probs and advantages, before weights, masks and averaging.

Shapes: suffix _L per response token, packed; any shape does, as long as all agree.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, maximum, minimum, where, zeros_like

from slime_tis.policy.config import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class TokenLossInputs:
    """What a loss per token may depend on."""

    log_probs_L: Tensor
    """log π_θ, with gradient."""
    old_log_probs_L: Tensor
    """log π_old, without gradient."""
    advantages_L: Tensor
    sequence_mean: Callable[[Tensor], Tensor]
    """Mean of [L] values over the accepted tokens of each whole sequence, at each of its tokens; a collective of the
    context-parallel ranks."""
    config: PolicyConfig

    @property
    def clip_range(self) -> dict[str, float]:
        """ε_low and ε_high as arguments of a loss."""
        return {"clip_low": self.config.eps_clip, "clip_high": self.config.clip_high}


TokenLoss = Callable[[TokenLossInputs], tuple[Tensor, Tensor]]
"""Returns (loss_L, clipped_L): the losses, and 1.0 where a clip took the gradient away."""


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

        r_t = π_θ / π_old,   L_t = −min(r_t A_t, clip(r_t, 1−ε_low, 1+ε_high) A_t);   where A_t < 0:  min(L_t, −c A_t)

    Source: "Proximal Policy Optimization Algorithms", Schulman et al. (https://arxiv.org/abs/1707.06347), eq. 7;
    asymmetric range: "DAPO", Yu et al. (https://arxiv.org/abs/2503.14476), eq. 10; dual clip: "Mastering Complex
    Control in MOBA Games", Ye et al. (https://arxiv.org/abs/1912.09729), eq. 5.

    Args:
        log_prob_L: log π_θ, with gradient.
        old_log_prob_L: log π_old, without gradient.
        advantage_L: advantages.
        clip_low: ε_low, distance below 1.
        clip_high: ε_high, distance above 1.
        dual_clip: c > 1, or None for no dual clip.

    Returns:
        (loss_L, clipped_L): the losses, and 1.0 where a clip took the gradient away.
    """
    return _clipped((log_prob_L - old_log_prob_L).exp(), advantage_L, clip_low, clip_high, dual_clip)


def gspo(
    log_prob_L: Tensor, mean_log_ratio_L: Tensor, advantage_L: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Sequence-level clipped objective: the ratio is the geometric mean over the sequence.

        s = exp(mean_t log(π_θ/π_old)),   s_t = sg(s) π_θ / sg(π_θ),
        L_t = −min(s_t A_t, clip(s_t, 1−ε_low, 1+ε_high) A_t)

    Averaged over the tokens of a sequence, its gradient equals the gradient of −min(s A, clip(s) A); no gradient
    crosses context-parallel ranks.

    Source: "Group Sequence Policy Optimization", Zheng et al. (https://arxiv.org/abs/2507.18071), eq. 5, 7 and 13.

    Args and returns as `ppo_clip`; `mean_log_ratio_L` is the mean over the sequence of log π_θ − log π_old, at each of
    its tokens, without gradient. The paper's clip ranges are about 3e-4.
    """
    ratio_L = (mean_log_ratio_L + log_prob_L - log_prob_L.detach()).exp()
    return _clipped(ratio_L, advantage_L, clip_low, clip_high, None)


def cispo(
    log_prob_L: Tensor, old_log_prob_L: Tensor, advantage_L: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Clipped importance weights on a policy gradient: a clipped token still has a gradient.

        L_t = −sg(clip(r_t, 1−ε_low, 1+ε_high)) A_t log π_θ

    Source: "MiniMax-M1", MiniMax (https://arxiv.org/abs/2506.13585), eq. 4 and 5.

    Args and returns as `ppo_clip`; a `clip_low` of 1 or more leaves small ratios as they are.
    """
    ratio_L = (log_prob_L.detach() - old_log_prob_L).exp()
    weight_L = ratio_L.clamp(1 - clip_low, 1 + clip_high)
    return -weight_L * advantage_L * log_prob_L, (weight_L != ratio_L).to(ratio_L.dtype)


def _clipped(
    ratio_L: Tensor, advantage_L: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    plain_L = -ratio_L * advantage_L
    clipped_L = -ratio_L.clamp(1 - clip_low, 1 + clip_high) * advantage_L
    loss_L = maximum(plain_L, clipped_L)
    touched_L = clipped_L > plain_L
    if dual_clip is not None:
        bound_L = -dual_clip * advantage_L
        touched_L = touched_L | ((advantage_L < 0) & (bound_L < loss_L))
        loss_L = where(advantage_L < 0, minimum(loss_L, bound_L), loss_L)
    return loss_L, touched_L.detach().to(loss_L.dtype)


def reinforce(log_prob_L: Tensor, advantage_L: Tensor) -> Tensor:
    """Policy gradient without clipping: L_t = −A_t log π_θ(t).

    Source: "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning", Williams,
    1992 (https://doi.org/10.1007/BF00992696).
    """
    return -advantage_L * log_prob_L


def kl_estimate(log_prob_L: Tensor, reference_log_prob_L: Tensor, kind: str) -> Tensor:
    """Estimate of KL(π_θ ‖ π_ref) on tokens sampled from π_θ.

        d = log π_θ − log π_ref:   k1 = d,   k2 = d²/2,   k3 = e^{−d} + d − 1,   low_var_kl = k3 clamped to [−10, 10]

    Source: "Approximating KL Divergence", Schulman (http://joschu.net/blog/kl-approx.html).

    Raises:
        ValueError: an unknown kind.
    """
    difference_L = log_prob_L - reference_log_prob_L
    if kind == "k1":
        return difference_L
    if kind == "k2":
        return difference_L.square() / 2
    if kind in ("k3", "low_var_kl"):
        k3_L = (-difference_L).expm1() + difference_L
        return k3_L.clamp(-10, 10) if kind == "low_var_kl" else k3_L
    raise ValueError(f"kl_loss_type must be k1, k2, k3 or low_var_kl, got {kind!r}")


LOSSES: dict[str, TokenLoss] = {
    "ppo": lambda x: ppo_clip(
        x.log_probs_L, x.old_log_probs_L, x.advantages_L, **x.clip_range, dual_clip=x.config.eps_clip_c
    ),
    "gspo": lambda x: gspo(
        x.log_probs_L,
        x.sequence_mean((x.log_probs_L - x.old_log_probs_L).detach()),
        x.advantages_L,
        **x.clip_range,
    ),
    "cispo": lambda x: cispo(x.log_probs_L, x.old_log_probs_L, x.advantages_L, **x.clip_range),
    "reinforce": lambda x: (reinforce(x.log_probs_L, x.advantages_L), zeros_like(x.advantages_L)),
}
"""Losses by their command-line name (--policy-loss)."""
