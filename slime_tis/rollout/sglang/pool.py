"""Requests on a run's servers: which server takes one, how many at a time, and what follows when a server fails."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from slime_tis.rollout.engine import RolloutUnavailable
from slime_tis.rollout.sglang.member import Member, Patience
from slime_tis.rollout.sglang.roster import Roster
from slime_tis.rollout.sglang.server import RequestRefused, Server, ServerError
from slime_tis.rollout.sglang.tasks import end

Result = TypeVar("Result")

ELSEWHERE = (401, 403, 404, 405)
"""Refusals of a request that say nothing of the request: another key, or another program at the address."""


class WeightsLost(ServerError):
    """A server answered with other weights than it was given."""


class Pool:
    """Runs requests on the servers that are fit for them, and on another one where the first fails.

    All of it belongs to one asyncio loop. With a router the servers are watched and given weights one by one, and
    requests go to the router.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        router: Server | None = None,
        concurrency: int = 64,
        max_retries: int = 5,
        patience: Patience | None = None,
        on_return: Callable[[Server], None] | None = None,
    ) -> None:
        """Asks nothing yet.

        Args:
          servers: that hold weights.
          router: that requests go to instead, or None.
          concurrency: most requests in flight for each server.
          max_retries: times that one request is tried again.
          patience: how long to wait.
          on_return: called with a server that answers again without the present weights.
        """
        self._patience = patience or Patience()
        self._roster = Roster(
            servers,
            router,
            self._patience,
            on_change=lambda: self._wake(everyone=True),
            on_return=on_return or (lambda server: None),
        )
        self._concurrency, self._max_retries = concurrency, max_retries
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._retries = 0

    @property
    def version(self) -> int:
        """Of the weights that servers must have to be asked."""
        return self._roster.version

    @property
    def longest_input(self) -> int | None:
        """Most tokens that all servers take, where they tell."""
        return min((m.longest_input for m in self._roster.members.values() if m.longest_input), default=None)

    async def start(self, timeout: float) -> None:
        """Waits until all servers answer, or some of them after `timeout` seconds, and goes on watching them.

        Raises:
          RolloutUnavailable: none answers.
          RequestRefused: the key is wrong, or something else than an SGLang server answers.
        """
        await self._roster.start(timeout)

    async def close(self) -> None:
        """Stops watching the servers; requests must have ended."""
        await self._roster.close()

    async def run(self, request: Callable[[Server], Awaitable[Result]]) -> Result:
        """Runs a request on the least busy server, and on another one if that fails.

        Args:
          request: called once or several times, never before the last call has ended or is cancelled.

        Raises:
          RolloutUnavailable: it failed too often, or no server is left.
          Exception: what the request raises, other than a ServerError.
        """
        avoided: Member | None = None
        failures = 0
        while True:
            member = await self._take(avoided)
            try:
                result = await _attempt(member, request)
                member.answered = True
                return result
            except (ServerError, RequestRefused) as error:
                if isinstance(error, RequestRefused) and error.status not in ELSEWHERE:
                    raise
                self._note_failure(member, error)
                failures += 1
                if failures > self._max_retries:
                    raise RolloutUnavailable(
                        f"a request failed {failures} time{'s' * (failures > 1)}, at last so: {error} Look into the "
                        "servers' output, and resume with --load."
                    ) from None
            finally:
                member.in_flight -= 1
                self._wake()
            avoided = member
            self._retries += 1
            await asyncio.sleep(self._wait(failures))

    def version_of(self, server: Server) -> int:
        """The weights that a request to this server begins with; for a router, those that its servers must have."""
        member = self._roster.members.get(server)
        return self.version if member is None else member.version

    def takes_seeds(self, server: Server) -> bool:
        """Whether a request to this server may name a seed; of a router, whether one of its servers takes them."""
        return (
            server.takes_seeds if server in self._roster.members else any(m.takes_seeds for m in self._roster.members)
        )

    def check_versions(self, server: Server, first: int, versions: Iterable[int]) -> None:
        """Looks whether an answer comes from weights that its server was given.

        Args:
          server: that answered.
          first: `version_of` it when it was asked.
          versions: of the tokens.

        Raises:
          WeightsLost: it does not; the server was started anew, say.
        """
        last = max(self._roster.newest, self.version_of(server))
        for version in versions:
            if not first <= version <= last:
                raise WeightsLost(f"{server.url} answered with weights {version}, but it was given {first}.")

    def live_servers(self) -> list[Server]:
        """Those that may be asked."""
        return [member.server for member in self._roster.fit()]

    def reachable_servers(self) -> list[Server]:
        """Those that new weights can be given to."""
        return [member.server for member in self._roster.members.values() if member.state != "dead"]

    def returned_servers(self) -> list[Server]:
        """Those that answer, and serve as soon as they have the present weights."""
        return [member.server for member in self._roster.members.values() if member.state == "returned"]

    def updating(self, version: int) -> AbstractAsyncContextManager[None]:
        """While weights are on their way to all servers; no request is started meanwhile."""
        return self._roster.updating(version)

    def expect(self, version: int) -> None:
        """Takes note that a server may answer with these weights from now on."""
        self._roster.expect(version)

    def require(self, version: int) -> None:
        """From now on only servers with these weights, or newer ones, are asked."""
        self._roster.version = version

    def mark_current(self, server: Server, version: int) -> None:
        """Takes note that a server has these weights: it serves from now on."""
        self._roster.mark_current(server, version)

    def take_out(self, server: Server, reason: str) -> None:
        """Takes note that a server failed to take weights: it serves no more until it has."""
        self._roster.take_out(server, reason)

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and the servers that may be asked now."""
        roster = self._roster
        return {
            "retries": self._retries,
            "deaths": roster.deaths,
            "returns": roster.returns,
            "live_servers": len(roster.fit()),
            "malformed_responses": sum(member.server.malformed_responses for member in roster.everyone),
        }

    def _note_failure(self, member: Member, error: ServerError | RequestRefused) -> None:
        if isinstance(error, WeightsLost):
            self._roster.weights_lost(member, str(error))
        else:
            self._roster.suspect(member, str(error))

    def _wait(self, failures: int) -> float:
        longest = min(self._patience.first_wait * 2 ** (failures - 1), self._patience.longest_wait)
        return longest * random.uniform(0.5, 1.0)

    async def _take(self, avoided: Member | None) -> Member:
        """Waits for a server with room; first come, first served."""
        turn = not self._someone_waits()
        came_back = False
        while True:
            if self._roster.lost is not None:
                raise RolloutUnavailable(str(self._roster.lost))
            member = self._best(avoided) if turn else None
            if member is not None:
                member.in_flight += 1
                return member
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            (self._waiting.appendleft if came_back else self._waiting.append)(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():
                    self._wake()  # the turn was given to this request: it goes to the next
                raise
            turn = came_back = True

    def _someone_waits(self) -> bool:
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        return bool(self._waiting)

    def _wake(self, everyone: bool = False) -> None:
        while self._someone_waits():
            self._waiting.popleft().set_result(None)
            if not everyone:
                return

    def _best(self, avoided: Member | None) -> Member | None:
        """The least busy server with room; the one that failed last only where there is no other."""
        if not self._roster.idle.is_set():
            return None
        fit = self._roster.fit()
        router = self._roster.router
        if router is not None:
            complete = not self.returned_servers()  # the router would ask those, too
            room = self._concurrency * len(fit)
            return router if router.state == "live" and complete and router.in_flight < room else None
        others = [member for member in fit if member is not avoided] or fit
        with_room = [member for member in others if member.in_flight < self._concurrency]
        return min(with_room, key=lambda member: member.in_flight, default=None)


async def _attempt(member: Member, request: Callable[[Server], Awaitable[Result]]) -> Result:
    """A request that is given up when its server is taken out."""
    asked: asyncio.Future[Result] = asyncio.ensure_future(request(member.server))
    out = asyncio.ensure_future(member.out.wait())
    both: set[asyncio.Future] = {asked, out}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(both)
    if asked.cancelled():
        raise ServerError(f"{member.server.url} was taken out: {member.reason}")
    return asked.result()
