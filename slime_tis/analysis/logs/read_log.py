"""Finds the log in a directory and reads it.

Path → files that match the readers' patterns → the first one with a mismatch metric, else the
first one with metrics → LogTable
"""

import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from slime_tis.analysis.logs.log_formats import READERS, Reader, is_damage
from slime_tis.analysis.logs.log_table import LogTable
from slime_tis.errors import first_line, quoted_path

MAX_LOG_SIZE = 2**29
"""Largest size of a log or a metrics.jsonl, bytes."""
MAX_FILES = 20
"""Files with one pattern that are tried in a directory, the newest ones."""
PROGRAMS = {"trainer_state.json": "TRL", "*.log": "verl", "*.txt": "verl", "*.out": "verl"}
"""The framework of a file whose metrics name none, by the reader's pattern."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """Metrics that another program has logged."""

    rows: LogTable
    file: Path
    framework: str
    """The framework that wrote the log; empty if unknown."""
    passed_over: tuple[str, ...] = ()
    """Sentences on files that look like logs and are damaged."""


def read_log(path: Path) -> Log | None:
    """Returns the metrics of a log, or of the log in a directory; None if there is none.

    In a directory, the top folder and the folders of `Reader.folders` are searched. Files without
    metrics are passed over.

    Raises:
        ValueError: The file is damaged, too large or no regular file, or its package is not
            installed.
    """
    if not path.is_dir():
        for reader in READERS:
            if path.match(reader.pattern):
                return _read_file(path, reader)
        return None
    with_metrics: Log | None = None
    passed_over: list[str] = []
    for reader in READERS:
        for file in _candidates(path, reader):
            try:
                log = _read_file(file, reader)
            except (ValueError, OSError) as error:
                passed_over.append(str(error))
                continue
            if log is not None and log.rows.has_mismatch:
                return replace(log, passed_over=tuple(passed_over))
            with_metrics = with_metrics or log
    if with_metrics is None and passed_over:
        raise ValueError(" ".join(passed_over[:3]))
    return with_metrics


def names_of_logs(directory: Path) -> list[str]:
    """Returns the names of the files in a directory that may be logs."""
    names: set[str] = set()
    for reader in READERS:
        names.update(str(file.relative_to(directory)) for file in _candidates(directory, reader))
    return sorted(names)


def _candidates(directory: Path, reader: Reader) -> list[Path]:
    """Regular files of a directory that a reader may read, the newest first."""
    files = list(directory.glob(reader.pattern))
    for folder in reader.folders:
        files += directory.glob(f"{folder}/{reader.pattern}")
    regular = [file for file in files if file.is_file()]
    return sorted(regular, key=lambda file: -file.stat().st_mtime)[:MAX_FILES]


def _read_file(path: Path, reader: Reader) -> Log | None:
    """The metrics of one file; None if it has none."""
    rows = LogTable()
    try:
        with open_regular(path) as file:
            for step, name, value in reader.read(file, path):
                rows.add(step, name, value)
    except Exception as error:
        if not is_damage(error):
            raise
        reason = first_line(error)
        if isinstance(error, RecursionError):
            reason = "it is nested too deeply"
        raise ValueError(
            f"{quoted_path(path)} cannot be read as {reader.pattern}: {reason}."
        ) from None
    if not len(rows):
        return None
    return Log(rows=rows, file=path, framework=rows.framework or PROGRAMS.get(reader.pattern, ""))


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file of a bounded size for reading.

    Raises:
        ValueError: The path is a pipe, a device or a directory, or the file is too large.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = "it is not a regular file"
    elif status.st_size > MAX_LOG_SIZE:
        problem = f"it has more than {MAX_LOG_SIZE >> 20} MiB; give a dump of tokens"
    if problem:
        os.close(descriptor)
        raise ValueError(problem)
    return os.fdopen(descriptor, "rb")
