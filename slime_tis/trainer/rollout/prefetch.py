"""Batches in flight while earlier answers are trained on, and their unfinished groups."""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_tis.trainer.data.data_source import CustomDataSource
from slime_tis.trainer.data.prompts import PromptDataset
from slime_tis.trainer.data.sample import NUMBER_TYPES, Prompt, Sample
from slime_tis.trainer.engines.rollout_engine import RolloutEngine, RolloutFuture

BATCH = "batch"
COPIED = (*NUMBER_TYPES, "prompt", "label", "reward", "reward_parts", "metadata", "train_metadata")
"""Fields of a sample that can be changed in place."""
Choose = Callable[[Sequence[list[Sample]], int], tuple[list[int], list[int]]]
"""Takes unfinished groups and a number. Returns the indices of at most that many groups to resume,
and of groups that keep waiting. A collective."""


@dataclass(kw_only=True)
class FinishedBatch:
    """A batch in flight whose responses are complete; a checkpoint has these batches."""

    groups: list[list[Sample]]
    prompts: int
    """Number of prompts that the batch took from the data."""

    def is_done(self) -> bool:
        """True."""
        return True

    @property
    def progress(self) -> tuple[int, int]:
        """Numbers of complete and of all responses."""
        total = sum(map(len, self.groups))
        return total, total

    def result(self) -> list[list[Sample]]:
        """The groups."""
        return self.groups


@dataclass(kw_only=True)
class Batch:
    """A batch in flight."""

    future: RolloutFuture
    state: dict[str, Any]
    """The state of the data before the batch."""
    prompts: int
    """Number of prompts that the batch took from the data."""

    def finished(self) -> FinishedBatch | None:
        """Returns the batch if its responses are complete; a collective."""
        if not isinstance(self.future, FinishedBatch) and self.future.is_done():
            self.future = FinishedBatch(groups=self.future.result(), prompts=self.prompts)
        if isinstance(self.future, FinishedBatch):
            return self.future
        return None


@dataclass
class Prefetcher:
    """Takes prompts from the data, and keeps `depth` batches in flight besides the current one."""

    dataset: PromptDataset | CustomDataSource
    submit: Callable[[list[Prompt], int], RolloutFuture]
    """Starts a batch from its prompts and its number."""
    prompts: Callable[[], int]
    """Returns the size of the next batch."""
    depth: int
    number: int = 0
    _queue: deque[Batch] = field(default_factory=deque)
    """Batches in flight."""

    def next(self, rollout_id: int, last: int) -> list[list[Sample]]:
        """Returns the groups of the next batch of a rollout.

        Later batches stay in flight, but none beyond the batches that rollout `last` needs.
        """
        # Near the end of the run, batches ahead would be sampled for nothing.
        while len(self._queue) <= min(self.depth, last - rollout_id):
            state = self._state()
            prompts = self.dataset.next_batch(self.prompts())
            future = self.submit(prompts, self.number)
            self._queue.append(Batch(future=future, state=state, prompts=len(prompts)))
            self.number += 1
        future = self._queue[0].future
        groups = future.result()
        # After the result: if it raises, a checkpoint must still have the batch in flight.
        self._queue.popleft()
        if isinstance(future, FinishedBatch):
            # A checkpoint of the position before this rollout needs the samples as the engine made
            # them, but training and user functions change samples in place.
            return [list(map(copied, group)) for group in groups]
        return groups

    def progress(self) -> tuple[int, int]:
        """Returns the numbers of complete and of all responses of the next batch."""
        if not self._queue:
            return 0, 0
        return self._queue[0].future.progress

    def state_dict(self) -> dict[str, Any]:
        """Returns the state before the prompts in flight, which a resumed run takes again."""
        if self._queue:
            state = self._queue[0].state
        else:
            state = self._state()
        if isinstance(self.dataset, CustomDataSource):
            # The oldest state in flight bounds what a later checkpoint can ask for.
            self.dataset.forget_before(state)
        return state

    def finished(self) -> list[FinishedBatch]:
        """Returns the complete batches in flight before the first incomplete one; a collective.

        A resumed run uses them. It samples later batches again, with its current weights.
        """
        batches: list[FinishedBatch] = []
        for batch in self._queue:
            finished = batch.finished()
            if finished is None:
                break
            batches.append(finished)
        return batches

    def restore(self, batches: Sequence[FinishedBatch]) -> None:
        """Puts the complete batches of a checkpoint in flight again.

        The data must be in the state before these batches.

        Raises:
            ValueError: The batches answer other prompts than those that the data have next.
        """
        for batch in batches:
            state = self._state()
            prompts = self.dataset.next_batch(batch.prompts)
            answered = [group[0].prompt_index for group in batch.groups]
            if answered != [prompt.index for prompt in prompts]:
                raise ValueError(
                    "the checkpoint has rollouts in flight that answer other prompts than those"
                    " that come next in the data; give the same --prompt-data, or start a new run"
                    " with another --save."
                )
            for group, prompt in zip(batch.groups, prompts, strict=True):
                for sample in group:
                    sample.prompt_row = prompt  # one object for all samples of the prompt
            self._queue.append(Batch(future=batch, state=state, prompts=batch.prompts))
            self.number += 1

    def _state(self) -> dict[str, Any]:
        return {**self.dataset.state_dict(), BATCH: self.number}


def copied(sample: Sample) -> Sample:
    """Returns a copy that can be changed in place; it shares only tensors and the prompt's row."""
    duplicate = copy.copy(sample)
    for name in COPIED:
        setattr(duplicate, name, copy.deepcopy(getattr(sample, name)))
    return duplicate


@dataclass(kw_only=True)
class Unfinished:
    """The unfinished groups of a run: waiting groups, then the groups that the engine resumes."""

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
        """Chooses the groups that the next batch of `count` resumes; a collective.

        Returns:
            The number of chosen groups.
        """
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
        metrics = {
            "rollout/buffer_waiting": float(len(self.waiting)),
            "rollout/buffer_dropped": float(self.dropped),
        }
        self.dropped = 0
        return metrics
