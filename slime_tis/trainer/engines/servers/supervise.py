"""Runs one server as its child process.

Usage: python supervise.py LOG MODULE SERVER_FLAG …

Standard library only: the Python that has the server does not have slime_tis.

* `--NAME-env VARIABLE` becomes the server's `--NAME=VALUE OF THE VARIABLE` in memory, so that no
  list of processes shows API keys and passwords. The server prints all flags; keys are redacted
  before its output reaches LOG.
* The server ends with the program that started this one: that program's end closes standard input.
"""

import contextlib
import importlib.util
import json
import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Mapping

VARIABLE = "-env"
"""Ending of a flag whose value is the name of an environment variable."""
GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL."""
TICK = 0.2
"""Longest wait for output, in seconds, between two looks at the server."""
LONGEST_LINE = 1 << 20
"""Maximum bytes held back without an end of line."""


def main(log: str, module: str, flags: list[str]) -> int:
    """Starts a module, writes its output to the log, and returns its exit status."""
    flags, secrets = with_secrets(flags, os.environ)
    output, server_end = os.pipe()
    server = os.fork()
    if server == 0:
        os.close(output)
        become_server(module, flags, server_end)
        return 0
    os.close(server_end)
    signal.signal(signal.SIGTERM, lambda *_: end(server))
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    return watch(server, output, Redacted(file, secrets))


def with_secrets(flags: list[str], environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Returns the server's flags and its secrets.

    `--NAME-env VARIABLE` becomes `--NAME=VALUE` behind the other flags, and is left out if the
    variable is unset or empty.
    """
    server_flags: list[str] = []
    secrets: dict[str, str] = {}
    words = iter(flags)
    for word in words:
        name, equals, variable = word.partition("=")
        if not (name.startswith("--") and name.endswith(VARIABLE)):
            server_flags.append(word)
            continue
        if not equals:
            variable = next(words, "")
        secrets[name.removesuffix(VARIABLE)] = environ.get(variable, "")
    for name, value in secrets.items():
        if value:
            server_flags.append(f"{name}={value}")
    return server_flags, [value for value in secrets.values() if value]


def become_server(module: str, flags: list[str], output: int) -> None:
    """Runs the server in this process, as `python -m` would."""
    # Not this process's standard input, whose end means that the run has ended.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)
    # Python puts this script's directory first; the server must not import its modules.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        sys.exit(
            f"{sys.executable} has no {package}; name the Python that has it with"
            f" --{package}-python."
        )
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Redacted:
    """Writes complete lines, in which secrets are replaced by `***`."""

    def __init__(self, file: int, secrets: list[str]) -> None:
        self._file = file
        self._held = b""
        """The beginning of a line: a secret may continue in the next output."""
        spellings = set()
        for secret in secrets:
            # The server may also print its flags as Python or JSON.
            spellings |= {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1]}
        # The longest first: a shorter spelling may be part of a longer one.
        self._secrets = [spelling.encode() for spelling in sorted(spellings, key=len, reverse=True)]

    def write(self, text: bytes, *, is_last: bool = False) -> None:
        """Writes complete lines, and holds the rest back until the line ends or is too long."""
        self._held += text
        if is_last:
            end_of_line = len(self._held)
        else:
            end_of_line = self._held.rfind(b"\n") + 1
            if end_of_line == 0:
                end_of_line = max(0, len(self._held) - LONGEST_LINE)
        line = self._held[:end_of_line]
        self._held = self._held[end_of_line:]
        for secret in self._secrets:
            line = line.replace(secret, b"***")
        while line:
            line = line[os.write(self._file, line) :]


def watch(server: int, output: int, log: Redacted) -> int:
    """Copies output until the server has ended; ends it when standard input does."""
    sources = [output, 0]
    deadline = float("inf")
    while True:
        ready, _, _ = select.select(sources, [], [], TICK)
        if output in ready and not copy(output, log):
            sources.remove(output)
        if 0 in ready and not os.read(0, 1):
            sources.remove(0)
            end(server)
            deadline = time.monotonic() + GRACE
        ended, status = os.waitpid(server, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.killpg(0, signal.SIGKILL)  # this process too
    # The server's children may keep the pipe open, so only the available output is copied.
    while select.select([output], [], [], 0)[0] and copy(output, log):
        pass
    log.write(b"", is_last=True)
    if 0 not in sources:
        # The program that started this one has ended, so nobody else ends the server's children.
        os.killpg(0, signal.SIGKILL)  # this process too
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # ended by a signal; 128 + its number, as a shell reports it
        return 128 - code
    return code


def copy(output: int, log: Redacted) -> bool:
    """Copies the available output; returns False at its end."""
    text = os.read(output, 1 << 16)
    log.write(text)
    return bool(text)


def end(server: int) -> None:
    """Sends SIGTERM to the server."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
