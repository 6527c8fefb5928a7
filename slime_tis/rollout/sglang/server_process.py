"""One SGLang server as a process of this machine: its command line, environment, log and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import psutil
import torch

from slime_tis.rollout.engine import RolloutUnavailable
from slime_tis.rollout.sglang import supervise
from slime_tis.rollout.sglang.config import SGLangConfig
from slime_tis.rollout.sglang.redaction import printable

HOST = "127.0.0.1"
LOG_LINES, LOG_BYTES = 8, 4096
"""What a sentence quotes of a log at most: lines, and the bytes that they are looked for in."""
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "ROLE_", "GROUP_")
TORCHRUN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment of a rank of training, which a server would take for its own."""


class ServerProcess:
    """A server in a process group of its own, which ends when this program does."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        """Starts it; its output is appended to `log`.

        Raises:
          RolloutUnavailable: the program does not run.
        """
        self._log, self._log_start = log, log.stat().st_size if log.exists() else 0
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # never written: the supervisor waits for its end
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise RolloutUnavailable(
                f"--sglang-python is {command[0]!r}, which does not run: {error.strerror}."
            ) from error

    @property
    def status(self) -> int | None:
        """The exit status, or None while it runs. What it left of its process group is killed when it has ended."""
        process = self._process
        if process.returncode is None:
            # Not reaped by this look, so that the group's number still is its own.
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                return None
            self.kill()
        return process.returncode

    def terminate(self) -> None:
        """Asks it to end."""
        if self.status is None:
            self._process.terminate()

    def kill(self) -> None:
        """Ends it and what it started, unless that has been done."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()

    def listens(self, port: int) -> bool:
        """Whether it, and not some other program, listens at a port."""
        try:
            own = psutil.Process(self._process.pid)
            connections = [each for one in [own, *own.children(recursive=True)] for each in one.net_connections("tcp")]
        except psutil.Error:
            return True  # one of them has just ended, which is looked after elsewhere
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)

    def quoted_log(self) -> str:
        """The end of its log, as the end of a sentence."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._log_start, self._log.stat().st_size - LOG_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            text = ""
        lines = [line.strip() for line in text.splitlines() if line.strip()][-LOG_LINES:]
        return (
            f"its log {self._log} ends: {printable(' | '.join(lines))}" if lines else f"its log {self._log} is empty."
        )


def server_command(config: SGLangConfig, hf_checkpoint: str | Path, index: int, port: int, log: Path) -> list[str]:
    """The command line of the `index`-th server of a run; of keys it has the names of their variables."""
    flags = ["--model-path", str(hf_checkpoint), "--host", HOST, "--port", str(port), *_passed_flags(config, index)]
    keys = ["--admin-api-key-env", config.sglang_admin_api_key_env, "--api-key-env", config.sglang_api_key_env]
    return [config.sglang_python or sys.executable, supervise.__file__, str(log), *flags, *keys]


def server_environment(config: SGLangConfig) -> dict[str, str]:
    """This program's environment without its place in a torchrun job, and with the other Python's programs first."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_NAMES and not name.startswith(TORCHRUN_PREFIXES)
    }
    environment["PYTHONUNBUFFERED"] = "1"
    if not torch.cuda.is_available():
        environment.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # else SGLang looks for CUDA, whatever its flags say
    if config.sglang_python and os.sep in config.sglang_python:
        programs = os.path.dirname(os.path.abspath(config.sglang_python))
        environment["PATH"] = f"{programs}{os.pathsep}{environment.get('PATH', os.defpath)}"
    return environment


def _passed_flags(config: SGLangConfig, index: int) -> list[str]:
    """The flags passed through; of several servers on GPUs each begins where the one before ends."""
    flags = list(config.sglang_server_args or ())
    if index == 0 or _value(flags, "--device") == "cpu":
        return flags
    size = _number(flags, 1, "--tp-size", "--tp", "--tensor-parallel-size")
    size *= _number(flags, 1, "--pp-size", "--pp", "--pipeline-parallel-size")
    first = _number(flags, 0, "--base-gpu-id")
    return [*flags, "--base-gpu-id", str(first + index * size)]  # of two, the server takes the last


def _number(flags: list[str], default: int, *names: str) -> int:
    value = _value(flags, *names)
    if value is not None and not value.isdecimal():
        raise ValueError(f"--sglang-{names[0][2:]} is {value!r} but must be a whole number.")
    return default if value is None else int(value)


def _value(flags: list[str], *names: str) -> str | None:
    """The value of a flag, in either spelling."""
    for flag, following in zip_longest(flags, flags[1:]):
        name, equals, value = flag.partition("=")
        if name in names:
            return value if equals else following
    return None
