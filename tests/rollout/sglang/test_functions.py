"""Functions that ask servers: turns, updates of weights in between, aborts, failures and limits."""

import asyncio
from collections import Counter

import pytest

from slime_tis.trainer.data.sample import STATUS, Sample, Sampling
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from tests.rollout.sglang.fake_sglang import continuation, log_prob, text_of, wait_until, when
from tests.rollout.sglang.rollouts import EARLY, LATE, PROMPTS, held
from tests.samples import flat, reloaded

RUN = Sampling(max_response_len=12, n_samples=2)
OBSERVATION = [20, 21]
ROUTED = {"x-smg-routing-key"}


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


def assert_two_turns(sample):
    """Both answers are what the model says; a first one that was aborted may be longer by its
    second request."""
    first = sample.loss_mask.index(0)
    ids = list(sample.row.token_ids)
    answers = [continuation(ids, first)]
    ids += answers[0] + OBSERVATION
    answers.append(continuation(ids, RUN.max_response_len))
    assert sample.tokens == ids + answers[1]
    assert sample.loss_mask == [1] * first + [0, 0] + [1] * len(answers[1])
    for token, value, version, trained in zip(
        sample.response_ids,
        sample.rollout_log_probs,
        sample.weight_versions,
        sample.loss_mask,
        strict=True,
    ):
        assert value == (log_prob(token, version) if trained else 0.0)


def test_functions_ask_servers_over_several_turns(start):
    run = start(2)
    future = run.engine.submit(PROMPTS, RUN, 3, function=two_turns, concurrency=5)
    groups = future.result()
    assert future.progress == (24, 24)
    assert run.engine.http_address == ("127.0.0.1", run.servers[0].port)
    assert [[sample.row for sample in group] for group in groups] == [
        [prompt] * 2 for prompt in PROMPTS
    ]
    assert [(s.group_index, s.index, s.rollout_id) for s in flat(groups)] == [
        (n // 2, n, n) for n in range(24)
    ]
    for sample in flat(groups):
        assert_two_turns(sample)
    names = [body["rid"] for body in run.requests]
    assert len(set(names)) == 48 and len(set(map(len, names))) == 1
    assert max(server.most_at_once for server in run.servers) <= 5
    assert all(server.requests for server in run.servers)
    keys = [
        headers["x-smg-routing-key"]
        for server in run.servers
        for headers in server.headers
        if ROUTED & {*headers}
    ]
    assert sorted(Counter(keys).values()) == [2] * 24, "both turns of a sample have its key"


def test_a_rollout_without_servers_ends_though_functions_swallow_it(start):
    run = start(1, sglang_max_retries=1)
    run.servers[0].faults.extend([500] * 100)

    async def careless(sample, engine):
        try:
            return await two_turns(sample, engine)
        except Exception:
            return [sample]

    with pytest.raises(RolloutUnavailable, match="failed 2 times"):
        run.engine.submit(PROMPTS[:3], RUN, function=careless, concurrency=9).result()


def test_stragglers_are_aborted_and_their_function_goes_on_with_them(start):
    run = start(1)
    mixed = [LATE[0], EARLY[0], LATE[1], EARLY[1]]

    async def one_turn(sample, engine):
        if sample.response_length == 0 and sample.row in EARLY:
            await until(lambda: run.num_held == 4 or not run.servers[0].stop_after)
            sample.append_response_tokens(tokens=[5], log_probs=[-0.5])
            sample.status = Sample.Status.COMPLETED
            return [sample]
        return await two_turns(sample, engine)

    with held(run, 6):
        future = run.engine.submit(mixed, RUN, function=one_turn, concurrency=8, num_groups=2)
        groups = future.result()
    assert [group[0].row for group in groups] == EARLY[:2]
    assert [(s.group_index, s.index, s.rollout_id) for s in flat(groups)] == [
        (n // 2, n, n) for n in range(4)
    ]
    left = run.engine.unfinished()
    for sample in flat(left):
        assert sample.status is Sample.Status.ABORTED and sample.row in LATE
        assert sample.response_ids == continuation(list(sample.row.token_ids), 6)
    stored = reloaded(left)
    run.update(1)
    run.engine.resume_unfinished(stored)
    groups = run.engine.submit(
        [EARLY[2]], RUN, function=one_turn, concurrency=8, num_groups=3
    ).result()
    assert [group[0].row for group in groups] == [LATE[0], LATE[1], EARLY[2]]
    for sample in flat(groups[:2]):
        assert sample.response_ids[:6] == continuation(list(sample.row.token_ids), 6)
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


def test_limits_end_an_answer_and_an_input_without_space_is_not_sent(start):
    run = start(1)
    answers = []

    async def long(sample, engine):
        for length in (130, 127, 126, 100):
            answers.append(
                await engine.generate([1] + [9] * (length - 1), {"max_new_tokens": 1000})
            )
        answers.append(await engine.generate(LATE[0].token_ids))
        return [sample]

    sampling = Sampling(max_response_len=50, max_context_len=20)
    run.engine.submit(
        PROMPTS[:1], Sampling(max_response_len=50), function=long, concurrency=1
    ).result()
    assert [len(body["input_ids"]) for body in run.requests] == [126, 100, 3]
    assert [body["sampling_params"]["max_new_tokens"] for body in run.requests] == [1, 27, 50]
    assert [answer.finish_reason for answer in answers[:2]] == ["length", "length"]
    run.engine.submit(PROMPTS[:1], sampling, function=long, concurrency=1).result()
    assert run.requests[3]["sampling_params"]["max_new_tokens"] == 17


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
