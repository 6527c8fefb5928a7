"""Trajectories of the SDE sampler with their log-probs, and images of the ODE sampler.

Shapes: suffix _B is per trajectory, _BP is [B, 64 pixels], _BTP is [B, T, 64 pixels], _BT is [B, T]
of T steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from examples.diffusion_digits.config import PIXELS, DigitsConfig
from examples.diffusion_digits.model import VelocityModel
from slime_tis.diffusion import gaussian_log_prob, sde_step

ODE_STEPS = 20


@dataclass(frozen=True)
class Trajectories:
    """What the sampling copy did."""

    digits_B: Tensor
    """The digits asked for."""
    latents_BTP: Tensor
    """[B, T + 1, P]: x at every time, from noise to image."""
    rollout_log_probs_BT: Tensor
    """log π_rollout of every step, means over pixels."""

    @property
    def images_BP(self) -> Tensor:
        """Where the trajectories end."""
        return self.latents_BTP[:, -1]

    def of(self, index: Tensor) -> Trajectories:
        """Some of the trajectories."""
        return Trajectories(
            self.digits_B[index], self.latents_BTP[index], self.rollout_log_probs_BT[index]
        )


def schedule(steps: int) -> Tensor:
    """[T + 1] times, from 1 down to 0."""
    return torch.linspace(1.0, 0.0, steps + 1)


@torch.no_grad()
def sample_trajectories(
    sampler: VelocityModel, digits_B: Tensor, config: DigitsConfig, generator: torch.Generator
) -> Trajectories:
    """Samples by the SDE; x and log-probs are float32 for every precision of the sampler."""
    times = schedule(config.sde_steps)
    latents, log_probs = [torch.randn(len(digits_B), PIXELS, generator=generator)], []
    for time, next_time in pairwise(times):
        mean, std = _step(
            sampler, latents[-1], time.expand(len(digits_B)), next_time, digits_B, config
        )
        latents.append(mean + std * torch.randn(mean.shape, generator=generator))
        log_probs.append(gaussian_log_prob(latents[-1], mean, std))
    return Trajectories(digits_B, torch.stack(latents, 1), torch.stack(log_probs, 1))


def trajectory_log_probs(
    model: VelocityModel, trajectories: Trajectories, config: DigitsConfig
) -> Tensor:
    """Returns [B, T] log-probs of the sampled steps under a model, as means over pixels.

    One forward pass has all steps.
    """
    times, (batch, steps) = schedule(config.sde_steps), trajectories.rollout_log_probs_BT.shape
    before, after = (
        trajectories.latents_BTP[:, :-1].flatten(0, 1),
        trajectories.latents_BTP[:, 1:].flatten(0, 1),
    )
    digits = trajectories.digits_B.repeat_interleave(steps)
    mean, std = _step(
        model, before, times[:-1].repeat(batch), times[1:].repeat(batch), digits, config
    )
    return gaussian_log_prob(after, mean, std).view(batch, steps)


def _step(
    model: VelocityModel,
    sample_BP: Tensor,
    time_B: Tensor,
    next_time: Tensor,
    digits_B: Tensor,
    config: DigitsConfig,
) -> tuple[Tensor, Tensor]:
    velocity = model(sample_BP, time_B, digits_B)
    next_time_B = next_time.expand(len(time_B))
    ceiling = 1.0 - 1.0 / config.sde_steps  # the second time of the schedule, as in FlowGRPO
    return sde_step(
        velocity, sample_BP, time_B, next_time_B, noise_level=config.noise_level, ceiling=ceiling
    )


@torch.no_grad()
def sample_images(model: VelocityModel, digits_B: Tensor, seed: int) -> Tensor:
    """[B, P] images by the ODE, from noise that depends on the seed alone."""
    image = torch.randn(len(digits_B), PIXELS, generator=torch.Generator().manual_seed(seed))
    times = schedule(ODE_STEPS)
    for time, next_time in pairwise(times):
        image = image + (next_time - time) * model(image, time.expand(len(digits_B)), digits_B)
    return image
