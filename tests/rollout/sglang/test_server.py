"""One server over real HTTP: its answers, its failures, requests that are left, and the key that nobody sees."""

import asyncio
import logging
import traceback
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from slime_tis.rollout.sample import Sampling
from slime_tis.rollout.sglang.client import make_client
from slime_tis.rollout.sglang.messages import generate_payload, parse_generation
from slime_tis.rollout.sglang.server import RequestRefused, Server, ServerError
from tests.rollout.sglang.replay import Replay, continuation, recorded, replays

KEY = "sk-not-to-be-seen"
PROMPT = [1, 5, 9]
LONG = continuation(PROMPT, 1000)


@pytest.fixture
def replay() -> Iterator[Replay]:
    with replays(1) as (server,):
        yield server


def ask(
    replay: Replay, use: Callable[[Server], Coroutine[Any, Any, Any]], *, key: str | None = None, **options: Any
) -> Any:
    async def work() -> Any:
        async with make_client(key) as client:
            server = Server(replay.url, client, **{"timeout": 10.0, "abort_timeout": 5.0, **options})
            try:
                return await use(server)
            finally:
                await server.close()

    return asyncio.run(work())


def payload(request_id: str = "r1", limit: int = 1000) -> dict[str, object]:
    return generate_payload(PROMPT, Sampling(max_response_len=limit), limit=limit, request_id=request_id)


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_a_request_is_answered(replay: Replay) -> None:
    answer = ask(replay, lambda server: server.generate(payload(limit=6)))
    completion = parse_generation(answer, limit=6)
    assert completion.token_ids == continuation(PROMPT, 6)
    assert replay.requests == [payload(limit=6)]
    assert "authorization" not in replay.headers[0]


def test_what_a_server_is(replay: Replay) -> None:
    replay.weight_version = "3"
    info = ask(replay, lambda server: server.info())
    assert (info.version, info.weight_version, info.longest_input) == ("0.5.23", "3", 505)


def test_health(replay: Replay) -> None:
    assert ask(replay, lambda server: server.health()) is True
    replay.healthy = False
    assert ask(replay, lambda server: server.health()) is False
    assert f"{replay.url}/health answered HTTP 503" in ask(replay, lambda server: server.problem())
    replay.die()
    assert ask(replay, lambda server: server.health()) is False


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429, 408])
def test_what_another_server_may_answer_is_a_server_error(replay: Replay, status: int) -> None:
    replay.faults.append(status)
    with pytest.raises(ServerError, match=f"{replay.url}/generate answered HTTP {status}: max_new_tokens must"):
        ask(replay, lambda server: server.generate(payload()))


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_what_every_server_would_refuse_is_refused(replay: Replay, status: int) -> None:
    replay.faults.append(status)
    with pytest.raises(RequestRefused, match=f"{replay.url}/generate answered HTTP {status}: max_new_t") as caught:
        ask(replay, lambda server: server.generate(payload()))
    assert caught.value.status == status
    assert ("--sglang-api-key-env" in str(caught.value)) == (status == 401)


def test_broken_connections_are_server_errors(replay: Replay) -> None:
    replay.faults.append("drop")
    with pytest.raises(ServerError, match=f"{replay.url}/generate failed: Server disconnected"):
        ask(replay, lambda server: server.generate(payload()))
    replay.die()
    with pytest.raises(ServerError, match=f"{replay.url}/generate failed: "):
        ask(replay, lambda server: server.generate(payload()))


def test_what_is_no_json_is_a_server_error(replay: Replay) -> None:
    replay.faults.append(lambda answer: "<html>no</html>")
    with pytest.raises(ServerError, match="/generate gave an answer that cannot be used: it is no JSON"):
        ask(replay, lambda server: server.generate(payload()))


def test_a_request_that_takes_too_long_is_aborted_and_gives_what_it_has(replay: Replay) -> None:
    replay.stop_after = 4
    completion = parse_generation(ask(replay, lambda s: s.generate(payload()), timeout=0.1), limit=1000)
    assert (completion.token_ids, completion.finish_reason) == (LONG[:4], "abort")
    assert replay.count("/abort_request") >= 1


def test_a_server_that_hangs_is_given_up(replay: Replay) -> None:
    replay.faults.append("hang")
    with pytest.raises(ServerError, match=r"did not answer within 0\.05 s"):
        ask(replay, lambda server: server.generate(payload()), timeout=0.05, abort_timeout=0.05)
    assert "r1" in replay.aborted


def test_a_request_that_is_cancelled_is_aborted_by_its_id(replay: Replay) -> None:
    replay.stop_after = 4

    async def leave(server: Server) -> None:
        request = asyncio.ensure_future(server.generate(payload("left")))
        await until(lambda: replay.requests)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    ask(replay, leave)
    assert replay.aborted == {"left"}


def test_a_router_has_requests_aborted_where_they_are() -> None:
    with replays(3) as (router, *workers):

        async def work() -> None:
            async with make_client(None) as client:
                behind = [Server(worker.url, client, timeout=5.0) for worker in workers]
                await Server(router.url, client, timeout=5.0, behind=behind).abort("r7")

        asyncio.run(work())
        assert [server.aborted for server in (router, *workers)] == [set(), {"r7"}, {"r7"}]


def test_posts_take_json_text_and_nothing(replay: Replay) -> None:
    for endpoint, answer in (
        ("/pause_generation", recorded("pause_generation")),
        ("/flush_cache", {"message": "Cache flushed."}),
        ("/abort_request", {}),
    ):
        assert ask(replay, lambda server, e=endpoint: server.post(e, {"rid": "x"})) == answer
    with pytest.raises(RequestRefused, match="HTTP 404: Not Found") as caught:
        ask(replay, lambda server: server.post("/begin_weight_update", {}))
    assert caught.value.status == 404


def test_the_words_of_a_refusal_are_found_in_all_its_forms(replay: Replay) -> None:
    for name, words in (
        ("error_400", "max_new_tokens must be at least 0"),
        ("error_unknown_parameter", "unknown field `foo`"),
        ("error_validation", "1 validation error"),
        ("error_404", "Not Found"),
        ("error_receive_weights", "Failed to receive weights"),
    ):
        replay.spoken = recorded(name)
        with pytest.raises(RequestRefused, match=words) as caught:
            ask(replay, lambda server: server.post("/speak", {}))
        assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


def test_the_key_is_sent_and_shown_nowhere(replay: Replay, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    replay.key = KEY
    shown = []

    async def use(server: Server) -> None:
        shown.append(f"{server!r} {server._client!r} {server._client.headers!r} {vars(server)!r}")
        await server.info()
        replay.faults.extend([503, "drop", 400])
        replay.spoken = {"message": f"you sent Authorization: Bearer {KEY}"}
        for work in (*(server.generate(payload()) for _ in range(3)), server.post("/speak", {})):
            try:
                await work
            except (ServerError, RequestRefused) as error:
                shown.append("".join(traceback.format_exception(error)))
                assert error.__cause__ is None

    ask(replay, use, key=KEY)
    assert {headers["authorization"] for headers in replay.headers} == {f"Bearer {KEY}"}
    assert len(shown) == 5 and "Bearer ***" in shown[-1]
    assert not any(KEY in text for text in [*shown, caplog.text])


def test_the_admin_key_goes_to_the_endpoints_that_change_a_server_alone(replay: Replay) -> None:
    async def work() -> None:
        async with make_client("user-key", "admin-key") as client:
            server = Server(replay.url, client, timeout=10.0)
            await server.info()
            await server.generate(payload(limit=2))
            await server.post("/pause_generation", {"mode": "retract"})
            await server.post("/update_weights_from_disk", {"weight_version": "1"})
            await server.abort("r1")

    asyncio.run(work())
    keys = [headers["authorization"].removeprefix("Bearer ") for headers in replay.headers]
    assert keys == ["user-key"] * 3 + ["admin-key"] * 3
    assert {headers["accept-encoding"] for headers in replay.headers} == {"identity"}


def test_a_wrong_key_is_refused_with_the_mend(replay: Replay) -> None:
    replay.key = KEY
    with pytest.raises(RequestRefused, match=r"HTTP 401: Unauthorized; put its key .* --sglang-api-key-env") as caught:
        ask(replay, lambda server: server.info(), key="other-key")
    assert "other-key" not in str(caught.value)


@pytest.mark.parametrize("key", ["with space", "line\n", "ключ"])
def test_a_key_that_cannot_be_sent_is_refused_unseen(key: str) -> None:
    with pytest.raises(ValueError, match="--sglang-api-key-env") as caught:
        make_client(key)
    assert key not in str(caught.value)
