"""pass@k of a rollout's prompts, computed by hand and by counting subsets."""

from itertools import combinations

import pytest

from slime_tis.trainer.data.sample import Prompt
from slime_tis.trainer.rollout.rollout_metrics import pass_rates
from tests.samples import make_sample


def group_of(rewards):
    prompt = Prompt(index=0, text="?", token_ids=(1,))
    return [make_sample(prompt, [2], reward=reward) for reward in rewards]


# (rewards of each prompt, expected rates)
CASES = {
    "one of four": ([[1, 0, 0, 0]], {"pass@1": 0.25, "pass@2": 0.5, "pass@4": 1.0}),
    "two prompts": ([[1, 0], [0, 0]], {"pass@1": 0.25, "pass@2": 0.5}),
    "only 1 passes": ([[0.99, 2.0, -1.0]], {"pass@1": 0.0, "pass@2": 0.0}),
    "all": ([[1, 1, 1]], {"pass@1": 1.0, "pass@2": 1.0}),
    "one sample": ([[1], [0]], {"pass@1": 0.5}),
    "NaN fails": ([[float("nan"), 1]], {"pass@1": 0.5, "pass@2": 1.0}),
    "groups of other sizes": ([[1, 0], [1]], {"pass@1": 0.75, "pass@2": 1.0}),
    "no prompts": ([], {}),
}


@pytest.mark.parametrize(("rewards", "expected"), CASES.values(), ids=CASES)
def test_pass_rates_by_hand(rewards, expected):
    assert pass_rates([group_of(group) for group in rewards]) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_a_rate_is_the_share_of_subsets_that_pass(k):
    rewards = [1, 0, 0, 1, 0, 0, 0, 1]
    subsets = list(combinations(rewards, k))
    passed = [subset for subset in subsets if 1 in subset]
    rates = pass_rates([group_of(rewards)])
    assert rates[f"pass@{k}"] == pytest.approx(len(passed) / len(subsets))
