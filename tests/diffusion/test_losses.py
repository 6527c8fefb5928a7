"""The loss of SDE steps: against plain loops, its gradients, without a mismatch, its expectation by
quadrature."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis import PRESETS, RolloutCorrectionConfig
from slime_tis.correction.config import POLICY_PRESETS
from slime_tis.diffusion import (
    apply_bypass_mode,
    correct_trajectories,
    diffusion_loss,
    flow_grpo,
    gaussian_log_prob,
    policy_gradient,
    sde_step,
)
from tests.correction.strategies import configurations
from tests.diffusion.expected import clipped_loss, expected_loss, expected_metrics
from tests.diffusion.strategies import trajectories
from tests.diffusion.test_trajectories import tensors

OFF = RolloutCorrectionConfig()


def drawn(rows, draw, values):
    return [draw.draw(st.lists(values, min_size=len(row), max_size=len(row))) for row in rows]


@settings(max_examples=300)
@given(
    configurations(),
    trajectories(),
    st.data(),
    st.booleans(),
    st.sampled_from(["kept", "original"]),
)
def test_against_plain_loops(config, batch, draw, clipped, normalizer):
    config = replace(clipped_loss(config) if clipped else config, rejection_normalizer=normalizer)
    old, rollout = batch
    moves = drawn(old, draw, st.floats(-0.5, 0.5, width=32))
    current = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(old, moves, strict=True)]
    advantages = drawn(old, draw, st.sampled_from([-1.5, -0.25, 0.5, 2.0]))
    oracle = expected_loss(config, current, old, rollout, advantages, clip_range=0.1737)

    log_probs, old_log_probs, rollout_log_probs, advantage = tensors(
        current, old, rollout, advantages
    )
    log_probs.requires_grad_()
    if config.use_rollout_logprobs:
        data = apply_bypass_mode({"rollout_log_probs": rollout_log_probs})
        found = diffusion_loss(
            config, log_probs, data["old_log_probs"], advantage, clip_range=0.1737
        )
        measured = found.statistics.metrics()
        assert measured == pytest.approx(
            expected_metrics(config, current, rollout), rel=1e-6, abs=1e-7
        )
    else:
        folded = correct_trajectories(config, old_log_probs, rollout_log_probs).folded
        found = diffusion_loss(
            config, log_probs, old_log_probs, advantage, weights=folded, clip_range=0.1737
        )
        assert found.statistics is None
    assert found.loss.item() == pytest.approx(oracle.loss, rel=1e-6, abs=1e-6)
    assert found.denominator.item() == oracle.denominator
    assert (found.numerator / found.denominator.clamp_min(1)).item() == found.loss.item()
    (gradient,) = torch.autograd.grad(found.loss, log_probs)
    for row, expected in zip(gradient.tolist(), oracle.gradient, strict=True):
        assert row == pytest.approx(expected, rel=1e-6, abs=1e-7)
    sums = {name: value.item() for name, value in found.sums.items()}
    assert sums == pytest.approx(
        {"clipped": oracle.clipped, "kl": oracle.kl, "ratio": oracle.ratio}, abs=1e-6
    )


@settings(max_examples=150)
@given(configurations(), trajectories(wild=True), st.booleans())
def test_nothing_non_finite_comes_out(config, batch, clipped):
    """Neither in the loss nor in the gradient, where a step is rejected or neutral for not being
    finite."""
    config = replace(clipped_loss(config) if clipped else config, nonfinite_policy="reject")
    train, rollout = tensors(*batch)
    train.requires_grad_()
    advantages = torch.linspace(-1, 1, len(train), dtype=torch.float64)
    weights = None
    if not config.use_rollout_logprobs:
        if not config.corrects:
            return
        weights = correct_trajectories(config, train, rollout).folded
    found = diffusion_loss(
        config, train, rollout if weights is None else train.detach(), advantages, weights=weights
    )
    (gradient,) = torch.autograd.grad(found.loss, train)
    assert found.loss.isfinite() and gradient.isfinite().all()
    assert all(value.isfinite() for value in found.sums.values())


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in POLICY_PRESETS])
@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_without_a_mismatch_the_loss_is_the_uncorrected_one(name, shape):
    """To the bit, and so is its gradient: under every preset, decoupled and in bypass mode."""
    config = RolloutCorrectionConfig.preset(name)
    generator = torch.Generator().manual_seed(3)
    log_probs = torch.randn(shape, generator=generator).requires_grad_()
    advantages = torch.randn(5, generator=generator)
    old = log_probs.detach().clone()
    plain = replace(OFF, policy_loss=config.policy_loss)
    uncorrected = diffusion_loss(plain, log_probs, old, advantages)
    if config.use_rollout_logprobs:
        corrected = diffusion_loss(config, log_probs, old, advantages)
    else:
        found = correct_trajectories(config, old, old.clone())
        corrected = diffusion_loss(config, log_probs, old, advantages, weights=found.folded)
        apart = diffusion_loss(
            config, log_probs, old, advantages, weights=found.weights, mask=found.mask
        )
        assert torch.equal(apart.loss, corrected.loss)
    assert torch.equal(corrected.loss, uncorrected.loss)
    gradients = [
        torch.autograd.grad(found.loss, log_probs, retain_graph=True)[0]
        for found in (corrected, uncorrected)
    ]
    assert torch.equal(*gradients)
    kind = flow_grpo if config.policy_loss == "ppo" else policy_gradient
    expected = kind(
        log_probs, old, advantages if len(shape) == 1 else advantages[:, None].expand(shape)
    )[0].mean()
    assert torch.equal(uncorrected.loss, expected)


def test_metrics_alone_leave_the_loss_to_the_bit():
    config = RolloutCorrectionConfig(get_mismatch_metrics=True)
    log_probs, rollout = torch.randn(4, 2, requires_grad=True), torch.randn(4, 2)
    old, advantages = log_probs.detach() + 0.1, torch.randn(4)
    found = correct_trajectories(config, old, rollout)
    assert found.statistics.metrics()["rollout_corr/logprob_abs_diff_mean"] > 0
    measured = diffusion_loss(config, log_probs, old, advantages, weights=found.folded)
    assert torch.equal(measured.loss, diffusion_loss(OFF, log_probs, old, advantages).loss)


@settings(max_examples=60)
@given(configurations(), trajectories(), st.booleans())
def test_steps_and_micro_batches_add_up(config, batch, by_step):
    """Decoupled: the loss of the whole is Σ numerator / Σ denominator of its parts, cut along
    either dimension."""
    config = replace(config, use_rollout_logprobs=False)
    old, rollout = tensors(*batch)
    log_probs, advantages = old + 0.1, torch.linspace(-1, 2, len(old), dtype=torch.float64)
    folded = correct_trajectories(config, old, rollout).folded
    whole = diffusion_loss(config, log_probs, old, advantages, weights=folded)
    if by_step:
        cuts = [(log_probs[:, t], old[:, t], advantages, folded[:, t]) for t in range(old.shape[1])]
    else:
        cuts = [
            tuple(x[i : i + 1] for x in (log_probs, old, advantages, folded))
            for i in range(len(old))
        ]
    parts = [diffusion_loss(config, a, b, c, weights=d) for a, b, c, d in cuts]
    numerator, denominator = sum(p.numerator for p in parts), sum(p.denominator for p in parts)
    torch.testing.assert_close(numerator / max(denominator, 1), whole.loss, rtol=1e-6, atol=1e-7)
    assert denominator == whole.denominator


class TwoSteps:
    """Two SDE steps in two latent dimensions with the velocity θ_0·x + θ_1, and all that they may
    lead to.

    Gauss-Hermite quadrature in the four Gaussian dimensions takes the place of enumeration:
    expectations are exact for polynomials of high degree, and to many digits for what is smooth.
    """

    TIMES = (0.6, 0.45, 0.3)
    START = torch.tensor([0.4, -0.7], dtype=torch.float64)

    def __init__(self, nodes=14):
        x, w = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(nodes))
        w = w / w.sum()
        grid = torch.cartesian_prod(x, x, x, x)
        self.noise = grid.view(-1, 2, 2)
        self.probability = torch.cartesian_prod(w, w, w, w).prod(1)

    def sample(self, theta):
        """[nodes, 3, 2]: x at the three times, reparametrised."""
        xs = [self.START.expand(len(self.noise), 2)]
        for i in range(2):
            mean, std = self.step(theta, xs[-1], i)
            xs.append(mean + std * self.noise[:, i])
        return torch.stack(xs, 1)

    def step(self, theta, x, i):
        velocity = theta[0] * x + theta[1]
        return sde_step(velocity, x, self.TIMES[i], self.TIMES[i + 1], noise_level=0.8, ceiling=0.9)

    def log_probs(self, theta, xs, reduction):
        """[nodes, 2]."""
        return torch.stack(
            [
                gaussian_log_prob(xs[:, i + 1], *self.step(theta, xs[:, i], i), reduction=reduction)
                for i in range(2)
            ],
            1,
        )

    @staticmethod
    def reward(xs):
        return torch.sin(xs[:, -1, 0]) + 0.5 * xs[:, -1, 1] * xs[:, -1, 0]

    def pathwise_gradient(self, theta):
        """∇E[R] through the samples: no log-prob is part of it."""
        theta = theta.clone().requires_grad_()
        (self.probability * self.reward(self.sample(theta))).sum().backward()
        return theta.grad

    def estimate(self, config, theta, rollout, reduction, dims):
        """−∇ of the expected loss over samples of the rollout policy, on the scale of sums."""
        xs = self.sample(rollout)
        theta = theta.clone().requires_grad_()
        log_probs = self.log_probs(theta, xs, reduction)
        of_rollout = self.log_probs(rollout, xs, reduction)
        advantages = self.probability * self.reward(xs)
        found = diffusion_loss(config, log_probs, of_rollout, advantages, latent_dims=dims)
        (gradient,) = torch.autograd.grad(found.numerator, theta)
        return -gradient * (2 if reduction == "mean" else 1)


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


@pytest.mark.parametrize(("reduction", "dims"), [("sum", 1), ("mean", 2)])
def test_the_weight_of_the_whole_trajectory_is_unbiased(reduction, dims):
    """Samples of another policy give the pathwise gradient of the current one; so do means, once
    summed again."""
    found = WORLD.estimate(UNBOUNDED, THETA, ROLLOUT, reduction, dims)
    torch.testing.assert_close(found, WORLD.pathwise_gradient(THETA), rtol=0, atol=2e-6)


ZERO, FOUR = torch.zeros(4, 3), torch.zeros(4)
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
def test_refusals(config, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        diffusion_loss(config, ZERO, *arguments, **options)
