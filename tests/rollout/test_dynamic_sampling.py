"""Which groups dynamic sampling accepts, in numbers worked out by hand."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.trainer.rollout.dynamic_sampling import MAX_REASONS, accepted_groups, collect
from slime_tis.trainer.rollout.filter_hub import (
    DynamicFilterOutput,
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from tests.rollout.test_rewards import make_samples


def groups_of(*rewards):
    """Groups with these rewards."""
    groups = []
    for number, of_group in enumerate(rewards):
        samples = make_samples(["a"] * len(of_group))
        for place, (sample, reward) in enumerate(zip(samples, of_group, strict=True)):
            sample.reward, sample.group_index, sample.index = reward, number, 2 * number + place
        groups.append(samples)
    return groups


EQUAL, UNEQUAL = (1.0, 1.0), (0.0, 1.0)


def judge_with(function):
    return lambda groups: [function(None, group) for group in groups]


def batches(*rewards):
    return (groups_of(*batch) for batch in rewards)


def test_groups_of_equal_rewards_are_replaced_and_counted_by_reason():
    found = collect(
        batches([EQUAL, UNEQUAL, (0.25, 0.25)], [UNEQUAL, EQUAL, UNEQUAL]),
        2,
        judge_with(check_reward_nonzero_std),
        max_batches=2,
    )
    assert [group[0].group_index for group in found.groups] == [1, 3]
    assert [sample.index for group in found.groups for sample in group] == [2, 3, 6, 7]
    assert [group[0].group_index for group in found.sampled] == [0, 1, 2, 3, 4, 5]
    assert found.metrics == {
        "rollout/dynamic_filter/batches": 2,
        "rollout/dynamic_filter/sampled": 6,
        "rollout/dynamic_filter/dropped": 3,
        "rollout/dynamic_filter/unused": 1,
        "rollout/dynamic_filter/raw_reward": pytest.approx((1 + 0.5 + 0.25 + 0.5 + 1 + 0.5) / 6),
        "rollout/dynamic_filter/drop_zero_std_1.0": 2,
        "rollout/dynamic_filter/drop_zero_std_0.2": 1,
    }


def test_with_fallback_one_batch_is_enough():
    found = collect(
        batches([EQUAL, EQUAL, UNEQUAL]), 2, judge_with(check_reward_nonzero_std_with_fallback), max_batches=1
    )
    assert [group[0].group_index for group in found.groups] == [1, 2]
    assert found.metrics["rollout/dynamic_filter/dropped"] == 1


def test_reasons_without_end_are_counted_together():
    reasons = Counter()
    outputs = [DynamicFilterOutput(keep=False, reason=str(number)) for number in range(MAX_REASONS + 5)]
    assert accepted_groups(groups_of(EQUAL) * len(outputs), outputs, 1, reasons) == []
    assert len(reasons) == MAX_REASONS + 1 and reasons["other"] == 5


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 12))
def test_a_fallback_drops_as_many_as_leave_enough(keeps, missing):
    outputs = [DynamicFilterOutput(keep=keep, reason="x", keep_when_insufficient=True) for keep in keeps]
    kept = accepted_groups(groups_of(EQUAL) * len(keeps), outputs, missing, Counter())
    assert len(kept) == max(sum(keeps), min(missing, len(keeps)))


THE_FILTER_OF = {
    "unequal": ((0.0, 1.0), True, None),
    "equal": ((1.0, 1.0, 1.0), False, "zero_std_1.0"),
    "nearly equal": ((0.5, 0.5 + 1e-7), False, "zero_std_0.5"),
    "one sample": ((3.0,), False, "zero_std_3.0"),
}


@pytest.mark.parametrize(("rewards", "keep", "reason"), THE_FILTER_OF.values(), ids=THE_FILTER_OF)
def test_the_filter_of_dapo(rewards, keep, reason):
    output = check_reward_nonzero_std(None, groups_of(rewards)[0])
    assert output == DynamicFilterOutput(keep=keep, reason=reason)
    assert check_reward_nonzero_std_with_fallback(None, groups_of(rewards)[0]).keep_when_insufficient
