"""Losses by hand, and their gradients against autograd of the formula."""

import math

import pytest
import torch

from slime_tis.policy.losses import kl_estimate, ppo_clip, reinforce

RATIOS = [0.5, 0.9, 1.0, 1.1, 2.0, 8.0]


def log(values):
    return torch.tensor(values, dtype=torch.float64).log()


def test_ppo_clip_with_a_positive_advantage_is_bounded_above():
    loss, clipped = ppo_clip(log(RATIOS), torch.zeros(6), torch.full((6,), 2.0), clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(loss, torch.tensor([-1.0, -1.8, -2.0, -2.2, -2.56, -2.56], dtype=torch.float64))
    assert clipped.tolist() == [0, 0, 0, 0, 1, 1]


def test_ppo_clip_with_a_negative_advantage_is_bounded_below_and_by_the_dual_clip():
    loss, clipped = ppo_clip(log(RATIOS), torch.zeros(6), torch.full((6,), -1.0), dual_clip=3.0)
    torch.testing.assert_close(loss, torch.tensor([0.8, 0.9, 1.0, 1.1, 2.0, 3.0], dtype=torch.float64))
    assert clipped.tolist() == [1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_the_gradient_of_ppo_is_that_of_the_ratio_and_stops_where_clipped(advantage):
    log_prob = log(RATIOS).requires_grad_()
    loss, clipped = ppo_clip(log_prob, torch.zeros(6), torch.full((6,), advantage), dual_clip=4.0)
    loss.sum().backward()
    ratio = torch.tensor(RATIOS, dtype=torch.float64)
    torch.testing.assert_close(log_prob.grad, torch.where(clipped > 0, 0.0, -advantage * ratio))


def test_reinforce_has_the_gradient_minus_advantage():
    log_prob = log([0.1, 0.7]).requires_grad_()
    loss = reinforce(log_prob, torch.tensor([2.0, -3.0]))
    torch.testing.assert_close(loss, torch.tensor([-2 * math.log(0.1), 3 * math.log(0.7)], dtype=torch.float64))
    loss.sum().backward()
    assert log_prob.grad.tolist() == [-2.0, 3.0]


def test_kl_estimates():
    difference = 0.5
    expected = {
        "k1": difference,
        "k2": difference**2 / 2,
        "k3": math.exp(-difference) - 1 + difference,
        "low_var_kl": math.exp(-difference) - 1 + difference,
    }
    for kind, value in expected.items():
        found = kl_estimate(torch.tensor(-1.0, dtype=torch.float64), torch.tensor(-1.5, dtype=torch.float64), kind)
        assert found.item() == pytest.approx(value, abs=1e-12)
    assert kl_estimate(torch.tensor(-9.0), torch.tensor(0.0), "low_var_kl").item() == 10.0


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimates_are_unbiased(kind):
    policy, reference = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.6, 0.3, 0.1])
    exact = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * kl_estimate(policy.log(), reference.log(), kind)).sum(), exact)
