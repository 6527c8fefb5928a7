"""Tasks of an asyncio loop that have to end, whatever they do with a cancellation."""

import asyncio
from collections.abc import Coroutine, Iterable

CANCEL_INTERVAL = 0.5
"""Time after which a task that swallowed a cancellation gets another one, in seconds."""


class BackgroundTasks:
    """Tasks that nobody waits for while they run."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None], name: str | None = None) -> None:
        """Starts a task, and holds it until it has ended: the loop itself has weak references alone."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Waits until all have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def cancel(self) -> None:
        """Cancels all, and waits until they have ended."""
        await cancel_and_wait(self._tasks)


async def cancel_and_wait(tasks: Iterable[asyncio.Task[object]]) -> None:
    """Cancels tasks and waits until they have ended, however they did."""
    all_tasks = list(tasks)
    while pending := [task for task in all_tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_INTERVAL)
    await asyncio.gather(*all_tasks, return_exceptions=True)
