"""SDE steps, their log-probs, and the correction of trajectories of steps."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis import RolloutCorrectionConfig
from slime_tis.diffusion import apply_bypass_mode, correct_trajectories, gaussian_log_prob, sde_step
from tests.correction.strategies import configurations
from tests.diffusion.expected import expected_metrics, expected_trajectories
from tests.diffusion.strategies import trajectories

LN2 = math.log(2)
TIMES = [900.0, 600.0, 300.0, 0.125]


def tensors(*tables):
    return [torch.tensor(table, dtype=torch.float64) for table in tables]


def times_of(batch, steps):
    """Windows that differ from trajectory to trajectory."""
    return [[TIMES[(i + t) % len(TIMES)] for t in range(steps)] for i in range(batch)]


@settings(max_examples=250)
@given(configurations(), trajectories())
def test_against_plain_loops(config, batch):
    oracle = expected_trajectories(config, *batch)
    times = times_of(len(batch[0]), len(batch[0][0]))
    found = correct_trajectories(config, *tensors(*batch), timesteps=torch.tensor(times))
    assert found.mask.tolist() == oracle.mask and found.weights.dtype == torch.float32
    for row, expected in zip(found.weights.tolist(), oracle.weights, strict=True):
        assert row == pytest.approx(expected, rel=2e-6, abs=1e-7)
    folded = [
        [w * m for w, m in zip(*pair, strict=True)]
        for pair in zip(oracle.weights, oracle.mask, strict=True)
    ]
    for row, expected in zip(found.folded.tolist(), folded, strict=True):
        assert row == pytest.approx(expected, rel=2e-6, abs=1e-7)
    assert ((found.folded > 0) == found.mask).all()
    assert found.statistics.metrics() == pytest.approx(
        expected_metrics(config, *batch, times), rel=1e-6, abs=1e-7
    )


@settings(max_examples=150)
@given(configurations(), trajectories(wild=True))
def test_what_is_not_finite(config, batch):
    oracle = expected_trajectories(config, *batch)
    times = times_of(len(batch[0]), len(batch[0][0]))
    found = correct_trajectories(config, *tensors(*batch), timesteps=torch.tensor(times))
    assert found.mask.tolist() == oracle.mask
    assert found.weights.isfinite().all() and not found.weights.requires_grad
    values = found.statistics.metrics()
    assert all(map(math.isfinite, values.values()))
    sizes = {
        name: value
        for name, value in expected_metrics(config, *batch, times).items()
        if "logprob_abs" in name
    }
    assert {name: values[name] for name in sizes} == pytest.approx(sizes, rel=1e-6, abs=1e-7)


@settings(max_examples=100)
@given(configurations(), trajectories(), st.integers(0, 5))
def test_micro_batches_merge(config, batch, cut):
    train, rollout = tensors(*batch)
    times = torch.tensor(times_of(*train.shape))
    whole = correct_trajectories(config, train, rollout, timesteps=times)
    parts = [
        correct_trajectories(
            config,
            train[span],
            rollout[span],
            timesteps=times[span],
            global_batch=whole.global_batch,
        )
        for span in (slice(0, cut), slice(cut, None))
    ]
    torch.testing.assert_close(
        torch.cat([part.weights for part in parts]), whole.weights, rtol=1e-6, atol=1e-6
    )
    assert torch.equal(torch.cat([part.mask for part in parts]), whole.mask)
    sent = [pickle.loads(pickle.dumps(part.statistics)) for part in parts]  # as ranks send them
    merged = sent[0].merge(sent[1]).metrics()
    assert merged == pytest.approx(whole.statistics.metrics(), rel=1e-6, abs=1e-6)


@settings(max_examples=60)
@given(configurations(), trajectories())
def test_one_step_is_a_column(config, batch):
    """[B] is [B, 1]: each step of each trajectory is a sequence of its own, and every level is the
    token's."""
    train, rollout = (x[:, 0] for x in tensors(*batch))
    flat = correct_trajectories(config, train, rollout, timesteps=torch.tensor(600.0))
    column = correct_trajectories(
        config, train[:, None], rollout[:, None], timesteps=torch.tensor([600.0])
    )
    assert flat.weights.shape == flat.mask.shape == train.shape
    assert torch.equal(flat.weights, column.weights[:, 0]) and torch.equal(
        flat.mask, column.mask[:, 0]
    )
    assert flat.statistics.metrics() == column.statistics.metrics()


def test_means_over_latent_dimensions_and_their_sums():
    """16 dimensions: the mean's ratio is 1.02, that of the step 1.02^16; bounds act on what is
    asked for."""
    config = RolloutCorrectionConfig(
        use_tis=True, tis_upper_bound=1.2, use_rs=True, rs_upper_bound=1.5
    )
    train = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    rollout = train - torch.tensor([[1.02, 1.001], [1.03, 1.002]], dtype=torch.float64).log()
    means = correct_trajectories(config, train, rollout)
    sums = correct_trajectories(config, train, rollout, latent_dims=16)
    assert means.weights.flatten().tolist() == pytest.approx([1.02, 1.001, 1.03, 1.002])
    assert means.mask.all()
    assert sums.weights.flatten().tolist() == pytest.approx([1.2, 1.001**16, 1.2, 1.002**16])
    assert sums.mask.tolist() == [[True, True], [False, True]]
    same = correct_trajectories(config, 16 * train, 16 * rollout)
    assert torch.equal(same.weights, sums.weights) and torch.equal(same.mask, sums.mask)
    metrics = sums.statistics.metrics()
    assert metrics["rollout_corr/logprob_abs_diff_max"] == pytest.approx(16 * 0.029558802, rel=1e-6)
    assert metrics["rollout_corr/rejected_sequence_fraction"] == 0.5


def test_bypass_takes_the_rollout_for_the_old_policy_and_needs_its_log_probs():
    batch = {"rollout_log_probs": torch.tensor([[-1.0]]), "old_log_probs": torch.tensor([[-2.0]])}
    found = apply_bypass_mode(batch)
    assert found["old_log_probs"] is batch["rollout_log_probs"]
    assert batch["old_log_probs"].item() == -2.0, "the batch that was passed stays as it was"
    with pytest.raises(
        ValueError,
        match="--use-rollout-logprobs needs rollout_log_probs, but the batch has latents;",
    ):
        apply_bypass_mode({"latents": torch.zeros(1)})


def test_an_empty_batch():
    config = RolloutCorrectionConfig(use_tis=True, use_rs=True)
    for shape in ((0,), (0, 3)):
        found = correct_trajectories(
            config, torch.zeros(shape), torch.zeros(shape), timesteps=torch.zeros(shape)
        )
        assert found.folded.shape == shape and found.statistics.metrics() == {}


@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 3), (4, 2)),
        ((4,), (4, 1)),
        ((4, 3, 2), (4, 3, 2)),
        ((), ()),
        ((4, 3), (4, 3), (4,)),
        ((4,), (4,), (3,)),
    ],
    ids=[
        "steps",
        "dimensions",
        "three dimensions",
        "scalars",
        "timesteps of [B, steps]",
        "timesteps of [B]",
    ],
)
def test_shapes_that_disagree(shapes):
    train, rollout, timesteps = (*(torch.zeros(shape) for shape in shapes), None)[:3]
    with pytest.raises(ValueError, match=r"has shape .*; pass"):
        correct_trajectories(
            RolloutCorrectionConfig(use_tis=True), train, rollout, timesteps=timesteps
        )


def test_decoupled_by_hand():
    """Token weights 2, 1, 1/4, 4 bounded to 2; the veto takes the second trajectory."""
    train = torch.tensor([[-1.0, -2.0], [-1.0, -3.0]], dtype=torch.float64)
    rollout = train + torch.tensor([[-LN2, 0.0], [2 * LN2, -2 * LN2]], dtype=torch.float64)
    config = RolloutCorrectionConfig(use_tis=True, rs_veto_threshold=0.3)
    timesteps = torch.tensor([[900.0, 300.0], [900.0, 600.0]])
    found = correct_trajectories(config, train, rollout, timesteps=timesteps).statistics.metrics()
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
    assert {name: found[f"rollout_corr/{name}"] for name in expected} == pytest.approx(
        expected, abs=1e-7
    )


DOUBLE = torch.float64


def column(*values):
    return torch.tensor(values, dtype=DOUBLE)[:, None]


def test_steps_by_hand():
    # σ² = 1·0.5/0.5 = 1; drift −1 + 1/(2·0.5)·(2 − 0.5) = 0.5; Δ = −0.25; a second element with v =
    # 0.
    mean, std = sde_step(
        column(-1.0, 0.0), column(2.0, 1.0), 0.5, 0.25, noise_level=1.0, ceiling=0.9
    )
    assert mean.tolist() == [[1.875], [0.75]] and std.item() == 0.5
    # At t = 1 the drift is v + σ²/2·x with σ² = 0.7²/(1 − 0.8) = 2.45, and s² = 2.45·0.2.
    mean, std = sde_step(column(3.0), column(2.0), 1.0, 0.8, noise_level=0.7, ceiling=0.8)
    assert mean.item() == pytest.approx(2 - 0.2 * (3 + 2.45), abs=1e-12)
    assert std.item() == pytest.approx(math.sqrt(2.45 * 0.2), abs=1e-12)
    velocity, sample = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
    mean, std = sde_step(velocity, sample, 0.75, 0.5, noise_level=0.0, ceiling=0.9)
    assert torch.equal(mean, sample - 0.25 * velocity) and std.item() == 0.0


def test_times_per_trajectory_are_those_of_each():
    generator = torch.Generator().manual_seed(0)
    velocity, sample = (torch.randn(3, 5, 4, generator=generator, dtype=DOUBLE) for _ in range(2))
    times, next_times = (
        torch.tensor([1.0, 0.6, 0.1], dtype=DOUBLE),
        torch.tensor([0.9, 0.3, 0.0], dtype=DOUBLE),
    )
    means, stds = sde_step(velocity, sample, times, next_times, noise_level=0.7, ceiling=0.9)
    assert stds.shape == (3, 1, 1)
    for i in range(3):
        alone = sde_step(
            velocity[i : i + 1],
            sample[i : i + 1],
            times[i].item(),
            next_times[i].item(),
            noise_level=0.7,
            ceiling=0.9,
        )
        torch.testing.assert_close(means[i : i + 1], alone[0], rtol=0, atol=0)
        torch.testing.assert_close(stds[i].squeeze(), alone[1], rtol=0, atol=0)
    whole = gaussian_log_prob(sample, means, stds, reduction="sum")
    assert (
        whole[1].item()
        == gaussian_log_prob(sample[1:2], means[1:2], stds[1].item(), reduction="sum").item()
    )


@settings(max_examples=100)
@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(1e-3, 3), st.integers(1, 5), st.integers(1, 4))
def test_log_probs_are_those_of_torch(x, mean, std, batch, width):
    generator = torch.Generator().manual_seed(batch)
    means = mean + torch.randn(batch, width, 2, generator=generator, dtype=DOUBLE)
    samples = x + torch.randn(batch, width, 2, generator=generator, dtype=DOUBLE)
    elementwise = torch.distributions.Normal(means, std).log_prob(samples)
    whole = torch.distributions.Independent(torch.distributions.Normal(means, std), 2).log_prob(
        samples
    )
    found = gaussian_log_prob(samples, means, std)
    torch.testing.assert_close(found, elementwise.mean((1, 2)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gaussian_log_prob(samples, means, std, reduction="sum"), whole, rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(found * 2 * width, whole, rtol=1e-12, atol=1e-12)


def test_low_precision_velocities_are_stepped_in_float32():
    velocity = torch.tensor([[0.3, -0.2]], dtype=torch.bfloat16)
    sample = torch.tensor([[1.001, 2.003]])
    mean, std = sde_step(velocity, sample, 0.5, 0.4, noise_level=0.7, ceiling=0.9)
    assert mean.dtype == std.dtype == torch.float32
    assert torch.equal(
        mean, sde_step(velocity.float(), sample, 0.5, 0.4, noise_level=0.7, ceiling=0.9)[0]
    )
    assert gaussian_log_prob(sample, mean.bfloat16(), std).dtype == torch.float32


class GaussianFlow:
    """The exact flow of data N(m, s²): marginal N((1−t)m, V), V = (1−t)²s² + t², velocity affine in
    x."""

    def __init__(self, mean, std):
        self.mean, self.std = mean, std

    def variance(self, t):
        return (1 - t) ** 2 * self.std**2 + t**2

    def velocity(self, x, t):
        """E[ε − x_0 | x_t = x]."""
        gain = (t - (1 - t) * self.std**2) / self.variance(t)
        return gain * (x - (1 - t) * self.mean) - self.mean

    def step(self, mean, variance, t, next_t, a, ceiling):
        """Mean and variance after a step, exactly: the step is affine, so two points give its
        slope."""
        points = column(mean, mean + 1)
        moved, std = sde_step(
            self.velocity(points, t), points, t, next_t, noise_level=a, ceiling=ceiling
        )
        slope = (moved[1] - moved[0]).item()
        return moved[0].item(), slope**2 * variance + std.item() ** 2


@settings(max_examples=200)
@given(st.floats(0.05, 0.9), st.floats(0.1, 1.5), st.floats(-2, 2), st.floats(0.3, 2.0))
def test_a_small_step_keeps_the_marginal_whatever_the_noise(t, a, m, s):
    """Of ODE and SDE alike: what a step of size h does to mean and variance differs from the
    marginal by O(h²)."""
    flow, h = GaussianFlow(m, s), 1e-6
    start, end = ((1 - t) * m, flow.variance(t)), ((1 - t + h) * m, flow.variance(t - h))
    for noise in (0.0, a):
        mean, variance = flow.step(*start, t, t - h, noise, ceiling=0.95)
        assert abs(mean - end[0]) < 1e3 * h * h and abs(variance - end[1]) < 1e4 * h * h


def a_step(velocity, sample, time=0.5, a=0.7, ceiling=0.9):
    return sde_step(velocity, sample, time, 0.4, noise_level=a, ceiling=ceiling)


ROWS = torch.zeros(2, 3)
REFUSED = {
    "velocity": (
        lambda: a_step(ROWS, torch.zeros(2, 4)),
        r"velocity has shape \(2, 3\), sample \(2, 4\)",
    ),
    "one dimension": (lambda: a_step(ROWS[:, 0], ROWS[:, 0]), "pass two tensors of one shape"),
    "time": (lambda: a_step(ROWS, ROWS, torch.ones(3)), r"time has shape \(3,\)"),
    "ceiling": (lambda: a_step(ROWS, ROWS, ceiling=1.0), "ceiling is 1.0"),
    "noise level": (lambda: a_step(ROWS, ROWS, a=-1.0), "noise_level is -1.0"),
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
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
