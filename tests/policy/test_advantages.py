"""Advantages by hand."""

import math
from typing import Any

import pytest
import torch

from slime_tis.correction.context_parallel import ONE_RANK
from slime_tis.policy.advantages import (
    ESTIMATORS,
    MAX_REWARD,
    advantages,
    grpo,
    minimum_variance_baseline,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    token_returns,
    whiten,
)
from slime_tis.policy.config import PolicyConfig
from tests.correction.test_trimming import over_ranks
from tests.golden.methods import BATCHES, cases

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
ONES = torch.ones_like(REWARDS)


def test_grpo_by_hand() -> None:
    expected = 0.5 / (1 / 3) ** 0.5  # the deviation of 1, 0, 0, 1 has n − 1 = 3 below
    rows = [[expected, -expected, -expected, expected], [0.0] * 4]
    torch.testing.assert_close(
        grpo(REWARDS), torch.tensor(rows, dtype=torch.float64), atol=5e-6, rtol=0
    )


LARGEST_REWARDS = MAX_REWARD * torch.tensor([[1.0, -1.0] * 64], dtype=torch.float64)


def test_grpo_works_at_the_largest_rewards() -> None:
    assert grpo(LARGEST_REWARDS).sign().equal(LARGEST_REWARDS.sign())


def test_rloo_is_finite_at_the_largest_rewards() -> None:
    assert rloo(LARGEST_REWARDS).isfinite().all()


def test_rloo_by_hand() -> None:
    assert rloo(torch.tensor([[3.0, 0.0, 6.0]])).tolist() == [[0.0, -4.5, 4.5]]


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    rewards = torch.tensor([[1.0, -1.0], [0.0, 4.0]], dtype=torch.float64)
    tokens = torch.tensor([[1.0, 3.0], [2.0, 2.0]], dtype=torch.float64)
    # Centred rewards are 1, −1, −2, 2. Over tokens their mean is (1 − 3 − 4 + 4) / 8 = −0.25, and
    # their mean square (1 + 3 + 8 + 8) / 8 = 2.5.
    deviation = (2.5 - 0.0625) ** 0.5
    expected = torch.tensor([[1.25, -0.75], [-1.75, 2.25]], dtype=torch.float64) / deviation
    torch.testing.assert_close(
        reinforce_plus_plus_baseline(rewards, tokens), expected, atol=1e-5, rtol=0
    )


def test_reinforce_plus_plus_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    tokens = torch.tensor([[1.0, 3.0], [2.0, 2.0]], dtype=torch.float64)
    # Over tokens the mean is (1 + 0 + 0 + 8) / 8 = 1.125, and the mean square 33 / 8 = 4.125.
    deviation = (4.125 - 1.125**2) ** 0.5
    expected = torch.tensor([[-0.125, -1.125], [-1.125, 2.875]], dtype=torch.float64) / deviation
    torch.testing.assert_close(reinforce_plus_plus(rewards, tokens), expected, atol=1e-5, rtol=0)


KL_BT = torch.tensor([[0.5, math.nan, 2.0], [1.0, 9.0, math.inf]])
MASK_BT = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])


def test_token_returns_by_hand() -> None:
    # Rewards per token are −0.05, 0, 1 − 0.2 and −0.1, 2 − 0.9, 0.
    values = token_returns(torch.tensor([1.0, 2.0]), KL_BT, MASK_BT, kl_coef=0.1, gamma=0.5)
    expected = torch.tensor([[0.15, 0.4, 0.8], [0.45, 1.1, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(values, expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("length", [1, 2, 5, 64, 100])
def test_token_returns_equal_the_recursion(length: int) -> None:
    chance = torch.Generator().manual_seed(length)
    kl_BT = torch.rand(3, length, generator=chance)
    rewards_B = torch.randn(3, generator=chance)
    values = token_returns(rewards_B, kl_BT, torch.ones(3, length), kl_coef=0.2, gamma=0.9)
    expected = torch.zeros(3, dtype=torch.float64)
    for token in reversed(range(length)):
        expected = 0.9 * expected - 0.2 * kl_BT[:, token].double()
        if token == length - 1:
            expected += rewards_B.double()
        torch.testing.assert_close(values[:, token], expected)


def test_a_return_without_trained_tokens_is_0() -> None:
    values = token_returns(torch.ones(1), KL_BT[:1], torch.zeros(1, 3), kl_coef=1.0, gamma=1.0)
    assert values.tolist() == [[0.0] * 3]


def test_returns_of_100_nats_are_finite() -> None:
    kl_BT = torch.full((1, 4096), 100.0)
    values = token_returns(torch.ones(1), kl_BT, torch.ones(1, 4096), kl_coef=1.0, gamma=1.0)
    assert values[0, 0].item() == pytest.approx(1 - 409_600)


def test_rewards_without_kl_or_discount_are_returns_of_every_token() -> None:
    values = token_returns(torch.tensor([3.0]), KL_BT[:1], MASK_BT[:1], kl_coef=0.0, gamma=1.0)
    assert values.tolist() == [[3.0] * 3]


@pytest.mark.parametrize(
    "estimator", [name for name in ESTIMATORS if name != "optimal_token_baseline"]
)
def test_equal_rewards_without_tokens_have_no_advantage(estimator: Any) -> None:
    config = PolicyConfig(advantage_estimator=estimator)
    values = advantages(torch.full((2, 3), 7.0), torch.zeros(2, 3), config)
    assert values.tolist() == [[0.0] * 3] * 2


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
GROUP_ESTIMATORS: dict[str, Any] = {
    "grpo": grpo,
    "grpo without deviation": lambda rewards, **options: grpo(
        rewards, normalize_std=False, **options
    ),
    "rloo": rloo,
    "reinforce_plus_plus": lambda rewards, **options: reinforce_plus_plus(
        rewards, torch.full_like(rewards, 3.0), **options
    ),
    "reinforce_plus_plus_baseline": lambda rewards, **options: reinforce_plus_plus_baseline(
        rewards, torch.full_like(rewards, 3.0), **options
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_equal_rewards_have_an_advantage_of_exactly_0(name, dtype):
    for reward in (0.35, 0.1, -1 / 3, 7.0, 1e-8, 60000.0):
        for size in (2, 3, 8, 13):
            rewards = torch.full((2, size), reward, dtype=dtype)
            assert not GROUP_ESTIMATORS[name](rewards).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whitening_equal_values_gives_exactly_0(dtype):
    assert not whiten(torch.full((3, 7), 0.35, dtype=dtype), torch.full((3, 7), 11.0)).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_advantages_have_the_dtype_of_the_rewards(name, dtype):
    rewards = torch.tensor([[0.35, 0.5, -1.0], [2.0, 2.0, 3.0]], dtype=dtype)
    found = GROUP_ESTIMATORS[name](rewards)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, GROUP_ESTIMATORS[name](rewards.double()).to(dtype), rtol=0, atol=0
    )


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_whole_number_rewards_are_ordinary_rewards(name):
    rewards = torch.tensor([[1, 0, 0], [2, 2, 2]])
    torch.testing.assert_close(
        GROUP_ESTIMATORS[name](rewards), GROUP_ESTIMATORS[name](rewards.float())
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_non_finite_reward_is_refused_with_its_place(name, value):
    rewards = torch.tensor([[1.0, 0.0], [value, 1.0]])
    function = name.removesuffix(" without deviation")
    with pytest.raises(
        ValueError, match=rf"^{function}: the reward at \(1, 0\) is {value}; pass finite rewards"
    ):
        GROUP_ESTIMATORS[name](rewards)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_non_finite_reward_of_a_rejected_sample_is_ignored(name, value):
    accepted = torch.tensor([[True, True, False]])
    found = GROUP_ESTIMATORS[name](torch.tensor([[1.0, 0.0, value]]), accepted=accepted)
    torch.testing.assert_close(
        found, GROUP_ESTIMATORS[name](torch.tensor([[1.0, 0.0, 5.0]]), accepted=accepted)
    )


@pytest.mark.parametrize("reward", [0.35, 0.1, -1 / 3, 1e-8, 1e30])
def test_token_baselines_of_equal_rewards_are_exact(reward):
    generator = torch.Generator().manual_seed(0)
    for size in (2, 3, 7):
        rewards = torch.full((size, 5), 0.0)
        rewards[:, -1] = reward
        log_probs = -torch.rand(size, 5, generator=generator)
        group = torch.zeros(size, dtype=torch.int64)
        found = optimal_token_baseline(
            rewards, torch.ones(size, 5), group, log_probs, (2 * log_probs).exp()
        )
        assert not found.any()
        norms = torch.rand(size, generator=generator)
        assert not minimum_variance_baseline(rewards[:, -1], group, norms).any()


def test_token_baselines_refuse_a_non_finite_reward():
    rewards = torch.tensor([[0.0, math.nan]])
    group, log_probs = torch.zeros(1, dtype=torch.int64), torch.full((1, 2), -1.0)
    with pytest.raises(ValueError, match=r"^optimal_token_baseline: the reward at \(0, 1\) is nan"):
        optimal_token_baseline(rewards, torch.ones(1, 2), group, log_probs, log_probs.exp())
    with pytest.raises(
        ValueError, match=r"^minimum_variance_baseline: the reward at \(1,\) is nan"
    ):
        minimum_variance_baseline(rewards[0], torch.zeros(2, dtype=torch.int64), torch.ones(2))


def test_a_masked_reward_has_no_part_in_a_token_baseline():
    rewards = torch.tensor([[1.0, math.nan], [0.0, 0.0]])
    log_probs = torch.full((2, 2), -1.0)
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    group = torch.zeros(2, dtype=torch.int64)
    found = optimal_token_baseline(rewards, mask, group, log_probs, (2 * log_probs).exp())
    assert found.tolist() == [[0.5, 0.0], [-0.5, 0.0]]


def test_option_chooses_the_estimator() -> None:
    config = PolicyConfig(advantage_estimator="rloo")
    torch.testing.assert_close(advantages(REWARDS, ONES, config), rloo(REWARDS))


def test_options_choose_scale_after_the_estimator() -> None:
    config = PolicyConfig(disable_grpo_std_normalization=True, normalize_advantages=True)
    expected = whiten(grpo(REWARDS, normalize_std=False), ONES)
    torch.testing.assert_close(advantages(REWARDS, ONES, config), expected)


# The groups have three, one and no accepted samples.
PARTLY_REJECTED = torch.tensor(
    [[1.0, 0.0, 5.0, 2.0], [1.0, 3.0, 3.0, 3.0], [1.0, 2.0, 3.0, 4.0]], dtype=torch.float64
)
ACCEPTED = torch.tensor([[True, True, False, True], [True, False, False, False], [False] * 4])


def test_grpo_without_deviation_ignores_rejected_samples() -> None:
    values = grpo(PARTLY_REJECTED, normalize_std=False, accepted=ACCEPTED)
    assert values.tolist() == [[0, -1, 0, 1], [0] * 4, [0] * 4]


def test_grpo_ignores_rejected_samples() -> None:
    values = grpo(PARTLY_REJECTED, accepted=ACCEPTED)[0]
    expected = torch.tensor([0.0, -1.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(values, expected, atol=2e-6, rtol=0)


def test_rloo_ignores_rejected_samples() -> None:
    values = rloo(PARTLY_REJECTED, accepted=ACCEPTED)
    assert values.tolist() == [[0, -1.5, 0, 1.5], [0] * 4, [0] * 4]


def test_reinforce_plus_plus_baseline_ignores_rejected_samples() -> None:
    tokens = torch.full_like(PARTLY_REJECTED, 7.0)
    values = reinforce_plus_plus_baseline(PARTLY_REJECTED, tokens, accepted=ACCEPTED)
    # The centred rewards of accepted samples are 0, −1, 1 and 0: mean 0, variance 1/2.
    expected = torch.tensor([0, -(2**0.5), 0, 2**0.5], dtype=torch.float64)
    torch.testing.assert_close(values[0], expected, atol=1e-5, rtol=0)
    assert values[1:].tolist() == [[0] * 4] * 2


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_keeping_all_is_keeping_nothing_back(estimator):
    config = PolicyConfig(advantage_estimator=estimator, normalize_advantages=True)
    torch.manual_seed(0)
    rewards, tokens = torch.randn(3, 4, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)
    every = torch.ones(3, 4, dtype=torch.bool)
    torch.testing.assert_close(
        advantages(rewards, tokens, config, every),
        advantages(rewards, tokens, config),
        atol=1e-12,
        rtol=0,
    )


@pytest.mark.parametrize("function", [grpo, rloo])
def test_a_group_of_one_is_refused(function):
    with pytest.raises(ValueError, match=r"\[groups, n ≥ 2\], got \(4, 1\)"):
        function(torch.ones(4, 1))


def token_advantages(case, samples=slice(None), width=None, ranks=ONE_RANK):
    old, weights = case.input("old"), torch.ones_like(case.input("old"))
    if case.params["use_weights"]:
        weights = (old - case.input("sampler")).exp().clamp_max(2)
    names = sorted(set(BATCHES[case.batch]["group"]))
    group = torch.tensor([names.index(name) for name in BATCHES[case.batch]["group"]])
    values = (
        case.input("token_rewards"),
        case.input("mask"),
        old,
        case.input("sum_pi_squared"),
        weights,
    )
    rewards, mask, log_probs, squares, weights = (value[samples, :width] for value in values)
    options = {"weights_BT": weights, "zero_tail": case.params["handle_zero_tail"], "ranks": ranks}
    return optimal_token_baseline(rewards, mask, group[samples], log_probs, squares, **options)


@pytest.mark.parametrize("case", cases("verl.optimal_token_baseline"))
def test_optimal_token_baseline_equals_verl(case):
    found, theirs = token_advantages(case), case.output("advantages").double()
    energy = (1 - 2 * case.input("old").exp() + case.input("sum_pi_squared")) * case.input("mask")
    compared = (energy.cumsum(1) > 1e-6) & (case.input("mask") > 0)  # verl adds 1e-8
    torch.testing.assert_close(found[compared], theirs[compared], rtol=0, atol=2e-6)
    assert found.isfinite().all() and not found[case.input("mask") == 0].any()


@pytest.mark.parametrize("case", cases("verl.optimal_token_baseline"))
def test_optimal_token_baseline_is_the_same_for_every_split_over_ranks(case):
    whole, mask = token_advantages(case), case.input("mask")
    found = torch.zeros_like(whole)

    def on_rank(samples, ranks):
        width = 1 + max(mask[samples].sum(0).nonzero().flatten().tolist(), default=-1)
        found[samples, :width] = token_advantages(case, samples, width, ranks)
        return torch.zeros([])

    over_ranks([*torch.arange(len(mask)).tensor_split(3)], on_rank)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [
        *cases("vcpo.baseline", scope="group", without="agg_mode"),
        *cases("vcpo.baseline", scope="minibatch"),
    ],
)
def test_minimum_variance_baseline_equals_vcpo(case):
    log_weights = ((case.input("old") - case.input("sampler")).double() * case.input("mask")).sum(1)
    if case.params.get("use_clipped_is_ratios"):
        log_weights = log_weights.clamp_max(math.log(case.params["rollout_is_threshold"]))
    norms = case.input("grad_norm")
    if case.params.get("normalize_by_length"):
        norms = norms / case.input("mask").sum(1)
    names = BATCHES[case.batch]["group"]
    if case.params["scope"] == "minibatch":
        names, rewards = ["all"] * len(names), case.input("advantages")[:, 0]
    else:
        rewards = case.input("rewards")
    order = list(dict.fromkeys(names))
    group = torch.tensor([order.index(name) for name in names])
    used = log_weights if case.params.get("use_is_weights", True) else None
    found = rewards.double() - minimum_variance_baseline(rewards, group, norms, log_weights_B=used)
    assert found.isfinite().all()
    shares = norms.double().square() * (1.0 if used is None else (2 * used).exp())
    total = torch.zeros(len(order), dtype=torch.float64).index_add_(0, group, shares)[group]
    found = found / (1 + 1e-8 / total)  # VCPO adds 1e-8 to the sum of the shares
    expected = case.output("baselines").double()[group]
    finite = expected.isfinite()  # VCPO's float32 ratio overflows in one batch
    torch.testing.assert_close(found[finite], expected[finite], rtol=1e-5, atol=1e-6)


def test_a_sample_without_a_gradient_has_no_part_in_the_baseline():
    rewards, group = torch.tensor([1.0, 3.0]), torch.tensor([0, 0])
    found = minimum_variance_baseline(rewards, group, torch.tensor([0.0, 2.0]))
    assert found.tolist() == [-2.0, 0.0]


def test_whitening_an_empty_batch_gives_an_empty_batch():
    assert whiten(torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0, 4)


GROUPED_REWARDS = torch.tensor([1.0, 0.0, 4.0, 2.0])
GROUPS = torch.tensor([0, 0, 7, 7])


def test_equal_gradients_have_the_mean_as_baseline() -> None:
    values = minimum_variance_baseline(GROUPED_REWARDS, GROUPS, torch.ones(4))
    assert values.tolist() == [0.5, -0.5, 1, -1]


def test_huge_ratio_determines_the_baseline() -> None:
    log_weights = torch.tensor([0.0, 800.0, 0.0, 0.0])
    values = minimum_variance_baseline(
        GROUPED_REWARDS, GROUPS, torch.ones(4), log_weights_B=log_weights
    )
    assert values.tolist() == [1, 0, 1, -1]


def test_group_without_gradients_has_no_baseline() -> None:
    values = minimum_variance_baseline(GROUPED_REWARDS, GROUPS, torch.zeros(4))
    assert values.tolist() == GROUPED_REWARDS.tolist()


def test_token_baseline_of_nearly_deterministic_tokens() -> None:
    # Energies are 1 : 1 : 2 : 4. In float32, 1 − 2π + Σπ² is 0.
    log_probs = -torch.tensor([[1.0], [1.0], [2.0**0.5], [2.0]]) * 1e-9
    values = optimal_token_baseline(
        torch.tensor([[1.0], [0.0], [1.0], [0.0]]),
        torch.ones(4, 1),
        torch.zeros(4, dtype=torch.int64),
        log_probs,
        (2 * log_probs).exp(),
    )
    expected = [1 - 3 / 8, -3 / 8, 1 - 3 / 8, -3 / 8]
    assert values.flatten().tolist() == pytest.approx(expected, rel=1e-4)


def test_token_without_a_log_prob_has_no_energy() -> None:
    # Other energies are equal: paths are 1, 1, 1 and 2, 1, 2.
    log_probs = torch.tensor([[-1.0, -1.0], [-1.0, math.nan], [-1.0, -1.0]])
    values = optimal_token_baseline(
        torch.tensor([[0.0, 1.0], [0.0, 4.0], [0.0, 1.0]]),
        torch.ones(3, 2),
        torch.zeros(3, dtype=torch.int64),
        log_probs,
        (2 * log_probs).exp(),
    )
    expected = [[-1.0, -0.6], [2.0, 2.4], [-1.0, -0.6]]
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float64))
