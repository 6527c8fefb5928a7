"""Real servers of one engine, started by hand before the run, from a separate environment.

The variable SERVER_ENGINE names the engine: `make test-sglang` and `make test-vllm` run the same
tests.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from slime_tis.trainer.configs.server_engines import SERVER_ENGINES
from tests.runs import ROOT, free_port


@dataclass(frozen=True, kw_only=True)
class TestedEngine:
    """How servers of an engine are started and watched."""

    name: str
    command: tuple[str, ...]
    """Words behind the Python interpreter, before the checkpoint."""
    generate: str
    """The endpoint that samples."""
    version: str
    """The endpoint that reports the version of the weights."""
    pause: tuple[str, Mapping[str, str]]
    """The endpoint and body that stop sampling; requests in flight keep their tokens."""
    resume: str
    """The endpoint that continues sampling."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of models that differ from the tests' own ones."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of a server on a CPU, with one thread."""

    @property
    def python(self) -> Path:
        return ROOT / f".venv-{self.name}" / "bin" / "python"

    @property
    def flags(self) -> Path:
        """The flags of a server on a CPU."""
        return ROOT / "tools" / f"{self.name}_cpu" / "server.yaml"

    @property
    def title(self) -> str:
        return SERVER_ENGINES[self.name].title

    def metric(self, name: str) -> str:
        """The name of one of the engine's metrics."""
        return f"rollout/{self.name}_{name}"


ENGINES = {
    "sglang": TestedEngine(
        name="sglang",
        command=("-m", "sglang.launch_server", "--model-path"),
        generate="/generate",
        version="/model_info",
        pause=("/pause_generation", {"mode": "retract"}),
        resume="/continue_generation",
        variables={"TORCHDYNAMO_DISABLE": "1"},
    ),
    "vllm": TestedEngine(
        name="vllm",
        command=("-m", "vllm.entrypoints.cli.main", "serve"),
        generate="/inference/v1/generate",
        version="/weight_info",
        pause=("/pause?mode=keep", {}),
        resume="/resume",
        # vLLM's attention on a CPU ends the server with heads of 16.
        sizes={"head_dim": 32},
        variables={
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
}
ENGINE = ENGINES[os.environ.get("SERVER_ENGINE", "sglang")]
ONLY_SGLANG = pytest.mark.skipif(
    ENGINE.name != "sglang", reason=f"{ENGINE.title} on a CPU does not have this"
)
STARTUP = 900.0
"""Seconds after which a server that is not up counts as hanging; a busy machine needs minutes."""
ANSWER = 300.0
"""Seconds after which a server that does not answer counts as hanging."""


def server_environment() -> dict[str, str]:
    """The environment of a server on a CPU, with one thread."""
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **ENGINE.variables}
    return {**os.environ, **variables}


def send(method: str, url: str, body: object = None) -> httpx.Response:
    """The answer to a request without a key."""
    return httpx.request(method, url, json=body, timeout=ANSWER, trust_env=False)


class RealServer:
    """A server on the loopback; `wait` for it, and `stop` or `kill` its processes."""

    def __init__(
        self,
        checkpoint: Path,
        log: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it at a free port, without waiting."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._environment = {**server_environment(), **(environment or {})}
        self._command = [
            str(ENGINE.python),
            *ENGINE.command,
            str(checkpoint),
            "--config",
            str(ENGINE.flags),
            "--port",
            str(self.port),
            *flags,
        ]
        self._ready = False
        self._process = self._start()

    def wait(self) -> "RealServer":
        """Waits until it samples tokens, once after every start."""
        deadline = time.monotonic() + STARTUP
        while not self._ready:
            assert self._process.poll() is None, (
                f"the server ended; its log says: {self.log.read_text()[-3000:]}"
            )
            assert time.monotonic() < deadline, (
                f"the server is not up after {STARTUP} s; see {self.log}"
            )
            self._ready = self._is_up()
            if not self._ready:
                time.sleep(0.1)
        return self

    def kill(self) -> None:
        """SIGKILL, at once, to all its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def hang(self) -> None:
        """SIGSTOP: connections stay open, and nothing answers."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def stop(self) -> None:
        """Asks it to end, and kills it if it does not."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()

    def restart(self) -> None:
        """Starts a server that has ended again, at the same address, without waiting."""
        assert self._process.poll() is not None
        self._ready = False
        self._process = self._start()

    def num_requests(self) -> int:
        """Requests for samples that it has answered since its first start."""
        return self.log.read_text().count(f"POST {ENGINE.generate} ")

    def weight_version(self) -> str:
        """The weight version that the server reports."""
        return send("GET", self.url + ENGINE.version).json()["weight_version"]

    def pause(self) -> None:
        """Stops sampling until `resume` or the end of a weight update."""
        endpoint, body = ENGINE.pause
        send("POST", self.url + endpoint, body).raise_for_status()

    def resume(self) -> None:
        """Continues sampling."""
        send("POST", self.url + ENGINE.resume, {}).raise_for_status()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("a") as log:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=30.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False
