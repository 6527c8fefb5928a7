"""What ends a run before its last rollout: signals, and the failure of another rank.

    SIGINT    Ctrl-C
    SIGTERM   Slurm's and Kubernetes' request to end, and torchrun's to its ranks
    SIGUSR1   Slurm's warning ahead of the time limit (`#SBATCH --signal`)

A thread of its own notices a signal at once, also while the main thread waits in a collective or in a long kernel; the
run obeys it at the next safe point, saves and ends with status 128 + the signal's number. A second signal ends the
process there and then, and so does the first while the run starts up and has nothing to lose. Several ranks share what
they notice through the key-value store that they met at, so that a signal to one of them is a signal to all.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
REPEATED = 0.5
"""Launchers pass a signal on to processes that may have received it already: within so many seconds of the first it is
the same signal, not a second one."""
POLL = 0.5
"""Time between two looks at what other ranks report, in seconds."""
GRACE = 15.0
"""Time that a rank has to notice by itself that another one failed before its process is ended, in seconds."""
NOTE_WAIT = 3.0
"""Longest wait for the message of a rank whose connection has closed, in seconds."""


class Interrupted(Exception):
    """A signal asks the run to stop; raised at safe points only. `name` is the signal's."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    @property
    def status(self) -> int:
        """Exit status of a process that ends on this signal."""
        return 128 + signal.Signals[self.name]


@dataclass(frozen=True)
class Failure:
    """The first failure of the job."""

    rank: int
    message: str


class Interrupts:
    """Notices signals from `with` to its end. One object per process, made by the main thread.

    It begins with the start-up, during which a signal ends the process; `started` ends that.
    """

    number = 0
    """The signal that asks the run to stop, on this or on another rank; 0 for none."""

    def __init__(self) -> None:
        self._starting, self._abandonable = True, False
        self._since = 0.0
        self._store: dist.Store | None = None
        self._rank = 0
        self._pipe = (-1, -1)
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        """Takes the signals over; where another thread than the main one asks, they stay as they are."""
        global _active
        if threading.current_thread() is not threading.main_thread():
            return self
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        threading.Thread(target=self._watch, args=(self._pipe[0],), name="signals", daemon=True).start()
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and background jobs of a shell have it
                self._previous[number] = signal.signal(number, _leave_to_the_thread)
        _active = self
        return self

    def __exit__(self, *error: object) -> None:
        """Gives the signals back."""
        global _active
        if self._pipe == (-1, -1):
            return
        self._restore()
        _active = None
        os.close(self._pipe[1])  # which ends the thread

    def _restore(self) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def started(self) -> None:
        """From here on a signal waits for a safe point."""
        self._starting = False

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Within, `check` raises: what goes on may be given up, since a resumed run does it again."""
        self._abandonable = True
        try:
            yield
        finally:
            self._abandonable = False

    def keep(self) -> None:
        """Ends `abandonable` early: an optimizer step was made, and giving up the rollout would lose it."""
        self._abandonable = False

    def check(self) -> None:
        """A safe point of this rank alone, where the caller takes care that the others learn of it.

        Raises:
            Interrupted: a signal asks the run to stop, and what goes on may be given up.
        """
        if self.number and self._abandonable:
            raise Interrupted(signal.Signals(self.number).name)

    def share(self, store: dist.Store | None, rank: int) -> None:
        """Shares signals and failures with the other ranks, through a connection that nothing else uses."""
        self._store, self._rank = store, rank

    def report_failure(self, message: str) -> Failure:
        """Reports this rank's failure to the others; returns the first failure of the job, this one or another."""
        mine = Failure(self._rank, message)
        if self._store is not None:
            with suppress(RuntimeError):  # the store may be what has gone
                found = self._store.compare_set("failure", "", json.dumps([mine.rank, mine.message]))
                return Failure(*json.loads(found))
        return mine

    def failure_elsewhere(self, wait: float = NOTE_WAIT) -> Failure | None:
        """The failure of another rank, waiting a little for it to be reported; None where there is no report."""
        deadline = time.monotonic() + wait
        while self._store is not None:
            with suppress(RuntimeError):
                if self._store.check(["failure"]):
                    found = Failure(*json.loads(self._store.get("failure")))
                    return found if found.rank != self._rank else None
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        return None

    def _watch(self, pipe: int) -> None:
        """The thread: signals of this process, then what other ranks report."""
        doomed = float("inf")
        while True:
            ready, _, _ = select.select([pipe], [], [], POLL)
            if ready:
                received = os.read(pipe, 1)
                if not received:
                    break
                if received[0] in SIGNALS:
                    self._receive(received[0])
            elif self._store is not None:
                doomed = min(doomed, self._look_at_others())
            if time.monotonic() > doomed:
                self._end_after_failure()
        os.close(pipe)

    def _receive(self, number: int) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if self._starting:
            _write(f"{name}: the run ends before training began; nothing was saved.")
            end_process(128 + number)
        if self.number == 0:
            self.number, self._since = number, now
            if self._store is not None:
                with suppress(RuntimeError):
                    if self._store.check(["failure"]):
                        return  # the launcher ends the other ranks of a run that has failed
                    self._store.set("signal", str(number))
            if self._rank == 0:
                _write(f"{name}: the run saves and stops; a second signal ends it at once.")
        elif now - self._since > REPEATED:
            _write(f"{name}: the run ends at once.")
            end_process(128 + number)

    def _look_at_others(self) -> float:
        """Takes over a signal of another rank; returns when this process has to end since another one failed."""
        assert self._store is not None
        try:
            if self.number == 0 and self._store.check(["signal"]):
                self.number, self._since = int(self._store.get("signal")), time.monotonic()
            if self._store.check(["failure"]) and self.failure_elsewhere(0.0) is not None:
                return time.monotonic() + GRACE
        except RuntimeError:  # the store went with the rank or the launcher that held it
            self._store = None
        return float("inf")

    def _end_after_failure(self) -> None:
        failure = self.failure_elsewhere(0.0)
        if failure is not None:
            _write(stops_because(self._rank, failure))
            end_process(1)


def stops_because(rank: int, failure: Failure | None) -> str:
    """The message of a rank that has to stop because of another one."""
    if failure is None:
        return f"rank {rank} stops because another rank ended without a message: it was killed, or its machine is lost."
    return f"rank {rank} stops because rank {failure.rank} failed: {failure.message}"


def end_process(status: int) -> None:
    """Ends this process and all that it started, without any further word."""
    import psutil  # only here: nothing else of a run without SGLang needs it

    with suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    os._exit(status)


def _leave_to_the_thread(number: int, frame: FrameType | None) -> None:
    """A handler that is there so that the signal has no other effect than its number in the pipe."""


def _write(message: str) -> None:
    """One line to stderr in one write, beside whatever the main thread is printing."""
    with suppress(OSError, ValueError):
        sys.stderr.write(message + "\n")
        sys.stderr.flush()


_active: Interrupts | None = None


def _forget_in_child() -> None:
    """A forked child has neither the thread nor a part in what its parent notices."""
    global _active
    if _active is not None:
        _active._restore()
        _active = None


os.register_at_fork(after_in_child=_forget_in_child)
