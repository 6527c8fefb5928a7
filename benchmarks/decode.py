"""Decoding of SmolLM2 on one thread: the in-process engine and vLLM's CPU build.

    python -m benchmarks.decode --hf-checkpoint DIR [--precisions fp32 bf16] [--rounds 3]

64 sequences, 8 for each of 8 prompts of 28 tokens, of exactly 32 sampled tokens with their
log-probs. Each contender runs in a separate process, and the contenders take turns within a round.
A process makes a warm-up call, which is not counted, and two measured calls. vLLM is started
eagerly from `.venv-vllm` (`make vllm-env`). Appends a row per contender to decode.csv: the median,
the slowest and the fastest call.
"""

import argparse
import csv
import datetime
import importlib.metadata
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.decode_task import RATE, DecodeTask
from benchmarks.provenance import ROOT, commit, machine

TABLE = ROOT / "benchmarks" / "decode.csv"
PEERS = ROOT / "benchmarks" / "peers"
OURS = "slime_tis, in-process engine"
VLLM = "vLLM, CPU build, eager"
SCRIPTS = {
    OURS: (Path(sys.executable), PEERS / "our_decode.py"),
    VLLM: (ROOT / ".venv-vllm" / "bin" / "python", PEERS / "vllm_decode.py"),
}
"""The contenders by name: their interpreter and script."""
COLUMNS = (
    "date",
    "machine",
    "commit",
    "threads",
    "contender",
    "version",
    "model",
    "precision",
    "sequences",
    "tokens",
    "calls",
    "median_tokens_per_cpu_s",
    "slowest",
    "fastest",
)


def measure(name: str, checkpoint: Path, precision: str) -> list[float]:
    """Tokens per second of the processor of one contender, by calls of one process.

    Raises:
        SystemExit: the process failed; its output is the message.
    """
    python, script = SCRIPTS[name]
    command = [str(python), str(script), str(checkpoint), precision]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{PEERS}",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    rates = []
    for line in done.stdout.splitlines():
        if line.startswith(RATE):
            rates.append(float(line.removeprefix(RATE)))
    return rates


def row(name: str, precision: str, rates: list[float]) -> dict[str, object]:
    """The row of a contender in decode.csv."""
    version = commit()
    if name == VLLM:
        python, _ = SCRIPTS[VLLM]
        question = "from importlib.metadata import version; print(version('vllm'))"
        version = subprocess.check_output([str(python), "-c", question], text=True).strip()
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "commit": commit(),
        "threads": 1,
        "contender": name,
        "version": version,
        "model": "SmolLM2-135M-Instruct",
        "precision": precision,
        "sequences": DecodeTask.sequences,
        "tokens": DecodeTask.new_tokens,
        "calls": len(rates),
        "median_tokens_per_cpu_s": round(statistics.median(rates), 1),
        "slowest": round(min(rates), 1),
        "fastest": round(max(rates), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf-checkpoint", type=Path, required=True, help="directory of SmolLM2")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], help="of the weights")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each contender")
    options = parser.parse_args()
    vllm_python, _ = SCRIPTS[VLLM]
    if not vllm_python.exists():
        sys.exit(f"{vllm_python} is missing; build vLLM's environment with: make vllm-env")
    print(f"torch {importlib.metadata.version('torch')} on {machine()}", file=sys.stderr)
    rows = []
    for precision in options.precisions:
        rates: dict[str, list[float]] = {name: [] for name in SCRIPTS}
        for turn in range(options.rounds):
            for name in SCRIPTS:
                found = measure(name, options.hf_checkpoint.resolve(), precision)
                rates[name] += found
                shown = ", ".join(f"{rate:.1f}" for rate in found)
                print(f"round {turn + 1}: {name}, {precision}: {shown}", flush=True)
        for name, values in rates.items():
            rows.append(row(name, precision, values))
    with TABLE.open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, COLUMNS, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
