"""Requests of generate functions: parameters, random numbers and stop strings."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.function_requests import (
    Generation,
    Request,
    RequestOptions,
    SampleEngine,
    SampleKey,
    StopStrings,
    request_options,
    request_uniforms,
    response_text,
)
from tests.checkpoints import CHARACTERS, make_tokenizer

RUN = Sampling(temperature=0.8, top_p=0.9, top_k=20, max_response_len=7, stop_token_ids=(9,))
KEY = SampleKey(seed=3, prompt_index=5, occurrence=0, sample=1)


def token_ids(text: str) -> list[int]:
    return make_tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_parameters_have_sglangs_names():
    parameters = {
        "temperature": 1,
        "top_p": 0.5,
        "top_k": -1,
        "max_new_tokens": 30,
        "stop": ["</a>", "b", "</a>"],
        "stop_token_ids": [4, 5],
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    sampling = Sampling(
        temperature=1.0, top_p=0.5, top_k=-1, max_response_len=30, stop_token_ids=(4, 5)
    )
    assert request_options(parameters, RUN) == RequestOptions(
        sampling=sampling,
        stop=("</a>", "b"),
        skip_special_tokens=False,
        no_stop_trim=True,
        spaces_between_special_tokens=False,
    )


def test_one_stop_string_needs_no_list():
    assert request_options({"stop": "end"}, RUN).stop == ("end",)


@pytest.mark.parametrize("parameters", [None, {"stop": None}], ids=str)
def test_absent_parameters_are_those_of_the_run(parameters):
    assert request_options(parameters, RUN) == RequestOptions(sampling=RUN)


@pytest.mark.parametrize(
    "parameters",
    [{"min_p": 0.0, "min_new_tokens": 0}, {"repetition_penalty": 1.0, "presence_penalty": None}],
    ids=["zero", "one"],
)
def test_parameters_without_effect_are_accepted(parameters):
    assert request_options(parameters, RUN) == RequestOptions(sampling=RUN)


WRONG_PARAMS = {
    "unknown": ({"min_q": 0.1}, "min_q"),
    "min-p": ({"min_p": 0.1}, "min_p 0.1, which samples from another distribution"),
    "penalty": ({"repetition_penalty": 1.1}, "remove the parameter, and limit tokens with"),
    "minimum length": ({"min_new_tokens": 4}, "min_new_tokens 4, which samples from another"),
    "negative": ({"temperature": -1}, "temperature -1: Input should be greater than or equal to 0"),
    "no top-p": ({"top_p": 0}, "top_p 0"),
    "no top-k": ({"top_k": 0}, "top_k 0"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens 0"),
    "empty stop": ({"stop": [""]}, "stop"),
}


@pytest.mark.parametrize(("params", "message"), WRONG_PARAMS.values(), ids=WRONG_PARAMS)
def test_impossible_parameters_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        request_options(params, RUN)


TRAINING = Sampling(temperature=0.8, max_response_len=7, for_training=True)


def test_the_trained_distribution_may_be_requested():
    parameters = {"temperature": 0.8, "top_p": 1, "top_k": -1}
    assert request_options(parameters, TRAINING).sampling == TRAINING


def test_another_distribution_than_the_trained_one_is_refused():
    with pytest.raises(ValueError, match="temperature 0, but the run samples with"):
        request_options({"temperature": 0}, TRAINING)


def requests_for(inputs: list[list[int]], key: SampleKey = KEY) -> list[Request]:
    """The requests of a sample that asks with these inputs, one after the other."""
    requests = []

    async def answer(request: Request) -> Generation:
        requests.append(request)
        return Generation(
            token_ids=[], log_probs=[], weight_versions=[], finish_reason="stop", text=""
        )

    async def ask() -> None:
        engine = SampleEngine(answer, RUN, key, number=8, vocab_size=64)
        for ids in inputs:
            await engine.generate(ids, session_id="s")

    asyncio.run(ask())
    return requests


@pytest.mark.parametrize(
    ("ids", "message"), [([], "is empty"), ([1, 64], "has 64"), ([-1, 5], "has -1")], ids=str
)
def test_impossible_tokens_are_refused(ids, message):
    with pytest.raises(ValueError, match=f"token_ids {message}"):
        requests_for([ids])


def test_a_request_names_tokens_and_session():
    (request,) = requests_for([[1, 2]])
    assert request.token_ids == [1, 2]
    assert request.session == (8, "s")


def test_inputs_and_repetitions_have_different_random_numbers():
    first, again, other = requests_for([[1, 2], [1, 2], [1, 3]])
    assert len({first.key, again.key, other.key}) == 3


def test_the_order_of_requests_changes_no_random_numbers():
    first, again, other = requests_for([[1, 2], [1, 2], [1, 3]])
    keys = [request.key for request in requests_for([[1, 3], [1, 2], [1, 2]])]
    assert keys == [other.key, first.key, again.key]


@pytest.mark.parametrize("field", ["seed", "prompt_index", "occurrence", "sample"])
def test_samples_have_different_random_numbers(field):
    changed: Any = {field: 77}
    (first,) = requests_for([[1, 2]])
    (other,) = requests_for([[1, 2]], KEY._replace(**changed))
    assert other.key != first.key


@pytest.fixture
def thousand() -> list[float]:
    """The first thousand random numbers of a key."""
    uniforms = request_uniforms(bytes(range(16)))
    return [next(uniforms) for _ in range(1000)]


def test_random_numbers_never_change(thousand):
    assert thousand[:2] == pytest.approx([0.7761366048984066, 0.9612052412461628], abs=1e-15)


def test_a_key_repeats_its_random_numbers(thousand):
    again = request_uniforms(bytes(range(16)))
    assert thousand == [next(again) for _ in range(1000)]


def test_random_numbers_are_in_the_unit_interval(thousand):
    assert len(set(thousand)) == 1000
    assert min(thousand) >= 0
    assert max(thousand) < 1


@given(
    st.text(CHARACTERS, min_size=1, max_size=12),
    st.lists(st.text(CHARACTERS, min_size=1, max_size=3), max_size=3),
)
def test_a_stop_string_is_found_at_the_token_that_completes_it(text, stop):
    ids = token_ids(text)
    ends = [text.find(one) + len(one) for one in stop if one in text]
    assert StopStrings(make_tokenizer(), stop).first(ids) == (min(ends) if ends else None)


@pytest.mark.parametrize(("stop", "first"), [("本€", 9), ("語", 12), ("x", None)], ids=str)
def test_stop_strings_of_several_tokens_a_character_are_found(stop, first):
    """Byte-level tokens: each character is several tokens, none of which is text."""
    vocab = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ids = fast("日本€語€")["input_ids"]
    assert StopStrings(fast, [stop]).first(ids) == first


TEXT_ENDS_BEFORE = {
    "length": ({}, "length", "ab>:c"),
    "stop string": ({"stop": (">:",)}, "stop", "ab"),
    "untrimmed": ({"stop": (">:",), "no_stop_trim": True}, "stop", "ab>:c"),
    "stop token": ({}, "stop", "ab>:"),
}


@pytest.mark.parametrize(
    ("options", "reason", "text"), TEXT_ENDS_BEFORE.values(), ids=TEXT_ENDS_BEFORE
)
def test_text_ends_before_the_stop(options, reason, text):
    options = RequestOptions(sampling=RUN, **options)
    assert response_text(make_tokenizer(), token_ids("ab>:c"), options, reason) == text
