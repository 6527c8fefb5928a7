"""SDE steps and their log-probs: a step by hand, torch.distributions, and the marginals of the ODE and its SDE."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis.diffusion import gaussian_log_prob, sde_step

DOUBLE = torch.float64


def column(*values):
    return torch.tensor(values, dtype=DOUBLE)[:, None]


def test_a_step_by_hand():
    """σ² = 1·0.5/0.5 = 1; drift −1 + 1/(2·0.5)·(2 − 0.5) = 0.5; Δ = −0.25; a second element with v = 0."""
    mean, std = sde_step(column(-1.0, 0.0), column(2.0, 1.0), 0.5, 0.25, noise_level=1.0, ceiling=0.9)
    assert mean.tolist() == [[1.875], [0.75]] and std.item() == 0.5


def test_the_first_step_takes_the_ceiling():
    """At t = 1 the drift is v + σ²/2·x with σ² = 0.7²/(1 − 0.8) = 2.45, and s² = 2.45·0.2."""
    mean, std = sde_step(column(3.0), column(2.0), 1.0, 0.8, noise_level=0.7, ceiling=0.8)
    assert mean.item() == pytest.approx(2 - 0.2 * (3 + 2.45), abs=1e-12)
    assert std.item() == pytest.approx(math.sqrt(2.45 * 0.2), abs=1e-12)


def test_without_noise_it_is_the_ode():
    velocity, sample = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
    mean, std = sde_step(velocity, sample, 0.75, 0.5, noise_level=0.0, ceiling=0.9)
    assert torch.equal(mean, sample - 0.25 * velocity) and std.item() == 0.0


def test_times_per_trajectory_are_those_of_each():
    generator = torch.Generator().manual_seed(0)
    velocity, sample = (torch.randn(3, 5, 4, generator=generator, dtype=DOUBLE) for _ in range(2))
    times, next_times = torch.tensor([1.0, 0.6, 0.1], dtype=DOUBLE), torch.tensor([0.9, 0.3, 0.0], dtype=DOUBLE)
    means, stds = sde_step(velocity, sample, times, next_times, noise_level=0.7, ceiling=0.9)
    assert stds.shape == (3, 1, 1)
    for i in range(3):
        alone = sde_step(
            velocity[i : i + 1], sample[i : i + 1], times[i].item(), next_times[i].item(), noise_level=0.7, ceiling=0.9
        )
        torch.testing.assert_close(means[i : i + 1], alone[0], rtol=0, atol=0)
        torch.testing.assert_close(stds[i].squeeze(), alone[1], rtol=0, atol=0)
    whole = gaussian_log_prob(sample, means, stds, reduction="sum")
    assert whole[1].item() == gaussian_log_prob(sample[1:2], means[1:2], stds[1].item(), reduction="sum").item()


@settings(max_examples=100)
@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(1e-3, 3), st.integers(1, 5), st.integers(1, 4))
def test_log_probs_are_those_of_torch(x, mean, std, batch, width):
    generator = torch.Generator().manual_seed(batch)
    means = mean + torch.randn(batch, width, 2, generator=generator, dtype=DOUBLE)
    samples = x + torch.randn(batch, width, 2, generator=generator, dtype=DOUBLE)
    elementwise = torch.distributions.Normal(means, std).log_prob(samples)
    whole = torch.distributions.Independent(torch.distributions.Normal(means, std), 2).log_prob(samples)
    found = gaussian_log_prob(samples, means, std)
    torch.testing.assert_close(found, elementwise.mean((1, 2)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gaussian_log_prob(samples, means, std, reduction="sum"), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found * 2 * width, whole, rtol=1e-12, atol=1e-12)


def test_low_precision_velocities_are_stepped_in_float32():
    velocity = torch.tensor([[0.3, -0.2]], dtype=torch.bfloat16)
    sample = torch.tensor([[1.001, 2.003]])
    mean, std = sde_step(velocity, sample, 0.5, 0.4, noise_level=0.7, ceiling=0.9)
    assert mean.dtype == std.dtype == torch.float32
    assert torch.equal(mean, sde_step(velocity.float(), sample, 0.5, 0.4, noise_level=0.7, ceiling=0.9)[0])
    assert gaussian_log_prob(sample, mean.bfloat16(), std).dtype == torch.float32


class GaussianFlow:
    """The exact flow of data N(m, s²): marginal N((1−t)m, V), V = (1−t)²s² + t², velocity affine in x."""

    def __init__(self, mean, std):
        self.mean, self.std = mean, std

    def variance(self, t):
        return (1 - t) ** 2 * self.std**2 + t**2

    def velocity(self, x, t):
        """E[ε − x_0 | x_t = x]."""
        gain = (t - (1 - t) * self.std**2) / self.variance(t)
        return gain * (x - (1 - t) * self.mean) - self.mean

    def step(self, mean, variance, t, next_t, a, ceiling):
        """Mean and variance after a step, exactly: the step is affine, so two points give its slope."""
        points = column(mean, mean + 1)
        moved, std = sde_step(self.velocity(points, t), points, t, next_t, noise_level=a, ceiling=ceiling)
        slope = (moved[1] - moved[0]).item()
        return moved[0].item(), slope**2 * variance + std.item() ** 2


@settings(max_examples=200)
@given(st.floats(0.05, 0.9), st.floats(0.1, 1.5), st.floats(-2, 2), st.floats(0.3, 2.0))
def test_a_small_step_keeps_the_marginal_whatever_the_noise(t, a, m, s):
    """Of ODE and SDE alike: what a step of size h does to mean and variance differs from the marginal by O(h²)."""
    flow, h = GaussianFlow(m, s), 1e-6
    start, end = ((1 - t) * m, flow.variance(t)), ((1 - t + h) * m, flow.variance(t - h))
    for noise in (0.0, a):
        mean, variance = flow.step(*start, t, t - h, noise, ceiling=0.95)
        assert abs(mean - end[0]) < 1e3 * h * h and abs(variance - end[1]) < 1e4 * h * h


def a_step(velocity, sample, time=0.5, a=0.7, ceiling=0.9):
    return sde_step(velocity, sample, time, 0.4, noise_level=a, ceiling=ceiling)


ROWS = torch.zeros(2, 3)
REFUSED = {
    "velocity": (lambda: a_step(ROWS, torch.zeros(2, 4)), r"velocity has shape \(2, 3\), sample \(2, 4\)"),
    "one dimension": (lambda: a_step(ROWS[:, 0], ROWS[:, 0]), "pass two tensors of one shape"),
    "time": (lambda: a_step(ROWS, ROWS, torch.ones(3)), r"time has shape \(3,\)"),
    "ceiling": (lambda: a_step(ROWS, ROWS, ceiling=1.0), "ceiling is 1.0"),
    "noise level": (lambda: a_step(ROWS, ROWS, a=-1.0), "noise_level is -1.0"),
    "next sample": (lambda: gaussian_log_prob(ROWS, torch.zeros(3, 3), 1.0), r"next_sample has shape \(2, 3\)"),
    "reduction": (lambda: gaussian_log_prob(ROWS, ROWS, 1.0, reduction="max"), "reduction is 'max'"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
