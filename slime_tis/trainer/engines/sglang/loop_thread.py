"""An asyncio loop in a background thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from slime_tis.trainer.engines.tasks import cancel_and_wait, new_loop

Result = TypeVar("Result")


class LoopThread:
    """An asyncio loop in a daemon thread."""

    def __init__(self, name: str) -> None:
        self._loop, self._ends = new_loop(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> LoopThread:
        """Starts the thread."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Cancels the tasks that still run, waits for their end, and ends the thread."""

        async def end_tasks() -> None:
            await cancel_and_wait(asyncio.all_tasks())

        self.run(end_tasks())
        self._ends = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if not asyncio.all_tasks(self._loop):  # else threads that hang report to it when they end
            self._loop.close()

    def _run(self) -> None:
        while not self._ends:  # a user's function may stop the loop
            self._loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Starts work, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs work and waits for it; an interrupt of the wait cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
