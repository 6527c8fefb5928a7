"""Sampling masks of SGLang servers: what is asked for, what is believed, and servers that report
none."""

import dataclasses
import json

import pytest
import torch

from slime_tis.trainer.data.sample import Sample, Sampling, SamplingMask
from slime_tis.trainer.engines.sglang.schema import (
    GenerateRequest,
    InvalidAnswer,
    max_answer_bytes,
    parse_generation,
)
from tests.rollout.sglang.fake_sglang import log_prob, recorded, sampled_from
from tests.rollout.sglang.rollouts import LATE, PROMPTS
from tests.samples import flat, make_sample

TRUNCATED = Sampling(top_p=0.9, max_response_len=20, n_samples=2, return_sampling_mask=True)


def masked_answer(**changes):
    """The recorded answer of eight tokens with sampling masks, after changes of its meta_info."""
    answer = recorded("generate_length")
    ids = answer["output_ids"]
    answer["meta_info"] |= {
        "output_token_sampling_mask": [[token, 1, 2] for token in ids],
        "output_token_sampling_logprobs": [-0.5] * len(ids),
        **changes,
    }
    return answer


def parsed(answer, sampling=TRUNCATED):
    request = GenerateRequest(input_ids=(1,), sampling=sampling, max_new_tokens=8, request_id="r")
    return parse_generation(json.dumps(answer).encode(), request, vocab_size=64)[0]


def test_an_answer_has_its_sets_and_their_log_probs_and_may_be_larger():
    completion = parsed(masked_answer())
    assert completion.token_ids == [59, 24, 58, 11, 22, 36, 30, 42]
    assert completion.log_probs == [-0.5] * 8
    assert completion.sampling_mask == SamplingMask.from_sets(
        [[token, 1, 2] for token in completion.token_ids]
    )
    plain = parsed(masked_answer(), Sampling(max_response_len=8))
    assert plain.log_probs[0] == -5.014503479003906 and plain.sampling_mask is None
    assert max_answer_bytes(100) == 262_144 + 25_600
    assert max_answer_bytes(100, 50) == 262_144 + 25_600 + 50_000


SETS, LOG_PROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({SETS: None}, "no output_token_sampling_mask", id="no masks"),
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
def test_sets_that_cannot_be_are_refused(changes, message):
    with pytest.raises(InvalidAnswer, match=message):
        parsed(masked_answer(**changes))


def reporting(limit):
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


def test_no_sets_are_asked_for_where_nothing_is_trained(start):
    run, sampling = (
        start(1, sampling=TRUNCATED),
        dataclasses.replace(TRUNCATED, return_sampling_mask=False),
    )
    assert all(
        sample.sampling_mask is None for sample in flat(run.engine.generate(PROMPTS[:2], sampling))
    )
    assert not any("return_sampling_mask" in body for body in run.requests)


def test_servers_that_report_too_few_tokens_are_refused_unless_the_bias_is_allowed(start, caplog):
    with pytest.raises(ValueError, match="--rollout-top-k -1, but a server reports at most 1 "):
        start(2, reporting(1), sampling=TRUNCATED)
    with pytest.raises(ValueError, match="at most 4096"):
        start(1, sampling=dataclasses.replace(TRUNCATED, top_k=5000))
    with pytest.raises(ValueError, match=r"runs SGLang 0\.5\.9"):
        start(1, lambda servers: servers[0].info.update(version="0.5.9"))
    run = start(2, reporting(1), sampling=TRUNCATED, allow_truncation_bias=True)
    assert "uses the whole vocabulary" in caplog.text
    for sample in flat(run.engine.generate(PROMPTS, TRUNCATED)):
        assert sample.sampling_mask is None
        assert sample.rollout_log_probs == [log_prob(token, 0) for token in sample.response_ids]
    assert not any("return_sampling_mask" in body for body in run.requests)


@pytest.mark.parametrize(
    "recorded_before", [True, False], ids=["with sets", "of an older checkpoint"]
)
def test_sets_of_a_partial_rollout_are_those_of_both_requests(start, recorded_before):
    sampling = dataclasses.replace(TRUNCATED, max_response_len=60)
    run = start(1, sampling=sampling)
    (whole,) = run.engine.generate([LATE[0]], sampling)
    begun = [first_tokens(sample, 6, recorded_before) for sample in whole]
    run.engine.resume_unfinished([begun])
    (continued,) = run.engine.submit([], sampling, num_groups=1).result()
    for sample, expected in zip(continued, whole, strict=True):
        assert expected.sampling_mask is not None and sample.sampling_mask is not None
        sets = expected.sampling_mask.sets()
        assert len(sets) == 60
        assert sample.sampling_mask.sets() == (sets if recorded_before else [[]] * 6 + sets[6:])
    assert [len(body["input_ids"]) for body in run.requests] == [3, 3, 9, 9]


def first_tokens(sample, count, with_sampling_mask):
    mask = sample.sampling_mask.select(torch.arange(count)) if with_sampling_mask else None
    log_probs, status = sample.rollout_log_probs[:count], Sample.Status.ABORTED
    fields = {"rollout_log_probs": log_probs, "sampling_mask": mask, "status": status}
    return make_sample(sample.row, sample.response_ids[:count], **fields)
