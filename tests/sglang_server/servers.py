"""Real SGLang servers, started by hand before the run, from a separate environment."""

import os
import signal
import subprocess
import time

import httpx

from tests.runs import ROOT, free_port

PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
FLAGS = ROOT / "tools" / "sglang_cpu" / "server.yaml"
STARTUP = 180.0
"""Longest wait for a server to come up, in seconds."""


def server_environment():
    """The environment of a server on a CPU, with one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}


class RealServer:
    """A server on the loopback; `wait` for it, and `stop` or `kill` its process."""

    def __init__(self, checkpoint, log, *flags, port=None):
        """Starts it, without waiting; `port` is a free one when not given."""
        self.port = port or free_port()
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        self._command = [str(PYTHON), "-m", "sglang.launch_server", "--config", str(FLAGS)]
        self._command += ["--model-path", str(checkpoint), "--port", str(self.port), *flags]
        self._start()

    def wait(self):
        """Waits until it samples tokens, once after every start."""
        deadline = time.monotonic() + STARTUP
        while not self._ready:
            self._ready = self._is_up()
            assert self._process.poll() is None, (
                f"the server ended; its log says: {self.log.read_text()[-3000:]}"
            )
            assert time.monotonic() < deadline, (
                f"the server is not up after {STARTUP} s; see {self.log}"
            )
            time.sleep(0.0 if self._ready else 0.5)
        return self

    def kill(self):
        """SIGKILL, at once; SGLang's own processes end with it."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self):
        """Asks it to end, and kills it where it does not."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()

    def restart(self):
        """Starts a server that has ended again, at the same address, without waiting."""
        assert self._process.poll() is not None
        self._start()

    def _start(self):
        self._ready = False
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                env=server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _is_up(self):
        try:
            return httpx.get(f"{self.url}/health", timeout=30.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False


def wait_for_decoding(log):
    """Until a server has made some steps with a batch: it says so every 40."""
    before = log.read_text().count("Decode batch")
    deadline = time.monotonic() + 60.0
    while log.read_text().count("Decode batch") == before:
        assert time.monotonic() < deadline, "the server decodes nothing"
        time.sleep(0.02)
