"""The sample of slime's functions: constructed, read and written under slime's names, and appended to."""

import copy
import math
import pickle
from argparse import Namespace

import pytest
import torch

from slime_tis.trainer.data.sample import NUMBER_TYPES, Numbers, Prompt, Sample, SamplingMask
from slime_tis.user_functions import load_function
from tests.samples import make_sample

PROMPT = Prompt(index=3, text="2+2", token_ids=(5, 6), label="4", metadata={"level": [1]})


def test_a_sample_takes_label_metadata_and_row_from_its_prompt() -> None:
    sample = Sample(prompt_row=PROMPT)
    assert (sample.prompt, sample.label, sample.prompt_index, sample.row) == ("2+2", "4", 3, PROMPT)
    sample.metadata["level"].append(2)
    assert PROMPT.metadata == {"level": [1]}
    sample.prompt = "other text"
    assert sample.prompt_index == 3 and sample.row is PROMPT
    with pytest.raises(ValueError, match="answers no row"):
        _ = Sample().row
    assert Sample().prompt_index == -1 and Sample().status is Sample.Status.PENDING


TURNS = """
from slime.utils.types import Sample

def fill(args, sample):
    assert sample.loss_mask is None and sample.rollout_log_probs is None and sample.response_length == 0
    sample.tokens = [5, 6]
    stop = {"finish_reason": {"type": "stop"}, "weight_version": "7"}
    sample.append_response_tokens(args, tokens=[10, 11], log_probs=[-0.5, -1.0], trainable=True, meta_info=stop)
    sample.append_response_tokens(args, tokens=[20], trainable=False, text=" tool")
    sample.append_response_tokens(
        args, tokens=[12], log_probs=[-2.0], meta_info={"finish_reason": {"type": "length"}, "weight_version": "8"}
    )
    return Sample(prompt_row=sample.row, tokens=sample.tokens, response_length=4, loss_mask=sample.loss_mask)
"""


def test_turns_are_appended_with_masks_log_probs_versions_and_status(tmp_path) -> None:
    (tmp_path / "turns.py").write_text(TURNS)
    sample = Sample(prompt_row=PROMPT)
    copied = load_function(f"{tmp_path / 'turns.py'}:fill")(Namespace(), sample)
    assert sample.tokens == [5, 6, 10, 11, 20, 12] and sample.response_length == 4
    assert (sample.prompt_ids, sample.response_ids) == ([5, 6], [10, 11, 20, 12])
    assert sample.loss_mask == [1, 1, 0, 1] and sample.rollout_log_probs == [-0.5, -1.0, 0.0, -2.0]
    assert sample.weight_versions == [7, 7, 7, 8] and sample.trained_versions == [7, 7, 8]
    assert sample.status is Sample.Status.TRUNCATED and sample.response == " tool"
    assert sample.effective_response_length == 3
    assert (copied.tokens, copied.loss_mask, copied.prompt_index) == (
        sample.tokens,
        [1, 1, 0, 1],
        3,
    )


def test_weights_that_change_within_a_request_are_taken_token_by_token() -> None:
    sample = Sample(tokens=[5])
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    sample.append_response_tokens(
        tokens=[1, 2, 3], log_probs=[-1.0] * 3, meta_info={"weight_versions": spans}
    )
    assert sample.weight_versions == [3, 3, 4]
    sample.append_response_tokens(
        tokens=[9], trainable=False, meta_info={"weight_version": "default"}
    )
    assert sample.weight_versions == [3, 3, 4, 0]


def test_the_lists_of_another_sample_are_left_alone() -> None:
    ids, mask = [5], [1]
    one = Sample(tokens=ids, loss_mask=mask, response_length=1, rollout_log_probs=[-1.0])
    one.append_response_tokens(tokens=torch.tensor([7]), log_probs=torch.tensor([-2.0]))
    assert (ids, mask) == ([5], [1]) and one.tokens == [5, 7]


@pytest.mark.parametrize(
    ("appended", "message"),
    [
        ({"tokens": [1]}, "tokens that are trained on need the log-probs"),
        (
            {"tokens": [1], "log_probs": [-1.0], "trainable": False},
            "are not the policy's, and have no log-probs",
        ),
    ],
    ids=["no log-probs", "log-probs of an observation"],
)
def test_what_does_not_fit_together_is_refused(appended, message) -> None:
    with pytest.raises(ValueError, match=message):
        Sample().append_response_tokens(**appended)


def test_tokens_before_the_first_append_are_trained_on_and_have_no_log_probs() -> None:
    sample = Sample(tokens=[5, 6], response_length=1)
    sample.append_response_tokens(tokens=[7], log_probs=[-1.0])
    assert sample.loss_mask == [1, 1]
    assert math.isnan(sample.rollout_log_probs[0]) and sample.rollout_log_probs[1] == -1.0


def test_kept_sets_are_set_and_read_under_slimes_names() -> None:
    sample = make_sample(PROMPT, [8, 9])
    assert sample.rollout_top_p_token_ids is None and sample.rollout_top_p_token_offsets is None
    sample.rollout_top_p_token_ids = [8, 4, 9]
    sample.rollout_top_p_token_offsets = torch.tensor([0, 2, 3])
    assert sample.sampling_mask == SamplingMask.from_sets([[8, 4], [9]])
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3]
    sample.append_response_tokens(tokens=[1], trainable=False)
    assert sample.sampling_mask == SamplingMask.from_sets([[8, 4], [9], []])
    sample.rollout_top_p_token_ids = None
    assert sample.sampling_mask is None


def test_a_reward_that_is_a_dict_is_read_by_its_key() -> None:
    sample = make_sample(PROMPT, [8], reward={"score": 2, "acc": 1})
    assert sample.get_reward_value(Namespace(reward_key="score")) == 2.0
    assert make_sample(PROMPT, [8], reward=0.5).get_reward_value(Namespace(reward_key=None)) == 0.5


def test_numbers_are_a_list_for_its_readers_and_writers():
    numbers = Numbers("q", [1, 2, 3])
    assert numbers == [1, 2, 3] and numbers != [1, 2]
    assert numbers == Numbers("b", [1, 2, 3]) and numbers != Numbers("q", [1, 2, 4])
    assert numbers.__add__([4]) == [1, 2, 3, 4] and numbers.__radd__([0]) == [0, 1, 2, 3]
    for same in (
        numbers[:],
        copy.copy(numbers),
        copy.deepcopy(numbers),
        pickle.loads(pickle.dumps(numbers)),
    ):
        assert type(same) is Numbers and same == numbers and same is not numbers
    assert type(numbers.copy()) is list
    joined = numbers[1:] + numbers[:1]
    assert type(joined) is Numbers and joined == [2, 3, 1]
    numbers += [4, 5]
    numbers[0], numbers[1:3] = 7, [0, 0, 0]
    numbers.append(9)
    assert numbers == [7, 0, 0, 0, 4, 5, 9] and numbers


@pytest.mark.parametrize("field", NUMBER_TYPES)
def test_samples_are_compact_in_any_order_of_edits(field):
    values = {"loss_mask": [1, 0], "rollout_log_probs": [-0.5, 0.0], "weight_versions": [3, 3]}
    sample = Sample(tokens=[5, 6, 7], response_length=2, rollout_workers=[0, 1], **values)
    before = list(getattr(sample, field))
    sample.compact()
    assert type(getattr(sample, field)) is Numbers and getattr(sample.compact(), field) == before
