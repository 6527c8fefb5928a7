"""Batches of prompts in flight while earlier answers are trained on, and their unfinished groups."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_tis.trainer.data.data_source import CustomDataSource
from slime_tis.trainer.data.prompts import PromptDataset
from slime_tis.trainer.data.sample import Prompt, Sample
from slime_tis.trainer.engines.engine import RolloutEngine, RolloutFuture

BATCH = "batch"
Choose = Callable[[Sequence[list[Sample]], int], tuple[list[int], list[int]]]
"""Returns indices of at most this number of groups to resume, and of groups that wait; a collective."""


@dataclass
class Prefetcher:
    """Takes prompts from the data and keeps `depth` batches in flight in addition to the current one."""

    dataset: PromptDataset | CustomDataSource
    submit: Callable[[list[Prompt], int], RolloutFuture]
    """Starts a batch from its prompts and its number."""
    prompts: Callable[[], int]
    """Returns the size of the next batch."""
    depth: int
    number: int = 0
    _queue: deque[tuple[RolloutFuture, dict[str, Any]]] = field(default_factory=deque)
    """Batches in flight, and the state before each."""

    def next(self, rollout_id: int, last: int) -> list[list[Sample]]:
        """Returns the groups of the next batch of a rollout; later batches, up to rollout `last`, stay in flight."""
        while len(self._queue) <= min(self.depth, last - rollout_id):
            state = self._state()
            prompts = self.dataset.next_batch(self.prompts())
            self._queue.append((self.submit(prompts, self.number), state))
            self.number += 1
        groups = self._queue[0][0].result()
        self._queue.popleft()
        return groups

    def progress(self) -> tuple[int, int]:
        """Returns the numbers of complete and of all responses of the next batch."""
        return self._queue[0][0].progress if self._queue else (0, 0)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state before the prompts in flight, which a resumed run takes again."""
        state = self._queue[0][1] if self._queue else self._state()
        if isinstance(self.dataset, CustomDataSource):
            self.dataset.forget_before(state)
        return state

    def _state(self) -> dict[str, Any]:
        return {**self.dataset.state_dict(), BATCH: self.number}


@dataclass(kw_only=True)
class Unfinished:
    """The unfinished groups of a run: waiting groups first, then the groups that the engine resumes."""

    engine: RolloutEngine
    choose: Choose | None = None
    """The buffer filter; None resumes every group."""
    waiting: list[list[Sample]] = field(default_factory=list)
    dropped: int = 0
    """Groups dropped since the last call of `metrics`."""

    def groups(self) -> list[list[Sample]]:
        """Returns all unfinished groups, for a checkpoint."""
        return [*self.waiting, *self.engine.unfinished()]

    def take(self, count: int) -> int:
        """Chooses the groups that the next batch of `count` resumes, and returns their number; a collective."""
        groups = self.groups()
        if self.choose is not None and groups:
            resumed, left = self.choose(groups, count)
            self.waiting = [groups[index] for index in left]
            self.dropped += len(groups) - len(resumed) - len(left)
            self.engine.resume_unfinished([groups[index] for index in resumed])
        return len(self.engine.unfinished())

    def metrics(self) -> dict[str, float]:
        """Returns rollout/buffer_… with a buffer filter, and resets the counts."""
        if self.choose is None:
            return {}
        metrics = {"rollout/buffer_waiting": float(len(self.waiting)), "rollout/buffer_dropped": float(self.dropped)}
        self.dropped = 0
        return metrics
