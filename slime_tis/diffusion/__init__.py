"""Rollout correction for diffusion and flow models: trajectories of SDE steps, log-probs of shape [B, steps]."""

from slime_tis.diffusion.losses import DiffusionLoss, diffusion_loss, flow_grpo, policy_gradient
from slime_tis.diffusion.sde import gaussian_log_prob, sde_step
from slime_tis.diffusion.statistics import StepStatistics, step_metrics
from slime_tis.diffusion.trajectories import TrajectoryCorrection, apply_bypass_mode, correct_trajectories
from slime_tis.diffusion.watch import Watch

__all__ = [
    "DiffusionLoss",
    "StepStatistics",
    "TrajectoryCorrection",
    "Watch",
    "apply_bypass_mode",
    "correct_trajectories",
    "diffusion_loss",
    "flow_grpo",
    "gaussian_log_prob",
    "policy_gradient",
    "sde_step",
    "step_metrics",
]
