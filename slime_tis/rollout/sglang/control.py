"""What is asked of a server around an update of its weights: pause, drop cached keys and values, check, go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from slime_tis.rollout.sglang.server import RequestRefused, Server, ServerError

Result = TypeVar("Result")

CONTROL_TIMEOUT = 60.0
"""Longest wait for a server to pause, flush or go on, in seconds: a batch under way is finished first."""
RELEASE_TIMEOUT = 5.0
"""Longest wait for a server that has failed already, in seconds."""
MISSING = (404, 405)
"""HTTP status of a server that has no such endpoint."""


class UpdateFailed(Exception):
    """A server did not come through an update; the sentence says why."""


async def each(
    servers: Sequence[Server], step: Callable[[Server], Awaitable[None]], reasons: dict[str, str]
) -> list[Server]:
    """Takes a step on all servers at once.

    Args:
      servers: the servers.
      step: what to do with one.
      reasons: URL to the reason of a failure; those that fail now are added.

    Returns:
      the servers that came through.
    """
    outcomes = await asyncio.gather(*(step(server) for server in servers), return_exceptions=True)
    passed = []
    for server, outcome in zip(servers, outcomes, strict=True):
        if isinstance(outcome, (ServerError, RequestRefused, UpdateFailed)):
            reasons[server.url] = server.quoted(str(outcome))
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            passed.append(server)
    return passed


async def pause(server: Server) -> None:
    """Stops generation, sends running requests back to the queue, and forgets keys and values of the old weights."""
    await server.post("/pause_generation", {"mode": "retract"}, timeout=CONTROL_TIMEOUT)
    deadline = asyncio.get_running_loop().time() + CONTROL_TIMEOUT
    wait = 0.05
    while True:
        try:
            await server.post("/flush_cache", {}, timeout=CONTROL_TIMEOUT)
            return
        except RequestRefused:  # a batch under way, or a copy to host memory
            if asyncio.get_running_loop().time() > deadline:
                raise
        await asyncio.sleep(wait)
        wait = min(2 * wait, 1.0)


async def resume(server: Server, version: int) -> None:
    """Lets generation go on, once the server says that it has the weights.

    Raises:
      UpdateFailed: it names another version.
    """
    found = (await server.info()).weight_version
    if found != str(version):
        raise UpdateFailed(f"{server.url} took weights {version} but says that it has {found!r}.")
    await server.post("/continue_generation", {}, timeout=CONTROL_TIMEOUT)


async def release(server: Server, group_name: str | None = None) -> None:
    """Gets a server out of an update that failed, as far as it still answers, and lets it go on.

    What it was answering is aborted, so that no answer mixes weights.
    """
    reachable = await _try_post(server, "/end_weight_update", {})
    if reachable and group_name is not None:
        await leave_group(server, group_name)
    if reachable and await _try_post(server, "/abort_request", {"abort_all": True}):
        await _try_post(server, "/continue_generation", {})


async def leave_group(server: Server, name: str) -> None:
    """Has a server leave an update group, as far as it still answers."""
    await _try_post(server, "/destroy_weights_update_group", {"group_name": name})


async def begin_session(server: Server) -> None:
    """Opens the session that newer servers want around an update; 0.5.9 knows none.

    One that a trainer left open is closed first.
    """
    try:
        await _post_if_known(server, "/begin_weight_update")
    except RequestRefused:
        await _try_post(server, "/end_weight_update", {})
        await _post_if_known(server, "/begin_weight_update")


async def end_session(server: Server) -> None:
    """Closes the session, where the server has such."""
    await _post_if_known(server, "/end_weight_update")


async def together(request: Awaitable[dict], own_part: asyncio.Future[None]) -> None:
    """Waits for a server's answer and for this side's part of the same exchange; the first failure ends the wait.

    Raises:
      UpdateFailed: this side's part failed, or the answer is that the server's did.
    """
    asked = asyncio.ensure_future(request)
    both: set[asyncio.Future] = {asked, own_part}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if not asked.done():  # the server often says better what is wrong
            await asyncio.wait({asked}, timeout=RELEASE_TIMEOUT)
        if asked.done() and (answer := asked.result()).get("success") is False:
            raise UpdateFailed(str(answer.get("message")))
        await own_part
    except RuntimeError as error:
        raise UpdateFailed(f"the connection for weights broke: {str(error).splitlines()[0]}") from error
    finally:
        asked.cancel()
        own_part.cancel()


async def _try_post(server: Server, endpoint: str, body: dict[str, object]) -> bool:
    """Posts where a refusal does no harm; whether the server answers at all."""
    try:
        await server.post(endpoint, body, timeout=RELEASE_TIMEOUT)
    except RequestRefused:
        return True
    except ServerError:
        return False
    return True


async def _post_if_known(server: Server, endpoint: str) -> None:
    try:
        await server.post(endpoint, {}, timeout=CONTROL_TIMEOUT)
    except RequestRefused as error:
        if error.status not in MISSING:
            raise


def in_thread(function: Callable[[], Result]) -> asyncio.Future[Result]:
    """Runs a blocking function in a daemon thread, which does not hold the program up if it never ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(outcome: Result | Exception) -> None:
        if future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def run() -> None:
        try:
            outcome: Result | Exception = function()
        except Exception as error:
            outcome = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True).start()
    return future
