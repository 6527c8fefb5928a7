"""The process that compares expressions.

It is run as a script, and imports math-verify but nothing of this program. Its arguments are the
path of modules and its memory in bytes. It writes `r` when it is ready. An input line is the JSON
list [answer, expected, as_number, seconds of processor time]. A reply is `1`, `0`, or `t` if the
comparison ended at a limit.

A forked child compares. After a limit has ended it, the next child starts in milliseconds, while
the imports take seconds.
"""

import ctypes
import gc
import json
import os
import resource
import signal
import sys
from typing import IO

PR_SET_PDEATHSIG = 1  # linux/prctl.h

WARM_UP = (
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    ("2x^2+3x-1", "3x-1+2x^2"),
    ("[1,2)", "(1,2]"),
    (r"\{1,2\}", r"\{2,3\}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    ("y=2x+1", "y-2x=1"),
    (r"x \le 2", r"2 \ge x"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    (r"\binom{5}{2}", "10"),
    ("1+2i", "2i+1"),
    ("-3-12i", "12 i-3"),
    ("(-1, 2)", r"\left(2,-1\right)"),
    (r"\left[-3, 4\right)", "[-3,5)"),
    (r"\frac{3\pi}{4}", r"\frac{2}{3}\pi"),
    (r"2\pi/3", r"\frac{\pi}{2}"),
    (r"2\sqrt{12}", r"4 \cdot \sqrt{3}"),
    ("2^{10}", r"2\cdot 2^{8}"),
    ("5!", r"5\cdot 3!"),
    (r"5^\circ", "6"),
    (r"x=7 \text{ cm}", "7.5"),
    ("-4x^2-6x+1", "(-4x-6)x+2"),
    ("4x^{0}-7x^{2}+11x^{3}", "-7x^{2}+4x^{0}-10x^{3}"),
    (r"\sin x + e^{x}", r"e^{x}+\cos x"),
)
"""Compared before the first fork: imports and tables that parsers and sympy make when they are
first needed."""


def main() -> None:
    """Answers until its input ends."""
    sys.path[:] = json.loads(sys.argv[1])
    memory = int(sys.argv[2])
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output that a library prints must not be read as a reply
    for answer, expected in WARM_UP:
        same(answer, expected, as_number=False)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the memory that it shares with this process
    replies.write(b"r")
    parent = os.getpid()
    while True:
        child = os.fork()
        if child == 0:
            end_with(parent)
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            # A crash in a C library must not leave a core dump of this size.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            answer_lines(replies)
            # Without exit handlers, which belong to the parent.
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        replies.write(b"t")


def end_with(parent: int) -> None:
    """Has the kernel end this process with its parent, so that it never answers for a later one."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def answer_lines(replies: IO[bytes]) -> None:
    """Answers questions until the input ends or a limit ends this process."""
    # Nobody sends a second question before the reply to the first one: the buffer never holds a
    # line of a later child.
    for line in sys.stdin.buffer:
        answer, expected, as_number, seconds = json.loads(line)
        # The signal has no handler, so it ends this process.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            equal = same(answer, expected, as_number=as_number)
        # Parsers and sympy may raise anything, including RecursionError and MemoryError.
        except Exception:
            equal = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(b"1" if equal else b"0")


def same(answer: str, expected: str, *, as_number: bool) -> bool:
    """Returns whether math-verify finds two LaTeX expressions equal.

    With `as_number`, an answer that is not a number is never equal.
    """
    from math_verify import parse, verify
    from sympy import Eq, Number

    # No timeouts of math-verify: they need signals, and the limits of this process replace them.
    parsed_answer = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    parsed_expected = parse(f"\\boxed{{{expected}}}", parsing_timeout=None)
    if not parsed_answer or not parsed_expected:
        return False
    value = parsed_answer[0]
    if isinstance(value, Eq):  # x = 5
        value = value.rhs
    if as_number and not isinstance(value, Number):
        return False
    return bool(verify(parsed_expected, parsed_answer, timeout_seconds=None))


if __name__ == "__main__":
    main()
