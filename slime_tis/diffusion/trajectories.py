"""Correction of whole trajectories: bypass, and once per global batch what the loss is weighted with.

A trajectory is a sequence whose tokens are its SDE steps. There is no padding: every step is valid, but for log-probs
that are not finite.

Shapes: suffix _BT is [B, T] of B trajectories with T steps, or [B] where there is one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.correction import THIS_CALL, Correction, GlobalBatch, RolloutCorrectionConfig, correct
from slime_tis.diffusion.sde import at_least_float32
from slime_tis.diffusion.statistics import StepStatistics, reports_weights, step_statistics, weight_report


@dataclass(frozen=True)
class TrajectoryCorrection:
    """What to multiply into the loss of each step, and what was measured. Nothing carries a gradient."""

    weights: Tensor
    """[B, T] or [B] float32 importance weights, 1 where IS is off or only reported."""
    mask: Tensor
    """Of the same shape, bool: True where the step is accepted."""
    statistics: StepStatistics
    """To be merged over micro-batches and ranks, then read with `statistics.metrics()`."""
    global_batch: GlobalBatch
    """As in the core's `Correction`."""

    @property
    def folded(self) -> Tensor:
        """weights × mask: one factor per step. An accepted step has a positive one, so nothing is lost by folding."""
        return self.weights * self.mask


def apply_bypass_mode(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch with log π_old := log π_rollout: the forward pass that recomputes log π_old is saved.

    Args:
        batch: With `rollout_log_probs`, [B, T] or [B].

    Returns:
        A batch of the same tensors, with the rollout's log-probs as `old_log_probs`.

    Raises:
        ValueError: if the rollout log-probs are missing.
    """
    rollout = batch.get("rollout_log_probs")
    if rollout is None:
        raise ValueError(
            f"--use-rollout-logprobs needs rollout_log_probs, but the batch has {', '.join(batch) or 'nothing'}; "
            f"have the rollout engine return the log-prob of every SDE step, or remove the flag."
        )
    return {**batch, "old_log_probs": rollout}


def correct_trajectories(
    config: RolloutCorrectionConfig,
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    *,
    timesteps: Tensor | None = None,
    latent_dims: int = 1,
    global_batch: GlobalBatch = THIS_CALL,
) -> TrajectoryCorrection:
    """Weights and mask of every step of a batch of trajectories, with all levels, modes and criteria of the core.

        Δ_t = D·(log π_train − log π_rollout)(t);   weights and mask as `slime_tis.correct` makes them of Δ

    Decoupled, π_train is π_old, and this is called once per global batch: levels, batch normalisation and trimming
    are the whole batch's. In bypass mode the loss calls it, with π_θ; under a clipped loss, whose ratio is the
    importance weight, the weights are then only measured, as `--tis-level`, `--tis-mode` and the bounds say.

    Args:
        config: What to correct and how.
        train_log_probs: log π_train, [B, T], or [B] for a single step; every level is then the token's.
        rollout_log_probs: log π_rollout, of the same shape.
        timesteps: Of the steps, as the scheduler counts them: of the same shape, or [T] or 0-dim where all
            trajectories share theirs. Adds the mismatch by timestep to what is measured, and a synchronisation
            with the host, which is what finding the different ones takes.
        latent_dims: D, where the log-probs are means over D latent dimensions and bounds are to be on the ratio of
            the sum; 1 takes them as they are.
        global_batch: As in `slime_tis.correct`: what is known of it where micro-batches are corrected one by one, and
            the data-parallel ranks that share it.

    Raises:
        ValueError: if the shapes differ or are neither [B, T] nor [B], naming both.
    """
    check_shapes(train_log_probs, rollout_log_probs, "train_log_probs", "rollout_log_probs")
    if config.divergence_mask is not None:
        raise ValueError("divergence_mask compares probabilities, but an SDE step has a density; remove it.")
    train, rollout = (_as_sequences(x, latent_dims) for x in (train_log_probs, rollout_log_probs))
    every_step = torch.ones_like(train, dtype=torch.bool)
    found = correct(
        config,
        train,
        rollout,
        every_step,
        global_batch=global_batch,
    )
    reported: Correction[Tensor] | None = None
    if reports_weights(config):
        reported = correct(weight_report(config), train, rollout, every_step)
    shape = train_log_probs.shape
    steps = None if timesteps is None else _as_steps(timesteps, shape)
    statistics = step_statistics(found, reported, train, rollout, steps)
    return TrajectoryCorrection(
        weights=found.weights.view(shape),
        mask=found.mask.view(shape),
        statistics=statistics,
        global_batch=found.global_batch,
    )


def check_shapes(x: Tensor, other: Tensor, name: str, other_name: str) -> None:
    """Refuses two tensors that are not of one shape, [B, T] or [B]."""
    if x.shape != other.shape or x.dim() not in (1, 2):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, {other_name} {tuple(other.shape)}; pass two tensors of one shape, "
            f"[B, steps], or [B] for one step."
        )


def _as_sequences(log_probs_BT: Tensor, latent_dims: int) -> Tensor:
    """[B, T], detached, in float32 at least, as sums over latent dimensions."""
    log_probs = at_least_float32(log_probs_BT.detach())
    return (log_probs if log_probs.dim() == 2 else log_probs[:, None]) * latent_dims


def _as_steps(timesteps: Tensor, shape: torch.Size) -> Tensor:
    """The timestep of every step, [B, T] or [B]."""
    shared = timesteps.shape == shape[1:]  # [T] where there are T of them, 0-dim where there is one
    if timesteps.shape != shape and not shared:
        raise ValueError(
            f"timesteps has shape {tuple(timesteps.shape)}, train_log_probs {tuple(shape)}; pass the timestep of every "
            f"step, or of the steps that all trajectories share, {tuple(shape[1:])}."
        )
    return timesteps.expand(shape)
