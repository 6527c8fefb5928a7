"""The health of every server, and the assignment of requests to servers.

    down           → live           it answers and has the current weights
    down           → needs_weights  it answers without the current weights
    needs_weights  → live           it took the weights
    live           → probing        a request failed
    probing        → live, down     it is healthy; its health check failed, too
    live           → needs_weights  it answered with other weights
    live           → down           MAX_FAILED_HEALTH_CHECKS in a row
    any            → down           it failed to take weights

All servers begin as down. Only live servers get requests. When a server is marked down, its
requests move to other servers.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from slime_tis.trainer.configs.sglang import SGLangConfig
from slime_tis.trainer.engines.event_loops import BackgroundTasks, cancel_and_wait
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.sglang.client import (
    RequestRefused,
    Server,
    ServerError,
    SGLangError,
    UnexpectedWeights,
)
from slime_tis.trainer.engines.sglang.schema import ServerInfo, version_number
from slime_tis.trainer.engines.sglang.weights.protocol import release

logger = logging.getLogger(__name__)

MAX_FAILED_HEALTH_CHECKS = 3
"""Consecutive failed health checks until a live server is marked down; a long prefill may delay one
check."""
SERVER_REFUSALS = (401, 403, 404, 405)
"""Refusals that concern the server: another key, or another program at its address."""
MAX_FAILED_UPDATES = 3
"""Consecutive failed weight updates until a server is no longer expected back."""


class Timeouts(NamedTuple):
    """Waits for servers, in seconds."""

    recovery: float = 120.0
    first_retry: float = 0.5
    max_retry: float = 30.0
    health_interval: float = 5.0


@dataclass(eq=False)
class ServerState:
    """The state of a server."""

    server: Server
    index: int = -1
    """Number of the server; -1 for a router."""
    state: Literal["live", "probing", "down", "needs_weights"] = "down"
    info: ServerInfo = field(default_factory=ServerInfo)
    """The server's latest description; empty before its first answer."""
    version: int = -1
    """Version of the weights; -1 if unknown."""
    version_known: bool = True
    """Whether the reported version is reliable; False after a failed update."""
    reason: str = "it has not answered yet"
    since: float = field(default_factory=time.time)
    in_flight: int = 0
    answered: bool = False
    """Whether a request succeeded since the last health check."""
    seen: bool = False
    failed_health_checks: int = 0
    failed_updates: int = 0
    was_down: bool = False
    """Whether the server was marked down since it was last live; its return is logged and
    counted."""
    requests: set[asyncio.Timeout] = field(default_factory=set)
    """Scopes of the requests in flight; they end when the server is marked down."""


class HealthMonitor:
    """Watches servers. It belongs to one asyncio loop."""

    def __init__(
        self,
        servers: Sequence[Server],
        router: Server | None,
        timeouts: Timeouts,
        on_return: Callable[[Server], None],
    ) -> None:
        """Begins with all servers down; calls `on_return` with a server that returns without the current weights."""
        self.states = {
            server: ServerState(server, index=index) for index, server in enumerate(servers)
        }
        self.router = None if router is None else ServerState(router)
        self.timeouts, self._on_return = timeouts, on_return
        self.on_change: Callable[[], None] = lambda: None
        """Called when a server becomes available, or no server is left."""
        self.version = 0
        """Minimum version of available servers' weights."""
        self.newest_version = 0
        """Newest version that servers may have during an update."""
        self.unavailable: RolloutUnavailable | None = None
        """Set while no server is left or expected back."""
        self.deaths = self.returns = 0
        self._misses_experts = False
        self.not_updating = asyncio.Event()
        """Cleared during weight updates."""
        self.not_updating.set()
        self._updates = 0
        self._all_down_since: float | None = None
        self._tasks = BackgroundTasks()

    async def start(self, timeout: float) -> None:
        """Waits until all servers answer, or after `timeout` seconds at least one, and starts watching them."""
        states = [*self.states.values(), *([self.router] if self.router else [])]
        searches = [asyncio.create_task(self._find(state)) for state in states]
        try:
            done, _ = await asyncio.wait(
                searches, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION
            )
            for search in done:
                search.result()
        finally:
            await cancel_and_wait(searches)
        missing = [state for state in states if state.state == "down"]
        if len(missing) == len(states) or self.router in missing:
            raise RolloutUnavailable(_message(f"answered within {timeout:g} s", missing))
        for state in missing:
            logger.warning("SGLang server %s does not answer: %s", state.server.url, state.reason)
        for state in states:
            self._tasks.start(self._watch(state))
        self._tasks.start(self._watch_for_loss())

    async def close(self) -> None:
        """Stops watching."""
        await self._tasks.cancel()

    def available(self) -> list[ServerState]:
        """Servers with the current weights that may get requests."""
        return [s for s in self.states.values() if s.state == "live" and s.version >= self.version]

    def needing_weights(self) -> list[Server]:
        """Servers that answer but lack the current weights."""
        return [s.server for s in self.states.values() if s.state == "needs_weights"]

    def reachable(self) -> list[Server]:
        """Servers that can receive new weights."""
        return [s.server for s in self.states.values() if s.state != "down"]

    def version_of(self, state: ServerState) -> int:
        """The version that a request begins with; for a router, the version that its servers must have."""
        return self.version if state is self.router else state.version

    def takes_seeds(self, state: ServerState) -> bool:
        """Whether requests may have seeds; for a router, whether any of its servers uses them."""
        states = self.states.values() if state is self.router else [state]
        return any(each.info.enable_deterministic_inference is True for each in states)

    def check_versions(self, state: ServerState, first: int, versions: Iterable[int]) -> None:
        """Raises UnexpectedWeights if an answer has other versions than `first`, of its start, to the newest."""
        last = max(self.newest_version, self.version_of(state))
        for version in set(versions):
            if not first <= version <= last:
                raise UnexpectedWeights(
                    f"{state.server.url} answered with weights {version}, but was given {first}."
                )

    def note_failure(self, state: ServerState, error: SGLangError) -> None:
        """Probes the server of a failed request before it gets further requests."""
        if not isinstance(error, UnexpectedWeights):
            self._probe(state, str(error))
        elif state is self.router:
            self._tasks.start(
                self._find_unexpected_weights()
            )  # a router does not name the server that answered
        else:
            self._mark_without_weights(state, str(error))

    def note_missing_experts(self, server: Server, problem: str) -> None:
        """Warns about the first answer without usable routed experts; metrics count all samples."""
        if not self._misses_experts:
            self._misses_experts = True
            logger.warning(
                "%s Such samples are trained without replay and counted in"
                " train/routing_replay_missing.",
                server.quoted(f"{server.url} returned no experts that can be replayed: {problem}."),
            )

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        """Starts no request and ignores failed health checks during a weight update."""
        self.not_updating.clear()
        self._updates += 1
        self.expect(version)
        try:
            yield
        finally:
            self.not_updating.set()
            self.on_change()

    def expect(self, version: int) -> None:
        """Allows answers from these weights from now on."""
        self.newest_version = max(self.newest_version, version)

    def mark_current(self, server: Server, version: int) -> None:
        """Marks a server as available with these weights."""
        state = self.states[server]
        if state.state != "down":
            state.version, state.version_known, state.failed_updates = version, True, 0
            self._revive(state)

    def mark_down(self, server: Server, reason: str) -> None:
        """Marks a server down that failed to take weights."""
        state = self.states[server]
        state.version_known = False
        state.failed_updates += 1
        self._mark_down(state, reason)

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and the number of available servers."""
        servers = [*self.states, *([self.router.server] if self.router else [])]
        return {
            "deaths": self.deaths,
            "returns": self.returns,
            "live_servers": len(self.available()),
            "malformed_responses": sum(server.malformed_answers for server in servers),
        }

    def _mark_down(self, state: ServerState, reason: str) -> None:
        if state.state == "down":
            return
        logger.warning("SGLang server %s is marked down: %s", state.server.url, reason)
        state.state, state.reason, state.since, state.was_down = "down", reason, time.time(), True
        self.deaths += 1
        now = asyncio.get_running_loop().time()
        for scope in state.requests:
            scope.reschedule(now)
        state.requests.clear()

    def _mark_without_weights(self, state: ServerState, reason: str) -> None:
        if state.state in ("live", "probing"):
            self._mark_down(state, reason)
            self._await_weights(state)

    def _await_weights(self, state: ServerState) -> None:
        state.state, state.version = "needs_weights", -1
        self._on_return(state.server)

    def _revive(self, state: ServerState) -> None:
        state.state, state.failed_health_checks, state.answered = "live", 0, False
        if state.was_down:
            state.was_down = False
            self.returns += 1
            logger.warning(
                "SGLang server %s is back, with weights %d", state.server.url, state.version
            )
        self.on_change()

    def _probe(self, state: ServerState, reason: str) -> None:
        async def probe() -> None:
            error = await self._health_error(state)
            if state.state == "probing" and error is None:
                self._revive(state)
            elif state.state == "probing":
                self._mark_down(state, f"{state.reason} Then its health check failed: {error}")

        if state.state == "live":
            state.state, state.reason = "probing", reason
            self._tasks.start(probe())

    async def _health_error(self, state: ServerState) -> str | None:
        """The server's health error, unless an update paused the server."""
        while True:
            await self.not_updating.wait()
            updates = self._updates
            error = await state.server.health_error()
            if error is None or updates == self._updates:
                return error

    async def _watch(self, state: ServerState) -> None:
        while True:
            await asyncio.sleep(self.timeouts.health_interval)
            if state.state == "down":
                try:
                    await self._look_for(state)
                except RequestRefused as error:
                    state.reason = str(error)
            elif state.state == "live" and not state.answered:
                problem = await self._health_error(state)
                failed = problem is not None and not state.answered
                state.failed_health_checks = state.failed_health_checks + 1 if failed else 0
                if state.state == "live" and state.failed_health_checks >= MAX_FAILED_HEALTH_CHECKS:
                    self._mark_down(
                        state,
                        f"it failed {MAX_FAILED_HEALTH_CHECKS} health checks in a row: {problem}",
                    )
            state.answered = False

    async def _find(self, state: ServerState) -> None:
        await self._look_for(state)
        while state.state == "down":
            await asyncio.sleep(self.timeouts.health_interval)
            await self._look_for(state)

    async def _look_for(self, state: ServerState) -> None:
        """Checks whether a server that is down answers, and with which weights."""
        error, is_router = await state.server.health_error(), state is self.router
        if error is not None and not is_router and self.not_updating.is_set():
            # An update that lost its connection, or whose run was killed, leaves the server paused.
            await release(state.server)
        name = None
        if error is None and not is_router:
            try:
                name = await state.server.weight_version()
                state.info = await state.server.info()
            except ServerError as failure:
                error = str(failure)
        if error is not None:
            state.reason = state.reason if state.seen else error
            return
        # During an update the current version is undefined; another task may also have found the
        # server.
        if not self.not_updating.is_set() or state.state != "down":
            return
        # A run named the version if it is a number; at first contact that was an earlier run.
        version_known = state.version_known and (state.seen or not (name or "").isdecimal())
        state.seen = True
        if is_router or (version_known and version_number(name) == self.version):
            state.version = self.version
            self._revive(state)
        else:
            self._await_weights(state)

    async def _find_unexpected_weights(self) -> None:
        """Marks servers of a router whose weights differ from the ones they were given."""
        for state in self.available():
            version = state.version
            try:
                name = await state.server.weight_version()
            except SGLangError as error:
                self._probe(state, str(error))
                continue
            unexpected = version_number(name) != version == state.version
            if unexpected and state.state == "live" and self.not_updating.is_set():
                reason = state.server.quoted(f"it has weights {name!r}, not the ones it was given.")
                self._mark_without_weights(state, reason)

    async def _watch_for_loss(self) -> None:
        """Sets `unavailable` after `timeouts.recovery` seconds without a server."""
        recovery = self.timeouts.recovery
        while True:
            await asyncio.sleep(min(1.0, recovery / 4))
            is_hopeful = any(
                s.state in ("live", "probing")
                or (s.state == "needs_weights" and s.failed_updates < MAX_FAILED_UPDATES)
                for s in self.states.values()
            )
            if is_hopeful and (self.router is None or self.router.state != "down"):
                self._all_down_since = self.unavailable = None
                continue
            self._all_down_since = self._all_down_since or time.monotonic()
            if self.unavailable is None and time.monotonic() - self._all_down_since >= recovery:
                text = f"is left, and none came back within {recovery:g} s"
                self.unavailable = RolloutUnavailable(_message(text, list(self.states.values())))
                self.on_change()


def _message(text: str, states: Sequence[ServerState]) -> str:
    down = "; ".join(
        f"{state.server.url} since {time.strftime('%H:%M:%S', time.localtime(state.since))} "
        f"({state.reason.rstrip('.')})"
        for state in states
    )
    return f"no SGLang server {text}: {down}. Start servers again, and resume with --load."


class Dispatcher:
    """Assigns servers to requests in order of arrival; with a router, requests go to the router."""

    def __init__(self, health: HealthMonitor, config: SGLangConfig) -> None:
        """Assigns nothing yet."""
        self.retries = 0
        self.health, self._concurrency, self._max_retries = (
            health,
            config.sglang_concurrency,
            config.sglang_max_retries,
        )
        self._turn, self._changed = asyncio.Lock(), asyncio.Event()
        health.on_change = self._changed.set

    @asynccontextmanager
    async def server(self, failed_on: list[ServerState]) -> AsyncIterator[ServerState]:
        """The least busy server, for one request; after a failure another one if possible.

        A failure of the server within the block adds it to `failed_on`, the servers of consecutive
        failures, and ends the block silently, after a wait: the caller retries. Raises
        RolloutUnavailable if the request failed too often, or no server is left.
        """
        state, scope = await self._acquire(failed_on), asyncio.timeout(None)
        try:
            try:
                async with scope:
                    state.requests.add(scope)
                    yield state
            except TimeoutError:
                raise ServerError(f"{state.server.url} was marked down: {state.reason}") from None
            finally:
                state.requests.discard(scope)
                state.in_flight -= 1
                self._changed.set()
        except SGLangError as error:
            if isinstance(error, RequestRefused) and error.status not in SERVER_REFUSALS:
                raise
            self.health.note_failure(state, error)
            failed_on.append(state)
            if len(failed_on) > self._max_retries:
                raise RolloutUnavailable(
                    f"a request failed {len(failed_on)} times; the last failure: {error} Read the"
                    " servers' logs, and resume with --load."
                ) from None
            self.retries += 1
            timeouts = self.health.timeouts
            longest = min(timeouts.first_retry * 2 ** (len(failed_on) - 1), timeouts.max_retry)
            await asyncio.sleep(longest * random.uniform(0.5, 1.0))
        else:
            state.answered = True
            failed_on.clear()

    async def _acquire(self, failed_on: Sequence[ServerState]) -> ServerState:
        """Waits for a server with room for one more request; the lock keeps the requests in order."""
        async with self._turn:
            while True:
                if self.health.unavailable is not None:
                    raise RolloutUnavailable(str(self.health.unavailable))
                state = self._least_busy(failed_on)
                if state is not None:
                    state.in_flight += 1
                    return state
                self._changed.clear()
                await self._changed.wait()

    def _least_busy(self, failed_on: Sequence[ServerState]) -> ServerState | None:
        """The least busy server; the last failed one only if there is no other."""
        health, available = self.health, self.health.available()
        if not health.not_updating.is_set():
            return None
        if (router := health.router) is not None:
            complete = not health.needing_weights()  # the router would use those too
            free = router.in_flight < self._concurrency * len(available)
            return router if router.state == "live" and complete and free else None
        others = [state for state in available if state not in failed_on[-1:]] or available
        free_servers = [state for state in others if state.in_flight < self._concurrency]
        return min(free_servers, key=lambda state: state.in_flight, default=None)
