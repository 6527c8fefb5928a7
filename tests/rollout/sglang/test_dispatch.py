"""Which server takes a request, and how requests of failing servers are retried."""

import asyncio
from urllib.parse import urlsplit

import pytest

from slime_tis.analysis.diagnosis import diagnose
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.servers.health import Timeouts
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


def test_the_start_waits_for_a_slow_server(checkpoint):
    with fake_servers(2) as (first, second):
        first.healthy = False
        when(lambda: first.count("/health") > 2, lambda: setattr(first, "healthy", True))
        run = Run([first, second], checkpoint, sglang_startup_timeout=20.0)
        assert live(run) == 2
        run.engine.close()


def test_the_start_names_servers_that_it_waits_for(checkpoint, caplog):
    with fake_servers(2) as (first, second):
        first.healthy = False
        when(lambda: first.count("/health") > 1, lambda: setattr(first, "healthy", True))
        Run([first, second], checkpoint, sglang_startup_timeout=20.0).engine.close()
    assert f"{first.url} does not answer yet: " in caplog.text


def test_the_start_does_not_need_every_server(checkpoint):
    with fake_servers(2) as (first, second):
        first.healthy = False
        run = Run([first, second], checkpoint, sglang_startup_timeout=0.2)
        assert live(run) == 1
        run.engine.close()


def test_the_start_needs_one_server(checkpoint):
    with fake_servers(2) as servers:
        for server in servers:
            server.healthy = False
        with pytest.raises(RolloutUnavailable, match="HTTP 503"):
            Run(servers, checkpoint, sglang_startup_timeout=0.2)


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


@pytest.fixture
def routed(checkpoint):
    """A run with three servers behind a router, and the router."""
    with fake_servers(3) as (router, *workers):
        router.workers = workers
        address = urlsplit(router.url)
        router_flags = {"sglang_router_ip": address.hostname, "sglang_router_port": address.port}
        run = Run(workers, checkpoint, sglang_url=None, sglang_concurrency=3, **router_flags)
        try:
            yield run, router
        finally:
            run.engine.close()


def test_a_router_takes_all_requests(routed):
    run, router = routed
    assert_exact(run.engine.generate(PROMPTS, SAMPLING), PROMPTS)
    assert len(router.requests) == 36
    assert router.most_at_once <= 6


def test_the_servers_behind_a_router_take_the_weights(routed):
    run, router = routed
    run.update(2)
    assert router.version == 0
    assert run.sync.pushes == [([worker.url for worker in run.servers], 2)]


def test_a_restarted_server_behind_a_router_gets_weights(routed):
    run, _ = routed
    run.update(2)
    restarted = run.servers[1]
    restarted.weight_version = "default"
    restarted.version = 0
    groups = run.engine.generate(PROMPTS, SAMPLING)
    assert_exact(groups, PROMPTS)
    assert versions_of(groups) == {2}
    assert run.sync.pushes[1:] == [([restarted.url], 2)]


def test_a_server_behind_a_router_may_die(routed):
    run, _ = routed
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


@pytest.fixture
def faulty(start):
    """A run whose servers failed, and the number of failures."""
    run = start(3, sglang_max_retries=50)
    run.servers[0].faults.extend(FAULTS)
    run.servers[1].faults.extend(reversed(FAULTS))
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)
    num_faults = 2 * len(FAULTS) - sum(len(server.faults) for server in run.servers)
    assert num_faults > 8
    return run, num_faults


def test_every_fault_is_retried_once(faulty):
    run, num_faults = faulty
    assert len(run.requests) == 36 + num_faults
    assert run.engine.metrics()["rollout/sglang_retries"] == num_faults


def test_every_request_has_a_unique_id(faulty):
    run, _ = faulty
    ids = [body["rid"] for body in run.requests]
    assert len(set(ids)) == len(ids)


def test_request_ids_begin_with_their_samples_id(faulty):
    run, _ = faulty
    ids = [body["rid"] for body in run.requests]
    samples = {f"{ids[0][:18]}-{number:08d}" for number in range(36)}
    assert {request_id[:-5] for request_id in ids} == samples


def test_the_late_answer_of_a_moved_request_is_not_counted(start):
    run = start(2, sglang_request_timeout=0.3)
    run.servers[0].stop_after = 0  # it would answer, but later
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=0)
    wait_until(lambda: run.servers[0].requests)
    wait_until(lambda: run.servers[0].aborted)
    run.servers[0].stop_after = None
    assert_exact(pending.result(), PROMPTS)


def test_a_response_continues_after_the_timeout(start):
    run = start(1, sglang_request_timeout=0.1)
    run.servers[0].stop_after = 4
    sampling = Sampling(max_response_len=10)
    groups = run.engine.generate([LATE[0]], sampling, seed=0)
    assert_exact(groups, [LATE[0]], sampling)
    whole = [*LATE[0].token_ids, *groups[0][0].response_ids]
    assert [body["input_ids"] for body in run.requests] == [whole[:3], whole[:7], whole[:11]]
    assert [body["sampling_params"]["max_new_tokens"] for body in run.requests] == [10, 6, 2]
    assert run.engine.metrics()["rollout/sglang_retries"] == 0


@pytest.fixture
def after_death(start):
    """Two servers with weights of version 1, of which the second one died during a rollout."""
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
    return run, victim


def test_a_dead_server_takes_no_weights(after_death):
    run, _ = after_death
    run.update(2)
    assert run.sync.pushes[-1] == ([run.servers[0].url], 2)


def test_a_server_that_returns_with_an_old_version_is_not_used(after_death, caplog):
    run, victim = after_death
    victim.info["version"] = "0.5.22"
    victim.come_back()
    wait_until(lambda: "is not used: it runs SGLang 0.5.22; update it" in caplog.text)
    num_requests = len(victim.requests)
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=1), PROMPTS)
    assert len(victim.requests) == num_requests


def test_a_returning_server_serves_with_the_current_weights(after_death):
    run, victim = after_death
    run.update(2)
    num_requests = len(victim.requests)
    victim.come_back()
    wait_until(lambda: victim.count("/model_info") >= 2)
    run.servers[0].stop_after = 1
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=1)
    when(lambda: run.sync.pushes[-1] == ([victim.url], 2), run.release)
    groups = pending.result()
    assert_exact(groups, PROMPTS)
    assert versions_of(groups) == {2}
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=2), PROMPTS)
    assert len(victim.requests) > num_requests
    assert victim.weight_version == "2"
    assert run.engine.metrics()["rollout/sglang_returns"] == 1


def test_a_refused_request_ends_the_rollout(start):
    run = start(2)
    run.servers[0].faults.append(400)
    with pytest.raises(RolloutUnavailable, match="answered HTTP 400"):
        run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)


def test_refusals_of_one_server_are_retried_elsewhere(start):
    run = start(2)
    run.servers[0].faults.extend([401, 403, 404])
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)
    assert run.engine.metrics()["rollout/sglang_retries"] == 3


@pytest.fixture
def lost(start):
    """A run whose servers have died, its unfinished groups before, and its next rollout."""
    timeouts = Timeouts(recovery=0.2, first_retry=0.005, max_retry=0.02, health_interval=0.01)
    run = start(2, timeouts=timeouts)
    sampling = Sampling(max_response_len=30)
    with held(run, 10):
        run.engine.submit([LATE[0], EARLY[0]], sampling, seed=0, num_groups=1).result()
    unfinished = run.engine.unfinished()
    assert len(unfinished) == 1
    for server in run.servers:
        server.die()
    pending = run.engine.submit([EARLY[1]], sampling, seed=0, num_groups=1)
    return run, unfinished, pending


def test_a_rollout_ends_if_no_server_is_left(lost):
    run, _, pending = lost
    with pytest.raises(RolloutUnavailable, match="no SGLang server is left") as error:
        pending.result()
    for server in run.servers:
        assert f"{server.url} since " in str(error.value)
    assert run.engine.metrics()["rollout/sglang_deaths"] == 2


def test_the_result_of_a_lost_rollout_raises_again(lost):
    _, _, pending = lost
    for _ in range(2):
        with pytest.raises(RolloutUnavailable, match="no SGLang server is left"):
            pending.result()


def test_unfinished_groups_survive_the_loss_of_servers(lost):
    run, unfinished, pending = lost
    with pytest.raises(RolloutUnavailable):
        pending.result()
    run.engine.close()
    assert run.engine.unfinished() == unfinished
