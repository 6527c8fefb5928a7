"""Functions that ask servers: turns, updates of weights in between, aborts, failures and limits."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slime_tis.trainer.data.sample import STATUS, Sample, Sampling
from slime_tis.trainer.engines.function_requests import Generation
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from tests.rollout.sglang.fake_sglang import (
    continuation,
    fake_servers,
    log_prob,
    text_of,
    wait_until,
    when,
)
from tests.rollout.sglang.rollouts import EARLY, LATE, PROMPTS, Run, held
from tests.samples import flat, reloaded

RUN = Sampling(max_response_len=12, n_samples=2)
OBSERVATION = [20, 21]
ROUTING_KEY = "x-smg-routing-key"


async def two_turns(sample, engine):
    """An answer, an observation, and another answer; an aborted sample continues where it was."""
    for turn in range(sample.loss_mask.count(0) // 2 if sample.loss_mask else 0, 2):
        answer, versions = await engine.generate(sample.tokens), sample.weight_versions
        sample.append_response_tokens(tokens=answer.token_ids, log_probs=answer.log_probs)
        sample.weight_versions = [*versions, *answer.weight_versions]
        sample.status = STATUS[answer.finish_reason]
        if answer.finish_reason == "abort":
            return [sample]
        if turn == 0:
            sample.append_response_tokens(tokens=OBSERVATION, trainable=False)
    return [sample]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def assert_two_turns(sample: Sample) -> None:
    """Both answers are those of the model.

    An aborted first answer may be longer by its second request.
    """
    assert sample.loss_mask is not None
    first = sample.loss_mask.index(0)
    ids = list(sample.row.token_ids)
    ids += continuation(ids, first) + OBSERVATION
    second = continuation(ids, RUN.max_response_len)
    assert sample.tokens == ids + second
    assert sample.loss_mask == [1] * first + [0, 0] + [1] * len(second)
    expected = []
    for i, token in enumerate(sample.response_ids):
        version = sample.weight_versions[i]
        expected.append(log_prob(token, version) if sample.loss_mask[i] else 0.0)
    assert sample.rollout_log_probs == expected


@dataclass
class Rollout:
    """A finished rollout of functions with two turns on two servers."""

    run: Run
    future: Any
    groups: list[list[Sample]]


@pytest.fixture(scope="module")
def rollout(checkpoint: Path) -> Iterator[Rollout]:
    with fake_servers(2) as servers:
        run = Run(servers, checkpoint)
        future = run.engine.submit(PROMPTS, RUN, 3, function=two_turns, concurrency=5)
        yield Rollout(run, future, future.result())
        run.engine.close()


def test_functions_ask_servers_over_several_turns(rollout):
    for sample in flat(rollout.groups):
        assert_two_turns(sample)


def test_progress_counts_samples_of_functions(rollout):
    assert rollout.future.progress == (24, 24)


def test_functions_may_address_the_first_server(rollout):
    server = rollout.run.servers[0]
    assert rollout.run.engine.http_address == ("127.0.0.1", server.port)


def test_samples_of_functions_are_in_the_order_of_prompts(rollout):
    prompts = [[sample.row for sample in group] for group in rollout.groups]
    assert prompts == [[prompt] * 2 for prompt in PROMPTS]
    numbers = [(s.group_index, s.index, s.rollout_id) for s in flat(rollout.groups)]
    assert numbers == [(n // 2, n, n) for n in range(24)]


def test_request_ids_of_functions_are_unique(rollout):
    ids = [body["rid"] for body in rollout.run.requests]
    assert len(set(ids)) == 48
    assert len({len(request_id) for request_id in ids}) == 1


def test_functions_keep_to_their_concurrency(rollout):
    assert max(server.most_at_once for server in rollout.run.servers) <= 5
    assert all(server.requests for server in rollout.run.servers)


def test_both_turns_of_a_sample_have_its_routing_key(rollout):
    keys = []
    for server in rollout.run.servers:
        keys += [headers[ROUTING_KEY] for headers in server.headers if ROUTING_KEY in headers]
    assert sorted(Counter(keys).values()) == [2] * 24


def test_functions_that_catch_errors_do_not_hide_lost_servers(start):
    run = start(1, sglang_max_retries=1)
    run.servers[0].faults.extend([500] * 100)

    async def careless(sample, engine):
        try:
            return await two_turns(sample, engine)
        except Exception:
            return [sample]

    with pytest.raises(RolloutUnavailable, match="failed 2 times"):
        run.engine.submit(PROMPTS[:3], RUN, function=careless, concurrency=9).result()


@dataclass
class Stragglers:
    """A rollout that ended when two of four groups were complete."""

    run: Run
    function: Callable[..., Any]
    groups: list[list[Sample]]
    unfinished: list[list[Sample]]


@pytest.fixture
def stragglers(start: Callable[..., Run]) -> Stragglers:
    run = start(1)

    async def one_turn(sample: Sample, engine: Any) -> list[Sample]:
        if sample.response_length == 0 and sample.row in EARLY:
            await until(lambda: run.num_held == 4 or not run.servers[0].stop_after)
            sample.append_response_tokens(tokens=[5], log_probs=[-0.5])
            sample.status = Sample.Status.COMPLETED
            return [sample]
        return await two_turns(sample, engine)

    prompts = [LATE[0], EARLY[0], LATE[1], EARLY[1]]
    with held(run, 6):
        future = run.engine.submit(prompts, RUN, function=one_turn, concurrency=8, num_groups=2)
        groups = future.result()
    return Stragglers(run, one_turn, groups, run.engine.unfinished())


def test_a_rollout_of_functions_ends_without_stragglers(stragglers):
    assert [group[0].row for group in stragglers.groups] == EARLY[:2]
    numbers = [(s.group_index, s.index, s.rollout_id) for s in flat(stragglers.groups)]
    assert numbers == [(n // 2, n, n) for n in range(4)]


def test_stragglers_of_functions_keep_their_tokens(stragglers):
    for sample in flat(stragglers.unfinished):
        assert sample.status is Sample.Status.ABORTED
        assert sample.row in LATE
        assert sample.response_ids == continuation(list(sample.row.token_ids), 6)


def test_functions_continue_stragglers_of_a_checkpoint(stragglers):
    run = stragglers.run
    stored = reloaded(stragglers.unfinished)
    run.update(1)
    run.engine.resume_unfinished(stored)
    future = run.engine.submit(
        [EARLY[2]], RUN, function=stragglers.function, concurrency=8, num_groups=3
    )
    groups = future.result()
    assert [group[0].row for group in groups] == [LATE[0], LATE[1], EARLY[2]]
    for sample in flat(groups[:2]):
        assert sample.weight_versions == [0] * 6 + [1] * (sample.response_length - 6)
        assert_two_turns(sample)
    assert run.engine.unfinished() == []


def test_a_function_that_ignores_the_abort_begins_anew(start, monkeypatch):
    run = start(1)
    aborts = []

    async def stubborn(sample, engine):
        if sample.row in EARLY:
            await until(lambda: run.num_held == 2)
            sample.status = Sample.Status.COMPLETED
            return [sample]
        while True:
            answer = await engine.generate(sample.tokens)
            if answer.finish_reason == "abort":
                aborts.append(answer.token_ids)

    monkeypatch.setattr("slime_tis.trainer.engines.function_rollouts.ABORT_TIMEOUT", 0.05)
    with held(run, 6):
        future = run.engine.submit(
            [LATE[0], EARLY[0]], RUN, function=stubborn, concurrency=8, num_groups=1
        )
        (group,) = future.result()
    assert group[0].row == EARLY[0]
    lengths = sorted(map(len, aborts))
    assert lengths[-2:] == [6, 6] and set(lengths[:-2]) == {0}
    assert [(s.status, s.tokens) for s in flat(run.engine.unfinished())] == [
        (Sample.Status.PENDING, list(LATE[0].token_ids))
    ] * 2


def test_a_stop_string_may_span_two_requests(start):
    run = start(1, sglang_request_timeout=0.1)
    expected = continuation(list(LATE[0].token_ids), 60)
    stop = text_of(expected[4:7])
    end = text_of(expected).index(stop) + 3
    answers = []

    async def stops(sample, engine):
        answers.append(await engine.generate(sample.tokens, {"stop": stop, "max_new_tokens": 60}))
        return [sample]

    run.servers[0].stop_after = 5  # then the request takes too long
    when(lambda: run.servers[0].aborted, run.release)
    run.engine.submit(
        LATE[:1], Sampling(max_response_len=5), function=stops, concurrency=1
    ).result()
    (answer,) = answers
    assert answer.token_ids == expected[:end]
    assert (answer.finish_reason, answer.text) == ("stop", text_of(expected[: end - 3]))
    assert run.requests[-1]["sampling_params"]["stop"] == [stop]


def test_a_stop_text_of_the_run_may_span_two_requests(start):
    run = start(1, sglang_request_timeout=0.1)
    expected = continuation(list(LATE[0].token_ids), 60)
    stop = text_of(expected[4:7])
    end = text_of(expected).index(stop) + 3
    run.servers[0].stop_after = 5  # then the request takes too long
    when(lambda: run.servers[0].aborted, run.release)
    sampling = Sampling(max_response_len=60, stop=(stop,))
    ((sample,),) = run.engine.submit(LATE[:1], sampling).result()
    assert sample.response_ids == expected[:end]
    assert sample.status is Sample.Status.COMPLETED
    assert run.requests[-1]["sampling_params"]["stop"] == [stop]


def answers_to(
    run: Run, inputs: Sequence[Sequence[int]], params: dict[str, Any] | None, sampling: Sampling
) -> list[Generation]:
    """The answers that one function gets to several inputs."""
    answers = []

    async def asks(sample: Sample, engine: Any) -> list[Sample]:
        for token_ids in inputs:
            answers.append(await engine.generate(list(token_ids), params))
        return [sample]

    run.engine.submit(PROMPTS[:1], sampling, function=asks, concurrency=1).result()
    return answers


FIFTY = Sampling(max_response_len=50)


def test_an_input_without_space_for_an_answer_is_not_sent(start):
    run = start(1)
    answers = answers_to(run, [[1] * 130, [1] * 127], {"max_new_tokens": 1000}, FIFTY)
    assert [answer.finish_reason for answer in answers] == ["length", "length"]
    assert run.requests == []


def test_an_answer_ends_with_the_context_of_the_model(start):
    run = start(1)
    answers_to(run, [[1] * 126, [1] * 100], {"max_new_tokens": 1000}, FIFTY)
    assert [body["sampling_params"]["max_new_tokens"] for body in run.requests] == [1, 27]


@pytest.mark.parametrize(
    ("sampling", "limit"),
    [(FIFTY, 50), (Sampling(max_response_len=50, max_context_len=20), 17)],
    ids=["response", "context"],
)
def test_an_answer_ends_with_the_limits_of_the_run(sampling, limit, start):
    run = start(1)
    assert len(LATE[0].token_ids) == 3
    answers_to(run, [LATE[0].token_ids], None, sampling)
    assert [body["sampling_params"]["max_new_tokens"] for body in run.requests] == [limit]


def test_closing_the_engine_ends_functions(start):
    run = start(1)
    ended = []

    async def waits(sample, engine):
        try:
            return await two_turns(sample, engine)
        finally:
            ended.append(sample.index)

    with held(run, 3):
        future = run.engine.submit(LATE[:2], RUN, function=waits, concurrency=3)
        wait_until(lambda: run.num_held == 3)
        run.engine.close()
    assert sorted(ended) == [0, 1, 2]
    assert future.progress == (0, 4)
