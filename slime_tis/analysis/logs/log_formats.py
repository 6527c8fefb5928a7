"""Readers of log files. Each yields (step, name, value) from an open regular file and reads it in small pieces.

They raise ValueError with what is wrong, or an exception of `DAMAGES`; `read_log` names the file.
"""

import csv
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from slime_tis.analysis.logs.log_table import MISMATCH_NAMES
from slime_tis.analysis.logs.peer_metrics import PEER_METRICS

Value = tuple[float, str, float]
"""Step, metric and value."""
MAX_LINE = 1 << 20
"""Longest line of a text log, bytes."""
MAX_JSON = 1 << 26
"""Largest JSON file, bytes: it is parsed at once."""
MAX_JSON_VALUES = 2_000_000
"""Values of a JSON file; each takes up to 150 bytes in Python."""
MAX_RECORD = 1 << 26
"""Largest record of a binary log, bytes."""
STEP_COLUMNS = (
    "step",
    "_step",
    "global_step",
    "train/global_step",
    "training/global_step",
    "trainer/global_step",
)
"""Columns and keys with the step, in lower case."""
CONSOLE_LINE = re.compile(r"\bstep:(\d{1,20})((?: - [^\s:]+:\S+)+)")
"""verl's console line: step:3 - actor/grad_norm:0.5 - rollout_corr/k3_kl:np.float64(0.001)."""
CONSOLE_VALUE = re.compile(
    r" - ([^\s:]+):(?:[\w.]+\()?([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|inf|nan))", re.IGNORECASE
)
LEVELDB_BLOCK = 32_768
WANDB_HEADER = b":W&B"
DAMAGES = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    csv.Error,
    OverflowError,
    RecursionError,
)
"""What a reader raises for damaged content."""


class Reader(NamedTuple):
    """How one kind of log is found and read."""

    pattern: str
    """Pattern of the file's name."""
    places: tuple[str, ...]
    """Folders of a run in which the program that writes it puts the file, as patterns; its own
    folder is always one."""
    read: Callable[[BinaryIO, Path], Iterator[Value]]


def _lines(file: BinaryIO) -> Iterator[str]:
    """The lines of a text file, with damaged characters replaced."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise ValueError(f"line {number} has more than {MAX_LINE:,} bytes")
        yield line.decode("utf-8-sig" if number == 1 else "utf-8", errors="replace")


def _number(value: Any) -> float | None:
    """A JSON number as a float, ±inf beyond a float's range; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _numbers(row: dict[str, Any]) -> Iterator[Value]:
    """The numbers of a row that has a step."""
    step = None
    for name, value in row.items():
        if str(name).lower() in STEP_COLUMNS and step is None:
            step = _number(value)
    if step is None:
        return
    for name, value in row.items():
        number = _number(value)
        if number is not None and str(name).lower() not in STEP_COLUMNS:
            yield step, str(name), number


def tensorboard(file: BinaryIO, path: Path) -> Iterator[Value]:
    """The scalars of an event file."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.util import tensor_util

    for data in _tfrecords(file):
        event = Event.FromString(data)
        for value in event.summary.value:
            if value.HasField("simple_value"):
                yield event.step, value.tag, value.simple_value
            elif (
                value.HasField("tensor")
                and not value.tensor.tensor_shape.dim
                and value.tensor.dtype in (1, 2)
            ):
                yield event.step, value.tag, float(tensor_util.make_ndarray(value.tensor))


def _tfrecords(file: BinaryIO) -> Iterator[bytes]:
    """The records of a TFRecord file with correct checksums, up to a truncated one.

    Format: length (8 bytes), its checksum (4), data, their checksum (4).
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    place = 0
    while len(head := file.read(12)) == 12:
        length, checksum = struct.unpack("<QI", head)
        if masked_crc32c(head[:8]) != checksum or length > MAX_RECORD:
            raise ValueError(f"the record at byte {place} is damaged")
        data = file.read(length + 4)
        if len(data) < length + 4:
            return
        if masked_crc32c(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
            raise ValueError(f"the record at byte {place} is damaged")
        yield data[:-4]
        place += len(head) + len(data)


def wandb(file: BinaryIO, path: Path) -> Iterator[Value]:
    """The history of an offline run."""
    try:
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError:
        raise ValueError("the package wandb reads it; install slime_tis[wandb]") from None
    for data in wandb_records(file):
        record = Record.FromString(data)
        items: dict[str, Any] = {}
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            value = json.loads(item.value_json)
            if isinstance(value, dict):
                items |= {f"{name}/{key}": inner for key, inner in value.items()}
            else:
                items[name] = value
        yield from _numbers(items)


def wandb_records(file: BinaryIO) -> Iterator[bytes]:
    """The records of a W&B file, a LevelDB log after a header of 7 bytes, up to a truncated one.

    Format: blocks of 32 KiB of fragments, which never cross the end of a block. A fragment is
    checksum (4 bytes, CRC-32 of type and data), length (2), type (1: complete, 2: first, 3: middle,
    4: last) and data. Less than 7 bytes at the end of a block are padding. wandb removed its own
    Python reader in 2025.
    """
    place = 0
    parts: list[bytes] = []
    while block := file.read(LEVELDB_BLOCK):
        start = 7 if place == 0 else 0
        if place == 0 and not block.startswith(WANDB_HEADER):
            raise ValueError("it does not begin with W&B's header")
        is_last = len(block) < LEVELDB_BLOCK
        while start + 7 <= len(block):
            checksum, length, kind = struct.unpack_from("<IHB", block, start)
            data = block[start + 7 : start + 7 + length]
            if len(data) < length and is_last and kind in (1, 2, 3, 4):
                return  # the run was killed while it wrote
            if kind == 0 and not any(block[start:]):
                break  # a preallocated end
            if (
                len(data) < length
                or kind not in (1, 2, 3, 4)
                or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum
            ):
                raise ValueError(f"the record at byte {place + start} is damaged")
            if (kind in (1, 2)) == bool(parts):
                raise ValueError(f"the record at byte {place + start} is out of order")
            parts.append(data)
            if sum(map(len, parts)) > MAX_RECORD:
                raise ValueError(
                    f"the record at byte {place + start} has more than {MAX_RECORD >> 20} MiB"
                )
            if kind in (1, 4):
                yield b"".join(parts)
                parts = []
            start += 7 + length
        place += len(block)


def trainer_state(file: BinaryIO, path: Path) -> Iterator[Value]:
    """The log history of transformers and TRL."""
    text = file.read(MAX_JSON + 1)
    if len(text) > MAX_JSON:
        raise ValueError(f"it has more than {MAX_JSON >> 20} MiB")
    if text.count(b",") > MAX_JSON_VALUES:
        raise ValueError(f"it has more than {MAX_JSON_VALUES:,} values")
    state = json.loads(text)
    history = state.get("log_history", []) if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise ValueError("it has no list log_history, as transformers writes it")
    for row in history:  # empty for the file of this name in a checkpoint of this program
        if not isinstance(row, dict):
            raise ValueError(f"its log_history has a {type(row).__name__} instead of an object")
        yield from _numbers(row)


def csv_table(file: BinaryIO, path: Path) -> Iterator[Value]:
    """A table with a step column, or a chart that W&B or TensorBoard exported."""
    rows = csv.reader(_lines(file))
    header = next(rows, [])
    lower = [name.strip().lower() for name in header]
    step = next((lower.index(name) for name in STEP_COLUMNS if name in lower), None)
    if step is None:
        return
    names = _csv_names(header, step, path)
    for row in rows:
        place = _float(row[step]) if step < len(row) else None
        if place is None:
            continue
        for name, text in zip(names, row, strict=False):
            number = _float(text) if name else None
            if number is not None:
                yield place, name, number


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _csv_names(header: list[str], step: int, path: Path) -> list[str]:
    """The metric of each column; empty for the columns that are none.

    W&B exports `"Step","RUN - METRIC","RUN - METRIC__MIN","RUN - METRIC__MAX"`; TensorBoard `Wall
    time,Step,Value` in a file run-RUN-tag-TAG.csv, with _ for / in TAG.
    """
    others = [name for index, name in enumerate(header) if index != step]
    if [name.strip().lower() for name in others] == ["wall time", "value"]:
        tag = path.stem.rpartition("tag-")[2]
        by_file_name = {
            name.replace("/", "_"): name for name in (*PEER_METRICS, *sorted(MISMATCH_NAMES))
        }
        return [
            "" if name != "Value" else by_file_name.get(tag, tag)
            for name in (name.strip() for name in header)
        ]
    is_export = bool(others) and all(" - " in name for name in others)
    if not is_export:
        return ["" if index == step else name.strip() for index, name in enumerate(header)]
    runs = sorted({name.rpartition(" - ")[0] for name in others})
    if len(runs) > 1:
        raise ValueError(f"it has the curves of {len(runs)} runs; export the chart of one run")
    names = [name.rpartition(" - ")[2] for name in header]
    return [
        "" if index == step or name.endswith(("__MIN", "__MAX")) else name
        for index, name in enumerate(names)
    ]


def console(file: BinaryIO, path: Path) -> Iterator[Value]:
    """verl's console log."""
    for line in _lines(file):
        match = CONSOLE_LINE.search(line)
        if match is None:
            continue
        for name, value in CONSOLE_VALUE.findall(match[2]):
            number = _float(value)
            if number is not None:
                yield float(match[1]), name, number


READERS = (
    Reader("*.wandb", ("wandb/*", "offline-run-*", "run-*"), wandb),
    Reader("trainer_state.json", ("checkpoint-*",), trainer_state),
    Reader("events.out.tfevents.*", ("runs/*", "logs"), tensorboard),
    Reader("*.csv", (), csv_table),
    Reader("*.log", (), console),
    Reader("*.txt", (), console),
    Reader("*.out", (), console),
)
"""Readers, the likeliest source of mismatch metrics first."""


def is_damage(error: Exception) -> bool:
    """Whether an exception means damaged content; protobuf's DecodeError is known by name, as it is optional."""
    return isinstance(error, DAMAGES) or type(error).__name__ == "DecodeError"
