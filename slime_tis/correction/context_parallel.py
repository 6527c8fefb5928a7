"""Which tokens of a response a context-parallel rank holds, and whole responses from the slices of all ranks.

Shapes: suffix _N is per token of the whole responses, one response after another; _L per token of this rank's slices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.inputs import LogProbs, check_tensor, checked_lengths

WHOLE_SEQUENCE_LEVELS = ("prefix", "segment")
"""Levels at which a token's weight depends on tokens of other slices in more than their sum."""


def context_parallel_slices(
    total_length: int, response_length: int, rank: int, size: int, padded_length: int | None = None
) -> tuple[slice, slice]:
    """The response tokens whose log-probs rank `rank` of `size` computes, as two slices into the response.

    Zigzag: the sequence is cut into 2·size chunks of ⌈total/(2·size)⌉ positions, and rank r holds chunks r
    and 2·size − 1 − r. The logits at position p predict token p + 1, so that the response tokens belong to
    positions prompt − 1 … total − 2. An empty share is `slice(0, 0)`.

    Args:
        total_length: Tokens of prompt and response.
        response_length: Tokens of the response.
        rank: Rank in the context-parallel group.
        size: Size of the group; with 1 the whole response is the first slice.
        padded_length: What is cut into chunks where sequences are padded to one length; total_length if None.

    Raises:
        ValueError: if the lengths or the rank are impossible.
    """
    if not 0 <= response_length <= total_length:
        raise ValueError(
            f"response_length is {response_length} of total_length {total_length}; pass lengths of one sample."
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a context-parallel group of {size}.")
    if size == 1:
        return slice(0, response_length), slice(0, 0)
    prompt_length = total_length - response_length
    chunk = -(-(padded_length or total_length) // (2 * size))
    return _share(rank, chunk, prompt_length, total_length), _share(
        2 * size - 1 - rank, chunk, prompt_length, total_length
    )


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

    def select(self, responses: Sequence[int]) -> "ResponseSlices":
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
        a, b = first.start, first.stop
        c, d = (second.start, second.stop) if second.stop > second.start else (response, response)
        pieces += [a, b - a, c - b, d - c, response - d]
        local.append(b - a + d - c)
    return ResponseSlices(tuple(pieces), tuple(local), tuple(response_lengths))


def whole_sequence_levels(config: RolloutCorrectionConfig) -> list[str]:
    """The flags in force whose level needs whole sequences; for all others a table of sums is enough."""
    levels = {
        "--tis-level": config.tis_level if config.use_tis else "",
        "--rs-level": config.rs_level if config.use_rs else "",
    }
    return [f"{flag} {level}" for flag, level in levels.items() if level in WHOLE_SEQUENCE_LEVELS]


def gather_slices(
    train_log_probs: LogProbs,
    rollout_log_probs: LogProbs,
    loss_mask: LogProbs,
    lengths: Sequence[int] | None,
    slices: ResponseSlices,
    sum_over_context: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Whole responses from the slices of all ranks: train and rollout log-probs and the mask, packed [N].

    Every rank puts its tokens at their places among zeros, and one sum joins them. A token has one owner and
    x + 0 = x, for NaN and ±inf too, so that each value arrives as it was sent.

    Args:
        train_log_probs: This rank's tokens of each response, as a list or packed [L].
        rollout_log_probs: Log-probs of the rollout engine; None in a list for a sample without any.
        loss_mask: Loss masks.
        lengths: Tokens of each response on this rank, where they are packed.
        slices: Where they lie.
        sum_over_context: Sums the float64 [N, 3] table over the context-parallel ranks.

    Raises:
        ValueError: if these are not the tokens that `slices` speaks of, or they are a padded batch.
    """
    inputs = {"train_log_probs": train_log_probs, "rollout_log_probs": rollout_log_probs, "loss_mask": loss_mask}
    columns = [_packed(name, values, lengths, slices, _device(train_log_probs)) for name, values in inputs.items()]
    working = torch.promote_types(columns[0].dtype, columns[1].dtype)
    table_L = torch.stack([column.to(torch.float64) for column in columns], 1)
    train_N, rollout_N, mask_N = sum_over_context(slices.scatter(table_L)).to(working).unbind(1)
    return train_N, rollout_N, mask_N


def _packed(
    name: str, values: LogProbs, lengths: Sequence[int] | None, slices: ResponseSlices, device: torch.device
) -> Tensor:
    """The tokens [L] in float32 or float64, NaN for a sample that has none."""
    expected = slices.local_lengths
    if isinstance(values, Tensor):
        if lengths is None:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)} and lengths is None; where slices are gathered pass lists, "
                f"or packed [L] tensors with lengths that sum to L."
            )
        check_tensor(name, values, device)
        values = values.split(checked_lengths(lengths, tuple(values.shape)))
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{name} is {type(values).__name__}; pass a tensor, or a list of tensors.")
    if len(values) != len(expected):
        raise ValueError(f"{name} has {len(values)} sequences but slices has {len(expected)}; pass one of each.")
    tokens: list[Tensor] = []
    for i, (value, size) in enumerate(zip(values, expected, strict=True)):
        if value is None and name == "rollout_log_probs":
            value = torch.full((size,), torch.nan, device=device)
        tokens.append(check_tensor(f"{name}[{i}]", value, device, dimensions=1))
        if len(tokens[i]) != size:
            raise ValueError(
                f"sequence {i}: {name} has {len(tokens[i])} tokens but slices has {size} on this rank; "
                f"pass this rank's tokens, and the slices of these sequences."
            )
    return torch.cat([torch.zeros(0, device=device), *tokens])


def _device(values: LogProbs) -> torch.device:
    first = values[0] if isinstance(values, Sequence) and len(values) else values
    return first.device if isinstance(first, Tensor) else torch.device("cpu")


def _share(index: int, chunk: int, prompt_length: int, total_length: int) -> slice:
    first = max(index * chunk, prompt_length - 1)
    last = min((index + 1) * chunk, total_length - 1)
    return slice(first + 1 - prompt_length, last + 1 - prompt_length) if first < last else slice(0, 0)
