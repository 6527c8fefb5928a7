"""Assigns requests to servers, limits their concurrency, and retries after failures."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from slime_tis.trainer.engines.engine import RolloutUnavailable
from slime_tis.trainer.engines.sglang.client import RequestRefused, SGLangError
from slime_tis.trainer.engines.sglang.health import HealthMonitor, ServerState

SERVER_REFUSALS = (401, 403, 404, 405)
"""Refusals that concern the server: another key, or another program at its address."""


@dataclass
class Attempts:
    """Consecutive failures of one request, and the server of the last one."""

    failures: int = 0
    failed_on: ServerState | None = None


class Dispatcher:
    """Assigns servers to requests in order of arrival; with a router, requests go to the router."""

    def __init__(self, health: HealthMonitor, *, concurrency: int = 64, max_retries: int = 5) -> None:
        """Assigns nothing yet; `concurrency` limits requests per server, `max_retries` retries of a request."""
        self.retries = 0
        """Number of retries."""
        self._health, self._concurrency, self._max_retries = health, concurrency, max_retries
        self._waiting: deque[asyncio.Future[None]] = deque()
        health.on_change = self._wake_all

    @asynccontextmanager
    async def server(self, attempts: Attempts) -> AsyncIterator[ServerState]:
        """The least busy server, for one request; after a failure another one if possible.

        A failure of the server within the block is recorded in `attempts` and ends the block silently, after a wait:
        the caller retries. Raises RolloutUnavailable if the request failed too often, or no server is left.
        """
        state = await self._acquire(attempts.failed_on)
        try:
            try:
                async with state.until_down():
                    yield state
            finally:
                state.in_flight -= 1
                self._wake()
        except SGLangError as error:
            if isinstance(error, RequestRefused) and error.status not in SERVER_REFUSALS:
                raise
            self._health.note_failure(state, error)
            attempts.failures, attempts.failed_on = attempts.failures + 1, state
            if attempts.failures > self._max_retries:
                raise RolloutUnavailable(
                    f"a request failed {attempts.failures} times; the last failure: {error} Read the servers' logs, "
                    "and resume with --load."
                ) from None
            self.retries += 1
            timeouts = self._health.timeouts
            longest = min(timeouts.first_retry * 2 ** (attempts.failures - 1), timeouts.max_retry)
            await asyncio.sleep(longest * random.uniform(0.5, 1.0))
        else:
            state.answered = True
            attempts.failures, attempts.failed_on = 0, None

    async def _acquire(self, avoid: ServerState | None) -> ServerState:
        """Waits for a server with room for one more request."""
        is_next = not self._someone_waits()
        woken = False
        while True:
            if self._health.unavailable is not None:
                raise RolloutUnavailable(str(self._health.unavailable))
            state = self._least_busy(avoid) if is_next else None
            if state is not None:
                state.in_flight += 1
                return state
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            (self._waiting.appendleft if woken else self._waiting.append)(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():
                    self._wake()  # pass the turn on to the next request
                raise
            is_next = woken = True

    def _least_busy(self, avoid: ServerState | None) -> ServerState | None:
        """The least busy server; the last failed one only if there is no other."""
        health, available = self._health, self._health.available()
        if not health.not_updating.is_set():
            return None
        if (router := health.router) is not None:
            complete = not health.needing_weights()  # the router would use those too
            free = router.in_flight < self._concurrency * len(available)
            return router if router.state == "live" and complete and free else None
        others = [state for state in available if state is not avoid] or available
        free_servers = [state for state in others if state.in_flight < self._concurrency]
        return min(free_servers, key=lambda state: state.in_flight, default=None)

    def _someone_waits(self) -> bool:
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        return bool(self._waiting)

    def _wake(self) -> None:
        if self._someone_waits():
            self._waiting.popleft().set_result(None)

    def _wake_all(self) -> None:
        while self._someone_waits():
            self._wake()
