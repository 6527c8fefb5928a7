"""An asyncio loop in a thread of its own, for a program that is not asynchronous itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from slime_tis.rollout.sglang.tasks import end

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines while the caller does something else."""

    def __init__(self, name: str) -> None:
        """Starts the thread, which does not keep the program from ending."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Starts work, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs work and waits for it; an interrupt of the wait ends it."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancels what still runs, waits for it to end, and ends the thread."""
        if self._loop.is_closed():
            return
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


async def _cancel_others() -> None:
    await end(asyncio.all_tasks() - {asyncio.current_task()})
