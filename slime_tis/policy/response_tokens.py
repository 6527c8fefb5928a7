"""Data of the response tokens on one rank, packed: from samples to the loss."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from slime_tis.correction import ResponseSlices


@dataclass(frozen=True, kw_only=True)
class ResponseTokens:
    """This context-parallel rank's response tokens, one response after another.

    Shapes: suffix _L is the tokens of this rank's slices, packed; _N the tokens of complete
    responses, packed.
    """

    slices: ResponseSlices
    """Positions of this rank's tokens in the complete responses."""
    total_lengths: tuple[int, ...]
    """Tokens of prompt and complete response, per sequence."""
    loss_mask_L: Tensor
    """float32: 1 at trained tokens, 0 at tool output."""
    loss_mask_N: Tensor
    """The mask of complete responses, for custom functions; equal to `loss_mask_L` without context
    parallelism."""
    rollout_log_probs_L: Tensor
    """float32 log π_rollout in nats; NaN if the engine gave none."""
    weight_versions_L: Tensor
    """int64: version of the weights that sampled a token, in optimizer steps."""
    workers_L: Tensor | None = None
    """int64: index of the server that sampled a token, -1 if unknown; None if all are unknown."""
    turns_L: Tensor
    """int64: turn of the token, from 1 in each response; see `turns_of`."""
    old_log_probs_L: Tensor | None = None
    """float32 log π_old in nats, from a forward pass before the rollout's first step; None without
    this pass."""
    old_entropy_L: Tensor | None = None
    """float32 entropy of π_old in nats, from the same pass; None unless user functions get it."""
    sum_pi_squared_L: Tensor | None = None
    """float32 Σ_v π_v² over the vocabulary, from the same pass; None unless the advantages need
    it."""
    ref_log_probs_L: Tensor | None = None
    """float32 log π_ref in nats; None without a KL loss."""
    advantages_L: Tensor | None = None
    """float32; None before rewards are compared."""
    rollouts: tuple[int, ...] | None = None
    """Number of the response's rollout, from 0; None if every response is a separate rollout."""

    def __len__(self) -> int:
        """Number of responses."""
        return len(self.total_lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens on this rank, per response."""
        return self.slices.local_lengths

    @property
    def response_lengths(self) -> tuple[int, ...]:
        """Tokens of the complete response, per response."""
        return self.slices.lengths

    def select(self, samples: Sequence[int]) -> Self:
        """The responses at the indices `samples`, in that order."""
        tensors: dict[str, Any] = {}
        for name, value in self._tensors().items():
            starts = self.slices.local_starts
            if name == "loss_mask_N":
                starts = self.slices.starts
            # Only views of the chosen responses: this runs for every micro-batch, over the batch
            # of the complete step.
            pieces = [value[starts[i] : starts[i + 1]] for i in samples]
            tensors[name] = torch.cat([value[:0], *pieces])  # torch.cat refuses an empty list
        rollouts = None
        if self.rollouts is not None:
            rollouts = numbered([self.rollouts[i] for i in samples])
        return replace(
            self,
            slices=self.slices.select(samples),
            total_lengths=tuple(self.total_lengths[i] for i in samples),
            rollouts=rollouts,
            **tensors,
        )

    def to(self, device: torch.device | str) -> Self:
        """The same tokens on another device."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in self._tensors().items()
        }
        return replace(self, **moved)

    def with_advantages(self, per_sample: Sequence[float]) -> Self:
        """The same tokens with a sample's advantage at all tokens of the sample."""
        # Values beyond float32 become infinite.
        advantages_S = torch.tensor(per_sample, dtype=torch.float64).float()
        return replace(self, advantages_L=expand(advantages_S, self.lengths))

    def _tensors(self) -> dict[str, Tensor]:
        """The fields that are tensors, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def turns_of(loss_mask_N: Tensor, lengths: Sequence[int]) -> Tensor:
    """Turns [N] int64, from 1 in each response.

    A turn begins with a run of trained tokens; tool output after the run belongs to it.
    """
    trained_N = loss_mask_N > 0
    # Whether the token before is trained. A response begins without a token before.
    before_N = trained_N.roll(1)
    length_S = torch.tensor(lengths, dtype=torch.int64)
    start_S = length_S.cumsum(0) - length_S
    before_N[start_S[length_S > 0]] = False
    runs_N = (trained_N & ~before_N).long().cumsum(0)
    # Subtract the runs of earlier responses. Masked tokens before the first run belong to turn 1.
    earlier_S = torch.nn.functional.pad(runs_N, (1, 0))[start_S]
    return (runs_N - expand(earlier_S, lengths)).clamp_min(1)


def numbered(names: Sequence[int]) -> tuple[int, ...]:
    """Replaces names by numbers from 0, in the order of first occurrence."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def expand(values_S: Tensor, lengths: Sequence[int]) -> Tensor:
    """A sequence's value at all tokens of the sequence, [L], without a host synchronisation."""
    repeats_S = torch.tensor(lengths, dtype=torch.int64).to(values_S.device, non_blocking=True)
    return values_S.repeat_interleave(repeats_S, output_size=sum(lengths))
