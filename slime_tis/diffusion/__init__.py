"""Rollout correction for diffusion and flow models: SDE steps with log-probs [B, steps]."""

from slime_tis.diffusion.losses import DiffusionLoss, diffusion_loss, flow_grpo, policy_gradient
from slime_tis.diffusion.sde import gaussian_log_prob, sde_step
from slime_tis.diffusion.trajectories import (
    Diagnostics,
    StepStatistics,
    TrajectoryCorrection,
    apply_bypass_mode,
    correct_trajectories,
)

__all__ = [
    "Diagnostics",
    "DiffusionLoss",
    "StepStatistics",
    "TrajectoryCorrection",
    "apply_bypass_mode",
    "correct_trajectories",
    "diffusion_loss",
    "flow_grpo",
    "gaussian_log_prob",
    "policy_gradient",
    "sde_step",
]
