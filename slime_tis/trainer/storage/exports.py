"""The files of an exported Hugging Face directory, and the directories that an export may replace.

An export lists its files in `.slime_tis_export.json`; other files are never removed. The export is
written to `.NAME.unfinished`, which replaces `NAME` atomically.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from slime_tis.errors import quoted_path
from slime_tis.trainer.storage.directories import exchange, make_private, make_public, remove_files

MARKER = ".slime_tis_export.json"
"""List of an export's files."""


def check_target(directory: Path, subject: str, kind: str) -> None:
    """Checks that an export may replace a directory and its temporary directory.

    Raises:
        ValueError: One of them has files that this program did not write.
    """
    problem = replaceable(directory)
    if problem is not None:
        raise ValueError(
            f"{subject} but {problem}; give a directory that is absent, empty or an earlier {kind}."
        )
    unfinished = _unfinished(directory)
    if not os.path.lexists(unfinished):
        return
    is_directory = unfinished.is_dir() and not unfinished.is_symlink()
    if is_directory and ((unfinished / MARKER).is_file() or not os.listdir(unfinished)):
        return
    raise ValueError(
        f"{subject} but {quoted_path(unfinished)} is in its way; move that or give another."
    )


def replaceable(directory: Path) -> str | None:
    """Returns why an export may not replace a directory, as the end of an error message, or None.

    It may replace a missing or empty directory, and an earlier export without added files.
    """
    if any("\ud800" <= character <= "\udfff" for character in str(directory)):
        return "its name is not UTF-8"  # safetensors cannot write there
    if not os.path.lexists(directory):
        return None
    if not directory.is_dir():
        return "that is a file"
    if os.path.ismount(directory):
        return "that is a mount point"
    own = _listed(directory)
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        is_listed = bool(own) and (entry.name in own or entry.name == MARKER)
        if not is_listed or not entry.is_file(follow_symlinks=False):
            return f"it holds {entry.name!r}, which this program did not write"
    return None


def begin(directory: Path) -> Path:
    """Makes the directory of an unfinished export, replacing a killed run's."""
    unfinished = _unfinished(directory)
    discard(unfinished)
    with suppress(OSError):
        # A run that was killed before it wrote the marker leaves an empty directory.
        unfinished.rmdir()
    make_private(unfinished)
    _write_marker(unfinished, [])
    return unfinished


def discard(unfinished: Path) -> None:
    """Removes an unfinished export with its marker last, if it exists."""
    if (unfinished / MARKER).is_file() and not unfinished.is_symlink():
        names = os.listdir(unfinished)
        names.sort(key=lambda name: name == MARKER)  # False is less than True: the marker is last
        remove_files(unfinished, names)


def finish(unfinished: Path, directory: Path) -> Path:
    """Renames a complete export atomically and returns its path.

    The path has a number if `directory` meanwhile has files that this program did not write.
    """
    names = [path.name for path in unfinished.iterdir() if path.name != MARKER]
    _write_marker(unfinished, names)
    make_public(unfinished)
    number = 1
    target = directory
    while replaceable(target) is not None:
        number += 1
        target = directory.with_name(f"{directory.name}-{number}")
    if target.exists() and any(target.iterdir()):
        exchange(unfinished, target)
        remove_files(unfinished, [*_listed(unfinished), MARKER])
    else:
        unfinished.rename(target)
    return target


def _unfinished(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.unfinished")


def _listed(directory: Path) -> set[str]:
    """Returns the file names in the marker of an export; none without a valid marker."""
    try:
        names = json.loads((directory / MARKER).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()
    if not isinstance(names, list):
        return set()
    for name in names:
        # Anybody may write a marker; a path such as ../x must not be removed.
        if not isinstance(name, str) or Path(name).name != name:
            return set()
    return set(names)


def _write_marker(directory: Path, names: Iterable[str]) -> None:
    marker = {"written_by": "slime_tis", "files": sorted(names)}
    (directory / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
