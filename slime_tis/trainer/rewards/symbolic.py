"""Equality of expressions by math-verify, in a separate process.

sympy may work forever on a few letters (`10^{10^{10}}`), and Python cannot stop it. The process has limits on its
memory and on the processor time of a comparison; the operating system ends a process that exceeds a limit. The
comparison then counts as unequal, and the next one starts a new process. Processor time does not depend on load.
"""

import json
import logging
import os
import select
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)

SECONDS = 5
"""Processor time of one comparison."""
MEMORY = 4 << 30
"""Address space of the process, in bytes."""
REPLY_TIMEOUT = 120.0
"""Longest wait for an answer, in seconds of wall time."""
WORKER = Path(__file__).with_name("symbolic_worker.py")


@lru_cache(maxsize=8192)
def same_expression(answer: str, expected: str, as_number: bool = False) -> bool:
    """Returns whether math-verify finds two LaTeX expressions equal."""
    with _lock:
        return _worker.ask(answer, expected, as_number)


class _Worker:
    """The process; started for the first comparison, and again after its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, answer: str, expected: str, as_number: bool) -> bool:
        if self._process is None or self._owner != os.getpid():  # a forked child has the pipes of its parent
            self._start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([answer, expected, as_number]).encode() + b"\n")
            self._process.stdin.flush()
            reply = self._reply()
        except BrokenPipeError:
            reply = b""
        except BaseException:  # interrupted: the pending reply does not answer the next question
            self._stop()
            raise
        if reply in (b"0", b"1"):
            return reply == b"1"
        self._stop()
        logger.warning(
            "comparing %.80r with %.80r took more than %d s of processor time, or too much memory; it counts as wrong.",
            answer,
            expected,
            SECONDS,
        )
        return False

    def _start(self) -> None:
        self._owner = os.getpid()
        arguments = [sys.executable, "-I", str(WORKER), json.dumps(sys.path), str(SECONDS), str(MEMORY)]
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run; the process ends with its standard input
        )
        if self._reply() != b"r":
            self._stop()
            raise ValueError("math-verify does not start; install it with: pip install 'slime_tis[train]'.")

    def _reply(self) -> bytes:
        """Returns one byte from the process; none after its end or REPLY_TIMEOUT."""
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        ready, _, _ = select.select([descriptor], [], [], REPLY_TIMEOUT)
        return os.read(descriptor, 1) if ready else b""

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.communicate()  # closes the pipes, too


_worker = _Worker()
_lock = threading.Lock()
