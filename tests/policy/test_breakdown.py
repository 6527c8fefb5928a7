"""The mismatch by age of the weights: which tokens count, and in which bucket."""

import math

import pytest
import torch

from slime_tis.correction import RolloutCorrectionConfig, correct
from slime_tis.policy.step_sums import MIN_WORKER_TOKENS, STALENESS, WORKER, metrics_by, sums_by, worst_worker

NAN, INF = float("nan"), float("inf")


def test_sums_over_the_tokens_of_each_bucket():
    train, rollout = torch.tensor([-1.0, -2.0, -1.0, -30.0, -1.0]), torch.tensor([-1.5, -1.0, -1.25, -1.0, -9.0])
    table = sums_by(STALENESS, train, rollout, torch.tensor([1, 1, 1, 1, 0]), torch.tensor([0, 4, 3, 12, 12]))
    # Δ: 0.5 at staleness 0, −1 and 0.25 at 3 to 4, −29 at 9 or more with e^Δ taken at −20; the last is masked.
    expected = torch.zeros(6, 4, dtype=torch.float64)
    expected[0] = torch.tensor([1, 0.5, math.expm1(0.5), 0.5])
    expected[3] = torch.tensor([2, -0.75, math.expm1(-1) + math.expm1(0.25), 1.25])
    expected[5] = torch.tensor([1, -29, math.expm1(-20), 29])
    torch.testing.assert_close(table, expected)


@pytest.mark.parametrize("unusable", [NAN, INF, -INF, -1e6, -3e38])
def test_tokens_count_where_the_correction_counts_them(unusable):
    """A large number instead of minus infinity is omitted, as what is not finite is."""
    train, rollout = torch.tensor([0.0, 0.0, -1.0]), torch.tensor([-0.5, unusable, -0.75])
    mask = torch.ones(3)
    found = metrics_by(STALENESS, sums_by(STALENESS, train, rollout, mask, torch.tensor([0, 1, 1])))
    assert found["token_fraction_staleness_1"] == 0.5
    assert found["train_rollout_logprob_abs_diff_staleness_1"] == 0.25
    config = RolloutCorrectionConfig(get_mismatch_metrics=True)
    of_all = correct(config, train, rollout, mask, lengths=[3]).statistics.metrics()
    assert of_all["train_rollout_logprob_abs_diff"] == pytest.approx((0.5 + 0.25) / 2)


def test_the_worst_of_several_servers():
    worker = torch.tensor([0, 1, 1, 2, -1, 300]).repeat_interleave(MIN_WORKER_TOKENS)
    difference = torch.tensor([0.1, 0.1, 0.3, 0.5, 0.1, 0.4]).repeat_interleave(MIN_WORKER_TOKENS)
    sums = sums_by(WORKER, -1 - difference, torch.full_like(difference, -1.0), torch.ones_like(worker), worker)
    found = worst_worker(sums)
    # server 2 has 0.5; the others (0.1 + 0.1 + 0.3 + 0.1 + 0.4) / 5
    assert found == pytest.approx({"worst_worker": 2, "worst_worker_abs_diff": 0.5, "worst_worker_ratio": 2.5})
    assert worst_worker(sums[:1]) == {}
    few = torch.arange(len(worker)) < MIN_WORKER_TOKENS + 3
    few_sums = sums_by(WORKER, -1 - difference, torch.full_like(difference, -1.0), few, worker)
    assert worst_worker(few_sums) == {}
