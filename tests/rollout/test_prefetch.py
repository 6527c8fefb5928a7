"""Prefetched rollouts, unfinished groups, dynamic sampling and user functions around a rollout."""

import math
import re
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.errors import CustomFunctionError
from slime_tis.hf_directory import ModelSizes
from slime_tis.trainer.agents.custom_generate import build_generate_function
from slime_tis.trainer.agents.rollout_function import CustomRollout
from slime_tis.trainer.data.data_source import CustomDataSource
from slime_tis.trainer.data.prompts import PromptDataset
from slime_tis.trainer.data.sample import Prompt, Sample
from slime_tis.trainer.engines.rollout_engine import RolloutEngine
from slime_tis.trainer.rollout.filter_hub import (
    MAX_REASONS,
    DynamicFilterOutput,
    accepted_groups,
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
    collect,
)
from slime_tis.trainer.rollout.hooks import RolloutHooks
from slime_tis.trainer.rollout.prefetch import Prefetcher, Unfinished
from tests.rollout.test_rewards import make_config, make_samples
from tests.samples import make_sample


@dataclass
class Log:
    """A data set of numbers, two a batch, and the batches that were submitted."""

    place: int = 0
    submitted: list[tuple[int, list[int]]] = field(default_factory=list)

    def next_batch(self, size):
        self.place += size
        return list(range(self.place - size, self.place))

    def state_dict(self):
        return {"place": self.place}

    def submit(self, prompts, number):
        self.submitted.append((number, prompts))
        return SimpleNamespace(result=lambda: prompts)


def run(depth, rollouts=4):
    log, found, places = Log(), [], []
    prefetcher = Prefetcher(log, log.submit, prompts=lambda: 2, depth=depth)
    for number in range(rollouts):
        found.append(prefetcher.next(number, rollouts - 1))
        places.append(prefetcher.state_dict()["place"])
    return found, log, places


def test_rollouts_in_flight_follow_the_lookahead_up_to_the_last():
    found, log, places = run(0)
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [number for number, _ in log.submitted] == [0, 1, 2, 3]
    assert places == [2, 4, 6, 8]
    for depth in (1, 2, 9):
        found, log, places = run(depth)
        assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert log.submitted == list(enumerate(found))
        assert places == [2, 4, 6, 8]  # what is in flight is taken again by a resumed run
    log = Log()
    prefetcher = Prefetcher(log, log.submit, prompts=lambda: 2, depth=2)
    prefetcher.next(0, 3)
    assert [number for number, _ in log.submitted] == [0, 1, 2]


@dataclass
class Pending:
    """A rollout that is complete or not."""

    groups: list[list[Sample]]
    done: bool

    def is_done(self):
        return self.done

    def result(self):
        return self.groups


def ahead(done):
    """A prefetcher after its first batch, with a batch in flight for each entry of `done`."""
    log = Log()
    flags = iter([True, *done])

    def submit(prompts, number):
        rows = [Prompt(index=number, text="p", token_ids=(1,)) for number in prompts]
        return Pending([[make_sample(row, [2, 3])] for row in rows], next(flags))

    prefetcher = Prefetcher(log, submit, prompts=lambda: 2, depth=len(done))
    prefetcher.next(0, 9)
    return prefetcher


@pytest.mark.parametrize(
    ("done", "count"),
    [((), 0), ((True,), 1), ((True, True), 2), ((False, True), 0), ((True, False), 1)],
)
def test_batches_up_to_the_first_unfinished_one_are_saved(done, count):
    prefetcher = ahead(done)
    assert [batch.prompts for batch in prefetcher.finished()] == [2] * count
    assert prefetcher.state_dict()["place"] == 2  # before the batches in flight


def test_saved_samples_stay_as_the_engine_made_them():
    prefetcher = ahead((True,))
    (saved,) = prefetcher.finished()
    ((sample,), _) = prefetcher.next(1, 1)
    sample.loss_mask[0] = 0
    sample.metadata["seen"] = True
    sample.reward = 1.0
    kept = saved.groups[0][0]
    assert (list(kept.loss_mask), kept.metadata, kept.reward) == ([1, 1], {}, None)
    assert sample.prompt_row is kept.prompt_row


def test_saved_batches_of_other_prompts_are_refused():
    (saved,) = ahead((True,)).finished()
    later = Log(place=7)
    later.next_batch = lambda size: [
        Prompt(index=7 + n, text="p", token_ids=(1,)) for n in range(size)
    ]
    prefetcher = Prefetcher(later, later.submit, prompts=lambda: 2, depth=1)
    with pytest.raises(ValueError, match="answer other prompts than those that come next"):
        prefetcher.restore([saved])


class Engine:
    def __init__(self, groups):
        self.groups = groups

    def unfinished(self):
        return self.groups

    def resume_unfinished(self, groups):
        self.groups = groups


def group(number):
    prompt = Prompt(index=number, text="p", token_ids=(1,))
    return [
        make_sample(prompt, [2, 3], group_index=number, status=Sample.Status.ABORTED)
        for _ in range(2)
    ]


def made(filter_function, count=4):
    engine = Engine([group(number) for number in range(count)])
    functions = {} if filter_function is None else {"buffer_filter_path": filter_function}
    choose = RolloutHooks(args=Namespace(), functions=functions).choose
    return Unfinished(engine=cast(RolloutEngine, engine), choose=choose), engine


def numbers(groups):
    return [samples[0].group_index for samples in groups]


def pop_last(args, rollout_id, buffer, num_samples):
    chosen = [buffer.pop()]
    del buffer[0]
    return chosen


def test_groups_that_are_left_wait_and_come_first():
    unfinished, engine = made(pop_last)
    assert unfinished.take(8) == 1
    assert numbers(engine.groups) == [3]
    assert unfinished.metrics() == {"rollout/buffer_waiting": 2, "rollout/buffer_dropped": 1}
    engine.groups = [group(9)]  # what the batch left unfinished
    assert numbers(unfinished.groups()) == [1, 2, 9]
    assert unfinished.take(8) == 1
    assert numbers(engine.groups) == [9]
    assert numbers(unfinished.waiting) == [2]
    assert unfinished.metrics() == {"rollout/buffer_waiting": 1, "rollout/buffer_dropped": 1}


def test_returned_groups_are_taken_once_and_all_without_a_filter():
    unfinished, engine = made(lambda args, rollout_id, buffer, num_samples: buffer[1:2])
    assert unfinished.take(8) == 1
    assert (numbers(engine.groups), numbers(unfinished.waiting)) == ([1], [0, 2, 3])
    unfinished, engine = made(None)
    assert unfinished.take(2) == 4
    assert (numbers(engine.groups), unfinished.waiting, unfinished.metrics()) == (
        [0, 1, 2, 3],
        [],
        {},
    )


def mutate(args, rollout_id, buffer, num_samples):
    buffer[0][0].tokens[0] = 7
    return buffer[:1]


WHAT_A_FILTER = {
    "None": (
        lambda args, rollout_id, buffer, num_samples: None,
        "returned None; Input should be a valid list",
    ),
    "copy": (
        lambda args, rollout_id, buffer, num_samples: [list(buffer[0])],
        "different lists of the buffer",
    ),
    "twice": (
        lambda args, rollout_id, buffer, num_samples: [buffer[0], buffer[0]],
        "different lists of the buffer",
    ),
    "too many": (
        lambda args, rollout_id, buffer, num_samples: buffer,
        "returned 4 groups; return at most num_samples, 3",
    ),
    "raises": (lambda args, rollout_id, buffer, num_samples: 1 / 0, "ZeroDivisionError"),
    "mutates": (mutate, "changed"),
}


@pytest.mark.parametrize(("function", "message"), WHAT_A_FILTER.values(), ids=WHAT_A_FILTER)
def test_what_a_filter_may_not_do_is_one_message(function, message):
    with pytest.raises(CustomFunctionError, match=message) as error:
        made(function)[0].take(3)
    assert Path(__file__).name in str(error.value)


def groups_of(*rewards):
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


def test_with_fallback_one_batch_is_enough_and_reasons_are_bounded():
    found = collect(
        batches([EQUAL, EQUAL, UNEQUAL]),
        2,
        judge_with(check_reward_nonzero_std_with_fallback),
        max_batches=1,
    )
    assert [group[0].group_index for group in found.groups] == [1, 2]
    assert found.metrics["rollout/dynamic_filter/dropped"] == 1
    reasons = Counter()
    outputs = [
        DynamicFilterOutput(keep=False, reason=str(number)) for number in range(MAX_REASONS + 5)
    ]
    assert accepted_groups(groups_of(EQUAL) * len(outputs), outputs, 1, reasons) == []
    assert len(reasons) == MAX_REASONS + 1 and reasons["other"] == 5


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 12))
def test_a_fallback_drops_as_many_as_leave_enough(keeps, missing):
    outputs = [
        DynamicFilterOutput(keep=keep, reason="x", keep_when_insufficient=True) for keep in keeps
    ]
    kept = accepted_groups(groups_of(EQUAL) * len(keeps), outputs, missing, Counter())
    assert len(kept) == max(sum(keeps), min(missing, len(keeps)))


def test_the_filter_of_dapo_drops_nearly_equal_rewards_and_single_samples():
    nearly_equal, single = groups_of((0.5, 0.5 + 1e-7), (3.0,))
    assert check_reward_nonzero_std(None, nearly_equal) == DynamicFilterOutput(
        keep=False, reason="zero_std_0.5"
    )
    assert check_reward_nonzero_std(None, single) == DynamicFilterOutput(
        keep=False, reason="zero_std_3.0"
    )


def load(tmp_path, option, code):
    path = tmp_path / f"hook_{len(list(tmp_path.iterdir()))}.py"
    path.write_text(code)
    return RolloutHooks.load(
        make_config(rm_type="random", **{option: f"{path}:fn"}), Namespace(scale=2)
    )


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
    hooks = load(
        tmp_path, "dynamic_sampling_filter_path", f"def fn(args, samples, **kwargs):\n    {body}\n"
    )
    assert hooks.judge(groups_of((1.0, 2.0), (0.0, 0.0))) == [
        DynamicFilterOutput(keep=True),
        DynamicFilterOutput(keep=False),
    ]


def test_reasons_are_cut_and_lists_may_be_emptied(tmp_path):
    output = "type('O', (), dict(keep=False, reason='a\\nb' + 'x' * 200))()"
    hooks = load(
        tmp_path, "dynamic_sampling_filter_path", f"def fn(args, samples):\n    return {output}\n"
    )
    (verdict,) = hooks.judge(groups_of((1.0, 2.0)))
    assert verdict.reason.startswith("a bxx") and len(verdict.reason) == 100
    code = (
        "def fn(args, samples):\n    samples[0].metadata['seen'] = 1\n    samples.clear()\n   "
        " return True\n"
    )
    groups = groups_of((1.0, 2.0))
    assert load(tmp_path, "dynamic_sampling_filter_path", code).judge(groups)[0].keep
    assert len(groups[0]) == 2 and groups[0][0].metadata == {"group": 0, "seen": 1}


def test_rewards_are_shaped(tmp_path):
    code = (
        "def fn(args, samples):\n"
        "    raw = [sample.reward for sample in samples]\n"
        "    return raw, [args.scale * reward for reward in raw]\n"
    )
    shaped = load(tmp_path, "custom_reward_post_process_path", code).shape_rewards(
        groups_of((1.0, 2.0), (0.0, 1.0))
    )
    assert shaped == ([1.0, 2.0, 0.0, 1.0], [2.0, 4.0, 0.0, 2.0])


def test_log_functions_get_their_arguments_and_say_whether_the_rest_is_logged(tmp_path):
    code = (
        "def fn(rollout_id, args, samples, rollout_extra_metrics, rollout_time):\n    assert"
        " (rollout_id, len(samples), rollout_extra_metrics, rollout_time) == (3, 2, {'x': 1.0},"
        " 0.5)\n    return RETURNED\n"
    )
    for returned, logs in {"True": False, "False": True, "None": True}.items():
        hooks = load(
            tmp_path, "custom_rollout_log_function_path", code.replace("RETURNED", returned)
        )
        assert hooks.logs_rollout(3, groups_of((1.0, 2.0)), {"x": 1.0}, 0.5) is logs
    code = (
        "def fn(rollout_id, args, data, extra_metrics):\n    assert data['a']['rewards'] == [1.0,"
        " 2.0] and data['a']['truncated'] == [False, False]\n    return len(data['a']['samples'])"
        " == 2\n"
    )
    hooks = load(tmp_path, "custom_eval_rollout_log_function_path", code)
    assert hooks.logs_evaluation(0, {"a": groups_of((1.0, 2.0))[0]}) is False


SOURCE = """
from slime.utils.types import Sample
class Source:
    def __init__(self, args):
        self.count, self.saved = 0, {}
    def get_samples(self, num_samples):
        GROUPS
    def add_samples(self, samples):
        pass
    def save(self, rollout_id):
        self.saved[rollout_id] = self.count
    def load(self, rollout_id=None):
        self.count = 10 * rollout_id
    def __len__(self):
        return 7
"""
COUNTING = """self.count += num_samples
        return [[Sample(prompt=str(self.count - num_samples + place))] * 2 for place in range(num_samples)]"""


@pytest.fixture
def make_source(tmp_path, tokenizer):
    def go(groups=COUNTING, code=SOURCE):
        path = tmp_path / f"source_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(code.replace("GROUPS", groups))
        config = make_config(rm_type="random", n_samples_per_prompt=2, rollout_max_prompt_len=20)
        sizes = ModelSizes(context_len=None, vocab_size=None)
        return CustomDataSource(f"{path}:Source", Namespace(), tokenizer, config, sizes)

    return go


def test_prompts_are_tokenized_and_numbered(make_source, tokenizer):
    source = make_source()
    prompts = [*source.next_batch(2), *source.next_batch(1)]
    assert [(prompt.index, prompt.text) for prompt in prompts] == [(0, "0"), (1, "1"), (2, "2")]
    assert prompts[1].token_ids == tuple(tokenizer("1")["input_ids"]) and len(source) == 7
    group = "return [[Sample(prompt='ab', tokens=[3, 4], label=5, metadata={'a': 1})] * 2]"
    (prompt,) = make_source(group).next_batch(1)
    assert (prompt.token_ids, prompt.label, prompt.metadata) == ((3, 4), 5, {"a": 1})


def test_what_was_handed_out_and_not_trained_on_comes_first(make_source):
    source, log = make_source(), Log()
    prefetcher = Prefetcher(source, log.submit, prompts=lambda: 2, depth=1)
    prefetcher.next(0, 9)  # 0 and 1 are trained on, 2 and 3 are in flight
    state = source.checkpoint(prefetcher.state_dict(), 0)
    assert source.source.saved == {0: 4}
    assert (state["taken"], [row["text"] for row in state["pending"]], state["batch"]) == (
        2,
        ["2", "3"],
        1,
    )
    again = make_source()
    again.load_state_dict(state | {"saved": 1})
    assert [prompt.text for prompt in again.next_batch(1)] == ["2"]
    assert [row["text"] for row in again.checkpoint({"taken": 2}, 1)["pending"]] == ["2", "3"]
    assert [(prompt.text, prompt.index) for prompt in again.next_batch(3)] == [
        ("3", 3),
        ("10", 4),
        ("11", 5),
    ]
    with pytest.raises(ValueError, match="the checkpoint is of a run without --data-source-path"):
        make_source().load_state_dict({"epoch": 0, "position": 0})


def test_what_raises_or_lacks_a_method_is_one_message(make_source):
    with pytest.raises(
        CustomFunctionError, match=r"get_samples \(.*source_0.py, line 7\) raised ZeroDivisionError"
    ):
        make_source("return num_samples / 0").next_batch(2)
    with pytest.raises(
        CustomFunctionError, match="has no method add_samples; write get_samples, add_sam"
    ):
        make_source(code=SOURCE.replace("add_samples", "put"))
    with pytest.raises(
        CustomFunctionError, match=r"cannot be called as .*save\(self, rollout_id\)"
    ):
        make_source(code=SOURCE.replace("def save(self, rollout_id)", "def save(self)"))


ROLLOUT = """
from slime.rollout.base_types import RolloutFnTrainOutput
def fn(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(2)
    for group in groups:
        for sample in group:
            sample.tokens, sample.response_length = sample.tokens + [5, 6], 2
            sample.rollout_log_probs, sample.loss_mask = [-1.0, -2.0], [1, 1]
            sample.status = sample.Status.COMPLETED
    sample, metrics = groups[1][0], {"seen": rollout_id}
    BODY
    return RolloutFnTrainOutput(groups, metrics)
"""


@pytest.fixture
def make_rollout(tmp_path, tokenizer):
    def go(body="pass"):
        (tmp_path / "own.py").write_text(ROLLOUT.replace("BODY", body))
        (tmp_path / "p.jsonl").write_text("".join(f'{{"input": "{n}>"}}\n' for n in range(6)))
        options = {"rm_type": "random", "n_samples_per_prompt": 2}
        config = make_config(**options, rollout_function_path=f"{tmp_path / 'own.py'}:fn")
        dataset = PromptDataset(tmp_path / "p.jsonl", tokenizer, config)
        sizes = ModelSizes(context_len=64, vocab_size=300)
        values = {
            "sizes": sizes,
            "version": lambda: 7,
            "address": ("host", 1),
            "option": "rollout_function_path",
        }
        checks = build_generate_function(config, Namespace(), tokenizer, **values)
        return CustomRollout(checks=checks, dataset=dataset, config=config)

    return go


def test_groups_are_numbered_and_take_the_prompts_in_order(make_rollout):
    rollout = make_rollout(
        "assert (args.sglang_router_ip, args.sglang_router_port, len(data_source)) == ('host',"
        " 1, 6)"
    )
    groups, metrics = rollout(3)
    assert [
        [(sample.prompt_index, sample.group_index, sample.index) for sample in group]
        for group in groups
    ] == [
        [(0, 0, 0), (0, 0, 1)],
        [(1, 1, 2), (1, 1, 3)],
    ]
    sample = groups[0][0]
    assert (sample.response_ids, sample.weight_versions, sample.reward) == ([5, 6], [7, 7], None)
    assert metrics == {"rollout/seen": 3.0}
    assert [group[0].prompt_index for group in rollout(4)[0]] == [2, 3]
    assert rollout.dataset.state_dict()["position"] == 4


def test_segments_stay_together_and_masked_tokens_need_no_log_prob(make_rollout):
    body = "import copy; sample.rollout_id = groups[1][1].rollout_id = 9; extra = copy.copy(sample)"
    groups, _ = make_rollout(body + "; groups[1] = [[sample, extra], copy.copy(groups[0][1])]")(0)
    assert [(sample.index, sample.rollout_id) for sample in groups[1]] == [(2, 2), (2, 2), (3, 3)]
    groups, _ = make_rollout(
        "sample.loss_mask, sample.rollout_log_probs = [1, 0], [-1.0, float('nan')]"
    )(0)
    assert groups[1][0].rollout_log_probs[0] == -1.0 and not math.isnan(
        groups[1][0].rollout_log_probs[1]
    )


BROKEN = {
    "filter": {
        "return 1 / 0": "raised ZeroDivisionError",
        "pass": "returned None; Input should be a valid boolean",
        "samples[0].tokens.append(1); return True": "changed a sample of prompt",
        "samples[0].reward = 7.0; return True": "changed the reward of a sample of prompt 10",
    },
    "rewards": {
        "return None": "returned None; Input should be a valid tuple",
        "return [1.0], [1.0]": "returned 1 raw_rewards and 1 rewards for 2 samples",
        "return [1.0, 2.0], [1.0, float('nan')]": (
            "returned 2 raw_rewards and 2 rewards for 2 samples"
        ),
        "return [1.0, 2.0], ['a', 'b']": "1: 0: Input should be a valid number",
    },
    "source": {
        "return []": "returned 0 groups for num_samples=2",
        "return [[Sample(prompt='a')]] * 2": "a group has 2 samples (--n-samples-per-prompt)",
        "return [[Sample(prompt='a'), Sample(prompt='b')]] * 2": "with one prompt",
        "return [[Sample(prompt='a', tokens=[1, 2], response_length=1)] * 2] * 2": (
            "without responses"
        ),
        "return [[Sample()] * 2] * 2": "returned group 0 has an empty prompt.",
        "return [[Sample(prompt='a' * 500)] * 2] * 2": "returned group 0 of 500 tokens",
    },
    "rollout": {
        "groups = groups[:1]": "returned 1 groups; return 2 (--rollout-batch-size).",
        "groups[1] = [sample]": "returned 1 samples in group 1; return 2 (--n-samples-per-prompt)",
        "sample.rollout_log_probs = None": "returned a sample without rollout_log_probs",
        "sample.rollout_log_probs[0] = -1e999": (
            "gave the log-prob -inf for response token 0, which"
        ),
        "sample.tokens[-1] = 300": "gave the token 300; the vocabulary ends at 299",
        "sample.reward = 1e308": (
            "gave the reward 1e+308; it must be a finite number of at most 1e+150"
        ),
        "data_source.add_samples(groups)": "raised RuntimeError: prompts of a file are read-only",
        "metrics = {'a': float('nan')}": (
            "returned {'rollout/a': nan} as metrics; return finite numbers"
        ),
    },
}


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        pytest.param(kind, body, message, id=f"{kind}: {body}")
        for kind, table in BROKEN.items()
        for body, message in table.items()
    ],
)
def test_a_broken_contract_is_one_message(tmp_path, make_source, make_rollout, kind, body, message):
    code = f"def fn(args, samples):\n    {body}\n"
    calls = {
        "filter": (
            lambda: load(tmp_path, "dynamic_sampling_filter_path", code).judge(
                groups_of((1.0, 2.0))
            )
        ),
        "rewards": (
            lambda: load(tmp_path, "custom_reward_post_process_path", code).shape_rewards(
                groups_of((1.0, 2.0))
            )
        ),
        "source": lambda: make_source(body).next_batch(2),
        "rollout": lambda: make_rollout(body)(0),
    }
    with pytest.raises(CustomFunctionError) as refusal:
        calls[kind]()
    said = str(refusal.value)
    assert (
        re.match(rf"(fn|Source.get_samples) \({tmp_path}/\w+\.py, line \d+\) ", said)
        and message in said
    )
