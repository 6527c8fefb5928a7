"""The loss of SDE steps: against plain loops, its gradients, without a mismatch, its expectation by
quadrature."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis import PRESETS, RolloutCorrectionConfig
from slime_tis.correction.config import POLICY_PRESETS
from slime_tis.diffusion import (
    DiffusionLoss,
    correct_trajectories,
    diffusion_loss,
    flow_grpo,
    gaussian_log_prob,
    policy_gradient,
    sde_step,
)
from tests.correction.strategies import configurations
from tests.diffusion.expected import ExpectedLoss, clipped_loss, expected_loss, expected_metrics
from tests.diffusion.strategies import Rows, trajectories
from tests.diffusion.test_trajectories import tensors

OFF = RolloutCorrectionConfig()


@dataclass
class Steps:
    """A batch of steps [B, T], and the loss that is expected of it."""

    config: RolloutCorrectionConfig
    current: Rows
    old: Rows
    rollout: Rows
    advantages: Rows
    expected: ExpectedLoss


def like(rows: Rows, values: st.SearchStrategy[float]) -> st.SearchStrategy[Rows]:
    """Tables of the same shape."""
    row = st.lists(values, min_size=len(rows[0]), max_size=len(rows[0]))
    return st.lists(row, min_size=len(rows), max_size=len(rows))


@st.composite
def steps(draw: st.DrawFn, bypass: bool) -> Steps:
    """Steps of one mode, with the clipped or the plain loss."""
    config = replace(
        draw(configurations()),
        use_rollout_logprobs=bypass,
        rejection_normalizer=draw(st.sampled_from(["kept", "original"])),
    )
    if draw(st.booleans()):
        config = clipped_loss(config)
    old, rollout = draw(trajectories())
    moves = draw(like(old, st.floats(-0.5, 0.5, width=32)))
    current = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(old, moves, strict=True)]
    advantages = draw(like(old, st.sampled_from([-1.5, -0.25, 0.5, 2.0])))
    expected = expected_loss(config, current, old, rollout, advantages, clip_range=0.1737)
    return Steps(config, current, old, rollout, advantages, expected)


def assert_loss(loss: DiffusionLoss, log_probs: torch.Tensor, expected: ExpectedLoss) -> None:
    """Loss, gradient and sums are those of the loops."""
    assert loss.loss.item() == pytest.approx(expected.loss, rel=1e-6, abs=1e-6)
    assert loss.denominator.item() == expected.denominator
    assert (loss.numerator / loss.denominator.clamp_min(1)).item() == loss.loss.item()
    (gradient,) = torch.autograd.grad(loss.loss, log_probs)
    for row, expected_row in zip(gradient.tolist(), expected.gradient, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-6, abs=1e-7)
    sums = {name: value.item() for name, value in loss.sums.items()}
    assert sums == pytest.approx(
        {"clipped": expected.clipped, "kl": expected.kl, "ratio": expected.ratio}, abs=1e-6
    )


@settings(max_examples=150)
@given(steps(bypass=True))
def test_the_loss_of_bypass_mode_equals_plain_loops(batch):
    log_probs, rollout, advantages = tensors(batch.current, batch.rollout, batch.advantages)
    log_probs.requires_grad_()
    loss = diffusion_loss(batch.config, log_probs, rollout, advantages, clip_range=0.1737)
    assert_loss(loss, log_probs, batch.expected)
    metrics = expected_metrics(batch.config, batch.current, batch.rollout)
    assert loss.statistics.metrics() == pytest.approx(metrics, rel=1e-6, abs=1e-7)


@settings(max_examples=150)
@given(steps(bypass=False))
def test_the_decoupled_loss_equals_plain_loops(batch):
    log_probs, old, rollout, advantages = tensors(
        batch.current, batch.old, batch.rollout, batch.advantages
    )
    log_probs.requires_grad_()
    folded = correct_trajectories(batch.config, old, rollout).folded
    loss = diffusion_loss(
        batch.config, log_probs, old, advantages, weights=folded, clip_range=0.1737
    )
    assert_loss(loss, log_probs, batch.expected)
    assert loss.statistics is None


@settings(max_examples=75)
@given(configurations(), trajectories(wild=True), st.booleans())
def test_the_loss_of_bypass_mode_is_finite(config, batch, clipped):
    """So is its gradient, also at steps that are rejected because they are not finite."""
    config = replace(config, use_rollout_logprobs=True, nonfinite_policy="reject")
    if clipped:
        config = clipped_loss(config)
    log_probs, rollout = tensors(*batch)
    log_probs.requires_grad_()
    advantages = torch.linspace(-1, 1, len(log_probs), dtype=torch.float64)
    assert_finite(diffusion_loss(config, log_probs, rollout, advantages), log_probs)


@settings(max_examples=75)
@given(
    configurations().filter(lambda config: config.corrects), trajectories(wild=True), st.booleans()
)
def test_the_decoupled_loss_is_finite(config, batch, clipped):
    """So is its gradient, also at steps that are rejected because they are not finite."""
    config = replace(config, use_rollout_logprobs=False, nonfinite_policy="reject")
    if clipped:
        config = clipped_loss(config)
    log_probs, rollout = tensors(*batch)
    weights = correct_trajectories(config, log_probs, rollout).folded
    old = log_probs.clone()
    log_probs.requires_grad_()
    advantages = torch.linspace(-1, 1, len(log_probs), dtype=torch.float64)
    loss = diffusion_loss(config, log_probs, old, advantages, weights=weights)
    assert_finite(loss, log_probs)


def assert_finite(loss: DiffusionLoss, log_probs: torch.Tensor) -> None:
    (gradient,) = torch.autograd.grad(loss.loss, log_probs)
    assert loss.loss.isfinite()
    assert gradient.isfinite().all()
    assert all(value.isfinite() for value in loss.sums.values())


@pytest.fixture(params=[(5,), (5, 3)], ids=["steps", "trajectories"])
def equal_policies(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the current policy, which old and rollout policy equal, and advantages [B]."""
    generator = torch.Generator().manual_seed(3)
    log_probs = torch.randn(request.param, generator=generator).requires_grad_()
    return log_probs, torch.randn(5, generator=generator)


PLAIN_PRESETS = [name for name in PRESETS if name not in POLICY_PRESETS]


@pytest.mark.parametrize("name", PLAIN_PRESETS)
def test_without_a_mismatch_a_preset_changes_nothing(name, equal_policies):
    """Not one bit of the loss and its gradient, decoupled and in bypass mode."""
    log_probs, advantages = equal_policies
    config = RolloutCorrectionConfig.preset(name)
    old = log_probs.detach().clone()
    weights = None
    if not config.use_rollout_logprobs:
        weights = correct_trajectories(config, old, old.clone()).folded
    corrected = diffusion_loss(config, log_probs, old, advantages, weights=weights)
    plain = replace(OFF, policy_loss=config.policy_loss)
    uncorrected = diffusion_loss(plain, log_probs, old, advantages)
    assert torch.equal(corrected.loss, uncorrected.loss)
    (gradient,) = torch.autograd.grad(corrected.loss, log_probs)
    (expected_gradient,) = torch.autograd.grad(uncorrected.loss, log_probs)
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize(
    ("policy_loss", "function"),
    [("ppo", flow_grpo), ("reinforce", policy_gradient)],
    ids=["ppo", "reinforce"],
)
def test_the_uncorrected_loss_is_a_mean_over_steps(policy_loss, function, equal_policies):
    log_probs, advantages = equal_policies
    old = log_probs.detach().clone()
    per_step = advantages if log_probs.dim() == 1 else advantages[:, None].expand(log_probs.shape)
    plain = replace(OFF, policy_loss=policy_loss)
    loss = diffusion_loss(plain, log_probs, old, advantages).loss
    assert torch.equal(loss, function(log_probs, old, per_step)[0].mean())


def test_weights_with_a_mask_are_the_folded_weights():
    config = RolloutCorrectionConfig.preset("decoupled_geo_rs_token_tis", rs_upper_bound=1.2)
    generator = torch.Generator().manual_seed(3)
    old = torch.randn(5, 3, generator=generator)
    rollout = old - 0.3 * torch.randn(5, 3, generator=generator)
    advantages = torch.randn(5, generator=generator)
    corrected = correct_trajectories(config, old, rollout)
    assert corrected.mask.any() and not corrected.mask.all()
    folded = diffusion_loss(config, old, old, advantages, weights=corrected.folded)
    apart = diffusion_loss(
        config, old, old, advantages, weights=corrected.weights, mask=corrected.mask
    )
    assert torch.equal(apart.loss, folded.loss)


def test_metrics_without_correction_leave_the_loss():
    """Not one bit changes."""
    config = RolloutCorrectionConfig(get_mismatch_metrics=True)
    log_probs = torch.randn(4, 2, requires_grad=True)
    rollout = torch.randn(4, 2)
    old = log_probs.detach() + 0.1
    advantages = torch.randn(4)
    corrected = correct_trajectories(config, old, rollout)
    assert corrected.statistics.metrics()["rollout_corr/logprob_abs_diff_mean"] > 0
    measured = diffusion_loss(config, log_probs, old, advantages, weights=corrected.folded)
    assert torch.equal(measured.loss, diffusion_loss(OFF, log_probs, old, advantages).loss)


def assert_adds_up(parts: Sequence[DiffusionLoss], complete: DiffusionLoss) -> None:
    """The loss of the batch is Σ numerator / Σ denominator of its parts."""
    numerator = torch.stack([part.numerator for part in parts]).sum()
    denominator = torch.stack([part.denominator for part in parts]).sum()
    loss = numerator / denominator.clamp_min(1)
    torch.testing.assert_close(loss, complete.loss, rtol=1e-6, atol=1e-7)
    assert denominator == complete.denominator


@settings(max_examples=30)
@given(configurations(), trajectories())
def test_losses_of_micro_batches_add_up(config, batch):
    config = replace(config, use_rollout_logprobs=False)
    old, rollout = tensors(*batch)
    log_probs = old + 0.1
    advantages = torch.linspace(-1, 2, len(old), dtype=torch.float64)
    weights = correct_trajectories(config, old, rollout).folded
    parts = []
    for i in range(len(old)):
        row = slice(i, i + 1)
        parts.append(
            diffusion_loss(config, log_probs[row], old[row], advantages[row], weights=weights[row])
        )
    assert_adds_up(parts, diffusion_loss(config, log_probs, old, advantages, weights=weights))


@settings(max_examples=30)
@given(configurations(), trajectories())
def test_losses_of_single_steps_add_up(config, batch):
    config = replace(config, use_rollout_logprobs=False)
    old, rollout = tensors(*batch)
    log_probs = old + 0.1
    advantages = torch.linspace(-1, 2, len(old), dtype=torch.float64)
    weights = correct_trajectories(config, old, rollout).folded
    parts = []
    for t in range(old.shape[1]):
        parts.append(
            diffusion_loss(config, log_probs[:, t], old[:, t], advantages, weights=weights[:, t])
        )
    assert_adds_up(parts, diffusion_loss(config, log_probs, old, advantages, weights=weights))


class TwoSteps:
    """Two SDE steps in two latent dimensions with the velocity θ_0·x + θ_1, and all their results.

    Gauss-Hermite quadrature in the four Gaussian dimensions takes the place of enumeration:
    expectations are exact for polynomials of high degree, and to many digits for smooth functions.
    """

    TIMES = (0.6, 0.45, 0.3)
    START = torch.tensor([0.4, -0.7], dtype=torch.float64)

    def __init__(self, nodes: int = 14) -> None:
        x, w = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(nodes))
        w = w / w.sum()
        grid = torch.cartesian_prod(x, x, x, x)
        self.noise = grid.view(-1, 2, 2)
        self.probability = torch.cartesian_prod(w, w, w, w).prod(1)

    def sample(self, theta: torch.Tensor) -> torch.Tensor:
        """[nodes, 3, 2]: x at the three times, reparametrised."""
        xs = [self.START.expand(len(self.noise), 2)]
        for i in range(2):
            mean, std = self.step(theta, xs[-1], i)
            xs.append(mean + std * self.noise[:, i])
        return torch.stack(xs, 1)

    def step(
        self, theta: torch.Tensor, x: torch.Tensor, i: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the i-th step."""
        velocity = theta[0] * x + theta[1]
        return sde_step(velocity, x, self.TIMES[i], self.TIMES[i + 1], noise_level=0.8, ceiling=0.9)

    def log_probs(
        self, theta: torch.Tensor, xs: torch.Tensor, reduction: Literal["mean", "sum"]
    ) -> torch.Tensor:
        """[nodes, 2]."""
        steps = []
        for i in range(2):
            mean, std = self.step(theta, xs[:, i], i)
            steps.append(gaussian_log_prob(xs[:, i + 1], mean, std, reduction=reduction))
        return torch.stack(steps, 1)

    @staticmethod
    def reward(xs: torch.Tensor) -> torch.Tensor:
        return torch.sin(xs[:, -1, 0]) + 0.5 * xs[:, -1, 1] * xs[:, -1, 0]

    def pathwise_gradient(self, theta: torch.Tensor) -> torch.Tensor:
        """∇E[R] through the samples, without log-probs."""
        theta = theta.clone().requires_grad_()
        expectation = (self.probability * self.reward(self.sample(theta))).sum()
        return torch.autograd.grad(expectation, theta)[0]

    def estimate(
        self, theta: torch.Tensor, rollout: torch.Tensor, reduction: Literal["mean", "sum"]
    ) -> torch.Tensor:
        """−∇ of the expected loss over samples of the rollout policy, on the scale of sums."""
        xs = self.sample(rollout)
        theta = theta.clone().requires_grad_()
        log_probs = self.log_probs(theta, xs, reduction)
        rollout_log_probs = self.log_probs(rollout, xs, reduction)
        advantages = self.probability * self.reward(xs)
        # means over two dimensions become sums again
        latent_dims = 2 if reduction == "mean" else 1
        loss = diffusion_loss(
            UNBOUNDED, log_probs, rollout_log_probs, advantages, latent_dims=latent_dims
        )
        (gradient,) = torch.autograd.grad(loss.numerator, theta)
        return -gradient * latent_dims


WORLD = TwoSteps()
THETA = torch.tensor([-0.5, 0.3], dtype=torch.float64)
ROLLOUT = torch.tensor([-0.3, 0.15], dtype=torch.float64)
UNBOUNDED = RolloutCorrectionConfig(
    use_tis=True,
    tis_level="sequence",
    tis_upper_bound=1e9,
    use_rollout_logprobs=True,
    policy_loss="reinforce",
)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_weight_of_the_trajectory_is_unbiased(reduction):
    """Samples of another policy give the pathwise gradient of the current one."""
    estimate = WORLD.estimate(THETA, ROLLOUT, reduction)
    torch.testing.assert_close(estimate, WORLD.pathwise_gradient(THETA), rtol=0, atol=2e-6)


ZERO = torch.zeros(4, 3)
FOUR = torch.zeros(4)
REFUSED = {
    "old log-probs": (OFF, (torch.zeros(4, 2), FOUR), {}, r"old_log_probs \(4, 2\)"),
    "advantages": (OFF, (ZERO, torch.zeros(3)), {}, r"advantages has shape \(3,\)"),
    "weights": (OFF, (ZERO, FOUR), {"weights": torch.ones(4)}, r"weights \(4,\)"),
    "mask": (
        OFF,
        (ZERO, FOUR),
        {"weights": torch.ones(4, 3), "mask": torch.ones(3)},
        r"mask \(3,\)",
    ),
    "no weights": (replace(OFF, use_tis=True), (ZERO, FOUR), {}, "weights are missing"),
    "weights in bypass": (
        replace(OFF, use_rollout_logprobs=True),
        (ZERO, FOUR),
        {"weights": ZERO},
        "applied twice",
    ),
    "gspo": (replace(OFF, policy_loss="gspo"), (ZERO, FOUR), {}, "--policy-loss is gspo"),
}


@pytest.mark.parametrize(
    ("config", "arguments", "options", "message"), REFUSED.values(), ids=REFUSED
)
def test_impossible_arguments_are_refused(config, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        diffusion_loss(config, ZERO, *arguments, **options)
