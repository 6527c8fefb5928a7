"""Rollouts made by functions that ask the local engine."""

import asyncio

import pytest

from slime_tis.trainer.data.sample import STATUS, Prompt, Sample, Sampling
from slime_tis.trainer.engines.functions import numbered, resumed_groups
from slime_tis.trainer.engines.local.checkpoint import load_tokenizer
from slime_tis.trainer.engines.local.engine import LocalEngine
from slime_tis.trainer.interrupt import Interrupted
from tests.rollout.conftest import make_prompts

RUN = Sampling(max_response_len=10, n_samples=3)


@pytest.fixture
def engine(checkpoint):
    return LocalEngine(checkpoint, load_tokenizer(checkpoint))


def prompts_of(checkpoint):
    prompts = make_prompts(checkpoint, ["31415>", "7>", "abc def"])
    return [*prompts, prompts[1]]


async def one_turn(sample, engine):
    answer = await engine.generate(sample.tokens)
    sample.append_response_tokens(tokens=answer.token_ids, log_probs=answer.log_probs)
    sample.response, sample.weight_versions = answer.text, answer.weight_versions
    sample.status = STATUS[answer.finish_reason]
    return [sample]


def test_samples_are_numbered_and_belong_to_their_prompts(checkpoint, engine):
    prompts = prompts_of(checkpoint)
    future = engine.submit(prompts, RUN, 5, function=one_turn, concurrency=2)
    groups = future.result()
    assert future.progress == (12, 12)
    assert [[sample.row for sample in group] for group in groups] == [[prompt] * 3 for prompt in prompts]
    samples = [sample for group in groups for sample in group]
    assert [(s.group_index, s.index, s.rollout_id) for s in samples] == [(n // 3, n, n) for n in range(12)]
    tokenizer = load_tokenizer(checkpoint)
    for sample in samples:
        assert sample.response == tokenizer.decode(sample.response_ids, skip_special_tokens=True)
    assert len({tuple(sample.response_ids) for sample in (*groups[1], *groups[3])}) == 6  # a prompt that occurs twice


def test_a_failure_of_the_model_ends_the_rollout_though_functions_swallow_it(checkpoint, engine, monkeypatch):
    seen = []

    async def careless(sample, engine):
        try:
            return await one_turn(sample, engine)
        except Exception as error:
            seen.append(str(error))
            return [sample]

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._model, "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.submit(prompts_of(checkpoint), RUN, 5, function=careless, concurrency=7)
    assert len(seen) >= 7 and set(seen) == {"out of memory"}


def test_a_failure_of_the_function_ends_the_rollout(checkpoint, engine):
    ended = []

    async def fails(sample, engine):
        if sample.index == 4:
            raise ValueError("no such tool.")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(sample.index)

    with pytest.raises(ValueError, match="no such tool"):
        engine.submit(prompts_of(checkpoint), RUN, 5, function=fails, concurrency=6)
    assert sorted(ended) == [0, 1, 2, 3]


@pytest.mark.parametrize("asks", [True, False], ids=["sampling", "busy elsewhere"])
def test_an_interrupt_is_honoured_between_decode_steps(checkpoint, asks, monkeypatch):
    steps = []

    def check_interrupts():
        steps.append(1)
        if len(steps) == 3:
            raise Interrupted("SIGINT")

    async def elsewhere(sample, engine):
        await asyncio.Event().wait()

    monkeypatch.setattr("slime_tis.trainer.engines.local.continuous_batching.SAFE_POINT_INTERVAL", 0.001)
    engine = LocalEngine(checkpoint, load_tokenizer(checkpoint), check_interrupts=check_interrupts)
    with pytest.raises(Interrupted):
        engine.submit(prompts_of(checkpoint), RUN, 5, function=one_turn if asks else elsewhere, concurrency=6)
    assert len(steps) == 3


def test_weights_stay_the_same_while_functions_ask(checkpoint, engine):
    async def updates(sample, asked):
        engine.update_weights(lambda: iter(()), 1)

    with pytest.raises(RuntimeError, match="weights cannot change"):
        engine.submit(prompts_of(checkpoint), RUN, 5, function=updates, concurrency=6)
    engine.update_weights(lambda: iter(engine._weights.items()), 1)
    assert engine.weight_version == 1


def test_the_local_engine_has_no_stragglers(checkpoint, engine):
    with pytest.raises(ValueError, match="completes all groups"):
        engine.submit(prompts_of(checkpoint), RUN, 5, function=one_turn, concurrency=6, num_groups=2)
    with pytest.raises(ValueError, match="concurrency is 0 but must be 1 or more"):
        engine.submit(prompts_of(checkpoint), RUN, 5, function=one_turn, concurrency=0)


def test_what_is_unfinished_is_gone_on_with():
    """One aborted sample is handed back; an aborted one of several begins anew; complete ones stay."""
    row = Prompt(index=9, text="a", token_ids=(1, 5))

    def sample(rollout, status, tokens=(1, 5, 6)):
        return Sample(
            prompt_row=row, rollout_id=rollout, tokens=list(tokens), response_length=len(tokens) - 2, status=status
        )

    done, aborted = Sample.Status.COMPLETED, Sample.Status.ABORTED
    group = [
        sample(3, done),
        sample(4, aborted),
        sample(5, done),
        sample(5, aborted),
        sample(6, Sample.Status.PENDING, (1, 5)),
    ]
    groups = resumed_groups([group], [row], 2, seed=7)
    assert [[call.complete for call in calls] for calls in groups] == [[True, False, False, False], [False, False]]
    assert groups[0][1].first_sample() is group[1]
    assert [call.first_sample().tokens for call in groups[0][2:]] == [[1, 5], [1, 5]]
    assert [call.key.occurrence for calls in groups for call in calls] == [0, 0, 0, 0, 1, 1]
    assert [s.rollout_id for s in numbered(groups)[0]] == [0, 1, 2, 2, 3]
    assert [call.key.sample for call in resumed_groups([], [row], 3, 1)[0]] == [0, 1, 2]
