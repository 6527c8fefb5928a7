"""The health of every server: which may be asked, which are down, and which came back without the current weights.

                    answers, has the current weights
      ┌─────────────────────────────────────────────────────┐
      │                                                     ▼
    ┌──────┐ answers, without   ┌───────────────┐ took    ┌──────┐ a request   ┌─────────┐
    │ down │───────────────────►│ needs_weights │────────►│ live │────────────►│ probing │
    └──────┘ the weights        └───────────────┘ them    └──────┘ failed      └─────────┘
      ▲                             │      ▲                │  ▲ is healthy         │
      │ failed to take weights      │      │ other weights  │  └────────────────────┤
      │◄────────────────────────────┘      └────────────────┤                       │
      │ MAX_FAILED_HEALTH_CHECKS in a row, or failed to     │                       │
      │ take weights                                        │                       │
      │◄────────────────────────────────────────────────────┘                       │
      │ its health check failed, too                                                │
      └─────────────────────────────────────────────────────────────────────────────┘

All servers begin as down. Only live ones are asked for responses. What a server is answering when it is marked down is
given up there and asked for elsewhere.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from slime_tis.trainer.engines.engine import RolloutUnavailable
from slime_tis.trainer.engines.sglang.client import Server
from slime_tis.trainer.engines.sglang.errors import RequestRefused, ServerError, SGLangError, UnexpectedWeights
from slime_tis.trainer.engines.sglang.schema import version_number
from slime_tis.trainer.engines.tasks import BackgroundTasks, cancel_and_wait

logger = logging.getLogger(__name__)

MAX_FAILED_HEALTH_CHECKS = 3
"""Health checks in a row that a live server fails before it is marked down: a long prefill may delay one."""
MAX_FAILED_UPDATES = 3
"""Times in a row that a server may fail to take weights before it no longer counts as one that will serve again."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Waits for servers, in seconds."""

    recovery: float = 120.0
    """Longest time without any server until the run gives up."""

    first_retry: float = 0.5
    """Wait before a request is tried again; doubled with every further failure."""

    max_retry: float = 30.0
    """Longest wait before a request is tried again."""

    health_interval: float = 5.0
    """Time between two health checks of a server."""


@dataclass(eq=False)
class ServerState:
    """A server and what is known of it."""

    server: Server
    holds_weights: bool = True
    """False for a router."""
    state: Literal["live", "probing", "down", "needs_weights"] = "down"
    max_input_len: int | None = None
    """Longest input that it takes, in tokens, where it says."""
    sampling_mask_tokens: int | None = None
    """Most tokens of a sampling mask that it reports; None where it reports none."""
    dtype: str | None = None
    """Type in which it holds weights, where it says; None of a server that quantizes them."""
    version: int = -1
    """Version of its weights; -1 where it is not known."""
    version_known: bool = True
    """Whether the version that it names is that of its weights: not after an update that broke off."""
    reason: str = "it has not answered yet"
    """Why it is down or probed."""
    since: float = field(default_factory=time.time)
    """When it was marked down, in seconds since the epoch."""
    in_flight: int = 0
    """Number of requests that it is answering."""
    answered: bool = False
    """Whether it answered a request since the last health check."""
    seen: bool = False
    """Whether it ever answered."""
    failed_health_checks: int = 0
    """Health checks failed in a row."""
    updates: int = 0
    """Number of updates of its weights that it took."""
    failed_updates: int = 0
    """Updates of its weights failed in a row."""
    was_down: bool = False
    """Whether it was marked down since it was last live; its return is logged and counted."""
    requests: set[asyncio.Timeout] = field(default_factory=set)
    """Scopes of the requests that it is answering, which end when it is marked down."""

    @asynccontextmanager
    async def until_down(self) -> AsyncIterator[None]:
        """Ends what is in its block when the server is marked down, with a ServerError."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self.requests.add(scope)
                try:
                    yield
                finally:
                    self.requests.discard(scope)
        except TimeoutError:
            raise ServerError(f"{self.server.url} was marked down: {self.reason}") from None


class HealthMonitor:
    """Watches servers. All of it belongs to one asyncio loop."""

    def __init__(
        self,
        servers: Sequence[Server],
        router: Server | None = None,
        timeouts: Timeouts | None = None,
        *,
        on_return: Callable[[Server], None] = lambda server: None,
    ) -> None:
        """Begins with all servers down; `start` looks for them.

        Args:
            servers: Servers that hold weights.
            router: In front of them, or None.
            timeouts: How long to wait; None is the default.
            on_return: Called with a server that answers again without the current weights.
        """
        self.states = {server: ServerState(server) for server in servers}
        self.router = None if router is None else ServerState(router, holds_weights=False)
        self.timeouts = timeouts or Timeouts()
        self.on_change: Callable[[], None] = lambda: None
        """Called when a server may be asked that could not be, or none is left."""
        self.version = 0
        """Version of the weights that a server must have, or newer ones, to be asked."""
        self.newest_version = 0
        """Newest version that servers may have already, while an update is under way."""
        self.unavailable: RolloutUnavailable | None = None
        """Set while no server is left and none is expected back."""
        self.deaths = self.returns = 0
        self._misses_experts = False
        self.not_updating = asyncio.Event()
        """Cleared while weights are on their way."""
        self.not_updating.set()
        self._updates = 0
        self._on_return = on_return
        self._all_down_since: float | None = None
        self._tasks = BackgroundTasks()

    async def start(self, timeout: float) -> None:
        """Waits until all servers answer, or some of them after `timeout` seconds, and goes on watching them.

        Raises:
            RolloutUnavailable: None answers.
            RequestRefused: The key is wrong, or something else than an SGLang server answers.
        """
        everyone = [*self.states.values(), *([self.router] if self.router else [])]
        searches = [asyncio.create_task(self._find(state)) for state in everyone]
        try:
            done, _ = await asyncio.wait(searches, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            for search in done:
                search.result()
        finally:
            await cancel_and_wait(searches)
        missing = [state for state in everyone if state.state == "down"]
        if len(missing) == len(everyone) or self.router in missing:
            raise RolloutUnavailable(_message(f"answered within {timeout:g} s", missing))
        for state in missing:
            logger.warning("SGLang server %s does not answer: %s", state.server.url, state.reason)
        for state in everyone:
            self._tasks.start(self._watch(state))
        self._tasks.start(self._watch_for_loss())

    async def close(self) -> None:
        """Stops watching."""
        await self._tasks.cancel()

    def available(self) -> list[ServerState]:
        """Those that have the current weights and may be asked."""
        return [s for s in self.states.values() if s.state == "live" and s.version >= self.version]

    def needing_weights(self) -> list[Server]:
        """Those that answer, and serve as soon as they have the current weights."""
        return [s.server for s in self.states.values() if s.state == "needs_weights"]

    def reachable(self) -> list[Server]:
        """Those that new weights can be given to."""
        return [s.server for s in self.states.values() if s.state != "down"]

    def version_of(self, state: ServerState) -> int:
        """The weights that a request begins with; for a router, those that its servers must have."""
        return state.version if state.holds_weights else self.version

    def takes_seeds(self, state: ServerState) -> bool:
        """Whether a request may name a seed; of a router, whether one of its servers takes them."""
        return state.server.takes_seeds if state.holds_weights else any(s.takes_seeds for s in self.states)

    def check_versions(self, state: ServerState, first: int, versions: Iterable[int]) -> None:
        """Checks that an answer comes from weights that its server was given.

        Args:
            state: Of the server that answered.
            first: `version_of` it when it was asked.
            versions: Weight version of each token.

        Raises:
            UnexpectedWeights: It does not; the server was restarted, say.
        """
        last = max(self.newest_version, self.version_of(state))
        for version in versions:
            if not first <= version <= last:
                raise UnexpectedWeights(f"{state.server.url} answered with weights {version}, but was given {first}.")

    def note_failure(self, state: ServerState, error: SGLangError) -> None:
        """A request failed: its server is asked again once it is healthy and has its weights."""
        if not isinstance(error, UnexpectedWeights):
            self._probe(state, str(error))
        elif not state.holds_weights:
            self._tasks.start(self._find_unexpected_weights())  # a router does not say which of its servers answered
        else:
            self._mark_without_weights(state, str(error))

    def note_missing_experts(self, server: Server, problem: str) -> None:
        """An answer had no usable routed experts: the first one is reported, all are counted by their samples."""
        if not self._misses_experts:
            self._misses_experts = True
            reason = server.redactor.quoted(f"{server.url} gave no experts that can be replayed: {problem}.")
            logger.warning(
                "%s Such samples are trained on without replay, and counted in train/routing_replay_missing.", reason
            )

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        """While all servers are given weights: no request is started, and failed health checks do not count."""
        self.not_updating.clear()
        self._updates += 1
        self.expect(version)
        try:
            yield
        finally:
            self.not_updating.set()
            self.on_change()

    def expect(self, version: int) -> None:
        """Answers may come from these weights from now on."""
        self.newest_version = max(self.newest_version, version)

    def mark_current(self, server: Server, version: int) -> None:
        """The server has these weights: it serves from now on."""
        state = self.states[server]
        if state.state == "down":
            return
        state.version, state.version_known, state.failed_updates = version, True, 0
        state.updates += 1
        self._revive(state)

    def mark_down(self, server: Server, reason: str) -> None:
        """The server failed to take weights: it serves no more until it has."""
        state = self.states[server]
        state.version_known = False
        state.failed_updates += 1
        self._mark_down(state, reason)

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and the number of servers that may be asked."""
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
            logger.warning("SGLang server %s is back, with weights %d", state.server.url, state.version)
        self.on_change()

    def _probe(self, state: ServerState, reason: str) -> None:
        async def probe() -> None:
            error = await self._health_error(state)
            if state.state != "probing":
                return
            if error is None:
                self._revive(state)
            else:
                self._mark_down(state, f"{state.reason} Then its health check failed: {error}")

        if state.state == "live":
            state.state, state.reason = "probing", reason
            self._tasks.start(probe())

    async def _health_error(self, state: ServerState) -> str | None:
        """What is wrong with a server, other than that it is paused by an update."""
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
                    self._mark_down(state, f"it failed {MAX_FAILED_HEALTH_CHECKS} health checks in a row: {problem}")
            state.answered = False

    async def _find(self, state: ServerState) -> None:
        while True:
            await self._look_for(state)
            if state.state != "down":
                return
            await asyncio.sleep(self.timeouts.health_interval)

    async def _look_for(self, state: ServerState) -> None:
        """Finds out whether a server that is down answers, and with which weights."""
        error = await state.server.health_error()
        name = None
        if error is None and state.holds_weights:
            try:
                name = await state.server.weight_version()
                info = await state.server.info()
                longest, state.sampling_mask_tokens = info.max_req_input_len, info.sampling_mask_max_tokens
                state.max_input_len = None if longest is None else longest - 1
                state.dtype = info.dtype if info.quantization is None else None
            except ServerError as failure:
                error = str(failure)
        if error is not None:
            state.reason = state.reason if state.seen else error
            return
        # During an update it is not settled which weights are current, and another task may have found the server.
        if not self.not_updating.is_set() or state.state != "down":
            return
        # A name that is a number was given by a run: at the first sight, by an earlier one.
        version_known = state.version_known and (state.seen or not (name or "").isdecimal())
        state.seen = True
        if not state.holds_weights or (version_known and version_number(name) == self.version):
            state.version = self.version
            self._revive(state)
        else:
            self._await_weights(state)

    async def _find_unexpected_weights(self) -> None:
        """Finds the servers of a router that have other weights than they were given."""
        for state in self.available():
            updates = state.updates
            try:
                name = await state.server.weight_version()
            except SGLangError as error:
                self._probe(state, str(error))
                continue
            unexpected = version_number(name) != state.version and updates == state.updates
            if unexpected and state.state == "live" and self.not_updating.is_set():
                reason = state.server.redactor.quoted(f"it has weights {name!r}, not those that it was given.")
                self._mark_without_weights(state, reason)

    async def _watch_for_loss(self) -> None:
        """Gives up once no server has been left for `timeouts.recovery` seconds."""
        recovery = self.timeouts.recovery
        while True:
            await asyncio.sleep(min(1.0, recovery / 4))
            if self._is_hopeful():
                self._all_down_since = self.unavailable = None
                continue
            self._all_down_since = self._all_down_since or time.monotonic()
            if self.unavailable is None and time.monotonic() - self._all_down_since >= recovery:
                text = f"is left, and none came back within {recovery:g} s"
                self.unavailable = RolloutUnavailable(_message(text, list(self.states.values())))
                self.on_change()

    def _is_hopeful(self) -> bool:
        """Whether a server can be asked, or is expected to be soon."""
        if self.router is not None and self.router.state == "down":
            return False
        return any(
            s.state in ("live", "probing") or (s.state == "needs_weights" and s.failed_updates < MAX_FAILED_UPDATES)
            for s in self.states.values()
        )


def _message(text: str, states: Sequence[ServerState]) -> str:
    down = "; ".join(
        f"{state.server.url} since {time.strftime('%H:%M:%S', time.localtime(state.since))} "
        f"({state.reason.rstrip('.')})"
        for state in states
    )
    return f"no SGLang server {text}: {down}. Start servers again, and resume with --load."
