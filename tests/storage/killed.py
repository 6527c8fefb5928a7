"""Ends a process at each of its operations on files in turn, as SIGKILL at that moment does: no
`finally` runs."""

import os
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}
KILLED = 77


def killed_at_each_operation(below: Path, action: Callable[[], object]) -> Iterator[int]:
    """Runs an action in forked processes, the n-th of which ends before its n-th operation on files
    below a directory.

    Yields:
        n, after each process that ended early; nothing after the one that came to the end of the
        action.
    """
    for number in count(1):
        pid = os.fork()
        if pid == 0:
            _end_before(number, str(below))
            status = 1
            try:
                action()
                status = 0
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0:
            return
        assert status == KILLED, f"operation {number} failed"
        yield number


def _end_before(number: int, below: str) -> None:
    operations = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal operations
        if event in EVENTS and isinstance(arguments[0], str | bytes | os.PathLike):
            operations += os.fsdecode(arguments[0]).startswith(below)
            if operations == number:
                os._exit(KILLED)

    sys.addaudithook(hook)
