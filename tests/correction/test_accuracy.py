"""Long sequences: the sum of log-ratios stays accurate."""

import torch

from slime_tis import RolloutCorrectionConfig, correct


def test_sum_of_log_ratios_over_long_sequences() -> None:
    sequences, tokens, drift = 64, 131_072, 0.01
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.empty(sequences, tokens).exponential_(2.0, generator=generator)
    train = rollout + drift + 0.02 * torch.randn(sequences, tokens, generator=generator)
    exact = (train - rollout).double().sum(1)

    config = RolloutCorrectionConfig(use_tis=True, tis_level="geometric")
    found = correct(config, train, rollout, torch.ones(sequences, tokens, dtype=torch.bool))
    assert (found.sequence_sums.log_ratio - exact).abs().max() <= 1e-5
    assert torch.allclose(found.weights[:, 0].double(), (exact / tokens).exp(), rtol=1e-6)
    assert abs(found.statistics.metrics()["mismatch_kl"] + exact.mean().item() / tokens) <= 1e-8
