"""Three hosts on this machine: network namespaces whose interfaces are ports of one switch, a
bridge.

Ranks of training run on the first two hosts, SGLang's test servers on the third.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.real_servers.servers import ENGINES, server_environment
from tests.runs import ROOT, Started, fork_server, start_apart

ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
LINK, SWITCH = "slime0", "switch0"
"""Names of the interface of each host, and of the bridge."""
SERVERS = 2
"""The host of SGLang's servers."""
EPHEMERAL = "32768-60999"
"""Ports that the kernel assigns: those of torch's groups, but not of servers with a chosen port."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() or shutil.which("ip") is None:
        reason = "network namespaces need root and the command ip (package iproute2)"
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@dataclass
class Job:
    """A run of train.py with one torchrun on each host."""

    launchers: list[subprocess.Popen[bytes]]
    logs: list[Path]
    output: Path

    def text(self, host: int) -> str:
        """What this host's launcher and rank have printed."""
        return self.logs[host].read_text()

    def until(self, condition: Callable[[], object], timeout: float = 120) -> None:
        """Waits for an event while the run is alive."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, self.text(0)[-3000:] + self.text(1)[-3000:]
            time.sleep(0.02)

    def steps(self) -> int:
        """Optimizer steps that are logged."""
        metrics = self.output / "metrics.jsonl"
        return metrics.read_text().count("train/grad_norm") if metrics.exists() else 0

    def wait(self, timeout: float = 180) -> list[int]:
        """The exit statuses of the launchers."""
        return [launcher.wait(timeout) for launcher in self.launchers]


@dataclass
class Hosts:
    """The hosts, and the jobs and servers that run on them."""

    names: tuple[str, ...]
    """Namespaces of the hosts and, at last, of the switch."""
    jobs: list[Job] = field(default_factory=list)
    processes: list[BaseProcess] = field(default_factory=list)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def ip(self, host: int, *words: str) -> None:
        subprocess.run(["ip", "-n", self.names[host], *words], check=True)

    def cut(self, host: int = 0) -> None:
        """Takes the interface of a host down."""
        self.ip(host, "link", "set", LINK, "down")

    def drop(self, host: int = 0) -> None:
        """Drops all packets from and to a host, whose interface stays up."""
        self.ip(-1, "link", "set", f"port{host}", "nomaster")

    def firewall(self, host: int = 0) -> None:
        """Drops connections of the servers' host to ephemeral ports of a host; answers of servers
        pass."""
        self.ip(host, "rule", "add", "pref", "100", "lookup", "local")
        self.ip(host, "rule", "del", "pref", "0")
        ports = ["ipproto", "tcp", "sport", EPHEMERAL, "dport", EPHEMERAL]
        self.ip(
            host,
            "rule",
            "add",
            "pref",
            "0",
            "from",
            ADDRESSES[SERVERS],
            "iif",
            LINK,
            *ports,
            "blackhole",
        )

    def join(self, host: int = 0) -> None:
        """Ends `cut`, `drop` and `firewall`."""
        self.ip(-1, "link", "set", f"port{host}", "master", SWITCH)
        self.ip(host, "link", "set", LINK, "up")
        with suppress(subprocess.CalledProcessError):
            self.ip(host, "rule", "del", "pref", "0", "blackhole")

    def serve(self, path: str, number: int) -> tuple[list[str], Connection]:
        """Starts two test servers, which say and wait for a word before they answer the numbered
        POST to a path."""
        context = fork_server()
        here, there = context.Pipe()
        process = context.Process(
            target=serve, args=(self.names[SERVERS], path, number, there), daemon=True
        )
        process.start()
        self.processes.append(process)
        return here.recv(), here

    def serve_real(self, checkpoint: Path) -> str:
        """Starts a real SGLang server in fp32, without waiting; returns its URL."""
        address = ["--host", ADDRESSES[SERVERS], "--port", "30000"]
        command = [
            str(ENGINES["sglang"].python),
            "-m",
            "sglang.launch_server",
            "--config",
            str(ENGINES["sglang"].flags),
            "--dtype",
            "float32",
            *address,
        ]
        with open(checkpoint.with_name("server.log"), "w") as log:
            self.started.append(
                subprocess.Popen(
                    [
                        "ip",
                        "netns",
                        "exec",
                        self.names[SERVERS],
                        *command,
                        "--model-path",
                        str(checkpoint),
                    ],
                    env=server_environment(),
                    stdout=log,
                    stderr=log,
                )
            )
        return f"http://{address[1]}:30000"

    def fork(self, flags: Sequence[str], output: Path) -> Started:
        """Starts two ranks, one on each host, without torchrun and its seconds of imports."""
        run = start_apart(flags, output, ranks=2, prepare=partial(enter_as_rank, self.names))
        self.processes += run.processes
        return run

    def start(
        self,
        flags: Sequence[str],
        output: Path,
        *,
        port: int = 29500,
        interface: str = LINK,
        ranks: int = 2,
    ) -> Job:
        """Starts torchrun with one rank on each host, or with all ranks on the first one."""
        launchers, logs = [], []
        output.parent.mkdir(parents=True, exist_ok=True)
        nodes = 2 if ranks == 2 else 1
        for host in range(nodes):
            launch = [
                *("--nnodes", str(nodes), "--node-rank", str(host), "--nproc-per-node", "1"),
                *("--master-addr", ADDRESSES[0], "--master-port", str(port)),
            ]
            log = output.with_name(f"{output.name}.{host}.log")
            command = [
                "ip",
                "netns",
                "exec",
                self.names[host],
                sys.executable,
                "-m",
                "torch.distributed.run",
                *launch,
            ]
            with open(log, "wb") as file:
                launchers.append(
                    subprocess.Popen(
                        [*command, "train.py", *flags, "--output-dir", str(output)],
                        cwd=ROOT,
                        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
            logs.append(log)
        self.jobs.append(Job(launchers, logs, output))
        return self.jobs[-1]

    def lose(self, host: int, job: Job) -> None:
        """The host disappears: its link is cut, then all of its processes are killed."""
        self.cut()
        os.killpg(job.launchers[host].pid, signal.SIGKILL)
        kill_all(self.names[host])


def enter(namespace: str) -> None:
    """Moves this process into a network namespace; Python 3.11 has no `os.setns`."""
    with open(f"/run/netns/{namespace}") as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    os.environ["GLOO_SOCKET_IFNAME"] = LINK


def enter_as_rank(names: Sequence[str]) -> None:
    """Moves this process, a rank, to its host."""
    enter(names[int(os.environ["RANK"])])
    os.environ["MASTER_ADDR"] = ADDRESSES[0]


def serve(namespace: str, path: str, number: int, connection: Connection) -> None:
    """Two test servers on a host, until they are killed."""
    from tests.rollout.sglang.fake_sglang import FakeSGLang, servers_of

    enter(namespace)
    calls, ports = itertools.count(1), itertools.count(30000)

    class OnHost(FakeSGLang):
        address = ADDRESSES[SERVERS]

        async def _listen(self) -> None:
            self.port = self.port or next(ports)
            await super()._listen()

        async def _answer(
            self, method: str, called: str, body: dict[str, Any], headers: dict[str, str]
        ) -> Any:
            if called == path and next(calls) == number:
                connection.send(path)
                await asyncio.to_thread(connection.recv)
            return await super()._answer(method, called, body, headers)

    with servers_of(OnHost, 2) as servers:
        connection.send([server.url for server in servers])
        threading.Event().wait()


def kill_all(name: str) -> None:
    """Kills every process in a network namespace."""
    pids = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True
    ).stdout.split()
    for pid in map(int, pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Three hosts on a switch; their processes and namespaces are removed at the end."""
    names = tuple(f"slime-{os.getpid()}-{name}" for name in ("a", "b", "servers", "switch"))
    made = Hosts(names)
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        made.ip(-1, "link", "add", SWITCH, "type", "bridge")
        made.ip(-1, "link", "set", SWITCH, "up")
        for host, address in enumerate(ADDRESSES):
            made.ip(
                host,
                "link",
                "add",
                LINK,
                "type",
                "veth",
                "peer",
                "name",
                f"port{host}",
                "netns",
                names[-1],
            )
            made.ip(-1, "link", "set", f"port{host}", "master", SWITCH, "up")
            made.ip(host, "address", "add", f"{address}/24", "dev", LINK)
            made.ip(host, "link", "set", LINK, "up")
            made.ip(host, "link", "set", "lo", "up")
        yield made
    finally:
        for name in names:
            kill_all(name)
            subprocess.run(["ip", "netns", "delete", name], check=False)
        for job in made.jobs:
            for launcher in job.launchers:
                launcher.wait()
        for server in made.started:
            server.wait()
        for process in made.processes:
            process.join()
