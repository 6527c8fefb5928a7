"""Rows of a prompt file, JSONL or parquet, each with its place for messages."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = tuple[str, dict[str, Any]]
"""File and line for messages, and the row."""

FORMATS = {
    b"\x1f\x8b": "is compressed with gzip; unpack it",
    b"PK\x03\x04": "is a zip archive; unpack it",
    b"BZh": "is compressed with bzip2; unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; unpack it",
    b"\xfd7zXZ": "is compressed with xz; unpack it",
    b"PAR1": "is parquet; let its name end in .parquet",
    codecs.BOM_UTF16_LE: "is UTF-16; save it as UTF-8",
    codecs.BOM_UTF16_BE: "is UTF-16; save it as UTF-8",
}
"""First bytes of files that are not JSONL, and what to do."""
HEAD = 4096
"""Bytes that are checked before anything is built."""


def check_is_text(path: Path) -> None:
    """Raises ValueError if the first bytes of a prompt file are compressed, UTF-16, misnamed parquet, or binary."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    if path.suffix == ".parquet":
        if not head.startswith(b"PAR1"):
            raise ValueError(f"{path} is not a parquet file despite its name; JSONL files end in .jsonl.")
        return
    for magic, advice in FORMATS.items():
        if head.startswith(magic):
            raise ValueError(f"{path} {advice}.")
    if b"\0" in head:
        raise ValueError(f"{path} is binary, but must hold a JSON object on each line, or be parquet.")


def rows_of(path: Path) -> Iterator[Row]:
    """Yields the rows of a file without blank lines; raises ValueError with the line of an invalid row."""
    check_is_text(path)
    return _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line  # Excel and Notepad write it
            if not content.strip():
                continue
            place = f"{path}, line {number}"
            row = _parsed(content, place)
            if not isinstance(row, dict):
                raise ValueError(f"{place} is JSON of type {type(row).__name__}, but each line must be an object.")
            yield place, row


def _parsed(line: bytes, place: str) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise ValueError(
            f"{place} is not UTF-8: byte 0x{byte:02x} at byte {error.start + 1}; save it as UTF-8."
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error.msg} at column {error.colno}.") from None
    except RecursionError:
        raise ValueError(f"{place} is JSON that is nested too deeply to be read.") from None
    except ValueError:  # Python's own bound on digits
        raise ValueError(f"{place} has a number of thousands of digits; write it as a string.") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"{str(path)!r} is parquet, which needs pyarrow; install it with: pip install 'slime_tis[parquet]'."
        ) from error
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        words = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"{path} cannot be read as parquet after row {number}: {words.rstrip('.')}.") from None
