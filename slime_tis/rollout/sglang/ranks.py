"""The ranks of a torch.distributed job around the first one, which alone talks to servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from slime_tis.errors import OtherRankFailed
from slime_tis.interrupt import Interrupted
from slime_tis.rollout.engine import RolloutUnavailable, WeightSource

Result = TypeVar("Result")

LONGEST_ROLLOUT = timedelta(days=30)
"""Others wait that long for the first rank: a rollout may take longer than a collective's usual timeout."""
ERRORS = {error.__name__: error for error in (RolloutUnavailable, Interrupted, ValueError)}


class Ranks:
    """Has all ranks return, or raise, what the first one does.

    The ranks talk over gloo, in a group of their own: it works beside whatever else the job has in flight, without a
    device, and from the thread on which weights are iterated.
    """

    def __init__(self) -> None:
        """A collective, where there are several ranks."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=LONGEST_ROLLOUT) if several else None
        self.is_first = not several or dist.get_rank() == 0

    def together(self, work: Callable[[], Result], weights: WeightSource) -> Result:
        """Runs work on the first rank and returns its result on all of them.

        Args:
          work: for the first rank. Weights that it needs it iterates through `iterate`.
          weights: that the others iterate as often as the first one does.

        Raises:
          Exception: what the work raises; on the other ranks RolloutUnavailable, Interrupted, ValueError, or
            OtherRankFailed for any other.
        """
        if not self.is_first:
            return self._follow(weights)
        try:
            result = work()
        except Exception as error:
            with suppress(RuntimeError):  # the others may have failed, too, and be gone
                self._tell(("error", (_kind(error), str(error))))
            raise
        self._tell(("result", result))
        return result

    def iterate(self, weights: WeightSource) -> Iterable[tuple[str, Tensor]]:
        """The weights, on the first rank within `together`; the others iterate theirs at the same time."""
        self._tell(("weights", None))
        return weights()

    def close(self) -> None:
        """Gives the group back; a collective."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _follow(self, weights: WeightSource) -> Any:
        while True:
            told: list[tuple[str, Any]] = [("", None)]
            dist.broadcast_object_list(told, src=0, group=self._group)
            kind, content = told[0]
            if kind == "result":
                return content
            if kind == "error":
                name, sentence = content
                raise ERRORS.get(name, OtherRankFailed)(sentence)
            for _ in weights():
                pass

    def _tell(self, message: tuple[str, Any]) -> None:
        if self._group is not None:
            dist.broadcast_object_list([message], src=0, group=self._group)


def _kind(error: Exception) -> str:
    return next((name for name, kind in ERRORS.items() if isinstance(error, kind)), "")
