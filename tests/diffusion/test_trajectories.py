"""SDE steps, their log-probs, and the correction of trajectories of steps."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis import RolloutCorrectionConfig
from slime_tis.diffusion import (
    TrajectoryCorrection,
    apply_bypass_mode,
    correct_trajectories,
    gaussian_log_prob,
    sde_step,
)
from tests.correction.strategies import configurations
from tests.diffusion.expected import expected_metrics, expected_trajectories
from tests.diffusion.strategies import Rows, trajectories

LN2 = math.log(2)
TIMES = [900.0, 600.0, 300.0, 0.125]


def tensors(*tables: Rows) -> list[torch.Tensor]:
    return [torch.tensor(table, dtype=torch.float64) for table in tables]


def times_of(batch: int, steps: int) -> Rows:
    """Timesteps [B][T]: windows that differ from trajectory to trajectory."""
    return [[TIMES[(i + t) % len(TIMES)] for t in range(steps)] for i in range(batch)]


def timed_correction(
    config: RolloutCorrectionConfig, batch: tuple[Rows, Rows]
) -> tuple[TrajectoryCorrection, Rows]:
    """The correction of a batch with timesteps, and the timesteps."""
    times = times_of(len(batch[0]), len(batch[0][0]))
    return correct_trajectories(config, *tensors(*batch), timesteps=torch.tensor(times)), times


def assert_rows(rows: torch.Tensor, expected: Rows) -> None:
    for row, expected_row in zip(rows.tolist(), expected, strict=True):
        assert row == pytest.approx(expected_row, rel=2e-6, abs=1e-7)


@settings(max_examples=150)
@given(configurations(), trajectories())
def test_weights_equal_plain_loops(config, batch):
    oracle = expected_trajectories(config, *batch)
    corrected, _ = timed_correction(config, batch)
    assert corrected.weights.dtype == torch.float32
    assert corrected.mask.tolist() == oracle.mask
    assert_rows(corrected.weights, oracle.weights)


@settings(max_examples=50)
@given(configurations(), trajectories())
def test_folded_weights_are_0_at_rejected_steps(config, batch):
    corrected, _ = timed_correction(config, batch)
    torch.testing.assert_close(corrected.folded, corrected.weights * corrected.mask)
    assert ((corrected.folded > 0) == corrected.mask).all()


@settings(max_examples=150)
@given(configurations(), trajectories())
def test_metrics_equal_plain_loops(config, batch):
    corrected, times = timed_correction(config, batch)
    expected = expected_metrics(config, *batch, times)
    assert corrected.statistics.metrics() == pytest.approx(expected, rel=1e-6, abs=1e-7)


@settings(max_examples=80)
@given(configurations(), trajectories(wild=True))
def test_weights_of_non_finite_trajectories_are_finite(config, batch):
    corrected, _ = timed_correction(config, batch)
    assert corrected.mask.tolist() == expected_trajectories(config, *batch).mask
    assert corrected.weights.isfinite().all()
    assert not corrected.weights.requires_grad


@settings(max_examples=80)
@given(configurations(), trajectories(wild=True))
def test_metrics_of_non_finite_trajectories_are_finite(config, batch):
    corrected, times = timed_correction(config, batch)
    metrics = corrected.statistics.metrics()
    assert all(math.isfinite(value) for value in metrics.values())
    expected = expected_metrics(config, *batch, times)
    differences = {name: value for name, value in expected.items() if "logprob_abs" in name}
    measured = {name: metrics[name] for name in differences}
    assert measured == pytest.approx(differences, rel=1e-6, abs=1e-7)


@settings(max_examples=100)
@given(configurations(), trajectories(), st.integers(0, 5))
def test_micro_batches_merge(config, batch, cut):
    train, rollout = tensors(*batch)
    times = torch.tensor(times_of(*train.shape))
    complete = correct_trajectories(config, train, rollout, timesteps=times)
    parts = []
    for rows in (slice(0, cut), slice(cut, None)):
        part = correct_trajectories(
            config,
            train[rows],
            rollout[rows],
            timesteps=times[rows],
            global_batch=complete.global_batch,
        )
        parts.append(part)
    weights = torch.cat([part.weights for part in parts])
    torch.testing.assert_close(weights, complete.weights, rtol=1e-6, atol=1e-6)
    assert torch.equal(torch.cat([part.mask for part in parts]), complete.mask)
    # ranks send their statistics pickled
    first, second = (pickle.loads(pickle.dumps(part.statistics)) for part in parts)
    merged = first.merge(second).metrics()
    assert merged == pytest.approx(complete.statistics.metrics(), rel=1e-6, abs=1e-6)


@settings(max_examples=60)
@given(configurations(), trajectories())
def test_one_step_is_a_column(config, batch):
    """[B] is [B, 1]: each step of each trajectory is a sequence of its own, and every level is the
    token's."""
    train, rollout = (table[:, 0] for table in tensors(*batch))
    flat = correct_trajectories(config, train, rollout, timesteps=torch.tensor(600.0))
    column = correct_trajectories(
        config, train[:, None], rollout[:, None], timesteps=torch.tensor([600.0])
    )
    assert flat.weights.shape == train.shape
    assert torch.equal(flat.weights, column.weights[:, 0])
    assert torch.equal(flat.mask, column.mask[:, 0])
    assert flat.statistics.metrics() == column.statistics.metrics()


# 16 latent dimensions: the ratio of the means is 1.02 at the first step, and of the sums 1.02^16.
BOUNDED = RolloutCorrectionConfig(
    use_tis=True, tis_upper_bound=1.2, use_rs=True, rs_upper_bound=1.5
)
TRAIN = torch.full((2, 2), -1.0, dtype=torch.float64)
ROLLOUT = TRAIN - torch.tensor([[1.02, 1.001], [1.03, 1.002]], dtype=torch.float64).log()


def test_means_over_latent_dimensions_are_within_the_bounds():
    corrected = correct_trajectories(BOUNDED, TRAIN, ROLLOUT)
    assert corrected.weights.flatten().tolist() == pytest.approx([1.02, 1.001, 1.03, 1.002])
    assert corrected.mask.all()


def test_sums_over_latent_dimensions_are_bounded():
    corrected = correct_trajectories(BOUNDED, TRAIN, ROLLOUT, latent_dims=16)
    expected = [1.2, 1.001**16, 1.2, 1.002**16]
    assert corrected.weights.flatten().tolist() == pytest.approx(expected)
    assert corrected.mask.tolist() == [[True, True], [False, True]]


def test_latent_dims_multiply_the_log_probs():
    sums = correct_trajectories(BOUNDED, TRAIN, ROLLOUT, latent_dims=16)
    multiplied = correct_trajectories(BOUNDED, 16 * TRAIN, 16 * ROLLOUT)
    assert torch.equal(multiplied.weights, sums.weights)
    assert torch.equal(multiplied.mask, sums.mask)


def test_metrics_are_those_of_the_sums():
    corrected = correct_trajectories(BOUNDED, TRAIN, ROLLOUT, latent_dims=16)
    metrics = corrected.statistics.metrics()
    largest = metrics["rollout_corr/logprob_abs_diff_max"]
    assert largest == pytest.approx(16 * math.log(1.03), rel=1e-6)
    assert metrics["rollout_corr/rejected_sequence_fraction"] == 0.5


def test_bypass_takes_the_rollout_for_the_old_policy():
    batch = {"rollout_log_probs": torch.tensor([[-1.0]]), "old_log_probs": torch.tensor([[-2.0]])}
    bypassed = apply_bypass_mode(batch)
    assert bypassed["old_log_probs"] is batch["rollout_log_probs"]


def test_bypass_leaves_the_batch_that_was_passed():
    batch = {"rollout_log_probs": torch.tensor([[-1.0]]), "old_log_probs": torch.tensor([[-2.0]])}
    apply_bypass_mode(batch)
    assert batch["old_log_probs"].item() == -2.0


def test_bypass_without_rollout_log_probs_is_refused():
    message = "--use-rollout-logprobs needs rollout_log_probs, but the batch has latents;"
    with pytest.raises(ValueError, match=message):
        apply_bypass_mode({"latents": torch.zeros(1)})


@pytest.mark.parametrize("shape", [(0,), (0, 3)], ids=["steps", "trajectories"])
def test_an_empty_batch(shape):
    config = RolloutCorrectionConfig(use_tis=True, use_rs=True)
    none = torch.zeros(shape)
    corrected = correct_trajectories(config, none, none, timesteps=none)
    assert corrected.folded.shape == shape
    assert corrected.statistics.metrics() == {}


DISAGREEING = {
    "steps": ((4, 3), (4, 2), None),
    "dimensions": ((4,), (4, 1), None),
    "three dimensions": ((4, 3, 2), (4, 3, 2), None),
    "scalars": ((), (), None),
    "timesteps of [B, steps]": ((4, 3), (4, 3), (4,)),
    "timesteps of [B]": ((4,), (4,), (3,)),
}


@pytest.mark.parametrize(("train", "rollout", "timesteps"), DISAGREEING.values(), ids=DISAGREEING)
def test_shapes_that_disagree_are_refused(train, rollout, timesteps):
    times = None if timesteps is None else torch.zeros(timesteps)
    config = RolloutCorrectionConfig(use_tis=True)
    with pytest.raises(ValueError, match=r"has shape .*; pass"):
        correct_trajectories(config, torch.zeros(train), torch.zeros(rollout), timesteps=times)


def test_decoupled_metrics_by_hand():
    """Token weights 2, 1, 1/4, 4 bounded to 2; the veto takes the second trajectory."""
    train = torch.tensor([[-1.0, -2.0], [-1.0, -3.0]], dtype=torch.float64)
    rollout = train + torch.tensor([[-LN2, 0.0], [2 * LN2, -2 * LN2]], dtype=torch.float64)
    config = RolloutCorrectionConfig(use_tis=True, rs_veto_threshold=0.3)
    timesteps = torch.tensor([[900.0, 300.0], [900.0, 600.0]])
    corrected = correct_trajectories(config, train, rollout, timesteps=timesteps)
    expected = {
        "gradient_kept_fraction": 0.5,
        "mismatch_kl": -LN2 / 4,
        "mis_ratio_mean_after_mis": 5.25 / 4,
        "mis_catastrophic_seq_fraction": 0.5,
        "logprob_abs_diff_mean": 5 * LN2 / 4,
        "logprob_abs_diff_max": 2 * LN2,
        "logprob_abs_diff/ts_300": 0.0,
        "logprob_abs_diff/ts_600": 2 * LN2,
        "logprob_abs_diff/ts_900": 1.5 * LN2,
        "rejected_sequence_fraction": 0.5,
    }
    metrics = corrected.statistics.metrics()
    measured = {name: metrics[f"rollout_corr/{name}"] for name in expected}
    assert measured == pytest.approx(expected, abs=1e-7)


DOUBLE = torch.float64


def column(*values: float) -> torch.Tensor:
    """[B, 1] in float64."""
    return torch.tensor(values, dtype=DOUBLE)[:, None]


def test_a_step_by_hand():
    # σ² = 1·0.5/0.5 = 1; drift −1 + 1/(2·0.5)·(2 − 0.5) = 0.5; Δ = −0.25; the second element has a
    # velocity of 0
    mean, std = sde_step(
        column(-1.0, 0.0), column(2.0, 1.0), 0.5, 0.25, noise_level=1.0, ceiling=0.9
    )
    assert mean.tolist() == [[1.875], [0.75]]
    assert std.item() == 0.5


def test_the_first_step_by_hand():
    # At t = 1 the drift is v + σ²/2·x with σ² = 0.7²/(1 − 0.8) = 2.45, and s² = 2.45·0.2.
    mean, std = sde_step(column(3.0), column(2.0), 1.0, 0.8, noise_level=0.7, ceiling=0.8)
    assert mean.item() == pytest.approx(2 - 0.2 * (3 + 2.45), abs=1e-12)
    assert std.item() == pytest.approx(math.sqrt(2.45 * 0.2), abs=1e-12)


def test_a_step_without_noise_is_eulers():
    velocity = torch.randn(4, 3, 2)
    sample = torch.randn(4, 3, 2)
    mean, std = sde_step(velocity, sample, 0.75, 0.5, noise_level=0.0, ceiling=0.9)
    assert torch.equal(mean, sample - 0.25 * velocity)
    assert std.item() == 0.0


def test_each_trajectory_has_its_own_times():
    generator = torch.Generator().manual_seed(0)
    velocity = torch.randn(3, 5, 4, generator=generator, dtype=DOUBLE)
    sample = torch.randn(3, 5, 4, generator=generator, dtype=DOUBLE)
    times = torch.tensor([1.0, 0.6, 0.1], dtype=DOUBLE)
    next_times = torch.tensor([0.9, 0.3, 0.0], dtype=DOUBLE)
    means, stds = sde_step(velocity, sample, times, next_times, noise_level=0.7, ceiling=0.9)
    assert stds.shape == (3, 1, 1)
    for i in range(3):
        mean, std = sde_step(
            velocity[i : i + 1],
            sample[i : i + 1],
            times[i].item(),
            next_times[i].item(),
            noise_level=0.7,
            ceiling=0.9,
        )
        torch.testing.assert_close(means[i : i + 1], mean, rtol=0, atol=0)
        torch.testing.assert_close(stds[i].squeeze(), std, rtol=0, atol=0)


def test_each_trajectory_has_the_log_prob_of_its_std():
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(3, 5, 4, generator=generator, dtype=DOUBLE)
    means = torch.randn(3, 5, 4, generator=generator, dtype=DOUBLE)
    stds = torch.tensor([0.1, 0.5, 2.0], dtype=DOUBLE).view(3, 1, 1)
    log_probs = gaussian_log_prob(sample, means, stds, reduction="sum")
    alone = gaussian_log_prob(sample[1:2], means[1:2], 0.5, reduction="sum")
    assert log_probs[1].item() == alone.item()


@settings(max_examples=100)
@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(1e-3, 3), st.integers(1, 5), st.integers(1, 4))
def test_log_probs_are_those_of_torch(x, mean, std, batch, width):
    generator = torch.Generator().manual_seed(batch)
    means = mean + torch.randn(batch, width, 2, generator=generator, dtype=DOUBLE)
    samples = x + torch.randn(batch, width, 2, generator=generator, dtype=DOUBLE)
    elementwise = torch.distributions.Normal(means, std).log_prob(samples)
    mean_log_probs = gaussian_log_prob(samples, means, std)
    sums = gaussian_log_prob(samples, means, std, reduction="sum")
    expected = elementwise.mean((1, 2))
    torch.testing.assert_close(mean_log_probs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums, elementwise.sum((1, 2)), rtol=1e-12, atol=1e-12)


def test_low_precision_velocities_are_stepped_in_float32():
    velocity = torch.tensor([[0.3, -0.2]], dtype=torch.bfloat16)
    sample = torch.tensor([[1.001, 2.003]])
    mean, std = sde_step(velocity, sample, 0.5, 0.4, noise_level=0.7, ceiling=0.9)
    expected, _ = sde_step(velocity.float(), sample, 0.5, 0.4, noise_level=0.7, ceiling=0.9)
    assert mean.dtype == std.dtype == torch.float32
    assert torch.equal(mean, expected)


def test_log_probs_of_low_precision_means_are_float32():
    sample = torch.tensor([[1.001, 2.003]])
    assert gaussian_log_prob(sample, sample.bfloat16(), 0.5).dtype == torch.float32


class GaussianFlow:
    """The exact flow of data N(m, s²): marginal N((1−t)m, V), V = (1−t)²s² + t², velocity affine in
    x."""

    def __init__(self, mean: float, std: float) -> None:
        self.mean = mean
        self.std = std

    def variance(self, t: float) -> float:
        return (1 - t) ** 2 * self.std**2 + t**2

    def velocity(self, x: torch.Tensor, t: float) -> torch.Tensor:
        """E[ε − x_0 | x_t = x]."""
        gain = (t - (1 - t) * self.std**2) / self.variance(t)
        return gain * (x - (1 - t) * self.mean) - self.mean

    def step(self, t: float, size: float, noise_level: float) -> tuple[float, float]:
        """Mean and variance after a step from the marginal at t.

        The step is affine, so two points give its slope exactly.
        """
        start = (1 - t) * self.mean
        points = column(start, start + 1)
        moved, std = sde_step(
            self.velocity(points, t), points, t, t - size, noise_level=noise_level, ceiling=0.95
        )
        slope = (moved[1] - moved[0]).item()
        return moved[0].item(), slope**2 * self.variance(t) + std.item() ** 2


@settings(max_examples=200)
@given(
    st.floats(0.05, 0.9),
    st.just(0.0) | st.floats(0.1, 1.5),
    st.floats(-2, 2),
    st.floats(0.3, 2.0),
)
def test_a_small_step_keeps_the_marginal(t, noise_level, m, s):
    """For ODE and SDE alike: mean and variance after a step of size h differ from the marginal by
    O(h²)."""
    flow = GaussianFlow(m, s)
    h = 1e-6
    mean, variance = flow.step(t, h, noise_level)
    assert abs(mean - (1 - t + h) * m) < 1e3 * h * h
    assert abs(variance - flow.variance(t - h)) < 1e4 * h * h


def step_of(
    velocity: torch.Tensor,
    sample: torch.Tensor,
    time: float | torch.Tensor = 0.5,
    noise_level: float = 0.7,
    ceiling: float = 0.9,
) -> tuple[torch.Tensor, torch.Tensor]:
    return sde_step(velocity, sample, time, 0.4, noise_level=noise_level, ceiling=ceiling)


ROWS = torch.zeros(2, 3)
REFUSED = {
    "velocity": (
        lambda: step_of(ROWS, torch.zeros(2, 4)),
        r"velocity has shape \(2, 3\), sample \(2, 4\)",
    ),
    "one dimension": (lambda: step_of(ROWS[:, 0], ROWS[:, 0]), "pass two tensors of one shape"),
    "time": (lambda: step_of(ROWS, ROWS, torch.ones(3)), r"time has shape \(3,\)"),
    "ceiling": (lambda: step_of(ROWS, ROWS, ceiling=1.0), "ceiling is 1.0"),
    "noise level": (lambda: step_of(ROWS, ROWS, noise_level=-1.0), "noise_level is -1.0"),
    "next sample": (
        lambda: gaussian_log_prob(ROWS, torch.zeros(3, 3), 1.0),
        r"next_sample has shape \(2, 3\)",
    ),
    "reduction": (
        lambda: gaussian_log_prob(ROWS, ROWS, 1.0, reduction="max"),  # type: ignore[arg-type]
        "reduction is 'max'",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_impossible_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
