"""Real servers: samples, functions of several turns, new weights, and a server that dies."""

import dataclasses
import time

import httpx
import pytest
import torch

from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.data.sample import STATUS, Sample, Sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.parallel import initialize, shut_down
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from tests.checkpoints import EOS
from tests.samples import flat
from tests.sglang_server.references import BOUND, worst_by_version
from tests.sglang_server.servers import wait_for_decoding


@pytest.fixture(scope="module")
def parallel(checkpoint):
    yield initialize(MegatronConfig(hf_checkpoint=str(checkpoint)))
    shut_down()


def training_log_probs(engine, samples):
    batch = make_batch(
        [sample.tokens for sample in samples],
        [sample.loss_mask for sample in samples],
        [sample.rollout_log_probs for sample in samples],
        [sample.weight_versions for sample in samples],
    )
    log_probs_L = engine.log_probs(batch, [[i] for i in range(len(samples))])
    return list(log_probs_L.split(batch.responses.lengths))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_transformers_and_of_training(
    temperature, checkpoint, parallel, real
):
    engine = real.make_engine(real.server)
    sampling = Sampling(temperature=temperature, max_response_len=48, n_samples=3)
    groups = engine.generate(real.prompts, sampling, seed=0)
    assert [[sample.row for sample in group] for group in groups] == [
        [prompt] * 3 for prompt in real.prompts
    ]
    samples = flat(groups)
    assert [sample.index for sample in samples] == list(range(24))
    assert len({tuple(sample.response_ids) for sample in samples}) == 24
    for sample in samples:
        assert sample.status is STATUS["stop" if sample.response_ids[-1] == EOS else "length"]
        assert sample.status is Sample.Status.COMPLETED or len(sample.response_ids) == 48
        assert sample.loss_mask == [1] * len(sample.response_ids)
        assert sample.weight_versions == [0] * len(sample.response_ids)
        assert real.reference.gap(sample, temperature) < BOUND
    training = TrainingEngine(
        MegatronConfig(hf_checkpoint=str(checkpoint)),
        parallel,
        temperature=temperature,
        total_steps=1,
    )
    for sample, expected in zip(samples, training_log_probs(training, samples), strict=True):
        torch.testing.assert_close(
            torch.tensor(sample.rollout_log_probs), expected, atol=BOUND, rtol=0
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_likeliest_tokens_are_those_of_transformers(temperature, real):
    sampling = Sampling(temperature=temperature, top_p=0.5, top_k=2, max_response_len=48)
    texts = [list(prompt.token_ids) for prompt in real.prompts]
    answers = real.make_engine(real.server).top_log_probs(texts, sampling, 8)
    for text, top in zip(texts, answers, strict=True):
        every = {
            token: real.reference.log_probs([*text, token], temperature)[-1]
            for token in range(1024)
        }
        likeliest = sorted(every.values(), reverse=True)[:8]
        assert list(top.values()) == pytest.approx(likeliest, abs=BOUND)
        assert top == pytest.approx({token: every[token] for token in top}, abs=BOUND)


def test_a_stop_token_ends_a_response_and_is_part_of_it(real):
    stops = tuple(range(3, 1024, 8))
    sampling = Sampling(max_response_len=200, n_samples=4, stop_token_ids=stops)
    for sample in flat(real.make_engine(real.server).generate(real.prompts, sampling, seed=0)):
        assert sample.status is Sample.Status.COMPLETED
        assert [token in (EOS, *stops) for token in sample.response_ids].index(True) == len(
            sample.response_ids
        ) - 1
        assert real.reference.gap(sample) < BOUND


def test_a_response_ends_with_the_context_and_no_prompt_is_sent_that_leaves_none(real):
    engine = real.make_engine(real.server)
    long = dataclasses.replace(real.prompts[0], token_ids=tuple(3 + i % 60 for i in range(500)))
    ((sample,),) = engine.generate([long], Sampling(max_response_len=400), seed=0)
    assert sample.status is Sample.Status.COMPLETED or len(sample.tokens) >= 510
    assert real.reference.gap(sample) < BOUND
    written = real.server.log.read_text().count("POST /generate")
    too_long = dataclasses.replace(long, token_ids=tuple(3 for _ in range(600)))
    with pytest.raises(ValueError, match="600"):
        engine.generate([real.prompts[0], too_long], Sampling(max_response_len=4), seed=0)
    assert real.server.log.read_text().count("POST /generate") == written


OBSERVATION = [11, 12, 13]
DIGITS = [str(digit) for digit in range(10)]


async def three_turns(sample, engine):
    """Answers of at most 24 tokens that end at a digit or EOS, with observations between them."""
    for turn in range(3):
        answer = await engine.generate(sample.tokens, {"stop": DIGITS, "max_new_tokens": 24})
        sample.append_response_tokens(
            tokens=answer.token_ids, log_probs=answer.log_probs, text=answer.text
        )
        sample.status = STATUS[answer.finish_reason]
        if turn < 2:
            sample.append_response_tokens(tokens=OBSERVATION, trainable=False)
    return [sample]


def test_turns_are_those_of_the_local_engine(real, checkpoint):
    prompts, greedy = real.prompts, Sampling(temperature=0.0, max_response_len=24)
    tokenizer = load_tokenizer(checkpoint)
    asked = (
        real.make_engine(real.server)
        .submit(prompts, greedy, 0, function=three_turns, concurrency=8)
        .result()
    )
    own = (
        LocalEngine(checkpoint, tokenizer)
        .submit(prompts, greedy, 0, function=three_turns, concurrency=8)
        .result()
    )
    assert {sum(sample.loss_mask) < 72 for sample in flat(own)} == {
        True,
        False,
    }  # some turns stop, others do not
    for one, other in zip(flat(asked), flat(own), strict=True):
        assert (one.tokens, one.loss_mask, one.status) == (
            other.tokens,
            other.loss_mask,
            other.status,
        )
        assert one.response == other.response
        assert one.rollout_log_probs == pytest.approx(other.rollout_log_probs, abs=BOUND)


SAMPLES = 3


@pytest.mark.parametrize("sync", ["distributed", "disk"])
def test_a_server_killed_in_mid_batch_loses_nothing_and_comes_back_with_the_current_weights(
    sync, two_servers, real
):
    victim, prompts = two_servers[1], real.prompts
    weights = {0: real.reference, 1: real.other_reference}
    current = [real.reference]
    engine = real.make_engine(
        *two_servers, weights=lambda: current[0].named_tensors(), sglang_weight_sync=sync
    )

    pending = engine.submit(prompts, Sampling(max_response_len=300, n_samples=SAMPLES), seed=0)
    wait_for_decoding(victim.log)
    victim.kill()
    groups = pending.result()
    assert [[sample.row for sample in group] for group in groups] == [
        [prompt] * SAMPLES for prompt in prompts
    ]
    samples = flat(groups)
    assert [sample.index for sample in samples] == list(range(SAMPLES * len(prompts)))
    assert all(
        sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED) for sample in samples
    )
    assert all(worst_by_version(sample, weights) < BOUND for sample in samples)
    metrics = engine.metrics()
    assert metrics["rollout/sglang_retries"] >= 1 and metrics["rollout/sglang_deaths"] == 1

    current[0] = real.other_reference
    engine.update_weights(real.other_reference.named_tensors, 1)
    victim.restart()
    victim.wait()
    deadline = time.monotonic() + 60.0
    while engine.metrics()["rollout/sglang_returns"] < 1:
        assert time.monotonic() < deadline, "the server that came back was not taken in again"
        samples = flat(engine.generate(prompts, Sampling(max_response_len=32), seed=0))
        assert all(worst_by_version(sample, weights) < BOUND for sample in samples)
    version = httpx.get(f"{victim.url}/model_info").json()["weight_version"]
    assert version == "1", "the server that came back was not given the current weights"
    answered = victim.log.read_text().count("POST /generate")
    samples = flat(engine.generate(prompts, Sampling(max_response_len=32, n_samples=2), seed=0))
    assert victim.log.read_text().count("POST /generate") > answered
    assert all(
        set(sample.weight_versions) == {1} and worst_by_version(sample, weights) < BOUND
        for sample in samples
    )
    assert engine.metrics()["rollout/sglang_returns"] == 1


LONG = Sampling(max_response_len=400, n_samples=2)

both_ways = pytest.mark.parametrize("sync", ["distributed", "disk"])


@both_ways
def test_log_probs_are_those_of_the_weights_that_it_was_given(sync, real):
    engine = real.make_engine(real.server, sglang_weight_sync=sync)
    sampling = Sampling(max_response_len=32, n_samples=2)
    for version, weights in (
        (1, real.other_reference),
        (2, real.reference),
        (7, real.other_reference),
    ):
        engine.update_weights(weights.named_tensors, version)
        assert engine.weight_version == version
        assert httpx.get(f"{real.server.url}/model_info").json()["weight_version"] == str(version)
        for sample in flat(engine.generate(real.prompts, sampling, seed=0)):
            assert set(sample.weight_versions) == {version}
            assert weights.gap(sample) < BOUND
        ids = real.prompts[5].token_ids
        assert engine.prompt_log_probs(ids)[real.server.url] == pytest.approx(
            weights.log_probs(ids), abs=BOUND
        )


@both_ways
def test_every_token_has_the_version_and_log_prob_of_its_weights(sync, real):
    weights = {0: real.reference, 1: real.other_reference, 2: real.reference}
    engine = real.make_engine(real.server, sglang_weight_sync=sync)
    pending = engine.submit(real.prompts, LONG, seed=0)
    for version in (1, 2):
        wait_for_decoding(real.server.log)
        engine.update_weights(weights[version].named_tensors, version)
    samples = flat(pending.result())
    assert len(samples) == 2 * len(real.prompts)
    for sample in samples:
        assert sample.weight_versions == sorted(sample.weight_versions)
        assert worst_by_version(sample, weights) < BOUND
    seen = [len(set(sample.weight_versions)) for sample in samples]
    assert seen.count(3) >= 2  # or the updates came too early, or too late, to show anything


@both_ways
def test_a_server_with_the_weights_of_an_earlier_run_samples_nothing_before_it_has_ours(sync, real):
    earlier = real.make_engine(real.server)
    earlier.update_weights(real.other_reference.named_tensors, 12)
    earlier.close()
    engine = real.make_engine(real.server, sglang_weight_sync=sync, push=False)
    for sample in flat(engine.generate(real.prompts, Sampling(max_response_len=8), seed=0)):
        assert set(sample.weight_versions) == {0}
        assert real.reference.gap(sample) < BOUND
