"""Event loops for users' coroutines.

Neither threads that hang nor tasks that swallow a cancellation block them.
"""

import asyncio
import ctypes
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, Self, TypeVar

from slime_tis.errors import CustomFunctionError

CANCEL_INTERVAL = 0.5
"""Seconds between cancellations of a task that swallows them."""
CANCEL_ATTEMPTS = 6
"""Cancellations after which a task is abandoned."""

POLL = 1.0
"""Seconds between two checks for interrupts."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class BackgroundTasks:
    """Tasks that nobody waits for while they run."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None], name: str | None = None) -> None:
        """Starts a task."""
        task = asyncio.create_task(work, name=name)
        # The loop has only weak references: without this one, a task may be deallocated.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Waits until all have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def cancel(self) -> None:
        """Cancels all, and waits until they have ended."""
        await cancel_and_wait(self._tasks)


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks other than this one and waits for their end; abandons tasks that do not end."""
    others = set(tasks) - _abandoned - {asyncio.current_task()}
    for _ in range(CANCEL_ATTEMPTS):
        pending = [task for task in others if not task.done()]
        if not pending:
            break
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_INTERVAL)
    ended = [task for task in others if not is_abandoned(task)]
    # Retrieves their exceptions, which asyncio would log otherwise.
    await asyncio.gather(*ended, return_exceptions=True)


def is_abandoned(task: asyncio.Task[Any]) -> bool:
    """Abandons a task that should have ended; returns whether it had to.

    Nothing waits for an abandoned task, and it is never deallocated. Deallocation raises
    GeneratorExit in its coroutine, and a retry loop with a bare `except` would swallow that
    forever, also when the interpreter exits.
    """
    if not task.done() and task not in _abandoned:
        _abandoned.add(task)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
    return not task.done()


_abandoned: set[asyncio.Task[Any]] = set()


class DaemonThreads(ThreadPoolExecutor):
    """An executor with a daemon thread per call.

    A call that hangs delays neither other calls nor the exit of the program.
    """

    def __init__(self) -> None:
        # asyncio accepts only this class as default executor. Its threads are not used.
        super().__init__()
        self.running: set[Future[Any]] = set()

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Runs a call in a new thread."""
        future: Future[Result] = Future()

        def work() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
            self.running.discard(future)

        future.set_running_or_notify_cancel()
        self.running.add(future)
        threading.Thread(target=work, name="tool", daemon=True).start()
        return future


THREADS = DaemonThreads()


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose `asyncio.to_thread` uses daemon threads."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(THREADS)
    return loop


class LoopThread:
    """An asyncio loop in a daemon thread."""

    def __init__(self, name: str) -> None:
        self._loop = new_loop()
        self._ends = False
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
        # A thread that hangs reports to the loop of its task when it ends, which a closed loop
        # refuses.
        if not asyncio.all_tasks(self._loop):
            self._loop.close()

    def _run(self) -> None:
        # A user's function may stop the loop.
        while not self._ends:
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


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs work in this thread's event loop, and ends the tasks that it leaves behind.

    As in slime, the thread keeps its loop, so users' clients that belong to a loop stay usable.

    Raises:
        CustomFunctionError: A user's function cancelled the work.
    """
    loop: asyncio.AbstractEventLoop | None = getattr(_of_thread, "loop", None)
    if loop is None:
        loop = _of_thread.loop = new_loop()
    task = loop.create_task(work)
    try:
        _run_until_done(loop, task)
        return task.result()
    except asyncio.CancelledError:
        raise CustomFunctionError(CANCELLED) from None
    finally:
        _run_until_done(loop, loop.create_task(cancel_and_wait(asyncio.all_tasks(loop))))


async def results_of(
    works: Iterable[Coroutine[Any, Any, Result]], check: Callable[[], None]
) -> list[Result]:
    """Returns the results of concurrent coroutines, and calls `check` every second meanwhile.

    Raises the first exception of a coroutine or of `check`, which cancels the coroutines.
    """
    results = asyncio.gather(*works)
    try:
        while not results.done():
            await asyncio.wait([results], timeout=POLL)
            check()
        return results.result()
    finally:
        results.cancel()


CANCELLED = (
    "a user's function cancelled tasks that it did not create; let it cancel only its own tasks."
)
_of_thread = threading.local()


def _run_until_done(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    task.add_done_callback(lambda _: loop.stop())
    # A user's function may stop the loop.
    while not task.done():
        loop.run_forever()
