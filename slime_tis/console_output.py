"""Console output that survives closed pipes, full disks, closed descriptors and ASCII locales."""

import io
import os
import sys
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Descriptor(io.FileIO):
    """A file descriptor that becomes /dev/null when a write to it fails."""

    def __init__(self, descriptor: int, replaced: IO[str] | None) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.replaced = replaced  # kept, because its destructor may close the descriptor
        self.keep_running = True

    def write(self, data: "ReadableBuffer") -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.fileno() == 1 and self.keep_running:
                print(
                    f"warning: stdout: {error.strerror}; the run continues without it.",
                    file=sys.stderr,
                )
            elif self.fileno() == 1 and not isinstance(error, BrokenPipeError):
                raise OSError(error.errno, error.strerror, "stdout") from error
            return memoryview(data).nbytes


def protect_output(*, keep_running: bool) -> None:
    """Makes stdout and stderr survive failed writes and characters that the locale cannot encode.

    Such characters are escaped. Replaced streams, for example a notebook's, stay unchanged.

    Args:
        keep_running: Whether failing stdout is only a warning; otherwise anything but a closed pipe
            raises OSError.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file that is opened would take the console's output
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _protected(sys.stdout, 1)
    sys.stderr = _protected(sys.stderr, 2)
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Descriptor):
        raw.keep_running = keep_running


def _protected(stream: Any, descriptor: int) -> Any:
    if stream is None:  # Python found the descriptor closed at its start
        buffered = False
        encoding = None
    elif type(stream) is not io.TextIOWrapper or isinstance(
        getattr(stream.buffer, "raw", None), _Descriptor
    ):
        return stream
    else:
        stream.flush()
        buffered = not (stream.line_buffering or stream.write_through)
        encoding = stream.encoding
    raw = _Descriptor(descriptor, stream)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=not buffered
    )
