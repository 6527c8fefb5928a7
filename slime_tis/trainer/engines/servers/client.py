"""HTTP requests to untrusted servers.

Answers are bounded in size and never decompressed; messages never contain keys or parts of keys.
Requests are retried after a ServerError. The package raises `RolloutUnavailable`,
after which the run saves a checkpoint and ends, and ValueError for invalid options.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import aiohttp

from slime_tis.errors import one_line, quoted
from slime_tis.trainer.configs.sglang import normalized_url
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.event_loops import BackgroundTasks, cancel_and_wait
from slime_tis.trainer.engines.function_requests import Generation
from slime_tis.trainer.engines.sglang import schema
from slime_tis.trainer.engines.sglang.expert_text import ExpertText
from slime_tis.trainer.engines.sglang.schema import (
    AnswerT,
    ExpertLayout,
    GenerateRequest,
    InvalidAnswer,
)

Result = TypeVar("Result")

CONNECT_TIMEOUT = 10.0
"""Longest wait for a connection, in seconds."""
KEEPALIVE = 2.0
"""Seconds after which idle connections are closed. Servers close them after 5, and a request sent
meanwhile is lost."""
HEALTH_TIMEOUT = 25.0
"""Longest wait for /health, in seconds: it samples a token and ends after 20."""
ABORT_TIMEOUT = 20.0
"""Longest wait for the answer to an aborted request, in seconds; the server finishes its batch
first."""
ABORT_INTERVAL = 0.5
"""Seconds between two aborts of a request; the server ignores the abort of a request that it has
not read yet."""
ABORT_REQUEST_TIMEOUT = 5.0
"""Longest wait for the answer to an abort, in seconds."""
CONTROL_BYTES = 4 << 20
"""Maximum answer of endpoints other than /generate, in bytes; /server_info, the largest, has about
100 kB."""
CHECKSUM_BYTES = 64 << 20
"""Maximum answer of /weights_checker, in bytes: about 100 per tensor and rank."""
ERROR_BYTES = 64 << 10
"""Bytes that are read of an error; later bytes are dropped."""
READ_BUFFER = 1 << 20
"""Bytes of an answer that wait to be read, per connection; at aiohttp's 64 kB the loop pauses
connections too often."""
RETRIED_STATUS = (408, 425, 429)
"""HTTP 4xx that ask for another attempt: timeout, too early, too many requests."""
ROUTING_KEY = "X-SMG-Routing-Key"
"""Header by which SGLang's gateway chooses the server, with the policies consistent_hashing and
manual."""
USER_ENDPOINTS = ("/generate", "/health", "/model_info", "/server_info", "/workers")
"""Endpoints that take SGLang's API key; all others take the admin key if the server has one."""
MAX_QUOTE = 400
"""Maximum characters of a server's text in a message."""
MAX_SEARCHED = 8192
"""Characters searched for keys, far more than are quoted."""
MIN_ECHO = 8
"""Consecutive characters of a key that count as an echo."""
REDACTED = "***"


class RequestError(Exception):
    """A request to a server failed; the message names the server and the reason."""


class ServerError(RequestError):
    """A server failed; another server may succeed."""


class MalformedAnswer(ServerError):
    """A server's answer is unusable."""


class UnexpectedWeights(ServerError):
    """A server answered with other weights than it was given."""


class RequestRefused(RequestError, ValueError):
    """A server refuses a request with HTTP 4xx or `success: false` (status 200).

    Every server would refuse it, except for a wrong key or address.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False, repr=False)
class Server:
    """One SGLang server or a router; requests raise ServerError or RequestRefused."""

    url: str
    client: Client
    timeout: float
    vocab_size: int | None = None
    """Number of token ids of the model; None skips the check of answers."""
    expert_layout: ExpertLayout | None = None
    """Layout of routed experts in answers; None if they are not recorded."""
    workers: Sequence[Server] = ()
    """Servers behind a router at this address; requests are aborted there."""
    malformed_answers: int = 0
    abort_timeout: float = ABORT_TIMEOUT
    _aborts: BackgroundTasks = field(default_factory=BackgroundTasks)

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    def quoted(self, text: str) -> str:
        """The server's text on one line, cut and without keys."""
        return one_line(self.client.keys.redacted(text[:MAX_SEARCHED]), MAX_QUOTE)

    async def health_error(self) -> str | None:
        """Why the server cannot sample a token (it may be paused), or None; takes over a second."""
        try:
            await self._request("GET", "/health", timeout=HEALTH_TIMEOUT, parse=bytes)
        except RequestError as error:
            return str(error)
        return None

    async def info(self) -> schema.ServerInfo:
        """Returns the server's description."""
        return await self._get("/server_info", schema.ServerInfo)

    async def weight_version(self) -> str | None:
        """The name of the server's weights; "default" for the initial weights."""
        return (await self._get("/model_info", schema.ModelInfo)).weight_version

    async def worker_urls(self) -> tuple[str, ...]:
        """Returns the URLs of a router's servers; raises ValueError if they are unknown."""
        try:
            answer = await self._get("/workers", schema.ControlAnswer)
        except RequestError as error:
            raise _unknown_workers(str(error)) from None
        urls: list[str] = []
        for worker in answer.workers or ():
            # Routers append @RANK to the URL of a data-parallel rank.
            try:
                url = normalized_url(re.sub(r"@\d+$", "", worker.url))
            except ValueError:
                raise _unknown_workers(f"{self.url} lists an invalid URL.") from None
            if url not in urls:
                urls.append(url)
        if not urls:
            raise ValueError(f"the SGLang router at {self.url} has no servers; add some to it.")
        return tuple(urls)

    async def generate(self, request: GenerateRequest) -> tuple[Generation, str | None]:
        """Samples the rest of a response; also says why its experts are unusable.

        After the timeout, or if cancelled, the request is aborted. An aborted request still returns
        the tokens that it has.
        """
        headers = {}
        if request.session:
            headers[ROUTING_KEY] = request.session
        experts = None
        if self.expert_layout is not None and request.first_experts is not None:
            experts = ExpertText(self.expert_layout)
        call = self._request(
            "POST",
            "/generate",
            request.body(),
            timeout=None,
            parse=partial(
                schema.parse_generation,
                request=request,
                vocab_size=self.vocab_size,
                experts=None if experts is None else experts.experts,
            ),
            max_bytes=request.max_bytes(self.expert_layout),
            headers=headers,
            experts=experts,
        )
        task = asyncio.create_task(call)
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

    async def prompt_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of all tokens but the first."""
        return await self._request(
            "POST",
            "/generate",
            schema.score_body(token_ids),
            timeout=self.timeout,
            parse=partial(schema.parse_scores, token_ids=token_ids),
            max_bytes=schema.max_answer_bytes(len(token_ids)),
        )

    async def top_log_probs(
        self, token_ids: Sequence[int], sampling: Sampling, count: int
    ) -> dict[int, float]:
        """The likeliest next tokens and their log-probs at the temperature of `sampling`."""
        return await self._request(
            "POST",
            "/generate",
            schema.top_body(token_ids, sampling, count),
            timeout=self.timeout,
            parse=partial(schema.parse_top, vocab_size=self.vocab_size),
            max_bytes=schema.max_answer_bytes(count),
        )

    async def weight_checksums(self) -> Mapping[str, list[str]]:
        """Checksums of tensors by name, one per rank that has the tensor."""
        body = {"action": "checksum", "selector": "target"}
        return await self._request(
            "POST",
            "/weights_checker",
            body,
            timeout=self.timeout,
            parse=schema.parse_checksums,
            max_bytes=CHECKSUM_BYTES,
        )

    async def abort(self, request_id: str) -> None:
        """Aborts a request, which then returns its partial response; ignores failures."""
        for server in self.workers or (self,):
            with suppress(RequestError):
                await server.post(
                    "/abort_request", {"rid": request_id}, timeout=ABORT_REQUEST_TIMEOUT
                )

    async def post(
        self, endpoint: str, body: Mapping[str, object], *, timeout: float | None = None
    ) -> None:
        """Posts a JSON body to an endpoint such as `/flush_cache`.

        SGLang reports some failures with HTTP 200 and `success: false`: that is a refusal, too.
        """
        answer = await self._request(
            "POST", endpoint, body, timeout=timeout or self.timeout, parse=bytes
        )
        with suppress(InvalidAnswer):  # some endpoints return text
            if schema.parse(schema.ControlAnswer, answer).success is False:
                message = self.quoted(_error_message(answer)).rstrip(".")
                raise RequestRefused(f"{self.url}{endpoint} failed: {message}.", 200)

    async def close(self) -> None:
        """Waits for aborts in flight."""
        await self._aborts.wait()

    async def _request(
        self,
        method: str,
        endpoint: str,
        body: Mapping[str, object] | None = None,
        *,
        timeout: float | None,
        parse: Callable[[bytes], Result],
        max_bytes: int = CONTROL_BYTES,
        headers: Mapping[str, str] | None = None,
        experts: ExpertText | None = None,
    ) -> Result:
        """Returns the parsed body of a good answer of at most `max_bytes`; counts unusable answers.

        `experts` cuts the routed experts out of the body before it is parsed.
        """
        url = self.url + endpoint
        scope = asyncio.timeout(timeout)
        request = self.client.session.request(
            method,
            url,
            json=body,
            headers={**self.client.keys.header(endpoint), **(headers or {})},
            allow_redirects=False,
        )
        try:
            async with scope, request as response:
                content = await _read(response, max_bytes, experts)
            if _is_success(response):
                return parse(content)
        except InvalidAnswer as error:
            self.malformed_answers += 1
            raise MalformedAnswer(
                self.quoted(f"{url} gave an answer that cannot be used: {error}.")
            ) from None
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
            message += (
                "; set the variable that --sglang-api-key-env or --sglang-admin-api-key-env names"
                " to its key"
            )
        if 400 <= status < 500 and status not in RETRIED_STATUS:
            raise RequestRefused(f"{message}.", status)
        raise ServerError(f"{message}.")

    async def _get(self, endpoint: str, answer: type[AnswerT]) -> AnswerT:
        return await self._request(
            "GET", endpoint, timeout=self.timeout, parse=partial(schema.parse, answer)
        )


class Keys:
    """Names the key of each endpoint, and removes keys from texts; keys appear nowhere else."""

    def __init__(self, api_key: str | None = None, admin_api_key: str | None = None) -> None:
        self._api_key = api_key
        self._admin_api_key = admin_api_key
        self._short: list[str] = []
        """Spellings that are too short for `_parts`, the longest first."""
        self._parts: set[str] = set()
        """Each `MIN_ECHO` consecutive characters of a longer spelling."""
        for key in (api_key, admin_api_key):
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
        if not endpoint.endswith(USER_ENDPOINTS):
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


def make_client(api_key: str | None = None, admin_api_key: str | None = None) -> Client:
    """Returns a client; call it inside a loop.

    Weights, pauses and aborts take the admin key, or the API key if there is no admin key.
    """
    keys = {"--sglang-api-key-env": api_key, "--sglang-admin-api-key-env": admin_api_key}
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
    return Client(session, Keys(api_key, admin_api_key))


def _unknown_workers(problem: str) -> ValueError:
    return ValueError(
        f"the servers of the SGLang router are unknown: {problem} Check --sglang-router-ip and"
        " --sglang-router-port, or name the servers with --sglang-url."
    )


def _spellings(secret: str) -> set[str]:
    """The secret and its encodings, in which a server may echo it."""
    encoded = base64.b64encode(secret.encode()).decode().rstrip("=")
    escaped = {json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe="")}
    return {secret, encoded} | escaped


def _is_success(response: aiohttp.ClientResponse) -> bool:
    return 200 <= response.status < 300


async def _read(
    response: aiohttp.ClientResponse, max_bytes: int, experts: ExpertText | None
) -> bytes:
    """Returns the body without the experts, or the first `ERROR_BYTES` of an error.

    Raises InvalidAnswer if the body has more than `max_bytes`.
    """
    # Compressed answers are not read: a compressed megabyte can contain a gigabyte.
    if response.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
        if _is_success(response):
            raise InvalidAnswer("it is compressed, but the request accepts no compression")
        return b""
    if not _is_success(response):
        max_bytes = ERROR_BYTES
        experts = None
    chunks = []
    size = 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk if experts is None else experts.cut(chunk))
        size += len(chunk)
        if size > max_bytes:
            if _is_success(response):
                raise InvalidAnswer(
                    f"it is larger than the {max_bytes} bytes that an answer may have"
                )
            break
    if experts is not None:
        chunks.append(experts.end())
    return b"".join(chunks)[:max_bytes]


def _error_message(body: bytes) -> str:
    """The server's message, in any form that versions of SGLang and routers use."""
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
