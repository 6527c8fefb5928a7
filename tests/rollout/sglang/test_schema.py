"""What is sent to servers, and what is believed of their answers: recorded ones of SGLang 0.5.23,
whole and spoiled."""

import copy
import json
import math
from typing import Any

import pytest

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.function_requests import Generation
from slime_tis.trainer.engines.servers.answers import WeightName, parse, version_number
from slime_tis.trainer.engines.servers.api import NOT_SENT, GenerateRequest
from slime_tis.trainer.engines.servers.errors import InvalidAnswer
from slime_tis.trainer.engines.sglang.sglang_answers import (
    ServerDescription,
    parse_checksums,
    parse_generation,
    parse_scores,
)
from slime_tis.trainer.engines.sglang.sglang_api import generate_body, score_body
from tests.rollout.sglang.fake_sglang import recorded


def request(
    max_new_tokens: int = 8, sampling: Sampling | None = None, **options: Any
) -> GenerateRequest:
    sampling = sampling or Sampling(max_response_len=100)
    return GenerateRequest(
        input_ids=(1, 5),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        request_id="r1",
        **options,
    )


def generation(answer: Any, max_new_tokens: int = 1000, **options: Any) -> Generation:
    """The answer, as JSON, parsed."""
    return parse_generation(json.dumps(answer).encode(), request(max_new_tokens), **options)[0]


def scores(answer: Any, token_ids: list[int]) -> list[float]:
    return parse_scores(json.dumps(answer).encode(), token_ids)


def info_of(answer: Any) -> ServerDescription:
    return parse(ServerDescription, json.dumps(answer).encode())


def test_a_request_names_all_that_shapes_the_distribution() -> None:
    sampling = Sampling(
        temperature=0.7, top_p=0.9, top_k=5, max_response_len=100, stop_token_ids=(7, 9)
    )
    assert generate_body(request(60, sampling)) == {
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


def test_an_answer_of_full_length() -> None:
    completion = generation(recorded("generate_length"), max_new_tokens=8)
    assert completion.token_ids == [59, 24, 58, 11, 22, 36, 30, 42]
    assert completion.log_probs[:2] == [-5.014503479003906, -4.9953131675720215]
    assert completion.weight_versions == [0] * 8
    assert completion.finish_reason == "length"


def test_an_answer_that_a_stop_token_ended() -> None:
    completion = generation(recorded("generate_stop"), max_new_tokens=8)
    assert completion.token_ids == [7]
    assert completion.weight_versions == [0]
    assert completion.finish_reason == "stop"


def test_every_token_has_the_version_of_its_span() -> None:
    answer = recorded("generate_spans_abort")
    spans = answer["meta_info"]["weight_versions"]
    assert len(spans) > 1
    expected = []
    for span in spans:
        version = version_number(span["version"]) or 0  # the initial weights have no number
        expected += [version] * (span["end"] - span["start"])
    assert generation(answer, max_new_tokens=1000).weight_versions == expected


def test_initial_weights_are_told_from_sent_ones() -> None:
    body = json.dumps(recorded("generate_stop")).encode()
    completion, _ = parse_generation(body, request(initial_version=NOT_SENT))
    assert completion.weight_versions == [NOT_SENT]


@pytest.mark.parametrize("name", ["generate_abort_retracted", "generate_spans_abort"])
def test_an_aborted_answer_has_what_was_sampled(name: str) -> None:
    answer = recorded(name)
    completion = generation(answer, max_new_tokens=1000)
    assert completion.finish_reason == "abort"
    assert completion.token_ids == answer["output_ids"] != []
    assert len(completion.log_probs) == len(completion.weight_versions) == len(completion.token_ids)


@pytest.mark.parametrize("has_log_probs", [True, False], ids=["empty log-probs", "no log-probs"])
def test_a_request_aborted_before_it_ran_has_no_tokens(has_log_probs: bool) -> None:
    answer = recorded("generate_abort_queued")
    if not has_log_probs:
        del answer["meta_info"]["output_token_logprobs"]
    completion = generation(answer, max_new_tokens=8)
    assert completion.token_ids == []
    assert completion.log_probs == []
    assert completion.weight_versions == []
    assert completion.finish_reason == "abort"


def set_log_prob(value: Any) -> Any:
    return lambda answer: answer["meta_info"]["output_token_logprobs"][3].__setitem__(0, value)


def set_spans(*spans: tuple[Any, int, int]) -> Any:
    fields = [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans]
    return lambda answer: answer["meta_info"].update(weight_versions=fields)


SPOILED = {
    "no meta_info": (lambda a: a.pop("meta_info"), "missing required field `meta_info`"),
    "no finish_reason": (
        lambda a: a["meta_info"].pop("finish_reason"),
        r"field `finish_reason` - at `\$.meta_info`",
    ),
    "no log-probs": (
        lambda a: a["meta_info"].pop("output_token_logprobs"),
        "0 log-probs for 8 tokens",
    ),
    "a log-prob too few": (
        lambda a: a["meta_info"]["output_token_logprobs"].pop(),
        "7 log-probs for 8 tokens",
    ),
    "another completion_tokens": (
        lambda a: (a["output_ids"].pop(), a["meta_info"]["output_token_logprobs"].pop()),
        "7 tokens and says.* 8",
    ),
    "another token's log-prob": (
        lambda a: a["output_ids"].__setitem__(2, 57),
        "log-prob 2 is of token 58",
    ),
    "a negative token": (lambda a: a["output_ids"].__setitem__(2, -1), r"at `\$.output_ids\[2\]`"),
    "a log-prob of null": (set_log_prob(None), "log-prob 3 is null"),
    "a log-prob of NaN": (set_log_prob(math.nan), "it is not JSON"),
    "a positive log-prob": (set_log_prob(0.5), r"<= 0\.001 - at .*output_token_logprobs\[3\]\[0\]"),
    "a log-prob of 400 digits": (
        set_log_prob(-(10**400)),
        r"out of range - at .*output_token_logprobs\[3\]\[0\]",
    ),
    "spans that end early": (set_spans(("1", 0, 5)), "covers 5 tokens of 8"),
    "spans with a gap": (set_spans(("1", 0, 5), ("1", 6, 8)), "after 5 of 8"),
    "versions that go back": (set_spans(("3", 0, 4), ("1", 4, 8)), "goes back from 3 to 1"),
    "completion_tokens of text": (
        lambda a: a["meta_info"].update(completion_tokens="\x07" * 200),
        "got `str` - at .*completion_tokens`$",
    ),
}


@pytest.mark.parametrize(("edit", "message"), SPOILED.values(), ids=SPOILED)
def test_a_spoiled_answer_is_refused(edit: Any, message: str) -> None:
    answer = recorded("generate_length")
    edit(answer)
    with pytest.raises(InvalidAnswer, match=message):
        generation(answer, max_new_tokens=8)


def test_the_last_token_of_the_vocabulary_is_accepted() -> None:
    answer = recorded("generate_length")
    assert max(answer["output_ids"]) == 59
    assert generation(answer, max_new_tokens=8, vocab_size=60).token_ids == answer["output_ids"]


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidAnswer, match="has token 59"):
        generation(recorded("generate_length"), max_new_tokens=8, vocab_size=59)


def test_tokens_beyond_64_bits_are_refused() -> None:
    answer = recorded("generate_length")
    answer["output_ids"][0] = 2**70
    answer["meta_info"]["output_token_logprobs"][0][1] = 2**70
    with pytest.raises(InvalidAnswer, match=r"at `\$.output_ids\[0\]`"):
        generation(answer, max_new_tokens=8, vocab_size=64)


def test_more_tokens_than_requested_are_refused() -> None:
    with pytest.raises(InvalidAnswer, match="8 tokens"):
        generation(recorded("generate_length"), max_new_tokens=7)


def test_an_answer_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidAnswer, match="no tokens but finish_reason 'length'"):
        generation(recorded("generate_no_tokens"), max_new_tokens=8)


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b'{"output_ids": "\\ud800"}'],
    ids=["nothing", "HTML", "a lone surrogate"],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidAnswer, match=r"^it is not JSON$"):
        parse_generation(body, request())


SCORED_IDS = [1, 13, 3, 5, 9, 20, 30, 40]


def test_a_request_for_scores_samples_nothing() -> None:
    sampling: Any = score_body(SCORED_IDS)["sampling_params"]
    assert sampling["max_new_tokens"] == 0


def test_all_tokens_but_the_first_have_scores() -> None:
    assert scores(recorded("score"), SCORED_IDS) == [
        -5.669912338256836,
        -4.598784446716309,
        -5.874107837677002,
        -3.888418674468994,
        -2.73480224609375,
        -2.782884120941162,
        -5.704174041748047,
    ]


def test_scores_of_another_number_of_tokens_are_refused() -> None:
    with pytest.raises(InvalidAnswer, match="7 log-probs for 6 tokens"):
        scores(recorded("score"), SCORED_IDS[:-1])


def test_scores_of_other_tokens_are_refused() -> None:
    with pytest.raises(InvalidAnswer, match="of token 13, but the token is 14"):
        scores(recorded("score"), [1, 14, *SCORED_IDS[2:]])


def last_token_scored(vocab_size: int | None) -> list[float]:
    """Scores of an answer in which SGLang names the last of 41 tokens 0."""
    answer = copy.deepcopy(recorded("score"))
    answer["meta_info"]["input_token_logprobs"][-1][1] = 0
    return parse_scores(json.dumps(answer).encode(), SCORED_IDS, vocab_size)


def test_the_last_token_of_the_vocabulary_may_be_named_0() -> None:
    assert last_token_scored(vocab_size=41)[-1] == -5.704174041748047


def test_no_other_token_may_be_named_0() -> None:
    with pytest.raises(InvalidAnswer, match="of token 0, but the token is 40"):
        last_token_scored(vocab_size=64)


def test_a_missing_score_is_refused() -> None:
    answer = copy.deepcopy(recorded("score"))
    answer["meta_info"]["input_token_logprobs"][5][0] = None
    with pytest.raises(InvalidAnswer, match="log-prob 4 is null"):
        scores(answer, SCORED_IDS)


@pytest.mark.parametrize(
    ("answer", "version"),
    [(recorded("model_info_updated"), "11"), ({}, None)],
    ids=["after updates", "not named"],
)
def test_the_weight_version_of_a_server(answer: Any, version: str | None) -> None:
    assert parse(WeightName, json.dumps(answer).encode()).weight_version == version


def test_the_recorded_layout_of_a_server() -> None:
    info = info_of(recorded("server_info"))
    assert info.max_req_input_len == 506
    assert (info.tp_size, info.pp_size, info.dp_size) == (1, 1, 1)


def test_a_server_may_leave_out_its_layout() -> None:
    assert info_of({}) == ServerDescription()
    assert info_of({"tp_size": 4, "dp_size": 2}) == ServerDescription(
        tp_size=4, pp_size=1, dp_size=2
    )


def test_a_server_names_deterministic_inference() -> None:
    assert info_of({"enable_deterministic_inference": True}).enable_deterministic_inference is True
    assert info_of(recorded("server_info")).enable_deterministic_inference is not True


def test_checksums_that_are_not_text_are_refused() -> None:
    with pytest.raises(InvalidAnswer, match=r"got `int` - at `\$\.ranks\[0\]\.checksums"):
        parse_checksums(
            json.dumps({"ranks": [{"checksums": {"a": "x", "b": 1}}, {"checksums": {}}]}).encode()
        )


@pytest.mark.parametrize(
    ("name", "number"),
    [("12", 12), ("default", None), (None, None), ("²", None), ("", None), ("step-3", None)],
    ids=str,
)
def test_only_decimal_names_are_versions(name: str | None, number: int | None) -> None:
    assert version_number(name) == number
