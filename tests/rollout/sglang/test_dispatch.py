"""Which server takes a request, and what becomes of it when the server fails, over real HTTP."""

import asyncio
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.engine import RolloutUnavailable
from slime_tis.trainer.engines.sglang.client import RequestRefused, Server, UnexpectedWeights, make_client
from slime_tis.trainer.engines.sglang.dispatch import Attempts, Dispatcher
from slime_tis.trainer.engines.sglang.health import HealthMonitor, ServerState, Timeouts
from slime_tis.trainer.engines.sglang.schema import GenerateRequest
from tests.rollout.sglang.fake_sglang import FakeSGLang, continuation, fake_servers, when

QUICK = Timeouts(recovery=30.0, first_retry=0.005, max_retry=0.02, health_interval=0.01)
SAMPLING = Sampling(max_response_len=5)


class Cluster:
    """A health monitor and a dispatcher on some servers, and requests to them, known by their prompts."""

    def __init__(self, servers: list[Server], health: HealthMonitor, dispatcher: Dispatcher) -> None:
        self.servers, self.health, self.dispatcher = servers, health, dispatcher
        self.tries: Counter[int] = Counter()
        self.at: list[str] = []

    async def ask(self, prompt: int) -> list[int]:
        attempts, tokens = Attempts(), []
        while not tokens:
            async with self.dispatcher.server(attempts) as state:
                tokens = await self.request(prompt, state)
        return tokens

    async def request(self, prompt: int, state: ServerState) -> list[int]:
        self.tries[prompt] += 1
        self.at.append(state.server.url)
        first = self.health.version_of(state)
        request_id = f"p{prompt:04d}-t{self.tries[prompt]:02d}"
        completion = await state.server.generate(
            GenerateRequest(input_ids=[1, prompt], sampling=SAMPLING, max_new_tokens=5, request_id=request_id)
        )
        self.health.check_versions(state, first, completion.versions or [])
        return completion.token_ids

    @property
    def available(self) -> list[Server]:
        return [state.server for state in self.health.available()]

    def metrics(self) -> dict[str, float]:
        return {"retries": self.dispatcher.retries} | self.health.metrics()


Use = Callable[[Cluster], Coroutine[Any, Any, Any]]


def with_cluster(
    fakes: list[FakeSGLang],
    use: Use,
    *,
    router: FakeSGLang | None = None,
    timeout: float = 20.0,
    start_timeout: float = 20.0,
    timeouts: Timeouts = QUICK,
    on_return: Callable[[Server], None] = lambda server: None,
    **options: Any,
) -> Any:
    async def work() -> Any:
        async with make_client(None) as client:
            servers = [Server(r.url, client, timeout=timeout, abort_timeout=0.2, health_timeout=0.3) for r in fakes]
            front = None if router is None else Server(router.url, client, timeout=timeout, workers=servers)
            health = HealthMonitor(servers, front, timeouts, on_return=on_return)
            cluster = Cluster(servers, health, Dispatcher(health, **options))
            try:
                await health.start(start_timeout)
                return await asyncio.wait_for(use(cluster), 20.0)
            finally:
                await health.close()
                await asyncio.gather(*(server.close() for server in servers))
                left = asyncio.all_tasks() - {asyncio.current_task()}
                assert not {task for task in left if not task.get_name().startswith("abort ")}

    return asyncio.run(work())


def on_servers(count: int, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Runs a test as a coroutine with a cluster on new servers."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            with fake_servers(count) as fakes:
                with_cluster(fakes, lambda cluster: test(cluster, fakes, **fixtures), **options)

        parameters = list(inspect.signature(test).parameters.values())[2:]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def until_checked(fake: FakeSGLang, times: int) -> None:
    """Until the health of a server has been checked some more times."""
    checks = fake.count("/health")
    await until(lambda: fake.count("/health") >= checks + times)


def expected(prompts: range) -> list[list[int]]:
    return [continuation([1, prompt], 5) for prompt in prompts]


@on_servers(2, concurrency=3)
async def test_requests_are_spread_and_bounded(cluster: Cluster, fakes: list[FakeSGLang]) -> None:
    for server in fakes:
        server.stop_after = 0
    going = [asyncio.ensure_future(cluster.ask(prompt)) for prompt in range(3, 23)]
    await until(lambda: sum(map(len, (server.requests for server in fakes))) == 6)
    await until_checked(fakes[0], times=3)
    assert [server.at_once for server in fakes] == [3, 3]
    for server in fakes:
        server.stop_after = None
    assert await asyncio.gather(*going) == expected(range(3, 23))
    assert [server.most_at_once for server in fakes] == [3, 3]
    assert set(cluster.tries.values()) == {1}


@pytest.mark.parametrize(
    "fault", [500, 503, "drop", lambda answer: "no json"], ids=["HTTP 500", "HTTP 503", "dropped", "not JSON"]
)
@on_servers(2)
async def test_a_failed_request_is_tried_again_elsewhere(cluster: Cluster, fakes: list[FakeSGLang], fault: Any) -> None:
    fakes[0].faults.append(fault)
    assert [await cluster.ask(prompt) for prompt in range(3, 7)] == expected(range(3, 7))
    assert cluster.tries == {3: 2, 4: 1, 5: 1, 6: 1}
    assert cluster.at[:2] == [fakes[0].url, fakes[1].url]
    await until(lambda: len(cluster.available) == 2)  # its health was asked for, and is good
    counts = {"retries": 1, "deaths": 0, "returns": 0, "live_servers": 2}
    assert cluster.metrics() == {**counts, "malformed_responses": int(callable(fault))}


@on_servers(1)
async def test_the_only_server_is_tried_again_too(cluster: Cluster, fakes: list[FakeSGLang]) -> None:
    fakes[0].faults.extend([503, "drop", 500])
    assert await cluster.ask(3) == continuation([1, 3], 5)
    assert cluster.tries == {3: 4}


@on_servers(2, max_retries=2)
async def test_a_request_that_fails_everywhere_is_given_up(cluster: Cluster, fakes: list[FakeSGLang]) -> None:
    for server in fakes:
        server.faults.extend([500] * 9)
    with pytest.raises(RolloutUnavailable, match="failed 3 times"):
        await cluster.ask(3)
    assert cluster.tries == {3: 3}
    assert cluster.metrics()["retries"] == 2


@on_servers(2)
async def test_a_refused_request_is_not_tried_again(cluster: Cluster, fakes: list[FakeSGLang]) -> None:
    fakes[0].faults.append(400)
    with pytest.raises(RequestRefused, match="max_new_tokens"):
        await cluster.ask(3)
    assert cluster.tries == {3: 1}
    assert await cluster.ask(4) == continuation([1, 4], 5)


def test_a_dying_server_loses_no_request(caplog: pytest.LogCaptureFixture) -> None:
    async def use(cluster: Cluster) -> None:
        both[1].stop_after = 2
        going = [asyncio.ensure_future(cluster.ask(prompt)) for prompt in range(3, 43)]
        await until(lambda: both[1].at_once == 8)
        await asyncio.to_thread(both[1].die)
        assert await asyncio.gather(*going) == expected(range(3, 43))
        assert sorted(cluster.tries.values()) == [1] * 32 + [2] * 8
        await until(lambda: cluster.metrics()["deaths"] == 1)
        assert cluster.available == [cluster.servers[0]]
        both[1].stop_after = None
        await asyncio.to_thread(both[1].come_back)
        await until(lambda: len(cluster.available) == 2)
        assert cluster.metrics() == {
            "retries": 8,
            "deaths": 1,
            "returns": 1,
            "live_servers": 2,
            "malformed_responses": 0,
        }

    with caplog.at_level(logging.WARNING), fake_servers(2) as both:
        with_cluster(both, use, concurrency=8)
    words = [record.getMessage() for record in caplog.records]
    assert len(words) == 2 and f"{both[1].url} is marked down: " in words[0] and "is back, with weights 0" in words[1]


@on_servers(2, timeout=1000.0)
async def test_requests_of_a_hanging_server_move_elsewhere(cluster: Cluster, fakes: list[FakeSGLang]) -> None:
    fakes[0].faults.extend(["hang", "hang"])
    going = [asyncio.ensure_future(cluster.ask(prompt)) for prompt in range(3, 7)]
    await until(lambda: len(fakes[0].requests) == 2)
    fakes[0].healthy = False
    assert await asyncio.gather(*going) == expected(range(3, 7))
    assert sorted(cluster.tries.values()) == [1, 1, 2, 2]
    assert cluster.metrics()["deaths"] == 1
    await until(lambda: fakes[0].aborted == {body["rid"] for body in fakes[0].requests})


@on_servers(1, timeouts=replace(QUICK, health_interval=0.03))
async def test_one_slow_health_check_takes_no_server_out(cluster: Cluster, fakes: list[FakeSGLang]) -> None:
    for _ in range(3):
        checks = fakes[0].count("/health")
        fakes[0].healthy = False
        await until(lambda n=checks: fakes[0].count("/health") > n)
        fakes[0].healthy = True
        await until_checked(fakes[0], times=2)
    assert cluster.metrics() == {
        "retries": 0,
        "deaths": 0,
        "returns": 0,
        "live_servers": 1,
        "malformed_responses": 0,
    }


def test_a_server_that_comes_back_without_its_weights_waits_for_them() -> None:
    returned: list[Server] = []

    async def use(cluster: Cluster) -> None:
        for fake, server in zip(both, cluster.servers, strict=True):
            fake.weight_version, fake.version = "4", 4
            cluster.health.mark_current(server, 4)
        cluster.health.expect(4)
        cluster.health.version = 4
        await asyncio.to_thread(both[0].die)
        assert await cluster.ask(3) == continuation([1, 3], 5)
        await until(lambda: cluster.metrics()["deaths"] == 1)
        await asyncio.to_thread(both[0].come_back)
        await until(lambda: returned)
        assert returned == cluster.health.needing_weights() == [cluster.servers[0]]
        served = len(both[0].requests)
        await asyncio.gather(*(cluster.ask(prompt) for prompt in range(4, 12)))
        assert len(both[0].requests) == served
        both[0].weight_version, both[0].version = "4", 4
        cluster.health.mark_current(cluster.servers[0], 4)
        await asyncio.gather(*(cluster.ask(prompt) for prompt in range(12, 20)))
        assert len(both[0].requests) > served
        assert cluster.metrics()["returns"] == 1 and returned == [cluster.servers[0]]

    with fake_servers(2) as both:
        with_cluster(both, use, on_return=returned.append)


@on_servers(1)
async def test_a_server_that_kept_its_weights_serves_at_once(cluster: Cluster, fakes: list[FakeSGLang]) -> None:
    fakes[0].weight_version, fakes[0].version = "4", 4
    cluster.health.mark_current(cluster.servers[0], 4)
    cluster.health.expect(4)
    cluster.health.version = 4
    await asyncio.to_thread(fakes[0].die)
    going = asyncio.ensure_future(cluster.ask(3))
    await until(lambda: cluster.metrics()["deaths"] == 1)
    await asyncio.to_thread(fakes[0].come_back, "4")
    fakes[0].version = 4
    assert await going == continuation([1, 3], 5)
    assert cluster.metrics()["returns"] == 1


def test_an_answer_of_a_server_that_was_started_anew_unseen_is_not_used() -> None:
    returned: list[Server] = []

    async def use(cluster: Cluster) -> None:
        for server in cluster.servers:
            cluster.health.mark_current(server, 4)
        cluster.health.expect(4)
        cluster.health.version = 4
        both[1].weight_version, both[1].version = "4", 4
        assert await cluster.ask(3) == continuation([1, 3], 5)
        assert cluster.at == [both[0].url, both[1].url]
        assert returned == cluster.health.needing_weights() == [cluster.servers[0]]

    with fake_servers(2) as both:
        with_cluster(both, use, on_return=returned.append)


@on_servers(1)
async def test_versions_during_an_update(cluster: Cluster, fakes: list[FakeSGLang]) -> None:
    state = cluster.health.states[cluster.servers[0]]
    cluster.health.mark_current(cluster.servers[0], 4)
    cluster.health.expect(4)
    async with cluster.health.updating(5):
        cluster.health.check_versions(state, 4, [4, 4, 5])
    for versions in ([3, 4], [4, 6], [0]):
        with pytest.raises(UnexpectedWeights, match=f"with weights {versions[-1] if versions[-1] != 4 else 3}, but"):
            cluster.health.check_versions(state, 4, versions)


@on_servers(1)
async def test_updates_hold_requests_and_health_checks(cluster: Cluster, fakes: list[FakeSGLang]) -> None:
    async with cluster.health.updating(1):
        fakes[0].paused = True  # it fails health checks
        going = asyncio.ensure_future(cluster.ask(3))
        for _ in range(100):
            await asyncio.sleep(0)
        assert fakes[0].requests == []
        fakes[0].paused = False
    assert await going == continuation([1, 3], 5)
    assert cluster.metrics()["deaths"] == 0


def test_a_failed_update_marks_a_server_down() -> None:
    returned: list[Server] = []

    async def use(cluster: Cluster) -> None:
        cluster.health.mark_down(cluster.servers[0], "half of the weights arrived.")
        assert cluster.available == []
        await until(lambda: returned)
        assert cluster.health.needing_weights() == cluster.servers
        cluster.health.mark_current(cluster.servers[0], 0)
        assert await cluster.ask(3) == continuation([1, 3], 5)

    with fake_servers(1) as alone:
        with_cluster(alone, use, on_return=returned.append)


@on_servers(2, timeouts=replace(QUICK, recovery=0.2), max_retries=100)
async def test_the_message_without_servers_names_each_and_why(cluster: Cluster, fakes: list[FakeSGLang]) -> None:
    for server in fakes:
        await asyncio.to_thread(server.die)
    going = [asyncio.ensure_future(cluster.ask(prompt)) for prompt in range(3, 9)]
    outcomes = await asyncio.gather(*going, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {RolloutUnavailable}
    (message,) = set(map(str, outcomes))
    for server in fakes:
        assert f"{server.url} since " in message and "connect" in message
    assert message.startswith("no SGLang server is left, and none came back within 0.2 s: ")
    assert message.endswith("Start servers again, and resume with --load.")


@on_servers(1)
async def test_a_server_that_comes_back_in_time_saves_the_run(cluster: Cluster, fakes: list[FakeSGLang]) -> None:
    await asyncio.to_thread(fakes[0].die)
    going = asyncio.ensure_future(cluster.ask(3))
    await until(lambda: cluster.metrics()["deaths"] == 1)
    await asyncio.to_thread(fakes[0].come_back)
    assert await going == continuation([1, 3], 5)


def test_slow_servers_are_waited_for_and_missing_ones_do_without() -> None:
    async def start(cluster: Cluster) -> int:
        return len(cluster.available)

    with fake_servers(2) as both:
        both[0].healthy = False
        when(lambda: both[0].count("/health") > 2, lambda: setattr(both[0], "healthy", True))
        assert with_cluster(both, start) == 2
        both[0].healthy = False
        assert with_cluster(both, start, start_timeout=0.2) == 1
        both[1].healthy = False
        with pytest.raises(RolloutUnavailable, match="HTTP 503"):
            with_cluster(both, start, start_timeout=0.2)


def test_weights_of_an_earlier_run_do_not_count_as_those_of_the_start() -> None:
    async def start(cluster: Cluster) -> list[int]:
        return [both.index(next(r for r in both if r.url == s.url)) for s in cluster.health.needing_weights()]

    with fake_servers(2) as both:
        both[1].weight_version = "0"
        assert with_cluster(both, start) == [1]


@on_servers(1, concurrency=1)
async def test_requests_that_wait_are_served_in_their_order(cluster: Cluster, fakes: list[FakeSGLang]) -> None:
    fakes[0].stop_after = 0
    going = [asyncio.ensure_future(cluster.ask(prompt)) for prompt in range(3, 13)]
    await until(lambda: fakes[0].requests)
    going[4].cancel()
    fakes[0].stop_after = None
    outcomes = await asyncio.gather(*going, return_exceptions=True)
    assert isinstance(outcomes[4], asyncio.CancelledError)
    assert [body["input_ids"][1] for body in fakes[0].requests] == [3, 4, 5, 6, 8, 9, 10, 11, 12]


def test_a_router_is_asked_and_its_servers_are_watched() -> None:
    returned: list[Server] = []

    async def use(cluster: Cluster) -> None:
        assert await asyncio.gather(*(cluster.ask(p) for p in range(3, 23))) == expected(range(3, 23))
        assert set(cluster.at) == {router.url}
        assert router.most_at_once <= 6
        for fake, server in zip(workers, cluster.servers, strict=True):
            fake.weight_version, fake.version = "2", 2
            cluster.health.mark_current(server, 2)
        cluster.health.expect(2)
        cluster.health.version = 2
        workers[1].weight_version, workers[1].version = "default", 0  # started anew behind the router's back
        going = [asyncio.ensure_future(cluster.ask(p)) for p in range(23, 33)]
        await until(lambda: returned)
        assert returned == [cluster.servers[1]]
        workers[1].weight_version, workers[1].version = "2", 2
        cluster.health.mark_current(cluster.servers[1], 2)
        assert await asyncio.gather(*going) == expected(range(23, 33))

    with fake_servers(3) as (router, *workers):
        router.workers = workers
        with_cluster(workers, use, router=router, concurrency=3, on_return=returned.append)


def test_a_server_behind_a_router_may_die() -> None:
    async def use(cluster: Cluster) -> None:
        workers[0].stop_after = 1
        going = [asyncio.ensure_future(cluster.ask(p)) for p in range(3, 13)]
        await until(lambda: workers[0].requests)
        await asyncio.to_thread(workers[0].die)
        assert await asyncio.gather(*going) == expected(range(3, 13))
        await until(lambda: cluster.available == [cluster.servers[1]])

    with fake_servers(3) as (router, *workers):
        router.workers = workers
        with_cluster(workers, use, router=router, concurrency=3)
