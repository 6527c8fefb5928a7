"""Runs of train.py in forked processes, which start in milliseconds because the libraries are
imported."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    status: int | None
    """Exit status, negative for a signal; None after a timeout."""
    output: str
    error: str

    @property
    def traceback(self) -> bool:
        """Whether it showed a traceback."""
        return "Traceback (most recent call last)" in self.error + self.output

    @property
    def messages(self) -> list[str]:
        """Lines of stderr, without warnings and blank lines."""
        lines = [line for line in self.error.splitlines() if line.strip()]
        return [line for line in lines if not line.startswith("warning: ")]


def train_program() -> int:
    """Runs `python train.py` with the command line of this process."""
    from slime_tis.main import train

    return train()


class ForkedRun:
    """A run of train.py, or of another program, in a forked process with its own process group."""

    def __init__(
        self,
        argv: Sequence[str],
        directory: Path,
        *,
        cwd: Path | None = None,
        before: Callable[[], Any] = int,
        program: Callable[[], int] = train_program,
    ) -> None:
        """Starts the run with its output in `directory`.

        `before` is called in the child, for example to limit its resources. Then `program` runs,
        which reads `argv` from sys.argv and returns the exit status.
        """
        # imported before the fork, so that children have it
        import slime_tis.trainer.training_command  # noqa: F401

        directory.mkdir(parents=True, exist_ok=True)
        self.stdout = directory / "stdout.txt"
        self.stderr = directory / "stderr.txt"
        for path in (self.stdout, self.stderr):
            path.touch()  # a child that is killed at once writes none
        self.started = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for path, descriptor in ((self.stdout, 1), (self.stderr, 2)):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
                os.dup2(os.open(path, flags, 0o644), descriptor)
            sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8")
            sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8")
            os.chdir(cwd or ".")
            sys.argv[1:] = argv  # as on the command line
            before()
            status = program()
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)

    def kill(self, number: int = signal.SIGKILL, *, group: bool = False) -> None:
        """Sends a signal to the run, or to its whole process group as a terminal does."""
        if group:
            os.killpg(self.pid, number)
        else:
            os.kill(self.pid, number)

    def wait(self, timeout: float) -> Outcome:
        """Waits until the run ends; kills its group after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        pid, code = os.waitpid(self.pid, os.WNOHANG)
        while not pid and time.monotonic() < deadline:
            time.sleep(0.01)
            pid, code = os.waitpid(self.pid, os.WNOHANG)
        status = None
        if pid:
            status = os.waitstatus_to_exitcode(code)
        else:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        return Outcome(
            status=status,
            output=self.stdout.read_text(errors="replace"),
            error=self.stderr.read_text(errors="replace"),
        )


def run_forked(
    argv: Sequence[str],
    directory: Path,
    *,
    timeout: float = 60,
    cwd: Path | None = None,
    before: Callable[[], Any] = int,
) -> Outcome:
    """Runs train.py in a forked child until it ends."""
    return ForkedRun(argv, directory, cwd=cwd, before=before).wait(timeout)


def group_is_empty(group: int) -> bool:
    """Whether no living process is in a process group."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return False
    return True


def check(failures: Mapping[str, str | None], at_least: int = 1) -> None:
    """Fails with the first failures of a number of tries, or if fewer than `at_least` were made.

    Args:
        failures: What went wrong in each try; None if nothing did.
        at_least: Fewest tries.
    """
    wrong = {name: failure for name, failure in failures.items() if failure is not None}
    first = dict(list(wrong.items())[:20])
    assert not wrong, f"{len(wrong)} of {len(failures)} failed:\n{first}"
    assert len(failures) >= at_least
