"""Work that is shared by the ranks of a torch.distributed job, or done by the only process."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from slime_tis.errors import CustomFunctionError, OtherRankFailed
from slime_tis.trainer.engines.engine import RolloutUnavailable
from slime_tis.trainer.interrupt import Interrupted

Item = TypeVar("Item")
Result = TypeVar("Result")


def on_every_rank(function: Callable[[], Result]) -> list[Result]:
    """Returns the result of `function()` on each rank; a collective.

    An error on one rank is raised on all of them, so that no rank waits for the others: `Interrupted` first, then the
    rank's own error, then another rank's error as `portable` makes it.
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


def map_over_ranks(function: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]) -> list[Result]:
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
