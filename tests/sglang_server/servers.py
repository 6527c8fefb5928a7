"""Real SGLang servers, started by hand before the run, from a separate environment."""

import os
import signal
import subprocess
import time
from pathlib import Path

import httpx

from tests.runs import ROOT, free_port

PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
FLAGS = ROOT / "tools" / "sglang_cpu" / "server.yaml"
STARTUP = 900.0
"""Seconds after which a server that is not up counts as hanging; a busy machine needs minutes."""


def server_environment() -> dict[str, str]:
    """The environment of a server on a CPU, with one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}


class RealServer:
    """A server on the loopback; `wait` for it, and `stop` or `kill` its process."""

    def __init__(self, checkpoint: Path, log: Path, *flags: str) -> None:
        """Starts it at a free port, without waiting."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [
            str(PYTHON),
            "-m",
            "sglang.launch_server",
            "--config",
            str(FLAGS),
            "--model-path",
            str(checkpoint),
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
        """SIGKILL, at once; SGLang's own processes end with it."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Asks it to end, and kills it if it does not."""
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
        return self.log.read_text().count("POST /generate")

    def weight_version(self) -> str:
        """The weight version that the server reports."""
        return httpx.get(f"{self.url}/model_info", trust_env=False).json()["weight_version"]

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("a") as log:
            return subprocess.Popen(
                self._command,
                env=server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=30.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False


def wait_for_decoding(log: Path) -> None:
    """Waits until a server has decoded for some steps; its log has a line for every 40 steps."""
    before = log.read_text().count("Decode batch")
    deadline = time.monotonic() + 60.0
    while log.read_text().count("Decode batch") == before:
        assert time.monotonic() < deadline, "the server decodes nothing"
        time.sleep(0.02)
