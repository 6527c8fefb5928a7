"""One SGLang server, or a router, over HTTP: what may be asked of it, and how it may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

import httpx

from slime_tis.rollout.sglang.client import CONTROL_BYTES, ERROR_BYTES, Answer, UnusableAnswer, fetch, redactor_of
from slime_tis.rollout.sglang.messages import Capabilities, MalformedAnswer, answer_bytes, parse_info, shown
from slime_tis.rollout.sglang.tasks import end, within

HEALTH_TIMEOUT = 25.0
"""Longest wait for /health, in seconds: it samples a token and gives up by itself after 20."""
ABORT_TIMEOUT = 20.0
"""Longest wait for the answer to an aborted request, in seconds: the batch under way is finished first."""
ABORT_INTERVAL = 0.5
"""Time between two tries to abort a request, in seconds: the server ignores one that it has not read yet."""
LEAVE_TIMEOUT = 5.0
"""Longest wait for a server to take note that a request is to be aborted, in seconds."""
RETRIED_STATUS = (408, 425, 429)
"""Refusals that are none of the request's fault, besides 5xx."""


class ServerError(Exception):
    """A server failed at a request that another one may answer; the sentence says which and how."""


class MalformedResponse(ServerError):
    """A server answered, but not what can be used: too much, compressed, no JSON, or contents that cannot be."""


class RequestRefused(ValueError):
    """A server says that the request is wrong, which no other server would mend."""

    def __init__(self, sentence: str, status: int) -> None:
        """Args:
        sentence: which server, what was asked, and the server's words.
        status: of HTTP.
        """
        super().__init__(sentence)
        self.status = status


class Server:
    """One address, and what it is asked."""

    def __init__(
        self,
        url: str,
        client: httpx.AsyncClient,
        *,
        timeout: float,
        behind: Sequence[Server] = (),
        abort_timeout: float = ABORT_TIMEOUT,
        health_timeout: float = HEALTH_TIMEOUT,
    ) -> None:
        """Connects to nothing yet.

        Args:
          url: as http://HOST:PORT.
          client: of `make_client`.
          timeout: longest wait for an answer, in seconds.
          behind: servers that a router at this address hands requests on to; requests are aborted there.
          abort_timeout: longest wait for the answer to an aborted request, in seconds.
          health_timeout: longest wait for /health, in seconds.
        """
        self.url = url
        self.has_spans: bool | None = None
        """Whether its answers tell the weights of every token; None before the first."""
        self.takes_seeds = False
        """Whether it samples with the seed of each request; its own flag decides, which `info` reads."""
        self.malformed_responses = 0
        """Answers so far that could not be used, a count."""
        self._client, self._timeout, self._redactor = client, timeout, redactor_of(client)
        self._abort_timeout, self._health_timeout = abort_timeout, health_timeout
        self._behind = behind
        self._leaving: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    async def health(self) -> bool:
        """Whether it can sample a token; takes a second or more. A server that is paused cannot."""
        return await self.problem() is None

    async def problem(self) -> str | None:
        """What is wrong where `health` is False, in a sentence."""
        try:
            await self._ask("GET", "/health", None, self._health_timeout)
        except (ServerError, RequestRefused) as error:
            return str(error)
        return None

    async def info(self) -> Capabilities:
        """What it says about itself.

        Raises:
          ServerError: it does not answer, or not what could be true.
          RequestRefused: the key is wrong, or this is no SGLang server.
        """
        model_info = await self._first_known("/model_info", "/get_model_info")
        server_info = await self._first_known("/server_info", "/get_server_info")
        try:
            info = parse_info(model_info, server_info)
        except MalformedAnswer as error:
            raise self.malformed("/server_info", str(error)) from None
        self.takes_seeds = info.is_deterministic
        return info

    async def generate(self, payload: Mapping[str, object]) -> object:
        """The answer to a request as decoded JSON; what is in it is not looked at, but its size.

        One that takes too long is aborted, and answered with what has been sampled. When this call is cancelled the
        request is aborted, too.

        Raises:
          ServerError: no answer, none that is JSON, or a larger one than the tokens asked for can make.
          RequestRefused: the server says that the request is wrong.
        """
        request = asyncio.ensure_future(self._ask("POST", "/generate", payload, None, answer_bytes(payload)))
        request_id = payload.get("rid")
        try:
            await asyncio.wait({request}, timeout=self._timeout)
            if not request.done() and isinstance(request_id, str):
                await self._abort_until_done(request, request_id)
            if not request.done():
                raise ServerError(f"{self.url} did not answer within {self._timeout:g} s.")
            return self._json("/generate", request.result())
        finally:
            if not request.done() and isinstance(request_id, str):
                self._leave(request_id)
            await end([request])

    async def abort(self, request_id: str | None) -> None:
        """Asks it to end a request, or with None all of them; they are answered with what has been sampled.

        Raises:
          ServerError: it does not answer.
        """
        body = {"abort_all": True} if request_id is None else {"rid": request_id}
        for server in self._behind or (self,):
            await server._ask("POST", "/abort_request", body, LEAVE_TIMEOUT)

    async def post(
        self, endpoint: str, body: Mapping[str, object], *, timeout: float | None = None
    ) -> dict[str, object]:
        """The answer of any endpoint; text that is no JSON object is {"message": text}.

        Args:
          endpoint: with a slash.
          body: sent as JSON.
          timeout: longest wait, in seconds; None means that of all requests.

        Raises:
          ServerError: no answer, or one of the server's own failure.
          RequestRefused: the server refuses; `status` says how.
        """
        answer = await self._ask("POST", endpoint, body, self._timeout if timeout is None else timeout)
        with suppress(UnusableAnswer):
            content = answer.json()
            if isinstance(content, dict):
                return content
        return {"message": answer.text} if answer.text else {}

    def malformed(self, endpoint: str, words: str) -> MalformedResponse:
        """Counts an answer that cannot be used, and says what is wrong with it."""
        self.malformed_responses += 1
        return MalformedResponse(self.quoted(f"{self.url}{endpoint} gave an answer that cannot be used: {words}."))

    def quoted(self, text: str) -> str:
        """Text that came from this server, for a message: without keys and control characters, and cut."""
        return self._redactor.quoted(text)

    async def close(self) -> None:
        """Waits for aborts that are under way."""
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _ask(
        self,
        method: str,
        endpoint: str,
        body: Mapping[str, object] | None,
        timeout: float | None,
        limit: int = CONTROL_BYTES,
    ) -> Answer:
        try:
            answer = await within(timeout, fetch(self._client, method, self.url + endpoint, body, limit=limit))
        except TimeoutError:
            raise ServerError(f"{self.url}{endpoint} did not answer within {timeout:g} s.") from None
        except UnusableAnswer as error:
            raise self.malformed(endpoint, f"it {error}") from None
        except (httpx.HTTPError, OSError) as error:  # its request holds the key: the cause is left out
            raise ServerError(f"{self.url}{endpoint} failed: {self.quoted(_reason(error))}.") from None
        if answer.is_success:
            return answer
        status = answer.status
        sentence = f"{self.url}{endpoint} answered HTTP {status}: {self.quoted(_words(answer)).rstrip('.')}"
        if status in (401, 403):
            sentence += (
                "; put its key into the environment variable that --sglang-api-key-env names, or an admin key into "
                "that of --sglang-admin-api-key-env"
            )
        sentence += "."
        if 400 <= status < 500 and status not in RETRIED_STATUS:
            raise RequestRefused(sentence, status)
        raise ServerError(sentence)

    async def _first_known(self, *endpoints: str) -> dict[str, object]:
        """The answer of the first endpoint that this version of the server has."""
        for endpoint in endpoints:
            try:
                answer = self._json(endpoint, await self._ask("GET", endpoint, None, self._timeout))
            except RequestRefused as error:
                if error.status not in (404, 405) or endpoint == endpoints[-1]:
                    raise
            else:
                return answer if isinstance(answer, dict) else {}
        return {}

    def _json(self, endpoint: str, answer: Answer) -> object:
        try:
            return answer.json()
        except UnusableAnswer as error:
            raise self.malformed(endpoint, f"it {error}") from None

    async def _abort_until_done(self, request: asyncio.Future[Answer], request_id: str) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._abort_timeout
        while not request.done() and loop.time() < end:
            with suppress(ServerError, RequestRefused):
                await self.abort(request_id)
            await asyncio.wait({request}, timeout=ABORT_INTERVAL)

    def _leave(self, request_id: str) -> None:
        """Aborts a request whose answer nobody reads; the server would find out by itself some seconds later."""

        async def leave() -> None:
            with suppress(ServerError, RequestRefused):
                await self.abort(request_id)

        task = asyncio.ensure_future(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def _reason(error: Exception) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__


def _words(answer: Answer) -> str:
    """The server's own words, in any of the forms that versions of SGLang and routers give them."""
    try:
        body = answer.json()
    except UnusableAnswer:
        body = answer.text
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(name) is not None:
            body = body[name]
    return body if isinstance(body, str) else shown(body, ERROR_BYTES)
