"""Metrics from the logs of other programs: TensorBoard, W&B, trainer_state.json, console logs of verl, CSV.

Every reader returns rows (step, metric, value). `METRICS_OF_PEERS` translates the names of other frameworks.
"""

import csv
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from slime_tis.errors import quoted_path

Value = tuple[int, str, float]
"""Step, metric and value."""

ABS, K3 = "train/train_rollout_logprob_abs_diff", "train/mismatch_k3_kl"
METRICS_OF_PEERS: dict[str, tuple[str, Callable[[float], float]]] = {
    "sampling/sampling_logp_difference/mean": (ABS, float),  # TRL
    "policy/rollout_train_logprobs_abs_diff_mean": (ABS, float),  # SkyRL
    "debug/vllm_vs_local_logprob_diff_mean": (ABS, float),  # open-instruct
    "train/token_mult_prob_error": (ABS, lambda value: math.log(max(value, 1.0))),  # NeMo-RL: mean exp(abs(Δ))
    "train/gen_kl_error": (K3, float),  # NeMo-RL
    "rollout_corr/k3_kl": (K3, float),  # verl
    "mismatch_kl/mean": (K3, float),  # prime-rl
    "mismatch_kl/all/mean": (K3, float),  # prime-rl from 0.6
    "optim/kl_sample_train_v2": (K3, float),  # tinker cookbook: Δ²/2
}
"""Our metric of another framework's, and the function of its value."""
STEP_COLUMNS = ("step", "_step", "global_step", "train/global_step", "training/global_step")
CONSOLE_LINE = re.compile(r"\bstep:(\d+)((?: - [^\s:]+:\S+)+)")
"""verl's console line: step:3 - actor/grad_norm:0.5 - rollout_corr/k3_kl:np.float64(0.001)."""
CONSOLE_VALUE = re.compile(r" - ([^\s:]+):(?:[\w.]+\()?([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|inf|nan))", re.IGNORECASE)
LEVELDB_BLOCK = 32_768
MAX_LOG_SIZE = 2**29
"""Largest size of a log or a metrics.jsonl, bytes."""


def read_log(path: Path) -> tuple[dict[str, float], ...] | None:
    """Returns one row of metrics per step, with `step`, in our names; None if the path is no log.

    Raises:
        ValueError: The log is too large, is damaged, or its package is not installed.
    """
    for pattern, read in READERS.items():
        files = sorted(path.rglob(pattern)) if path.is_dir() else [path] if path.match(pattern) else []
        if not files:
            continue
        newest = max(files, key=lambda file: file.stat().st_mtime)
        if newest.stat().st_size > MAX_LOG_SIZE:
            raise ValueError(f"{quoted_path(newest)} has more than {MAX_LOG_SIZE >> 20} MiB; give a dump of tokens.")
        try:
            rows = _rows(read(newest))
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, csv.Error) as error:
            raise ValueError(f"{quoted_path(newest)} cannot be read as {pattern}: {error}.") from None
        if rows:
            return rows
        if path.suffix != ".txt":
            raise ValueError(f"{quoted_path(newest)} has no metrics with steps.")
    return None


def _rows(values: Iterable[Value]) -> tuple[dict[str, float], ...]:
    rows: dict[int, dict[str, float]] = {}
    for step, name, value in values:
        own, convert = METRICS_OF_PEERS.get(name, (name, float))
        row = rows.setdefault(step, {"step": float(step)})
        row.setdefault(own, convert(value) if math.isfinite(value) else value)
    return tuple(rows[step] for step in sorted(rows))


def _tensorboard(path: Path) -> Iterator[Value]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        yield from ((event.step, name, event.value) for event in events.Scalars(name))


def _wandb(path: Path) -> Iterator[Value]:
    try:
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError:
        raise ValueError("the package wandb reads it; install slime_tis[wandb]") from None
    for data in _leveldb_records(path.read_bytes()):
        record = Record.FromString(data)
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, value in [*items.items()]:
            if isinstance(value, dict):
                items |= {f"{name}/{key}": inner for key, inner in value.items()}
        yield from _numbers(items)


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log after W&B's header of 7 bytes, up to a truncated one.

    Format: blocks of 32 KiB; a fragment is checksum (4 bytes), length (2), type (1: whole, 2: first, 3: middle,
    4: last) and data. Less than 7 bytes at the end of a block are padding.
    """
    place, parts = 7, b""
    while place + 7 <= len(data):
        if (rest := LEVELDB_BLOCK - place % LEVELDB_BLOCK) < 7:
            place += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        fragment = data[place + 7 : place + 7 + length]
        if kind not in (1, 2, 3, 4) or len(fragment) < length:
            return
        parts = fragment if kind in (1, 2) else parts + fragment
        if kind in (1, 4):
            yield parts
        place += 7 + length


def _trainer_state(path: Path) -> Iterator[Value]:
    for row in json.loads(path.read_text("utf-8"))["log_history"]:
        yield from _numbers(row)


def _csv(path: Path) -> Iterator[Value]:
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            numbers = {}
            for name, text in row.items():
                with suppress(TypeError, ValueError):
                    numbers[name] = float(text)
            yield from _numbers(numbers)


def _console(path: Path) -> Iterator[Value]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if match := CONSOLE_LINE.search(line):
                values = CONSOLE_VALUE.findall(match[2])
                yield from ((int(match[1]), name, float(value)) for name, value in values)


def _numbers(row: dict[str, Any]) -> Iterator[Value]:
    """The numbers of a row that has a step."""
    step = next((row[name] for name in STEP_COLUMNS if isinstance(row.get(name), int | float)), None)
    if step is not None:
        for name, value in row.items():
            if isinstance(value, int | float) and name not in STEP_COLUMNS:
                yield int(step), name, float(value)


READERS: dict[str, Callable[[Path], Iterator[Value]]] = {
    "*.wandb": _wandb,
    "trainer_state.json": _trainer_state,
    "events.out.tfevents.*": _tensorboard,
    "*.csv": _csv,
    "*.log": _console,
    "*.txt": _console,
    "*.out": _console,
}
"""Readers by the pattern of a file's name; of a directory the newest file of the first pattern is read."""
