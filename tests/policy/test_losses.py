"""Losses by hand, the mismatch by bucket, and the forward passes that options need."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

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


def log(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def test_ppo_clip_by_hand() -> None:
    loss, clipped = ppo_clip(
        log(RATIOS), torch.zeros(6), torch.full((6,), 2.0), clip_low=0.2, clip_high=0.28
    )
    expected = [-1.0, -1.8, -2.0, -2.2, -2.56, -2.56]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))
    assert clipped.tolist() == [0, 0, 0, 0, 1, 1]


def test_dual_clip_by_hand() -> None:
    loss, clipped = ppo_clip(log(RATIOS), torch.zeros(6), torch.full((6,), -1.0), dual_clip=3.0)
    expected = [0.8, 0.9, 1.0, 1.1, 2.0, 3.0]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))
    assert clipped.tolist() == [1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_ppo_gradient_is_the_ratios_unless_clipped(advantage: float) -> None:
    log_prob = log(RATIOS).requires_grad_()
    loss, clipped = ppo_clip(log_prob, torch.zeros(6), torch.full((6,), advantage), dual_clip=4.0)
    loss.sum().backward()
    ratio = torch.tensor(RATIOS, dtype=torch.float64)
    torch.testing.assert_close(log_prob.grad, torch.where(clipped > 0, 0.0, -advantage * ratio))


def test_reinforce_by_hand() -> None:
    log_prob = log([0.1, 0.7]).requires_grad_()
    loss = reinforce(log_prob, torch.tensor([2.0, -3.0]))
    expected = [-2 * math.log(0.1), 3 * math.log(0.7)]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))
    loss.sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [-2.0, 3.0]


# The difference of the log-probs is 0.5.
KL_ESTIMATES = {
    "k1": 0.5,
    "k2": 0.125,
    "k3": math.exp(-0.5) - 1 + 0.5,
    "low_var_kl": math.exp(-0.5) - 1 + 0.5,
}


@pytest.mark.parametrize("kind", KL_ESTIMATES)
def test_kl_estimate_by_hand(kind: str) -> None:
    log_prob = torch.tensor(-1.0, dtype=torch.float64)
    reference = torch.tensor(-1.5, dtype=torch.float64)
    estimate = kl_estimate(log_prob, reference, kind)
    assert estimate.item() == pytest.approx(KL_ESTIMATES[kind], abs=1e-12)


def test_low_var_kl_is_clamped() -> None:
    assert kl_estimate(torch.tensor(-9.0), torch.tensor(0.0), "low_var_kl").item() == 10.0


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimates_are_unbiased(kind: str) -> None:
    policy = torch.tensor([0.2, 0.3, 0.5])
    reference = torch.tensor([0.6, 0.3, 0.1])
    exact = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close(
        (policy * kl_estimate(policy.log(), reference.log(), kind)).sum(), exact
    )


NAN = float("nan")
INF = float("inf")


def test_sums_of_buckets_by_hand() -> None:
    sums = sums_by(
        STALENESS,
        torch.tensor([-1.0, -2.0, -1.0, -30.0, -1.0]),
        torch.tensor([-1.5, -1.0, -1.25, -1.0, -9.0]),
        torch.tensor([1, 1, 1, 1, 0]),
        torch.tensor([0, 4, 3, 12, 12]),
    )
    # Δ is 0.5 at staleness 0, −1 and 0.25 at 3 to 4, and −29 at 9 or more, with e^Δ bounded at −20.
    # The last token is masked.
    expected = torch.zeros(6, 4, dtype=torch.float64)
    expected[0] = torch.tensor([1, 0.5, math.expm1(0.5), 0.5])
    expected[3] = torch.tensor([2, -0.75, math.expm1(-1) + math.expm1(0.25), 1.25])
    expected[5] = torch.tensor([1, -29, math.expm1(-20), 29])
    torch.testing.assert_close(sums, expected)


# The second-last server is unknown; all servers have the smallest number of tokens.
SERVERS = torch.tensor([0, 1, 1, 2, -1, 300]).repeat_interleave(MIN_WORKER_TOKENS)
DIFFERENCES = torch.tensor([0.1, 0.1, 0.3, 0.5, 0.1, 0.4]).repeat_interleave(MIN_WORKER_TOKENS)


def server_sums(mask: Tensor) -> Tensor:
    rollout = torch.full_like(DIFFERENCES, -1.0)
    return sums_by(WORKER, rollout - DIFFERENCES, rollout, mask, SERVERS)


def test_worst_server_has_the_largest_difference() -> None:
    # Server 2 has 0.5; the others have (0.1 + 0.1 + 0.3 + 0.1 + 0.4) / 5.
    assert worst_worker(server_sums(torch.ones_like(SERVERS))) == pytest.approx(
        {"worst_worker": 2, "worst_worker_abs_diff": 0.5, "worst_worker_ratio": 2.5}
    )


def test_single_server_is_not_compared() -> None:
    assert worst_worker(server_sums(torch.ones_like(SERVERS))[:1]) == {}


def test_servers_with_few_tokens_are_not_compared() -> None:
    few = torch.arange(len(SERVERS)) < MIN_WORKER_TOKENS + 3
    assert worst_worker(server_sums(few)) == {}


def test_last_bucket_has_all_further_workers() -> None:
    worker = torch.tensor([254, 255, 256, 300])
    log_probs = torch.full((4,), -1.0)
    sums = sums_by(WORKER, log_probs, log_probs, torch.ones(4), worker)
    assert sums[-2:, 0].tolist() == [1.0, 3.0]


UNUSABLE = [NAN, INF, -INF, -1e6, -3e38]
TRAIN = torch.tensor([0.0, 0.0, -1.0])


def rollout_with(unusable: float) -> Tensor:
    return torch.tensor([-0.5, unusable, -0.75])


@pytest.mark.parametrize("unusable", UNUSABLE)
def test_unusable_tokens_are_in_no_bucket(unusable: float) -> None:
    metrics = metrics_by(
        STALENESS,
        sums_by(STALENESS, TRAIN, rollout_with(unusable), torch.ones(3), torch.tensor([0, 1, 1])),
    )
    assert metrics["token_fraction_staleness_1"] == 0.5
    assert metrics["train_rollout_logprob_abs_diff_staleness_1"] == 0.25


@pytest.mark.parametrize("unusable", UNUSABLE)
def test_unusable_tokens_are_not_in_the_correction(unusable: float) -> None:
    config = RolloutCorrectionConfig(get_mismatch_metrics=True)
    correction = correct(config, TRAIN, rollout_with(unusable), torch.ones(3), lengths=[3])
    metrics = correction.statistics.metrics()
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx((0.5 + 0.25) / 2)


Options = dict[str, Any]
NORMALIZES: Options = {"use_tis": True, "tis_batch_normalize": True}
TRIMS: Options = {"rs_second_moment_bound": 0.1}
ADAPTS: Options = {"use_rs": True, "rs_level": "geometric", "rs_z_score": 3.0}
BYPASS: Options = {"use_rollout_logprobs": True, "policy_loss": "reinforce"}
INTERPOLATES: Options = {"old_logprobs": "interpolate"}
METRICS: Options = {"get_mismatch_metrics": True}
# options; whether they need the global batch; whether the loss uses a recomputed π_old with one
# step per rollout, and with two
CASES: dict[str, tuple[Options, bool, bool, bool]] = {
    "nothing": ({}, False, False, True),
    "batch-normalise without TIS": ({"tis_batch_normalize": True}, False, False, True),
    "batch-normalise": (NORMALIZES, True, True, True),
    "trimming": (TRIMS, True, True, True),
    "z-score": (ADAPTS, True, True, True),
    "metrics": (METRICS, False, False, True),
    "bypass": (BYPASS, False, False, False),
    "bypass with metrics": ({**BYPASS, **METRICS}, False, False, False),
    "bypass, batch-normalise": ({**BYPASS, **NORMALIZES}, True, False, False),
    "bypass, z-score": ({**BYPASS, **ADAPTS}, True, False, False),
    "interpolated, trimming": ({**INTERPOLATES, **TRIMS}, True, False, False),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[RolloutCorrectionConfig, bool, bool, bool]:
    options, needs_batch, with_one_step, with_two_steps = CASES[request.param]
    return RolloutCorrectionConfig(**options), needs_batch, with_one_step, with_two_steps


def test_options_need_the_global_batch(
    case: tuple[RolloutCorrectionConfig, bool, bool, bool],
) -> None:
    config, needs_batch, _, _ = case
    assert needs_global_batch(config) == needs_batch


def test_loss_uses_recomputed_log_probs(
    case: tuple[RolloutCorrectionConfig, bool, bool, bool],
) -> None:
    config, _, with_one_step, with_two_steps = case
    assert uses_recomputed_old_policy(config, 1) == with_one_step
    assert uses_recomputed_old_policy(config, 2) == with_two_steps


def test_log_probs_are_recomputed(case: tuple[RolloutCorrectionConfig, bool, bool, bool]) -> None:
    config, _, with_one_step, with_two_steps = case
    measures = config.get_mismatch_metrics
    assert needs_old_log_probs(config, 1, PolicyConfig()) == with_one_step
    assert needs_old_log_probs(config, 2, PolicyConfig()) == (with_two_steps or measures)


@pytest.mark.parametrize(
    "policy",
    [{"reject_before_advantage": True}, {"advantage_estimator": "optimal_token_baseline"}],
    ids=["early rejection", "token baseline"],
)
def test_advantages_need_recomputed_log_probs(
    case: tuple[RolloutCorrectionConfig, bool, bool, bool], policy: Options
) -> None:
    config, _, _, _ = case
    assert needs_old_log_probs(config, 1, PolicyConfig(**policy))


@pytest.mark.parametrize(
    ("options", "once"),
    [({}, True), (NORMALIZES, True), (BYPASS, False), (INTERPOLATES, False)],
    ids=["decoupled", "batch-normalised", "bypass", "interpolated"],
)
def test_clip_is_inactive_if_the_policy_is_its_old_policy(options: Options, once: bool) -> None:
    assert clip_is_inactive(RolloutCorrectionConfig(**options), 1) == once


@pytest.mark.parametrize("options", [{}, NORMALIZES, BYPASS, INTERPOLATES], ids=str)
def test_clip_is_active_with_two_steps(options: Options) -> None:
    assert not clip_is_inactive(RolloutCorrectionConfig(**options), 2)
