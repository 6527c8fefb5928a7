"""HTTP with servers that are not trusted: what may be asked of one, and how it may fail.

Answers are bounded in size and never decompressed; keys, whole or in part, appear in no message.
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
    generate_body,
    max_answer_bytes,
    parse,
    parse_generation,
    parse_scores,
    score_body,
)
from slime_tis.trainer.engines.tasks import BackgroundTasks, cancel_and_wait
from slime_tis.trainer.options.sglang import normalized_url

CONNECT_TIMEOUT = 10.0
"""Longest wait for a connection, in seconds."""
KEEPALIVE = 2.0
"""Time after which an idle connection is given up, in seconds: servers do so after 5, and a request that is sent
while they do is lost."""
HEALTH_TIMEOUT = 25.0
"""Longest wait for /health, in seconds: it samples a token and gives up by itself after 20."""
ABORT_TIMEOUT = 20.0
"""Longest wait for the answer to an aborted request, in seconds: the batch under way is finished first."""
ABORT_INTERVAL = 0.5
"""Time between two tries to abort a request, in seconds: the server ignores one that it has not read yet."""
ABORT_REQUEST_TIMEOUT = 5.0
"""Longest wait for a server to take note that a request is to be aborted, in seconds."""
ROUTER_TIMEOUT = 60.0
"""Longest wait for a router to name its servers, in seconds."""
CONTROL_BYTES = 4 << 20
"""Largest answer of any endpoint but /generate, in bytes; /server_info, the largest, has some 100 kB."""
CHECKSUM_BYTES = 64 << 20
"""Largest answer of /weights_checker, in bytes: some 100 for every tensor of every rank."""
ERROR_BYTES = 64 << 10
"""Read of the body of an error, in bytes; the rest is ignored."""
RETRIED_STATUS = (408, 425, 429)
"""Refusals that are not the request's fault, besides 5xx."""
UNKNOWN_ENDPOINT = (404, 405)
"""HTTP status of a server that has no such endpoint."""
USER_ENDPOINTS = (*("/generate", "/health", "/model_info", "/server_info", "/workers"),)
"""Endpoints that SGLang opens to the API key; all others are for the admin key, where a server has one."""
MAX_QUOTE = 400
"""Characters of a server's own message that are quoted."""
MAX_SEARCHED = 8192
"""Characters that are searched for keys; far more than are shown."""
MIN_ECHO = 8
"""Characters of a key in a row that count as an echo of it."""
REDACTED = "***"
DP_RANK = re.compile(r"@\d+$")
"""What a router that knows data-parallel ranks adds to a server's URL."""


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
            client: As `make_client` returns it.
            timeout: Longest wait for an answer, in seconds.
            vocab_size: Number of token ids of the model, which no answer may exceed; None checks none.
            expert_layout: What routed experts in its answers have to be, where the model has experts.
            workers: Servers that a router at this address hands requests on to; requests are aborted there.
            abort_timeout: Longest wait for the answer to an aborted request, in seconds.
            health_timeout: Longest wait for /health, in seconds.
        """
        self.url = url
        self.reports_token_versions: bool | None = None
        """Whether its answers have the weight version of every token; None before the first."""
        self.takes_seeds = False
        """Whether it samples with the seed of each request; its own flag decides, which `info` reads."""
        self.returns_routed_experts = False
        """Whether it returns the experts of each token; its own flag decides, which `info` reads."""
        self.malformed_answers = 0
        """Number of answers so far that could not be used."""
        self._client, self._timeout, self._vocab_size, self._workers = client, timeout, vocab_size, workers
        self._expert_layout = expert_layout
        self.redactor = client.auth.redactor if isinstance(client.auth, Keys) else Redactor(())
        """Of what the server says, for messages."""
        self._abort_timeout, self._health_timeout = abort_timeout, health_timeout
        self._aborts = BackgroundTasks()

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    async def health_error(self) -> str | None:
        """Why the server cannot sample a token, or None where it can; takes a second or more.

        A server that is paused cannot.
        """
        try:
            await self._request("GET", "/health", timeout=self._health_timeout)
        except SGLangError as error:
            return str(error)
        return None

    async def info(self) -> ServerInfo:
        """What it says about itself.

        Raises:
            ServerError: It does not answer, or not what could be true.
            RequestRefused: The key is wrong, or this is another kind of server.
        """
        answer = await self.get("/server_info")
        with self._reading("/server_info"):
            info = parse(ServerInfo, answer)
        self.takes_seeds = info.enable_deterministic_inference is True
        self.returns_routed_experts = info.enable_return_routed_experts is True
        return info

    async def weight_version(self) -> str | None:
        """The name of the weights in use; "default" where they are those it started with.

        Raises:
            SGLangError: As for `info`.
        """
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
        """Samples the rest of a response; the arguments are those of `schema.generate_body`.

        Routed experts come from the token `first_experts` on; None asks for none.

        A request that takes too long is aborted and returns what has been sampled. It is also aborted when this call is
        cancelled.

        Raises:
            ServerError: There is no answer, or one that cannot be used.
            RequestRefused: The server says that the request is wrong.
        """
        # Tokens as likely as the last one of top-k can be in a set, too.
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
            if not request.done():  # the server would find out by itself some seconds later
                self._aborts.start(self.abort(request_id), name=f"abort {request_id}")
            await cancel_and_wait([request])

    async def prompt_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs, at temperature 1, of all tokens but the first.

        Raises:
            SGLangError: As for `generate`.
        """
        body, max_bytes = score_body(token_ids), max_answer_bytes(len(token_ids))
        answer = await self._request("POST", "/generate", body, timeout=self._timeout, max_bytes=max_bytes)
        with self._reading("/generate"):
            return parse_scores(answer, token_ids)

    async def weight_checksums(self) -> dict[str, list[str]]:
        """Checksums of its tensors by name, one per rank that has it.

        Raises:
            ServerError: There is no answer, or one that cannot be used.
            RequestRefused: This version does not give checksums.
        """
        body = {"action": "checksum", "selector": "target"}
        answer = await self._request("POST", "/weights_checker", body, timeout=self._timeout, max_bytes=CHECKSUM_BYTES)
        with self._reading("/weights_checker"):
            found = parse(ChecksumAnswer, answer)
        checksums: dict[str, list[str]] = {}
        for rank in found.ranks:
            for name, checksum in rank.checksums.items():
                checksums.setdefault(name, []).append(checksum)
        return checksums

    async def abort(self, request_id: str) -> None:
        """Asks it to end a request, which is answered with what has been sampled.

        Where that fails, the request itself fails, too, or ends by itself.
        """
        for server in self._workers or (self,):
            with suppress(SGLangError):
                await server.post("/abort_request", {"rid": request_id}, timeout=ABORT_REQUEST_TIMEOUT)

    async def post(self, endpoint: str, body: Mapping[str, object], *, timeout: float | None = None) -> None:
        """Has the server change something.

        Args:
            endpoint: Path of the URL, with its slash.
            body: Sent as JSON.
            timeout: Longest wait, in seconds; None waits as long as for any request.

        Raises:
            ServerError: There is no answer, or the server failed.
            RequestRefused: The server refuses, or answers that it did not succeed (`status` is 200 then).
        """
        answer = await self._request("POST", endpoint, body, timeout=self._timeout if timeout is None else timeout)
        with suppress(InvalidAnswer):  # some endpoints answer text
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
        """Waits for aborts that are under way."""
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
        """The body of a successful answer, of at most `max_bytes`."""
        url, scope = self.url + endpoint, asyncio.timeout(timeout)
        try:
            with self._reading(endpoint):
                async with scope, self._client.stream(method, url, json=body) as response:
                    content = await _read(response, max_bytes)
        except (httpx.HTTPError, OSError) as error:  # its request holds the key: the cause is left out
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
                "; put its key into the environment variable that --sglang-api-key-env names, or an admin key into "
                "that of --sglang-admin-api-key-env"
            )
        if 400 <= status < 500 and status not in RETRIED_STATUS:
            raise RequestRefused(f"{message}.", status)
        raise ServerError(f"{message}.")

    @contextmanager
    def _reading(self, endpoint: str) -> Iterator[None]:
        """Counts an answer that cannot be used, and adds to the message where it came from."""
        try:
            yield
        except InvalidAnswer as error:
            self.malformed_answers += 1
            text = self.redactor.quoted(f"{self.url}{endpoint} gave an answer that cannot be used: {error}.")
            raise MalformedAnswer(text) from None


class Redactor:
    """Replaces keys, and what of them is at least `MIN_ECHO` characters long, by `***`."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """Takes the keys; each is also found as JSON, `repr`, URLs and base64 spell it."""
        found = {spelling for secret in secrets if secret for spelling in _spellings(secret)}
        self._short = sorted((one for one in found if len(one) < MIN_ECHO), key=len, reverse=True)
        self._parts = {one[start : start + MIN_ECHO] for one in found for start in range(len(one) - MIN_ECHO + 1)}

    def __repr__(self) -> str:
        return "Redactor()"

    def redacted(self, text: str) -> str:
        """The text without keys, whole or in part."""
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
        """A server's text on one line, for a message: redacted first, then escaped, then cut."""
        return one_line(self.redacted(text[:MAX_SEARCHED]), length)


class Keys(httpx.Auth):
    """Adds the key of its endpoint to each request as it leaves; the key appears nowhere else."""

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
    """The HTTP client of all servers; the dispatcher bounds the requests, and the client does not.

    Args:
        api_key: Key of the servers; it appears in no log, exception or representation.
        admin_api_key: Key for weights, pauses and aborts, where servers have one; else these go with the API key.

    Raises:
        ValueError: A key that cannot be sent in a header.
    """
    for key, flag in ((api_key, "--sglang-api-key-env"), (admin_api_key, "--sglang-admin-api-key-env")):
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise ValueError(
                f"the environment variable that {flag} names holds characters that cannot be sent; set it again, "
                "without spaces and line ends."
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
    """The URLs of a router's servers, which take weights and control each by itself.

    Raises:
        ValueError: The router does not answer, refuses, or has no servers.
    """
    try:
        answer = parse(WorkersAnswer, await router.get("/workers", timeout=ROUTER_TIMEOUT))
        urls = tuple(dict.fromkeys(normalized_url(DP_RANK.sub("", worker.url)) for worker in answer.workers))
    except (SGLangError, InvalidAnswer, ValueError) as error:
        what = str(error) if isinstance(error, SGLangError) else f"{router.url} does not answer as an SGLang router."
        raise ValueError(
            f"the servers of the SGLang router are not known: {what} Check --sglang-router-ip and "
            "--sglang-router-port, or name the servers with --sglang-url."
        ) from None
    if not urls:
        raise ValueError(f"the SGLang router at {router.url} has no servers; add some to it.")
    return urls


def _spellings(secret: str) -> set[str]:
    """A key as servers may repeat it."""
    encoded = base64.b64encode(secret.encode()).decode().rstrip("=")
    return {secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe=""), encoded}


async def _read(response: httpx.Response, max_bytes: int) -> bytes:
    """The body as it comes, but no more of it than was to be expected; errors are cut to `ERROR_BYTES`.

    Compressed answers are not read at all: none was asked for, and a megabyte of one holds a gigabyte.

    Raises:
        InvalidAnswer: It is larger or compressed.
    """
    if response.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
        if response.is_success:
            raise InvalidAnswer("it is compressed, which was not asked for")
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
    """The server's own message, in any of the forms that versions of SGLang and routers have."""
    text = body.decode(errors="replace").strip()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name) is not None:
            found = found[name]
    return found if isinstance(found, str) else quoted(found, ERROR_BYTES)
