"""Which server takes a request, and what becomes of it when the server fails, over real HTTP."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from slime_tis.rollout.engine import RolloutUnavailable
from slime_tis.rollout.sample import Sampling
from slime_tis.rollout.sglang.client import make_client
from slime_tis.rollout.sglang.member import Patience
from slime_tis.rollout.sglang.messages import generate_payload, parse_generation
from slime_tis.rollout.sglang.pool import Pool
from slime_tis.rollout.sglang.server import RequestRefused, Server, ServerError
from tests.rollout.sglang.replay import Replay, continuation, replays

QUICK = Patience(recovery=30.0, first_wait=0.005, longest_wait=0.02, probe=0.01)
SAMPLING = Sampling(max_response_len=5)


class Asked:
    """Requests over a pool, told apart by their prompts."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.tries: Counter[int] = Counter()
        self.at: list[str] = []

    async def __call__(self, prompt: int) -> list[int]:
        async def request(server: Server) -> list[int]:
            self.tries[prompt] += 1
            self.at.append(server.url)
            first = self.pool.version_of(server)
            rid = f"p{prompt:04d}-t{self.tries[prompt]:02d}"
            payload = generate_payload([1, prompt], SAMPLING, limit=5, request_id=rid)
            completion = parse_generation(await server.generate(payload), limit=5)
            self.pool.check_versions(server, first, completion.versions or [])
            return completion.token_ids

        return await self.pool.run(request)


def with_pool(
    replay_servers: list[Replay],
    use: Callable[[Pool, Asked, list[Server]], Coroutine[Any, Any, Any]],
    *,
    router: Replay | None = None,
    timeout: float = 20.0,
    start_timeout: float = 20.0,
    **options: Any,
) -> Any:
    async def work() -> Any:
        async with make_client(None) as client:
            servers = [
                Server(r.url, client, timeout=timeout, abort_timeout=0.2, health_timeout=0.3) for r in replay_servers
            ]
            front = None if router is None else Server(router.url, client, timeout=timeout, behind=servers)
            pool = Pool(servers, router=front, **{"patience": QUICK, **options})
            try:
                await pool.start(start_timeout)
                return await asyncio.wait_for(use(pool, Asked(pool), servers), 20.0)
            finally:
                await pool.close()
                await asyncio.gather(*(server.close() for server in servers))
                left = asyncio.all_tasks() - {asyncio.current_task()}
                assert not {task for task in left if "leave" not in repr(task)}

    return asyncio.run(work())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def expected(prompts: range) -> list[list[int]]:
    return [continuation([1, prompt], 5) for prompt in prompts]


def test_requests_are_spread_and_bounded() -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        for server in held:
            server.stop_after = 0
        going = [asyncio.ensure_future(asked(prompt)) for prompt in range(3, 23)]
        await until(lambda: sum(map(len, (server.requests for server in held))) == 6)
        await asyncio.sleep(0.02)
        assert [server.at_once for server in held] == [3, 3]
        for server in held:
            server.stop_after = None
        assert await asyncio.gather(*going) == expected(range(3, 23))
        assert [server.most_at_once for server in held] == [3, 3]
        assert set(asked.tries.values()) == {1}

    with replays(2) as held:
        with_pool(held, use, concurrency=3)


@pytest.mark.parametrize("fault", [500, 503, "drop", lambda answer: "no json"])
def test_a_failed_request_is_tried_again_elsewhere(fault: Any) -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        both[0].faults.append(fault)
        assert [await asked(prompt) for prompt in range(3, 7)] == expected(range(3, 7))
        assert asked.tries == {3: 2, 4: 1, 5: 1, 6: 1}
        assert asked.at[:2] == [both[0].url, both[1].url]
        await until(lambda: len(pool.live_servers()) == 2)  # its health was asked for, and is good
        counts = {"retries": 1, "deaths": 0, "returns": 0, "live_servers": 2}
        assert pool.metrics() == {**counts, "malformed_responses": int(callable(fault))}

    with replays(2) as both:
        with_pool(both, use)


def test_the_only_server_is_tried_again_too() -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        alone[0].faults.extend([503, "drop", 500])
        assert await asked(3) == continuation([1, 3], 5)
        assert asked.tries == {3: 4}

    with replays(1) as alone:
        with_pool(alone, use)


def test_a_request_that_fails_everywhere_is_given_up() -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        for server in both:
            server.faults.extend([500] * 9)
        with pytest.raises(
            RolloutUnavailable, match=r"a request failed 3 times, at last so: .*/generate answered HTTP 500"
        ):
            await asked(3)
        assert asked.tries == {3: 3}
        assert pool.metrics()["retries"] == 2

    with replays(2) as both:
        with_pool(both, use, max_retries=2)


def test_a_refused_request_is_not_tried_again() -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        both[0].faults.append(400)
        with pytest.raises(RequestRefused, match="max_new_tokens must be at least 0"):
            await asked(3)
        assert asked.tries == {3: 1}
        assert await asked(4) == continuation([1, 4], 5)

    with replays(2) as both:
        with_pool(both, use)


def test_a_server_that_dies_in_mid_batch_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        both[1].stop_after = 2
        going = [asyncio.ensure_future(asked(prompt)) for prompt in range(3, 43)]
        await until(lambda: both[1].at_once == 8)
        await asyncio.to_thread(both[1].die)
        assert await asyncio.gather(*going) == expected(range(3, 43))
        assert sorted(asked.tries.values()) == [1] * 32 + [2] * 8
        await until(lambda: pool.metrics()["deaths"] == 1)
        assert pool.live_servers() == [servers[0]]
        both[1].stop_after = None
        await asyncio.to_thread(both[1].come_back)
        await until(lambda: len(pool.live_servers()) == 2)
        assert pool.metrics() == {"retries": 8, "deaths": 1, "returns": 1, "live_servers": 2, "malformed_responses": 0}

    with caplog.at_level(logging.WARNING), replays(2) as both:
        with_pool(both, use, concurrency=8)
    words = [record.getMessage() for record in caplog.records]
    assert len(words) == 2 and f"{both[1].url} is taken out: " in words[0] and "is back, with weights 0" in words[1]


def test_a_server_that_hangs_is_found_out_and_what_it_was_asked_goes_elsewhere() -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        both[0].faults.extend(["hang", "hang"])
        going = [asyncio.ensure_future(asked(prompt)) for prompt in range(3, 7)]
        await until(lambda: len(both[0].requests) == 2)
        both[0].healthy = False
        assert await asyncio.gather(*going) == expected(range(3, 7))
        assert sorted(asked.tries.values()) == [1, 1, 2, 2]
        assert pool.metrics()["deaths"] == 1
        await until(lambda: both[0].aborted == {body["rid"] for body in both[0].requests})

    with replays(2) as both:
        with_pool(both, use, timeout=1000.0)


def test_one_slow_health_check_takes_no_server_out() -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        for _ in range(3):
            checks = alone[0].count("/health")
            alone[0].healthy = False
            await until(lambda n=checks: alone[0].count("/health") > n)
            alone[0].healthy = True
            await asyncio.sleep(0.05)
        assert pool.metrics() == {"retries": 0, "deaths": 0, "returns": 0, "live_servers": 1, "malformed_responses": 0}

    with replays(1) as alone:
        with_pool(alone, use, patience=replace(QUICK, probe=0.03))


def test_a_server_that_comes_back_without_its_weights_waits_for_them() -> None:
    returned: list[Server] = []

    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        for replay, server in zip(both, servers, strict=True):
            replay.weight_version, replay.version = "4", 4
            pool.mark_current(server, 4)
        pool.expect(4)
        pool.require(4)
        await asyncio.to_thread(both[0].die)
        assert await asked(3) == continuation([1, 3], 5)
        await until(lambda: pool.metrics()["deaths"] == 1)
        await asyncio.to_thread(both[0].come_back)
        await until(lambda: returned)
        assert returned == pool.returned_servers() == [servers[0]]
        served = len(both[0].requests)
        await asyncio.gather(*(asked(prompt) for prompt in range(4, 12)))
        assert len(both[0].requests) == served
        both[0].weight_version, both[0].version = "4", 4
        pool.mark_current(servers[0], 4)
        await asyncio.gather(*(asked(prompt) for prompt in range(12, 20)))
        assert len(both[0].requests) > served
        assert pool.metrics()["returns"] == 1 and returned == [servers[0]]

    with replays(2) as both:
        with_pool(both, use, on_return=returned.append)


def test_a_server_that_kept_its_weights_serves_at_once() -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        alone[0].weight_version, alone[0].version = "4", 4
        pool.mark_current(servers[0], 4)
        pool.expect(4)
        pool.require(4)
        await asyncio.to_thread(alone[0].die)
        going = asyncio.ensure_future(asked(3))
        await until(lambda: pool.metrics()["deaths"] == 1)
        await asyncio.to_thread(alone[0].come_back, "4")
        alone[0].version = 4
        assert await going == continuation([1, 3], 5)
        assert pool.metrics()["returns"] == 1

    with replays(1) as alone:
        with_pool(alone, use)


def test_an_answer_of_a_server_that_was_started_anew_unseen_is_not_used() -> None:
    returned: list[Server] = []

    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        for server in servers:
            pool.mark_current(server, 4)
        pool.expect(4)
        pool.require(4)
        both[1].weight_version, both[1].version = "4", 4
        assert await asked(3) == continuation([1, 3], 5)
        assert asked.at == [both[0].url, both[1].url]
        assert returned == pool.returned_servers() == [servers[0]]

    with replays(2) as both:
        with_pool(both, use, on_return=returned.append)


def test_versions_of_an_update_under_way_are_right_and_others_wrong() -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        pool.mark_current(servers[0], 4)
        pool.expect(4)
        async with pool.updating(5):
            pool.check_versions(servers[0], 4, [4, 4, 5])
        for versions in ([3, 4], [4, 6], [0]):
            with pytest.raises(ServerError, match=f"with weights {versions[-1] if versions[-1] != 4 else 3}, but"):
                pool.check_versions(servers[0], 4, versions)

    with replays(1) as alone:
        with_pool(alone, use)


def test_nothing_is_asked_and_nobody_taken_out_during_an_update() -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        async with pool.updating(1):
            alone[0].paused = True  # it fails health checks
            going = asyncio.ensure_future(asked(3))
            await asyncio.sleep(0.1)
            assert alone[0].requests == []
            alone[0].paused = False
        assert await going == continuation([1, 3], 5)
        assert pool.metrics()["deaths"] == 0

    with replays(1) as alone:
        with_pool(alone, use)


def test_a_server_that_fails_to_take_weights_is_out_whatever_version_it_names() -> None:
    returned: list[Server] = []

    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        pool.take_out(servers[0], "half of the weights arrived.")
        assert pool.live_servers() == []
        await until(lambda: returned)
        assert pool.returned_servers() == servers
        pool.mark_current(servers[0], 0)
        assert await asked(3) == continuation([1, 3], 5)

    with replays(1) as alone:
        with_pool(alone, use, on_return=returned.append)


def test_when_no_server_is_left_the_run_is_told_who_why_and_what_to_do() -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        for server in both:
            await asyncio.to_thread(server.die)
        going = [asyncio.ensure_future(asked(prompt)) for prompt in range(3, 9)]
        outcomes = await asyncio.gather(*going, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {RolloutUnavailable}
        (sentence,) = set(map(str, outcomes))
        for server in both:
            assert f"{server.url} since " in sentence and "connect" in sentence
        assert sentence.startswith("no SGLang server is left, and none came back within 0.2 s: ")
        assert sentence.endswith("Start servers anew, and resume with --load.")

    with replays(2) as both:
        with_pool(both, use, patience=replace(QUICK, recovery=0.2), max_retries=100)


def test_a_server_that_comes_back_in_time_saves_the_run() -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        await asyncio.to_thread(alone[0].die)
        going = asyncio.ensure_future(asked(3))
        await until(lambda: pool.metrics()["deaths"] == 1)
        await asyncio.to_thread(alone[0].come_back)
        assert await going == continuation([1, 3], 5)

    with replays(1) as alone:
        with_pool(alone, use)


def test_slow_servers_are_waited_for_and_missing_ones_do_without() -> None:
    async def start(pool: Pool, asked: Asked, servers: list[Server]) -> int:
        return len(pool.live_servers())

    with replays(2) as both:
        both[0].healthy = False
        threading_timer = __import__("threading").Timer(0.1, lambda: setattr(both[0], "healthy", True))
        threading_timer.start()
        assert with_pool(both, start) == 2
        both[0].healthy = False
        assert with_pool(both, start, start_timeout=0.2) == 1
        both[1].healthy = False
        with pytest.raises(
            RolloutUnavailable, match=r"no SGLang server answered within 0.2 s: .*HTTP 503.*; .*HTTP 503"
        ):
            with_pool(both, start, start_timeout=0.2)


def test_weights_of_an_earlier_run_do_not_count_as_those_of_the_start() -> None:
    async def start(pool: Pool, asked: Asked, servers: list[Server]) -> list[int]:
        return [both.index(next(r for r in both if r.url == s.url)) for s in pool.returned_servers()]

    with replays(2) as both:
        both[1].weight_version = "0"
        assert with_pool(both, start) == [1]


def test_requests_that_wait_are_served_in_their_order() -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        alone[0].stop_after = 0
        going = [asyncio.ensure_future(asked(prompt)) for prompt in range(3, 13)]
        await until(lambda: alone[0].requests)
        going[4].cancel()
        alone[0].stop_after = None
        outcomes = await asyncio.gather(*going, return_exceptions=True)
        assert isinstance(outcomes[4], asyncio.CancelledError)
        assert [body["input_ids"][1] for body in alone[0].requests] == [3, 4, 5, 6, 8, 9, 10, 11, 12]

    with replays(1) as alone:
        with_pool(alone, use, concurrency=1)


def test_a_router_is_asked_and_its_servers_are_watched() -> None:
    returned: list[Server] = []

    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        assert await asyncio.gather(*(asked(p) for p in range(3, 23))) == expected(range(3, 23))
        assert set(asked.at) == {router.url}
        assert router.most_at_once <= 6
        for replay, server in zip(workers, servers, strict=True):
            replay.weight_version, replay.version = "2", 2
            pool.mark_current(server, 2)
        pool.expect(2)
        pool.require(2)
        workers[1].weight_version, workers[1].version = "default", 0  # started anew behind the router's back
        going = [asyncio.ensure_future(asked(p)) for p in range(23, 33)]
        await until(lambda: returned)
        assert returned == [servers[1]]
        workers[1].weight_version, workers[1].version = "2", 2
        pool.mark_current(servers[1], 2)
        assert await asyncio.gather(*going) == expected(range(23, 33))

    with replays(3) as (router, *workers):
        router.workers = workers
        with_pool(workers, use, router=router, concurrency=3, on_return=returned.append)


def test_a_server_behind_a_router_may_die() -> None:
    async def use(pool: Pool, asked: Asked, servers: list[Server]) -> None:
        workers[0].stop_after = 1
        going = [asyncio.ensure_future(asked(p)) for p in range(3, 13)]
        await until(lambda: workers[0].requests)
        await asyncio.to_thread(workers[0].die)
        assert await asyncio.gather(*going) == expected(range(3, 13))
        await until(lambda: pool.live_servers() == [servers[1]])

    with replays(3) as (router, *workers):
        router.workers = workers
        with_pool(workers, use, router=router, concurrency=3)
