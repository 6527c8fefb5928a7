"""Two hosts on this machine: network namespaces, joined by a pair of virtual interfaces."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.runs import ROOT

ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "slime0"
"""Name of the interface of each host."""


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
    """The hosts, and the jobs that run on them."""

    names: tuple[str, str]
    jobs: list[Job] = field(default_factory=list)

    def ip(self, host: int, *words: str) -> None:
        subprocess.run(["ip", "-n", self.names[host], *words], check=True)

    def cut(self) -> None:
        """Takes the link down."""
        self.ip(0, "link", "set", LINK, "down")

    def join(self) -> None:
        """Takes the link up."""
        self.ip(0, "link", "set", LINK, "up")

    def start(
        self, flags: Sequence[str], output: Path, *, port: int = 29500, interface: str = LINK, ranks: int = 2
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
            command = ["ip", "netns", "exec", self.names[host], sys.executable, "-m", "torch.distributed.run", *launch]
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


def kill_all(name: str) -> None:
    """Kills every process in a network namespace."""
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
    for pid in map(int, pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two joined hosts; their processes and namespaces are removed at the end."""
    names = (f"slime-{os.getpid()}-a", f"slime-{os.getpid()}-b")
    made = Hosts(names)
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        peer = ["peer", "name", LINK, "netns", names[1]]
        subprocess.run(["ip", "-n", names[0], "link", "add", LINK, "type", "veth", *peer], check=True)
        for host, address in enumerate(ADDRESSES):
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
