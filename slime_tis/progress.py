"""The progress display of all commands: one line on stderr with the remaining time.

In a terminal the line updates in place, and disappears at the end. Elsewhere, as in CI or a log
file, a plain line follows at most once per minute. Work inside other work, as a rollout of a run,
is shown at the end of the outer line.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Self, TypeVar

from tqdm import tqdm

DELAY = 0.5
"""Seconds before the display appears; shorter work shows nothing."""
REDRAW_INTERVAL = 0.5
"""Seconds between two looks at work that another thread does."""
LINE_INTERVAL = 60.0
"""Seconds between two plain lines, and before the first one."""
FORMAT = (
    "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}, {remaining} left{postfix}]"
)
"""The line in a terminal, in the fields of tqdm."""
MANY = 100_000
"""Totals from here on are shown as 123k."""
SMOOTHING = 0.1
"""Weight of the latest update in the rate of tqdm; larger ones let the remaining time jump."""

_shown: list["Progress"] = []
"""Displays with a line in the terminal; at most one, because work inside other work has none."""

ItemT = TypeVar("ItemT")


class Progress:
    """Progress of one piece of work.

    Args:
        title: What is done, for example "responses".
        total: Number of units; None if unknown.
        initial: Units that an earlier process has done.
        unit: Name of a unit, in the plural, in plain lines.
        shown: False to show nothing.
        with_lines: Whether plain lines replace the display if stderr is no terminal.
        delay: Seconds before the display appears in a terminal.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        *,
        initial: int = 0,
        unit: str = "",
        shown: bool = True,
        with_lines: bool = True,
        delay: float = DELAY,
    ) -> None:
        self.title = title
        self.done = initial
        self.total = total
        self._initial = initial
        self._unit = unit
        self._delay = delay
        self._start = time.monotonic()
        self._last_line = self._start
        self._bar: tqdm[Any] | None = None
        self._outer: Progress | None = None
        # A program without a console has no stderr: the display must not end its work.
        shown = shown and sys.stderr is not None
        in_terminal = shown and sys.stderr.isatty()
        self._draws = shown and in_terminal
        self._prints = shown and with_lines and not in_terminal
        self._show()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the display, also after Ctrl-C."""
        self.close()

    def update(self, count: int = 1) -> None:
        """Counts finished units."""
        self.move_to(self.done + count)

    def move_to(self, done: int, total: int | None = None) -> None:
        """Sets the number of finished units, and of all units if it has changed."""
        self.done = done
        if total is not None:
            self.total = total
        self._show()

    def close(self) -> None:
        """Removes the display."""
        if self._outer is not None and self._outer._bar is not None:
            self._outer._bar.set_postfix_str("")
        if self._bar is not None:
            self._bar.close()
            _shown.remove(self)
        self._bar = None
        self._outer = None
        self._draws = False
        self._prints = False

    def __str__(self) -> str:
        """The position and the remaining time: `responses 3/8, 00:20 left`."""
        text = f"{self.title} {self.done:,}"
        if self.total is not None:
            text += f"/{self.total:,}"
        if self._unit:
            text += f" {self._unit}"
        seconds = self.remaining_seconds
        if seconds is not None:
            text += f", {tqdm.format_interval(seconds)} left"
        return text

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds until the end at the mean rate so far; None if it cannot be known."""
        finished = self.done - self._initial
        if self.total is None or finished <= 0 or self.done > self.total:
            return None
        elapsed = time.monotonic() - self._start
        return elapsed / finished * (self.total - self.done)

    def _show(self) -> None:
        now = time.monotonic()
        if self._prints and now - self._last_line >= LINE_INTERVAL:
            self._last_line = now
            print(self, file=sys.stderr, flush=True)
        if not self._draws or now - self._start < self._delay:
            return
        if self._bar is None and self._outer is None:
            self._open()
        if self._outer is not None and self._outer._bar is not None:
            self._outer._bar.set_postfix_str(str(self))
        if self._bar is not None:
            self._bar.total = self.total
            # `update` also keeps the rate; it draws at most ten times per second.
            self._bar.update(self.done - self._bar.n)

    def _open(self) -> None:
        """Draws a line in the terminal, or finds the line of the outer work."""
        if _shown:
            self._outer = _shown[-1]
            return
        self._bar = tqdm(
            desc=self.title,
            total=self.total,
            initial=self._initial,
            unit_scale=(self.total or 0) >= MANY,
            smoothing=SMOOTHING,
            bar_format=FORMAT,
            dynamic_ncols=True,
            leave=False,
        )
        # The bar is drawn after a delay, but the work began before it.
        self._bar.start_t -= time.monotonic() - self._start
        _shown.append(self)


def tracked(
    items: Iterable[ItemT], title: str, total: int, *, shown: bool = True
) -> Iterator[ItemT]:
    """Yields items, and shows how many of them have been worked on."""
    with Progress(title, total, shown=shown) as progress:
        for item in items:
            yield item
            progress.update()


@contextmanager
def watched(title: str, position: Callable[[], tuple[int, int]], *, shown: bool) -> Iterator[None]:
    """Shows the progress of work while the caller waits for it inside the block.

    A separate thread looks at the work and redraws.

    Args:
        title: What is done.
        position: Returns the numbers of finished and of all units.
        shown: False to show nothing.
    """
    if not shown:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        done, total = position()
        with Progress(title, total, initial=done, delay=REDRAW_INTERVAL) as progress:
            while not over.wait(REDRAW_INTERVAL):
                progress.move_to(*position())

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def print_line(text: str, file: IO[str] | None = None) -> None:
    """Prints a line above the display, to stdout by default."""
    if file is None:
        file = sys.stdout
    tqdm.write(text, file=file)
    file.flush()


def use_lock_of_this_process() -> None:
    """Gives tqdm a lock of this process.

    tqdm's default lock is a semaphore shared with forked processes. A forked process that is killed
    during `print_line` would hold it forever, and the run would wait at its next line.
    """
    tqdm.set_lock(threading.RLock())
