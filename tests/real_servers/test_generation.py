"""Samples of a real server: log-probs, ends of responses, and functions of several turns."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.data.sample import STATUS, Prompt, Sample, Sampling
from slime_tis.trainer.engines.function_requests import TokenEngine
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.parallel import Parallel, initialize, shut_down
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from tests.checkpoints import EOS
from tests.real_servers.engines import ServedModel
from tests.real_servers.references import BOUND
from tests.samples import flat

LIMIT = 48
"""Longest response of a rollout, in tokens."""
N_SAMPLES = 3
TEMPERATURES = pytest.mark.parametrize("temperature", [1.0, 0.7])


@dataclass
class Rollout:
    """Three responses to each prompt, and the temperature at which they were sampled."""

    temperature: float
    groups: list[list[Sample]]

    @property
    def samples(self) -> list[Sample]:
        return flat(self.groups)


@pytest.fixture(scope="module", params=[1.0, 0.7])
def rollout(request: pytest.FixtureRequest, model: ServedModel, prompts: list[Prompt]) -> Rollout:
    sampling = Sampling(temperature=request.param, max_response_len=LIMIT, n_samples=N_SAMPLES)
    with model.engine() as engine:
        return Rollout(request.param, engine.generate(prompts, sampling, seed=0))


def test_every_prompt_has_its_group(rollout: Rollout, prompts: list[Prompt]) -> None:
    for group, prompt in zip(rollout.groups, prompts, strict=True):
        assert [sample.row for sample in group] == [prompt] * N_SAMPLES
    indices = [sample.index for sample in rollout.samples]
    assert indices == list(range(N_SAMPLES * len(prompts)))


def test_no_two_responses_are_equal(rollout: Rollout) -> None:
    responses = {tuple(sample.response_ids) for sample in rollout.samples}
    assert len(responses) == len(rollout.samples)


def test_the_status_follows_from_the_last_token(rollout: Rollout) -> None:
    for sample in rollout.samples:
        if sample.response_ids[-1] == EOS:
            assert sample.status is Sample.Status.COMPLETED
        else:
            assert sample.status is Sample.Status.TRUNCATED
            assert len(sample.response_ids) == LIMIT


def test_every_token_is_trained(rollout: Rollout) -> None:
    for sample in rollout.samples:
        assert sample.loss_mask == [1] * len(sample.response_ids)


def test_every_token_has_the_first_version(rollout: Rollout) -> None:
    for sample in rollout.samples:
        assert sample.weight_versions == [0] * len(sample.response_ids)


def test_log_probs_are_those_of_transformers(rollout: Rollout, model: ServedModel) -> None:
    for sample in rollout.samples:
        assert model.reference.largest_difference(sample, rollout.temperature) < BOUND


@pytest.fixture(scope="module")
def parallel(checkpoint: Path) -> Iterator[Parallel]:
    yield initialize(MegatronConfig(hf_checkpoint=str(checkpoint)))
    shut_down()


def training_log_probs(engine: TrainingEngine, samples: list[Sample]) -> list[Tensor]:
    """The training engine's log-probs, one tensor per response."""
    batch = make_batch(
        [sample.tokens for sample in samples],
        [sample.loss_mask for sample in samples],
        [sample.rollout_log_probs for sample in samples],
        [sample.weight_versions for sample in samples],
    )
    micro_batches = [[index] for index in range(len(samples))]
    log_probs_L = engine.log_probs(batch, micro_batches)
    return list(log_probs_L.split(batch.responses.lengths))


def test_log_probs_are_those_of_training(
    rollout: Rollout, checkpoint: Path, parallel: Parallel
) -> None:
    config = MegatronConfig(hf_checkpoint=str(checkpoint))
    engine = TrainingEngine(config, parallel, temperature=rollout.temperature, total_steps=1)
    expected = training_log_probs(engine, rollout.samples)
    for sample, log_probs in zip(rollout.samples, expected, strict=True):
        reported = torch.tensor(sample.rollout_log_probs)
        torch.testing.assert_close(reported, log_probs, atol=BOUND, rtol=0)


@TEMPERATURES
def test_the_likeliest_tokens_are_those_of_transformers(
    temperature: float, model: ServedModel, prompts: list[Prompt]
) -> None:
    # Log-probs of the likeliest tokens are those before top-p and top-k.
    sampling = Sampling(temperature=temperature, top_p=0.5, top_k=2, max_response_len=LIMIT)
    texts = [list(prompt.token_ids) for prompt in prompts]
    with model.engine() as engine:
        answers = engine.top_log_probs(texts, sampling, 8)
    for text, likeliest in zip(texts, answers, strict=True):
        log_probs_V = model.reference.next_log_probs(text, temperature)[-1]
        largest = log_probs_V.topk(8).values.tolist()
        assert list(likeliest.values()) == pytest.approx(largest, abs=BOUND)
        expected = {token: float(log_probs_V[token]) for token in likeliest}
        assert likeliest == pytest.approx(expected, abs=BOUND)


STOPS = tuple(range(3, 1024, 8))


@pytest.fixture(scope="module")
def stopped(model: ServedModel, prompts: list[Prompt]) -> list[Sample]:
    """Responses that end at one of many stop tokens."""
    sampling = Sampling(max_response_len=200, n_samples=4, stop_token_ids=STOPS)
    with model.engine() as engine:
        return flat(engine.generate(prompts, sampling, seed=0))


def test_a_response_ends_with_its_first_stop_token(stopped: list[Sample]) -> None:
    for sample in stopped:
        are_stops = [token in (EOS, *STOPS) for token in sample.response_ids]
        assert are_stops.index(True) == len(are_stops) - 1
        assert sample.status is Sample.Status.COMPLETED


def test_stop_tokens_change_no_log_prob(stopped: list[Sample], model: ServedModel) -> None:
    for sample in stopped:
        assert model.reference.largest_difference(sample) < BOUND


def test_a_response_ends_with_the_context(model: ServedModel, prompts: list[Prompt]) -> None:
    token_ids = tuple(3 + position % 60 for position in range(500))
    prompt = dataclasses.replace(prompts[0], token_ids=token_ids)
    with model.engine() as engine:
        ((sample,),) = engine.generate([prompt], Sampling(max_response_len=400), seed=0)
    assert sample.status is Sample.Status.COMPLETED or len(sample.tokens) >= 510
    assert model.reference.largest_difference(sample) < BOUND


def test_no_prompt_is_sent_beside_one_beyond_the_context(
    model: ServedModel, prompts: list[Prompt]
) -> None:
    too_long = dataclasses.replace(prompts[0], token_ids=(3,) * 600)
    with model.engine() as engine:
        before = model.server.num_requests()
        with pytest.raises(ValueError, match="600"):
            engine.generate([prompts[0], too_long], Sampling(max_response_len=4), seed=0)
    assert model.server.num_requests() == before


OBSERVATION = [11, 12, 13]
DIGITS = [str(digit) for digit in range(10)]
TURNS = 3
TURN_LIMIT = 24
"""Longest answer of a turn, in tokens."""


async def three_turns(sample: Sample, engine: TokenEngine) -> list[Sample]:
    """Answers that end at a digit, EOS or the limit, with observations between them."""
    for turn in range(TURNS):
        params: dict[str, Any] = {"stop": DIGITS, "max_new_tokens": TURN_LIMIT}
        answer = await engine.generate(sample.tokens, params)
        sample.append_response_tokens(
            tokens=answer.token_ids, log_probs=answer.log_probs, text=answer.text
        )
        sample.status = STATUS[answer.finish_reason]
        if turn < TURNS - 1:
            sample.append_response_tokens(tokens=OBSERVATION, trainable=False)
    return [sample]


@dataclass
class Conversations:
    """Greedy conversations of a server, and the same ones of the local engine."""

    served: list[Sample]
    local: list[Sample]


@pytest.fixture(scope="module")
def conversations(model: ServedModel, prompts: list[Prompt]) -> Conversations:
    greedy = Sampling(temperature=0.0, max_response_len=TURN_LIMIT)
    options: dict[str, Any] = {"function": three_turns, "concurrency": 8}
    with model.engine() as engine:
        served = engine.submit(prompts, greedy, 0, **options).result()
    local_engine = LocalEngine(model.checkpoint, load_tokenizer(model.checkpoint))
    local = local_engine.submit(prompts, greedy, 0, **options).result()
    return Conversations(flat(served), flat(local))


def test_some_turns_end_at_a_stop_string(conversations: Conversations) -> None:
    # Otherwise the comparisons with the local engine would cover only one way to end a turn.
    num_trained = [sum(sample.loss_mask) for sample in conversations.served]
    assert min(num_trained) < TURNS * TURN_LIMIT
    assert max(num_trained) == TURNS * TURN_LIMIT


def test_turns_are_those_of_the_local_engine(conversations: Conversations) -> None:
    for sample, expected in zip(conversations.served, conversations.local, strict=True):
        assert sample.tokens == expected.tokens
        assert sample.loss_mask == expected.loss_mask
        assert sample.status == expected.status
        assert sample.response == expected.response


def test_log_probs_of_turns_are_those_of_the_local_engine(conversations: Conversations) -> None:
    for sample, expected in zip(conversations.served, conversations.local, strict=True):
        assert sample.rollout_log_probs == pytest.approx(expected.rollout_log_probs, abs=BOUND)
