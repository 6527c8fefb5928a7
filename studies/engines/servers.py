"""Starts real SGLang and vLLM servers on this machine's processor, one at a time.

A server listens on 127.0.0.1 only. It ends with the `with` block, also after Ctrl-C.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.provenance import ROOT
from examples import server_process
from examples.server_process import free_port
from studies.engines.records import Precision

MODEL = "m"
"""The name under which vLLM serves the model, from its server.yaml."""
CACHE_BYTES = 600_000_000
"""Size of vLLM's cache: 64 answers of SmolLM2-135M fit."""

EngineName = Literal["SGLang", "vLLM"]


class MissingEnvironment(RuntimeError):
    """The environment of a server was not built."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How a server is started."""

    engine: EngineName
    checkpoint: Path
    precision: Precision
    max_length: int
    """Largest number of tokens of a sequence."""
    chunk: int | None = None
    """Tokens of a chunk of prefill; None to compute prompts at once."""
    raw: bool = False
    """Whether log-probs are reported before temperature and truncation."""

    @property
    def python(self) -> Path:
        """The interpreter of the engine's environment."""
        return ROOT / f".venv-{self.engine.lower()}" / "bin" / "python"


def sglang_command(config: ServerConfig, port: int) -> list[str]:
    """Returns the command line of an SGLang server."""
    chunk = config.chunk or -1
    return [
        str(config.python),
        "-m",
        "sglang.launch_server",
        "--config",
        str(ROOT / "tools" / "sglang_cpu" / "server.yaml"),
        "--model-path",
        str(config.checkpoint),
        "--port",
        str(port),
        "--dtype",
        _dtype(config),
        "--max-running-requests",
        "64",
        "--chunked-prefill-size",
        str(chunk),
        # Derived from the size of a chunk, this fraction would be negative.
        "--mem-fraction-static",
        "0.6",
    ]


def vllm_command(config: ServerConfig, port: int) -> list[str]:
    """Returns the command line of a vLLM server."""
    mode = "raw_logprobs" if config.raw else "processed_logprobs"
    command = [
        str(config.python),
        "-W",
        "ignore",
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(config.checkpoint),
        "--config",
        str(ROOT / "tools" / "vllm_cpu" / "server.yaml"),
        "--port",
        str(port),
        "--dtype",
        _dtype(config),
        "--max-model-len",
        str(config.max_length),
        "--logprobs-mode",
        mode,
        "--kv-cache-memory-bytes",
        str(CACHE_BYTES),
    ]
    if config.chunk is None:
        return [*command, "--no-enable-chunked-prefill", "--max-num-seqs", "64"]
    size = str(config.chunk)
    # A batch has at most this number of tokens, so not more sequences either.
    chunks = ["--enable-chunked-prefill", "--max-num-batched-tokens", size, "--max-num-seqs", size]
    return [*command, *chunks]


def _dtype(config: ServerConfig) -> str:
    return {"fp32": "float32", "bf16": "bfloat16"}[config.precision]


def environment(config: ServerConfig) -> dict[str, str]:
    """Returns the environment of a server on a CPU, with one thread and without a network."""
    values = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # SGLang: without these it requires CUDA, and compiles code with triton.
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        # vLLM: no binding of threads to cores, which others use too, and no statistics sent.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Only vLLM's worker extension, which its server.yaml names, and nothing of this program.
        "PYTHONPATH": str(ROOT / "slime_tis" / "trainer" / "engines" / "vllm" / "worker"),
    }
    if config.raw:
        values["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"
    return values


COMMANDS: dict[EngineName, Callable[[ServerConfig, int], list[str]]] = {
    "SGLang": sglang_command,
    "vLLM": vllm_command,
}
"""The command line by engine."""


@contextmanager
def running(config: ServerConfig, log: Path) -> Iterator[str]:
    """Starts a server, yields its URL, and stops it.

    Args:
        config: The server.
        log: File for its output.

    Raises:
        MissingEnvironment: The engine's environment was not built.
        RuntimeError: The server ended, or is not up in time.
    """
    if not config.python.exists():
        raise MissingEnvironment(
            f"{config.python} does not exist: run `make {config.engine.lower()}-env`, which builds"
            f" the environment of {config.engine}."
        )
    port = free_port()
    command = COMMANDS[config.engine](config, port)
    with server_process.running(command, environment(config), port=port, log=log) as url:
        yield url


def version(config: ServerConfig) -> str:
    """Returns the versions of the engine and of its torch."""
    code = "import importlib.metadata as m; print(m.version('{}'), 'torch', m.version('torch'))"
    command = [str(config.python), "-c", code.format(config.engine.lower())]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return f"{config.engine} {output.strip()}"
