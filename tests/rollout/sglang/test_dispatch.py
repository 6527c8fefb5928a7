"""Which server takes a request, and what becomes of requests of servers that fail: every sample counts once."""

import asyncio
from collections import Counter
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from slime_tis.analysis.diagnosis import diagnose
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.sglang.health import Timeouts
from tests.rollout.sglang.fake_sglang import fake_servers, log_prob, spoiled, wait_until, when
from tests.rollout.sglang.rollouts import (
    EARLY,
    LATE,
    PROMPTS,
    SAMPLING,
    Run,
    assert_exact,
    held,
    versions_of,
)
from tests.samples import flat


def live(run):
    return run.engine.metrics()["rollout/sglang_live_servers"]


def test_requests_of_a_hanging_server_move_elsewhere(start):
    run = start(2, sglang_request_timeout=1000.0)
    hanging = run.servers[0]
    hanging.faults.extend(["hang", "hang"])
    rollout = run.engine.submit(PROMPTS, SAMPLING)
    wait_until(lambda: len(hanging.requests) >= 2)
    hanging.healthy = False
    assert_exact(rollout.result(), PROMPTS)
    assert run.engine.metrics()["rollout/sglang_deaths"] == 1
    wait_until(lambda: {body["rid"] for body in hanging.requests[:2]} <= hanging.aborted)


def test_single_failed_health_checks_mark_no_server_down(start):
    run = start(1)
    (server,) = run.servers
    for _ in range(3):
        server.replies["/health"] = [(503, "")] * 2
        wait_until(lambda: not server.replies["/health"])
        checks = server.count("/health")
        wait_until(lambda: server.count("/health") >= checks + 2)  # noqa: B023  # called at once
    assert run.engine.metrics()["rollout/sglang_deaths"] == 0


def test_no_request_is_sent_during_an_update(start):
    run = start(2)
    sent = []
    rollouts = []

    def submit_once():
        sent.append(len(run.requests))
        if not rollouts:
            rollouts.append(run.engine.submit(PROMPTS, SAMPLING))

    run.sync.between = submit_once
    run.update(1)
    assert sent == [0, 0]
    assert_exact(rollouts[0].result(), PROMPTS)
    assert run.engine.metrics()["rollout/sglang_deaths"] == 0


def test_a_server_that_kept_its_weights_serves_at_once(start):
    run = start(1)
    run.update(4)
    (server,) = run.servers
    server.die()
    rollout = run.engine.submit(PROMPTS, SAMPLING)
    wait_until(lambda: run.engine.metrics()["rollout/sglang_deaths"] == 1)
    server.come_back("4")
    server.version = 4
    wait_until(lambda: live(run) == 1)
    rollout.result()
    assert run.weights.iterated == 1


def test_slow_servers_are_awaited_and_missing_ones_are_not(checkpoint):
    with fake_servers(2) as (first, second):
        first.healthy = False
        when(lambda: first.count("/health") > 2, lambda: setattr(first, "healthy", True))
        for timeout, expected in ((20.0, 2), (0.2, 1)):
            run = Run([first, second], checkpoint, sglang_startup_timeout=timeout)
            assert live(run) == expected
            run.engine.close()
            first.healthy = False
        second.healthy = False
        with pytest.raises(RolloutUnavailable, match="HTTP 503"):
            Run([first, second], checkpoint, sglang_startup_timeout=0.2)


def test_waiting_requests_keep_their_order_after_a_cancellation(start):
    run = start(1, sglang_concurrency=1)

    async def asks(sample, engine):
        tasks = [asyncio.create_task(engine.generate([1, token])) for token in range(3, 9)]
        while not run.requests:
            await asyncio.sleep(0.001)
        tasks[2].cancel()
        run.release()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [sample]

    run.servers[0].stop_after = 0
    run.engine.submit(
        PROMPTS[:1], Sampling(max_response_len=2), function=asks, concurrency=1
    ).result()
    assert [body["input_ids"][1] for body in run.requests] == [3, 4, 6, 7, 8]


@contextmanager
def behind_router(checkpoint):
    with fake_servers(3) as (router, *workers):
        router.workers = workers
        address = urlsplit(router.url)
        router_flags = {"sglang_router_ip": address.hostname, "sglang_router_port": address.port}
        run = Run(workers, checkpoint, sglang_url=None, sglang_concurrency=3, **router_flags)
        try:
            yield run, router
        finally:
            run.engine.close()


def test_a_router_takes_requests_its_servers_take_weights_and_one_may_die(checkpoint):
    with behind_router(checkpoint) as (run, router):
        run.update(2)
        assert_exact(run.engine.generate(PROMPTS, SAMPLING), PROMPTS)
        assert len(router.requests) == 36 and router.version == 0 and router.most_at_once <= 6
        assert run.sync.pushes == [([worker.url for worker in run.servers], 2)]
        run.servers[1].weight_version, run.servers[1].version = (
            "default",
            0,
        )  # restarted, unseen by the router
        groups = run.engine.generate(PROMPTS, SAMPLING)
        assert_exact(groups, PROMPTS)
        assert versions_of(groups) == {2}
        assert run.sync.pushes[1:] == [([run.servers[1].url], 2)]
    with behind_router(checkpoint) as (run, _):
        run.servers[0].stop_after = 1
        rollout = run.engine.submit(LATE[:4], SAMPLING)
        wait_until(lambda: run.servers[0].requests)
        run.servers[0].die()
        assert_exact(rollout.result(), LATE[:4])
        wait_until(lambda: live(run) == 1)


def test_the_wrong_one_of_four_servers_is_named(start):
    run = start(4)
    wrong = run.servers[2]

    def warmer(answer):
        for entry in answer["meta_info"]["output_token_logprobs"]:
            entry[0] *= 0.9

    wrong.faults.extend([spoiled(warmer)] * 100)
    samples = flat(run.engine.generate(PROMPTS, SAMPLING, seed=0))
    asked = {tuple(body["input_ids"]) for body in wrong.requests}
    assert asked == {tuple(sample.prompt_ids) for sample in samples if 2 in sample.rollout_workers}
    parts = [
        SampleParts(
            train_log_prob=[log_prob(token, 0) for token in sample.response_ids],
            rollout_log_prob=sample.rollout_log_probs,
            rollout_worker=sample.rollout_workers,
        )
        for sample in samples
    ]
    (finding,) = diagnose(
        TokenTable.from_parts(parts, {"workers": list(run.engine.workers)})
    ).findings
    assert (finding.cause, finding.detail) == ("worker", wrong.url)


FAULTS = [
    500,
    429,
    "drop",
    lambda answer: "<html>",
    spoiled(lambda answer: answer["output_ids"].pop()),
] * 2


def test_every_fault_is_tried_again_and_counts_once(start):
    run = start(3, sglang_max_retries=50)
    run.servers[0].faults.extend(FAULTS)
    run.servers[1].faults.extend(reversed(FAULTS))
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)
    faults = 2 * len(FAULTS) - sum(len(server.faults) for server in run.servers)
    assert faults > 8
    ids = [body["rid"] for body in run.requests]
    assert len(set(ids)) == len(ids) == 36 + faults
    assert run.engine.metrics()["rollout/sglang_retries"] == faults
    assert set(Counter(request_id[:-5] for request_id in ids)) == {
        f"{ids[0][:18]}-{number:08d}" for number in range(36)
    }


def test_a_request_that_hangs_goes_elsewhere_and_its_late_answer_is_not_counted(start):
    run = start(2, sglang_request_timeout=0.3)
    run.servers[0].stop_after = 0  # it would answer, but later
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=0)
    wait_until(lambda: run.servers[0].requests)
    wait_until(lambda: run.servers[0].aborted)
    run.servers[0].stop_after = None
    assert_exact(pending.result(), PROMPTS)


def test_a_long_response_that_exceeds_the_timeout_goes_on_from_its_tokens(start):
    run = start(1, sglang_request_timeout=0.1)
    run.servers[0].stop_after = 4
    sampling = Sampling(max_response_len=10)
    groups = run.engine.generate([LATE[0]], sampling, seed=0)
    assert_exact(groups, [LATE[0]], sampling)
    whole = [*LATE[0].token_ids, *groups[0][0].response_ids]
    assert [body["input_ids"] for body in run.requests] == [whole[:3], whole[:7], whole[:11]]
    assert [body["sampling_params"]["max_new_tokens"] for body in run.requests] == [10, 6, 2]
    assert run.engine.metrics()["rollout/sglang_retries"] == 0


def test_a_server_dies_in_mid_batch_and_returns_with_the_current_weights(start):
    run = start(2)
    run.update(1)
    victim = run.servers[1]
    victim.stop_after = 3
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=0)
    wait_until(lambda: victim.at_once)
    victim.die()
    victim.stop_after = None
    assert_exact(pending.result(), PROMPTS)
    wait_until(lambda: run.engine.metrics()["rollout/sglang_deaths"] == 1)
    run.update(2)
    assert run.sync.pushes[-1] == ([run.servers[0].url], 2)

    served = len(victim.requests)
    victim.come_back()
    wait_until(lambda: victim.count("/model_info") >= 2)
    run.servers[0].stop_after = 1
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=1)
    when(lambda: run.sync.pushes[-1] == ([victim.url], 2), run.release)
    groups = pending.result()
    assert_exact(groups, PROMPTS)
    assert run.sync.pushes[-1] == ([victim.url], 2)
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=2), PROMPTS)
    assert len(victim.requests) > served and victim.weight_version == "2"
    assert versions_of(groups) == {2}
    assert run.engine.metrics()["rollout/sglang_returns"] == 1


def test_a_refused_request_stops_the_rollout_and_another_key_does_not(start):
    run = start(2)
    run.servers[0].faults.append(400)
    with pytest.raises(RolloutUnavailable, match="answered HTTP 400"):
        run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)
    run = start(2)
    run.servers[0].faults.extend([401, 403, 404])
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)
    assert run.engine.metrics()["rollout/sglang_retries"] == 3


def test_when_no_server_is_left_the_rollout_ends_and_what_is_unfinished_stays(start):
    run = start(
        2, timeouts=Timeouts(recovery=0.2, first_retry=0.005, max_retry=0.02, health_interval=0.01)
    )
    sampling = Sampling(max_response_len=30)
    with held(run, 10):
        run.engine.submit([LATE[0], EARLY[0]], sampling, seed=0, num_groups=1).result()
    left = run.engine.unfinished()
    for server in run.servers:
        server.die()
    pending = run.engine.submit([EARLY[1]], sampling, seed=0, num_groups=1)
    for _ in range(2):
        with pytest.raises(RolloutUnavailable, match="no SGLang server is left") as error:
            pending.result()
    assert all(f"{server.url} since " in str(error.value) for server in run.servers)
    run.engine.close()
    assert run.engine.unfinished() == left and len(left) == 1
    assert run.engine.metrics()["rollout/sglang_deaths"] == 2
