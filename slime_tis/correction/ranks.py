"""The ranks that share a global batch, and the reductions over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from slime_tis.correction.context_parallel import ResponseSlices

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ReduceOp = Literal["sum", "min", "max"]

AllReduce = Callable[[Tensor, ReduceOp], Tensor]
"""Reduces a tensor over the ranks of a group and returns the result, the same on each of them.

It may work in place: the library passes new memory, and uses nothing but the returned tensor afterwards.
"""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The context- and data-parallel ranks that share a global batch; by default one rank on its own."""

    context: AllReduce | None = None
    """Reduces over the context-parallel ranks, each with its slices of the same sequences; None where
    sequences are whole."""
    data: AllReduce | None = None
    """Reduces over the data-parallel ranks, each with other sequences; None where one rank has all."""
    data_and_context: AllReduce | None = None
    """Reduces over both at once; None where that takes `context` and then `data`."""
    slices: ResponseSlices | None = None
    """Where this rank's slices lie in the sequences of one call. The levels prefix and segment need it where
    sequences are sliced; the others do without."""

    @classmethod
    def from_groups(
        cls,
        *,
        context: ProcessGroup | None = None,
        data: ProcessGroup | None = None,
        data_and_context: ProcessGroup | None = None,
        slices: ResponseSlices | None = None,
    ) -> Ranks:
        """The ranks of torch.distributed's process groups; pickled, they can reduce nothing in another process.

        Args:
            context: The context-parallel group; None where sequences are whole.
            data: The data-parallel group; None where one rank has the whole batch.
            data_and_context: The group of the ranks of both, Megatron-core's data-parallel group with context
                parallelism: what is reduced over both is then one collective, instead of two.
            slices: Where this rank's slices lie, from `response_slices`.

        Raises:
            ValueError: if there is no group: `torch.distributed.group.WORLD` is None before `init_process_group`.
        """
        if context is None and data is None:
            raise ValueError(
                "Ranks.from_groups got no process group: torch.distributed.group.WORLD is None before "
                "torch.distributed.init_process_group; call that first, or take slime_tis.Ranks() for one rank."
            )
        return cls(
            context=None if context is None else _GroupAllReduce(context),
            data=None if data is None else _GroupAllReduce(data),
            data_and_context=None if data_and_context is None else _GroupAllReduce(data_and_context),
            slices=slices,
        )

    @property
    def is_one(self) -> bool:
        """Whether this rank has the whole batch."""
        return self.context is None and self.data is None

    def with_slices(self, slices: ResponseSlices) -> Ranks:
        """The same ranks for a call with other sequences."""
        return replace(self, slices=slices)

    def over_context(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduces over the context-parallel ranks; `values` may be overwritten."""
        return values if self.context is None else self.context(values, op)

    def over_data(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduces over the data-parallel ranks; `values` may be overwritten."""
        return values if self.data is None else self.data(values, op)

    def all_reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduces over context- and data-parallel ranks; `values` may be overwritten."""
        if self.data_and_context is not None:
            return self.data_and_context(values, op)
        return self.over_data(self.over_context(values, op), op)


ONE_RANK = Ranks()


@dataclass(frozen=True)
class _GroupAllReduce:
    """The reduction over a process group, in place."""

    group: ProcessGroup

    def __call__(self, values: Tensor, op: ReduceOp) -> Tensor:
        operation = {
            "sum": torch.distributed.ReduceOp.SUM,
            "min": torch.distributed.ReduceOp.MIN,
            "max": torch.distributed.ReduceOp.MAX,
        }[op]
        torch.distributed.all_reduce(values, operation, self.group)
        return values

    def __deepcopy__(self, memo: dict[int, Any]) -> _GroupAllReduce:
        return self  # in this process the group is the same

    def __reduce__(self) -> tuple[Callable[[], AllReduce], tuple[()]]:
        return _unpickled, ()  # a process group cannot be pickled, and is of one process


def _unpickled() -> AllReduce:
    return _refuse


def _refuse(values: Tensor, op: ReduceOp) -> Tensor:
    raise RuntimeError(
        "these Ranks were pickled, and their process groups are of the process that made them; "
        "pass Ranks.from_groups(…) of this one."
    )
