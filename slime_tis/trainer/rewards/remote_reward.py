"""Rewards from a server: `--rm-type remote_rm` posts every response to `--rm-url`, as slime does.

POST URL  {"prompt": …, "response": …, "label": …}  →  a number, or an object of numbers, as JSON
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from slime_tis.errors import first_line, one_line
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.engines.engine import RolloutUnavailable
from slime_tis.trainer.engines.tasks import run
from slime_tis.trainer.options.rollout import RolloutConfig
from slime_tis.trainer.rewards.answers import last_boxed

logger = logging.getLogger(__name__)

LONGEST_ANSWER = 65_536
"""Bytes of an answer."""
LONGEST_PAUSE = 30.0
"""Pause before a request is repeated, in seconds; the first is BACKOFF, and each is twice the one before."""
BACKOFF = 1.0
POLL = 1.0
"""Time between two safe points while answers are awaited, in seconds."""
BUSY = (408, 425, 429)
"""Statuses below 500 after which a request is repeated."""


class _AskAgain(Exception):
    """A request failed in a way that may pass."""


@dataclass(frozen=True, kw_only=True)
class RewardRequest:
    """What the server gets."""

    prompt: str
    response: str
    label: Any

    @classmethod
    def of(cls, sample: Sample, *, boxed: bool) -> RewardRequest:
        r"""The request for a sample; `boxed` sends what the last \boxed{} of the response holds."""
        response = (last_boxed(sample.response) or "") if boxed else sample.response
        return cls(prompt=sample.prompt_text, response=response, label=sample.label)


@dataclass(frozen=True, kw_only=True)
class RewardServer:
    """A server that scores responses."""

    url: str
    timeout: float
    """Of one attempt, in seconds."""
    max_retries: int
    """Further attempts after a request that failed."""
    concurrency: int
    """Requests at a time."""
    backoff: float = BACKOFF
    """First pause, in seconds."""

    @classmethod
    def build(cls, config: RolloutConfig) -> RewardServer:
        """The server of `--rm-url`."""
        assert config.rm_url is not None
        return cls(
            url=config.rm_url,
            timeout=config.rm_timeout,
            max_retries=config.rm_max_retries,
            concurrency=config.rm_concurrency,
        )

    def ask(self, requests: Sequence[RewardRequest], check_interrupts: Callable[[], None] = lambda: None) -> list[Any]:
        """What the server answers to each request, as JSON.

        Args:
            requests: in any number; `concurrency` of them are under way at a time.
            check_interrupts: called while answers are awaited; what it raises ends the scoring.

        Raises:
            RolloutUnavailable: a request failed for good; the others are given up.
        """
        return run(self._ask_all(requests, check_interrupts))

    async def _ask_all(self, requests: Sequence[RewardRequest], check_interrupts: Callable[[], None]) -> list[Any]:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request
        limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        turns = asyncio.Semaphore(self.concurrency)
        async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:

            async def answer(request: RewardRequest) -> Any:
                async with turns:
                    return await self._answer(client, request)

            answers = asyncio.gather(*map(answer, requests))
            try:
                while not answers.done():
                    await asyncio.wait([answers], timeout=POLL)
                    check_interrupts()
                return list(answers.result())
            finally:
                answers.cancel()

    async def _answer(self, client: httpx.AsyncClient, request: RewardRequest) -> Any:
        """The answer to one request, which is repeated where that may help."""
        for attempt in range(self.max_retries + 1):
            try:
                async with asyncio.timeout(self.timeout):
                    return await self._attempt(client, request)
            except (_AskAgain, httpx.TransportError, TimeoutError) as error:
                reason = first_line(error)
                if isinstance(error, TimeoutError):
                    reason = f"no answer within {self.timeout:g} s"
                elif isinstance(error, httpx.TransportError):
                    reason = f"{type(error).__name__}: {reason}"
            if attempt < self.max_retries:
                pause = min(self.backoff * 2**attempt, LONGEST_PAUSE) * (1 + random.SystemRandom().random())
                logger.info("the reward server %s: %s; again in %.1f s.", self.url, reason, pause)
                await asyncio.sleep(pause)
        raise RolloutUnavailable(
            f"the reward server {self.url} (--rm-url) failed {self.max_retries + 1} times in a row, the last time with "
            f"{reason}."
        )

    async def _attempt(self, client: httpx.AsyncClient, request: RewardRequest) -> Any:
        async with client.stream("POST", self.url, json=asdict(request)) as response:
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > LONGEST_ANSWER:
                    break
        if response.status_code >= 500 or response.status_code in BUSY:
            raise _AskAgain(f"HTTP status {response.status_code}")
        if response.status_code != 200:
            raise self._refused(f"answered with HTTP status {response.status_code}: {_shown(body)}")
        if len(body) > LONGEST_ANSWER:
            raise self._refused(f"answered with more than {LONGEST_ANSWER} bytes: {_shown(body)}")
        try:
            return json.loads(body.decode())
        except (ValueError, RecursionError):
            raise self._refused(f"answered with what is not JSON: {_shown(body)}") from None

    def _refused(self, what: str) -> RolloutUnavailable:
        return RolloutUnavailable(
            f"the reward server {self.url} (--rm-url) {what}; it must answer with a number, or an object of numbers, "
            "as JSON."
        )


def _shown(body: bytearray) -> str:
    return one_line(repr(bytes(body[:200]).decode("utf-8", "replace"))) if body else "an empty body"
