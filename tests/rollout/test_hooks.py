"""Dynamic sampling, shaped rewards and log functions around a rollout."""

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.errors import CustomFunctionError
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.rollout.filter_hub import (
    MAX_REASONS,
    Collected,
    DynamicFilterOutput,
    accepted_groups,
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
    collect,
)
from slime_tis.trainer.rollout.hooks import RolloutHooks
from tests.rollout.test_rewards import make_config, make_samples

Group = list[Sample]
Rewards = tuple[float, ...]
EQUAL: Rewards = (1.0, 1.0)
UNEQUAL: Rewards = (0.0, 1.0)


def groups_of(*rewards: Rewards) -> list[Group]:
    """A group for each tuple of rewards."""
    groups = []
    index = 0
    for number, group_rewards in enumerate(rewards):
        samples = make_samples(["a"] * len(group_rewards))
        for sample, reward in zip(samples, group_rewards, strict=True):
            sample.reward = reward
            sample.group_index = number
            sample.index = index
            index += 1
        groups.append(samples)
    return groups


def group_numbers(groups: list[Group]) -> list[int | None]:
    return [group[0].group_index for group in groups]


Filter = Callable[[Any, Group], DynamicFilterOutput]


def collect_two(dynamic_filter: Filter, *batches: list[Rewards], max_batches: int) -> Collected:
    """Samples batches until the filter has accepted two groups."""

    def judge(groups: Sequence[Group]) -> list[DynamicFilterOutput]:
        return [dynamic_filter(None, group) for group in groups]

    groups = (groups_of(*batch) for batch in batches)
    return collect(groups, 2, judge, max_batches=max_batches)


@pytest.fixture
def collected() -> Collected:
    """Two groups with unequal rewards, of two batches of three groups."""
    return collect_two(
        check_reward_nonzero_std,
        [EQUAL, UNEQUAL, (0.25, 0.25)],
        [UNEQUAL, EQUAL, UNEQUAL],
        max_batches=2,
    )


def test_groups_of_equal_rewards_are_replaced(collected):
    assert group_numbers(collected.groups) == [1, 3]


def test_samples_of_all_batches_have_different_indices(collected):
    assert [sample.index for group in collected.groups for sample in group] == [2, 3, 6, 7]


def test_all_sampled_groups_are_reported(collected):
    assert group_numbers(collected.sampled) == [0, 1, 2, 3, 4, 5]


def test_dropped_groups_are_counted_by_reason(collected):
    assert collected.metrics == {
        "rollout/dynamic_filter/batches": 2,
        "rollout/dynamic_filter/sampled": 6,
        "rollout/dynamic_filter/dropped": 3,
        "rollout/dynamic_filter/unused": 1,
        "rollout/dynamic_filter/raw_reward": pytest.approx((1 + 0.5 + 0.25 + 0.5 + 1 + 0.5) / 6),
        "rollout/dynamic_filter/drop_zero_std_1.0": 2,
        "rollout/dynamic_filter/drop_zero_std_0.2": 1,
    }


def test_fallback_fills_one_batch_with_dropped_groups():
    fallback = check_reward_nonzero_std_with_fallback
    collected = collect_two(fallback, [EQUAL, EQUAL, UNEQUAL], max_batches=1)
    assert group_numbers(collected.groups) == [1, 2]
    assert collected.metrics["rollout/dynamic_filter/dropped"] == 1


def test_reasons_beyond_the_limit_are_counted_together():
    reasons: Counter[str] = Counter()
    outputs = []
    for number in range(MAX_REASONS + 5):
        outputs.append(DynamicFilterOutput(keep=False, reason=str(number)))
    assert accepted_groups(groups_of(EQUAL) * len(outputs), outputs, 1, reasons) == []
    assert len(reasons) == MAX_REASONS + 1
    assert reasons["other"] == 5


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 12))
def test_fallback_drops_only_groups_that_are_not_needed(keeps, missing):
    outputs = [
        DynamicFilterOutput(keep=keep, reason="x", keep_when_insufficient=True) for keep in keeps
    ]
    kept = accepted_groups(groups_of(EQUAL) * len(keeps), outputs, missing, Counter())
    assert len(kept) == max(sum(keeps), min(missing, len(keeps)))


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((0.5, 0.5 + 1e-7), "zero_std_0.5"), ((3.0,), "zero_std_3.0")],
    ids=["nearly equal", "one sample"],
)
def test_the_filter_of_dapo_needs_different_rewards(rewards, reason):
    (group,) = groups_of(rewards)
    expected = DynamicFilterOutput(keep=False, reason=reason)
    assert check_reward_nonzero_std(None, group) == expected


LoadHook = Callable[[str, str], RolloutHooks]


@pytest.fixture
def load_hook(tmp_path: Path) -> LoadHook:
    """Writes code with a function `fn`, and loads it for an option."""

    def load(option: str, code: str) -> RolloutHooks:
        path = tmp_path / "hook.py"
        path.write_text(code)
        config = make_config(rm_type="random", **{option: f"{path}:fn"})
        return RolloutHooks.load(config, Namespace(scale=2))

    return load


FILTERS = {
    "bool": "return samples[0].reward > 0",
    "slime": (
        "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"
        "    return DynamicFilterOutput(keep=samples[0].reward > 0)"
    ),
    "tensor": "import torch\n    return torch.tensor(samples[0].reward) > 0",
    "by name": (
        "from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std\n"
        "    return check_reward_nonzero_std(args, samples).keep"
    ),
}


@pytest.mark.parametrize("body", FILTERS.values(), ids=FILTERS)
def test_a_filter_returns_a_bool_or_an_output(load_hook, body):
    code = f"def fn(args, samples, **kwargs):\n    {body}\n"
    hooks = load_hook("dynamic_sampling_filter_path", code)
    accepted, dropped = hooks.judge(groups_of((1.0, 2.0), (0.0, 0.0)))
    assert accepted == DynamicFilterOutput(keep=True)
    assert dropped == DynamicFilterOutput(keep=False)


def test_a_long_reason_becomes_one_short_line(load_hook):
    output = "type('O', (), dict(keep=False, reason='a\\nb' + 'x' * 200))()"
    code = f"def fn(args, samples):\n    return {output}\n"
    (verdict,) = load_hook("dynamic_sampling_filter_path", code).judge(groups_of(UNEQUAL))
    assert verdict.reason.startswith("a bxx")
    assert len(verdict.reason) == 100


CLEARING = """
def fn(args, samples):
    samples[0].metadata["seen"] = 1
    samples.clear()
    return True
"""


def test_a_filter_may_empty_its_list(load_hook):
    groups = groups_of(UNEQUAL)
    assert load_hook("dynamic_sampling_filter_path", CLEARING).judge(groups)[0].keep
    assert len(groups[0]) == 2
    assert groups[0][0].metadata == {"group": 0, "seen": 1}


SHAPING = """
def fn(args, samples):
    raw = [sample.reward for sample in samples]
    return raw, [args.scale * reward for reward in raw]
"""


def test_rewards_are_shaped(load_hook):
    hooks = load_hook("custom_reward_post_process_path", SHAPING)
    raw, shaped = hooks.shape_rewards(groups_of((1.0, 2.0), (0.0, 1.0)))
    assert raw == [1.0, 2.0, 0.0, 1.0]
    assert shaped == [2.0, 4.0, 0.0, 2.0]


LOGGING = """
def fn(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    assert rollout_id == 3
    assert len(samples) == 2
    assert rollout_extra_metrics == {"x": 1.0}
    assert rollout_time == 0.5
    return RETURNED
"""


@pytest.mark.parametrize(
    ("returned", "logs"), [("True", False), ("False", True), ("None", True)], ids=str
)
def test_a_log_function_decides_whether_the_trainer_logs(load_hook, returned, logs):
    code = LOGGING.replace("RETURNED", returned)
    hooks = load_hook("custom_rollout_log_function_path", code)
    assert hooks.logs_rollout(3, groups_of((1.0, 2.0)), {"x": 1.0}, 0.5) is logs


LOGGING_OF_EVALUATION = """
def fn(rollout_id, args, data, extra_metrics):
    assert data["a"]["rewards"] == [1.0, 2.0]
    assert data["a"]["truncated"] == [False, False]
    return len(data["a"]["samples"]) == 2
"""


def test_a_log_function_of_evaluation_gets_rewards_and_samples(load_hook):
    hooks = load_hook("custom_eval_rollout_log_function_path", LOGGING_OF_EVALUATION)
    (group,) = groups_of((1.0, 2.0))
    assert hooks.logs_evaluation(0, {"a": group}) is False


WRONG_FILTERS = {
    "return 1 / 0": "raised ZeroDivisionError",
    "pass": "returned None; Input should be a valid boolean",
    "samples[0].tokens.append(1); return True": "changed a sample of prompt",
    "samples[0].reward = 7.0; return True": "changed the reward of a sample of prompt 10",
}
WRONG_REWARDS = {
    "return None": "returned None; Input should be a valid tuple",
    "return [1.0], [1.0]": "returned 1 raw_rewards and 1 rewards for 2 samples",
    "return [1.0, 2.0], [1.0, float('nan')]": "returned 2 raw_rewards and 2 rewards for 2 samples",
    "return [1.0, 2.0], ['a', 'b']": "1: 0: Input should be a valid number",
}


def assert_one_message(error: Exception, message: str) -> None:
    """The message begins with function, file and line, and contains the reason."""
    assert re.match(r"fn \(/.*/hook\.py, line \d+\) ", str(error))
    assert message in str(error)


@pytest.mark.parametrize(("body", "message"), WRONG_FILTERS.items(), ids=WRONG_FILTERS)
def test_a_wrong_filter_is_one_message(load_hook, body, message):
    code = f"def fn(args, samples):\n    {body}\n"
    hooks = load_hook("dynamic_sampling_filter_path", code)
    with pytest.raises(CustomFunctionError) as error:
        hooks.judge(groups_of((1.0, 2.0)))
    assert_one_message(error.value, message)


@pytest.mark.parametrize(("body", "message"), WRONG_REWARDS.items(), ids=WRONG_REWARDS)
def test_wrong_shaped_rewards_are_one_message(load_hook, body, message):
    code = f"def fn(args, samples):\n    {body}\n"
    hooks = load_hook("custom_reward_post_process_path", code)
    with pytest.raises(CustomFunctionError) as error:
        hooks.shape_rewards(groups_of((1.0, 2.0)))
    assert_one_message(error.value, message)
