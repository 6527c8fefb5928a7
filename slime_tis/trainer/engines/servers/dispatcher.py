"""The assignment of requests to servers, and their retries."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from slime_tis.trainer.configs.servers import ServerConfig
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.servers.errors import RequestError, RequestRefused, ServerError
from slime_tis.trainer.engines.servers.health import HealthMonitor, ServerState

SERVER_REFUSALS = (401, 403, 404, 405)
"""Refusals that concern the server: another key, or another program at its address."""


class Dispatcher:
    """Assigns servers to requests in order of arrival; with a router, requests go to the router."""

    def __init__(self, health: HealthMonitor, config: ServerConfig) -> None:
        """Assigns nothing yet."""
        self.retries = 0
        self.health = health
        self._concurrency = config.concurrency
        self._max_retries = config.max_retries
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def server(self, failed_on: list[ServerState]) -> AsyncIterator[ServerState]:
        """The least busy server, for one request; after a failure another one if possible.

        A failure of the server within the block adds it to `failed_on`, the servers of consecutive
        failures, and ends the block silently, after a wait: the caller retries. Raises
        RolloutUnavailable if the request failed too often, or no server is left.
        """
        state = await self._free_server(failed_on)
        scope = asyncio.timeout(None)
        failure: RequestError | None = None
        try:
            async with scope:
                # No other task runs between the choice and this line, so the server still has room.
                state.requests.add(scope)
                yield state
        except TimeoutError:
            failure = ServerError(f"{state.server.url} was marked down: {state.reason}")
        except RequestError as error:
            failure = error
        finally:
            state.requests.discard(scope)
            self.health.changed.set()
        if failure is None:
            state.answered = True
            failed_on.clear()
        elif isinstance(failure, RequestRefused) and failure.status not in SERVER_REFUSALS:
            raise failure
        else:
            await self._note_failure(state, failure, failed_on)

    async def _note_failure(
        self, state: ServerState, failure: RequestError, failed_on: list[ServerState]
    ) -> None:
        """Reports the failure to the monitor, and waits before the retry."""
        self.health.note_failure(state, failure)
        failed_on.append(state)
        if len(failed_on) > self._max_retries:
            raise RolloutUnavailable(
                f"a request failed {len(failed_on)} times; the last failure: {failure} Read the"
                " servers' logs, and resume with --load."
            )
        self.retries += 1
        timeouts = self.health.timeouts
        longest = min(timeouts.first_retry * 2 ** (len(failed_on) - 1), timeouts.max_retry)
        # Random, so that the requests of a failed server do not return at the same moment.
        await asyncio.sleep(longest * random.uniform(0.5, 1.0))

    async def _free_server(self, failed_on: Sequence[ServerState]) -> ServerState:
        """Waits for a server with room for one more request; the lock keeps requests in order."""
        health = self.health
        async with self._turn:
            while True:
                if health.loss is not None:
                    raise RolloutUnavailable(health.loss)
                state = None
                if health.not_updating.is_set():
                    state = self._router() if health.router else self._least_busy(failed_on)
                if state is not None:
                    return state
                health.changed.clear()
                await health.changed.wait()

    def _router(self) -> ServerState | None:
        """The router, unless its servers are busy or one of them lacks the current weights."""
        router = self.health.router
        assert router is not None
        # The router would also use servers with other weights.
        if router.state != "live" or self.health.needing_weights():
            return None
        room = self._concurrency * len(self.health.available())
        return router if len(router.requests) < room else None

    def _least_busy(self, failed_on: Sequence[ServerState]) -> ServerState | None:
        """The least busy server; the last failed one only if there is no other."""
        servers = self.health.available()
        others = [state for state in servers if state not in failed_on[-1:]]
        if others:
            servers = others
        free = [state for state in servers if len(state.requests) < self._concurrency]
        return min(free, key=lambda state: len(state.requests), default=None)
