"""HTTP requests to untrusted servers.

Answers are bounded in size and never decompressed; messages never contain keys or parts of keys.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import quote

import httpx

from slime_tis.errors import one_line, quoted
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.sglang.bodies import generate_body, max_answer_bytes, score_body
from slime_tis.trainer.engines.sglang.errors import (
    InvalidAnswer,
    MalformedAnswer,
    RequestRefused,
    ServerError,
    SGLangError,
)
from slime_tis.trainer.engines.sglang.schema import (
    ChecksumAnswer,
    Completion,
    ControlAnswer,
    ExpertLayout,
    ExpertRequest,
    ModelInfo,
    ServerInfo,
    WorkersAnswer,
    parse,
    parse_generation,
    parse_scores,
)
from slime_tis.trainer.engines.tasks import BackgroundTasks, cancel_and_wait
from slime_tis.trainer.options.sglang import normalized_url

CONNECT_TIMEOUT = 10.0
"""Longest wait for a connection, in seconds."""
KEEPALIVE = 2.0
"""Seconds after which idle connections are closed. Servers close them after 5, and a request sent meanwhile is lost."""
HEALTH_TIMEOUT = 25.0
"""Longest wait for /health, in seconds: it samples a token and ends after 20."""
ABORT_TIMEOUT = 20.0
"""Longest wait for the answer to an aborted request, in seconds; the server finishes its batch first."""
ABORT_INTERVAL = 0.5
"""Seconds between two aborts of a request; the server ignores the abort of a request that it has not read yet."""
ABORT_REQUEST_TIMEOUT = 5.0
"""Longest wait for the answer to an abort, in seconds."""
ROUTER_TIMEOUT = 60.0
"""Longest wait for a router's list of servers, in seconds."""
CONTROL_BYTES = 4 << 20
"""Maximum answer of endpoints other than /generate, in bytes; /server_info, the largest, has about 100 kB."""
CHECKSUM_BYTES = 64 << 20
"""Maximum answer of /weights_checker, in bytes: about 100 per tensor and rank."""
ERROR_BYTES = 64 << 10
"""Maximum bytes read of an error's body."""
RETRIED_STATUS = (408, 425, 429)
"""Statuses other than 5xx that are retried."""
UNKNOWN_ENDPOINT = (404, 405)
"""Statuses of a server without the endpoint."""
USER_ENDPOINTS = (*("/generate", "/health", "/model_info", "/server_info", "/workers"),)
"""Endpoints that take SGLang's API key; all others take the admin key if the server has one."""
MAX_QUOTE = 400
"""Maximum quoted characters of a server's message."""
MAX_SEARCHED = 8192
"""Characters searched for keys, far more than are quoted."""
MIN_ECHO = 8
"""Consecutive characters of a key that count as an echo."""
REDACTED = "***"
DP_RANK = re.compile(r"@\d+$")
"""Suffix that routers add to a server's URL for data-parallel ranks."""


class Server:
    """One SGLang server, or a router, by its address."""

    def __init__(
        self,
        url: str,
        client: httpx.AsyncClient,
        *,
        timeout: float,
        vocab_size: int | None = None,
        expert_layout: ExpertLayout | None = None,
        workers: Sequence[Server] = (),
        abort_timeout: float = ABORT_TIMEOUT,
        health_timeout: float = HEALTH_TIMEOUT,
    ) -> None:
        """Connects to nothing yet.

        Args:
            url: http://HOST:PORT.
            client: From `make_client`.
            timeout: Longest wait for an answer, in seconds.
            vocab_size: Number of token ids of the model; None skips the check of answers.
            expert_layout: Layout of routed experts in answers; None for models without experts.
            workers: Servers behind a router at this address; requests are aborted there.
            abort_timeout: Longest wait for the answer to an aborted request, in seconds.
            health_timeout: Longest wait for /health, in seconds.
        """
        self.url = url
        self.reports_token_versions: bool | None = None
        """Whether answers have a weight version per token; None before the first answer."""
        self.takes_seeds = False
        """Whether the server uses the seed of each request; `info` reads the flag."""
        self.returns_routed_experts = False
        """Whether the server returns the experts of each token; `info` reads the flag."""
        self.malformed_answers = 0
        """Number of unusable answers."""
        self._client, self._timeout, self._vocab_size, self._workers = client, timeout, vocab_size, workers
        self._expert_layout = expert_layout
        self.redactor = client.auth.redactor if isinstance(client.auth, Keys) else Redactor(())
        """Removes keys from the server's messages."""
        self._abort_timeout, self._health_timeout = abort_timeout, health_timeout
        self._aborts = BackgroundTasks()

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    async def health_error(self) -> str | None:
        """Why the server cannot sample a token (it may be paused), or None; takes over a second."""
        try:
            await self._request("GET", "/health", timeout=self._health_timeout)
        except SGLangError as error:
            return str(error)
        return None

    async def info(self) -> ServerInfo:
        """Returns the server's description.

        Raises:
            ServerError: There is no usable answer.
            RequestRefused: The key is wrong, or this is not an SGLang server.
        """
        answer = await self.get("/server_info")
        with self._reading("/server_info"):
            info = parse(ServerInfo, answer)
        self.takes_seeds = info.enable_deterministic_inference is True
        self.returns_routed_experts = info.enable_return_routed_experts is True
        return info

    async def weight_version(self) -> str | None:
        """The name of the server's weights; "default" for the initial weights. Raises the errors of `info`."""
        answer = await self.get("/model_info")
        with self._reading("/model_info"):
            return parse(ModelInfo, answer).weight_version

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        request_id: str,
        seed: int | None = None,
        first_experts: int | None = None,
        stop: Sequence[str] = (),
    ) -> Completion:
        """Samples the rest of a response; see `bodies.generate_body` for the arguments.

        Routed experts start at the token `first_experts`; None requests none. A request that exceeds the timeout is
        aborted and returns its partial response. Cancelling this call also aborts the request.

        Raises:
            ServerError: There is no usable answer.
            RequestRefused: The server refuses the request.
        """
        # A mask also contains tokens as likely as the last one of top-k.
        set_tokens = 2 * sampling.top_k if sampling.return_sampling_mask else 0
        experts, max_bytes = None, max_answer_bytes(max_new_tokens, set_tokens)
        if first_experts is not None and self._expert_layout is not None:
            experts = ExpertRequest(layout=self._expert_layout, input_len=len(input_ids), first=first_experts)
            max_bytes += self._expert_layout.num_bytes(len(input_ids) + max_new_tokens)
        body = generate_body(
            input_ids,
            sampling,
            max_new_tokens=max_new_tokens,
            request_id=request_id,
            seed=seed,
            experts=experts,
            stop=stop,
        )
        request = asyncio.create_task(self._request("POST", "/generate", body, max_bytes=max_bytes))
        try:
            await asyncio.wait({request}, timeout=self._timeout)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._abort_timeout):
                    while not request.done():
                        await self.abort(request_id)
                        await asyncio.wait({request}, timeout=ABORT_INTERVAL)
            if not request.done():
                raise ServerError(f"{self.url} did not answer within {self._timeout:g} s.")
            with self._reading("/generate"):
                return parse_generation(
                    request.result(),
                    max_new_tokens=max_new_tokens,
                    vocab_size=self._vocab_size,
                    experts=experts,
                    with_sampling_mask=sampling.return_sampling_mask,
                )
        finally:
            if not request.done():  # without an abort the server notices some seconds later
                self._aborts.start(self.abort(request_id), name=f"abort {request_id}")
            await cancel_and_wait([request])

    async def prompt_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of all tokens but the first. Raises the errors of `generate`."""
        body, max_bytes = score_body(token_ids), max_answer_bytes(len(token_ids))
        answer = await self._request("POST", "/generate", body, timeout=self._timeout, max_bytes=max_bytes)
        with self._reading("/generate"):
            return parse_scores(answer, token_ids)

    async def weight_checksums(self) -> dict[str, list[str]]:
        """Checksums of tensors by name, one per rank that has the tensor.

        Raises:
            ServerError: There is no usable answer.
            RequestRefused: This version of SGLang has no checksums.
        """
        body = {"action": "checksum", "selector": "target"}
        answer = await self._request("POST", "/weights_checker", body, timeout=self._timeout, max_bytes=CHECKSUM_BYTES)
        with self._reading("/weights_checker"):
            ranks = parse(ChecksumAnswer, answer).ranks
        checksums: dict[str, list[str]] = {}
        for rank in ranks:
            for name, checksum in rank.checksums.items():
                checksums.setdefault(name, []).append(checksum)
        return checksums

    async def abort(self, request_id: str) -> None:
        """Aborts a request, which then returns its partial response; ignores failures."""
        for server in self._workers or (self,):
            with suppress(SGLangError):
                await server.post("/abort_request", {"rid": request_id}, timeout=ABORT_REQUEST_TIMEOUT)

    async def post(self, endpoint: str, body: Mapping[str, object], *, timeout: float | None = None) -> None:
        """Posts a JSON body to an endpoint such as `/flush_cache`.

        Raises:
            ServerError: There is no answer, or the server failed.
            RequestRefused: The server refuses, or answers `success: false` (`status` is 200 then).
        """
        answer = await self._request("POST", endpoint, body, timeout=self._timeout if timeout is None else timeout)
        with suppress(InvalidAnswer):  # some endpoints return text
            if parse(ControlAnswer, answer).success is False:
                message = self.redactor.quoted(_error_message(answer)).rstrip(".")
                raise RequestRefused(f"{self.url}{endpoint} failed: {message}.", 200)

    async def get(self, endpoint: str, *, timeout: float | None = None) -> bytes:
        """Returns the body of an answer.

        Raises:
            ServerError: There is no answer, or the server failed.
            RequestRefused: The server refuses.
        """
        return await self._request("GET", endpoint, timeout=timeout or self._timeout)

    async def close(self) -> None:
        """Waits for aborts in flight."""
        await self._aborts.wait()

    async def _request(
        self,
        method: str,
        endpoint: str,
        body: Mapping[str, object] | None = None,
        *,
        timeout: float | None = None,
        max_bytes: int = CONTROL_BYTES,
    ) -> bytes:
        """Returns the body of a successful answer, of at most `max_bytes`."""
        url, scope = self.url + endpoint, asyncio.timeout(timeout)
        try:
            with self._reading(endpoint):
                async with scope, self._client.stream(method, url, json=body) as response:
                    content = await _read(response, max_bytes)
        except (httpx.HTTPError, OSError) as error:  # no cause: its request contains the key
            if scope.expired():
                raise ServerError(f"{url} did not answer within {timeout:g} s.") from None
            reason = str(error).strip().rstrip(".") or type(error).__name__
            raise ServerError(f"{url} failed: {self.redactor.quoted(reason)}.") from None
        if response.is_success:
            return content
        status = response.status_code
        message = f"{url} answered HTTP {status}: {self.redactor.quoted(_error_message(content)).rstrip('.')}"
        if status in (401, 403):
            message += (
                "; put its key into the environment variable of --sglang-api-key-env, or an admin key into that of "
                "--sglang-admin-api-key-env"
            )
        if 400 <= status < 500 and status not in RETRIED_STATUS:
            raise RequestRefused(f"{message}.", status)
        raise ServerError(f"{message}.")

    @contextmanager
    def _reading(self, endpoint: str) -> Iterator[None]:
        """Counts unusable answers, and adds the server and endpoint to the message."""
        try:
            yield
        except InvalidAnswer as error:
            self.malformed_answers += 1
            text = self.redactor.quoted(f"{self.url}{endpoint} gave an answer that cannot be used: {error}.")
            raise MalformedAnswer(text) from None


class Redactor:
    """Replaces keys, and parts of keys of at least `MIN_ECHO` characters, by `***`."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """Takes the keys; also finds their JSON, `repr`, URL and base64 spellings."""
        keys = {spelling for secret in secrets if secret for spelling in _spellings(secret)}
        self._short = sorted((key for key in keys if len(key) < MIN_ECHO), key=len, reverse=True)
        self._parts = {key[start : start + MIN_ECHO] for key in keys for start in range(len(key) - MIN_ECHO + 1)}

    def __repr__(self) -> str:
        return "Redactor()"

    def redacted(self, text: str) -> str:
        """The text without keys and parts of keys."""
        shown, hidden_until = "", 0
        for start, character in enumerate(text):
            if text[start : start + MIN_ECHO] in self._parts:
                shown += "" if start <= hidden_until and shown.endswith(REDACTED) else REDACTED
                hidden_until = start + MIN_ECHO
            if start >= hidden_until:
                shown += character
        for secret in self._short:
            shown = shown.replace(secret, REDACTED)
        return shown

    def quoted(self, text: str, length: int = MAX_QUOTE) -> str:
        """A server's text on one line: redacted, then escaped, then cut."""
        return one_line(self.redacted(text[:MAX_SEARCHED]), length)


class Keys(httpx.Auth):
    """Adds the endpoint's key to each request; the key appears nowhere else."""

    def __init__(self, api_key: str | None, admin_api_key: str | None) -> None:
        self._api_key, self._admin_api_key = api_key, admin_api_key
        self.redactor = Redactor(key for key in (api_key, admin_api_key) if key is not None)

    def __repr__(self) -> str:
        return "Keys()"

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Signs the request."""
        is_admin = not request.url.path.endswith(USER_ENDPOINTS)
        key = (self._admin_api_key or self._api_key) if is_admin else self._api_key
        if key is not None:
            request.headers["Authorization"] = f"Bearer {key}"
        yield request


def make_client(api_key: str | None = None, admin_api_key: str | None = None) -> httpx.AsyncClient:
    """Returns the HTTP client of all servers, without a limit on requests (the dispatcher has one).

    Args:
        api_key: Key of the servers; it appears in no log, exception or representation.
        admin_api_key: Key for weights, pauses and aborts; None uses the API key.

    Raises:
        ValueError: A key cannot be sent in a header.
    """
    for key, flag in ((api_key, "--sglang-api-key-env"), (admin_api_key, "--sglang-admin-api-key-env")):
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise ValueError(
                f"the environment variable of {flag} contains characters that cannot be sent; set it again "
                "without spaces and line breaks."
            )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request
    return httpx.AsyncClient(
        auth=Keys(api_key, admin_api_key),
        headers={"Accept-Encoding": "identity"},
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE),
        trust_env=False,
    )


async def worker_urls(router: Server) -> tuple[str, ...]:
    """Returns the URLs of a router's servers; raises ValueError if the router refuses or lists none."""
    try:
        answer = parse(WorkersAnswer, await router.get("/workers", timeout=ROUTER_TIMEOUT))
        urls = tuple(dict.fromkeys(normalized_url(DP_RANK.sub("", worker.url)) for worker in answer.workers))
    except (SGLangError, InvalidAnswer, ValueError) as error:
        problem = str(error) if isinstance(error, SGLangError) else f"{router.url} does not answer as an SGLang router."
        raise ValueError(
            f"the servers of the SGLang router are unknown: {problem} Check --sglang-router-ip and "
            "--sglang-router-port, or name the servers with --sglang-url."
        ) from None
    if not urls:
        raise ValueError(f"the SGLang router at {router.url} has no servers; add some to it.")
    return urls


def _spellings(secret: str) -> set[str]:
    """Spellings of a key in servers' messages."""
    encoded = base64.b64encode(secret.encode()).decode().rstrip("=")
    return {secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe=""), encoded}


async def _read(response: httpx.Response, max_bytes: int) -> bytes:
    """Returns the body of at most `max_bytes`; errors are cut to `ERROR_BYTES`.

    Compressed answers are not read: a compressed megabyte can contain a gigabyte.

    Raises:
        InvalidAnswer: The body is larger or compressed.
    """
    if response.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
        if response.is_success:
            raise InvalidAnswer("it is compressed, but the request accepts no compression")
        return b""
    limit = max_bytes if response.is_success else ERROR_BYTES
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > limit:
            if response.is_success:
                raise InvalidAnswer(f"it is larger than the {limit} bytes that an answer may have")
            break
    return bytes(content[:limit])


def _error_message(body: bytes) -> str:
    """The server's message, in any form that versions of SGLang and routers use."""
    text = body.decode(errors="replace").strip()
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for name in ("error", "message", "detail"):
        if isinstance(message, dict) and message.get(name) is not None:
            message = message[name]
    return message if isinstance(message, str) else quoted(message, ERROR_BYTES)
