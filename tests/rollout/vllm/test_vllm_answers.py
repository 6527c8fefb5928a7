"""What is sent to vLLM servers, and what is believed of their answers.

The answers are recorded ones of vLLM 0.32.0, whole and spoiled.
"""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_tis.hf_directory import MoeSizes
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.function_requests import Generation
from slime_tis.trainer.engines.servers.api import (
    NOT_SENT,
    Call,
    ExpertLayout,
    GenerateRequest,
    ServedModel,
)
from slime_tis.trainer.engines.servers.errors import InvalidAnswer, ReportedFailure
from slime_tis.trainer.engines.vllm import vllm_answers
from slime_tis.trainer.engines.vllm.vllm_api import VllmApi

RECORDED = Path(__file__).parent / "recorded"
MODEL = ServedModel(directory=Path("model"), config={}, vocab_size=16, context_len=64)
API = VllmApi(MODEL)
PROMPT = [1, 3, 4, 5, 6, 7, 3, 4, 13]


def recorded(name: str) -> Any:
    """The body of an answer of the real server."""
    return json.loads((RECORDED / f"{name}.json").read_text())["body"]


def request(max_new_tokens: int = 54, **options: Any) -> GenerateRequest:
    options = {"sampling": Sampling(max_response_len=100), **options}
    return GenerateRequest(
        input_ids=PROMPT, max_new_tokens=max_new_tokens, request_id="r1", **options
    )


def generation(answer: Any, **options: Any) -> Generation:
    """An answer, as JSON, parsed."""
    call = API.generate(request(**options))
    return call.parse(json.dumps(answer).encode())[0]


def params(**options: Any) -> dict[str, Any]:
    body: Any = API.generate(request(**options)).body
    return body["sampling_params"]


def test_a_request_names_all_that_shapes_the_distribution() -> None:
    sampling = Sampling(
        temperature=0.7, top_p=0.9, top_k=5, max_response_len=100, stop_token_ids=(7, 9)
    )
    body = API.generate(request(60, sampling=sampling, seed=11)).body
    assert body == {
        "request_id": "r1",
        "token_ids": PROMPT,
        "sampling_params": {
            "n": 1,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "max_tokens": 60,
            "logprobs": 0,
            "detokenize": False,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop_token_ids": [7, 9],
            "seed": 11,
        },
    }


def test_stop_texts_need_the_servers_tokenizer() -> None:
    assert params(stop=("end",))["detokenize"] is True
    assert params(stop=("end",))["include_stop_str_in_output"] is True


def test_the_abort_of_a_request_has_vllms_prefix() -> None:
    assert API.abort("r1").body == {"request_ids": ["generate-tokens-r1"]}


def test_an_abort_of_all_requests_names_none() -> None:
    assert API.abort(None).body == {"request_ids": []}


def test_an_answer_of_full_length() -> None:
    answer = recorded("generate_length")
    sampled = generation(answer)
    assert sampled.token_ids == answer["choices"][0]["token_ids"]
    assert len(sampled.log_probs) == 4
    assert sampled.weight_versions == [0] * 4
    assert sampled.finish_reason == "length"


@pytest.mark.parametrize("name", ["generate_stop", "generate_stop_token"])
def test_an_answer_that_a_stop_token_ended(name: str) -> None:
    assert generation(recorded(name)).finish_reason == "stop"


def test_initial_weights_are_told_from_sent_ones() -> None:
    sampled = generation(recorded("generate_length"), initial_version=NOT_SENT)
    assert sampled.weight_versions == [NOT_SENT] * 4


def test_every_token_has_the_version_of_its_span() -> None:
    answer = recorded("generate_spans")
    spans = answer["choices"][0]["weight_versions"]
    assert [span["version"] for span in spans] == ["5", "6"]
    expected = []
    for span in spans:
        expected += [int(span["version"])] * (span["end"] - span["start"])
    assert generation(answer).weight_versions == expected


def test_an_aborted_answer_has_what_was_sampled() -> None:
    answer = recorded("generate_abort")
    sampled = generation(answer)
    assert sampled.finish_reason == "abort"
    assert sampled.token_ids == answer["choices"][0]["token_ids"] != []
    assert len(sampled.log_probs) == len(sampled.token_ids)


def test_an_aborted_request_in_the_queue_has_no_tokens() -> None:
    sampled = generation(recorded("generate_abort_queued"))
    assert sampled.finish_reason == "abort"
    assert sampled.token_ids == []


def set_log_prob(value: object) -> Callable[[Any], None]:
    def edit(choice: Any) -> None:
        choice["logprobs"]["content"][0]["logprob"] = value

    return edit


def drop_log_probs(choice: Any) -> None:
    choice["logprobs"] = None


def drop_versions(choice: Any) -> None:
    choice["weight_versions"] = None


def drop_one_log_prob(choice: Any) -> None:
    choice["logprobs"]["content"].pop()


def shift_tokens(choice: Any) -> None:
    choice["token_ids"].reverse()


def name_unknown_token(choice: Any) -> None:
    choice["token_ids"][0] = 16


def end_with_error(choice: Any) -> None:
    choice["finish_reason"] = "error"


def end_too_late(choice: Any) -> None:
    choice["weight_versions"][0]["end"] += 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(set_log_prob(-9999.0), "means a masked token", id="sentinel"),
        pytest.param(set_log_prob(-1e6), "means a masked token", id="below the sentinel"),
        pytest.param(set_log_prob(None), "log-prob 0 is null", id="null"),
        pytest.param(set_log_prob(0.5), "<= 0.001", id="positive"),
        pytest.param(drop_log_probs, "has no log-probs", id="no log-probs"),
        pytest.param(drop_one_log_prob, "3 log-probs for 4 tokens", id="one too few"),
        pytest.param(drop_versions, "covers 0 tokens of 4", id="no versions"),
        pytest.param(shift_tokens, "is of token", id="other tokens"),
        pytest.param(name_unknown_token, "has token 16", id="unknown token"),
        pytest.param(end_with_error, "error", id="error"),
        pytest.param(end_too_late, "span from 0 to 5", id="long span"),
    ],
)
def test_a_wrong_answer_is_not_believed(edit: Callable[[Any], None], message: str) -> None:
    answer = recorded("generate_length")
    edit(answer["choices"][0])
    with pytest.raises(InvalidAnswer, match=message):
        generation(answer)


def test_more_tokens_than_asked_for_are_not_believed() -> None:
    with pytest.raises(InvalidAnswer, match="4 tokens where 3"):
        generation(recorded("generate_length"), max_new_tokens=3)


def test_two_responses_are_not_believed() -> None:
    answer = recorded("generate_length")
    answer["choices"] *= 2
    with pytest.raises(InvalidAnswer, match="2 choices"):
        generation(answer)


@pytest.mark.parametrize("body", [b"", b"[", b"\xff", b"[" * 100_000, b'{"choices": 3}'])
def test_other_texts_are_not_believed(body: bytes) -> None:
    with pytest.raises(InvalidAnswer):
        API.generate(request()).parse(body)


def test_scores_are_those_of_the_tokens() -> None:
    tokens = [3, 4, 5, 6, 7, 13]
    answer = recorded("score")
    scores = API.score(tokens).parse(json.dumps(answer).encode())
    assert len(scores) == 5
    assert scores[0] == answer["prompt_logprobs"][1]["4"]["logprob"]


def test_scores_of_other_tokens_are_not_believed() -> None:
    with pytest.raises(InvalidAnswer, match="prompt_logprobs 1 lacks the token 5"):
        API.score([3, 5, 5, 6, 7, 13]).parse(json.dumps(recorded("score")).encode())


def test_scores_of_too_few_tokens_are_not_believed() -> None:
    with pytest.raises(InvalidAnswer, match="of 6 tokens, but 7 were sent"):
        API.score([3, 4, 5, 6, 7, 13, 2]).parse(json.dumps(recorded("score")).encode())


def test_a_score_asks_for_one_token() -> None:
    body: Any = API.score([3, 4]).body
    assert body["sampling_params"]["max_tokens"] == 1
    assert body["sampling_params"]["prompt_logprobs"] == 0


def top(answer: Any, count: int) -> dict[int, float]:
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=2, max_response_len=8)
    return API.top(PROMPT, sampling, count).parse(json.dumps(answer).encode())


def test_the_likeliest_tokens_have_no_sentinels() -> None:
    entries = recorded("top_masked")["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["logprob"] for entry in entries].count(-9999.0) >= 2
    log_probs = top(recorded("top_masked"), 4)
    assert len(log_probs) == 2
    assert min(log_probs.values()) > -100.0


def test_a_sampled_token_is_not_one_of_the_likeliest() -> None:
    answer = recorded("top")
    content = answer["choices"][0]["logprobs"]["content"][0]
    content["top_logprobs"].insert(0, {"token_id": 9, "logprob": -30.0, "rank": 12})
    assert 9 not in top(answer, 8)


def test_the_likeliest_tokens_are_asked_for_without_top_p() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=2, max_response_len=8)
    body: Any = API.top(PROMPT, sampling, 8).body
    assert body["sampling_params"]["temperature"] == 0.7
    assert body["sampling_params"]["top_p"] == 1.0
    assert body["sampling_params"]["top_k"] == -1


def test_checksums_are_lists_over_ranks() -> None:
    body = json.dumps({"results": [{"a": "1", "b": "2"}, {"a": "3"}]}).encode()
    assert API.checksums().parse(body) == {"a": ["1", "3"], "b": ["2"]}


def test_real_checksums_are_of_no_empty_tensor() -> None:
    body = json.dumps(recorded("weight_checksums")).encode()
    checksums = API.checksums().parse(body)
    assert len(checksums) == 27
    assert not any(ranks[0].startswith("e3b0c442") for ranks in checksums.values())


def test_adapters_are_models_with_a_parent() -> None:
    body = json.dumps(recorded("models")).encode()
    assert API.adapters().parse(body) == ["slime_tis-v7-0c1d2e3f"]


def test_a_request_names_its_adapter() -> None:
    api = API.with_adapter("a")
    calls: list[Call[Any]] = [
        api.generate(request()),
        api.score([3, 4]),
        api.top([3, 4], Sampling(max_response_len=1), 2),
        api.cached_tokens([3, 4]),
    ]
    assert [call.body["model"] for call in calls if call.body is not None] == ["a"] * 4


def test_a_problem_of_a_checkpoint_is_a_failure() -> None:
    with pytest.raises(ReportedFailure, match="/nonexistent has no safetensors"):
        vllm_answers.parse_problems(json.dumps(recorded("collective_rpc_problem")).encode())


def test_a_loaded_checkpoint_is_no_failure() -> None:
    vllm_answers.parse_problems(json.dumps(recorded("collective_rpc_load")).encode())


def test_a_cache_that_was_not_emptied_is_a_failure() -> None:
    with pytest.raises(ReportedFailure, match="not emptied"):
        vllm_answers.parse_cache_reset(b'{"success": false}')


LAYOUT = ExpertLayout(
    num_hidden_layers=3,
    moe=MoeSizes(
        layers=(0, 2), num_experts=8, top_k=2, intermediate_size=4, shared_intermediate_size=0
    ),
)
EXPERTS = np.array([[[0, 1], [2, 3], [4, 5]], [[7, 6], [1, 0], [5, 4]]], np.uint8)


def encoded(experts: Any) -> str:
    """Experts as vLLM sends them: a file of NumPy in base64."""
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


def test_experts_of_sparse_layers_are_returned() -> None:
    experts = vllm_answers.routed_experts(encoded(EXPERTS), LAYOUT, 2)
    assert experts.dtype is torch.uint8
    assert experts.tolist() == [[[0, 1], [4, 5]], [[7, 6], [5, 4]]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(None, "has no routed_experts", id="missing"),
        pytest.param("!", "not base64", id="no base64"),
        pytest.param("AAAA", "not base64 of an array", id="no array"),
        pytest.param(encoded(EXPERTS[:1]), "has the shape", id="too few tokens"),
        pytest.param(encoded(EXPERTS + 2), "2 to 9", id="unknown expert"),
        pytest.param(encoded(EXPERTS * 0), "same expert twice", id="all zeros"),
        pytest.param(encoded(EXPERTS / 2), "has the shape", id="fractions"),
        pytest.param(encoded(np.array([{}])), "not base64 of an array", id="pickle"),
    ],
)
def test_wrong_experts_are_not_believed(text: str | None, message: str) -> None:
    with pytest.raises(InvalidAnswer, match=message):
        vllm_answers.routed_experts(text, LAYOUT, 2)
