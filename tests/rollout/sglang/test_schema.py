"""What is sent to servers, and what is believed of their answers: recorded ones of SGLang 0.5.23,
whole and spoiled."""

import copy
import json
import math
from typing import Any

import pytest

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.function_requests import Generation
from slime_tis.trainer.engines.sglang.schema import (
    GenerateRequest,
    InvalidAnswer,
    ModelInfo,
    ServerInfo,
    parse,
    parse_checksums,
    parse_generation,
    parse_scores,
    score_body,
    version_number,
)
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


def info_of(answer: Any) -> ServerInfo:
    return parse(ServerInfo, json.dumps(answer).encode())


def test_a_request_names_all_that_shapes_the_distribution() -> None:
    sampling = Sampling(
        temperature=0.7, top_p=0.9, top_k=5, max_response_len=100, stop_token_ids=(7, 9)
    )
    assert request(60, sampling).body() == {
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
    completion = generation(recorded("generate_length"), max_new_tokens=8)
    assert completion.token_ids == [59, 24, 58, 11, 22, 36, 30, 42]
    assert completion.log_probs[:2] == [-5.014503479003906, -4.9953131675720215]
    assert completion.weight_versions == [0] * 8
    assert completion.finish_reason == "length"
    stopped = generation(recorded("generate_stop"), max_new_tokens=8)
    assert (stopped.token_ids, stopped.finish_reason, stopped.weight_versions) == ([7], "stop", [0])


def test_every_token_has_the_version_of_its_span() -> None:
    answer = recorded("generate_spans_abort")
    spans = answer["meta_info"]["weight_versions"]
    versions = generation(answer, max_new_tokens=1000).weight_versions
    assert versions is not None and len(spans) > 1
    for span in spans:
        assert set(versions[span["start"] : span["end"]]) == {version_number(span["version"])}
    assert len(versions) == spans[-1]["end"]


@pytest.mark.parametrize("name", ["generate_abort_retracted", "generate_spans_abort"])
def test_an_aborted_answer_has_what_was_sampled(name: str) -> None:
    answer = recorded(name)
    completion = generation(answer, max_new_tokens=1000)
    assert completion.finish_reason == "abort"
    assert completion.token_ids == answer["output_ids"] != []
    assert len(completion.log_probs) == len(completion.weight_versions) == len(completion.token_ids)


def test_a_request_aborted_before_it_ran_has_no_tokens() -> None:
    answer = recorded("generate_abort_queued")
    for edit in (lambda meta: None, lambda meta: meta.pop("output_token_logprobs")):
        edit(answer["meta_info"])
        completion = generation(answer, max_new_tokens=8)
        assert (completion.token_ids, completion.log_probs, completion.weight_versions) == (
            [],
            [],
            [],
        )
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


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    answer = recorded("generate_length")
    assert max(answer["output_ids"]) == 59
    assert generation(answer, max_new_tokens=8, vocab_size=60).token_ids == answer["output_ids"]
    with pytest.raises(InvalidAnswer, match="has token 59"):
        generation(answer, max_new_tokens=8, vocab_size=59)
    answer["output_ids"][0] = answer["meta_info"]["output_token_logprobs"][0][1] = 2**70
    with pytest.raises(InvalidAnswer, match=r"at `\$.output_ids\[0\]`"):
        generation(answer, max_new_tokens=8, vocab_size=64)


def test_more_tokens_than_asked_for_or_none_are_refused() -> None:
    with pytest.raises(InvalidAnswer, match="8 tokens"):
        generation(recorded("generate_length"), max_new_tokens=7)
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


def test_scores_are_those_of_all_tokens_but_the_first() -> None:
    ids = [1, 13, 3, 5, 9, 20, 30, 40]
    assert score_body(ids)["sampling_params"]["max_new_tokens"] == 0  # type: ignore[index]
    assert scores(recorded("score"), ids) == [
        -5.669912338256836,
        -4.598784446716309,
        -5.874107837677002,
        -3.888418674468994,
        -2.73480224609375,
        -2.782884120941162,
        -5.704174041748047,
    ]
    with pytest.raises(InvalidAnswer, match="7 log-probs for 6 tokens"):
        scores(recorded("score"), ids[:-1])
    with pytest.raises(InvalidAnswer, match="of token 13, but the token is 14"):
        scores(recorded("score"), [1, 14, *ids[2:]])
    spoiled = copy.deepcopy(recorded("score"))
    spoiled["meta_info"]["input_token_logprobs"][5][0] = None
    with pytest.raises(InvalidAnswer, match="log-prob 4 is null"):
        scores(spoiled, ids)


def test_what_a_server_says_of_itself() -> None:
    assert (
        parse(ModelInfo, json.dumps(recorded("model_info_updated")).encode()).weight_version == "11"
    )
    assert parse(ModelInfo, b"{}").weight_version is None
    info = info_of(recorded("server_info"))
    assert (info.max_req_input_len, info.tp_size, info.pp_size, info.dp_size) == (506, 1, 1, 1)
    assert info.enable_deterministic_inference is not True
    assert info_of({}) == ServerInfo()
    assert info_of({"tp_size": 4, "dp_size": 2}) == ServerInfo(tp_size=4, pp_size=1, dp_size=2)
    assert info_of({"enable_deterministic_inference": True}).enable_deterministic_inference is True


def test_checksums_that_are_not_text_are_refused() -> None:
    with pytest.raises(InvalidAnswer, match=r"got `int` - at `\$\.ranks\[0\]\.checksums"):
        parse_checksums(
            json.dumps({"ranks": [{"checksums": {"a": "x", "b": 1}}, {"checksums": {}}]}).encode()
        )


def test_names_of_weights_that_are_not_numbers_are_those_of_the_start() -> None:
    assert [version_number(name) for name in ("12", "default", None, "²", "", "step-3")] == [
        12,
        0,
        0,
        0,
        0,
        0,
    ]
