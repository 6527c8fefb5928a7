"""HTTP requests to untrusted servers.

Answers are bounded in size and never decompressed; messages never contain keys or parts of keys.
Requests are retried after a ServerError. The package raises `RolloutUnavailable`, after which the
run saves a checkpoint and ends, and ValueError for invalid options.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import aiohttp

from slime_tis.errors import one_line, quoted
from slime_tis.trainer.engines.event_loops import BackgroundTasks, cancel_and_wait
from slime_tis.trainer.engines.function_requests import Generation
from slime_tis.trainer.engines.servers.api import (
    CONTROL_TIMEOUT,
    BodyFilter,
    Call,
    GenerateRequest,
    ServerApi,
)
from slime_tis.trainer.engines.servers.errors import (
    InvalidAnswer,
    MalformedAnswer,
    ReportedFailure,
    RequestError,
    RequestRefused,
    ServerError,
)

Result = TypeVar("Result")

CONNECT_TIMEOUT = 10.0
"""Longest wait for a connection, in seconds."""
KEEPALIVE = 2.0
"""Seconds after which idle connections are closed. Servers close them after 5, and a request sent
meanwhile is lost."""
ABORT_TIMEOUT = 20.0
"""Longest wait for the answer to an aborted request, in seconds; the server finishes its batch
first."""
ABORT_INTERVAL = 0.5
"""Seconds between two aborts of a request; the server ignores the abort of a request that it has
not read yet."""
ABORT_REQUEST_TIMEOUT = 5.0
"""Longest wait for the answer to an abort, in seconds."""
ERROR_BYTES = 64 << 10
"""Bytes that are read of an error; later bytes are dropped."""
READ_BUFFER = 1 << 20
"""Bytes of an answer that wait to be read, per connection; at aiohttp's 64 kB the loop pauses
connections too often."""
RETRIED_STATUS = (408, 425, 429)
"""HTTP 4xx that ask for another attempt: timeout, too early, too many requests."""
MAX_QUOTE = 400
"""Maximum characters of a server's text in a message."""
MAX_SEARCHED = 8192
"""Characters searched for keys, far more than are quoted."""
MIN_ECHO = 8
"""Consecutive characters of a key that count as an echo."""
REDACTED = "***"


@dataclass(eq=False, repr=False)
class Server:
    """One server or a router; requests raise ServerError or RequestRefused."""

    url: str
    client: Client
    api: ServerApi
    timeout: float
    workers: Sequence[Server] = ()
    """Servers behind a router at this address; requests are aborted there."""
    malformed_answers: int = 0
    in_flight: Counter[str | None] = field(default_factory=Counter)
    """The number of requests in flight for each adapter."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request ends."""
    abort_timeout: float = ABORT_TIMEOUT
    _aborts: BackgroundTasks = field(default_factory=BackgroundTasks)

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    def quoted(self, text: str) -> str:
        """The server's text on one line, cut and without keys."""
        return one_line(self.client.keys.redacted(text[:MAX_SEARCHED]), MAX_QUOTE)

    async def health_error(self) -> RequestError | None:
        """Why the server cannot sample a token (it may be paused), or None; takes over a second."""
        try:
            await self.api.check_health(self)
        except RequestError as error:
            return error
        return None

    async def generate(self, request: GenerateRequest) -> tuple[Generation, str | None]:
        """Samples the rest of a response; also says why its experts are unusable.

        After the timeout, or if cancelled, the request is aborted. An aborted request still returns
        the tokens that it has.
        """
        task = asyncio.create_task(self._send(self.api.generate(request), timeout=None))
        self._count_until_done(task)
        try:
            await asyncio.wait({task}, timeout=self.timeout)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.abort_timeout):
                    while not task.done():
                        await self.abort(request.request_id)
                        await asyncio.wait({task}, timeout=ABORT_INTERVAL)
            if not task.done():
                raise ServerError(f"{self.url} did not answer within {self.timeout:g} s.")
            return task.result()
        finally:
            if not task.done():
                # Without an abort, the server notices only some seconds later.
                self._aborts.start(
                    self.abort(request.request_id), name=f"abort {request.request_id}"
                )
            await cancel_and_wait([task])

    async def has_adapter(self) -> bool:
        """Whether the server has the adapter that its requests name; True if they name none."""
        name = self.api.adapter
        return name is None or name in await self.adapters()

    async def adapters(self) -> list[str]:
        """Names of the adapters that requests may name."""
        return await self.call(self.api.adapters(), timeout=CONTROL_TIMEOUT)

    async def abort(self, request_id: str) -> None:
        """Aborts a request, which then returns its partial response; ignores failures."""
        for server in self.workers or (self,):
            with suppress(RequestError):
                await server.call(self.api.abort(request_id), timeout=ABORT_REQUEST_TIMEOUT)

    async def call(self, call: Call[Result], *, timeout: float | None = None) -> Result:
        """Sends a request and returns its parsed answer; `timeout` replaces the server's."""
        return await self._send(call, timeout=timeout or self.timeout)

    async def close(self) -> None:
        """Waits for aborts in flight."""
        await self._aborts.wait()

    def _count_until_done(self, task: asyncio.Task[Any]) -> None:
        """Counts a request of the current adapter as in flight until its task is done."""
        adapter = self.api.adapter
        self.in_flight[adapter] += 1

        # Not in a `finally` with an await, which a second cancellation would leave early.
        def end(_: asyncio.Task[Any]) -> None:
            self.in_flight[adapter] -= 1
            self.ended.set()

        task.add_done_callback(end)

    async def _send(self, call: Call[Result], *, timeout: float | None) -> Result:
        """Returns the parsed body of a good answer; counts unusable answers."""
        url = self.url + call.endpoint
        scope = asyncio.timeout(timeout)
        request = self.client.session.request(
            "GET" if call.body is None else "POST",
            url,
            json=call.body,
            headers={**self.client.keys.header(call.endpoint), **call.headers},
            allow_redirects=False,
        )
        try:
            async with scope, request as response:
                content = await _read(response, call.max_bytes, call.body_filter)
            if _is_success(response):
                return call.parse(content)
        except InvalidAnswer as error:
            self.malformed_answers += 1
            raise MalformedAnswer(
                self.quoted(f"{url} gave an answer that cannot be used: {error}.")
            ) from None
        except ReportedFailure as error:
            message = self.quoted(_error_message(str(error).encode())).rstrip(".")
            raise RequestRefused(f"{url} failed: {message}.", 200) from None
        except (aiohttp.ClientError, OSError) as error:  # no cause: its request contains the key
            if scope.expired():
                raise ServerError(f"{url} did not answer within {timeout:g} s.") from None
            reason = str(error).strip().rstrip(".") or type(error).__name__
            raise ServerError(f"{url} failed: {self.quoted(reason)}.") from None
        status = response.status
        message = (
            f"{url} answered HTTP {status}: {self.quoted(_error_message(content)).rstrip('.')}"
        )
        if status in (401, 403):
            flags = " or ".join(self.client.keys.flags)
            message += f"; set the variable that {flags} names to its key"
        if 400 <= status < 500 and status not in RETRIED_STATUS:
            raise RequestRefused(f"{message}.", status)
        raise ServerError(f"{message}.")


class Keys:
    """Names the key of each endpoint, and removes keys from texts; keys appear nowhere else."""

    def __init__(
        self, keys: Mapping[str, str | None], user_endpoints: tuple[str, ...] = ()
    ) -> None:
        """Takes the API key and, if the engine has one, the admin key, by their flags."""
        self.flags = tuple(keys)
        values = list(keys.values())
        self._user_endpoints = user_endpoints
        self._api_key = values[0]
        self._admin_api_key = values[-1]
        self._short: list[str] = []
        """Spellings that are too short for `_parts`, the longest first."""
        self._parts: set[str] = set()
        """Each `MIN_ECHO` consecutive characters of a longer spelling."""
        for key in values:
            if not key:
                continue
            for secret in _spellings(key):
                if len(secret) < MIN_ECHO:
                    self._short.append(secret)
                for start in range(len(secret) - MIN_ECHO + 1):
                    self._parts.add(secret[start : start + MIN_ECHO])
        self._short.sort(key=len, reverse=True)

    def __repr__(self) -> str:
        return "Keys()"

    def header(self, endpoint: str) -> dict[str, str]:
        """The header that signs a request; empty without a key."""
        key = self._api_key
        if not endpoint.endswith(self._user_endpoints):
            key = self._admin_api_key or key
        if key is None:
            return {}
        return {"Authorization": f"Bearer {key}"}

    def redacted(self, text: str) -> str:
        """Replaces keys, and parts of keys of at least `MIN_ECHO` characters, by `***`."""
        shown = ""
        hidden_until = 0
        for start, character in enumerate(text):
            if text[start : start + MIN_ECHO] in self._parts:
                # Overlapping and adjacent parts are one echo.
                if start > hidden_until or not shown.endswith(REDACTED):
                    shown += REDACTED
                hidden_until = start + MIN_ECHO
            if start >= hidden_until:
                shown += character
        for secret in self._short:
            shown = shown.replace(secret, REDACTED)
        return shown


class Client(NamedTuple):
    """HTTP connections to servers.

    For large answers, aiohttp takes a fifth of the processor time that httpx takes.
    """

    session: aiohttp.ClientSession
    keys: Keys


def make_client(keys: Mapping[str, str | None], user_endpoints: tuple[str, ...]) -> Client:
    """Returns a client; call it inside a loop.

    Endpoints other than `user_endpoints`, such as those of weights, pauses and aborts, take the
    admin key, or the API key if there is no admin key.
    """
    for flag, key in keys.items():
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise ValueError(
                f"the environment variable of {flag} contains characters that cannot be sent; set"
                " it again without spaces and line breaks."
            )
    session = aiohttp.ClientSession(
        headers={"Accept-Encoding": "identity"},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=READ_BUFFER,
    )
    return Client(session, Keys(keys, user_endpoints))


def _spellings(secret: str) -> set[str]:
    """The secret and its encodings, in which a server may echo it."""
    encoded = base64.b64encode(secret.encode()).decode().rstrip("=")
    escaped = {json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe="")}
    return {secret, encoded} | escaped


def _is_success(response: aiohttp.ClientResponse) -> bool:
    return 200 <= response.status < 300


async def _read(
    response: aiohttp.ClientResponse, max_bytes: int, body_filter: BodyFilter | None
) -> bytes:
    """Returns the filtered body, or the first `ERROR_BYTES` of an error.

    Raises InvalidAnswer if the body has more than `max_bytes`.
    """
    # Compressed answers are not read: a compressed megabyte can contain a gigabyte.
    if response.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
        if _is_success(response):
            raise InvalidAnswer("it is compressed, but the request accepts no compression")
        return b""
    if not _is_success(response):
        max_bytes = ERROR_BYTES
        body_filter = None
    chunks = []
    size = 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk if body_filter is None else body_filter.cut(chunk))
        size += len(chunk)
        if size > max_bytes:
            if _is_success(response):
                raise InvalidAnswer(
                    f"it is larger than the {max_bytes} bytes that an answer may have"
                )
            break
    if body_filter is not None:
        chunks.append(body_filter.end())
    return b"".join(chunks)[:max_bytes]


def _error_message(body: bytes) -> str:
    """The server's message, in any form that engines and routers use."""
    text = body.decode(errors="replace").strip()
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return text
    # {"error": {"message": …}}, {"message": …}, {"detail": …}, or combinations
    for name in ("error", "message", "detail"):
        if isinstance(message, dict) and message.get(name) is not None:
            message = message[name]
    if isinstance(message, str):
        return message
    return quoted(message, ERROR_BYTES)
