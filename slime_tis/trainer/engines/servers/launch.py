"""Servers that a run starts on this machine, watches, restarts and stops."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

from slime_tis.errors import one_line
from slime_tis.trainer.configs.servers import ServerConfig
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.servers import supervise
from slime_tis.trainer.engines.servers.api import HOST, ServerApi

MAX_RESTARTS = 3
"""Maximum restarts of a server that never ran for the startup timeout."""
GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL."""
LOG_LINES = 8
"""Maximum quoted lines of a log."""
LOG_BYTES = 4096
"""Bytes at the end of a log that are searched for these lines."""
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "ROLE_", "GROUP_")
TORCHRUN_NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Environment variables of a training rank, which a server would misread."""


class LaunchedServers:
    """The servers of a run, each with a process group, port and log file."""

    def __init__(self, config: ServerConfig, api: ServerApi, log_dir: str | Path) -> None:
        """Starts nothing yet; raises ValueError if too few ports are free."""
        self.restarts = 0
        self._config = config
        directory = Path(log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        self.servers = []
        ports = free_ports(config)
        for index, port in enumerate(ports):
            log = directory / f"{config.engine}_{index}.log"
            command = server_command(config, api, index, port, log)
            environment = server_environment(config, api, index)
            self.servers.append(LaunchedServer(config, port, command, environment, log))
        self.urls = tuple(server.url for server in self.servers)
        """The servers' URLs; restarts keep them."""

    def start(self) -> None:
        """Starts all servers and waits until they answer."""
        for server in self.servers:
            server.start()
        deadline = time.monotonic() + self._config.startup_timeout
        waiting = list(self.servers)
        with httpx.Client(trust_env=False, timeout=30.0) as client:
            while waiting:
                for server in self.servers:
                    if server.status is not None:
                        raise RolloutUnavailable(
                            f"{server.name} ended before it was up, with exit"
                            f" status {server.status}; {server.quoted_log()}"
                        )
                waiting = [server for server in waiting if not server.is_up(client)]
                if waiting and time.monotonic() > deadline:
                    raise RolloutUnavailable(
                        f"{waiting[0].name} is not up after {self._config.flag('startup_timeout')}"
                        f" {self._config.startup_timeout:g} s;"
                        f" {waiting[0].quoted_log()}"
                    )
                time.sleep(0.2)

    def poll(self) -> list[str]:
        """Restarts ended servers without waiting; returns messages. Call it every second."""
        messages = []
        for server in self.servers:
            if server.status is not None:
                messages.append(server.note_end())
            elif server.restart_at is not None and time.monotonic() >= server.restart_at:
                self.restarts += 1
                server.start()
        return messages

    def stop(self) -> None:
        """Terminates all servers, and kills the ones that do not end in time."""
        for server in self.servers:
            if server.process is not None and server.is_running:
                server.process.terminate()
        deadline = time.monotonic() + GRACE
        while any(server.is_running for server in self.servers) and time.monotonic() < deadline:
            time.sleep(0.05)
        for server in self.servers:
            server.kill()
            server.process = server.restart_at = None


class LaunchedServer:
    """A server in a separate process group that ends with this program."""

    def __init__(
        self,
        config: ServerConfig,
        port: int,
        command: list[str],
        environment: dict[str, str],
        log: Path,
    ) -> None:
        self.port = port
        self.url = f"http://{HOST}:{port}"
        self.name = f"the {config.entry.title} server at {self.url}"
        """The server in messages."""
        self.command = command
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.failures = 0
        """Consecutive ends before the startup timeout."""
        self.restart_at: float | None = None
        """Time of the next start; None while the server runs or after the last restart."""
        self._config = config
        self._environment = environment
        self._log = log
        self._log_start = 0
        """Where the current process began to write; a restarted server appends to its log."""

    def start(self) -> None:
        """Starts it; raises RolloutUnavailable if the program does not run."""
        self.started = time.monotonic()
        self.restart_at = None
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        try:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,  # never written: the supervisor ends when the pipe closes
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            raise RolloutUnavailable(
                f"{self._config.flag('python')} is {self.command[0]!r}, which does not run:"
                f" {error.strerror}."
            ) from error

    @property
    def status(self) -> int | None:
        """The exit status of an ended process, whose process group is killed; else None."""
        process = self.process
        if process is None:
            return None
        if process.returncode is None:
            # WNOWAIT does not reap the process, so its group id is still valid.
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                return None
            self.kill()
        return process.returncode

    @property
    def is_running(self) -> bool:
        """Whether the server was started and has not ended."""
        return self.process is not None and self.status is None

    def kill(self) -> None:
        """Kills the process group, unless already done."""
        if self.process is None:
            return
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()

    def note_end(self) -> str:
        """Schedules the restart of an ended server; returns a message."""
        ended = f"{self.name} ended with exit status {self.status}"
        self.process = None
        if time.monotonic() - self.started > self._config.startup_timeout:
            self.failures = 0
        self.failures += 1
        if self.failures > MAX_RESTARTS:
            return (
                f"{ended} and is not restarted after {MAX_RESTARTS} restarts; {self.quoted_log()}"
            )
        self.restart_at = time.monotonic() + 2.0 ** (self.failures - 1)
        return f"{ended} and is restarted ({self.failures} of {MAX_RESTARTS}); {self.quoted_log()}"

    def is_up(self, client: httpx.Client) -> bool:
        """Whether the server is healthy; raises RolloutUnavailable if another program answers."""
        try:
            with client.stream("GET", f"{self.url}/health") as response:  # the body is not read
                if response.status_code != 200:
                    return False
            ports = self._listening_ports()
        except httpx.HTTPError:
            return False
        except psutil.Error:  # a process has just ended, or cannot be read
            return self.status is None
        if self.port not in ports:
            raise RolloutUnavailable(
                f"another program answers at {self.url}; choose another"
                f" {self._config.flag('base_port')}."
            )
        return True

    def _listening_ports(self) -> set[int]:
        """TCP ports on which the process or one of its children listens."""
        assert self.process is not None
        supervisor = psutil.Process(self.process.pid)
        ports = set()
        for process in [supervisor, *supervisor.children(recursive=True)]:
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    ports.add(connection.laddr.port)
        return ports

    def quoted_log(self) -> str:
        """The end of the log, for the end of a message."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._log_start, self._log.stat().st_size - LOG_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            text = ""
        lines = [line.strip() for line in text.splitlines() if line.strip()][-LOG_LINES:]
        if not lines:
            return f"its log {self._log} is empty."
        return f"its log {self._log} ends: {one_line(' | '.join(lines), LOG_BYTES)}"


def free_ports(config: ServerConfig) -> list[int]:
    """The first free ports for the servers to launch; raises ValueError if there are fewer."""
    first = config.base_port
    count = config.launch or 0
    ports: list[int] = []
    for port in range(first, 65536):
        if len(ports) == count:
            break
        try:
            socket.create_server((HOST, port)).close()
        except OSError:
            continue
        ports.append(port)
    if len(ports) < count:
        raise ValueError(
            f"{config.flag('base_port')} is {first} but only {len(ports)} ports from it are free;"
            " choose a lower one."
        )
    return ports


def server_command(
    config: ServerConfig, api: ServerApi, index: int, port: int, log: Path
) -> list[str]:
    """The command line of the `index`-th server; it names variables of keys, not the keys."""
    python = config.python or sys.executable
    return [python, supervise.__file__, str(log), api.module, *api.flags(config, index, port)]


def server_environment(config: ServerConfig, api: ServerApi, index: int) -> dict[str, str]:
    """The environment without torchrun's variables; the server Python's programs come first."""
    environment = {}
    for name, value in os.environ.items():
        if name not in TORCHRUN_NAMES and not name.startswith(TORCHRUN_PREFIXES):
            environment[name] = value
    # Without it, the log of a server that dies lacks its last lines.
    environment["PYTHONUNBUFFERED"] = "1"
    environment |= api.environment(config, index)
    if config.python and os.sep in config.python:
        programs = os.path.dirname(os.path.abspath(config.python))
        environment["PATH"] = f"{programs}{os.pathsep}{environment.get('PATH', os.defpath)}"
    return environment
