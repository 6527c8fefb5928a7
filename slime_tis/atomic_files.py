"""Reads JSON objects and metrics, and replaces files atomically.

Readers see either the earlier file or the complete new one.
"""

import codecs
import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from slime_tis.errors import first_line

CONFIG = "config.yaml"
"""File of a run directory with the effective options."""
METRICS = "metrics.jsonl"
"""File of a run directory with one JSON object per step."""
ROW_SLICE = re.compile(
    r"(?P<file>.+)@\[(?P<start>-?[0-9]{1,18})?:(?P<stop>-?[0-9]{1,18})?\]", re.DOTALL
)
FOREIGN = "the file exists and is no dump of this program; move it, or give another name"


def free_name(path: Path) -> Path:
    """Returns the path, with a number appended to its name if it exists."""
    number = 1
    free = path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


@contextmanager
def atomic_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Yields a new binary file, which replaces the file `path` at the end of the `with` block.

    The file is `.NAME.partial` until then. After an exception it is removed and `path` is
    unchanged.

    Other users who may write to the directory can replace `.NAME.partial` by a link to another file
    at any time. Therefore the file is never opened again by name: all bytes go to the descriptor of
    the file that was made here.

    Raises:
        OSError: The file cannot be written, or somebody else has replaced or removed it meanwhile.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name.removeprefix('.')}.partial")
    partial.unlink(missing_ok=True)  # from a killed run, or a link that another user made
    descriptor = os.open(
        partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
    )
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            if not os.path.samestat(os.fstat(descriptor), partial.lstat()):
                raise OSError(
                    errno.ESTALE, "another process replaced it while it was written", str(partial)
                )
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: str | Path, text: str) -> None:
    """Replaces a UTF-8 text file atomically, also on a power failure.

    The directory is not flushed: a power failure just after the return may undo the replacement.
    """
    with atomic_file(path) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Returns a JSON object.

    Args:
        text: UTF-8 text of the object.
        where: File and line, with which error messages begin.

    Raises:
        ValueError: The text is anything else.
    """
    try:
        value = json.loads(text.decode())
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be read.") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: {error.reason} at byte {error.start}; unpack or convert it."
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not JSON: {error.msg} at character {error.pos + 1}."
        ) from None
    except ValueError as error:  # Python limits the digits of an integer
        raise ValueError(f"{where} is not JSON: {first_line(error)}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} is JSON of type {type(value).__name__} and must be an object.")
    return value


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every line that is not blank, as its place (file and line) and its object.

    Raises:
        ValueError: A line is not a JSON object.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:  # Excel and Notepad write a byte order mark
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                place = f"{path}, line {number}"
                yield place, parse_object(line, place)


def split_row_slice(path: str | Path) -> tuple[Path, slice]:
    """Returns the file and the rows of `FILE@[START:STOP]`, slime's notation.

    `FILE` without a slice has all rows.
    """
    match = ROW_SLICE.fullmatch(str(path))
    if match is None:
        return Path(path), slice(None)
    start = None if match["start"] is None else int(match["start"])
    stop = None if match["stop"] is None else int(match["stop"])
    return Path(match["file"]), slice(start, stop)


def metrics_before(path: Path, step: int, *, evaluates_again: bool = False) -> list[str]:
    """Returns the lines of a metrics.jsonl before a step, without a truncated last line.

    Args:
        path: The metrics.jsonl.
        step: First step that will be logged again.
        evaluates_again: Whether to drop the row of an evaluation at the previous step, which the
            resumed run repeats.
    """
    kept = []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8").strip()
            row = json.loads(text)
            row_step = row["step"]
            is_evaluation = all(name == "step" or name.startswith("eval/") for name in row)
            is_repeated = evaluates_again and is_evaluation and row_step == step - 1
            if row_step < step and not is_repeated:
                kept.append(text + "\n")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break  # the run was killed while it wrote this line
            raise ValueError(
                f"{path}, line {number}, is not the metrics of a step ({type(error).__name__}:"
                f" {error}); remove that line, or give another --output-dir."
            ) from None
    return kept
