"""One server over real HTTP: its answers, its failures, aborted requests and keys."""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from slime_tis.trainer.configs.servers import server_config
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.function_requests import Generation
from slime_tis.trainer.engines.servers.api import GenerateRequest
from slime_tis.trainer.engines.servers.client import Keys, Server, make_client
from slime_tis.trainer.engines.servers.errors import RequestRefused, ServerError
from slime_tis.trainer.engines.servers.server_group import router_workers
from slime_tis.trainer.engines.sglang.sglang_api import control
from tests.rollout.sglang.fake_sglang import FakeSGLang, continuation, fake_servers, recorded
from tests.rollout.sglang.rollouts import with_clients

KEY = "sk-not-to-be-seen"
Result = TypeVar("Result")
PROMPT = [1, 5, 9]
SAMPLING = Sampling(max_response_len=1000)
LONG = continuation(PROMPT, 1000)


@pytest.fixture
def fake() -> Iterator[FakeSGLang]:
    with fake_servers(1) as (server,):
        yield server


def ask(
    fake: FakeSGLang, use: Callable[[Server], Awaitable[Result]], *keys: str | None, **options: Any
) -> Result:
    return with_clients(
        [fake], lambda servers: use(servers[0]), *keys, **{"abort_timeout": 5.0, **options}
    )


async def workers_of(router: Server) -> tuple[str, ...]:
    return await router_workers(router, server_config("sglang"))


def request(max_new_tokens: int = 1000, request_id: str = "r1") -> GenerateRequest:
    return GenerateRequest(
        input_ids=PROMPT, sampling=SAMPLING, max_new_tokens=max_new_tokens, request_id=request_id
    )


async def generate(
    server: Server, request_id: str = "r1", max_new_tokens: int = 1000
) -> Generation:
    return (await server.generate(request(max_new_tokens, request_id)))[0]


def test_a_healthy_server_has_no_health_error(fake: FakeSGLang) -> None:
    assert ask(fake, lambda server: server.health_error()) is None


def test_an_unhealthy_server_is_reported(fake: FakeSGLang) -> None:
    fake.healthy = False
    error = ask(fake, lambda server: server.health_error())
    assert error is not None
    assert f"{fake.url}/health answered HTTP 503" in str(error)


def test_a_dead_server_is_reported(fake: FakeSGLang) -> None:
    fake.die()
    error = ask(fake, lambda server: server.health_error())
    assert error is not None
    assert f"{fake.url}/health failed: " in str(error)


def test_a_request_to_a_dead_server_fails(fake: FakeSGLang) -> None:
    fake.die()
    with pytest.raises(ServerError, match=f"{fake.url}/generate failed: "):
        ask(fake, generate)


FAILURES = {
    "HTTP 500": (500, ServerError, "answered HTTP 500"),
    "HTTP 429": (429, ServerError, "answered HTTP 429"),
    "HTTP 408": (408, ServerError, "answered HTTP 408"),
    "HTTP 425": (425, ServerError, "answered HTTP 425"),
    "HTTP 400": (400, RequestRefused, "answered HTTP 400"),
    "HTTP 401": (401, RequestRefused, "answered HTTP 401"),
    "HTTP 422": (422, RequestRefused, "answered HTTP 422"),
    "a broken connection": ("drop", ServerError, "Server disconnected"),
}


@pytest.mark.parametrize(("fault", "error", "message"), FAILURES.values(), ids=FAILURES)
def test_another_server_is_asked_unless_every_server_would_refuse(
    fake: FakeSGLang, fault: Any, error: type[Exception], message: str
) -> None:
    fake.faults.append(fault)
    with pytest.raises(error, match=message) as caught:
        ask(fake, generate)
    assert getattr(caught.value, "status", fault) == fault
    assert ("--sglang-api-key-env" in str(caught.value)) == (fault == 401)


def test_a_server_that_hangs_is_given_up(fake: FakeSGLang) -> None:
    fake.faults.append("hang")
    with pytest.raises(ServerError, match=r"did not answer within 0\.05 s"):
        ask(fake, generate, timeout=0.05, abort_timeout=0.05)
    assert "r1" in fake.aborted


def test_requests_of_a_router_are_aborted_on_its_servers() -> None:
    with fake_servers(3) as fakes:

        async def work(clients: list[Server]) -> None:
            clients[0].workers = clients[1:]
            await clients[0].abort("r7")

        with_clients(fakes, work)
        assert [server.aborted for server in fakes] == [set(), {"r7"}, {"r7"}]


REFUSALS = {
    "400": (400, recorded("error_400"), "max_new_tokens"),
    "404": (400, recorded("error_404"), "Not Found"),
    "weights not received": (400, recorded("error_receive_weights"), "Failed to receive weights"),
    "success false": (
        200,
        {"success": False, "message": "under way."},
        r"/speak failed: under way\.$",
    ),
}


@pytest.mark.parametrize(("status", "answer", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_quote_the_servers_message(
    fake: FakeSGLang, status: int, answer: Any, message: str
) -> None:
    fake.replies["/speak"] = [(status, answer)]
    with pytest.raises(RequestRefused, match=message) as caught:
        ask(fake, lambda server: server.call(control("/speak")))
    assert caught.value.status == status
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


@dataclass
class KeyRun:
    """Texts in which a key could appear, and the headers that the server received."""

    representation: str = ""
    tracebacks: list[str] = field(default_factory=list)
    causes: list[BaseException | None] = field(default_factory=list)
    log: str = ""
    headers: list[dict[str, str]] = field(default_factory=list)


@pytest.fixture
def key_run(fake: FakeSGLang, caplog: pytest.LogCaptureFixture) -> KeyRun:
    caplog.set_level(logging.DEBUG)
    fake.key = KEY
    run = KeyRun()

    async def use(server: Server) -> None:
        session = server.client.session
        run.representation = f"{server!r} {server.client!r} {session.headers!r} {vars(server)!r}"
        await server.api.info(server)
        fake.faults.extend([503, "drop", 400])
        fake.replies["/speak"] = [(400, {"message": f"you sent Authorization: Bearer {KEY}"})]
        calls: list[Awaitable[object]] = [generate(server) for _ in range(3)]
        calls.append(server.call(control("/speak")))
        for call in calls:
            try:
                await call
            except (ServerError, RequestRefused) as error:
                run.tracebacks.append("".join(traceback.format_exception(error)))
                run.causes.append(error.__cause__)

    ask(fake, use, KEY)
    run.log = caplog.text
    run.headers = fake.headers
    return run


def test_the_key_is_sent(key_run: KeyRun) -> None:
    assert {headers["authorization"] for headers in key_run.headers} == {f"Bearer {KEY}"}


def test_errors_do_not_show_the_key(key_run: KeyRun) -> None:
    assert len(key_run.tracebacks) == 4
    assert not any(KEY in text for text in key_run.tracebacks)


def test_errors_have_no_cause_that_contains_the_key(key_run: KeyRun) -> None:
    assert key_run.causes == [None] * 4


def test_a_key_in_a_servers_message_is_redacted(key_run: KeyRun) -> None:
    assert "Bearer ***" in key_run.tracebacks[-1]


def test_objects_do_not_show_the_key(key_run: KeyRun) -> None:
    assert KEY not in key_run.representation


def test_the_log_does_not_show_the_key(key_run: KeyRun) -> None:
    assert KEY not in key_run.log


@pytest.fixture
def two_keys(fake: FakeSGLang) -> list[dict[str, str]]:
    """Headers of two requests of a user, then of three that change the server."""

    async def use(server: Server) -> None:
        await server.api.info(server)
        await generate(server, max_new_tokens=2)
        await server.call(control("/pause_generation", {"mode": "retract"}))
        await server.call(control("/update_weights_from_disk", {"weight_version": "1"}))
        await server.abort("r1")

    ask(fake, use, "user-key", "admin-key")
    headers: list[dict[str, str]] = fake.headers
    return headers


def test_only_requests_that_change_a_server_have_the_admin_key(
    two_keys: list[dict[str, str]],
) -> None:
    keys = [headers["authorization"].removeprefix("Bearer ") for headers in two_keys]
    assert keys == ["user-key"] * 2 + ["admin-key"] * 3


def test_requests_accept_no_compression(two_keys: list[dict[str, str]]) -> None:
    assert {headers["accept-encoding"] for headers in two_keys} == {"identity"}


@pytest.mark.parametrize(
    "key", ["with space", "line\n", "ключ"], ids=["space", "line end", "not ASCII"]
)
def test_a_key_that_cannot_be_sent_is_refused_unseen(key: str) -> None:
    with pytest.raises(ValueError, match="--sglang-api-key-env") as caught:
        make_client({"--sglang-api-key-env": key}, ())
    assert key not in str(caught.value)


def test_the_servers_of_a_router_are_listed_once(fake: FakeSGLang) -> None:
    urls = ["http://10.0.0.5:30000/", "http://10.0.0.6:30000@0", "http://10.0.0.6:30000@1"]
    fake.replies["/workers"] = [
        (200, {"workers": [{"id": "1", "url": url} for url in urls], "total": 3})
    ]
    assert ask(fake, workers_of) == ("http://10.0.0.5:30000", "http://10.0.0.6:30000")


WORKERS = {
    "no servers": (200, {"workers": []}, "has no servers; add some"),
    "HTTP 401": (401, "", "answered HTTP 401.* --sglang-api-key-env"),
    "text": (200, "hello", "Check --sglang-router-ip"),
    "workers of text": (200, {"workers": ["http://a:1"]}, "Check --sglang-router-ip"),
    "a URL that steers": (
        200,
        {"workers": [{"url": "http://a\x1b[2J:1"}]},
        "Check --sglang-router-ip",
    ),
    "5 MB": (200, " " * 5_000_000, "larger than the 4194304 bytes"),
}


@pytest.mark.parametrize(("status", "body", "message"), WORKERS.values(), ids=WORKERS)
def test_a_router_that_names_no_servers_is_refused(
    fake: FakeSGLang, status: int, body: Any, message: str
) -> None:
    fake.replies["/workers"] = [(status, body)]
    with pytest.raises(ValueError, match=message):
        ask(fake, workers_of)


REDACTED = {
    "a key": ("key 0123456789!", "key ***!"),
    "parts of a key": ("01234567 and 23456789", "*** and ***"),
    "a key twice": ("01234567890123456789", "***"),
    "too short a part": ("0123456 is too short", "0123456 is too short"),
    "base64": ("MDEyMzQ1Njc4OQ==", "***=="),
}


@pytest.mark.parametrize(("text", "redacted"), REDACTED.values(), ids=REDACTED)
def test_keys_are_redacted(text: str, redacted: str) -> None:
    assert Keys({"--sglang-api-key-env": "0123456789"}).redacted(text) == redacted


def test_a_run_without_keys_redacts_nothing() -> None:
    assert Keys({"--sglang-api-key-env": None}).redacted("0123456789") == "0123456789"


def test_a_request_that_is_cancelled_twice_is_no_longer_in_flight(fake: FakeSGLang) -> None:
    fake.faults.append("hang")

    async def work(clients: list[Server]) -> None:
        task = asyncio.create_task(clients[0].generate(request()))
        while not fake.requests:
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.sleep(0)  # it now waits for the end of its request
        task.cancel()
        await asyncio.wait([task])
        await asyncio.wait_for(clients[0].ended.wait(), timeout=30.0)
        assert clients[0].in_flight == {None: 0}

    with_clients([fake], work)
