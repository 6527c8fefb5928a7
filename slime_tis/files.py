"""Files that are replaced by renaming: readers see the earlier file or the new one, whenever the process ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOREIGN = "the file is there and is no dump of this program; move it, or give another name"
"""Why a dump is not written over a file."""


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yields a path to write to, which is renamed to `path` at the end of the `with` block.

    After an exception the new file is removed and `path` is as it was.

    Args:
        path: file to make or to replace.

    Yields:
        `.NAME.partial` beside it.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name.removeprefix('.')}.partial")
    partial.unlink(missing_ok=True)  # of a killed run, or a link that somebody else made
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: str | Path, text: str) -> None:
    """Replaces a UTF-8 text file in one step.

    Readers see the earlier content or all of the new one, also after the process is killed. The content is flushed to
    disk before the file is renamed, so that a power failure leaves one of the two as well; the renaming itself is not
    flushed, and a power failure just after this returns may undo it.

    Args:
        path: file to make or to replace.
        text: its content.
    """
    with atomic_path(path) as partial, open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
