"""Readers of log files. Each yields (step, name, value) from an open file, in small pieces.

They raise ValueError with the problem, or another exception of `DAMAGES`; `read_log` adds the file.
"""

import codecs
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
"""Largest JSON file, bytes. It is parsed at once."""
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
"""Size of the blocks of a W&B file, bytes."""
WANDB_HEADER = b":W&B"
NOT_UTF_8 = {
    codecs.BOM_UTF16_LE: "it is text in UTF-16; convert it to UTF-8",
    codecs.BOM_UTF16_BE: "it is text in UTF-16; convert it to UTF-8",
    b"\x1f\x8b": "it is compressed with gzip; unpack it",
}
"""Problems of a text log, by the first bytes of the file. PowerShell redirects output as UTF-16."""
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
"""Exceptions of readers for damaged content."""


class Reader(NamedTuple):
    """One kind of log: its files and its reader."""

    pattern: str
    """Pattern of the file's name."""
    folders: tuple[str, ...]
    """Patterns of the folders in a run that may have the file, besides the run's top folder."""
    read: Callable[[BinaryIO, Path], Iterator[Value]]


def _lines(file: BinaryIO) -> Iterator[str]:
    """Yields the lines of a text file, with damaged characters replaced.

    Raises:
        ValueError: A line is too long, or the file is no UTF-8.
    """
    number = 0
    # A bound for readline, because a file without line ends would be read as one line.
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise ValueError(f"line {number} has more than {MAX_LINE:,} bytes")
        encoding = "utf-8"
        if number == 1:
            for start, problem in NOT_UTF_8.items():
                if line.startswith(start):
                    raise ValueError(problem)
            encoding = "utf-8-sig"  # without a byte order mark
        yield line.decode(encoding, errors="replace")


def _number(value: Any) -> float | None:
    """A JSON number as a float, ±inf beyond the range of floats; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of floats
        if value > 0:
            return float("inf")
        return float("-inf")


def _numbers(row: dict[str, Any]) -> Iterator[Value]:
    """Yields the numbers of a row that has a step."""
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
    """Yields the scalars in an event file."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.util import tensor_util

    for data in _tfrecords(file):
        event = Event.FromString(data)
        for value in event.summary.value:
            if value.HasField("simple_value"):
                yield event.step, value.tag, value.simple_value
            elif value.HasField("tensor"):
                # Newer writers use tensors without dimensions; 1 and 2 are DT_FLOAT and DT_DOUBLE.
                tensor = value.tensor
                if not tensor.tensor_shape.dim and tensor.dtype in (1, 2):
                    yield event.step, value.tag, float(tensor_util.make_ndarray(tensor))


def _tfrecords(file: BinaryIO) -> Iterator[bytes]:
    """Yields the records of a TFRecord file up to a truncated one, and checks their checksums.

    Format: length (8 bytes), its checksum (4), data, their checksum (4).
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    offset = 0
    while len(head := file.read(12)) == 12:
        length, length_checksum = struct.unpack("<QI", head)
        if masked_crc32c(head[:8]) != length_checksum or length > MAX_RECORD:
            raise ValueError(f"the record at byte {offset} is damaged")
        tail = file.read(length + 4)
        if len(tail) < length + 4:  # the run was killed while it wrote
            return
        data = tail[:-4]
        (checksum,) = struct.unpack("<I", tail[-4:])
        if masked_crc32c(data) != checksum:
            raise ValueError(f"the record at byte {offset} is damaged")
        yield data
        offset += len(head) + len(tail)


def wandb(file: BinaryIO, path: Path) -> Iterator[Value]:
    """Yields the history of an offline run."""
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
    """Yields the records of a W&B file up to a truncated one: a LevelDB log after a 7-byte header.

    Format: blocks of 32 KiB of fragments, which never cross the end of a block. A fragment is
    checksum (4 bytes, CRC-32 of type and data), length (2), type (1: complete, 2: first, 3: middle,
    4: last) and data. Less than 7 bytes at the end of a block are padding. wandb removed its own
    Python reader in 2025.
    """
    offset = 0  # of the block in the file
    parts: list[bytes] = []
    while block := file.read(LEVELDB_BLOCK):
        start = 7 if offset == 0 else 0  # of the fragment in the block
        if offset == 0 and not block.startswith(WANDB_HEADER):
            raise ValueError("it does not begin with W&B's header")
        is_last = len(block) < LEVELDB_BLOCK
        while start + 7 <= len(block):
            checksum, length, kind = struct.unpack_from("<IHB", block, start)
            data = block[start + 7 : start + 7 + length]
            if len(data) < length and is_last and kind in (1, 2, 3, 4):
                return  # the run was killed while it wrote
            if not any(block[start:]):
                break  # a preallocated end
            is_valid = kind in (1, 2, 3, 4) and len(data) == length
            if not is_valid or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
                raise ValueError(f"the record at byte {offset + start} is damaged")
            starts_record = kind in (1, 2)
            if starts_record == bool(parts):
                raise ValueError(f"the record at byte {offset + start} is out of order")
            parts.append(data)
            if sum(map(len, parts)) > MAX_RECORD:
                raise ValueError(
                    f"the record at byte {offset + start} has more than {MAX_RECORD >> 20} MiB"
                )
            if kind in (1, 4):
                yield b"".join(parts)
                parts = []
            start += 7 + length
        offset += len(block)


def trainer_state(file: BinaryIO, path: Path) -> Iterator[Value]:
    """Yields the log history of transformers and TRL."""
    text = file.read(MAX_JSON + 1)
    if len(text) > MAX_JSON:
        raise ValueError(f"it has more than {MAX_JSON >> 20} MiB")
    if text.count(b",") > MAX_JSON_VALUES:  # a bound that needs no parsing
        raise ValueError(f"it has more than {MAX_JSON_VALUES:,} values")
    state = json.loads(text)
    history = None
    if isinstance(state, dict):
        history = state.get("log_history", [])
    if not isinstance(history, list):
        raise ValueError("it has no list log_history, as transformers writes it")
    for row in history:  # empty for the file of this name in a checkpoint of this program
        if not isinstance(row, dict):
            raise ValueError(f"its log_history has a {type(row).__name__} instead of an object")
        yield from _numbers(row)


def csv_table(file: BinaryIO, path: Path) -> Iterator[Value]:
    """Yields a table with a step column, or a chart that W&B or TensorBoard exported."""
    rows = csv.reader(_lines(file))
    header = next(rows, [])
    lower = [name.strip().lower() for name in header]
    step_columns = [lower.index(name) for name in STEP_COLUMNS if name in lower]
    if not step_columns:
        return
    step_column = step_columns[0]
    names = _csv_names(header, step_column, path)
    for row in rows:
        step = None
        if step_column < len(row):
            step = _float(row[step_column])
        if step is None:
            continue
        for name, text in zip(names, row, strict=False):  # the last row may be cut
            number = _float(text)
            if name and number is not None:
                yield step, name, number


def _float(text: str) -> float | None:
    """Returns the number in a text, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def _csv_names(header: list[str], step: int, path: Path) -> list[str]:
    """The metric per column; empty for a column that is not a metric.

    W&B exports `"Step","RUN - METRIC","RUN - METRIC__MIN","RUN - METRIC__MAX"`; TensorBoard `Wall
    time,Step,Value` in a file run-RUN-tag-TAG.csv, with _ for / in TAG.
    """
    others = [name for index, name in enumerate(header) if index != step]
    if [name.strip().lower() for name in others] == ["wall time", "value"]:
        tag = path.stem.rpartition("tag-")[2]
        metric = tag
        for name in (*PEER_METRICS, *sorted(MISMATCH_NAMES)):
            if name.replace("/", "_") == tag:
                metric = name
        return [metric if name.strip() == "Value" else "" for name in header]
    is_export = bool(others) and all(" - " in name for name in others)
    if not is_export:
        return ["" if index == step else name.strip() for index, name in enumerate(header)]
    runs = sorted({name.rpartition(" - ")[0] for name in others})
    if len(runs) > 1:
        raise ValueError(f"it has the curves of {len(runs)} runs; export the chart of one run")
    names = []
    for index, name in enumerate(header):
        metric = name.rpartition(" - ")[2]
        # W&B adds the ranges of curves, which are no metrics.
        if index == step or metric.endswith(("__MIN", "__MAX")):
            metric = ""
        names.append(metric)
    return names


def console(file: BinaryIO, path: Path) -> Iterator[Value]:
    """Yields the metrics in verl's console log."""
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
    """Returns whether an exception means damaged content.

    protobuf is optional, so its DecodeError is recognized by name.
    """
    return isinstance(error, DAMAGES) or type(error).__name__ == "DecodeError"
