"""Batches in flight: which prompts are being answered while earlier answers are trained on."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime_tis.trainer.data.data_source import CustomDataSource
from slime_tis.trainer.data.prompts import PromptDataset
from slime_tis.trainer.data.sample import Prompt, Sample
from slime_tis.trainer.engines.engine import RolloutFuture


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    pending: RolloutFuture
    state: dict[str, Any]
    """State of the data before this batch's prompts were taken, and the batch's number."""


BATCH = "batch"
"""Key of the number of the next batch in a state."""


class Prefetcher:
    """Takes prompts from the data and keeps `depth` batches in flight in addition to the current one.

    A rollout is one batch; dynamic sampling may take several.
    """

    def __init__(
        self,
        dataset: PromptDataset | CustomDataSource,
        submit: Callable[[list[Prompt], int], RolloutFuture],
        *,
        prompts: Callable[[], int],
        depth: int,
        number: int = 0,
    ) -> None:
        """Starts with no batch in flight.

        Args:
            dataset: where prompts come from.
            submit: starts a batch, from its prompts and its number, which its seed follows from.
            prompts: how many prompts the next batch takes.
            depth: batches in flight beyond the one that is waited for.
            number: of the first batch.
        """
        self._dataset, self._submit, self._prompts, self._depth = dataset, submit, prompts, depth
        self._number = number
        self._queue: deque[_InFlight] = deque()

    def next(self, rollout_id: int, last: int) -> list[list[Sample]]:
        """The groups of the next batch for rollout `rollout_id`; the following ones are in flight afterwards.

        As many are in flight as the rollouts up to number `last` take at least.

        Raises:
            RolloutUnavailable: no engine is left to finish it; it stays in flight for `state_dict`.
        """
        while len(self._queue) <= min(self._depth, last - rollout_id):
            state = self._state()
            prompts = self._dataset.next_batch(self._prompts())
            self._queue.append(_InFlight(pending=self._submit(prompts, self._number), state=state))
            self._number += 1
        groups = self._queue[0].pending.result()
        self._queue.popleft()
        return groups

    def progress(self) -> tuple[int, int]:
        """Responses that are complete, and all, of the batch that is taken next."""
        return self._queue[0].pending.progress if self._queue else (0, 0)

    def state_dict(self) -> dict[str, Any]:
        """State of the data before the prompts in flight, which a resumed run therefore takes again."""
        state = self._queue[0].state if self._queue else self._state()
        if isinstance(self._dataset, CustomDataSource):
            self._dataset.forget_before(state)
        return state

    def _state(self) -> dict[str, Any]:
        return {**self._dataset.state_dict(), BATCH: self._number}
