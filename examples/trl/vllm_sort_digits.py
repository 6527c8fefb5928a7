"""TRL's GRPO sorts ten digits, sampling through a real vLLM server; `make train-trl-vllm` runs it.

    make vllm-env data
    python -m examples.trl.vllm_sort_digits --steps 24 --output-dir runs/trl_vllm

The program starts a server in bfloat16 on this machine's processor, and ends it. With --vllm-url it
samples from a server that runs.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from examples.server_process import free_port, running
from examples.trl import sort_digits
from examples.trl.vllm_sampler import VllmSampler

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
"""The interpreter of the environment that `make vllm-env` builds."""
WORKER = ROOT / "slime_tis" / "trainer" / "engines" / "vllm" / "worker"
"""Directory of the worker extension, which loads weights."""
CONTEXT = 64
"""Largest number of tokens of a prompt with its answer."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--data", type=Path, default=Path("data/sort_digits"), help="from `make data`"
    )
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of 128 samples")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/trl_vllm"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--vllm-url", help="a server that runs; without it one is started")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.vllm_url:
        run(options, options.vllm_url)
        return
    log = options.output_dir / "vllm.log"
    with server(options.data / "checkpoint", log, dtype=options.dtype) as url:
        run(options, url)


def run(options: argparse.Namespace, url: str) -> None:
    """Trains on samples of the server, and prints the accuracy on held-out prompts."""
    sampler = VllmSampler(url, options.output_dir)
    sort_digits.run(
        options.data,
        options.output_dir,
        steps=options.steps,
        rollout_func=sampler,
        rollout_precision=sampler.precision,
    )


@contextmanager
def server(checkpoint: Path, log: Path, *, dtype: str) -> Iterator[str]:
    """Starts a vLLM server on this machine's processor, yields its URL, and ends it.

    Args:
        checkpoint: Directory of the model.
        log: File for the server's output.
        dtype: Of the server's weights.
    """
    if not PYTHON.exists():
        raise SystemExit(
            f"error: {PYTHON} does not exist: run `make vllm-env`, which builds the server's"
            " environment, or name a server with --vllm-url."
        )
    port = free_port()
    command = [
        str(PYTHON),
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(checkpoint),
        "--config",
        str(ROOT / "tools" / "vllm_cpu" / "server.yaml"),
        "--port",
        str(port),
        "--dtype",
        dtype,
        "--max-model-len",
        str(CONTEXT),
    ]
    with running(command, server_environment(), port=port, log=log) as url:
        yield url


def server_environment() -> dict[str, str]:
    """Returns the environment of a server on a CPU, with one thread and without a network."""
    return {
        **os.environ,
        # The server's Python must not import this program's packages, only the worker extension.
        "PYTHONPATH": str(WORKER),
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for weights
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


if __name__ == "__main__":
    main()
