"""The samples of one data-parallel rank, and how they are dealt into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_tis.correction import response_slices


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """The samples of one data-parallel rank; `local` holds what this context-parallel rank owns of each response."""

    tokens: list[Tensor]
    """Whole sequences, prompt and response, int64 [total]."""
    response_lengths: list[int]
    """Tokens at the end of each sequence that were generated (or are tool output inside the response)."""
    loss_masks: list[Tensor]
    """Whole responses, 1 where a token is trained on, 0 on tool output, [response]."""
    local: dict[str, list[Tensor]]
    """Per-token values by name (loss_masks, rollout_log_probs, advantages, …): this rank's slices of the responses."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total_lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def select(self, indices: Sequence[int]) -> "TrainingBatch":
        """The samples at `indices`, in that order."""
        return TrainingBatch(
            tokens=[self.tokens[i] for i in indices],
            response_lengths=[self.response_lengths[i] for i in indices],
            loss_masks=[self.loss_masks[i] for i in indices],
            local={name: [values[i] for i in indices] for name, values in self.local.items()},
        )

    def with_local(self, name: str, values: list[Tensor]) -> "TrainingBatch":
        """The same samples with one more per-token value."""
        return replace(self, local={**self.local, name: values})


def make_batch(
    tokens: Sequence[Sequence[int]],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Sequence[int]],
    per_token: dict[str, list[Tensor]],
    context_rank: int = 0,
    context_size: int = 1,
) -> TrainingBatch:
    """Builds a batch from whole sequences, cutting every per-token value to this context-parallel rank's slices."""
    masks = tensors(loss_masks, torch.float32)
    slices = response_slices([len(ids) for ids in tokens], response_lengths, context_rank, context_size)
    return TrainingBatch(
        tokens=tensors(tokens, torch.int64),
        response_lengths=list(response_lengths),
        loss_masks=masks,
        local={name: slices.slice_list(values) for name, values in {**per_token, "loss_masks": masks}.items()},
    )


def tensors(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> list[Tensor]:
    """One tensor per row, all cut from one: a tensor is slow to make from Python numbers, whatever its size."""
    flat = torch.tensor([value for row in rows for value in row], dtype=dtype)
    return list(flat.split([len(row) for row in rows]))


def fixed_partition(count: int, micro_batch_size: int | None) -> list[list[int]]:
    """Samples 0 … count−1 in runs of `micro_batch_size` (all in one run when None)."""
    size = micro_batch_size or max(count, 1)
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def token_budget_partitions(lengths_of_ranks: list[list[int]], max_tokens: int) -> list[list[list[int]]]:
    """Micro-batches of at most `max_tokens` for every data-parallel rank, as many on each.

    First-fit decreasing on each rank; where a rank needs fewer micro-batches than another its fullest are split, so
    that every rank makes the same number of passes. A sequence longer than the budget is a micro-batch of its own.

    Args:
        lengths_of_ranks: tokens of every sequence, for every data-parallel rank. Every rank needs at least as many
            sequences as the rank with most micro-batches, which equal numbers of sequences guarantee.
        max_tokens: the budget, in tokens.

    Returns:
        For every rank its micro-batches, each a sorted list of indices into that rank's sequences.
    """
    partitions = [_first_fit_decreasing(lengths, max_tokens) for lengths in lengths_of_ranks]
    count = max(len(partition) for partition in partitions)
    for lengths, partition in zip(lengths_of_ranks, partitions, strict=True):
        while len(partition) < count:
            fullest = max((bin for bin in partition if len(bin) > 1), key=lambda bin: sum(lengths[i] for i in bin))
            partition.remove(fullest)
            partition += [fullest[0::2], fullest[1::2]]
    return [[sorted(bin) for bin in partition] for partition in partitions]


def _first_fit_decreasing(lengths: list[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        slot = next((b for b, room in enumerate(free) if room >= lengths[index]), None)
        if slot is None:
            bins.append([])
            free.append(max_tokens)
            slot = len(bins) - 1
        bins[slot].append(index)
        free[slot] -= lengths[index]
    return bins
