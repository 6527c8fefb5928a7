"""The sample of slime's functions, under slime's names."""

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


def test_a_sample_takes_the_fields_of_its_prompt() -> None:
    sample = Sample(prompt_row=PROMPT)
    assert (sample.prompt, sample.label) == ("2+2", "4")
    assert sample.prompt_index == 3
    assert sample.row == PROMPT


def test_metadata_of_the_prompt_is_copied() -> None:
    sample = Sample(prompt_row=PROMPT)
    sample.metadata["level"].append(2)
    assert PROMPT.metadata == {"level": [1]}


def test_another_text_keeps_the_row_of_the_prompt() -> None:
    sample = Sample(prompt_row=PROMPT)
    sample.prompt = "other text"
    assert sample.prompt_index == 3
    assert sample.row is PROMPT


def test_a_sample_without_a_prompt() -> None:
    sample = Sample()
    assert sample.prompt_index == -1
    assert sample.status is Sample.Status.PENDING
    with pytest.raises(ValueError, match="answers no row"):
        _ = sample.row


TURNS = """
from slime.utils.types import Sample

def fill(args, sample):
    assert sample.loss_mask is None
    assert sample.rollout_log_probs is None
    assert sample.response_length == 0
    sample.tokens = [5, 6]
    sample.append_response_tokens(
        args,
        tokens=[10, 11],
        log_probs=[-0.5, -1.0],
        trainable=True,
        meta_info={"finish_reason": {"type": "stop"}, "weight_version": "7"},
    )
    sample.append_response_tokens(args, tokens=[20], trainable=False, text=" tool")
    sample.append_response_tokens(
        args,
        tokens=[12],
        log_probs=[-2.0],
        meta_info={"finish_reason": {"type": "length"}, "weight_version": "8"},
    )
    return Sample(
        prompt_row=sample.row,
        tokens=sample.tokens,
        response_length=4,
        loss_mask=sample.loss_mask,
    )
"""


@pytest.fixture(scope="module")
def appended_and_copied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sample, Sample]:
    """A sample that a user function appended turns to, and the sample that it returned."""
    path = tmp_path_factory.mktemp("user") / "turns.py"
    path.write_text(TURNS)
    sample = Sample(prompt_row=PROMPT)
    copied = load_function(f"{path}:fill")(Namespace(), sample)
    return sample, copied


@pytest.fixture
def appended(appended_and_copied: tuple[Sample, Sample]) -> Sample:
    return appended_and_copied[0]


def test_appended_tokens_follow_the_prompt(appended) -> None:
    assert appended.tokens == [5, 6, 10, 11, 20, 12]
    assert appended.prompt_ids == [5, 6]
    assert appended.response_ids == [10, 11, 20, 12]
    assert appended.response_length == 4


def test_tokens_of_a_tool_are_masked(appended) -> None:
    assert appended.loss_mask == [1, 1, 0, 1]
    assert appended.effective_response_length == 3


def test_tokens_of_a_tool_have_log_prob_0(appended) -> None:
    assert appended.rollout_log_probs == [-0.5, -1.0, 0.0, -2.0]


def test_tokens_of_a_tool_have_the_version_before_them(appended) -> None:
    assert appended.weight_versions == [7, 7, 7, 8]
    assert appended.trained_versions == [7, 7, 8]


def test_the_last_turn_decides_the_status(appended) -> None:
    assert appended.status is Sample.Status.TRUNCATED


def test_text_is_appended(appended) -> None:
    assert appended.response == " tool"


def test_a_sample_made_of_another_has_its_fields(appended_and_copied) -> None:
    appended, copied = appended_and_copied
    assert copied.tokens == appended.tokens
    assert copied.loss_mask == [1, 1, 0, 1]
    assert copied.prompt_index == 3


def test_versions_that_change_within_a_request_are_per_token() -> None:
    sample = Sample(tokens=[5])
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    meta_info = {"weight_versions": spans}
    sample.append_response_tokens(tokens=[1, 2, 3], log_probs=[-1.0] * 3, meta_info=meta_info)
    assert sample.weight_versions == [3, 3, 4]


def test_a_version_that_is_no_number_is_0() -> None:
    sample = Sample(tokens=[5])
    meta_info = {"weight_version": "default"}
    sample.append_response_tokens(tokens=[9], trainable=False, meta_info=meta_info)
    assert sample.weight_versions == [0]


def test_appending_leaves_the_lists_of_the_caller_alone() -> None:
    ids = [5]
    mask = [1]
    sample = Sample(tokens=ids, loss_mask=mask, response_length=1, rollout_log_probs=[-1.0])
    sample.append_response_tokens(tokens=torch.tensor([7]), log_probs=torch.tensor([-2.0]))
    assert sample.tokens == [5, 7]
    assert (ids, mask) == ([5], [1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [1]}, "trained tokens need the log-probs"),
        (
            {"tokens": [1], "log_probs": [-1.0], "trainable": False},
            "are not sampled and have no log-probs",
        ),
    ],
    ids=["no log-probs", "log-probs of an observation"],
)
def test_inconsistent_tokens_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Sample().append_response_tokens(**arguments)


def test_tokens_before_the_first_append_are_trained() -> None:
    sample = Sample(tokens=[5, 6], response_length=1)
    sample.append_response_tokens(tokens=[7], log_probs=[-1.0])
    assert sample.loss_mask == [1, 1]


def test_tokens_before_the_first_append_have_no_log_probs() -> None:
    sample = Sample(tokens=[5, 6], response_length=1)
    sample.append_response_tokens(tokens=[7], log_probs=[-1.0])
    assert math.isnan(sample.rollout_log_probs[0])
    assert sample.rollout_log_probs[1] == -1.0


@pytest.fixture
def sample_with_sets() -> Sample:
    """Two tokens with the sets {8, 4} and {9}, given under slime's names."""
    sample = make_sample(PROMPT, [8, 9])
    sample.rollout_top_p_token_ids = [8, 4, 9]
    sample.rollout_top_p_token_offsets = torch.tensor([0, 2, 3])
    return sample


def test_a_sample_has_no_sets_at_first() -> None:
    sample = make_sample(PROMPT, [8, 9])
    assert sample.rollout_top_p_token_ids is None
    assert sample.rollout_top_p_token_offsets is None


def test_sets_are_written_under_slimes_names(sample_with_sets) -> None:
    assert sample_with_sets.sampling_mask == SamplingMask.from_sets([[8, 4], [9]])


def test_sets_are_read_under_slimes_names(sample_with_sets) -> None:
    assert sample_with_sets.rollout_top_p_token_offsets.tolist() == [0, 2, 3]


def test_an_appended_token_has_an_empty_set(sample_with_sets) -> None:
    sample_with_sets.append_response_tokens(tokens=[1], trainable=False)
    assert sample_with_sets.sampling_mask == SamplingMask.from_sets([[8, 4], [9], []])


def test_sets_can_be_removed(sample_with_sets) -> None:
    sample_with_sets.rollout_top_p_token_ids = None
    assert sample_with_sets.sampling_mask is None


def test_a_reward_that_is_a_dict_is_read_by_its_key() -> None:
    sample = make_sample(PROMPT, [8], reward={"score": 2, "acc": 1})
    assert sample.get_reward_value(Namespace(reward_key="score")) == 2.0


def test_a_reward_that_is_a_number_is_read_without_a_key() -> None:
    sample = make_sample(PROMPT, [8], reward=0.5)
    assert sample.get_reward_value(Namespace(reward_key=None)) == 0.5


NUMBERS = Numbers("q", [1, 2, 3])
"""Stored as 64-bit integers."""


def test_numbers_equal_a_list() -> None:
    assert NUMBERS == [1, 2, 3]
    assert NUMBERS != [1, 2]


def test_numbers_equal_numbers_of_another_type() -> None:
    assert Numbers("b", [1, 2, 3]) == NUMBERS
    assert Numbers("q", [1, 2, 4]) != NUMBERS


def test_numbers_are_joined_with_lists() -> None:
    assert NUMBERS + [4] == [1, 2, 3, 4]
    assert [0] + NUMBERS == [0, 1, 2, 3]


def test_slices_of_numbers_are_joined_as_numbers() -> None:
    joined = NUMBERS[1:] + NUMBERS[:1]
    assert type(joined) is Numbers
    assert joined == [2, 3, 1]


@pytest.mark.parametrize(
    "copy_of",
    [lambda numbers: numbers[:], copy.copy, copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))],
    ids=["slice", "copy", "deepcopy", "pickle"],
)
def test_a_copy_of_numbers_is_a_new_object(copy_of) -> None:
    copied = copy_of(NUMBERS)
    assert type(copied) is Numbers
    assert copied == NUMBERS
    assert copied is not NUMBERS


def test_the_copy_method_of_numbers_gives_a_list() -> None:
    assert type(NUMBERS.copy()) is list


def test_numbers_are_changed_in_place_like_a_list() -> None:
    numbers = Numbers("q", [1, 2, 3])
    numbers += [4, 5]
    numbers[0] = 7
    numbers[1:3] = [0, 0, 0]
    numbers.append(9)
    assert numbers == [7, 0, 0, 0, 4, 5, 9]


@pytest.mark.parametrize("field", NUMBER_TYPES)
def test_compact_samples_keep_their_numbers(field) -> None:
    sample = Sample(
        tokens=[5, 6, 7],
        response_length=2,
        loss_mask=[1, 0],
        rollout_log_probs=[-0.5, 0.0],
        weight_versions=[3, 3],
        rollout_workers=[0, 1],
    )
    before = list(getattr(sample, field))
    sample.compact()
    assert type(getattr(sample, field)) is Numbers
    assert getattr(sample, field) == before
    # compact samples can be compacted again
    assert getattr(sample.compact(), field) == before
