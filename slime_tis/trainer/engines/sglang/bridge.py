"""Connects the ranks of a job with rank 0, and rank 0 with an asyncio loop in a background thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch import Tensor

from slime_tis.trainer.collectives import portable
from slime_tis.trainer.engines.engine import WeightSource
from slime_tis.trainer.engines.tasks import cancel_and_wait, new_loop

Result = TypeVar("Result")

LONGEST_ROLLOUT = timedelta(days=30)
"""Longest wait for rank 0: a rollout may take longer than the default timeout of collectives."""


class RankZero:
    """Makes all ranks return or raise rank 0's outcome, in a gloo group that works from the thread of the weights."""

    def __init__(self) -> None:
        """A collective if there are several ranks."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=LONGEST_ROLLOUT) if several else None
        self.is_self = not several or dist.get_rank() == 0

    def run(self, work: Callable[[WeightSource], Result], source: WeightSource) -> Result:
        """Runs work on rank 0 and returns its result, or raises its error, on all ranks.

        The work is called with a source of weights; when it iterates the source, the other ranks iterate theirs.
        """

        def shared_source() -> Iterable[tuple[str, Tensor]]:
            self._send("weights", None)
            return source()

        if not self.is_self:
            return self._follow(source)  # type: ignore[no-any-return]
        try:
            result = work(shared_source)
        except Exception as error:
            with suppress(RuntimeError):  # other ranks may have failed too
                self._send("error", portable(error))
            raise
        self._send("result", result)
        return result

    def close(self) -> None:
        """Frees the process group; a collective."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _follow(self, source: WeightSource) -> Any:
        """Iterates weights whenever rank 0 does, until rank 0 sends its result."""
        while True:
            received: list[tuple[str, Any]] = [("", None)]
            dist.broadcast_object_list(received, src=0, group=self._group)
            kind, content = received[0]
            if kind == "result":
                return content
            if kind == "error":
                raise content
            for _ in source():
                pass

    def _send(self, kind: str, content: Any) -> None:
        if self._group is not None:
            dist.broadcast_object_list([(kind, content)], src=0, group=self._group)


class LoopThread:
    """An asyncio loop in a daemon thread."""

    def __init__(self, name: str) -> None:
        self._loop, self._ends = new_loop(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
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
