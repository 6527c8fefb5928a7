"""The user's functions around a rollout, held to their contracts."""

from argparse import Namespace
from pathlib import Path

import pytest

from slime_tis.errors import CustomFunctionError
from slime_tis.trainer.rollout.filter_hub import DynamicFilterOutput
from slime_tis.trainer.rollout.hooks import RolloutHooks, ShapedRewards
from tests.rollout.test_rewards import make_config, make_samples


def load(tmp_path: Path, option: str, code: str) -> RolloutHooks:
    """The hook `fn` of a file with this code."""
    path = tmp_path / f"hook_{len(list(tmp_path.iterdir()))}.py"
    path.write_text(code)
    return RolloutHooks.load(make_config(rm_type="random", **{option: f"{path}:fn"}), Namespace(scale=2))


def groups_of(*rewards):
    groups = []
    for number, of_group in enumerate(rewards):
        samples = make_samples(["a"] * len(of_group))
        for place, (sample, reward) in enumerate(zip(samples, of_group, strict=True)):
            sample.reward, sample.group_index, sample.index = reward, number, 2 * number + place
        groups.append(samples)
    return groups


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
def test_a_filter_returns_a_bool_or_an_output(tmp_path, body):
    hooks = load(tmp_path, "dynamic_sampling_filter_path", f"def fn(args, samples, **kwargs):\n    {body}\n")
    assert hooks.judge(groups_of((1.0, 2.0), (0.0, 0.0))) == [
        DynamicFilterOutput(keep=True),
        DynamicFilterOutput(keep=False),
    ]


WRONG_FILTERS = {
    "raises": ("return 1 / 0", "raised ZeroDivisionError"),
    "none": ("pass", "returned None; Input should be a valid boolean"),
    "tokens": ("samples[0].tokens.append(1); return True", "changed the tokens"),
    "reward": ("samples[0].reward = 7.0; return True", "changed the reward of a sample of prompt 10"),
}


@pytest.mark.parametrize(("body", "message"), WRONG_FILTERS.values(), ids=WRONG_FILTERS)
def test_a_filter_that_breaks_the_contract_is_one_message(tmp_path, body, message):
    hooks = load(tmp_path, "dynamic_sampling_filter_path", f"def fn(args, samples):\n    {body}\n")
    with pytest.raises(CustomFunctionError) as refusal:
        hooks.judge(groups_of((1.0, 2.0)))
    said = str(refusal.value)
    assert said.startswith(f"fn ({tmp_path}/hook_0.py, line ") and message in said


def test_a_reason_becomes_part_of_a_metrics_name(tmp_path):
    output = "type('O', (), dict(keep=False, reason='a\\nb' + 'x' * 200))()"
    hooks = load(tmp_path, "dynamic_sampling_filter_path", f"def fn(args, samples):\n    return {output}\n")
    (verdict,) = hooks.judge(groups_of((1.0, 2.0)))
    assert verdict.reason.startswith("a bxx") and len(verdict.reason) == 100


def test_a_filter_may_empty_its_list_and_write_metadata(tmp_path):
    code = "def fn(args, samples):\n    samples[0].metadata['seen'] = 1\n    samples.clear()\n    return True\n"
    groups = groups_of((1.0, 2.0))
    assert load(tmp_path, "dynamic_sampling_filter_path", code).judge(groups)[0].keep
    assert len(groups[0]) == 2 and groups[0][0].metadata == {"group": 0, "seen": 1}


def test_rewards_are_shaped(tmp_path):
    code = (
        "def fn(args, samples):\n"
        "    raw = [sample.reward for sample in samples]\n"
        "    return raw, [args.scale * reward for reward in raw]\n"
    )
    shaped = load(tmp_path, "custom_reward_post_process_path", code).shape_rewards(groups_of((1.0, 2.0), (0.0, 1.0)))
    assert shaped == ShapedRewards(raw=[1.0, 2.0, 0.0, 1.0], advantages=[2.0, 4.0, 0.0, 2.0])


WRONG_REWARDS = {
    "nothing": ("None", "returned None; Input should be a valid tuple"),
    "too few": ("[1.0], [1.0]", "returned 1 raw_rewards and 1 rewards for 2 samples"),
    "nan": (
        "[1.0, 2.0], [1.0, float('nan')]",
        "returned 2 raw_rewards and 2 rewards for 2 samples",
    ),
    "text": ("[1.0, 2.0], ['a', 'b']", "returned ([1.0, 2.0], ['a', 'b']); 1: 0: Input should be a valid number"),
}


@pytest.mark.parametrize(("returned", "message"), WRONG_REWARDS.values(), ids=WRONG_REWARDS)
def test_wrong_shaped_rewards_are_one_message(tmp_path, returned, message):
    hooks = load(tmp_path, "custom_reward_post_process_path", f"def fn(args, samples):\n    return {returned}\n")
    with pytest.raises(CustomFunctionError) as refusal:
        hooks.shape_rewards(groups_of((1.0, 2.0)))
    assert str(refusal.value).startswith(f"fn ({tmp_path}/hook_0.py, line 1) {message}")


def test_a_log_function_says_whether_the_rest_is_logged(tmp_path):
    code = (
        "def fn(rollout_id, args, samples, rollout_extra_metrics, rollout_time):\n"
        "    assert (rollout_id, len(samples), rollout_extra_metrics, rollout_time) == (3, 2, {'x': 1.0}, 0.5)\n"
        "    return RETURNED\n"
    )
    for returned, logs in {"True": False, "False": True, "None": True}.items():
        hooks = load(tmp_path, "custom_rollout_log_function_path", code.replace("RETURNED", returned))
        assert hooks.logs_rollout(3, groups_of((1.0, 2.0)), {"x": 1.0}, 0.5) is logs


def test_an_evaluation_log_function_gets_rewards_and_samples_of_each_set(tmp_path):
    code = (
        "def fn(rollout_id, args, data, extra_metrics):\n"
        "    assert data['a']['rewards'] == [1.0, 2.0] and data['a']['truncated'] == [False, False]\n"
        "    return len(data['a']['samples']) == 2\n"
    )
    hooks = load(tmp_path, "custom_eval_rollout_log_function_path", code)
    assert hooks.logs_evaluation(0, {"a": groups_of((1.0, 2.0))[0]}) is False
