"""The state of every server: who may be asked, who is gone, and who came back.

A server is live, suspect (a request failed, and its health is being asked for), dead (it does not answer), or returned:
it answers, but its weights are not known to be the present ones. Only live servers are asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager

from slime_tis.rollout.engine import RolloutUnavailable
from slime_tis.rollout.sglang.member import Member, Patience
from slime_tis.rollout.sglang.messages import version_number
from slime_tis.rollout.sglang.server import RequestRefused, Server, ServerError
from slime_tis.rollout.sglang.tasks import end

logger = logging.getLogger(__name__)

STRIKES = 3
"""Health checks in a row that a live server fails before it is taken out: a long prefill may delay one."""
LOST_PUSHES = 3
"""Times in a row that a server may fail to take weights before it no longer counts as one that will serve again."""


class Roster:
    """Watches servers. All of it belongs to one asyncio loop."""

    def __init__(
        self,
        servers: Sequence[Server],
        router: Server | None,
        patience: Patience,
        *,
        on_change: Callable[[], None],
        on_return: Callable[[Server], None],
    ) -> None:
        """Starts with all servers dead; `start` looks for them.

        Args:
          servers: that hold weights.
          router: in front of them, or None.
          patience: how long to wait.
          on_change: called when a server may be asked that could not be, or none is left.
          on_return: called with a server that answers again without the present weights.
        """
        self.version = 0
        """Of the weights that servers are to have."""
        self.newest = 0
        """Of the weights that servers may have already, while an update is under way."""
        self.members = {server: Member(server) for server in servers}
        self.router = None if router is None else Member(router, holds_weights=False)
        self.lost: RolloutUnavailable | None = None
        """Set while no server is left and none is expected back."""
        self.deaths = self.returns = 0
        self.idle = asyncio.Event()
        """Cleared while weights are on their way."""
        self.idle.set()
        self._updates = 0
        self._patience, self._on_change, self._on_return = patience, on_change, on_return
        self._dark_since: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def everyone(self) -> list[Member]:
        """The servers, and the router where there is one."""
        return [*self.members.values(), *([self.router] if self.router else [])]

    async def start(self, timeout: float) -> None:
        """Waits until all servers answer, or some of them after `timeout` seconds, and goes on watching them.

        Raises:
          RolloutUnavailable: none answers.
          RequestRefused: the key is wrong, or something else than an SGLang server answers.
        """
        everyone = self.everyone
        looks = [asyncio.ensure_future(self._first_answer(member)) for member in everyone]
        try:
            done, _ = await asyncio.wait(looks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            for look in done:
                look.result()
        finally:
            await end(looks)
        missing = [member for member in everyone if member.state == "dead"]
        if len(missing) == len(everyone) or self.router in missing:
            raise RolloutUnavailable(self._sentence(f"answered within {timeout:g} s", missing))
        for member in missing:
            logger.warning("SGLang server %s does not answer: %s", member.server.url, member.reason)
        for member in everyone:
            self._spawn(self._watch(member))
        self._spawn(self._keep_time())

    async def close(self) -> None:
        """Stops watching."""
        await end(self._tasks)

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        """While weights are on their way to all servers: paused servers fail health checks, which count for nothing."""
        self.idle.clear()
        self._updates += 1
        self.expect(version)
        try:
            yield
        finally:
            self.idle.set()
            self._on_change()

    def expect(self, version: int) -> None:
        """Takes note that answers may come from these weights from now on."""
        self.newest = max(self.newest, version)

    def fit(self) -> list[Member]:
        """Those that have the present weights and may be asked."""
        return [m for m in self.members.values() if m.state == "live" and m.version >= self.version]

    def suspect(self, member: Member, reason: str) -> None:
        """A request failed: its server is not asked any more until it proves to be healthy."""
        if member.state == "live":
            member.state, member.reason = "suspect", reason
            self._spawn(self._examine(member))

    def mark_current(self, server: Server, version: int) -> None:
        """Takes note that a server has these weights: it serves from now on."""
        member = self.members[server]
        if member.state == "dead":
            return
        member.version, member.trusted, member.lost_pushes = version, True, 0
        member.pushes += 1
        self._revive(member)

    def take_out(self, server: Server, reason: str) -> None:
        """Takes note that a server failed to take weights: it serves no more until it has."""
        member = self.members[server]
        member.trusted = False
        member.lost_pushes += 1
        self._die(member, reason)

    def weights_lost(self, member: Member, reason: str) -> None:
        """An answer came from other weights than the server was given."""
        if not member.holds_weights:
            self._spawn(self._find_who_lost_weights())
        elif member.state in ("live", "suspect"):
            self._die(member, reason)
            self._return(member)

    def _die(self, member: Member, reason: str) -> None:
        if member.state == "dead":
            return
        logger.warning("SGLang server %s is taken out: %s", member.server.url, reason)
        member.state, member.reason, member.since = "dead", reason, time.time()
        self.deaths += 1
        member.out.set()

    def _return(self, member: Member) -> None:
        member.state, member.version = "returned", -1
        self._on_return(member.server)

    def _revive(self, member: Member) -> None:
        member.state, member.strikes, member.answered = "live", 0, False
        if member.out.is_set():
            member.out.clear()
            self.returns += 1
            logger.warning("SGLang server %s is back, with weights %d", member.server.url, member.version)
        self._on_change()

    async def _examine(self, member: Member) -> None:
        problem = await self._problem(member)
        if member.state != "suspect":
            return
        if problem is None:
            self._revive(member)
        else:
            self._die(member, f"{member.reason} Then its health check failed: {problem}")

    async def _problem(self, member: Member) -> str | None:
        """What is wrong with a server, other than that it was paused by us."""
        while True:
            await self.idle.wait()
            updates = self._updates
            problem = await member.server.problem()
            if problem is None or updates == self._updates:
                return problem

    async def _watch(self, member: Member) -> None:
        while True:
            await asyncio.sleep(self._patience.probe)
            if member.state == "dead":
                try:
                    await self._look_for(member)
                except RequestRefused as error:
                    member.reason = str(error)
            elif member.state == "live" and not member.answered:
                problem = await self._problem(member)
                if member.state == "live":
                    self._strike(member, problem)
            member.answered = False

    def _strike(self, member: Member, problem: str | None) -> None:
        member.strikes = 0 if problem is None or member.answered else member.strikes + 1
        if member.strikes >= STRIKES:
            self._die(member, f"it failed {STRIKES} health checks in a row: {problem}")

    async def _first_answer(self, member: Member) -> None:
        while True:
            await self._look_for(member)
            if member.state != "dead":
                return
            await asyncio.sleep(self._patience.probe)

    async def _look_for(self, member: Member) -> None:
        """Whether a dead server answers, and with which weights."""
        problem = await member.server.problem()
        if problem is not None:
            member.reason = member.reason if member.seen else problem
            return
        name = None
        if member.holds_weights:
            try:
                info = await member.server.info()
            except ServerError as error:
                member.reason = member.reason if member.seen else str(error)
                return
            name, member.longest_input = info.weight_version, info.longest_input
        if not self.idle.is_set() or member.state != "dead":
            return  # the next look finds which weights are wanted
        # A number is a name that a run gave: at the first sight, an earlier run.
        trusted = member.trusted and (member.seen or not (name or "").isdecimal())
        member.seen = True
        if not member.holds_weights or (trusted and version_number(name) == self.version):
            member.version = self.version
            self._revive(member)
        else:
            self._return(member)

    async def _find_who_lost_weights(self) -> None:
        """A router does not say which of its servers answered."""
        for member in self.fit():
            pushes = member.pushes
            try:
                name = (await member.server.info()).weight_version
            except (ServerError, RequestRefused) as error:
                self.suspect(member, str(error))
                continue
            lost = version_number(name) != member.version and pushes == member.pushes
            if lost and member.state == "live" and self.idle.is_set():
                reason = member.server.quoted(f"it has weights {name!r}, not those it was given.")
                self.weights_lost(member, reason)

    async def _keep_time(self) -> None:
        """Gives up once no server has been left for long enough."""
        while True:
            await asyncio.sleep(min(1.0, self._patience.recovery / 4))
            if self._is_hopeful():
                self._dark_since = self.lost = None
                continue
            self._dark_since = self._dark_since or time.monotonic()
            if self.lost is None and time.monotonic() - self._dark_since >= self._patience.recovery:
                text = f"is left, and none came back within {self._patience.recovery:g} s"
                self.lost = RolloutUnavailable(self._sentence(text, list(self.members.values())))
                self._on_change()

    def _is_hopeful(self) -> bool:
        if self.router is not None and self.router.state == "dead":
            return False
        return any(
            member.state in ("live", "suspect") or (member.state == "returned" and member.lost_pushes < LOST_PUSHES)
            for member in self.members.values()
        )

    def _sentence(self, text: str, members: Sequence[Member]) -> str:
        gone = "; ".join(
            f"{member.server.url} since {time.strftime('%H:%M:%S', time.localtime(member.since))} "
            f"({member.reason.rstrip('.')})"
            for member in members
        )
        return f"no SGLang server {text}: {gone}. Start servers anew, and resume with --load."

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
