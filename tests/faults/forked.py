"""Runs of train.py in forked processes, which start in milliseconds because the libraries are
imported."""

import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    status: int | None
    """Exit status, negative for a signal; None after a timeout."""
    output: str
    error: str

    @property
    def traceback(self):
        """Whether it showed a traceback."""
        return "Traceback (most recent call last)" in self.error + self.output


class ForkedRun:
    """A run of train.py in a forked process with its own process group."""

    def __init__(self, argv, directory, *, cwd=None, before=int):
        """Starts the run with its output in `directory`; `before` is called in the child, to limit
        its resources."""
        import slime_tis.trainer.training_command  # noqa: F401  before the fork, so that children have it
        from slime_tis.main import train

        directory.mkdir(parents=True, exist_ok=True)
        self.stdout, self.stderr = directory / "stdout.txt", directory / "stderr.txt"
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
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(
                    number,
                    signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL,
                )
            for path, descriptor in ((self.stdout, 1), (self.stderr, 2)):
                os.dup2(
                    os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644),
                    descriptor,
                )
            sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8")
            sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8")
            os.chdir(cwd or ".")
            sys.argv[1:] = argv  # as in `python train.py`
            before()
            status = train()
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

    def kill(self, number=signal.SIGKILL, *, group=False):
        """Sends a signal to the run, or to its whole process group as a terminal does."""
        (os.killpg if group else os.kill)(self.pid, number)

    def wait(self, timeout):
        """Waits until the run ends; kills its group after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        pid, code = os.waitpid(self.pid, os.WNOHANG)
        while not pid and time.monotonic() < deadline:
            time.sleep(0.01)
            pid, code = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        output, error = (path.read_text(errors="replace") for path in (self.stdout, self.stderr))
        return Outcome(
            status=os.waitstatus_to_exitcode(code) if pid else None, output=output, error=error
        )


def run_forked(argv, directory, *, timeout=60, cwd=None, before=int):
    """Runs train.py in a forked child until it ends."""
    return ForkedRun(argv, directory, cwd=cwd, before=before).wait(timeout)


def group_is_empty(group):
    """Whether no living process is in a process group."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return False
    return True


def check(tried, at_least=1):
    """Fails with the first failures of a number of tries, by try, or if fewer than `at_least` were
    made."""
    failures = {attempt: failure for attempt, failure in tried.items() if failure is not None}
    assert not failures, (
        f"{len(failures)} of {len(tried)} failed:\n{dict(list(failures.items())[:20])}"
    )
    assert len(tried) >= at_least
