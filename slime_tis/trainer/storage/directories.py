"""Output directories: write permission, locks, and atomic replacement."""

import ctypes
import errno
import fcntl
import os
import socket
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

LOCK = ".lock"
RENAME_EXCHANGE = 2  # linux/fs.h
AT_FDCWD = -100  # fcntl.h
SAFETENSORS_PARTIAL = r"\.tmp[A-Za-z0-9]{6}"
"""Name of the temporary files of safetensors."""


class DirectoryInUse(ValueError):
    """Another process holds the lock of the directory."""


def unwritable(path: str | Path) -> str | None:
    """Returns the reason that a directory cannot be made or written, or None.

    The reason is the end of an error message.
    """
    try:
        path = Path(path).absolute()
        for parent in (path, *path.parents):
            try:
                # Not exists(), which is False for a broken link.
                os.lstat(parent)
            except (FileNotFoundError, NotADirectoryError):
                continue
            subject = "that"
            if parent != path:
                subject = repr(str(parent))
            if not parent.exists():
                return f"{subject} is a broken link"
            if not parent.is_dir():
                return f"{subject} is a file"
            if not os.access(parent, os.W_OK | os.X_OK):
                return f"{subject} cannot be written"
            return None
    except (OSError, ValueError) as error:  # a name too long, a NUL character
        return f"it cannot be used: {getattr(error, 'strerror', None) or error}"
    return None


def same_path(one: str | Path, other: str | Path) -> bool:
    """Returns whether two paths are the same directory.

    Links, `..` and, on such file systems, other letter cases are followed.
    """
    one = Path(one).resolve()
    other = Path(other).resolve()
    return one == other or (one.exists() and other.exists() and os.path.samefile(one, other))


@contextmanager
def held(locks: Mapping[Path, str]) -> Iterator[None]:
    """Locks directories for this process.

    The POSIX record lock ends with the process and is not inherited by forks. Without lock support
    of the file system a warning is printed.

    Args:
        locks: Flag and directory, such as "--save is 'DIR'", by lock file.

    Raises:
        DirectoryInUse: Another process holds a lock.
        ValueError: A lock file cannot be written.
    """
    with ExitStack() as stack:
        for path, subject in locks.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.callback(_open_locked(path, subject).close)
            except OSError as error:
                raise ValueError(
                    f"{subject}, which cannot be written: {error.strerror} ({str(path.parent)!r})."
                ) from error
            # Callbacks run in reverse: the file is deleted while it is locked, so that no other
            # process locks a deleted file.
            stack.callback(path.unlink, missing_ok=True)
        yield


def _open_locked(path: Path, subject: str) -> IO[str]:
    """Returns the open lock file, which has this process's id in it.

    Raises:
        DirectoryInUse: Another process holds the lock.
    """
    while True:
        # O_NOFOLLOW: somebody else may have put a link there, whose target would be overwritten.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        # Not "w", which would erase the line of the process that holds the lock.
        file = os.fdopen(descriptor, "a+", encoding="utf-8")  # open as long as the run
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                print(
                    f"warning: {str(path.parent)!r} is on a file system without locks.",
                    file=sys.stderr,
                )
            else:
                file.seek(0)
                holder = file.read(300).strip() or "process id unknown"
                file.close()
                raise DirectoryInUse(
                    f"{subject}, which another run is writing ({holder}); wait for it, stop it, or"
                    " choose another directory."
                ) from None
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.lstat()):
            file.truncate(0)
            print(f"process id {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
            return file
        file.close()  # another run deleted the file before it was locked


def make_private(directory: Path) -> None:
    """Makes a directory that only this user can enter, for files that libraries open by name.

    Other users who may write to a directory could replace a file in it by a link. A library that
    opens the file by its name would then overwrite the link's target. `make_public` follows when
    all files are complete.

    Raises:
        FileExistsError: The directory exists; somebody else may have made it, with links in it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700)


def make_public(directory: Path) -> None:
    """Gives a directory of `make_private` and its files the usual permissions of this process."""
    usual = 0o777 & ~_umask()
    for path in directory.rglob("*"):
        # safetensors makes files that only their owner reads, but a server may be another user.
        if path.is_file() and not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) | (usual & 0o666))
    mode = stat.S_IMODE(directory.stat().st_mode)
    # `mode |`, because the directory may have inherited the bit of its group.
    directory.chmod(mode | usual)


def _umask() -> int:
    """Returns the mask of this process; `os.umask` would change it for other threads."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("Umask:")]
    return int(mask, 8)


def exchange(one: Path, other: Path) -> None:
    """Swaps two directories of one file system atomically (Linux's renameat2).

    On file systems without support (NFS), `other` is missing between two renames.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # glibc has the function since 2.28; Python has none for it.
    if hasattr(libc, "renameat2"):
        names = (os.fsencode(one), os.fsencode(other))
        if libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
            return
        # EINVAL: the file system cannot exchange names.
        if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(one), None, str(other))
    aside = one.with_name(f"{one.name}.exchanged")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def remove_files(directory: Path, names: Iterable[str]) -> None:
    """Removes files of a directory, then its empty subdirectories, then itself if it is empty."""
    for name in names:
        (directory / name).unlink(missing_ok=True)
    for folder, _, _ in os.walk(directory, topdown=False):
        if not os.listdir(folder):
            os.rmdir(folder)
