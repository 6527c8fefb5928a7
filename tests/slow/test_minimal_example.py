"""examples/minimal/grpo.py: a hand-written GRPO loop learns from stale, rounded rollouts, and reports the mismatch."""

import pytest
import torch

from examples.minimal.grpo import END, LENGTH, group_advantages, train


def test_it_learns_and_reports_rounding_and_staleness():
    history = list(train(48))
    rewards = [metrics["reward"] for metrics in history]
    assert rewards[0] == pytest.approx(0.074, abs=0.005)  # chance: 1/10 per token before the first end
    assert sum(rewards[-8:]) / 8 > 0.6
    k3 = [metrics["mismatch_k3_kl"] for metrics in history]
    fresh, stale = k3[4::4], k3[3::4]  # the first and the last step on one copy of the weights
    assert k3[0] == pytest.approx(6e-7, rel=0.5)  # bf16 alone, near uniform
    assert sum(stale) / len(stale) > 20 * sum(fresh) / len(fresh)
    assert all(0.5 < metrics["mis_eff_sample_size"] <= 1 for metrics in history)
    assert END == 0 and LENGTH == 6


def test_advantages_are_standard_scores_of_a_group():
    rewards = torch.zeros(128)
    rewards[:8] = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 1.0])
    found = group_advantages(rewards)
    assert found.shape == (128, 1) and not found[8:].any()
    assert found[:2, 0].tolist() == pytest.approx([1.6197, -0.5399], abs=1e-3)  # deviation 0.4629 around 0.25
