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

    An error on one rank is raised on all of them, so that no rank waits for the others.

    Raises:
        Interrupted: on every rank, if any was interrupted.
        ValueError: the function's ValueError on any rank; the same holds for OSError and RolloutUnavailable.
        OtherRankFailed: any other error, on the ranks where it did not occur.
    """
    if _size() == 1:
        return [function()]
    error, sent = _attempt(function)
    outcomes: list[Any] = [None] * _size()
    dist.all_gather_object(outcomes, sent)
    interrupted = [outcome for outcome in outcomes if isinstance(outcome, Interrupted)]
    for outcome in (*interrupted, error, *outcomes):
        _result(outcome)
    return outcomes


def map_over_ranks(function: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]) -> list[Result]:
    """Returns `function(items)`, where each rank processes every world-size-th item; a collective.

    Every rank passes the same items and gets all results, in the items' order. Errors as of `on_every_rank`.

    Args:
        function: maps a list of items to a list of the same number of picklable results.
        items: the work.
    """
    size = _size()
    if size == 1:
        return function(items)
    shares = on_every_rank(lambda: function(items[dist.get_rank() :: size]))
    return [shares[index % size][index // size] for index in range(len(items))]


def on_rank_zero(function: Callable[[], Result]) -> Result:
    """Returns rank 0's `function()` on every rank; a collective.

    It keeps user functions, which may decide randomly, identical on all ranks. Errors as of `on_every_rank`.

    Args:
        function: called on rank 0; its result can be pickled.
    """
    if _size() == 1:
        return function()
    is_main = dist.get_rank() == 0
    error, sent = _attempt(function) if is_main else (None, None)
    outcomes = [sent]
    dist.broadcast_object_list(outcomes, src=0)
    _result(error)
    return _result(outcomes[0])  # type: ignore[no-any-return]  # rank 0's


def portable(error: Exception) -> Exception:
    """The same message in a type that every rank can unpickle."""
    if isinstance(error, Interrupted):
        return error
    for kind in (CustomFunctionError, RolloutUnavailable, ValueError, OSError):
        if isinstance(error, kind):
            return kind(str(error))
    return OtherRankFailed(f"{type(error).__name__}: {error}")


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _attempt(function: Callable[[], Any]) -> tuple[Exception | None, Any]:
    """(the function's error, its result or the portable error)."""
    try:
        return None, function()
    except Exception as error:
        return error, portable(error)


def _result(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
