"""Sampling masks of SGLang servers: what is asked for, what is believed, and servers that report
none."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from slime_tis.trainer.data.sample import Sample, Sampling, SamplingMask
from slime_tis.trainer.engines.function_requests import Generation
from slime_tis.trainer.engines.servers.api import GenerateRequest, max_answer_bytes
from slime_tis.trainer.engines.servers.errors import InvalidAnswer
from slime_tis.trainer.engines.sglang.sglang_answers import parse_generation
from tests.rollout.sglang.fake_sglang import FakeSGLang, log_prob, recorded, sampled_from
from tests.rollout.sglang.rollouts import LATE, PROMPTS
from tests.samples import flat, make_sample

TRUNCATED = Sampling(top_p=0.9, max_response_len=20, n_samples=2, return_sampling_mask=True)


def masked_answer(**changes: Any) -> dict[str, Any]:
    """The recorded answer of eight tokens with sampling masks, after changes of its meta_info."""
    answer = recorded("generate_length")
    ids = answer["output_ids"]
    answer["meta_info"] |= {
        "output_token_sampling_mask": [[token, 1, 2] for token in ids],
        "output_token_sampling_logprobs": [-0.5] * len(ids),
        **changes,
    }
    return answer


def parsed(answer: dict[str, Any], sampling: Sampling = TRUNCATED) -> Generation:
    request = GenerateRequest(input_ids=(1,), sampling=sampling, max_new_tokens=8, request_id="r")
    return parse_generation(json.dumps(answer).encode(), request, vocab_size=64)[0]


def test_an_answer_has_its_sets():
    completion = parsed(masked_answer())
    assert completion.token_ids == [59, 24, 58, 11, 22, 36, 30, 42]
    sets = [[token, 1, 2] for token in completion.token_ids]
    assert completion.sampling_mask == SamplingMask.from_sets(sets)


def test_log_probs_are_those_within_the_sets():
    assert parsed(masked_answer()).log_probs == [-0.5] * 8


def test_sets_that_were_not_requested_are_not_read():
    completion = parsed(masked_answer(), Sampling(max_response_len=8))
    assert completion.log_probs[0] == -5.014503479003906
    assert completion.sampling_mask is None


def test_an_answer_with_sets_may_be_larger():
    assert max_answer_bytes(100) == 262_144 + 25_600
    assert max_answer_bytes(100, 50) == 262_144 + 25_600 + 50_000


SETS = "output_token_sampling_mask"
LOG_PROBS = "output_token_sampling_logprobs"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({SETS: None}, "no sampling masks", id="no masks"),
        pytest.param({SETS: [[59]] * 7}, "7 sampling masks, 8", id="too few masks"),
        pytest.param({SETS: [[58]] * 8}, "0 lacks the token 59", id="without the sampled token"),
        pytest.param({SETS: [[59, 3, 3]] * 8}, "0 has a token twice", id="a token twice"),
        pytest.param(
            {SETS: [[59, 64]] * 8}, "token 64, but the vocabulary", id="beyond the vocabulary"
        ),
        pytest.param({SETS: [[59, -1]] * 8}, r">= 0 - at .*\[0\]\[1\]", id="a negative id"),
        pytest.param(
            {LOG_PROBS: [0.5] * 8}, r"<= 0\.001 - at .*logprobs\[0\]", id="a positive log-prob"
        ),
    ],
)
def test_impossible_sets_are_refused(changes, message):
    with pytest.raises(InvalidAnswer, match=message):
        parsed(masked_answer(**changes))


def reporting(limit: int) -> Callable[[Sequence[FakeSGLang]], None]:
    """Limits the number of tokens that the last server reports."""
    return lambda servers: servers[-1].info.update(sampling_mask_max_tokens=limit)


@pytest.mark.parametrize(
    ("limit", "top_k", "sent"),
    [(4096, -1, 3072), (4096, 40, 40), (40, 40, 40), (4096, 1, 1)],
    ids=["top-p alone", "top-k", "as many as reported", "greedy"],
)
def test_samples_carry_the_sets(start, limit, top_k, sent):
    sampling = dataclasses.replace(TRUNCATED, top_k=top_k)
    run = start(1, reporting(limit), sampling=sampling)
    for sample in flat(run.engine.generate(PROMPTS, sampling)):
        assert sample.sampling_mask.sets() == [sampled_from(token) for token in sample.response_ids]
        assert sample.rollout_log_probs == [log_prob(token, 0) / 2 for token in sample.response_ids]
    assert {body["sampling_params"]["top_k"] for body in run.requests} == {sent}


def test_an_evaluation_requests_no_sets(start):
    run = start(1, sampling=TRUNCATED)
    sampling = dataclasses.replace(TRUNCATED, return_sampling_mask=False)
    samples = flat(run.engine.generate(PROMPTS[:2], sampling))
    assert all(sample.sampling_mask is None for sample in samples)
    assert not any("return_sampling_mask" in body for body in run.requests)


def test_a_server_that_reports_too_few_tokens_is_refused(start):
    with pytest.raises(ValueError, match="--rollout-top-k -1, but a server reports at most 1 "):
        start(2, reporting(1), sampling=TRUNCATED)


def test_a_top_k_beyond_the_reported_tokens_is_refused(start):
    with pytest.raises(ValueError, match="at most 4096"):
        start(1, sampling=dataclasses.replace(TRUNCATED, top_k=5000))


def test_a_version_without_sampling_masks_is_refused(start):
    with pytest.raises(ValueError, match=r"runs SGLang 0\.5\.9"):
        start(1, lambda servers: servers[0].info.update(version="0.5.9"))


def test_an_allowed_bias_requests_no_sets(start, caplog):
    run = start(2, reporting(1), sampling=TRUNCATED, allow_truncation_bias=True)
    assert "uses the whole vocabulary" in caplog.text
    for sample in flat(run.engine.generate(PROMPTS, TRUNCATED)):
        assert sample.sampling_mask is None
        assert sample.rollout_log_probs == [log_prob(token, 0) for token in sample.response_ids]
    assert not any("return_sampling_mask" in body for body in run.requests)


@pytest.mark.parametrize(
    "recorded_before", [True, False], ids=["with sets", "of an older checkpoint"]
)
def test_a_partial_rollout_has_the_sets_of_both_requests(start, recorded_before):
    sampling = dataclasses.replace(TRUNCATED, max_response_len=60)
    run = start(1, sampling=sampling)
    (whole,) = run.engine.generate([LATE[0]], sampling)
    begun = [first_tokens(sample, 6, recorded_before) for sample in whole]
    run.engine.resume_unfinished([begun])
    (continued,) = run.engine.submit([], sampling, num_groups=1).result()
    for sample, expected in zip(continued, whole, strict=True):
        sets = expected.sampling_mask.sets()
        assert len(sets) == 60
        first_sets = sets[:6] if recorded_before else [[]] * 6
        assert sample.sampling_mask.sets() == first_sets + sets[6:]
    assert [len(body["input_ids"]) for body in run.requests] == [3, 3, 9, 9]


def first_tokens(sample: Sample, count: int, with_sampling_mask: bool) -> Sample:
    """An aborted sample of the first tokens of a complete one."""
    mask = None
    if with_sampling_mask:
        assert sample.sampling_mask is not None
        mask = sample.sampling_mask.select(torch.arange(count))
    assert sample.rollout_log_probs is not None
    return make_sample(
        sample.row,
        sample.response_ids[:count],
        rollout_log_probs=sample.rollout_log_probs[:count],
        sampling_mask=mask,
        status=Sample.Status.ABORTED,
    )
