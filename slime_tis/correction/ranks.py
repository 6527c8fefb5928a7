"""The ranks that share a global batch, and the reductions over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from slime_tis.correction.context_parallel import ResponseSlices

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ReduceOp = Literal["sum", "min", "max"]

AllReduce = Callable[[Tensor, ReduceOp], Tensor]
"""Reduces a tensor over the ranks of a group and returns the result, the same on each of them.

It may work in place: the library passes memory of its own, and uses nothing but the returned tensor afterwards.
"""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The context- and data-parallel ranks that share a global batch; by default one rank on its own."""

    context: AllReduce | None = None
    """Reduces over the context-parallel ranks, each of which has its slices of the same sequences; None where
    sequences are whole."""
    data: AllReduce | None = None
    """Reduces over the data-parallel ranks, each of which has other sequences; None where one rank has all."""
    slices: ResponseSlices | None = None
    """Where this rank's slices lie in the sequences of one call. The levels prefix and segment need it where
    sequences are sliced; the others do without."""

    @classmethod
    def from_groups(
        cls,
        *,
        context: ProcessGroup | None = None,
        data: ProcessGroup | None = None,
        slices: ResponseSlices | None = None,
    ) -> Ranks:
        """The ranks of torch.distributed's process groups.

        Args:
            context: The context-parallel group; None where sequences are whole.
            data: The data-parallel group; None where one rank has the whole batch.
            slices: Where this rank's slices lie, from `response_slices`.
        """
        return cls(
            context=None if context is None else _all_reduce_over(context),
            data=None if data is None else _all_reduce_over(data),
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
        return self.over_data(self.over_context(values, op), op)


ONE_RANK = Ranks()


def _all_reduce_over(group: ProcessGroup) -> AllReduce:
    def all_reduce(values: Tensor, op: ReduceOp) -> Tensor:
        operation = {
            "sum": torch.distributed.ReduceOp.SUM,
            "min": torch.distributed.ReduceOp.MIN,
            "max": torch.distributed.ReduceOp.MAX,
        }[op]
        torch.distributed.all_reduce(values, operation, group)
        return values

    return all_reduce
