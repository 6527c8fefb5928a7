"""Losses by hand, the mismatch by age of the weights, and the forward passes that options ask for."""

import math

import pytest
import torch

from slime_tis.correction import RolloutCorrectionConfig, correct
from slime_tis.policy.config import (
    PolicyConfig,
    clip_is_inactive,
    needs_global_batch,
    needs_old_log_probs,
    uses_recomputed_old_policy,
)
from slime_tis.policy.losses import kl_estimate, ppo_clip, reinforce
from slime_tis.policy.step_sums import (
    MIN_WORKER_TOKENS,
    STALENESS,
    WORKER,
    metrics_by,
    sums_by,
    worst_worker,
)

RATIOS = [0.5, 0.9, 1.0, 1.1, 2.0, 8.0]


def log(values):
    return torch.tensor(values, dtype=torch.float64).log()


def test_ppo_clip_by_hand_with_the_dual_clip():
    loss, clipped = ppo_clip(
        log(RATIOS), torch.zeros(6), torch.full((6,), 2.0), clip_low=0.2, clip_high=0.28
    )
    torch.testing.assert_close(
        loss, torch.tensor([-1.0, -1.8, -2.0, -2.2, -2.56, -2.56], dtype=torch.float64)
    )
    assert clipped.tolist() == [0, 0, 0, 0, 1, 1]
    loss, clipped = ppo_clip(log(RATIOS), torch.zeros(6), torch.full((6,), -1.0), dual_clip=3.0)
    torch.testing.assert_close(
        loss, torch.tensor([0.8, 0.9, 1.0, 1.1, 2.0, 3.0], dtype=torch.float64)
    )
    assert clipped.tolist() == [1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_the_gradient_of_ppo_is_that_of_the_ratio_and_stops_where_clipped(advantage):
    log_prob = log(RATIOS).requires_grad_()
    loss, clipped = ppo_clip(log_prob, torch.zeros(6), torch.full((6,), advantage), dual_clip=4.0)
    loss.sum().backward()
    ratio = torch.tensor(RATIOS, dtype=torch.float64)
    torch.testing.assert_close(log_prob.grad, torch.where(clipped > 0, 0.0, -advantage * ratio))


def test_reinforce_and_kl_estimates_by_hand():
    log_prob = log([0.1, 0.7]).requires_grad_()
    loss = reinforce(log_prob, torch.tensor([2.0, -3.0]))
    torch.testing.assert_close(
        loss, torch.tensor([-2 * math.log(0.1), 3 * math.log(0.7)], dtype=torch.float64)
    )
    loss.sum().backward()
    assert log_prob.grad.tolist() == [-2.0, 3.0]
    difference = 0.5
    expected = {
        "k1": difference,
        "k2": difference**2 / 2,
        "k3": math.exp(-difference) - 1 + difference,
        "low_var_kl": math.exp(-difference) - 1 + difference,
    }
    for kind, value in expected.items():
        found = kl_estimate(
            torch.tensor(-1.0, dtype=torch.float64), torch.tensor(-1.5, dtype=torch.float64), kind
        )
        assert found.item() == pytest.approx(value, abs=1e-12)
    assert kl_estimate(torch.tensor(-9.0), torch.tensor(0.0), "low_var_kl").item() == 10.0


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimates_are_unbiased(kind):
    policy, reference = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.6, 0.3, 0.1])
    exact = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close(
        (policy * kl_estimate(policy.log(), reference.log(), kind)).sum(), exact
    )


NAN, INF = float("nan"), float("inf")


def test_sums_of_buckets_and_the_worst_of_several_servers():
    train, rollout = (
        torch.tensor([-1.0, -2.0, -1.0, -30.0, -1.0]),
        torch.tensor([-1.5, -1.0, -1.25, -1.0, -9.0]),
    )
    table = sums_by(
        STALENESS, train, rollout, torch.tensor([1, 1, 1, 1, 0]), torch.tensor([0, 4, 3, 12, 12])
    )
    # Δ: 0.5 at staleness 0, −1 and 0.25 at 3 to 4, −29 at 9 or more with e^Δ taken at −20; the last
    # is masked.
    expected = torch.zeros(6, 4, dtype=torch.float64)
    expected[0] = torch.tensor([1, 0.5, math.expm1(0.5), 0.5])
    expected[3] = torch.tensor([2, -0.75, math.expm1(-1) + math.expm1(0.25), 1.25])
    expected[5] = torch.tensor([1, -29, math.expm1(-20), 29])
    torch.testing.assert_close(table, expected)
    worker = torch.tensor([0, 1, 1, 2, -1, 300]).repeat_interleave(MIN_WORKER_TOKENS)
    difference = torch.tensor([0.1, 0.1, 0.3, 0.5, 0.1, 0.4]).repeat_interleave(MIN_WORKER_TOKENS)
    sums = sums_by(
        WORKER, -1 - difference, torch.full_like(difference, -1.0), torch.ones_like(worker), worker
    )
    found = worst_worker(sums)
    # server 2 has 0.5; the others (0.1 + 0.1 + 0.3 + 0.1 + 0.4) / 5
    assert found == pytest.approx(
        {"worst_worker": 2, "worst_worker_abs_diff": 0.5, "worst_worker_ratio": 2.5}
    )
    assert worst_worker(sums[:1]) == {}
    few = torch.arange(len(worker)) < MIN_WORKER_TOKENS + 3
    few_sums = sums_by(WORKER, -1 - difference, torch.full_like(difference, -1.0), few, worker)
    assert worst_worker(few_sums) == {}


def test_the_last_bucket_has_all_further_workers():
    worker = torch.tensor([254, 255, 256, 300])
    log_probs = torch.full((4,), -1.0)
    sums = sums_by(WORKER, log_probs, log_probs, torch.ones(4), worker)
    assert sums[-2:, 0].tolist() == [1.0, 3.0]


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


NORMALIZES = {"use_tis": True, "tis_batch_normalize": True}
TRIMS = {"rs_second_moment_bound": 0.1}
ADAPTS = {"use_rs": True, "rs_level": "geometric", "rs_z_score": 3.0}
BYPASS = {"use_rollout_logprobs": True, "policy_loss": "reinforce"}
INTERPOLATES = {"old_logprobs": "interpolate"}
# options: what is needed of the global batch; the loss uses a recomputed π_old with 1 step, with 2;
# pass with 1
CASES = {
    "nothing": ({}, False, False, True, False),
    "batch-normalise without TIS": ({"tis_batch_normalize": True}, False, False, True, False),
    "batch-normalise": (NORMALIZES, True, True, True, True),
    "trimming": (TRIMS, True, True, True, True),
    "z-score": (ADAPTS, True, True, True, True),
    "metrics": ({"get_mismatch_metrics": True}, False, False, True, False),
    "bypass": (BYPASS, False, False, False, False),
    "bypass with metrics": ({**BYPASS, "get_mismatch_metrics": True}, False, False, False, False),
    "bypass, batch-normalise": ({**BYPASS, **NORMALIZES}, True, False, False, False),
    "bypass, z-score": ({**BYPASS, **ADAPTS}, True, False, False, False),
    "interpolated, trimming": ({**INTERPOLATES, **TRIMS}, True, False, False, False),
}


@pytest.mark.parametrize(
    ("options", "of_batch", "once", "twice", "forward"), CASES.values(), ids=CASES
)
def test_forward_passes(options, of_batch, once, twice, forward):
    config = RolloutCorrectionConfig(**options)
    assert needs_global_batch(config) == of_batch
    assert [uses_recomputed_old_policy(config, steps) for steps in (1, 2)] == [once, twice]
    assert needs_old_log_probs(config, 1, PolicyConfig()) == forward
    assert needs_old_log_probs(config, 2, PolicyConfig()) == (twice or config.get_mismatch_metrics)
    for policy in (
        {"reject_before_advantage": True},
        {"advantage_estimator": "optimal_token_baseline"},
    ):
        assert needs_old_log_probs(config, 1, PolicyConfig(**policy))


@pytest.mark.parametrize(
    ("options", "once"),
    [({}, True), (NORMALIZES, True), (BYPASS, False), (INTERPOLATES, False)],
    ids=["decoupled", "batch-normalised", "bypass", "interpolated"],
)
def test_the_clip_acts_unless_the_policy_is_its_own_old_policy(options, once):
    config = RolloutCorrectionConfig(**options)
    assert [clip_is_inactive(config, steps) for steps in (1, 2)] == [once, False]
