"""Limits of answers with sampling masks, and answers without a token."""

import json

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.servers.api import GenerateRequest, max_answer_bytes
from slime_tis.trainer.engines.sglang.sglang_answers import parse_generation
from tests.rollout.sglang.fake_sglang import recorded

MASKED = Sampling(top_k=10, max_response_len=8, n_samples=1, return_sampling_mask=True)


def request() -> GenerateRequest:
    return GenerateRequest(input_ids=(1,), sampling=MASKED, max_new_tokens=8, request_id="r")


def test_a_mask_may_have_twice_top_k_tokens() -> None:
    assert request().max_bytes() == max_answer_bytes(8, 20)


def test_an_answer_without_a_token_has_a_mask_of_no_positions() -> None:
    answer = recorded("generate_length")
    answer["output_ids"] = []
    answer["meta_info"]["finish_reason"] = {"type": "abort"}
    answer["meta_info"] |= {
        "completion_tokens": 0,
        "weight_versions": [],
        "output_token_logprobs": [],
        "output_token_sampling_mask": [],
        "output_token_sampling_logprobs": [],
    }
    generation, _ = parse_generation(json.dumps(answer).encode(), request(), vocab_size=64)
    assert generation.sampling_mask is not None
    assert generation.sampling_mask.lengths.tolist() == []
