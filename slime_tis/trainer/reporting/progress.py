"""A progress bar for work in the background."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

INTERVAL = 0.5
"""Seconds between two updates, and before the bar appears."""


@contextmanager
def shown_progress(
    progress: Callable[[], tuple[int, int]], title: str, *, shown: bool, file: TextIO | None = None
) -> Iterator[None]:
    """Shows a bar while the caller waits inside the block; `progress` returns finished and total work.

    A separate thread redraws the bar, on a terminal only unless a file is given.
    """
    if not shown:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        disable = None if file is None else False
        with tqdm(desc=title, unit="", leave=False, delay=INTERVAL, file=file, disable=disable) as bar:
            while not over.wait(INTERVAL):
                bar.n, bar.total = progress()
                bar.refresh()
                bar.delay = 0  # otherwise tqdm takes it for never shown, and does not clear it

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
