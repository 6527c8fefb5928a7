"""Shares independent work over the ranks of a torch.distributed job, or does it all where there is none."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from slime_tis.errors import CustomFunctionError, OtherRankFailed
from slime_tis.trainer.engines.engine import RolloutUnavailable
from slime_tis.trainer.interrupt import Interrupted

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_over_ranks(function: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]) -> list[Result]:
    """Returns `function(items)`, for which each rank works on every world-size-th item.

    A collective: every rank passes the same items and gets all results, in the items' order. An error on one
    rank is raised on all of them, so that none is left waiting for the others.

    Args:
        function: maps a list of items to a list of as many picklable results.
        items: the work.

    Raises:
        Interrupted: on every rank, where any was interrupted.
        ValueError: the function's ValueError on whichever rank met it.
        OtherRankFailed: any other error, on the ranks that did not meet it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function(items)
    rank, size = dist.get_rank(), dist.get_world_size()
    outcome: list[Result] | Exception
    try:
        outcome = function(items[rank::size])
    except Exception as error:
        outcome = error
    sent = portable(outcome) if isinstance(outcome, Exception) else outcome
    outcomes: list[list[Result] | Exception] = [[] for _ in range(size)]
    dist.all_gather_object(outcomes, sent)
    for other in outcomes:
        if isinstance(other, Interrupted):
            raise other
    if isinstance(outcome, Exception):
        raise outcome
    parts: list[list[Result]] = []
    for other in outcomes:
        if isinstance(other, Exception):
            raise other
        parts.append(other)
    return [parts[place % size][place // size] for place in range(len(items))]


def portable(error: Exception) -> Exception:
    """The same message in a type that every rank can unpickle."""
    if isinstance(error, Interrupted):
        return error
    if isinstance(error, CustomFunctionError):
        return CustomFunctionError(str(error))
    for kind in (RolloutUnavailable, ValueError):
        if isinstance(error, kind):
            return kind(str(error))
    return OtherRankFailed(f"{type(error).__name__}: {error}")


def on_rank_zero(function: Callable[[], Result]) -> Result:
    """Returns what `function()` returns on rank 0, on every rank; a collective.

    For code of the user's own that decides something: what it decides is the same on all ranks, however it does.

    Args:
        function: called on rank 0 alone; its result can be pickled.

    Raises:
        Exception: what it raised, on every rank, as `map_over_ranks` does.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    outcome: list[Result | Exception | None] = [None]
    own: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            own, outcome[0] = error, portable(error)
    dist.broadcast_object_list(outcome, src=0)
    if own is not None:
        raise own
    found = outcome[0]
    if isinstance(found, Exception):
        raise found
    return found  # type: ignore[return-value]  # of rank 0
