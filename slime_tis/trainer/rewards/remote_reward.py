"""Rewards from a server: `--rm-type remote_rm` posts every response to `--rm-url`, as slime does.

POST URL  {"prompt": …, "response": …, "label": …}  →  a number, or an object of numbers, as JSON
"""

import asyncio
import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from slime_tis.errors import one_line, quoted
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.engines.event_loops import results_of, run
from slime_tis.trainer.engines.plain_body import PLAIN, read_plain
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 65_536
"""Longest body of an answer that is read."""
FIRST_PAUSE = 1.0
"""Seconds before a request is repeated the first time; each pause is twice the last."""
MAX_PAUSE = 30.0
"""Longest pause before jitter, in seconds."""
BUSY = (408, 425, 429)
"""Statuses below 500 after which a request is repeated."""


class Busy(Exception):
    """The server asked for a later request."""


@dataclass(frozen=True, kw_only=True)
class RewardServer:
    """The server of --rm-url, which scores responses."""

    url: str
    config: RolloutConfig
    backoff: float = FIRST_PAUSE

    def ask(
        self,
        requests: Sequence[dict[str, Any]],
        check_interrupts: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Returns the server's JSON answer to each request.

        Raises:
            RolloutUnavailable: The server failed after all retries, or its answer is not JSON.
        """
        return run(self._ask_all(requests, check_interrupts))

    async def _ask_all(
        self, requests: Sequence[dict[str, Any]], check_interrupts: Callable[[], None]
    ) -> list[Any]:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request
        concurrency = self.config.rm_concurrency
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        turns = asyncio.Semaphore(concurrency)
        # No timeout here: httpx bounds each read, and `_answer` bounds the complete request.
        async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:

            async def answer(request: dict[str, Any]) -> Any:
                async with turns:
                    return await self._answer(client, request)

            return await results_of(map(answer, requests), check_interrupts)

    async def _answer(self, client: httpx.AsyncClient, request: dict[str, Any]) -> Any:
        """Returns the answer to a request, which is repeated if the server is busy or fails."""
        timeout = self.config.rm_timeout
        max_retries = self.config.rm_max_retries
        for attempt in range(max_retries + 1):
            try:
                async with asyncio.timeout(timeout):
                    return await self._attempt(client, request)
            except TimeoutError:
                reason = f"no answer within {timeout:g} s"
            except (Busy, httpx.TransportError) as error:
                reason = f"{type(error).__name__}: {error}"
            if attempt < max_retries:
                pause = min(self.backoff * 2**attempt, MAX_PAUSE)
                # Random, so that the requests of a rollout do not return all at once. Not from the
                # seeded generator, whose numbers a run must reproduce.
                pause *= 1 + random.SystemRandom().random()
                logger.info("the reward server %s: %s; again in %.1f s.", self.url, reason, pause)
                await asyncio.sleep(pause)
        raise RolloutUnavailable(
            f"the reward server {self.url} (--rm-url) failed {max_retries + 1} times in a row, the"
            f" last time with {one_line(reason, 300)}."
        )

    async def _attempt(self, client: httpx.AsyncClient, request: dict[str, Any]) -> Any:
        """Returns the JSON answer to one request; raises Busy if a later request may succeed."""
        body = b""
        problem = ""
        # Streamed, because a wrong URL may answer with a file of any size.
        async with client.stream("POST", self.url, json=request, headers=PLAIN) as response:
            if response.status_code >= 500 or response.status_code in BUSY:
                raise Busy(f"HTTP status {response.status_code}")
            try:
                body = await read_plain(response, MAX_ANSWER_BYTES)
            except httpx.DecodingError:
                problem = (
                    f"answered with Content-Encoding {response.headers['Content-Encoding'][:80]!r}"
                )
        if response.status_code != 200:
            problem = f"answered with HTTP status {response.status_code}"
        elif not problem and len(body) > MAX_ANSWER_BYTES:
            problem = f"answered with more than {MAX_ANSWER_BYTES} bytes"
        elif not problem:
            try:
                return json.loads(body.decode())
            except (ValueError, RecursionError):
                problem = "gave an answer that is not JSON"
        raise RolloutUnavailable(
            f"the reward server {self.url} (--rm-url) {problem}: {quoted(body[:200])}; it must"
            " answer with a number, or an object of numbers, as JSON without compression."
        )
