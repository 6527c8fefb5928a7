"""Rollouts in flight: which prompts are being answered while earlier answers are trained on."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime_tis.rollout.engine import RolloutFuture
from slime_tis.rollout.prompts import PromptDataset
from slime_tis.rollout.sample import Prompt, Sample


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    pending: RolloutFuture
    dataset: dict[str, Any]
    """State of the data before this rollout's prompts were taken."""


class Prefetcher:
    """Takes prompts from the data, keeps `depth` rollouts in flight beyond the present one, and hands them out."""

    def __init__(
        self,
        dataset: PromptDataset,
        submit: Callable[[list[Prompt], int], RolloutFuture],
        *,
        prompts: Callable[[], int],
        depth: int,
    ) -> None:
        """Starts with no rollout in flight.

        Args:
            dataset: where prompts come from.
            submit: starts a rollout, from its prompts and its number.
            prompts: how many prompts the next rollout takes.
            depth: rollouts in flight beyond the one that is waited for.
        """
        self._dataset, self._submit, self._prompts, self._depth = dataset, submit, prompts, depth
        self._queue: deque[_InFlight] = deque()

    def next(self, rollout_id: int, last: int) -> list[list[Sample]]:
        """The groups of rollout `rollout_id`; the next ones, up to number `last`, are in flight afterwards.

        Raises:
            RolloutUnavailable: no engine is left to finish it; it stays in flight for `state_dict`.
        """
        while len(self._queue) <= self._depth and rollout_id + len(self._queue) <= last:
            state = self._dataset.state_dict()
            prompts = self._dataset.next_batch(self._prompts())
            number = rollout_id + len(self._queue)
            self._queue.append(_InFlight(pending=self._submit(prompts, number), dataset=state))
        groups = self._queue[0].pending.result()
        self._queue.popleft()
        return groups

    def progress(self) -> tuple[int, int]:
        """Responses that are complete, and all, of the rollout that is taken next."""
        return self._queue[0].pending.progress if self._queue else (0, 0)

    def state_dict(self) -> dict[str, Any]:
        """State of the data before the prompts in flight, which a resumed run therefore takes again."""
        return self._queue[0].dataset if self._queue else self._dataset.state_dict()
