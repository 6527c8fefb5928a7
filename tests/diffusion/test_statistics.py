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
