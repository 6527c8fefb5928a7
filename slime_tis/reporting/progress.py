"""A bar for something that goes on in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

INTERVAL = 0.5
"""Time between two looks at how far it is, in seconds; what takes less has no bar, which would only flicker."""


@contextmanager
def shown_progress(
    look: Callable[[], tuple[int, int]], title: str, *, shown: bool, file: TextIO | None = None
) -> Iterator[None]:
    """Shows how far something is while the caller waits for it, and nothing afterwards.

    Args:
        look: how much is done, and of how much; called from another thread.
        title: what it is.
        shown: whether to; on a terminal alone, unless a file is given.
        file: to write to; None means standard error.
    """
    if not shown:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        disable = None if file is None else False
        with tqdm(desc=title, unit="", leave=False, delay=INTERVAL, file=file, disable=disable) as bar:
            while not over.wait(INTERVAL):
                bar.n, bar.total = look()
                bar.refresh()
                bar.delay = 0  # otherwise it believes that it was never shown, and is not cleared

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
