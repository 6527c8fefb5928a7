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

    An error on one rank is raised on all ranks, so that no rank waits for the others. `Interrupted`
    comes first, then the error of this rank, then the error of another rank (see `portable`).
    """
    size = _size()
    if size == 1:
        return [function()]
    error, outcome = _attempt(function)
    outcomes: list[Any] = [None] * size
    dist.all_gather_object(outcomes, outcome)
    interrupted = [outcome for outcome in outcomes if isinstance(outcome, Interrupted)]
    # This rank's own error before the others', because only it has the traceback.
    for raised in (*interrupted, error, *outcomes):
        if isinstance(raised, Exception):
            raise raised
    return outcomes


def map_over_ranks(
    function: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]
) -> list[Result]:
    """Returns `function(items)` on every rank; each rank processes every world-size-th item.

    A collective.
    """
    size = _size()
    if size == 1:
        return function(items)
    shares = on_every_rank(lambda: function(items[dist.get_rank() :: size]))
    # Item i is number i // size of rank i % size.
    return [shares[index % size][index // size] for index in range(len(items))]


def on_rank_zero(function: Callable[[], Result]) -> Result:
    """Returns rank 0's `function()` on every rank; a collective.

    User functions may therefore decide randomly.
    """
    if _size() == 1:
        return function()
    error: Exception | None = None
    outcomes: list[Any] = [None]
    if dist.get_rank() == 0:
        error, outcomes[0] = _attempt(function)
    dist.broadcast_object_list(outcomes, src=0)
    if error is not None:
        raise error
    if isinstance(outcomes[0], Exception):
        raise outcomes[0]
    result: Result = outcomes[0]
    return result


def portable(error: Exception) -> Exception:
    """Returns an error with the same message, of a type that every rank can unpickle."""
    if isinstance(error, Interrupted):
        return error
    for kind in (CustomFunctionError, RolloutUnavailable, ValueError, OSError):
        if isinstance(error, kind):
            return kind(str(error))
    return OtherRankFailed(f"{type(error).__name__}: {error}")


def _size() -> int:
    """Returns the number of ranks."""
    if not dist.is_initialized():
        return 1
    return dist.get_world_size()


def _attempt(function: Callable[[], Any]) -> tuple[Exception | None, Any]:
    """Returns (the function's error, its result or the portable error)."""
    try:
        return None, function()
    except Exception as error:
        return error, portable(error)


class RankZero:
    """Makes all ranks return or raise rank 0's outcome.

    It has a separate gloo group, which rank 0 also uses from the thread that sends weights.
    """

    def __init__(self) -> None:
        """Creates the group; a collective if there are several ranks."""
        self._group = None
        self.is_self = True
        if _size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=LONGEST_ROLLOUT)
            self.is_self = dist.get_rank() == 0

    def run(self, work: Callable[[WeightSource], Result], source: WeightSource) -> Result:
        """Runs work on rank 0 and returns its result, or raises its error, on all ranks.

        The work is called with a source of weights. Weights are gathered by collectives: when the
        work iterates the source, the other ranks iterate theirs.
        """

        def shared_source() -> Iterable[tuple[str, Tensor]]:
            self._send("weights", None)
            return source()

        if not self.is_self:
            followed: Result = self._follow(source)
            return followed
        try:
            result = work(shared_source)
        # Without a message the other ranks would wait in `_follow` until the group's timeout.
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
            for _ in source():  # takes part in the collectives
                pass

    def _send(self, kind: str, content: Any) -> None:
        """Tells the other ranks what rank 0 does next."""
        if self._group is not None:
            dist.broadcast_object_list([(kind, content)], src=0, group=self._group)
