"""Returns on every rank the result of work that rank 0 does."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from slime_tis.trainer.collectives import portable
from slime_tis.trainer.engines.engine import WeightSource

Result = TypeVar("Result")

LONGEST_ROLLOUT = timedelta(days=30)
"""Longest wait for rank 0: a rollout may take longer than the default timeout of collectives."""


class RankZero:
    """Makes all ranks return or raise rank 0's outcome.

    The ranks use a dedicated gloo group: it is independent of the job's other collectives, needs no device, and works
    from the thread that iterates weights.
    """

    def __init__(self) -> None:
        """A collective if there are several ranks."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=LONGEST_ROLLOUT) if several else None
        self.is_self = not several or dist.get_rank() == 0
        """Whether this process is rank 0."""

    def run(self, work: Callable[[WeightSource], Result], source: WeightSource) -> Result:
        """Runs work on rank 0 and returns its result, or raises its error, on all ranks.

        The work is called with a source of weights; when it iterates the source, the other ranks iterate theirs.
        """

        def shared_source() -> Iterable[tuple[str, Tensor]]:
            self._send("weights", None)
            return source()

        if not self.is_self:
            return self._follow(source)  # type: ignore[no-any-return]
        try:
            result = work(shared_source)
        except Exception as error:
            with suppress(RuntimeError):  # other ranks may have failed too
                self._send("error", portable(error))
            raise
        self._send("result", result)
        return result

    def close(self) -> None:
        """Frees the process group; a collective."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _follow(self, source: WeightSource) -> Any:
        """Iterates weights whenever rank 0 does, until rank 0 sends its result."""
        while True:
            received: list[tuple[str, Any]] = [("", None)]
            dist.broadcast_object_list(received, src=0, group=self._group)
            kind, content = received[0]
            if kind == "result":
                return content
            if kind == "error":
                raise content
            for _ in source():
                pass

    def _send(self, kind: str, content: Any) -> None:
        if self._group is not None:
            dist.broadcast_object_list([(kind, content)], src=0, group=self._group)
