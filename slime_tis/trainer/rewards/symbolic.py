"""Equality of expressions by math-verify, in a separate process.

sympy may work forever on a few letters (`10^{10^{10}}`), and Python cannot stop it. The process has
limits on its memory and on the processor time of a comparison; the operating system ends a
comparison that exceeds a limit. It then counts as unequal. Processor time does not depend on load.

A policy may learn to write such answers, thousands in a rollout. Therefore the limit of a
comparison falls with the time that a rollout's comparisons have lost, `comparison_budget`. It stays
above what ordinary answers take.
"""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)

SECONDS = 2.0
"""Processor time of one comparison. Of 1,700 ordinary pairs the slowest took 0.2 s, the median
0.007 s."""
LIMITS = ((10.0, SECONDS), (20.0, 0.5))
"""Seconds that a rollout's unfinished comparisons may take together, and the limit of one
comparison until then."""
LAST_SECONDS = 0.1
"""Limit of one comparison after that. 99 % of ordinary pairs take less."""
MAX_CHARACTERS = 300
"""Longest expression that is compared; the longest answer of the MATH data set has 159
characters."""
MAX_DEPTH = 25
"""Brackets within brackets of an expression that is compared."""
MEMORY = 4 << 30
"""Address space of the process, in bytes."""
REPLY_TIMEOUT = 120.0
"""Longest wait for an answer, in seconds of wall time."""
WORKER = Path(__file__).with_name("symbolic_worker.py")

Question = tuple[str, str, bool]
"""Two expressions, and whether the first one must be a number."""


class Unfinished(Exception):
    """A comparison that ended at a limit.

    It is an exception, so that the cache of results does not keep it.
    """


@dataclass
class Budget:
    """The unfinished comparisons of a rollout and their cost."""

    lost: float = 0.0
    """Processor time of unfinished comparisons, in seconds."""
    unfinished: dict[Question, None] = field(default_factory=dict)
    """Questions without an answer, in order; a repeated one costs nothing."""

    @property
    def seconds(self) -> float:
        """The processor time that the next comparison may take, in seconds."""
        for lost, seconds in LIMITS:
            if self.lost < lost:
                return seconds
        return LAST_SECONDS

    def warn(self) -> None:
        """Logs how many comparisons did not end, if any."""
        if not self.unfinished:
            return
        answer, expected, _ = next(iter(self.unfinished))
        logger.warning(
            "%d answers count as wrong: comparing the first took more than %g s of processor time,"
            " or too much memory, and all together took %.0f s. The first is %.80r, compared with"
            " %.80r.",
            len(self.unfinished),
            SECONDS,
            self.lost,
            answer,
            expected,
        )


_budget: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def comparison_budget() -> Iterator[None]:
    """Bounds the cost of unfinished comparisons in the `with` block; warns once at its end."""
    budget = Budget()
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)
        budget.warn()


def same_expression(answer: str, expected: str, as_number: bool = False) -> bool:
    """Returns whether math-verify finds two LaTeX expressions equal, within the limits."""
    if not (_is_comparable(answer) and _is_comparable(expected)):
        return False
    budget = _budget.get()
    if budget is None:
        with comparison_budget():
            return same_expression(answer, expected, as_number)
    question = (answer, expected, as_number)
    if question in budget.unfinished:
        return False
    try:
        return _compared(question)
    except Unfinished:
        budget.unfinished[question] = None
        return False


def _is_comparable(text: str) -> bool:
    """Returns whether a text is short and flat enough to be parsed.

    The parser's time grows steeply with the length and with the depth of brackets.
    """
    if len(text) > MAX_CHARACTERS:
        return False
    depth = 0
    for character in text:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if depth > MAX_DEPTH:
            return False
    return True


@lru_cache(maxsize=8192)
def _compared(question: Question) -> bool:
    """Asks the process; raises Unfinished if it gave no answer."""
    # Not an argument: it would become part of the cache's key.
    budget = _budget.get()
    assert budget is not None
    seconds = budget.seconds
    with _lock:
        equal = _worker.ask(question, seconds)
    if equal is None:
        budget.lost += seconds
        raise Unfinished
    return equal


class _Worker:
    """The process; started for the first comparison, and again if it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, question: Question, seconds: float) -> bool | None:
        """Returns whether two expressions are equal, or None if the comparison did not end."""
        # A forked child inherits its parent's pipes and must not use them.
        if self._process is None or self._owner != os.getpid():
            self._start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([*question, seconds]).encode() + b"\n")
            self._process.stdin.flush()
            reply = self._reply()
        except BrokenPipeError:
            reply = b""
        except BaseException:  # interrupted: the pending reply does not answer the next question
            self._stop()
            raise
        if reply in (b"0", b"1"):
            return reply == b"1"
        if reply != b"t":  # the process has ended, or does not answer
            self._stop()
        return None

    def _start(self) -> None:
        self._owner = os.getpid()
        # -I ignores PYTHONPATH and the script's directory; the process gets this one's path.
        arguments = [sys.executable, "-I", str(WORKER), json.dumps(sys.path), str(MEMORY)]
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C is for the run; the process ends with its standard input.
            start_new_session=True,
        )
        if self._reply() != b"r":
            self._stop()
            raise ValueError(
                "math-verify does not start; install it with: pip install 'slime_tis[train]'."
            )

    def _reply(self) -> bytes:
        """Returns one byte from the process; no byte after its end or after REPLY_TIMEOUT."""
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        ready, _, _ = select.select([descriptor], [], [], REPLY_TIMEOUT)
        if not ready:
            return b""
        return os.read(descriptor, 1)

    def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        # First, so that an interrupt below cannot leave a dead process in use.
        self._process = None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group: the process and its child
        process.communicate()  # waits for the end, and closes the pipes


_worker = _Worker()
_lock = threading.Lock()
