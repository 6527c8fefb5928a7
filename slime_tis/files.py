"""Atomic replacement of files: readers see the earlier file or the complete new file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOREIGN = "the file exists and is no dump of this program; move it, or give another name"


def free_name(path: Path) -> Path:
    """Returns the path, with a number appended to its name if it exists."""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yields the temporary path `.NAME.partial`, which is renamed to `path` at the end of the `with` block.

    After an exception the temporary file is removed and `path` is unchanged.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name.removeprefix('.')}.partial")
    partial.unlink(missing_ok=True)  # from a killed run, or a link that another user made
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: str | Path, text: str) -> None:
    """Replaces a UTF-8 text file atomically, also on a power failure.

    The directory is not flushed: a power failure just after the return may undo the replacement.
    """
    with atomic_path(path) as partial, open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
