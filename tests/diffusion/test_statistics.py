"""Metrics of a batch by hand, their names, and how they merge."""

import math
import pickle

import pytest
import torch

from slime_tis import RolloutCorrectionConfig
from slime_tis.diffusion import correct_trajectories

LN2 = math.log(2)
# Δ = [ln 2, 0] and [−2 ln 2, ln 4], taken at the timesteps 900, 300 and 900, 600.
TRAIN = torch.tensor([[-1.0, -2.0], [-1.0, -3.0]], dtype=torch.float64)
ROLLOUT = torch.tensor([[-1.0 - LN2, -2.0], [-1.0 + 2 * LN2, -3.0 - 2 * LN2]], dtype=torch.float64)
TIMESTEPS = torch.tensor([[900.0, 300.0], [900.0, 600.0]])


def metrics_of(**options: object) -> dict[str, float]:
    config = RolloutCorrectionConfig(**options)  # type: ignore[arg-type]
    return correct_trajectories(config, TRAIN, ROLLOUT, timesteps=TIMESTEPS).statistics.metrics()


def test_bypass_has_a_prefix_of_its_own_and_reports_weights() -> None:
    found = metrics_of(use_rollout_logprobs=True, use_rs=True, rs_level="geometric", rs_upper_bound=1.2)
    assert {name.rsplit("/", 1)[0] for name in found} == {
        "actor/rollout_corr",
        "actor/rollout_corr/logprob_abs_diff",
    }
    assert found["actor/rollout_corr/mis_weight_max"] == 2.0
    assert found["actor/rollout_corr/mis_rs_geometric_seq_masked_fraction"] == 0.5
    assert found["actor/rollout_corr/rejected_sequence_fraction"] == 0.5
    assert found["actor/rollout_corr/gradient_kept_fraction"] == 0.5


def test_a_mask_that_is_only_reported_rejects_nothing() -> None:
    found = metrics_of(use_rollout_logprobs=True, tis_mode="mask", tis_lower_bound=0.5)
    assert (
        found["actor/rollout_corr/mis_mask_fraction_high"] == found["actor/rollout_corr/mis_mask_fraction_low"] == 0.25
    )
    assert "actor/rollout_corr/gradient_kept_fraction" not in found


def test_without_timesteps_there_is_nothing_by_timestep() -> None:
    config = RolloutCorrectionConfig(get_mismatch_metrics=True)
    found = correct_trajectories(config, TRAIN, ROLLOUT).statistics.metrics()
    assert "rollout_corr/logprob_abs_diff_mean" in found and not [name for name in found if "/ts_" in name]
    assert "rollout_corr/rejected_sequence_fraction" not in found


def test_ranks_merge_what_they_send_each_other() -> None:
    """Statistics survive pickling, and ranks that saw different timesteps merge to what one rank sees."""
    config = RolloutCorrectionConfig(use_tis=True, use_rs=True)
    whole = correct_trajectories(config, TRAIN, ROLLOUT, timesteps=TIMESTEPS).statistics
    ranks = [
        correct_trajectories(config, TRAIN[i : i + 1], ROLLOUT[i : i + 1], timesteps=TIMESTEPS[i]).statistics
        for i in range(2)
    ]
    sent = [pickle.loads(pickle.dumps(statistics)) for statistics in ranks]
    assert sent[0].merge(sent[1]).metrics() == pytest.approx(whole.metrics())


def test_timesteps_are_keyed_by_their_value() -> None:
    config = RolloutCorrectionConfig(get_mismatch_metrics=True)
    times = torch.tensor([0.9, 0.05])
    found = correct_trajectories(config, TRAIN, ROLLOUT, timesteps=times).statistics.metrics()
    assert [name.split("/")[-1] for name in found if "/ts_" in name] == ["ts_0.05", "ts_0.9"]


def test_decoupled_by_hand() -> None:
    """Token weights 2, 1, 1/4, 4 bounded to 2; the veto takes the second trajectory."""
    found = metrics_of(use_tis=True, rs_veto_threshold=0.3)
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
    assert {name: found[f"rollout_corr/{name}"] for name in expected} == pytest.approx(expected, abs=1e-7)
