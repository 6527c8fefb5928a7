"""The servers that a router names, in the forms of its versions."""

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from slime_tis.rollout.sglang.router import workers_of

ROUTER = "http://router:3000"


def ask(answers: Callable[[httpx.Request], httpx.Response]) -> tuple[str, ...]:
    class Body(httpx.AsyncByteStream):
        def __init__(self, content: bytes) -> None:
            self.content = content

        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield self.content

    def streamed(request: httpx.Request) -> httpx.Response:
        answer = answers(request)
        return httpx.Response(answer.status_code, headers=answer.headers, stream=Body(answer.content))

    async def run() -> tuple[str, ...]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(streamed)) as client:
            return await workers_of(client, ROUTER)

    return asyncio.run(run())


def test_workers() -> None:
    body = {
        "workers": [
            {"id": "1", "url": "http://10.0.0.5:30000/", "is_healthy": True},
            {"id": "2", "url": "http://10.0.0.6:30000@0"},
            {"id": "3", "url": "http://10.0.0.6:30000@1"},
        ],
        "total": 3,
    }
    found = ask(lambda request: httpx.Response(200, json=body))
    assert found == ("http://10.0.0.5:30000", "http://10.0.0.6:30000")


@pytest.mark.parametrize("status", [404, 405])
def test_list_workers_of_old_routers(status: int) -> None:
    asked = []

    def answers(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path == "/workers":
            return httpx.Response(status)
        return httpx.Response(200, json={"urls": ["http://10.0.0.5:30000"]})

    assert ask(answers) == ("http://10.0.0.5:30000",)
    assert asked == ["/workers", "/list_workers"]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (httpx.Response(200, json={"workers": []}), f"the SGLang router at {ROUTER} has no servers; add some to it."),
        (httpx.Response(401), r"does not name its servers \(HTTP 401\); give them with --sglang-url."),
        (httpx.Response(200, text="hello"), "answers, but not as an SGLang router does"),
        (httpx.Response(200, json=[]), "answers, but not as an SGLang router does"),
        (httpx.Response(200, json={"workers": ["http://a:1"]}), "answers, but not as an SGLang router does"),
        (httpx.Response(200, json={"urls": [None]}), "answers, but not as an SGLang router does"),
        (httpx.Response(200, json={"urls": ["http://a\x1b[2J:1"]}), "answers, but not as an SGLang router does"),
        (httpx.Response(200, text="[" * 100_000), "answers, but not as an SGLang router does"),
        (httpx.Response(200, text=" " * 5_000_000), "gave an answer that is larger than the 4194304 bytes"),
        (httpx.Response(200, json={"urls": ["grpc://a:1"]}), "answers, but not as an SGLang router does"),
    ],
)
def test_refused(answer: httpx.Response, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ask(lambda request: answer)


def test_nobody_there() -> None:
    def answers(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(ValueError, match=f"no SGLang router answers at {ROUTER} .ConnectError.; check"):
        ask(answers)
