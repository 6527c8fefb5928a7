"""The token pass on a GPU: fused and eager, compared with a copy of the same bytes.

    python -m benchmarks.token_pass [--tokens 8388608] [--rounds 50] [--device cpu]

Sequences of up to 8192 tokens, of many lengths and of one; float32 log-probs and a bool mask. The copy moves 14
bytes per token: it reads 7 and writes 7. Time between CUDA events, the second-level cache overwritten before each call,
contenders in turns, 20, 50 and 80 % quantiles. Should the fused pass wait for the host, the benchmark ends with an
error. Appends rows to token_pass.csv. Needs CUDA and triton; with `--device cpu` the kernels run in Triton's
interpreter, under TRITON_INTERPRET=1, and the times mean nothing but that all of it runs.
"""

import argparse
import csv
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import commit
from slime_tis import RolloutCorrectionConfig
from slime_tis.correction.layout import INPUTS, as_layout
from slime_tis.correction.token_pass import torch_token_pass

ROWS = Path(__file__).with_suffix(".csv")
LONGEST = 8192
CACHE_BYTES = 1 << 28
"""More than the second-level cache of any GPU."""
CONFIGS = {
    "token": RolloutCorrectionConfig(use_tis=True, use_rs=True, rs_level="geometric", rs_veto_threshold=1e-4),
    "geometric": RolloutCorrectionConfig(use_tis=True, tis_level="geometric", rs_veto_threshold=1e-4),
}


def lengths_of(tokens: int, ragged: bool) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    lengths = [LONGEST] * (tokens // LONGEST)
    if ragged:
        lengths = []
        while sum(lengths) < tokens:
            lengths.append(int(torch.randint(16, LONGEST // 2, (1,), generator=generator)))
        lengths[-1] -= sum(lengths) - tokens
    return lengths


def contenders(config: RolloutCorrectionConfig, tensors: list[torch.Tensor], lengths: list[int]) -> dict[str, Callable]:
    from experimental.triton_token_pass import token_pass

    (chunk,) = as_layout(dict(zip(INPUTS, tensors, strict=False)), lengths).chunks()
    moved = torch.empty(7 * sum(lengths), dtype=torch.uint8, device=tensors[0].device)
    target = torch.empty_like(moved)

    return {
        "copy": lambda: target.copy_(moved),
        "fused": lambda: token_pass(config, chunk),
        "eager": lambda: torch_token_pass(config, chunk),
    }


def measure(calls: dict[str, Callable], rounds: int, device: str) -> dict[str, list[float]]:
    """Milliseconds of each call, after some that are not counted; on a GPU a call that synchronises is an error."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    on_gpu = device == "cuda"
    flush = torch.empty(CACHE_BYTES if on_gpu else 1, dtype=torch.uint8, device=device)
    for round_number in range(-3 if on_gpu else -1, rounds):
        for name, call in calls.items():
            flush.zero_()
            found = (
                gpu_milliseconds(call, checks=name == "fused" and round_number >= -1)
                if on_gpu
                else cpu_milliseconds(call)
            )
            if round_number >= 0:
                times[name].append(found)
    return times


def gpu_milliseconds(call: Callable, checks: bool) -> float:
    """Time between two events; with `checks` a synchronisation with the host is an error."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.set_sync_debug_mode("error" if checks else "default")
    try:
        begin.record()
        call()
        end.record()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    end.synchronize()
    return begin.elapsed_time(end)


def cpu_milliseconds(call: Callable) -> float:
    start = time.process_time()
    call()
    return 1e3 * (time.process_time() - start)


def rows_of(tokens: int, rounds: int, device: str) -> list[dict[str, Any]]:
    import triton

    rows = []
    for layout in ("ragged", "one length"):
        lengths = lengths_of(tokens, layout == "ragged")
        rollout = -torch.empty(sum(lengths), device=device).exponential_(2.0)
        train = rollout + 0.02 * torch.randn_like(rollout)
        mask = torch.rand_like(rollout) > 0.2
        for level, config in CONFIGS.items():
            times = measure(contenders(config, [train, rollout, mask], lengths), rounds, device)
            copy = statistics.median(times["copy"])
            for name, values in times.items():
                low, median, high = (statistics.quantiles(values, n=10)[i] for i in (1, 4, 7))
                rows.append(
                    {
                        "date": date.today().isoformat(),
                        "gpu_name": torch.cuda.get_device_name() if device == "cuda" else "none, interpreted",
                        "commit": commit(),
                        "torch": torch.__version__,
                        "triton": triton.__version__,
                        "layout": layout,
                        "tokens": sum(lengths),
                        "level": level,
                        "contender": name,
                        "p20_ms": round(low, 4),
                        "median_ms": round(median, 4),
                        "p80_ms": round(high, 4),
                        "gb_per_s": round(14e-6 * sum(lengths) / median, 1),
                        "times_copy": round(median / copy, 2),
                    }
                )
                print(*rows[-1].values())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1 << 23, help="tokens of the batch, at most 2^24")
    parser.add_argument("--rounds", type=int, default=50, help="times that all contenders take their turn")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the code out")
    parser.add_argument("--out", type=Path, default=ROWS, help="table to append to (default token_pass.csv)")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "There is no CUDA device: this benchmark measures the memory bandwidth of a GPU. Nothing was measured."
        )
    if options.device == "cpu" and options.out == ROWS:
        sys.exit("--device cpu measures nothing; name another table than token_pass.csv with --out.")
    if options.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("--device cpu needs TRITON_INTERPRET=1: there is no compiler for a CPU.")
    if not LONGEST <= options.tokens <= 1 << 24:
        sys.exit(f"--tokens is {options.tokens}; choose {LONGEST} to {1 << 24}, one chunk of the correction.")
    if options.rounds < 5:
        sys.exit(f"--rounds is {options.rounds}; quantiles need 5 or more.")
    if importlib.util.find_spec("triton") is None:
        sys.exit("triton is not installed: there is nothing to compare.")
    rows = rows_of(options.tokens, options.rounds, options.device)
    new = not options.out.exists()
    with options.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
