"""A progress bar for work in the background."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

INTERVAL = 0.5
"""Seconds between two updates; work that takes less has no bar, which would only flicker."""


@contextmanager
def shown_progress(
    progress: Callable[[], tuple[int, int]], title: str, *, shown: bool, file: TextIO | None = None
) -> Iterator[None]:
    """Shows a bar while the caller waits inside the block, and removes it afterwards.

    The caller is blocked while it waits, so a separate thread redraws the bar.

    Args:
        progress: Returns how much is done, and of how much; called from another thread.
        title: Label of the bar.
        shown: Whether to show it, which is done on a terminal alone unless a file is given.
        file: Where the bar is written; None means standard error.
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
