"""Wall time per named part of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timer:
    """Adds up the wall time of named parts of a step.

    `with timer("generate"): …` may be entered any number of times per step. Parts may nest; each counts its whole
    time. A step lasts from one `take` to the next, the first step from its first part on.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._step_start: float | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time inside the block to `name`, also where the block raises."""
        start = self._clock()
        if self._step_start is None:
            self._step_start = start
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def take(self) -> dict[str, float]:
        """Returns the seconds since the last call, `perf/NAME_time` of each part and `perf/step_time`; resets them."""
        now = self._clock()
        seconds = self._seconds | {"step": now - (now if self._step_start is None else self._step_start)}
        self._seconds, self._step_start = {}, now
        return {f"perf/{name}_time": value for name, value in seconds.items()}
