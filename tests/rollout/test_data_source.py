"""A user's data source, held to its contract."""

from argparse import Namespace
from pathlib import Path

import pytest

from slime_tis.errors import CustomFunctionError
from slime_tis.hf_directory import ModelSizes
from slime_tis.trainer.data.data_source import CustomDataSource
from slime_tis.trainer.rollout.prefetch import Prefetcher
from tests.rollout.test_prefetch import Log
from tests.rollout.test_rewards import make_config

CODE = """
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
def make(tmp_path, tokenizer):
    def go(groups: str = COUNTING, code: str = CODE) -> CustomDataSource:
        path = tmp_path / f"source_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(code.replace("GROUPS", groups))
        config = make_config(rm_type="random", n_samples_per_prompt=2, rollout_max_prompt_len=20)
        sizes = ModelSizes(context_len=None, vocab_size=None)
        return CustomDataSource(f"{path}:Source", Namespace(), tokenizer, config, sizes)

    return go


def test_prompts_are_tokenized_and_numbered(make, tokenizer):
    source = make()
    prompts = [*source.next_batch(2), *source.next_batch(1)]
    assert [(prompt.index, prompt.text) for prompt in prompts] == [(0, "0"), (1, "1"), (2, "2")]
    assert prompts[1].token_ids == tuple(tokenizer("1")["input_ids"]) and len(source) == 7
    group = "return [[Sample(prompt='ab', tokens=[3, 4], label=5, metadata={'a': 1})] * 2]"
    (prompt,) = make(group).next_batch(1)
    assert (prompt.token_ids, prompt.label, prompt.metadata) == ((3, 4), 5, {"a": 1})


def test_what_was_handed_out_and_not_trained_on_comes_first(make):
    source, log = make(), Log()
    prefetcher = Prefetcher(source, log.submit, prompts=lambda: 2, depth=1)
    prefetcher.next(0, 9)  # 0 and 1 are trained on, 2 and 3 are in flight
    state = source.checkpoint(prefetcher.state_dict(), 0)
    assert source.source.saved == {0: 4}
    assert (state["taken"], [row["text"] for row in state["pending"]], state["batch"]) == (2, ["2", "3"], 1)
    again = make()
    again.load_state_dict(state | {"saved": 1})
    assert [prompt.text for prompt in again.next_batch(1)] == ["2"]
    assert [row["text"] for row in again.checkpoint({"taken": 2}, 1)["pending"]] == ["2", "3"]
    assert [(prompt.text, prompt.index) for prompt in again.next_batch(3)] == [("3", 3), ("10", 4), ("11", 5)]
    with pytest.raises(ValueError, match="the checkpoint is of a run without --data-source-path"):
        make().load_state_dict({"epoch": 0, "position": 0})


WRONG = {
    "too few": ("return []", "returned 0 groups for num_samples=2"),
    "one sample": ("return [[Sample(prompt='a')]] * 2", "a group has 2 samples (--n-samples-per-prompt)"),
    "two prompts": ("return [[Sample(prompt='a'), Sample(prompt='b')]] * 2", "with one prompt"),
    "response": ("return [[Sample(prompt='a', tokens=[1, 2], response_length=1)] * 2] * 2", "without responses"),
    "empty": ("return [[Sample()] * 2] * 2", "returned group 0 has an empty prompt."),
    "long": ("return [[Sample(prompt='a' * 500)] * 2] * 2", "returned group 0 of 501 tokens; --rollout-max-prompt-len"),
}


@pytest.mark.parametrize(("groups", "message"), WRONG.values(), ids=WRONG)
def test_wrong_groups_are_one_message(make, tmp_path: Path, groups, message):
    with pytest.raises(CustomFunctionError) as refusal:
        make(groups).next_batch(2)
    place = f"Source.get_samples ({tmp_path}/source_0.py, line 6) "
    assert str(refusal.value).startswith(place) and message in str(refusal.value)


def test_what_raises_or_lacks_a_method_is_one_message(make):
    with pytest.raises(CustomFunctionError, match=r"get_samples \(.*source_0.py, line 7\) raised ZeroDivisionError"):
        make("return num_samples / 0").next_batch(2)
    with pytest.raises(CustomFunctionError, match="has no method add_samples; write get_samples, add_sam"):
        make(code=CODE.replace("add_samples", "put"))
    with pytest.raises(CustomFunctionError, match=r"cannot be called as .*save\(self, rollout_id\)"):
        make(code=CODE.replace("def save(self, rollout_id)", "def save(self)"))
