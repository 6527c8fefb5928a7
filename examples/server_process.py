"""Runs a server in a separate process, for examples and studies on one machine."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from slime_tis.errors import one_line

HOST = "127.0.0.1"
STARTUP = 900.0
"""Seconds until a server must be up; a busy machine needs minutes."""
GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL."""
INTERVAL = 0.3
"""Seconds between two health checks."""
LOG_BYTES = 2000
"""Bytes at the end of a server's log that a message quotes."""


@contextmanager
def running(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    port: int,
    log: Path,
    startup: float = STARTUP,
) -> Iterator[str]:
    """Starts a server, waits until it is healthy, yields its URL, and stops it.

    The server ends with the `with` block, also after an exception or Ctrl-C.

    Args:
        command: The program and its arguments.
        environment: All variables of the process.
        port: Port of 127.0.0.1 on which the command listens.
        log: File for its output.
        startup: Seconds until it must be healthy.

    Raises:
        RuntimeError: The server ended, or is not healthy in time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # a process group, with which `_stop` also ends its workers
        )
    url = f"http://{HOST}:{port}"
    try:
        _wait(process, url, log, startup)
        yield url
    finally:
        _stop(process)


def free_port() -> int:
    """Returns a port on which nothing listens now."""
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, startup: float) -> None:
    deadline = time.monotonic() + startup
    with httpx.Client(trust_env=False, timeout=30.0) as client:
        while True:
            if process.poll() is not None:
                raise RuntimeError(
                    f"the server ended before it was up, with exit status {process.returncode};"
                    f" its log {log} ends: {_end(log)}"
                )
            with suppress(httpx.HTTPError):
                if client.get(f"{url}/health").status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the server is not up after {startup:g} s; its log {log} ends: {_end(log)}"
                )
            time.sleep(INTERVAL)


def _end(log: Path) -> str:
    text = log.read_bytes()[-LOG_BYTES:].decode(errors="replace")
    return one_line(text, LOG_BYTES)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to end, then kills it and its workers."""
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
    finally:
        # Also after a second Ctrl-C during the wait. Workers of a server that has ended are still
        # in its group, and the group's id is not given to another process before they end.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
