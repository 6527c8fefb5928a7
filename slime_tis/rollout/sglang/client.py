"""HTTP with servers that are not trusted: answers are bounded in size, never decompressed, and keys stay hidden."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Generator, Mapping
from dataclasses import dataclass

import httpx

from slime_tis.rollout.sglang.redaction import Redactor

CONNECT_TIMEOUT = 10.0
"""Longest wait for a connection, in seconds."""
IDLE_TIMEOUT = 2.0
"""Time after which an idle connection is given up, in seconds: servers do so after 5, and a request that is sent
while they do is lost."""
CONTROL_BYTES = 4 << 20
"""Largest answer of any endpoint but /generate, in bytes; /server_info, the largest, has some 100 kB."""
ERROR_BYTES = 64 << 10
"""Read of the body of an error, in bytes; what follows is not looked at."""
USER_ENDPOINTS = (
    "/generate",
    "/health",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/workers",
    "/list_workers",
)
"""Endpoints that SGLang opens to the API key; all others are for the admin key, where a server has one."""


class UnusableAnswer(Exception):
    """An answer is too large, compressed, or not JSON; the words say what is wrong with it."""


class Keys(httpx.Auth):
    """Puts the key of its endpoint on each request as it leaves, so that it stands nowhere else."""

    def __init__(self, api_key: str | None, admin_api_key: str | None) -> None:
        self._api_key, self._admin_api_key = api_key, admin_api_key
        self.redactor = Redactor(key for key in (api_key, admin_api_key) if key is not None)

    def __repr__(self) -> str:
        return "Keys()"

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        self._sign(request)
        yield request

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        self._sign(request)
        yield request

    def _sign(self, request: httpx.Request) -> None:
        is_admin = not request.url.path.endswith(USER_ENDPOINTS)
        key = (self._admin_api_key or self._api_key) if is_admin else self._api_key
        if key is not None:
            request.headers["Authorization"] = f"Bearer {key}"


def make_client(api_key: str | None = None, admin_api_key: str | None = None) -> httpx.AsyncClient:
    """The HTTP client of all servers; the pool bounds the requests, and the client does not.

    Args:
      api_key: of the servers; it appears in no log, exception or representation.
      admin_api_key: for weights, pauses and aborts, where servers have one; else these go with the API key.

    Raises:
      ValueError: a key that cannot stand in a header.
    """
    for key, flag in ((api_key, "--sglang-api-key-env"), (admin_api_key, "--sglang-admin-api-key-env")):
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise ValueError(
                f"the environment variable that {flag} names holds characters that cannot be sent; set it anew, "
                "without spaces and line ends."
            )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request
    return httpx.AsyncClient(
        auth=Keys(api_key, admin_api_key),
        headers={"Accept-Encoding": "identity"},
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_TIMEOUT),
        trust_env=False,
    )


def redactor_of(client: httpx.AsyncClient) -> Redactor:
    """What keeps the keys of a client out of messages."""
    return client.auth.redactor if isinstance(client.auth, Keys) else Redactor(())


@dataclass(frozen=True)
class Answer:
    """The status and the body of an answer, as they came."""

    status: int
    body: bytes

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The body as text, with a mark where it is not UTF-8."""
        return self.body.decode(errors="replace").strip()

    def json(self) -> object:
        """The body as decoded JSON.

        Raises:
          UnusableAnswer: it is none, is nested deeper than Python reads, or has a number of thousands of digits.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise UnusableAnswer("is no JSON") from None


async def fetch(
    client: httpx.AsyncClient, method: str, url: str, body: Mapping[str, object] | None, *, limit: int
) -> Answer:
    """Sends a request and reads its answer, but no more of it than was to be expected.

    Compressed answers are not read at all: none was asked for, and a megabyte of one holds a gigabyte.

    Args:
      client: of `make_client`.
      method: of HTTP.
      url: to be asked.
      body: sent as JSON.
      limit: largest body of an answer, in bytes; errors are cut to `ERROR_BYTES`.

    Raises:
      UnusableAnswer: it is larger or compressed.
      httpx.HTTPError: no answer.
    """
    async with client.stream(method, url, json=body) as response:
        answer = Answer(response.status_code, b"")
        limit = limit if answer.is_success else ERROR_BYTES
        if response.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
            if answer.is_success:
                raise UnusableAnswer("is compressed, which was not asked for")
            return answer
        found = bytearray()
        async for chunk in response.aiter_raw():
            found += chunk
            if len(found) > limit:
                if answer.is_success:
                    raise UnusableAnswer(f"is larger than the {limit} bytes that an answer may have")
                break
        return Answer(response.status_code, bytes(found[:limit]))
