"""Losses per token: pure functions of log-probs and advantages, before weights, masks and averaging.

Shapes: suffix _T per token, any shape as long as all agree.
"""

from torch import Tensor, maximum, minimum, where


def ppo_clip(
    log_prob_T: Tensor,
    old_log_prob_T: Tensor,
    advantage_T: Tensor,
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
        log_prob_T: log π_θ, with gradient.
        old_log_prob_T: log π_old, the anchor, without gradient.
        advantage_T: advantages.
        clip_low: ε_low, distance below 1.
        clip_high: ε_high, distance above 1.
        dual_clip: c > 1, or None for no dual clip.

    Returns:
        (loss_T, clipped_T): the losses, and 1.0 where a clip took the gradient away.
    """
    return _clipped((log_prob_T - old_log_prob_T).exp(), advantage_T, clip_low, clip_high, dual_clip)


def gspo(
    log_prob_T: Tensor,
    mean_log_ratio_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Sequence-level clipped objective: the ratio is the geometric mean over the sequence.

        s = exp(mean_t log(π_θ/π_old)),   s_t = sg(s) π_θ / sg(π_θ),
        L_t = −min(s_t A_t, clip(s_t, 1−ε_low, 1+ε_high) A_t)

    Averaged over the tokens of a sequence its gradient is that of −min(s A, clip(s) A), without a gradient having to
    cross context-parallel ranks.

    Source: "Group Sequence Policy Optimization", Zheng et al. (https://arxiv.org/abs/2507.18071), eq. 5, 7 and 13.

    Args:
        log_prob_T: log π_θ, with gradient.
        mean_log_ratio_T: mean over the sequence of log π_θ − log π_old, at each of its tokens, without gradient.
        advantage_T: advantages.
        clip_low: ε_low; the paper's are about 3e-4.
        clip_high: ε_high.

    Returns:
        (loss_T, clipped_T), as `ppo_clip`.
    """
    ratio_T = (mean_log_ratio_T + log_prob_T - log_prob_T.detach()).exp()
    return _clipped(ratio_T, advantage_T, clip_low, clip_high, None)


def cispo(
    log_prob_T: Tensor,
    old_log_prob_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Clipped importance weights on a policy gradient: a clipped token still has a gradient.

        L_t = −sg(clip(r_t, 1−ε_low, 1+ε_high)) A_t log π_θ

    Source: "MiniMax-M1", MiniMax (https://arxiv.org/abs/2506.13585), eq. 4 and 5.

    Args:
        log_prob_T: log π_θ, with gradient.
        old_log_prob_T: log π_old.
        advantage_T: advantages.
        clip_low: ε_low; 1 or more leaves small ratios as they are.
        clip_high: ε_high.

    Returns:
        (loss_T, clipped_T): the losses, and 1.0 where the weight was clipped.
    """
    ratio_T = (log_prob_T.detach() - old_log_prob_T).exp()
    weight_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return -weight_T * advantage_T * log_prob_T, (weight_T != ratio_T).to(ratio_T.dtype)


def _clipped(
    ratio_T: Tensor, advantage_T: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    plain_T = -ratio_T * advantage_T
    clipped_T = -ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantage_T
    loss_T = maximum(plain_T, clipped_T)
    touched_T = clipped_T > plain_T
    if dual_clip is not None:
        bound_T = -dual_clip * advantage_T
        touched_T = touched_T | ((advantage_T < 0) & (bound_T < loss_T))
        loss_T = where(advantage_T < 0, minimum(loss_T, bound_T), loss_T)
    return loss_T, touched_T.detach().to(loss_T.dtype)


def reinforce(log_prob_T: Tensor, advantage_T: Tensor) -> Tensor:
    """Policy gradient without clipping: L_t = −A_t log π_θ(t).

    Source: "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning", Williams,
    1992 (https://doi.org/10.1007/BF00992696).
    """
    return -advantage_T * log_prob_T


def kl_estimate(log_prob_T: Tensor, reference_log_prob_T: Tensor, kind: str) -> Tensor:
    """Estimate of KL(π_θ ‖ π_ref) on tokens sampled from π_θ.

        d = log π_θ − log π_ref:   k1 = d,   k2 = d²/2,   k3 = e^{−d} + d − 1,   low_var_kl = k3 clamped to [−10, 10]

    Source: "Approximating KL Divergence", Schulman (http://joschu.net/blog/kl-approx.html).

    Raises:
        ValueError: an unknown kind.
    """
    difference_T = log_prob_T - reference_log_prob_T
    if kind == "k1":
        return difference_T
    if kind == "k2":
        return difference_T.square() / 2
    if kind in ("k3", "low_var_kl"):
        k3_T = (-difference_T).expm1() + difference_T
        return k3_T.clamp(-10, 10) if kind == "low_var_kl" else k3_T
    raise ValueError(f"kl_loss_type must be k1, k2, k3 or low_var_kl, got {kind!r}")
