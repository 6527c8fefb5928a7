"""SGLang servers that a run starts on this machine, watches and stops."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from slime_tis.rollout.engine import RolloutUnavailable
from slime_tis.rollout.sglang.config import SGLangConfig
from slime_tis.rollout.sglang.server_process import HOST, ServerProcess, server_command, server_environment

RESTARTS_IN_A_ROW = 3
"""Times that a server is started again without having run for the startup timeout in between, a count."""
GRACE = 30.0
"""Time that servers have to end by themselves, in seconds."""


@dataclass(kw_only=True)
class _Launched:
    """One server and what became of it."""

    port: int
    command: list[str]
    log: Path
    process: ServerProcess | None = None
    started: float = 0.0
    failures: int = 0
    due: float | None = None
    """When it is started again; None while it runs, or is left alone."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


class LaunchedServers:
    """Servers of a run, each with its own process group, port and log file."""

    def __init__(self, config: SGLangConfig, hf_checkpoint: str | Path, log_dir: str | Path) -> None:
        """Starts nothing yet.

        Args:
          config: how many, their flags, their Python and the variable with their key.
          hf_checkpoint: directory of the model.
          log_dir: where their output goes, unless the config says otherwise.

        Raises:
          ValueError: not enough ports are free.
        """
        self.restarts = 0
        self._environment = server_environment(config)
        self._startup_timeout = config.sglang_startup_timeout
        directory = Path(config.sglang_log_dir or log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        self._servers = []
        for index, port in enumerate(free_ports(config.sglang_base_port, config.sglang_launch or 0)):
            log = directory / f"sglang_{index}.log"
            command = server_command(config, hf_checkpoint, index, port, log)
            self._servers.append(_Launched(port=port, command=command, log=log))

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers' URLs, which stay the same when a server is started again."""
        return tuple(server.url for server in self._servers)

    def start(self) -> tuple[str, ...]:
        """Starts all servers and waits until they answer.

        Returns:
          their URLs.

        Raises:
          RolloutUnavailable: one ended, or did not answer in time; all are stopped then.
        """
        try:
            for server in self._servers:
                self._spawn(server)
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self.urls

    def poll(self) -> list[str]:
        """Looks after the servers without waiting; to be called every second or so.

        Returns:
          a sentence for each server that has ended, and what becomes of it.
        """
        return [sentence for server in self._servers if (sentence := self._look_after(server))]

    def stop(self) -> None:
        """Asks all servers to end, waits, and kills those that have not."""
        processes = [server.process for server in self._servers if server.process]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + GRACE
        while any(process.status is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in processes:
            process.kill()
        for server in self._servers:
            server.process = server.due = None

    def _spawn(self, server: _Launched) -> None:
        server.started, server.due = time.monotonic(), None
        server.process = ServerProcess(server.command, self._environment, server.log)

    def _wait(self) -> None:
        deadline = time.monotonic() + self._startup_timeout
        waiting = list(self._servers)
        with httpx.Client(trust_env=False, timeout=30.0) as client:
            while waiting:
                for server in self._servers:
                    _check_runs(server)
                waiting = [server for server in waiting if not _is_up(client, server)]
                if waiting and time.monotonic() > deadline:
                    late = waiting[0]
                    raise RolloutUnavailable(
                        f"the SGLang server at {late.url} is not up after --sglang-startup-timeout "
                        f"{self._startup_timeout:g} s; {late.process.quoted_log() if late.process else ''}"
                    )
                time.sleep(0.2)

    def _look_after(self, server: _Launched) -> str | None:
        now = time.monotonic()
        if server.process is not None and (status := server.process.status) is not None:
            return self._ended(server, status, now)
        if server.due is not None and now >= server.due:
            self.restarts += 1
            self._spawn(server)
        return None

    def _ended(self, server: _Launched, status: int, now: float) -> str:
        assert server.process is not None
        quoted, server.process = server.process.quoted_log(), None
        if now - server.started > self._startup_timeout:
            server.failures = 0
        server.failures += 1
        ended = f"the SGLang server at {server.url} ended with exit status {status}"
        if server.failures > RESTARTS_IN_A_ROW:
            return f"{ended} and is left alone after {RESTARTS_IN_A_ROW} new starts; {quoted}"
        server.due = now + 2.0 ** (server.failures - 1)
        return f"{ended} and is started again ({server.failures} of {RESTARTS_IN_A_ROW}); {quoted}"


def free_ports(first: int, count: int) -> list[int]:
    """The first `count` ports from `first` on that nobody on this machine listens at.

    Raises:
      ValueError: there are not as many.
    """
    ports: list[int] = []
    for port in range(first, 65536):
        if len(ports) == count:
            return ports
        try:
            socket.create_server((HOST, port)).close()
        except OSError:
            continue
        ports.append(port)
    if len(ports) == count:
        return ports
    raise ValueError(
        f"--sglang-base-port is {first} but only {len(ports)} ports from there on are free, and --sglang-launch needs "
        f"{count}; choose a lower one."
    )


def _check_runs(server: _Launched) -> None:
    assert server.process is not None
    if (status := server.process.status) is not None:
        raise RolloutUnavailable(
            f"the SGLang server at {server.url} ended before it was up, with exit status {status}; "
            f"{server.process.quoted_log()}"
        )


def _is_up(client: httpx.Client, server: _Launched) -> bool:
    """Whether it answers that it is well; that another program's server does is an error."""
    try:
        with client.stream("GET", f"{server.url}/health") as response:  # what it says is not read
            if response.status_code != 200:
                return False
    except httpx.HTTPError:
        return False
    assert server.process is not None
    if not server.process.listens(server.port):
        raise RolloutUnavailable(f"another program answers at {server.url}; choose free ports with --sglang-base-port.")
    return True
