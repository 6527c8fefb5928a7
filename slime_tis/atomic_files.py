"""Files: JSON objects and metrics are read, and files are replaced so that readers see the earlier or the new one."""

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

CONFIG, METRICS = "config.yaml", "metrics.jsonl"
"""Files of a run directory that other programs read."""
ROW_SLICE = re.compile(
    r"(?P<file>.+)@\[(?P<start>-?[0-9]{1,18})?:(?P<stop>-?[0-9]{1,18})?\]", re.DOTALL
)
FOREIGN = "the file exists and is no dump of this program; move it, or give another name"


def free_name(path: Path) -> Path:
    """Returns the path, with a number appended to its name if it exists."""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


@contextmanager
def atomic_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Yields a new binary file, which replaces the file `path` at the end of the `with` block.

    The file is `.NAME.partial` until then. After an exception it is removed and `path` is
    unchanged.

    Whoever may write to the directory can replace `.NAME.partial` by a link to another file at any
    time. Therefore the file is never opened again by its name: all bytes go to the descriptor of
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
    """Returns a JSON object; raises ValueError with a message that begins with `where` for anything else."""
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
    except ValueError as error:  # Python's own bound on digits
        raise ValueError(f"{where} is not JSON: {first_line(error)}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} is JSON of type {type(value).__name__} and must be an object.")
    return value


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields file and line for messages, and the object, of each line that is not blank; raises as `parse_object`."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            content = (
                line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            )  # Excel and Notepad write it
            if content.strip():
                place = f"{path}, line {number}"
                yield place, parse_object(content, place)


def split_row_slice(path: str | Path) -> tuple[Path, slice]:
    """Returns the file and the rows of `FILE@[START:STOP]`, slime's notation; `FILE` without a slice has all rows."""
    match = ROW_SLICE.fullmatch(str(path))
    if match is None:
        return Path(path), slice(None)
    start, stop = (
        None if number is None else int(number) for number in match.group("start", "stop")
    )
    return Path(match["file"]), slice(start, stop)


def metrics_before(path: Path, step: int, *, evaluates_again: bool = False) -> list[str]:
    """Returns the lines of a metrics.jsonl before a step, without a truncated last line.

    Args:
        path: The metrics.jsonl.
        step: First step that will be logged again.
        evaluates_again: Whether an earlier resumption's row of its evaluation at the step before is
            dropped, too.
    """
    kept = []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8").strip()
            row = json.loads(text)
            repeated = (
                evaluates_again
                and row["step"] == step - 1
                and all(name == "step" or name.startswith("eval/") for name in row)
            )
            if row["step"] < step and not repeated:
                kept.append(text + "\n")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise ValueError(
                f"{path}, line {number}, is not the metrics of a step ({type(error).__name__}:"
                f" {error}); remove that line, or give another --output-dir."
            ) from None
    return kept
