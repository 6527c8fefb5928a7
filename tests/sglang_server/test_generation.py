"""What a real server samples, and what it says of it, against transformers and the training engine."""

import dataclasses

import pytest
import torch

from slime_tis.trainer.data.sample import STATUS, Sample, Sampling
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.engine import TrainingEngine
from slime_tis.trainer.megatron.parallel import initialize, shut_down
from slime_tis.trainer.options.megatron import MegatronConfig
from tests.checkpoints import EOS
from tests.samples import flat
from tests.sglang_server.references import BOUND


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
def test_log_probs_are_those_of_transformers_and_of_training(temperature, checkpoint, parallel, real):
    engine = real.make_engine(real.server)
    sampling = Sampling(temperature=temperature, max_response_len=48, n_samples=3)
    groups = engine.generate(real.prompts, sampling, seed=0)
    assert [[sample.row for sample in group] for group in groups] == [[prompt] * 3 for prompt in real.prompts]
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
        MegatronConfig(hf_checkpoint=str(checkpoint)), parallel, temperature=temperature, total_steps=1
    )
    for sample, expected in zip(samples, training_log_probs(training, samples), strict=True):
        torch.testing.assert_close(torch.tensor(sample.rollout_log_probs), expected, atol=BOUND, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_likeliest_tokens_are_those_of_transformers(temperature, real):
    sampling = Sampling(temperature=temperature, top_p=0.5, top_k=2, max_response_len=48)
    texts = [list(prompt.token_ids) for prompt in real.prompts]
    answers = real.make_engine(real.server).top_log_probs(texts, sampling, 8)
    for text, top in zip(texts, answers, strict=True):
        every = {token: real.reference.log_probs([*text, token], temperature)[-1] for token in range(1024)}
        likeliest = sorted(every.values(), reverse=True)[:8]
        assert list(top.values()) == pytest.approx(likeliest, abs=BOUND)
        assert top == pytest.approx({token: every[token] for token in top}, abs=BOUND)


def test_a_stop_token_ends_a_response_and_is_part_of_it(real):
    stops = tuple(range(3, 1024, 8))
    sampling = Sampling(max_response_len=200, n_samples=4, stop_token_ids=stops)
    for sample in flat(real.make_engine(real.server).generate(real.prompts, sampling, seed=0)):
        assert sample.status is Sample.Status.COMPLETED
        assert [token in (EOS, *stops) for token in sample.response_ids].index(True) == len(sample.response_ids) - 1
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
