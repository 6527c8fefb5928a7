"""A table of metrics computed by hand, and their accuracy at the extremes."""

import math
from typing import Any

import pytest
import torch

from slime_tis import RolloutCorrectionConfig, Statistics, correct

# Two sequences: Δ = [ln 2, 0, masked] and [−ln 4].
TRAIN = [torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-3.0])]
ROLLOUT = [torch.tensor([-1.0 - math.log(2), -2.0, -1.0]), torch.tensor([-3.0 + math.log(4)])]
MASK = [torch.tensor([1, 1, 0]), torch.tensor([1])]
LN2 = math.log(2)

MISMATCH = {
    "nonfinite_token_fraction": 0.0,
    "mismatch_training_log_ppl": (1.5 + 3.0) / 2,
    "mismatch_training_ppl": (math.exp(1.5) + math.exp(3.0)) / 2,
    "mismatch_rollout_log_ppl": (1.5 + LN2 / 2 + 3.0 - 2 * LN2) / 2,
    "mismatch_rollout_ppl": (math.exp(1.5 + LN2 / 2) + math.exp(3.0 - 2 * LN2)) / 2,
    "mismatch_kl": (-LN2 + 0 + 2 * LN2) / 3,
    "mismatch_k3_kl": ((2 - LN2 - 1) + 0 + (0.25 + 2 * LN2 - 1)) / 3,
    "mismatch_log_ppl_diff": (-LN2 / 2 + 2 * LN2) / 2,
    "mismatch_log_ppl_abs_diff": (LN2 / 2 + 2 * LN2) / 2,
    "mismatch_log_ppl_diff_max": 2 * LN2,
    "mismatch_log_ppl_diff_min": -LN2 / 2,
    "mismatch_ppl_ratio": (2**-0.5 + 4) / 2,
    "mismatch_chi2_token": (4 + 1 + 1 / 16) / 3 - 1,
    "mismatch_chi2_seq": (4 + 1 / 16) / 2 - 1,
    "effective_sequence_share": (2 + 1 / 4) ** 2 / (2 * (4 + 1 / 16)),
    "train_rollout_logprob_abs_diff": (LN2 + 0 + 2 * LN2) / 3,
}


def metrics_of(**options: Any) -> dict[str, float]:
    """The metrics of the two sequences above."""
    config = RolloutCorrectionConfig(**options)
    return correct(config, TRAIN, ROLLOUT, MASK).statistics.metrics()


def metrics_of_log_ratio(log_ratio: torch.Tensor, **options: Any) -> dict[str, float]:
    """The metrics of a batch [B, T] of log-ratios in which every token is trained."""
    config = RolloutCorrectionConfig(**options)
    rollout = torch.zeros_like(log_ratio)
    mask = torch.ones_like(log_ratio)
    return correct(config, log_ratio, rollout, mask).statistics.metrics()


def test_means_of_weights_just_below_1_keep_their_digits():
    # a float32 sum of 1,000 weights has errors of 3e-5
    metrics = metrics_of_log_ratio(torch.full((1, 1000), -4e-6), use_tis=True)
    assert 1 - metrics["mis_seq_weight_min"] == pytest.approx(4e-6, rel=1e-2)


def test_noise_of_an_empty_batch_is_0():
    config = RolloutCorrectionConfig(use_rs=True, rs_level="sequence", rs_z_score=3.0)
    zeros = torch.zeros(2, 4)
    bounds = correct(config, zeros, zeros, zeros).global_batch.adaptive_bounds
    assert bounds is not None
    assert bounds.k3.item() == 0.0


MEAN = 11 / 12
"""Of the weights 1.5, 1 and 1/4."""

SQUARE = (2.25 + 1 + 0.0625) / 3
"""The mean of their squares."""

# The weights 2, 1 and 1/4, bounded to 1.5, 1 and 1/4.
WEIGHTS = {
    "gradient_kept_fraction": 1.0,
    "mis_mean_is_weight_before_clip": 3.25 / 3,
    "mis_weight_min_before_clip": 0.25,
    "mis_weight_max_before_clip": 2.0,
    "mis_ratio_mean_after_mis": MEAN,
    "mis_weight_min": 0.25,
    "mis_weight_max": 1.5,
    "mis_weight_std": math.sqrt(SQUARE - MEAN**2),
    "mis_eff_sample_size": MEAN**2 / SQUARE,
    "mis_truncate_fraction": 1 / 3,
    "mis_ratio_fraction_low": 1 / 3,
    "mis_seq_weight_mean": (1.25 + 0.25) / 2,
    "mis_seq_weight_std": 0.5,
    "mis_seq_weight_min": 0.25,
    "mis_seq_weight_max": 1.25,
    "mis_seq_weight_max_deviation": 0.75,
    "mis_seq_weight_fraction_high": 0.0,
    "mis_seq_weight_fraction_low": 0.5,
}


def test_mismatch_by_hand():
    assert metrics_of(get_mismatch_metrics=True) == pytest.approx(MISMATCH, abs=1e-6)


def test_weights_by_hand():
    metrics = metrics_of(use_tis=True, tis_upper_bound=1.5)
    assert metrics == pytest.approx(MISMATCH | WEIGHTS, abs=1e-6)


@pytest.mark.parametrize("level", ["token", "prefix", "segment", "sequence"])
@pytest.mark.parametrize("upper", [1.05, 2.0, 10.0], ids=str)
def test_equal_weights_have_no_deviation(level, upper):
    log_ratio = torch.full((1, 19), 3.0)
    metrics = metrics_of_log_ratio(log_ratio, use_tis=True, tis_level=level, tis_upper_bound=upper)
    assert metrics["mis_weight_std"] == 0
    assert metrics["mis_eff_sample_size"] == 1


def test_the_deviation_of_weights_near_1_keeps_its_digits():
    """w = 1 + 1e-4·x: a sum of w² in float32 has an error of the size of the variance, 1e-8."""
    generator = torch.Generator().manual_seed(0)
    log_ratio = 1e-4 * torch.randn(64, 512, generator=generator)
    metrics = metrics_of_log_ratio(log_ratio, use_tis=True)
    weights = log_ratio.double().exp()
    deviation = weights.std(correction=0).item()
    deviation_of_means = weights.mean(1).std(correction=0).item()
    assert metrics["mis_weight_std"] == pytest.approx(deviation, rel=1e-4)
    assert 1 - metrics["mis_eff_sample_size"] == pytest.approx(deviation**2, rel=1e-4)
    assert metrics["mis_seq_weight_std"] == pytest.approx(deviation_of_means, rel=1e-4)


@pytest.mark.parametrize("size", [1e-6, 1e-5, 1e-4, 1e-2, 1.0])
def test_k3_of_small_log_ratios_is_accurate(size):
    """exp(Δ) − 1 in float32 has an error of 6e-8, more than the k3 of 1e-11 that fp32 engines
    have."""
    generator = torch.Generator().manual_seed(1)
    log_ratio = size * torch.randn(26, 32, generator=generator)
    metrics = metrics_of_log_ratio(log_ratio, get_mismatch_metrics=True)
    exact = (log_ratio.double().expm1() - log_ratio.double()).mean().item()
    assert metrics["mismatch_k3_kl"] == pytest.approx(exact, rel=max(2e-7 / size, 1e-6))


@pytest.mark.parametrize("sign", [1, -1], ids=["above", "below"])
@pytest.mark.parametrize("exponent", range(-8, 1))
def test_the_rounding_error_of_k3_is_bounded(exponent, sign):
    """Equal tokens, whose rounding errors do not average out (docs/metrics.md has the bound)."""
    for factor in (1.0, 0.7, 0.31, 0.13):
        log_ratio = torch.full((1, 64), sign * factor * 10.0**exponent)
        k3 = metrics_of_log_ratio(log_ratio, get_mismatch_metrics=True)["mismatch_k3_kl"]
        exact = (log_ratio.double().expm1() - log_ratio.double()).mean().item()
        assert k3 >= 0
        assert k3 == pytest.approx(exact, rel=0, abs=5e-7 * abs(log_ratio[0, 0].item()))


def test_k3_of_the_smallest_log_ratios_is_not_negative():
    k3 = metrics_of_log_ratio(torch.full((1, 3), -1e-8), get_mismatch_metrics=True)
    assert 0 <= k3["mismatch_k3_kl"] < 1.5e-16  # Δ²/2 is 5e-17


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "prefix"])
@pytest.mark.parametrize(
    ("upper", "largest"),
    [(1e-300, 0.0), (1e39, 2.0), (1.7e308, 2.0)],
    ids=["1e-300", "1e39", "1.7e308"],
)
def test_bounds_beyond_float32_are_ordinary_bounds(mode, level, upper, largest):
    config = RolloutCorrectionConfig(
        use_tis=True,
        tis_mode=mode,
        tis_level=level,
        tis_upper_bound=upper,
        tis_lower_bound=1e-310,
    )
    corrected = correct(config, TRAIN, ROLLOUT, MASK)
    metrics = corrected.statistics.metrics()
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(weights.isfinite().all() for weights in corrected.weights)
    assert metrics["mis_weight_max"] == pytest.approx(largest, rel=1e-6, abs=1e-300)


@pytest.mark.parametrize("level", ["token", "sequence", "prefix"])
def test_the_smallest_number_is_an_upper_bound(level):
    metrics = metrics_of(use_tis=True, tis_level=level, tis_upper_bound=5e-324)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["mis_weight_max"] == pytest.approx(0.0, abs=1e-300)


NORMALIZED = RolloutCorrectionConfig(use_tis=True, tis_batch_normalize=True)


def test_a_rank_without_sequences_changes_no_metric():
    statistics = correct(NORMALIZED, TRAIN, ROLLOUT, MASK).statistics
    none = torch.zeros(0, device=TRAIN[0].device)
    of_empty_rank = correct(NORMALIZED, none, none, none, lengths=[]).statistics
    assert statistics.merge(of_empty_rank).metrics() == statistics.metrics()


def test_empty_statistics_change_no_metric():
    statistics = correct(NORMALIZED, TRAIN, ROLLOUT, MASK).statistics
    merged = Statistics.empty(NORMALIZED, TRAIN[0].device).merge(statistics)
    assert merged.metrics() == statistics.metrics()


def test_empty_lists_change_no_metric():
    if TRAIN[0].device.type != "cpu":
        pytest.skip("lists without tensors mean the CPU")
    statistics = correct(NORMALIZED, TRAIN, ROLLOUT, MASK).statistics
    of_empty_rank = correct(NORMALIZED, [], [], []).statistics
    assert statistics.merge(of_empty_rank).metrics() == statistics.metrics()


def test_empty_statistics_have_no_metrics():
    assert Statistics.empty(NORMALIZED).metrics() == {}


def test_the_factor_of_normalisation_is_the_mean_weight():
    statistics = correct(NORMALIZED, TRAIN, ROLLOUT, MASK).statistics
    assert statistics.batch_norm_factor().item() == pytest.approx((2 + 1 + 0.25) / 3)


@pytest.mark.parametrize(
    "config",
    [NORMALIZED, RolloutCorrectionConfig(use_tis=True)],
    ids=["no tokens", "no normalisation"],
)
def test_without_a_mean_weight_the_factor_is_1(config):
    assert Statistics.empty(config).batch_norm_factor().item() == 1.0


def test_statistics_of_other_configurations_are_not_merged():
    """The message names the options that differ."""
    config = RolloutCorrectionConfig(use_tis=True)
    other = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=5.0)
    statistics = correct(config, TRAIN, ROLLOUT, MASK).statistics
    of_other = correct(other, TRAIN, ROLLOUT, MASK).statistics
    with pytest.raises(ValueError, match="tis_upper_bound"):
        statistics.merge(of_other)
