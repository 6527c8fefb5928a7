"""Waiting for asyncio tasks, and ending them for certain.

`asyncio.wait_for` of Python before 3.12 loses a cancellation that comes in the same moment as the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

Result = TypeVar("Result")

AGAIN = 0.5
"""Time after which a task that swallowed a cancellation gets another one, in seconds."""


async def within(timeout: float | None, work: Awaitable[Result]) -> Result:
    """The result of work, which is cancelled when time is up or when the caller is.

    Raises:
      TimeoutError: it is not done after `timeout` seconds; None waits for ever.
    """
    task: asyncio.Future[Result] = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        await end([task])


async def end(tasks: Iterable[asyncio.Future]) -> None:
    """Cancels tasks and waits until they have ended, however they did."""
    everyone = list(tasks)
    pending = {task for task in everyone if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN)
    await asyncio.gather(*everyone, return_exceptions=True)
