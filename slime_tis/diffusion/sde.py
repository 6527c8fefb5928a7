"""Sampling a flow model by an SDE instead of its ODE, so that every step has a log-prob.

Flow matching interpolates x_t = (1 − t)·x_0 + t·ε between data (t = 0) and noise (t = 1), and the
model predicts the velocity v = ε − x_0. Sampling goes from t = 1 down to t = 0.

Shapes: suffix _BX is [B, *latent dimensions], _B per trajectory; a time is a float for all of them
or [B].
"""

import math
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum"]
STEPS = "[B, steps], or [B] for one step", range(1, 3)
LATENTS = "[B, *latent dimensions]", range(2, 100)
"""Layouts in the words of messages, and their numbers of dimensions."""


def sde_step(
    velocity_BX: Tensor,
    sample_BX: Tensor,
    time: float | Tensor,
    next_time: float | Tensor,
    *,
    noise_level: float,
    ceiling: float,
) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the Gaussian that one step samples x at `next_time` from.

        σ_t = a·√(t / (1 − min(t, ceiling))),   Δ = next_time − t < 0,
        μ = x + [v + σ_t²/(2t)·(x + (1 − t)·v)]·Δ,   s = σ_t·√(−Δ)

    x + (1 − t)·v is the expected noise, and −1/t times that the score: for any σ_t the SDE has the
    marginals of the ODE x + v·Δ, which it is at a = 0. Everything is computed at least in float32,
    for every dtype of the model.

    Source: "Flow-GRPO: Training Flow Matching Models via Online RL", Liu et al.
    (https://arxiv.org/abs/2505.05470), section 4.2. At t = 1 their σ_t is infinite, and their code
    puts the second time of the schedule into 1 − t; that time is the `ceiling` to give for the
    same.

    Args:
        velocity_BX: v of the model at (x, t).
        sample_BX: x at `time`.
        time: t in (0, 1].
        next_time: A time below it, 0 at the last step.
        noise_level: a; 0.7 is customary, 0 is the ODE.
        ceiling: Largest t that 1 − t is taken of, below 1.

    Returns:
        (μ, s): [B, *latent dimensions], and 0-dim or [B, 1, …].

    Raises:
        ValueError: if the shapes differ, the ceiling is not in (0, 1), or the noise level is
            negative.
    """
    check_shapes(LATENTS, velocity=velocity_BX, sample=sample_BX)
    if not 0.0 < ceiling < 1.0:
        raise ValueError(
            f"ceiling is {ceiling}; give a time between 0 and 1, such as the second of the"
            " schedule."
        )
    if noise_level < 0.0:
        raise ValueError(
            f"noise_level is {noise_level}; give 0 for the ODE, or a positive number such as 0.7."
        )
    velocity = at_least_float32(velocity_BX)
    sample = at_least_float32(sample_BX)
    t = _as_latent(time, sample)
    next_t = _as_latent(next_time, sample)
    delta = next_t - t
    # At t = 1 the denominator would be 0; the ceiling keeps it above.
    variance_rate = noise_level**2 * t / (1 - t.clamp(max=ceiling))
    drift = velocity + variance_rate / (2 * t) * (sample + (1 - t) * velocity)
    return sample + drift * delta, (-variance_rate * delta).sqrt()


def gaussian_log_prob(
    next_sample_BX: Tensor, mean_BX: Tensor, std: float | Tensor, *, reduction: Reduction = "mean"
) -> Tensor:
    """log N(x; μ, s²) of the step that was sampled, over all latent dimensions of a trajectory.

        log p_d = −(x_d − μ_d)²/(2s²) − log s − ½·log 2π
        mean: 1/D·Σ_d log p_d,   sum: Σ_d log p_d

    The sum is the log-density of the step. FlowGRPO trains on the mean, the sum divided by D. Its
    ratio is the D-th root of the step's ratio: comparable between image sizes, and close to 1 even
    for distant policies. The corrections take either; `latent_dims=D` converts means to sums.

    Source: as `sde_step`.

    Args:
        next_sample_BX: x that was sampled, without gradient.
        mean_BX: μ, with gradient where the policy is trained.
        std: s above 0; a tensor must broadcast against μ.
        reduction: Over latent dimensions, "mean" or "sum".

    Returns:
        [B].

    Raises:
        ValueError: if the shapes differ, or the reduction is neither of the two.
    """
    check_shapes(LATENTS, next_sample=next_sample_BX, mean=mean_BX)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; choose mean or sum.")
    mean = at_least_float32(mean_BX)
    std = torch.as_tensor(std, dtype=mean.dtype, device=mean.device)
    standard = (next_sample_BX.to(mean.dtype) - mean) / std
    log_prob = -0.5 * standard.square() - std.log() - 0.5 * math.log(2 * math.pi)
    log_prob = log_prob.flatten(1)
    if reduction == "mean":
        return log_prob.mean(1)
    return log_prob.sum(1)


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in float32, or unchanged if it is float32 or float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _as_latent(time: float | Tensor, sample_BX: Tensor) -> Tensor:
    # In the dtype of the sample: times [B] in float64 would make all results float64.
    t = torch.as_tensor(time, dtype=sample_BX.dtype, device=sample_BX.device)
    if t.dim() == 0:
        return t
    if t.shape != sample_BX.shape[:1]:
        raise ValueError(
            f"time has shape {tuple(t.shape)}, sample {tuple(sample_BX.shape)}; pass a float or"
            " [B]."
        )
    latent_dims = sample_BX.dim() - 1
    return t.view(-1, *[1] * latent_dims)


def check_shapes(layout: tuple[str, range], **tensors: Tensor) -> None:
    """Raises a ValueError unless two tensors have one shape, in the layout."""
    (name, x), (other_name, other) = tensors.items()
    words, dimensions = layout
    if x.shape != other.shape or x.dim() not in dimensions:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, {other_name} {tuple(other.shape)}; pass two"
            f" tensors of one shape, {words}."
        )
