"""Work that is shared by the ranks of a torch.distributed job, or done by the only process."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from slime_tis.errors import CustomFunctionError, OtherRankFailed
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable, WeightSource
from slime_tis.trainer.stop_signals import Interrupted

Item = TypeVar("Item")
Result = TypeVar("Result")

LONGEST_ROLLOUT = timedelta(days=30)
"""Longest wait for rank 0: a rollout may take longer than the default timeout of collectives."""


def on_every_rank(function: Callable[[], Result]) -> list[Result]:
    """Returns the result of `function()` on each rank; a collective.

    An error on one rank is raised on all of them, so that no rank waits for the others:
    `Interrupted` first, then the rank's own error, then another rank's error as `portable` makes
    it.
    """
    if _size() == 1:
        return [function()]
    error, sent = _attempt(function)
    outcomes: list[Any] = [None] * _size()
    dist.all_gather_object(outcomes, sent)
    interrupted = [outcome for outcome in outcomes if isinstance(outcome, Interrupted)]
    for outcome in (*interrupted, error, *outcomes):
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def map_over_ranks(
    function: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]
) -> list[Result]:
    """Returns `function(items)` on every rank, where each rank processes every world-size-th item; a collective."""
    size = _size()
    if size == 1:
        return function(items)
    shares = on_every_rank(lambda: function(items[dist.get_rank() :: size]))
    return [shares[index % size][index // size] for index in range(len(items))]


def on_rank_zero(function: Callable[[], Result]) -> Result:
    """Returns rank 0's `function()` on every rank, so that user functions may decide randomly; a collective."""
    if _size() == 1:
        return function()
    error, sent = _attempt(function) if dist.get_rank() == 0 else (None, None)
    outcomes: list[Any] = [sent]
    dist.broadcast_object_list(outcomes, src=0)
    for outcome in (error, outcomes[0]):
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes[0]  # type: ignore[no-any-return]  # rank 0's


def portable(error: Exception) -> Exception:
    """Returns an error with the same message whose type every rank can unpickle."""
    if isinstance(error, Interrupted):
        return error
    for kind in (CustomFunctionError, RolloutUnavailable, ValueError, OSError):
        if isinstance(error, kind):
            return kind(str(error))
    return OtherRankFailed(f"{type(error).__name__}: {error}")


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _attempt(function: Callable[[], Any]) -> tuple[Exception | None, Any]:
    """Returns (the function's error, its result or the portable error)."""
    try:
        return None, function()
    except Exception as error:
        return error, portable(error)


class RankZero:
    """Makes all ranks return or raise rank 0's outcome, in a gloo group that works from the thread of the weights."""

    def __init__(self) -> None:
        """A collective if there are several ranks."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=LONGEST_ROLLOUT) if several else None
        self.is_self = not several or dist.get_rank() == 0

    def run(self, work: Callable[[WeightSource], Result], source: WeightSource) -> Result:
        """Runs work on rank 0 and returns its result, or raises its error, on all ranks.

        The work is called with a source of weights; when it iterates the source, the other ranks
        iterate theirs.
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
