"""Signals and failures of other ranks, which end a run before its last rollout.

    SIGINT    Ctrl-C
    SIGTERM   Slurm's and Kubernetes' request to end, and torchrun's to its ranks
    SIGUSR1   Slurm's warning ahead of the time limit (`#SBATCH --signal`)

A thread receives signals, because the main thread may wait in a collective or a kernel. At the next
check the run saves and ends with status 128 + the signal's number. A second signal, or a signal
during start-up, ends the process immediately. Ranks share signals and failures through
torch.distributed's key-value store.
"""

import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple, Self, TypeVar

from torch import distributed as dist

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
REPEAT_WINDOW = 0.5
"""A signal that is repeated within this number of seconds counts once: launchers forward signals to
processes that have received them."""
POLL_INTERVAL = 0.5
"""Seconds between two reads of other ranks' reports."""
FAILURE_TIMEOUT = 15.0
"""After another rank fails, seconds until a rank ends its process."""
MESSAGE_TIMEOUT = 3.0
"""Longest wait for the message of a rank whose connection has closed, seconds."""
STORE_POLL_INTERVAL = 0.05
"""Seconds between two reads of the store while waiting for that message."""


class Interrupted(Exception):
    """A signal asks the run to stop; raised only by `Interrupts.check`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
        self.status = 128 + signal.Signals[name]


class Failure(NamedTuple):
    """The first failure of the job."""

    rank: int
    message: str


class Interrupts:
    """Receives signals within its `with` block.

    A process has one object. Until `started`, a signal ends the process.
    """

    number = 0
    """The signal that this or another rank received, or 0."""

    def __init__(self) -> None:
        self._starting = True
        self._abandonable = False
        self._since = 0.0
        """When the signal arrived, in seconds of the monotonic clock."""
        self._store: dist.Store | None = None
        self._rank = 0
        self._pipe = (-1, -1)
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        global _active
        # Python lets only the main thread set handlers.
        if threading.current_thread() is not threading.main_thread():
            return self
        self._pipe = os.pipe()
        # set_wakeup_fd refuses a pipe whose writes may block.
        os.set_blocking(self._pipe[1], False)
        thread = threading.Thread(
            target=self._watch, args=(self._pipe[0],), name="signals", daemon=True
        )
        thread.start()
        # Python writes each signal's number to the pipe, also while the main thread is in C code.
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in SIGNALS:
            # nohup, and a shell for background jobs, make a process ignore signals.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, _leave_to_the_thread)
        _active = self
        return self

    def __exit__(self, *error: object) -> None:
        global _active
        if self._pipe == (-1, -1):
            return
        self._restore()
        _active = None
        os.close(self._pipe[1])  # which ends the thread

    def _restore(self) -> None:
        """Sets the handlers that the process had before."""
        # First: a signal in between must not write to a pipe that is about to close.
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def started(self) -> None:
        """Ends the start-up: signals now wait for `check`."""
        self._starting = False

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Inside the block `check` may raise, because a resumed run repeats the abandoned work."""
        self._abandonable = True
        try:
            yield
        finally:
            self._abandonable = False

    def keep(self) -> None:
        """Ends `abandonable` early, after an optimizer step."""
        self._abandonable = False

    def check(self) -> None:
        """Raises Interrupted if a signal arrived and this rank may abandon its work.

        The caller must inform the other ranks.
        """
        if self.number and self._abandonable:
            raise Interrupted(signal.Signals(self.number).name)

    def share(self, store: dist.Store | None, rank: int) -> None:
        """Shares signals and failures with the other ranks through a dedicated connection."""
        self._store = store
        self._rank = rank

    def report_failure(self, message: str) -> Failure:
        """Reports this rank's failure to the other ranks; returns the first failure of the job."""
        failure = Failure(self._rank, message)
        store = self._store
        if store is None:
            return failure

        def report() -> Failure:
            """Stores the failure if the store has none, and returns the stored one."""
            stored = store.compare_set("failure", "", json.dumps(failure))
            return Failure(*json.loads(stored))

        return _answer_in_time(report) or failure

    def failure_elsewhere(self) -> Failure | None:
        """Returns another rank's failure, or None if the store does not report one in time."""
        return _answer_in_time(lambda: self._find_failure(MESSAGE_TIMEOUT))

    def _find_failure(self, wait: float) -> Failure | None:
        """Reads another rank's failure from the store, for up to `wait` seconds."""
        deadline = time.monotonic() + wait
        while self._store is not None:
            with suppress(RuntimeError):
                if self._store.check(["failure"]):
                    failure = Failure(*json.loads(self._store.get("failure")))
                    if failure.rank == self._rank:
                        return None
                    return failure
            if time.monotonic() >= deadline:
                break
            time.sleep(STORE_POLL_INTERVAL)
        return None

    def _watch(self, pipe: int) -> None:
        """Reads signals from the pipe and other ranks' reports from the store, until `__exit__`."""
        deadline = math.inf
        while True:
            ready, _, _ = select.select([pipe], [], [], POLL_INTERVAL)
            if ready:
                received = os.read(pipe, 1)
                if not received:
                    break
                if received[0] in SIGNALS:
                    self._receive(received[0])
            elif self._store is not None:
                deadline = min(deadline, self._look_at_others())
            if time.monotonic() > deadline:
                failure = self._find_failure(0.0)
                if failure is not None:
                    end_process(1, stops_because(self._rank, failure))
        os.close(pipe)

    def _receive(self, number: int) -> None:
        """Stores a signal for `check`, or ends the process."""
        now = time.monotonic()
        name = signal.Signals(number).name
        if self._starting:
            end_process(
                128 + number, f"{name}: the run ends before training began; nothing was saved."
            )
        if self.number == 0:
            self.number = number
            self._since = now
            if self._store is not None:
                with suppress(RuntimeError):
                    # A launcher sends the signal to the other ranks of a failed run.
                    if self._store.check(["failure"]):
                        return
                    self._store.set("signal", str(number))
            if self._rank == 0:
                _write(f"{name}: the run saves and stops; a second signal ends it at once.")
        elif now - self._since > REPEAT_WINDOW:
            end_process(128 + number, f"{name}: the run ends at once.")

    def _look_at_others(self) -> float:
        """Receives a signal from another rank, and looks for a failure.

        Returns:
            When this process must end because another rank failed, in seconds of the monotonic
            clock; infinite without a failure.
        """
        assert self._store is not None
        try:
            if self.number == 0 and self._store.check(["signal"]):
                self.number = int(self._store.get("signal"))
                self._since = time.monotonic()
            if self._store.check(["failure"]) and self._find_failure(0.0) is not None:
                return time.monotonic() + FAILURE_TIMEOUT
        except RuntimeError:  # the process that hosts the store has ended
            self._store = None
        return math.inf


def _answer_in_time(ask: Callable[[], T]) -> T | None:
    """Asks the store in another thread.

    Returns:
        The answer; None if the store is lost, or its host does not answer in time.
    """
    answers: list[T] = []

    def question() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=question, daemon=True)
    thread.start()
    thread.join(MESSAGE_TIMEOUT + 1)
    if not answers:
        return None
    return answers[0]


def stops_because(rank: int, failure: Failure | None) -> str:
    """Returns the message of a rank that stops because of another rank."""
    if failure is None:
        return (
            f"rank {rank} stops because another rank ended without a message: it was killed, or its"
            " machine is lost."
        )
    return f"rank {rank} stops because rank {failure.rank} failed: {failure.message}"


def end_process(status: int, message: str = "") -> None:
    """Kills all child processes and ends this process."""
    import psutil  # only needed here in runs without SGLang

    if message:
        _write(message)
    # Servers and their workers would otherwise go on and occupy their GPUs.
    with suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    # Not sys.exit, which would only end the thread that calls it.
    os._exit(status)


def _leave_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Does nothing: the thread reads the signal's number from the pipe.

    Without a handler, the signal would end the process.
    """


def _write(message: str) -> None:
    """Writes to stderr, even if its reader has gone."""
    with suppress(OSError, ValueError):
        sys.stderr.write(message + "\n")
        sys.stderr.flush()


_active: Interrupts | None = None


def _forget_in_child() -> None:
    """Restores the handlers in a forked child, which does not have the thread."""
    global _active
    if _active is not None:
        _active._restore()
        _active = None


os.register_at_fork(after_in_child=_forget_in_child)
