"""A table of metrics computed by hand, and which metrics appear when."""

import math

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


def metrics_of(**options):
    config = RolloutCorrectionConfig(**options)
    return correct(config, TRAIN, ROLLOUT, MASK).statistics.metrics()


def test_means_of_weights_just_below_1_keep_their_digits():
    log_ratio = torch.full((1, 1000), -4e-6)  # a float32 sum of 1,000 weights has errors of 3e-5
    config = RolloutCorrectionConfig(use_tis=True)
    metrics = correct(
        config, log_ratio, torch.zeros(1, 1000), torch.ones(1, 1000)
    ).statistics.metrics()
    assert 1 - metrics["mis_seq_weight_min"] == pytest.approx(4e-6, rel=1e-2)


def test_noise_of_an_empty_batch_is_0():
    config = RolloutCorrectionConfig(use_rs=True, rs_level="sequence", rs_z_score=3.0)
    bounds = correct(config, *torch.zeros(3, 2, 4).unbind()).global_batch.adaptive_bounds
    assert bounds is not None and bounds.k3.item() == 0.0


MEAN, SQUARE = 11 / 12, (2.25 + 1 + 0.0625) / 3


def test_by_hand():
    """Mismatch alone, and weights 2, 1, 1/4 bounded to 1.5, 1, 1/4."""
    assert metrics_of(get_mismatch_metrics=True) == pytest.approx(MISMATCH, abs=1e-6)
    weighted = {
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
    found = metrics_of(use_tis=True, tis_upper_bound=1.5)
    assert found == pytest.approx(MISMATCH | weighted, abs=1e-6)


@pytest.mark.parametrize("level", ["token", "prefix", "segment", "sequence"])
@pytest.mark.parametrize("upper", [1.05, 2.0, 10.0], ids=str)
def test_equal_weights_have_no_deviation(level, upper):
    config = RolloutCorrectionConfig(use_tis=True, tis_level=level, tis_upper_bound=upper)
    rollout = torch.full((19,), -3.0)
    found = correct(config, [torch.zeros(19)], [rollout], [torch.ones(19)]).statistics.metrics()
    assert found["mis_weight_std"] == 0 and found["mis_eff_sample_size"] == 1


def test_the_deviation_of_weights_near_one_is_not_lost_in_float32():
    """w = 1 + 1e-4·x: a sum of w² in float32 has an error of the size of the variance, 1e-8."""
    generator = torch.Generator().manual_seed(0)
    log_ratio = 1e-4 * torch.randn(64, 512, generator=generator)
    config = RolloutCorrectionConfig(use_tis=True)
    values = correct(
        config, log_ratio, torch.zeros(64, 512), torch.ones(64, 512)
    ).statistics.metrics()
    exact = log_ratio.double().exp()
    assert values["mis_weight_std"] == pytest.approx(exact.std(correction=0).item(), rel=1e-4)
    assert 1 - values["mis_eff_sample_size"] == pytest.approx(
        exact.var(correction=0).item(), rel=1e-4
    )
    assert values["mis_seq_weight_std"] == pytest.approx(
        exact.mean(1).std(correction=0).item(), rel=1e-4
    )


@pytest.mark.parametrize("size", [1e-6, 1e-5, 1e-4, 1e-2, 1.0])
def test_k3_of_small_log_ratios_is_accurate_and_never_negative(size):
    """exp(Δ) − 1 in float32 has an error of 6e-8, more than the k3 of 1e-11 that fp32 engines
    have."""
    generator = torch.Generator().manual_seed(1)
    log_ratio = size * torch.randn(26, 32, generator=generator)
    config = RolloutCorrectionConfig(get_mismatch_metrics=True)
    values = correct(
        config, log_ratio, torch.zeros(26, 32), torch.ones(26, 32)
    ).statistics.metrics()
    exact = (log_ratio.double().expm1() - log_ratio.double()).mean().item()
    assert values["mismatch_k3_kl"] == pytest.approx(exact, rel=max(2e-7 / size, 1e-6))
    assert correct(
        config, *[torch.full((1, 3), 1e-8 * k) for k in (1, 2)], torch.ones(1, 3)
    ).statistics.metrics()["mismatch_k3_kl"] == pytest.approx(5e-17, abs=1e-16)


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "prefix"])
@pytest.mark.parametrize("upper", [5e-324, 1e-300, 1e39, 1.7e308])
def test_bounds_beyond_float32_are_ordinary_bounds(mode, level, upper):
    """An upper bound that no ratio reaches, and one below any ratio; nothing raises, nothing is
    NaN."""
    lower = min(upper / 2, 1e-310) or None
    if lower is None and mode != "truncate":
        pytest.skip("there is no bound below the smallest number")
    options = {
        "tis_mode": mode,
        "tis_level": level,
        "tis_upper_bound": upper,
        "tis_lower_bound": lower,
    }
    config = RolloutCorrectionConfig(use_tis=True, **options)
    found = correct(config, TRAIN, ROLLOUT, MASK)
    values = found.statistics.metrics()
    assert all(math.isfinite(value) for value in values.values())
    assert all(weights.isfinite().all() for weights in found.weights)
    assert values["mis_weight_max"] == (
        pytest.approx(2.0, rel=1e-6) if upper > 1 else pytest.approx(0.0, abs=1e-300)
    )


def test_reading_metrics_leaves_nothing_out_of_an_empty_rank():
    config = RolloutCorrectionConfig(use_tis=True, tis_batch_normalize=True)
    full = correct(config, TRAIN, ROLLOUT, MASK).statistics
    device = TRAIN[0].device
    none = torch.zeros(0)
    merged = Statistics.empty(config, device).merge(full)
    merged = merged.merge(correct(config, none, none, none, lengths=[]).statistics)
    if device.type == "cpu":  # which lists without tensors mean
        merged = merged.merge(correct(config, [], [], []).statistics)
    assert merged.metrics() == full.metrics()
    assert Statistics.empty(config).metrics() == {}
    assert merged.batch_norm_factor().item() == pytest.approx((2 + 1 + 0.25) / 3)
    assert Statistics.empty(config).batch_norm_factor().item() == 1.0
    assert Statistics.empty(RolloutCorrectionConfig(use_tis=True)).batch_norm_factor().item() == 1.0


def test_statistics_of_other_configurations_are_not_merged():
    """The sums of another configuration have another meaning; the message names the options that
    differ."""
    truncated = correct(RolloutCorrectionConfig(use_tis=True), TRAIN, ROLLOUT, MASK).statistics
    wider = correct(
        RolloutCorrectionConfig(use_tis=True, tis_upper_bound=5.0), TRAIN, ROLLOUT, MASK
    ).statistics
    with pytest.raises(ValueError, match="tis_upper_bound"):
        truncated.merge(wider)
