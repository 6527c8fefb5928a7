"""The health of each server: which servers may get requests, and which need weights.

    down           → live           it answers and has the current weights
    down           → needs_weights  it answers without the current weights
    needs_weights  → live           it took the weights
    live           → probing        a request failed
    probing        → live, down     it is healthy; its health check failed, too
    live           → needs_weights  it answered with other weights
    live           → down           MAX_FAILED_HEALTH_CHECKS in a row
    any            → down           it failed to take weights

All servers begin as down. Only live servers get requests. When a server is marked down, its
requests move to other servers (see `dispatcher.py`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from slime_tis.trainer.engines.event_loops import BackgroundTasks, cancel_and_wait
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.servers.answers import is_named_by_run
from slime_tis.trainer.engines.servers.api import NOT_SENT, ServerInfo
from slime_tis.trainer.engines.servers.client import Server
from slime_tis.trainer.engines.servers.errors import (
    RequestError,
    RequestRefused,
    ServerError,
    ServerPaused,
    UnexpectedWeights,
)

logger = logging.getLogger(__name__)

MAX_FAILED_HEALTH_CHECKS = 3
"""Consecutive failed health checks until a live server is marked down; a long prefill may delay one
check."""
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
    got_weights: bool = False
    """Whether it ever took weights of this run."""
    reason: str = "it has not answered yet"
    since: float = field(default_factory=time.time)
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
        title: str,
    ) -> None:
        """Begins with all servers down; calls `on_return` for servers without current weights.

        `title` is the name of the engine in messages.
        """
        self._title = title
        self.states: dict[Server, ServerState] = {}
        for index, server in enumerate(servers):
            self.states[server] = ServerState(server, index=index)
        self.router = None if router is None else ServerState(router)
        self.timeouts = timeouts
        self._on_return = on_return
        self.changed = asyncio.Event()
        """Set when a server may be free for a request, or no server is left."""
        self.version = 0
        """Minimum version of available servers' weights."""
        self.newest_version = 0
        """Newest version that servers may have during an update."""
        self.loss: str | None = None
        """Message for RolloutUnavailable, while no server is left or expected back."""
        self.deaths = 0
        self.returns = 0
        self._has_sent = False
        """Whether the run has sent weights. It names them by their version."""
        self._misses_experts = False
        self._is_watching = False
        self.not_updating = asyncio.Event()
        """Cleared during weight updates."""
        self.not_updating.set()
        self._updates = 0
        self._tasks = BackgroundTasks()

    async def start(self, timeout: float, *, warns_at_once: bool) -> None:
        """Waits for all servers, or after `timeout` seconds for one, and starts watching them.

        With `warns_at_once`, it warns of servers that do not answer the first request.
        """
        states = list(self.states.values())
        if self.router is not None:
            states.append(self.router)
        searches = [asyncio.create_task(self._find(state, warns_at_once)) for state in states]
        try:
            # A refusal ends the start at once: it does not go away by waiting.
            done, _ = await asyncio.wait(
                searches, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION
            )
            for search in done:
                search.result()
        finally:
            await cancel_and_wait(searches)
        missing = [state for state in states if state.state == "down"]
        if len(missing) == len(states) or self.router in missing:
            loss = self._loss_message(f"answered within {timeout:g} s", missing)
            raise RolloutUnavailable(f"{loss} Start servers, or correct their addresses.")
        for state in missing:
            self._warn("does not answer: %s", state, state.reason)
        for state in states:
            self._tasks.start(self._watch(state))
        self._tasks.start(self._watch_for_loss())
        self._is_watching = True

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
        """The version that a request begins with; for a router, the version of all its servers."""
        return self.version if state is self.router else state.version

    def initial_version(self, state: ServerState) -> int:
        """The version of the weights that a server loaded when it started.

        A server that took weights since has others; answers with its first ones show a restart. Of
        a router, all servers must have taken weights.
        """
        states = self.available() if state is self.router else [state]
        return NOT_SENT if all(s.got_weights for s in states) else 0

    def takes_seeds(self, state: ServerState) -> bool:
        """Whether requests may have seeds; for a router, whether at least one server uses seeds."""
        if state is not self.router:
            return state.info.takes_seeds
        return any(s.info.takes_seeds for s in self.states.values())

    def check_versions(self, state: ServerState, first: int, versions: Iterable[int]) -> None:
        """Raises UnexpectedWeights unless all versions are in `first` to `newest_version`.

        `first` is the version at the start of the request; an update may follow during the request.
        """
        for version in set(versions):
            if first <= version <= self.newest_version:
                continue
            answer = f"{state.server.url} answered with"
            if version == NOT_SENT:
                raise UnexpectedWeights(f"{answer} weights that this run did not send.")
            raise UnexpectedWeights(f"{answer} weights {version}, but was given {first}.")

    def note_failure(self, state: ServerState, error: RequestError) -> None:
        """Probes the server of a failed request before it gets further requests."""
        if not isinstance(error, UnexpectedWeights):
            self._probe(state, str(error))
        elif state is self.router:
            # A router does not name the server that answered.
            self._tasks.start(self._find_unexpected_weights())
        else:
            self._mark_without_weights(state, str(error))

    def note_missing_experts(self, server: Server, problem: str) -> None:
        """Warns about the first answer without usable routed experts; metrics count all samples."""
        if self._misses_experts:
            return
        self._misses_experts = True
        logger.warning(
            "%s Such samples are trained without replay and counted in"
            " train/routing_replay_missing.",
            server.quoted(f"{server.url} returned no experts that can be replayed: {problem}."),
        )

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Starts no request and ignores failed health checks during a weight update."""
        self.not_updating.clear()
        self._updates += 1
        try:
            yield
        finally:
            self.not_updating.set()
            self.changed.set()

    def expect(self, version: int) -> None:
        """Allows answers from these weights from now on."""
        self._has_sent = True
        self.newest_version = max(self.newest_version, version)

    def mark_current(self, server: Server, version: int) -> None:
        """Marks a server as available with these weights."""
        state = self.states[server]
        if state.state != "down":  # it may have died since it took them
            state.version = version
            state.version_known = True
            state.got_weights = True
            state.failed_updates = 0
            self._revive(state)

    def mark_down(self, server: Server, reason: str) -> None:
        """Marks a server down that failed to take weights."""
        state = self.states[server]
        state.version_known = False
        state.failed_updates += 1
        self._mark_down(state, reason)

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and the number of available servers."""
        malformed = sum(server.malformed_answers for server in self.states)
        if self.router is not None:
            malformed += self.router.server.malformed_answers
        return {
            "deaths": self.deaths,
            "returns": self.returns,
            "live_servers": len(self.available()),
            "malformed_responses": malformed,
        }

    def _mark_down(self, state: ServerState, reason: str) -> None:
        if state.state == "down":
            return
        self._warn("is marked down: %s", state, reason)
        state.state = "down"
        state.reason = reason
        state.since = time.time()
        state.was_down = True
        self.deaths += 1
        now = asyncio.get_running_loop().time()
        for scope in state.requests:
            scope.reschedule(now)
        # A scope that has expired cannot be rescheduled if the server is marked down again.
        state.requests.clear()

    def _mark_without_weights(self, state: ServerState, reason: str) -> None:
        if state.state in ("live", "probing"):
            self._mark_down(state, reason)
            self._await_weights(state)

    def _warn(self, message: str, state: ServerState, detail: object) -> None:
        logger.warning(f"%s server %s {message}", self._title, state.server.url, detail)

    def _await_weights(self, state: ServerState) -> None:
        state.state = "needs_weights"
        state.version = -1
        self._on_return(state.server)

    def _revive(self, state: ServerState) -> None:
        state.state = "live"
        state.failed_health_checks = 0
        state.answered = False
        if state.was_down:
            state.was_down = False
            self.returns += 1
            self._warn("is back, with weights %d", state, state.version)
        self.changed.set()

    def _probe(self, state: ServerState, reason: str) -> None:
        async def probe() -> None:
            error = await self._health_error(state)
            if state.state != "probing":  # an update marked it meanwhile
                return
            if error is None:
                self._revive(state)
            else:
                self._mark_down(state, f"{reason} Then its health check failed: {error}")

        if state.state == "live":
            state.state = "probing"
            state.reason = reason
            self._tasks.start(probe())

    async def _health_error(self, state: ServerState) -> RequestError | None:
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
                await self._check_health(state)
            state.answered = False

    async def _check_health(self, state: ServerState) -> None:
        """Marks a live server down after too many failed checks in a row."""
        error = await self._health_error(state)
        if error is None or state.answered:
            state.failed_health_checks = 0
            return
        state.failed_health_checks += 1
        if state.state == "live" and state.failed_health_checks >= MAX_FAILED_HEALTH_CHECKS:
            self._mark_down(
                state, f"it failed {MAX_FAILED_HEALTH_CHECKS} health checks in a row: {error}"
            )

    async def _find(self, state: ServerState, warns_at_once: bool) -> None:
        await self._look_for(state)
        if warns_at_once and state.state == "down":
            # A wrong address would be silent until the startup timeout.
            self._warn("does not answer yet: %s", state, state.reason)
        while state.state == "down":
            await asyncio.sleep(self.timeouts.health_interval)
            await self._look_for(state)

    async def _look_for(self, state: ServerState) -> None:
        """Checks whether a server that is down answers, and with which weights."""
        is_router = state is self.router
        server = state.server
        version_name = None
        error = await server.health_error()
        _raise_refusal(error)
        # An update that lost its connection, or whose run was killed, leaves the server paused.
        is_paused = isinstance(error, ServerPaused)
        if is_paused:
            error = None
        if error is None and not is_router:
            try:
                version_name = await server.call(server.api.weight_version())
                state.info = await _description(server, version_name, is_paused=is_paused)
            except ServerError as failure:
                error = failure
        elif not is_router and self.not_updating.is_set() and server.api.model.adapter is None:
            # It may be paused. Adapters pause nothing: then its weights may be half an update.
            await server.api.release(server)
        if error is not None:
            if not state.seen:  # later, the reason of its death says more
                state.reason = str(error)
            return
        if self._has_problem(state):
            return
        # During an update the current version is undefined; another task may also have found the
        # server.
        if not self.not_updating.is_set() or state.state != "down":
            return
        has_weights = is_router or (
            not is_paused and self._has_current_weights(state, version_name)
        )
        state.seen = True
        if has_weights:
            state.version = self.version
            self._revive(state)
        else:
            self._await_weights(state)

    def _has_current_weights(self, state: ServerState, name: str | None) -> bool:
        """Whether a server that was down has the current weights, by their name."""
        # Adapters do not change the name, and a restarted server has lost its adapter.
        if self._is_watching and state.server.api.model.adapter is not None:
            return False
        # At first contact, a number is the name that an earlier run gave.
        if not state.seen and is_named_by_run(name):
            return False
        return state.version_known and self._is_named(name, self.version)

    def _is_named(self, name: str | None, version: int) -> bool:
        """Whether weights of this name are of a version.

        The weights that a server loads when it starts count as version 0 only before the first
        update. That update is version 0, too, but the server's weights may be random or lack a
        merged adapter.
        """
        if not self._has_sent:
            return not is_named_by_run(name)
        return name == str(version)

    def _has_problem(self, state: ServerState) -> bool:
        """Whether a server that came back must not be used, for example with other log-probs."""
        problem = state.info.problem
        # At the start, the caller refuses the run.
        if problem is None or not self._is_watching:
            return False
        if state.reason != problem:
            self._warn("is not used: it %s", state, problem)
            state.reason = problem
        return True

    async def _find_unexpected_weights(self) -> None:
        """Marks servers of a router whose weights differ from the ones they were given."""
        for state in self.available():
            version = state.version
            try:
                name = await state.server.call(state.server.api.weight_version())
            except RequestError as error:
                self._probe(state, str(error))
                continue
            # An update during the request may have given the server other weights.
            if state.version != version or not self.not_updating.is_set():
                continue
            if not self._is_named(name, version) and state.state == "live":
                reason = state.server.quoted(f"it has weights {name!r}, not the ones it was given.")
                self._mark_without_weights(state, reason)

    async def _watch_for_loss(self) -> None:
        """Sets `loss` after `timeouts.recovery` seconds without a server."""
        recovery = self.timeouts.recovery
        lost_at: float | None = None
        while True:
            await asyncio.sleep(min(1.0, recovery / 4))
            if self._is_hopeful():
                lost_at = None
                self.loss = None
                continue
            now = time.monotonic()
            if lost_at is None:
                lost_at = now
            if self.loss is None and now - lost_at >= recovery:
                text = f"is left, and none came back within {recovery:g} s"
                loss = self._loss_message(text, list(self.states.values()))
                self.loss = f"{loss} Start servers again, and resume with --load."
                self.changed.set()

    def _is_hopeful(self) -> bool:
        """Whether a server serves, or is expected to serve when it has the weights."""
        if self.router is not None and self.router.state == "down":
            return False
        for state in self.states.values():
            if state.state in ("live", "probing"):
                return True
            if state.state == "needs_weights" and state.failed_updates < MAX_FAILED_UPDATES:
                return True
        return False

    def _loss_message(self, text: str, states: Sequence[ServerState]) -> str:
        servers = []
        for state in states:
            since = time.strftime("%H:%M:%S", time.localtime(state.since))
            servers.append(f"{state.server.url} since {since} ({state.reason.rstrip('.')})")
        down = "; ".join(servers)
        return f"no {self._title} server {text}: {down}."


async def _description(server: Server, version_name: str | None, *, is_paused: bool) -> ServerInfo:
    """The server's description; adapters add the problem of weights that a run has changed."""
    info = await server.api.info(server)
    if server.api.model.adapter is None:
        return info
    difference = None
    if is_named_by_run(version_name):
        difference = "has the weights of another run"
    elif is_paused:
        # Updates of adapters pause nothing.
        difference = "is paused, as during an update of its weights by another run"
    if difference is None:
        return info
    problem = (
        f"{difference}, but the LoRA adapter belongs to the weights of the checkpoint; restart the"
        " server, or send merged weights: --rollout-lora merged."
    )
    return replace(info, problem=problem)


def _raise_refusal(error: RequestError | None) -> None:
    """Raises a refusal, by a wrong key or a missing endpoint: waiting does not remove it."""
    if isinstance(error, RequestRefused):
        raise error
