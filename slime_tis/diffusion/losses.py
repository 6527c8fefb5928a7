"""The corrected loss of SDE steps: FlowGRPO's clipped loss or a plain policy gradient.

Shapes: suffix _BT is [B, T] for B trajectories with T steps, or [B] for one step. A call may have
all steps or one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.correction import THIS_CALL, GlobalBatch, RolloutCorrectionConfig
from slime_tis.diffusion.sde import STEPS, check_shapes
from slime_tis.diffusion.trajectories import StepStatistics, correct_trajectories
from slime_tis.policy.losses import policy_ratio, ppo_clip, reinforce

CLIP_RANGE = 1e-3
"""Distance of the ratio from 1 that is not clipped, for log-probs that are means over latent
dimensions: such a ratio is the D-th root of the step's, and so has to be clipped about D times
closer than the customary 0.2."""


@dataclass(frozen=True)
class DiffusionLoss:
    """The loss of some steps; the mean over calls and ranks is Σ numerator / Σ denominator."""

    loss: Tensor
    """0-dim: numerator / denominator; 0 if no step is accepted."""
    numerator: Tensor
    """0-dim, with gradient: Σ of the loss over accepted steps."""
    denominator: Tensor
    """0-dim: accepted steps or all steps, depending on `rejection_normalizer`."""
    accepted_steps: Tensor
    """0-dim: accepted steps. A mean over all steps scales the gradient by accepted_steps /
    steps."""
    steps: Tensor
    """0-dim: all steps."""
    sums: dict[str, Tensor]
    """Σ over accepted steps, 0-dim, without gradient: `clipped`, `kl` (log π_old − log π_θ) and
    `ratio` (π_θ/π_old)."""
    statistics: StepStatistics | None
    """The statistics of the correction in bypass mode; else None."""


def flow_grpo(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    *,
    clip_range: float = CLIP_RANGE,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate objective per SDE step.

        r_t = π_θ/π_old (x_{t−1} | x_t),   L_t = −min(r_t A, clip(r_t, 1−ε, 1+ε) A)

    Source: "Flow-GRPO: Training Flow Matching Models via Online RL", Liu et al.
    (https://arxiv.org/abs/2505.05470), section 4.1.

    Args:
        log_prob_BT: log π_θ, with gradient.
        old_log_prob_BT: log π_old, without.
        advantage_BT: A, the same for all steps of a trajectory.
        clip_range: ε.

    Returns:
        (loss_BT, clipped_BT): the losses, and 1.0 where the clip took the gradient away.
    """
    return ppo_clip(
        log_prob_BT, old_log_prob_BT, advantage_BT, clip_low=clip_range, clip_high=clip_range
    )


def policy_gradient(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    *,
    clip_range: float = CLIP_RANGE,
) -> tuple[Tensor, Tensor]:
    """Policy gradient without ratio and clip: L_t = −A log π_θ(x_{t−1} | x_t).

    Source: "Training Diffusion Models with Reinforcement Learning", Black et al.
    (https://arxiv.org/abs/2305.13301), section 4.3 (DDPO_SF).

    Args and returns as `flow_grpo`; π_old and the clip range have no part in it.
    """
    return reinforce(log_prob_BT, advantage_BT), torch.zeros_like(log_prob_BT.detach())


LOSSES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "ppo": flow_grpo,
    "reinforce": policy_gradient,
}
"""Losses by the name that `--policy-loss` has for them."""


def diffusion_loss(  # noqa: PLR0913
    config: RolloutCorrectionConfig,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    clip_range: float = CLIP_RANGE,
    timesteps: Tensor | None = None,
    latent_dims: int = 1,
    global_batch: GlobalBatch = THIS_CALL,
) -> DiffusionLoss:
    """The corrected loss of SDE steps.

        decoupled: Σ_accepted w_t·L_t(π_θ, π_old) / denominator
        bypass:    Σ_accepted L_t(π_θ, π_rollout) / denominator

    In decoupled mode, `correct_trajectories` gives w and the accepted steps. In bypass mode,
    π_θ/π_rollout decides here which steps are accepted, and `--use-tis` multiplies a plain policy
    gradient with w_t of the same ratio.

    Args:
        config: The options; `policy_loss` is ppo (`flow_grpo`) or reinforce (`policy_gradient`).
        log_probs: log π_θ, [B, T] or [B], with gradient.
        old_log_probs: log π_old, of the same shape; in bypass mode log π_rollout
            (`apply_bypass_mode`).
        advantages: Of the same shape, or [B].
        weights: Decoupled weights of these steps: `TrajectoryCorrection.folded`, or `weights` with
            the `mask`.
        mask: The accepted steps; None if weights are folded, so that a weight of 0 means rejected.
        clip_range: ε of `flow_grpo`.
        timesteps: As in `correct_trajectories`, for bypass mode.
        latent_dims: As in `correct_trajectories`. It does not change the ratio of the loss.
        global_batch: As in `correct_trajectories`.

    Raises:
        ValueError: if the loss is unknown, shapes differ (naming both), or weights do not fit the
            configuration: they are missing, or given in bypass mode.
    """
    if config.policy_loss not in LOSSES:
        raise ValueError(
            f"--policy-loss is {config.policy_loss}, but SDE steps have ppo and reinforce; choose"
            " one."
        )
    check_shapes(STEPS, log_probs=log_probs, old_log_probs=old_log_probs)
    advantage = _per_step(advantages, log_probs)
    statistics = None
    if config.use_rollout_logprobs:
        if weights is not None or mask is not None:
            raise ValueError(
                "weights or mask are given, but with --use-rollout-logprobs the correction is made"
                " inside the loss and would be applied twice; remove them, or recompute log π_old"
                " and remove the flag."
            )
        acting = correct_trajectories(
            config,
            log_probs,
            old_log_probs,
            timesteps=timesteps,
            latent_dims=latent_dims,
            global_batch=global_batch,
        )
        weights = acting.weights
        mask = acting.mask
        statistics = acting.statistics
    else:
        weights, mask = _decoupled(config, weights, mask, log_probs)

    # A rejected or non-finite step gets ratio 1 before any arithmetic: a NaN behind a mask would
    # poison the gradient.
    current = torch.where(mask, log_probs, log_probs.detach().nan_to_num())
    old = torch.where(mask & old_log_probs.isfinite(), old_log_probs.detach(), current.detach())
    loss_BT, clipped_BT = LOSSES[config.policy_loss](current, old, advantage, clip_range=clip_range)
    weighted_BT = loss_BT * weights.to(loss_BT.dtype)
    numerator = torch.where(mask, weighted_BT, 0.0).sum()
    accepted = mask.sum()
    steps = torch.ones_like(mask).sum()
    log_ratio_BT = current.detach() - old
    terms = {
        "clipped": clipped_BT,
        "kl": -log_ratio_BT,
        "ratio": policy_ratio(current.detach(), old),
    }
    denominator = steps
    if config.rejection_normalizer == "kept":
        denominator = accepted
    sums = {name: torch.where(mask, value, 0.0).sum() for name, value in terms.items()}
    return DiffusionLoss(
        # Without an accepted step the numerator is 0, and 0 / 1 has the gradient 0.
        loss=numerator / denominator.clamp_min(1),
        numerator=numerator,
        denominator=denominator,
        accepted_steps=accepted,
        steps=steps,
        sums=sums,
        statistics=statistics,
    )


def _per_step(advantages: Tensor, log_probs: Tensor) -> Tensor:
    """Returns the advantage of every step, in the shape of the log-probs."""
    if advantages.shape == log_probs.shape:
        return advantages.detach()
    if advantages.shape != log_probs.shape[:1]:
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}, log_probs {tuple(log_probs.shape)};"
            f" pass one advantage per step, or one per trajectory, {tuple(log_probs.shape[:1])}."
        )
    return advantages.detach()[:, None].expand_as(log_probs)


def _decoupled(
    config: RolloutCorrectionConfig, weights: Tensor | None, mask: Tensor | None, log_probs: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns given weights and mask with their defaults, or refuses missing weights."""
    if weights is None and config.corrects:
        raise ValueError(
            "weights are missing, but the configuration corrects; pass the result of"
            " correct_trajectories, computed once from the global batch, for the steps at hand."
        )
    if weights is None:
        weights = torch.ones_like(log_probs, dtype=torch.float32)
    check_shapes(STEPS, log_probs=log_probs, weights=weights)
    if mask is None:
        # exp never gives 0 here: log-ratios are clamped, so a weight of 0 marks a rejected step.
        mask = weights > 0
    check_shapes(STEPS, log_probs=log_probs, mask=mask)
    return weights.detach(), mask.bool()
