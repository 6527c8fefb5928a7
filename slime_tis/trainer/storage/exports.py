"""The files of an exported Hugging Face directory, and whether an export may take a directory's place.

An export lists its own files in `.slime_tis_export.json`; only those are ever removed. It is written as
`.NAME.unfinished` beside `NAME` and takes its place in one step.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from slime_tis.errors import quoted_path
from slime_tis.files import write_atomically
from slime_tis.trainer.storage.directories import SAFETENSORS_PARTIAL, exchange, remove_files

MARKER, PARTIAL_MARKER = ".slime_tis_export.json", ".slime_tis_export.json.partial"
"""The list of an export's own files, and its name until it is complete (`files.atomic_path`)."""
WEIGHTS = re.compile(
    rf"part-[0-9]+\.safetensors|model(-[0-9]{{5}}-of-[0-9]{{5}})?\.safetensors(\.index\.json)?|{SAFETENSORS_PARTIAL}"
)
"""Names of weight files, which are not known before they are written."""


def check_target(directory: Path, given: str, kind: str) -> None:
    """Checks that an export may be written to a directory.

    Args:
        directory: where it will be.
        given: beginning of the message: the flag and its value.
        kind: what the user calls it, an export or an import.

    Raises:
        ValueError: it, or what is in its way, was not written by this program.
    """
    problem = replaceable(directory)
    if problem is not None:
        raise ValueError(f"{given} but {problem}; give a directory that is absent, empty or an earlier {kind}.")
    left = left_over(directory)
    if left is not None:
        raise ValueError(f"{given} but {quoted_path(left)} is in its way; move that or give another.")


def replaceable(directory: Path) -> str | None:
    """Why an export may not take the place of a directory, as the end of an error message; None where it may.

    It may where nothing is there, an empty directory, or an earlier export to which nobody added anything.
    """
    if any("\ud800" <= character <= "\udfff" for character in str(directory)):
        return "its name is not UTF-8"  # safetensors cannot write there
    if not os.path.lexists(directory):
        return None
    if not directory.is_dir():
        return "that is a file"
    if os.path.ismount(directory):
        return "that is a mount point"
    strange = _strange(directory, _listed(directory))
    if strange is not None:
        return f"it holds {strange!r}, which this program did not write"
    return None


def left_over(directory: Path) -> Path | None:
    """What somebody else has at the path that an unfinished export is written to; None where nothing is."""
    unfinished = _unfinished(directory)
    if not os.path.lexists(unfinished) or (unfinished / MARKER).is_file():
        return None
    if not unfinished.is_dir() or unfinished.is_symlink():
        return unfinished
    begun = all(path.name == PARTIAL_MARKER and path.is_file() for path in unfinished.iterdir())  # or empty
    return None if begun else unfinished


def begin(directory: Path, names: Iterable[str]) -> Path:
    """Makes the directory that an export is written to before it is whole, in place of one that a killed run left.

    Args:
        directory: where the export will be.
        names: of its files besides weights.

    Raises:
        OSError: it cannot be made, or the left-over one holds a file that this program did not write.
    """
    unfinished = _unfinished(directory)
    discard(unfinished)
    unfinished.mkdir(parents=True)
    _write_marker(unfinished, names)
    return unfinished


def discard(unfinished: Path) -> None:
    """Removes the files of an unfinished export, and no others; does nothing where there is none."""
    if unfinished.is_dir() and not unfinished.is_symlink():
        weights = [path.name for path in unfinished.iterdir() if WEIGHTS.fullmatch(path.name)]
        marked = (unfinished / MARKER).is_file()
        remove_files(
            unfinished, [*_listed(unfinished), *weights, PARTIAL_MARKER, MARKER] if marked else [PARTIAL_MARKER]
        )


def finish(unfinished: Path, directory: Path) -> Path:
    """Gives a whole export its name, in one step; returns the name.

    That is another one, with a number, where `directory` has come to hold what this program did not write.
    """
    _write_marker(unfinished, [path.name for path in unfinished.iterdir() if path.name != MARKER])
    number, target = 1, directory
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
    """The file names that the marker of an export lists, none where there is no valid marker."""
    try:
        names = json.loads((directory / MARKER).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()
    plain = isinstance(names, list) and all(isinstance(name, str) and Path(name).name == name for name in names)
    return set(names) if plain else set()


def _strange(directory: Path, own: set[str]) -> str | None:
    """A name in a directory that is not that of a file of an export, None where there is none."""
    own = own | {MARKER} if own else own
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if entry.name not in own or not entry.is_file(follow_symlinks=False):
            return entry.name
    return None


def _write_marker(directory: Path, names: Iterable[str]) -> None:
    marker = {"written_by": "slime_tis", "files": sorted(names)}
    write_atomically(directory / MARKER, json.dumps(marker, indent=2) + "\n")
