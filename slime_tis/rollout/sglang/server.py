"""One SGLang server, or a router, over HTTP: what may be asked of it, and how it may fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import suppress

import httpx

from slime_tis.rollout.sglang.messages import Capabilities, parse_info
from slime_tis.rollout.sglang.tasks import end, within

CONNECT_TIMEOUT = 10.0
"""Longest wait for a connection, in seconds."""
HEALTH_TIMEOUT = 25.0
"""Longest wait for /health, in seconds: it samples a token and gives up by itself after 20."""
ABORT_TIMEOUT = 20.0
"""Longest wait for the answer to an aborted request, in seconds: the batch under way is finished first."""
ABORT_INTERVAL = 0.5
"""Time between two tries to abort a request, in seconds: the server ignores one that it has not read yet."""
LEAVE_TIMEOUT = 5.0
"""Longest wait for a server to take note that a request is to be aborted, in seconds."""
IDLE_TIMEOUT = 2.0
"""Time after which an idle connection is given up, in seconds: servers do so after 5, and a request that is sent
while they do is lost."""
LONGEST_WORDS = 400
"""Characters of a server's own words in a sentence."""
RETRIED_STATUS = (408, 425, 429)
"""Refusals that are none of the request's fault, besides 5xx."""


class ServerError(Exception):
    """A server failed at a request that another one may answer; the sentence says which and how."""


class RequestRefused(ValueError):
    """A server says that the request is wrong, which no other server would mend."""

    def __init__(self, sentence: str, status: int) -> None:
        """Args:
        sentence: which server, what was asked, and the server's words.
        status: of HTTP.
        """
        super().__init__(sentence)
        self.status = status


class _Bearer(httpx.Auth):
    """Puts the API key on requests as they leave, so that it stands nowhere else."""

    def __init__(self, api_key: str) -> None:
        self.api_key = api_key

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = f"Bearer {self.api_key}"
        yield request

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        request.headers["Authorization"] = f"Bearer {self.api_key}"
        yield request


def make_client(api_key: str | None) -> httpx.AsyncClient:
    """The HTTP client of all servers; the pool bounds the requests, and the client does not.

    Args:
      api_key: of the servers; it appears in no log, exception or representation.

    Raises:
      ValueError: a key that cannot stand in a header.
    """
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise ValueError(
            "the API key has characters that cannot be sent; set the variable that --sglang-api-key-env names anew, "
            "without spaces and line ends."
        )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request
    return httpx.AsyncClient(
        auth=None if api_key is None else _Bearer(api_key),
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_TIMEOUT),
        trust_env=False,
    )


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
        self._client, self._timeout = client, timeout
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
          ServerError: it does not answer.
          RequestRefused: the key is wrong, or this is no SGLang server.
        """
        model_info = await self._first_known("/model_info", "/get_model_info")
        server_info = await self._first_known("/server_info", "/get_server_info")
        return parse_info(model_info, server_info)

    async def generate(self, payload: Mapping[str, object]) -> object:
        """The answer to a request as decoded JSON; what is in it is not looked at.

        One that takes too long is aborted, and answered with what has been sampled. When this call is cancelled the
        request is aborted, too.

        Raises:
          ServerError: no answer, or none that is JSON.
          RequestRefused: the server says that the request is wrong.
        """
        request = asyncio.ensure_future(self._ask("POST", "/generate", payload, None))
        request_id = payload.get("rid")
        try:
            await asyncio.wait({request}, timeout=self._timeout)
            if not request.done() and isinstance(request_id, str):
                await self._abort_until_done(request, request_id)
            if not request.done():
                raise ServerError(f"{self.url} did not answer within {self._timeout:g} s.")
            return self._json(request.result())
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
        response = await self._ask("POST", endpoint, body, self._timeout if timeout is None else timeout)
        with suppress(ValueError):
            answer = response.json()
            if isinstance(answer, dict):
                return answer
        return {"message": response.text.strip()} if response.text.strip() else {}

    async def close(self) -> None:
        """Waits for aborts that are under way."""
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _ask(
        self, method: str, endpoint: str, body: Mapping[str, object] | None, timeout: float | None
    ) -> httpx.Response:
        try:
            response = await within(timeout, self._client.request(method, self.url + endpoint, json=body))
        except TimeoutError:
            raise ServerError(f"{self.url}{endpoint} did not answer within {timeout:g} s.") from None
        except (httpx.HTTPError, OSError) as error:  # its request holds the key: the cause is left out
            raise ServerError(f"{self.url}{endpoint} failed: {_reason(error)}.") from None
        status = response.status_code
        if 200 <= status < 300:
            return response
        sentence = f"{self.url}{endpoint} answered HTTP {status}: {self._blotted(_words(response))}"
        if status in (401, 403):
            sentence += "; put its key into the environment variable that --sglang-api-key-env names."
        if 400 <= status < 500 and status not in RETRIED_STATUS:
            raise RequestRefused(sentence, status)
        raise ServerError(sentence)

    async def _first_known(self, *endpoints: str) -> dict[str, object]:
        """The answer of the first endpoint that this version of the server has."""
        for endpoint in endpoints:
            try:
                answer = self._json(await self._ask("GET", endpoint, None, self._timeout))
            except RequestRefused as error:
                if error.status not in (404, 405) or endpoint == endpoints[-1]:
                    raise
            else:
                return answer if isinstance(answer, dict) else {}
        return {}

    def _json(self, response: httpx.Response) -> object:
        try:
            return response.json()
        except ValueError:
            raise ServerError(f"{self.url}{response.url.path} answered what is no JSON.") from None

    def _blotted(self, text: str) -> str:
        auth = self._client.auth
        return text.replace(auth.api_key, "***") if isinstance(auth, _Bearer) else text

    async def _abort_until_done(self, request: asyncio.Future[httpx.Response], request_id: str) -> None:
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


def _words(response: httpx.Response) -> str:
    """The server's own words, in any of the forms that versions of SGLang and routers give them."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(name) is not None:
            body = body[name]
    words = " ".join(str(body).split())
    return words if len(words) <= LONGEST_WORDS else words[:LONGEST_WORDS] + " …"
