"""Times rollout correction: this library, its reference, verl, slime's mis.py and a memory copy.

    python benchmarks/correction.py [--slime-mis PATH/mis.py] [--rounds 9] [--device cuda]

Everything on: truncated weights, batch normalisation, geometric rejection, veto, all metrics read;
lists in and lists out (verl and the reference: padded). CPU time of one thread, or time between
CUDA events; contenders take turns within a round, and a row has the 20, 50 and 80 % quantiles over
rounds. verl is installed from PyPI without its dependencies into `.venv-verl`. Appends rows to
correction.csv and draws correction.png.
"""

import argparse
import csv
import datetime
import importlib.util
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import venv
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TABLE, PLOT = HERE / "correction.csv", HERE / "correction.png"
VERL_VENV, VERL_PACKAGE = ROOT / ".venv-verl", "verl==0.9.1"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}
"""One thread, and an allocator that keeps its pages, as in training; else page faults drown
everything."""
COLUMNS = (
    "date",
    "machine",
    "device",
    "commit",
    "python",
    "torch",
    "size",
    "tokens",
    "valid",
    "contender",
    "p20_ms",
    "median_ms",
    "p80_ms",
    "times_copy",
    "peak_per_valid",
)

if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})

sys.path[:0] = [str(ROOT), str(HERE)]

import torch  # noqa: E402
from peers.verl_helper import load_verl_helper  # noqa: E402
from provenance import commit, machine  # noqa: E402

from slime_tis import RolloutCorrectionConfig, correct  # noqa: E402
from slime_tis.correction.reference import reference_correct  # noqa: E402

LOWER, UPPER, VETO = 0.99, 1.01, 1e-4
SIZES = {
    "64 x 512": (64, 512, 512, False),
    "512 x 2048": (512, 2048, 2048, False),
    "512 x 2k ragged": (512, 2000, 8192, True),
    "4096 x 2k ragged": (4096, 2000, 8192, True),
}
"""Name to sequences, mean length, longest, and whether lengths vary; a fifth of the tokens is
masked in spans."""


@dataclass
class Batch:
    """The same tokens as lists, packed and padded."""

    train: list[torch.Tensor]
    rollout: list[torch.Tensor]
    mask: list[torch.Tensor]

    def to(self, device: str) -> "Batch":
        """The same batch on a device."""
        train, rollout, mask = (
            [x.to(device) for x in xs] for xs in (self.train, self.rollout, self.mask)
        )
        return Batch(train, rollout, mask)

    def __post_init__(self) -> None:
        self.lengths = [len(x) for x in self.train]
        self.packed = tuple(torch.cat(x) for x in (self.train, self.rollout, self.mask))
        pad = torch.nn.utils.rnn.pad_sequence
        self.padded = tuple(pad(x, batch_first=True) for x in (self.train, self.rollout, self.mask))
        self.int_mask = [mask.int() for mask in self.mask]


def make_batch(sequences: int, mean: int, longest: int, ragged: bool) -> Batch:
    """Log-probs with precision noise and a few outliers; masked spans of 16 to 256 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((sequences,), float(mean))
    if ragged:
        lengths = (
            (torch.randn(sequences, generator=generator) * 0.8 + math.log(mean) - 0.32)
            .exp()
            .clamp(16, longest)
        )
    batch: tuple[list, list, list] = ([], [], [])
    for length in lengths.int().tolist():
        rollout = -torch.empty(length).exponential_(2.0, generator=generator)
        outlier = torch.rand(length, generator=generator) < 5e-5
        noise = torch.randn(length, generator=generator) * torch.where(outlier, 4.0, 0.02)
        spans = torch.rand(-(-length // 64), generator=generator) > 0.2
        for part, values in zip(
            batch, (rollout + noise, rollout, spans.repeat_interleave(64)[:length]), strict=True
        ):
            part.append(values)
    return Batch(*batch)


def contenders(batch: Batch, slime: Any, verl: Any) -> dict[str, Callable[[], Any]]:
    """Name to one whole call, metrics read."""
    found: dict[str, Callable[[], Any]] = {"copy": _copy(batch)}
    for level in ("token", "sequence"):
        config = RolloutCorrectionConfig(
            use_tis=True,
            tis_level=level,  # type: ignore[arg-type]
            tis_batch_normalize=True,
            use_rs=True,
            rs_level="geometric",
            rs_lower_bound=LOWER,
            rs_upper_bound=UPPER,
            rs_veto_threshold=VETO,
        )
        found[f"ours, {level}, lists"] = partial(
            _ours, config, batch.train, batch.rollout, batch.mask
        )
        found[f"ours, {level}, packed"] = partial(
            _ours, config, *batch.packed, lengths=batch.lengths
        )
        found[f"reference, {level}, padded"] = partial(reference_correct, config, *batch.padded)
    if slime is not None:
        args = Namespace(
            **{
                "use_tis": True,
                "tis_mode": "truncate",
                "tis_level": "token",
                "tis_batch_normalize": True,
            },
            **{
                "tis_lower_bound": None,
                "tis_upper_bound": 2.0,
                "use_rs": True,
                "rs_level": "geometric",
            },
            **{"rs_lower_bound": LOWER, "rs_upper_bound": UPPER, "rs_veto_threshold": VETO},
        )
        lists = {
            "train_log_probs": batch.train,
            "rollout_log_probs": batch.rollout,
            "loss_masks": batch.int_mask,
        }
        found["slime mis.py"] = lambda: slime.compute_mis_weights(args, **lists)
    if verl is not None:
        options = {
            "rollout_is": "token",
            "rollout_is_batch_normalize": True,
            "rollout_rs": "seq_mean_k1,seq_max_k3",
            "rollout_rs_threshold": f"{LOWER}_{UPPER},8.2",
        }
        found["verl 0.9.1"] = lambda: verl.compute_rollout_correction_and_rejection_mask(
            *batch.padded, **options
        )
    return found


def _ours(config: RolloutCorrectionConfig, *inputs: Any, lengths: list[int] | None = None) -> Any:
    correction = correct(config, *inputs, lengths=lengths)
    return correction, correction.statistics.metrics()


def _copy(batch: Batch) -> Callable[[], Any]:
    """14 bytes a token: two float32 and a bool read, one float32 and a bool written."""
    train, rollout, mask = batch.packed
    sums, copied = torch.empty_like(train), torch.empty_like(mask)

    def copy() -> None:
        torch.add(train, rollout, out=sums)
        copied.copy_(mask)

    return copy


@dataclass(frozen=True)
class Quantiles:
    """Milliseconds of a call: 20, 50 and 80 % of the rounds are faster."""

    p20: float
    median: float
    p80: float


def measure(calls: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, Quantiles]:
    """Milliseconds of each call; fast ones are repeated within a round."""
    seconds = _event_seconds if device == "cuda" else _cpu_seconds
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, int(0.02 / max(seconds(call, 1), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, repeats[name]) * 1e3)
    return {name: _quantiles(values) for name, values in times.items()}


def _quantiles(milliseconds: list[float]) -> Quantiles:
    if len(milliseconds) < 2:
        return Quantiles(*milliseconds * 3)
    fifths = statistics.quantiles(milliseconds, n=5, method="inclusive")
    return Quantiles(fifths[0], statistics.median(milliseconds), fifths[3])


def _event_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Time on the device between two CUDA events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def _cpu_seconds(call: Callable[[], Any], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - start) / repeats


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """Returns the peak memory of tensors of one call, from the profiler or the CUDA allocator."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        result = call()
    del result
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def prepare_verl() -> Any:
    """Returns verl's helper from a separate environment, made on the first run.

    Prints a word and returns None if the environment cannot be made.
    """
    try:
        if not list(VERL_VENV.glob("lib/python*/site-packages/verl")):
            venv.create(VERL_VENV, with_pip=True)
            pip = [
                str(VERL_VENV / "bin" / "python"),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                VERL_PACKAGE,
            ]
            subprocess.run(pip, check=True)
        return load_verl_helper(next(VERL_VENV.glob("lib/python*/site-packages")))
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"verl is skipped: {error}", file=sys.stderr)
        return None


def prepare_slime(path: Path | None) -> Any:
    """slime's mis.py from a path; None, with a message, if the file is missing."""
    if path is None or not path.is_file():
        print(
            "slime is skipped: give --slime-mis PATH/mis.py (examples/train_infer_mismatch_helper)",
            file=sys.stderr,
        )
        return None
    spec = importlib.util.spec_from_file_location("slime_mis", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--slime-mis", type=Path, help="slime's examples/train_infer_mismatch_helper/mis.py"
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="times that all contenders take their turn"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are"
    )
    parser.add_argument(
        "--sizes", nargs="+", default=list(SIZES), choices=list(SIZES), help="which batches"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    slime, verl = prepare_slime(options.slime_mis), prepare_verl()
    rows = []
    for size in options.sizes:
        batch = make_batch(*SIZES[size]).to(options.device)
        calls = contenders(batch, slime, verl)
        times = measure(calls, options.rounds, options.device)
        valid = int(batch.packed[2].sum())
        peaks = {
            name: peak_bytes(call, options.device) / (4 * valid) for name, call in calls.items()
        }
        rows += [
            row(options.device, size, batch, valid, name, times, peaks[name]) for name in calls
        ]
        report(size, times, peaks)
    append(rows)
    plot(rows)


def row(
    device: str,
    size: str,
    batch: Batch,
    valid: int,
    name: str,
    times: dict[str, Quantiles],
    peak: float,
) -> dict[str, Any]:
    """When, where, what, and how long."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, 1 thread",
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "size": size,
        "tokens": sum(batch.lengths),
        "valid": valid,
        "contender": name,
        "p20_ms": round(times[name].p20, 4),
        "median_ms": round(times[name].median, 4),
        "p80_ms": round(times[name].p80, 4),
        "times_copy": round(times[name].median / times["copy"].median, 1),
        "peak_per_valid": round(peak, 2),
    }


def report(size: str, times: dict[str, Quantiles], peaks: dict[str, float]) -> None:
    """Returns one line per contender.

    Milliseconds, ratio to the copy, ratio to ours, and peak memory over fp32 of the valid tokens.
    """
    print(f"\n{size}")
    ours, copy = times["ours, token, lists"].median, times["copy"].median
    for name, quantiles in times.items():
        value = quantiles.median
        print(
            f"  {name:24s} {value:10.3f} ms  {value / copy:8.1f} x copy  {value / ours:7.2f} x ours"
            f"  peak {peaks[name]:5.2f}"
        )


def append(rows: list[dict[str, Any]]) -> None:
    new = not TABLE.exists()
    with TABLE.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def plot(rows: list[dict[str, Any]]) -> None:
    """Times by size, one bar per contender, logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = list(dict.fromkeys(row["size"] for row in rows))
    names = list(dict.fromkeys(row["contender"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    for i, name in enumerate(names):
        values = [r["median_ms"] for r in rows if r["contender"] == name]
        axes.bar(
            [s + (i - len(names) / 2) * 0.1 for s in range(len(sizes))], values, 0.09, label=name
        )
    axes.set_yscale("log")
    axes.set_ylabel("CPU time of one thread, ms")
    axes.set_xticks(range(len(sizes)), sizes)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(PLOT, dpi=120)


if __name__ == "__main__":
    main()
