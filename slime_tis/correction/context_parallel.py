"""Ranks that share a global batch: their reductions, and slices of responses and how to join them.

Shapes: suffix _N is per token of the complete responses, one response after another; _L is per
token of this rank's slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.layout import Layout
from slime_tis.correction.modes import LEVELS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ReduceOp = Literal["sum", "min", "max"]

AllReduce = Callable[[Tensor, ReduceOp], Tensor]
"""Reduces a tensor over the ranks of a group and returns the result, the same on each of them.

It may work in place: the library passes new memory, and uses nothing but the returned tensor
afterwards.
"""


def context_parallel_slices(
    total_length: int, response_length: int, rank: int, size: int, padded_length: int | None = None
) -> tuple[slice, slice]:
    """The response tokens whose log-probs rank `rank` of `size` computes, as two slices into the response.

    Zigzag: the sequence is cut into 2·size chunks of ⌈total/(2·size)⌉ positions, and rank r holds
    chunks r and 2·size − 1 − r. The logits at position p predict token p + 1, so the response
    tokens belong to positions prompt − 1 … total − 2. An empty share is `slice(0, 0)`.

    Args:
        total_length: Tokens of prompt and response.
        response_length: Tokens of the response.
        rank: Rank in the context-parallel group.
        size: Size of the group; with 1 the complete response is the first slice.
        padded_length: The length that is cut into chunks, if sequences are padded; total_length if
            None.

    Raises:
        ValueError: if the lengths or the rank are impossible.
    """
    if not 0 <= response_length <= total_length:
        raise ValueError(
            f"response_length is {response_length} of total_length {total_length}; pass lengths of"
            " one sample."
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a context-parallel group of {size}.")
    if size == 1:
        return slice(0, response_length), slice(0, 0)
    prompt_length = total_length - response_length
    chunk = -(-(padded_length or total_length) // (2 * size))

    def share(index: int) -> slice:
        first = max(index * chunk, prompt_length - 1)
        last = min((index + 1) * chunk, total_length - 1)
        if first >= last:
            return slice(0, 0)
        return slice(first + 1 - prompt_length, last + 1 - prompt_length)

    return share(rank), share(2 * size - 1 - rank)


@dataclass(frozen=True)
class ResponseSlices:
    """Positions of this rank's tokens in the responses: five consecutive pieces each; the rank owns two of them."""

    pieces: tuple[int, ...]
    """Lengths: gap, first slice, gap, second slice, gap, response after response."""
    local_lengths: tuple[int, ...]
    """Tokens of each response on this rank."""
    lengths: tuple[int, ...]
    """Tokens of each whole response."""

    @cached_property
    def local_starts(self) -> tuple[int, ...]:
        """Where each response begins among this rank's tokens, and where the last one ends."""
        return tuple(accumulate(self.local_lengths, initial=0))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The same among the tokens of whole responses."""
        return tuple(accumulate(self.lengths, initial=0))

    def select(self, responses: Sequence[int]) -> ResponseSlices:
        """The slices of the responses at these indices, in that order."""
        return ResponseSlices(
            pieces=tuple(piece for i in responses for piece in self.pieces[5 * i : 5 * i + 5]),
            local_lengths=tuple(self.local_lengths[i] for i in responses),
            lengths=tuple(self.lengths[i] for i in responses),
        )

    def slice_list(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """This rank's slice of each whole response."""
        if self.local_lengths == self.lengths:
            return list(whole)
        return list(self.slice_flat(torch.cat(list(whole))).split(self.local_lengths))

    def slice_flat(self, whole_N: Tensor) -> Tensor:
        """This rank's tokens [L] of the flat whole responses [N]."""
        owned = [piece for i, piece in enumerate(whole_N.split(self.pieces)) if i % 5 in (1, 3)]
        return torch.cat([whole_N[:0], *owned])

    def scatter(self, local_L: Tensor) -> Tensor:
        """This rank's flat tokens [L, …] at their places in the flat whole responses [N, …], 0 elsewhere."""
        owned = iter(local_L.split([size for i, size in enumerate(self.pieces) if i % 5 in (1, 3)]))
        gaps = [size for i, size in enumerate(self.pieces) if i % 5 in (0, 2, 4)]
        zeros = iter(local_L.new_zeros(sum(gaps), *local_L.shape[1:]).split(gaps))
        places = [next(owned) if i % 5 in (1, 3) else next(zeros) for i in range(len(self.pieces))]
        return torch.cat([local_L[:0], *places])


def response_slices(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    rank: int,
    size: int,
    padded_lengths: Sequence[int] | None = None,
) -> ResponseSlices:
    """The slices of all responses that rank `rank` of `size` holds; arguments as of `context_parallel_slices`.

    Raises:
        ValueError: if the lengths or the rank are impossible.
    """
    pieces: list[int] = []
    local = []
    for i, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
        padded = None if padded_lengths is None else padded_lengths[i]
        first, second = context_parallel_slices(total, response, rank, size, padded)
        if second.stop <= second.start:
            # an empty second slice is put at the end, so that pieces stay in order
            second = slice(response, response)
        first_length = first.stop - first.start
        second_length = second.stop - second.start
        between = second.start - first.stop
        pieces += [first.start, first_length, between, second_length, response - second.stop]
        local.append(first_length + second_length)
    return ResponseSlices(tuple(pieces), tuple(local), tuple(response_lengths))


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The context- and data-parallel ranks that share a global batch; by default one rank on its own."""

    context: AllReduce | None = None
    """Reduces over the context-parallel ranks, each with its slices of the same sequences; None
    where sequences are whole."""
    data: AllReduce | None = None
    """Reduces over the data-parallel ranks, each with other sequences; None where one rank has
    all."""
    data_and_context: AllReduce | None = None
    """Reduces over both at once; None where that takes `context` and then `data`."""
    slices: ResponseSlices | None = None
    """Positions of this rank's slices in the sequences of one call. The levels prefix and segment
    need them where sequences are sliced; the others do without."""

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
            context: The context-parallel group; None if sequences are not sliced.
            data: The data-parallel group; None if one rank has all sequences.
            data_and_context: The group of both, Megatron-core's data-parallel group with context
                parallelism: one collective instead of two.
            slices: Positions of this rank's slices, from `response_slices`.

        Raises:
            ValueError: if there is no group: `torch.distributed.group.WORLD` is None before
                `init_process_group`.
        """
        if context is None and data is None:
            raise ValueError(
                "Ranks.from_groups got no process group: torch.distributed.group.WORLD is None"
                " before torch.distributed.init_process_group; call that first, or take"
                " slime_tis.Ranks() for one rank."
            )
        context_reduce, data_reduce, both = (
            None if group is None else _GroupAllReduce(group)
            for group in (context, data, data_and_context)
        )
        return cls(context=context_reduce, data=data_reduce, data_and_context=both, slices=slices)

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
    """The reduction over a process group, in place; of another process's group when unpickled, which is None."""

    group: ProcessGroup | None

    def __call__(self, values: Tensor, op: ReduceOp) -> Tensor:
        if self.group is None:
            raise RuntimeError(
                "these Ranks were pickled, and their process groups are of the process that made"
                " them; pass Ranks.from_groups(…) of this one."
            )
        operations = torch.distributed.ReduceOp
        operation = {"sum": operations.SUM, "min": operations.MIN, "max": operations.MAX}[op]
        torch.distributed.all_reduce(values, operation, self.group)
        return values

    def __deepcopy__(self, memo: dict[int, Any]) -> _GroupAllReduce:
        return self

    def __reduce__(self) -> tuple[type, tuple[None]]:
        return _GroupAllReduce, (None,)


def whole_sequence_levels(config: RolloutCorrectionConfig) -> list[str]:
    """The flags in force whose level needs whole sequences; for all others a table of sums is enough."""
    levels = (
        ("--tis-level", config.use_tis, config.tis_level),
        ("--rs-level", config.use_rs, config.rs_level),
    )
    return [
        f"{flag} {level}"
        for flag, is_on, level in levels
        if is_on and LEVELS[level].needs_whole_sequences
    ]


def gather_slices(local: Layout, slices: ResponseSlices, ranks: Ranks) -> dict[str, Tensor]:
    """Whole responses from the slices of all ranks: the inputs of `correct` by name, packed [N].

    Every rank puts its tokens at their places among zeros, and one sum over the context-parallel
    ranks joins them in one float64 table. A token has one owner and x + 0 = x, for NaN and ±inf
    too, so that values arrive unchanged.

    Raises:
        ValueError: if `slices` is of responses with other lengths.
    """
    if local.lengths != list(slices.local_lengths):
        raise ValueError(
            f"train_log_probs has sequences of {local.lengths} tokens but slices has"
            f" {list(slices.local_lengths)} on this rank; pass this rank's tokens, and the slices"
            " of these sequences."
        )
    columns = {
        name: x if isinstance(x, Tensor) else torch.cat([torch.zeros(0, device=local.device), *x])
        for name, x in local.tokens.items()
    }
    working = torch.promote_types(
        columns["train_log_probs"].dtype, columns["rollout_log_probs"].dtype
    )
    table_L = torch.stack([column.to(torch.float64) for column in columns.values()], 1)
    table_N = ranks.over_context(slices.scatter(table_L)).to(working)
    return dict(zip(columns, table_N.unbind(1), strict=True))
