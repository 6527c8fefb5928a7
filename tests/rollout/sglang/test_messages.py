"""What is sent to servers, and what is believed of their answers: recorded ones of SGLang 0.5.23, whole and spoiled."""

import copy
import json
import math
from typing import Any

import pytest

from slime_tis.rollout.sample import Sampling
from slime_tis.rollout.sglang.messages import (
    Capabilities,
    MalformedAnswer,
    answer_bytes,
    generate_payload,
    parse_generation,
    parse_info,
    parse_scores,
    scoring_payload,
    version_number,
)
from tests.rollout.sglang.replay import recorded


def test_a_request_names_all_that_shapes_the_distribution() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_response_len=100, stop_token_ids=(7, 9))
    assert generate_payload((1, 5), sampling, limit=60, request_id="r1") == {
        "rid": "r1",
        "input_ids": [1, 5],
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "max_new_tokens": 60,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop_token_ids": [7, 9],
        },
        "return_logprob": True,
    }


def test_a_completed_answer() -> None:
    completion = parse_generation(recorded("generate_length"), limit=8, default_version=4)
    assert completion.token_ids == [59, 24, 58, 11, 22, 36, 30, 42]
    assert completion.log_probs[:2] == [-5.014503479003906, -4.9953131675720215]
    assert completion.versions == [4] * 8 and completion.has_spans
    assert (completion.finish_reason, completion.text) == ("length", "=l*8jxrD")
    stopped = parse_generation(recorded("generate_stop"), limit=8)
    assert (stopped.token_ids, stopped.finish_reason, stopped.versions) == ([7], "stop", [0])
    ended = parse_generation(recorded("generate_eos"), limit=200)
    assert ended.token_ids[-1] == 2 and ended.finish_reason == "stop" and len(ended.log_probs) == len(ended.token_ids)


def test_every_token_has_the_version_of_its_span() -> None:
    answer = recorded("generate_spans")
    spans = answer["meta_info"]["weight_versions"]
    versions = parse_generation(answer, limit=1000).versions
    assert versions is not None and len(spans) > 1
    for span in spans:
        assert set(versions[span["start"] : span["end"]]) == {version_number(span["version"])}
    assert len(versions) == spans[-1]["end"]


@pytest.mark.parametrize(
    "name", ["generate_abort", "generate_abort_pause", "generate_abort_retracted", "generate_spans_abort"]
)
def test_an_aborted_answer_has_what_was_sampled(name: str) -> None:
    answer = recorded(name)
    completion = parse_generation(answer, limit=1000)
    assert completion.finish_reason == "abort"
    assert completion.token_ids == answer["output_ids"] != []
    assert len(completion.log_probs) == len(completion.versions or []) == len(completion.token_ids)


def test_a_request_aborted_before_it_ran_has_no_tokens() -> None:
    answer = recorded("generate_abort_queued")
    for edit in (lambda meta: None, lambda meta: meta.pop("output_token_logprobs")):
        edit(answer["meta_info"])
        completion = parse_generation(answer, limit=8)
        assert (completion.token_ids, completion.log_probs, completion.versions) == ([], [], [])
        assert completion.finish_reason == "abort"


def test_servers_without_spans_tell_one_version_or_none() -> None:
    answer = recorded("generate_length")
    del answer["meta_info"]["weight_versions"]
    answer["meta_info"]["weight_version"] = "12"
    completion = parse_generation(answer, limit=8)
    assert completion.versions == [12] * 8 and not completion.has_spans
    del answer["meta_info"]["weight_version"]
    assert parse_generation(answer, limit=8).versions is None


def test_a_probability_of_one_may_be_rounded_up() -> None:
    answer = recorded("generate_stop")
    answer["meta_info"]["output_token_logprobs"][0][0] = 2e-4
    assert parse_generation(answer, limit=8).log_probs == [0.0]


def test_fewer_tokens_than_asked_for_may_come_at_the_end_of_the_context() -> None:
    assert len(parse_generation(recorded("generate_length"), limit=12).token_ids) == 8


def set_log_prob(value: Any) -> Any:
    def edit(answer: dict[str, Any]) -> None:
        answer["meta_info"]["output_token_logprobs"][3][0] = value

    return edit


def set_spans(*spans: tuple[int, int]) -> Any:
    def edit(answer: dict[str, Any]) -> None:
        answer["meta_info"]["weight_versions"] = [{"version": "1", "start": start, "end": end} for start, end in spans]

    return edit


def set_versions(*names: Any) -> Any:
    """Two spans of four tokens each under these names."""

    def edit(answer: dict[str, Any]) -> None:
        spans = [{"version": name, "start": 4 * i, "end": 4 * i + 4} for i, name in enumerate(names)]
        answer["meta_info"]["weight_versions"] = spans

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda a: a.pop("meta_info"), "no meta_info"),
        (lambda a: a["meta_info"].pop("finish_reason"), "no finish_reason"),
        (lambda a: a["meta_info"].update(finish_reason=None), "no finish_reason"),
        (lambda a: a["meta_info"].update(finish_reason={"type": "error"}), "finish_reason is 'error'"),
        (lambda a: a["meta_info"].pop("output_token_logprobs"), "no output_token_logprobs"),
        (lambda a: a["meta_info"].update(output_token_logprobs={}), "no list but dict"),
        (lambda a: a["meta_info"]["output_token_logprobs"].pop(), "7 log-probs for 8 tokens"),
        (lambda a: a["output_ids"].pop(), "8 log-probs for 7 tokens"),
        (lambda a: (a["output_ids"].pop(), a["meta_info"]["output_token_logprobs"].pop()), "7 tokens and says.* 8"),
        (lambda a: a["output_ids"].__setitem__(2, 57), "log-prob 2 is of token 58, but the token is 57"),
        (lambda a: a["output_ids"].__setitem__(2, "58"), "output_ids has '58'"),
        (lambda a: a["output_ids"].__setitem__(2, -1), "output_ids has -1"),
        (lambda a: a["meta_info"]["output_token_logprobs"].__setitem__(3, [-1.0]), r"a log-prob is \[-1.0\]"),
        (set_log_prob(None), r"a log-prob is \[None, 11, None\]"),
        (set_log_prob("x"), "a log-prob is"),
        (set_log_prob(True), "a log-prob is"),
        (set_log_prob(math.nan), "log-prob 3 is nan"),
        (set_log_prob(-math.inf), "log-prob 3 is -inf"),
        (set_log_prob(0.5), "log-prob 3 is 0.5"),
        (set_spans((0, 5)), "covers 5 tokens of 8"),
        (set_spans((0, 5), (6, 8)), "after 5 tokens"),
        (set_spans((0, 9)), "covers 9 tokens of 8"),
        (set_spans((1, 8)), "after 0 tokens"),
        (lambda a: a["meta_info"].update(weight_versions="1"), "weight_versions is no list"),
        (set_spans((0, 200_000_000)), "covers 200000000 tokens of 8"),
        (set_spans((0, 2**70)), "covers 1180591620717411303424 tokens of 8"),
        (set_versions("3", "1"), "goes back from 3 to 1"),
        (set_versions("-3", "1"), "the version of its weights is '-3'"),
        (set_versions("1.5", "1"), r"the version of its weights is '1\.5'"),
        (set_versions(str(2**60), "1"), "the version of its weights is '1152921504606846976'"),
        (set_versions({}, "1"), "the name of its weights is {}"),
        (set_versions("x" * 500, "1"), "the name of its weights is 'x{79}…$"),
        (set_log_prob(-(10**400)), "a log-prob is "),
        (set_log_prob("\x1b[2J\u202e"), r"a log-prob is \['\\x1b\[2J\\u202e', 11, None\]"),
        (lambda a: a["output_ids"].__setitem__(2, True), "output_ids has True"),
        (lambda a: a["meta_info"].update(completion_tokens="\x07" * 200), r"says that they are '(\\x07){19}\\x0…$"),
    ],
)
def test_a_spoiled_answer_is_refused(edit: Any, words: str) -> None:
    answer = recorded("generate_length")
    edit(answer)
    with pytest.raises(MalformedAnswer, match=words):
        parse_generation(json.loads(json.dumps(answer)), limit=8)


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    answer = recorded("generate_length")
    assert max(answer["output_ids"]) == 59
    assert parse_generation(answer, limit=8, vocab_size=60).token_ids == answer["output_ids"]
    with pytest.raises(
        MalformedAnswer, match="has token 59, but the vocabulary of --hf-checkpoint ends at 58; see that"
    ):
        parse_generation(answer, limit=8, vocab_size=59)
    answer["output_ids"][0] = answer["meta_info"]["output_token_logprobs"][0][1] = 2**70
    with pytest.raises(MalformedAnswer, match=f"has token {2**70}, but"):
        parse_generation(answer, limit=8, vocab_size=64)


def test_an_answer_may_be_as_large_as_its_tokens_make_it() -> None:
    payload = generate_payload((1, 5), Sampling(max_response_len=100), limit=60, request_id="r1")
    assert answer_bytes(payload) == 256 * 1024 + 60 * 256
    assert answer_bytes(scoring_payload([1] * 512)) == 256 * 1024 + 512 * 256
    assert len(json.dumps(recorded("generate_spans"))) < answer_bytes(payload) / 4


def test_a_seed_goes_along_where_there_is_one() -> None:
    payload = generate_payload((1, 5), Sampling(max_response_len=9), limit=6, request_id="r1", seed=7)
    assert payload["sampling_params"]["sampling_seed"] == 7  # type: ignore[index]


def test_more_tokens_than_asked_for_or_none_are_refused() -> None:
    with pytest.raises(MalformedAnswer, match="8 tokens where 7 were asked for"):
        parse_generation(recorded("generate_length"), limit=7)
    with pytest.raises(MalformedAnswer, match="no tokens but finish_reason 'length'"):
        parse_generation(recorded("generate_no_tokens"), limit=8)


@pytest.mark.parametrize("answer", [None, [], "text", 3])
def test_what_is_no_answer_is_refused(answer: object) -> None:
    with pytest.raises(MalformedAnswer, match="no JSON object"):
        parse_generation(answer, limit=8)


def test_scores_are_those_of_all_tokens_but_the_first() -> None:
    ids = [1, 13, 3, 5, 9, 20, 30, 40]
    assert scoring_payload(ids)["sampling_params"]["max_new_tokens"] == 0  # type: ignore[index]
    assert parse_scores(recorded("score"), ids) == [
        -5.669912338256836,
        -4.598784446716309,
        -5.874107837677002,
        -3.888418674468994,
        -2.73480224609375,
        -2.782884120941162,
        -5.704174041748047,
    ]
    with pytest.raises(MalformedAnswer, match="7 log-probs for 6 tokens"):
        parse_scores(recorded("score"), ids[:-1])
    with pytest.raises(MalformedAnswer, match="of token 13, but the token is 14"):
        parse_scores(recorded("score"), [1, 14, *ids[2:]])
    spoiled = copy.deepcopy(recorded("score"))
    spoiled["meta_info"]["input_token_logprobs"][5][0] = None
    with pytest.raises(MalformedAnswer, match="a log-prob is"):
        parse_scores(spoiled, ids)


def test_what_a_server_says_of_itself() -> None:
    info = parse_info(recorded("model_info_updated"), recorded("server_info"))
    longest = recorded("server_info")["max_req_input_len"] - 1
    assert info == Capabilities(version="0.5.23", weight_version="11", longest_input=longest)
    assert parse_info({}, {}) == Capabilities()
    assert parse_info({}, {"tp_size": 4, "pp_size": None, "dp_size": 2}).tp_size == 4
    assert not info.is_deterministic
    assert parse_info({}, {"enable_deterministic_inference": True}).is_deterministic


@pytest.mark.parametrize(
    ("model_info", "server_info", "words"),
    [
        ({"weight_version": "-3"}, {}, "the version of its weights is '-3'"),
        ({"weight_version": ["1"]}, {}, r"the name of its weights is \['1'\]"),
        ({}, {"max_req_input_len": -5}, "max_req_input_len is -5"),
        ({}, {"max_req_input_len": 2**40}, "max_req_input_len is 1099511627776"),
        ({}, {"tp_size": 10**12}, "tp_size is 1000000000000"),
        ({}, {"dp_size": "2"}, "dp_size is '2'"),
        ({}, {"pp_size": True}, "pp_size is True"),
    ],
)
def test_what_no_server_can_say_of_itself_is_refused(model_info: Any, server_info: Any, words: str) -> None:
    with pytest.raises(MalformedAnswer, match=words):
        parse_info(model_info, server_info)


@pytest.mark.parametrize(
    ("name", "number"), [("12", 12), (12, 12), ("default", 5), (None, 5), ("²", 5), ("", 5), ("step-3", 5)]
)
def test_names_of_weights_that_are_no_numbers_are_those_of_the_start(name: object, number: int) -> None:
    assert version_number(name, 5) == number
