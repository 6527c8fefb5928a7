"""What a request may ask, what its random numbers follow from, and where a response stops."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.generation import (
    Generation,
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


def token_ids(text):
    return make_tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_a_request_asks_under_sglangs_names_or_gets_the_runs_values():
    asked = {
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
    assert request_options(asked, RUN) == RequestOptions(
        sampling=Sampling(temperature=1.0, top_p=0.5, top_k=-1, max_response_len=30, stop_token_ids=(4, 5)),
        stop=("</a>", "b"),
        skip_special_tokens=False,
        no_stop_trim=True,
        spaces_between_special_tokens=False,
    )
    assert request_options({"stop": "end"}, RUN).stop == ("end",)
    assert request_options(None, RUN) == request_options({"stop": None}, RUN) == RequestOptions(sampling=RUN)


WRONG_PARAMS = {
    "unknown": ({"min_p": 0.1}, "min_p"),
    "negative": ({"temperature": -1}, "temperature is -1.0"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens 0"),
    "empty stop": ({"stop": [""]}, "stop"),
}


@pytest.mark.parametrize(("params", "message"), WRONG_PARAMS.values(), ids=WRONG_PARAMS)
def test_impossible_parameters_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        request_options(params, RUN)


def test_samples_for_training_come_from_the_distribution_that_training_computes():
    training = Sampling(temperature=0.8, max_response_len=7, for_training=True)
    assert request_options({"temperature": 0.8, "top_p": 1, "top_k": -1}, training).sampling == training
    with pytest.raises(ValueError, match="temperature 0, but the run samples with"):
        request_options({"temperature": 0}, training)


def asked(calls, key=KEY, **options):
    requests = []

    async def answer(request):
        requests.append(request)
        return Generation(token_ids=[], log_probs=[], weight_versions=[], finish_reason="stop", text="")

    async def ask():
        engine = SampleEngine(answer, RUN, key, number=8, vocab_size=64, **options)
        for ids in calls:
            await engine.generate(ids, session_id="s")

    asyncio.run(ask())
    return requests


def test_random_numbers_follow_from_the_sample_its_input_and_repetitions_alone():
    first, again, other = asked([[1, 2], [1, 2], [1, 3]])
    assert (first.token_ids, first.session) == ([1, 2], (8, "s"))
    assert len({first.key, again.key, other.key}) == 3
    assert [request.key for request in asked([[1, 3], [1, 2], [1, 2]])] == [other.key, first.key, again.key]
    for field in ("seed", "prompt_index", "occurrence", "sample"):
        changed = KEY._replace(**{field: 77})
        assert asked([[1, 2]], changed)[0].key != first.key
    uniforms, again = request_uniforms(bytes(range(16))), request_uniforms(bytes(range(16)))
    many = [next(uniforms) for _ in range(1000)]
    assert many[:2] == pytest.approx([0.7761366048984066, 0.9612052412461628], abs=1e-15)
    assert many == [next(again) for _ in range(1000)]
    assert len(set(many)) == 1000 and min(many) >= 0 and max(many) < 1


def test_impossible_tokens_are_refused():
    for ids, message in (([], "is empty"), ([1, 64], "has 64"), ([-1, 5], "has -1")):
        with pytest.raises(ValueError, match=f"token_ids {message}"):
            asked([ids])


@given(st.text(CHARACTERS, min_size=1, max_size=12), st.lists(st.text(CHARACTERS, min_size=1, max_size=3), max_size=3))
def test_a_stop_string_is_found_at_the_token_that_completes_it(text, stop):
    ids = token_ids(text)
    ends = [text.find(one) + len(one) for one in stop if one in text]
    assert StopStrings(make_tokenizer(), stop).first(ids) == (min(ends) if ends else None)


def test_stop_strings_of_several_bytes_a_character_are_found():
    """Byte-level tokens: each character below is several tokens, none of which is text by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ids = fast("日本€語€")["input_ids"]
    assert StopStrings(fast, ["本€"]).first(ids) == 9
    assert StopStrings(fast, ["語"]).first(ids) == 12
    assert StopStrings(fast, ["x"]).first(ids) is None


TEXT_ENDS_BEFORE = {
    "length": ({}, "length", "ab>:c"),
    "stop string": ({"stop": (">:",)}, "stop", "ab"),
    "untrimmed": ({"stop": (">:",), "no_stop_trim": True}, "stop", "ab>:c"),
    "stop token": ({}, "stop", "ab>:"),
}


@pytest.mark.parametrize(("options", "reason", "text"), TEXT_ENDS_BEFORE.values(), ids=TEXT_ENDS_BEFORE)
def test_text_ends_before_the_stop(options, reason, text):
    options = RequestOptions(sampling=RUN, **options)
    assert response_text(make_tokenizer(), token_ids("ab>:c"), options, reason) == text
