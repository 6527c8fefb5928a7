"""Prompts and rollouts of user functions: --data-source-path and --rollout-function-path."""

import math
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from slime_tis.errors import CustomFunctionError
from slime_tis.hf_directory import ModelSizes
from slime_tis.trainer.agents.custom_generate import build_generate_function
from slime_tis.trainer.agents.rollout_function import CustomRollout
from slime_tis.trainer.data.data_source import CustomDataSource
from slime_tis.trainer.data.prompts import PromptDataset
from slime_tis.trainer.rollout.prefetch import Prefetcher
from tests.rollout.test_prefetch import NumberSource
from tests.rollout.test_rewards import make_config

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
COUNTING = """
        first = self.count
        self.count += num_samples
        numbers = range(first, self.count)
        return [[Sample(prompt=str(number))] * 2 for number in numbers]
"""
MakeSource = Callable[..., CustomDataSource]


@pytest.fixture
def make_source(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> MakeSource:
    """Writes a class of a data source, and loads it."""

    def make(groups: str = COUNTING, code: str = SOURCE) -> CustomDataSource:
        path = tmp_path / "source.py"
        path.write_text(code.replace("GROUPS", groups))
        config = make_config(rm_type="random", n_samples_per_prompt=2, rollout_max_prompt_len=20)
        sizes = ModelSizes(context_len=None, vocab_size=None)
        return CustomDataSource(f"{path}:Source", Namespace(), tokenizer, config, sizes)

    return make


def test_prompts_are_numbered(make_source):
    source = make_source()
    prompts = [*source.next_batch(2), *source.next_batch(1)]
    assert [(prompt.index, prompt.text) for prompt in prompts] == [(0, "0"), (1, "1"), (2, "2")]


def test_prompts_are_tokenized(make_source, tokenizer):
    (prompt,) = make_source().next_batch(1)
    assert prompt.token_ids == tuple(tokenizer("0")["input_ids"])


def test_the_source_states_its_length(make_source):
    assert len(make_source()) == 7


def test_tokens_label_and_metadata_are_taken_as_they_are(make_source):
    sample = "Sample(prompt='ab', tokens=[3, 4], label=5, metadata={'a': 1})"
    (prompt,) = make_source(f"return [[{sample}] * 2]").next_batch(1)
    assert prompt.token_ids == (3, 4)
    assert prompt.label == 5
    assert prompt.metadata == {"a": 1}


def checkpoint_of(source: CustomDataSource) -> dict[str, Any]:
    """A checkpoint after prompts 0 and 1 are trained, while 2 and 3 are in flight."""
    prefetcher = Prefetcher(source, NumberSource().submit, prompts=lambda: 2, depth=1)
    prefetcher.next(0, 9)
    return source.checkpoint(prefetcher.state_dict(), 0)


def test_a_checkpoint_has_the_prompts_in_flight(make_source):
    state = checkpoint_of(make_source())
    assert [row["text"] for row in state["pending"]] == ["2", "3"]
    assert state["taken"] == 2
    assert state["batch"] == 1


def test_a_checkpoint_saves_the_users_source(make_source):
    source = make_source()
    checkpoint_of(source)
    assert source.source.saved == {0: 4}


def test_a_resumed_source_gives_the_prompts_in_flight_first(make_source):
    resumed = make_source()
    resumed.load_state_dict(checkpoint_of(make_source()) | {"saved": 1})
    prompts = resumed.next_batch(4)
    expected = [("2", 2), ("3", 3), ("10", 4), ("11", 5)]
    assert [(prompt.text, prompt.index) for prompt in prompts] == expected


def test_a_resumed_source_keeps_prompts_in_flight_at_the_next_checkpoint(make_source):
    resumed = make_source()
    resumed.load_state_dict(checkpoint_of(make_source()) | {"saved": 1})
    resumed.next_batch(1)
    pending = resumed.checkpoint({"taken": 2}, 1)["pending"]
    assert [row["text"] for row in pending] == ["2", "3"]


def test_a_checkpoint_of_a_prompt_file_is_refused(make_source):
    with pytest.raises(ValueError, match="the checkpoint is of a run without --data-source-path"):
        make_source().load_state_dict({"epoch": 0, "position": 0})


def test_an_exception_of_the_source_is_one_message(make_source):
    message = r"get_samples \(.*source.py, line 7\) raised ZeroDivisionError"
    with pytest.raises(CustomFunctionError, match=message):
        make_source("return num_samples / 0").next_batch(2)


def test_a_missing_method_is_one_message(make_source):
    message = "has no method add_samples; write get_samples, add_sam"
    with pytest.raises(CustomFunctionError, match=message):
        make_source(code=SOURCE.replace("add_samples", "put"))


def test_a_wrong_signature_is_one_message(make_source):
    message = r"cannot be called as .*save\(self, rollout_id\)"
    with pytest.raises(CustomFunctionError, match=message):
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
MakeRollout = Callable[..., CustomRollout]


@pytest.fixture
def make_rollout(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> MakeRollout:
    """Writes a rollout function, and loads it with a file of six prompts."""

    def make(body: str = "pass") -> CustomRollout:
        function = tmp_path / "own.py"
        function.write_text(ROLLOUT.replace("BODY", body))
        prompts = tmp_path / "p.jsonl"
        prompts.write_text("".join(f'{{"input": "{number}>"}}\n' for number in range(6)))
        config = make_config(
            rm_type="random", n_samples_per_prompt=2, rollout_function_path=f"{function}:fn"
        )
        checks = build_generate_function(
            config,
            Namespace(),
            tokenizer,
            sizes=ModelSizes(context_len=64, vocab_size=300),
            version=lambda: 7,
            address=("host", 1),
            option="rollout_function_path",
        )
        assert checks is not None
        dataset = PromptDataset(prompts, tokenizer, config)
        return CustomRollout(checks=checks, dataset=dataset, config=config)

    return make


def test_a_rollout_function_knows_router_and_prompts(make_rollout):
    router = "assert (args.sglang_router_ip, args.sglang_router_port) == ('host', 1)"
    make_rollout(f"{router}; assert len(data_source) == 6")(3)


def test_groups_are_numbered(make_rollout):
    groups, _ = make_rollout()(3)
    numbers = []
    for group in groups:
        numbers.append(
            [(sample.prompt_index, sample.group_index, sample.index) for sample in group]
        )
    assert numbers == [[(0, 0, 0), (0, 0, 1)], [(1, 1, 2), (1, 1, 3)]]


def test_samples_of_a_rollout_function_have_the_present_version(make_rollout):
    groups, _ = make_rollout()(3)
    sample = groups[0][0]
    assert sample.response_ids == [5, 6]
    assert sample.weight_versions == [7, 7]
    assert sample.reward is None


def test_metrics_of_a_rollout_function_have_a_prefix(make_rollout):
    _, metrics = make_rollout()(3)
    assert metrics == {"rollout/seen": 3.0}


def test_the_next_rollout_takes_the_next_prompts(make_rollout):
    rollout = make_rollout()
    rollout(3)
    groups, _ = rollout(4)
    assert [group[0].prompt_index for group in groups] == [2, 3]
    assert rollout.dataset.state_dict()["position"] == 4


SEGMENTS = """
    import copy
    sample.rollout_id = groups[1][1].rollout_id = 9
    extra = copy.copy(sample)
    groups[1] = [[sample, extra], copy.copy(groups[0][1])]
"""


def test_segments_of_a_rollout_stay_together(make_rollout):
    groups, _ = make_rollout(SEGMENTS.strip())(0)
    assert [(sample.index, sample.rollout_id) for sample in groups[1]] == [(2, 2), (2, 2), (3, 3)]


def test_masked_tokens_need_no_log_prob(make_rollout):
    body = "sample.loss_mask, sample.rollout_log_probs = [1, 0], [-1.0, float('nan')]"
    groups, _ = make_rollout(body)(0)
    trained, masked = groups[1][0].rollout_log_probs
    assert trained == -1.0
    assert math.isfinite(masked)


WRONG_SOURCES = {
    "return []": "returned 0 groups for num_samples=2",
    "return [[Sample(prompt='a')]] * 2": "a group has 2 samples (--n-samples-per-prompt)",
    "return [[Sample(prompt='a'), Sample(prompt='b')]] * 2": "with one prompt",
    "return [[Sample(prompt='a', tokens=[1, 2], response_length=1)] * 2] * 2": "without responses",
    "return [[Sample()] * 2] * 2": "returned group 0 has an empty prompt.",
    "return [[Sample(prompt='a' * 500)] * 2] * 2": "returned group 0 of 500 tokens",
}
WRONG_ROLLOUTS = {
    "groups = groups[:1]": "returned 1 groups; return 2 (--rollout-batch-size).",
    "groups[1] = [sample]": "returned 1 samples in group 1; return 2 (--n-samples-per-prompt)",
    "sample.rollout_log_probs = None": "returned a sample without rollout_log_probs",
    "sample.rollout_log_probs[0] = -1e999": "gave the log-prob -inf for response token 0, which",
    "sample.tokens[-1] = 300": "gave the token 300; the vocabulary ends at 299",
    "sample.reward = 1e308": "gave the reward 1e+308; it must be a finite number of at most 1e+150",
    "data_source.add_samples(groups)": "raised RuntimeError: prompts of a file are read-only",
    "metrics = {'a': float('nan')}": "returned {'rollout/a': nan} as metrics; return finite",
}


@pytest.mark.parametrize(("body", "message"), WRONG_SOURCES.items(), ids=WRONG_SOURCES)
def test_a_wrong_source_is_one_message(make_source, body, message):
    source = make_source(body)
    with pytest.raises(CustomFunctionError) as error:
        source.next_batch(2)
    assert re.match(r"Source.get_samples \(/.*/source\.py, line \d+\) ", str(error.value))
    assert message in str(error.value)


@pytest.mark.parametrize(("body", "message"), WRONG_ROLLOUTS.items(), ids=WRONG_ROLLOUTS)
def test_a_wrong_rollout_is_one_message(make_rollout, body, message):
    rollout = make_rollout(body)
    with pytest.raises(CustomFunctionError) as error:
        rollout(0)
    assert re.match(r"fn \(/.*/own\.py, line \d+\) ", str(error.value))
    assert message in str(error.value)
