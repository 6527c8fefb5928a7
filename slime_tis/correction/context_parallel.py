"""Ranks that share a global batch: their reductions, and the slices of responses that they hold.

Shapes: suffix _N is per token of the complete responses, one response after another. _L is per
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
"""Reduces a tensor over the ranks of a group and returns the result, which all ranks get.

It may work in place: the library passes new memory, and afterwards uses only the returned tensor.
"""


def context_parallel_slices(
    total_length: int, response_length: int, rank: int, size: int, padded_length: int | None = None
) -> tuple[slice, slice]:
    """Two slices of a response: the tokens whose log-probs rank `rank` of `size` computes.

    Zigzag, as in Megatron-core: the sequence is cut into 2·size chunks of ⌈total/(2·size)⌉
    positions, and rank r holds chunks r and 2·size − 1 − r. The logits at position p predict token
    p + 1, so the response tokens belong to positions prompt − 1 … total − 2. An empty slice is
    `slice(0, 0)`.

    Args:
        total_length: Tokens of prompt and response.
        response_length: Tokens of the response.
        rank: Rank in the context-parallel group.
        size: Size of the group; with 1 the complete response is the first slice.
        padded_length: The length that is cut into chunks, if sequences are padded. If None, it is
            total_length.

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
    # Rounded up: all ranks need chunks of equal length, the last one may be padded.
    chunk = -(-(padded_length or total_length) // (2 * size))

    def predicted_tokens(index: int) -> slice:
        """Response tokens that the positions of a chunk predict."""
        # The last position of the prompt predicts the first token of the response.
        first = max(index * chunk, prompt_length - 1)
        last = min((index + 1) * chunk, total_length - 1)
        if first >= last:
            return slice(0, 0)
        return slice(first + 1 - prompt_length, last + 1 - prompt_length)

    return predicted_tokens(rank), predicted_tokens(2 * size - 1 - rank)


@dataclass(frozen=True)
class ResponseSlices:
    """Positions of this rank's tokens in the complete responses."""

    owned: tuple[tuple[range, range], ...]
    """Per response, the positions of this rank's two slices in the response."""
    lengths: tuple[int, ...]
    """Tokens per complete response."""

    @cached_property
    def local_lengths(self) -> tuple[int, ...]:
        """Tokens per response on this rank."""
        return tuple(len(first) + len(second) for first, second in self.owned)

    @cached_property
    def local_starts(self) -> tuple[int, ...]:
        """Where each response starts in this rank's tokens, and where the last one ends."""
        return tuple(accumulate(self.local_lengths, initial=0))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Starts of the responses in the flat complete responses, and the end of the last one."""
        return tuple(accumulate(self.lengths, initial=0))

    @cached_property
    def positions_L(self) -> Tensor:
        """Positions of this rank's tokens in the flat complete responses, int64 on the CPU."""
        # `cat` refuses an empty list, which a batch without a response has.
        ranges = [torch.zeros(0, dtype=torch.int64)]
        for response, (first, second) in enumerate(self.owned):
            start = self.starts[response]
            ranges.append(torch.arange(start + first.start, start + first.stop))
            ranges.append(torch.arange(start + second.start, start + second.stop))
        return torch.cat(ranges)

    def select(self, responses: Sequence[int]) -> ResponseSlices:
        """The slices of the responses at these indices, in that order."""
        owned = tuple(self.owned[i] for i in responses)
        lengths = tuple(self.lengths[i] for i in responses)
        return ResponseSlices(owned, lengths)

    def slice_list(self, responses: Sequence[Tensor]) -> list[Tensor]:
        """This rank's tokens of the complete responses, per response."""
        if self.local_lengths == self.lengths:
            return list(responses)
        return list(self.slice_flat(torch.cat(list(responses))).split(self.local_lengths))

    def slice_flat(self, values_N: Tensor) -> Tensor:
        """This rank's tokens [L] of flat complete responses [N]."""
        positions_L = self.positions_L.to(values_N.device, non_blocking=True)
        return values_N.index_select(0, positions_L)

    def scatter(self, values_L: Tensor) -> Tensor:
        """This rank's tokens [L, …] at their places in flat complete responses [N, …], else 0."""
        positions_L = self.positions_L.to(values_L.device, non_blocking=True)
        zeros_N = values_L.new_zeros(self.starts[-1], *values_L.shape[1:])
        return zeros_N.index_copy(0, positions_L, values_L)


def response_slices(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    rank: int,
    size: int,
    padded_lengths: Sequence[int] | None = None,
) -> ResponseSlices:
    """The slices of several responses on rank `rank` of `size`.

    The arguments are those of `context_parallel_slices`, per response.

    Raises:
        ValueError: if the lengths or the rank are impossible.
    """
    if padded_lengths is None:
        padded_lengths = total_lengths
    owned = []
    for total, response, padded in zip(
        total_lengths, response_lengths, padded_lengths, strict=True
    ):
        first, second = context_parallel_slices(total, response, rank, size, padded)
        owned.append((range(first.start, first.stop), range(second.start, second.stop)))
    return ResponseSlices(tuple(owned), tuple(response_lengths))


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The context- and data-parallel ranks that share a global batch; by default a single rank."""

    context: AllReduce | None = None
    """Reduces over the context-parallel ranks, which hold slices of the same sequences; None if
    sequences are not sliced."""
    data: AllReduce | None = None
    """Reduces over the data-parallel ranks, which hold different sequences; None if one rank has
    all sequences."""
    data_and_context: AllReduce | None = None
    """Reduces over both in one collective; None to reduce over `context` and then over `data`."""
    slices: ResponseSlices | None = None
    """Positions of this rank's slices in the sequences of one call. The levels prefix and segment
    need them if sequences are sliced; the other levels do not."""

    @classmethod
    def from_groups(
        cls,
        *,
        context: ProcessGroup | None = None,
        data: ProcessGroup | None = None,
        data_and_context: ProcessGroup | None = None,
        slices: ResponseSlices | None = None,
    ) -> Ranks:
        """The ranks of torch.distributed's process groups.

        They can be pickled, but cannot reduce after unpickling.

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
        return cls(
            context=_all_reduce(context),
            data=_all_reduce(data),
            data_and_context=_all_reduce(data_and_context),
            slices=slices,
        )

    @property
    def is_one(self) -> bool:
        """Whether this rank has the complete batch."""
        return self.context is None and self.data is None

    def with_slices(self, slices: ResponseSlices) -> Ranks:
        """The same ranks for a call with other sequences."""
        return replace(self, slices=slices)

    def over_context(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduces over the context-parallel ranks; `values` may be overwritten."""
        if self.context is None:
            return values
        return self.context(values, op)

    def over_data(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduces over the data-parallel ranks; `values` may be overwritten."""
        if self.data is None:
            return values
        return self.data(values, op)

    def all_reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduces over context- and data-parallel ranks; `values` may be overwritten."""
        if self.data_and_context is not None:
            return self.data_and_context(values, op)
        return self.over_data(self.over_context(values, op), op)


ONE_RANK = Ranks()


@dataclass(frozen=True)
class _GroupAllReduce:
    """Reduces over a process group, in place. The group is None after unpickling."""

    group: ProcessGroup | None

    def __call__(self, values: Tensor, op: ReduceOp) -> Tensor:
        if self.group is None:
            raise RuntimeError(
                "these Ranks were pickled, and their process groups exist only in the process that"
                " made them; pass Ranks.from_groups(…) of this process."
            )
        operations = {
            "sum": torch.distributed.ReduceOp.SUM,
            "min": torch.distributed.ReduceOp.MIN,
            "max": torch.distributed.ReduceOp.MAX,
        }
        torch.distributed.all_reduce(values, operations[op], self.group)
        return values

    def __deepcopy__(self, memo: dict[int, Any]) -> _GroupAllReduce:
        # A process group cannot be copied. Within a process the same group is right.
        return self

    def __reduce__(self) -> tuple[type, tuple[None]]:
        return _GroupAllReduce, (None,)


def _all_reduce(group: ProcessGroup | None) -> AllReduce | None:
    """The reduction over a group; None without a group."""
    if group is None:
        return None
    return _GroupAllReduce(group)


def level_of_complete_sequences(config: RolloutCorrectionConfig) -> str | None:
    """The flag whose level needs complete sequences, or None if a table of sums is enough."""
    if config.use_tis and LEVELS[config.tis_level].needs_complete_sequences:
        return f"--tis-level {config.tis_level}"
    if config.use_rs and LEVELS[config.rs_level].needs_complete_sequences:
        return f"--rs-level {config.rs_level}"
    return None


def gather_slices(local: Layout, slices: ResponseSlices, ranks: Ranks) -> dict[str, Tensor]:
    """Complete responses from the slices of all ranks: the inputs of `correct` by name, packed [N].

    Every rank writes its tokens into zeros, and one sum over the context-parallel ranks joins them
    in one float64 table. A token has one owner and x + 0 = x, also for NaN and ±inf, so values are
    not changed.

    Raises:
        ValueError: if the slices belong to responses of other lengths.
    """
    if local.lengths != list(slices.local_lengths):
        raise ValueError(
            f"train_log_probs has sequences of {local.lengths} tokens but slices has"
            f" {list(slices.local_lengths)} on this rank; pass this rank's tokens, and the slices"
            " of these sequences."
        )
    packed = local.packed()
    # One table is one collective; float64 holds float32 and the masks without rounding.
    columns = [values.to(torch.float64) for values in packed.values()]
    table_L = torch.stack(columns, 1)
    table_N = ranks.over_context(slices.scatter(table_L))
    working = torch.promote_types(
        packed["train_log_probs"].dtype, packed["rollout_log_probs"].dtype
    )
    columns_N = table_N.to(working).unbind(1)
    return dict(zip(packed, columns_N, strict=True))
