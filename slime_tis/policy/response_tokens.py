"""The response tokens of a batch on one rank, packed: what is known of them on their way from samples to the loss."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from slime_tis.correction import ResponseSlices


@dataclass(frozen=True, kw_only=True)
class ResponseTokens:
    """What is known of the response tokens that this context-parallel rank owns, one response after another.

    Shapes: suffix _L the tokens of this rank's slices, packed; _N the tokens of whole responses.
    """

    slices: ResponseSlices
    """Where the tokens lie in the whole responses."""
    total_lengths: tuple[int, ...]
    """Tokens of each whole sequence, prompt and response."""
    loss_mask_L: Tensor
    """float32: 1 where a token is trained on, 0 on tool output."""
    loss_mask_N: Tensor
    """The same of the whole responses, which custom functions get; without context parallelism that
    is all of it."""
    rollout_log_probs_L: Tensor
    """float32 log π_rollout in nats; NaN where the engine gave none."""
    weight_versions_L: Tensor
    """int64: optimizer steps behind the weights that sampled each token."""
    workers_L: Tensor | None = None
    """int64: index of the server that sampled each token, -1 if unknown; None if no token's is
    known."""
    turns_L: Tensor
    """int64: number of the run of trained tokens that each token belongs to, from 1 on in each
    response."""
    old_log_probs_L: Tensor | None = None
    """float32 log π_old in nats, from a forward pass before the rollout's first step; None where
    none was made."""
    sum_pi_squared_L: Tensor | None = None
    """float32 Σ_v π_v² over the vocabulary, of the same pass; None unless the advantages need
    it."""
    ref_log_probs_L: Tensor | None = None
    """float32 log π_ref in nats; None without a KL loss."""
    advantages_L: Tensor | None = None
    """float32; None before rewards are compared."""
    rollouts: tuple[int, ...] | None = None
    """Number of the rollout to which each response belongs, from 0; None if each response is a
    separate rollout."""

    def __len__(self) -> int:
        """Responses."""
        return len(self.total_lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each response on this rank."""
        return self.slices.local_lengths

    @property
    def response_lengths(self) -> tuple[int, ...]:
        """Tokens of each whole response."""
        return self.slices.lengths

    def select(self, samples: Sequence[int]) -> Self:
        """The responses at the indices `samples`, in that order."""
        slices = self.slices
        tensors: dict[str, Any] = {
            name: _select(
                value, slices.starts if name == "loss_mask_N" else slices.local_starts, samples
            )
            for name, value in self._tensors().items()
        }
        return replace(
            self,
            slices=self.slices.select(samples),
            total_lengths=tuple(self.total_lengths[i] for i in samples),
            rollouts=(
                None if self.rollouts is None else numbered([self.rollouts[i] for i in samples])
            ),
            **tensors,
        )

    def to(self, device: torch.device | str) -> Self:
        """The same tokens on another device."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in self._tensors().items()
        }
        return replace(self, **moved)

    def with_advantages(self, per_sample: Sequence[float]) -> Self:
        """The same tokens with every sample's advantage at each of its tokens."""
        advantages_S = torch.tensor(
            per_sample, dtype=torch.float64
        ).float()  # beyond float32 it is infinite
        return replace(self, advantages_L=expand(advantages_S, self.lengths))

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def turns_of(loss_mask_N: Tensor, lengths: Sequence[int]) -> Tensor:
    """[N] int64: number of the run of trained tokens that each token belongs to or follows, from 1 in each response."""
    trained_N = loss_mask_N > 0
    before_N = torch.nn.functional.pad(trained_N[:-1], (1, 0)) if len(trained_N) else trained_N
    length_S = torch.tensor(lengths, dtype=torch.int64)
    start_S = length_S.cumsum(0) - length_S
    before_N[start_S[length_S > 0]] = False
    starts_N = (trained_N & ~before_N).long().cumsum(0)
    earlier_S = torch.nn.functional.pad(starts_N, (1, 0))[start_S]
    return (starts_N - expand(earlier_S, lengths)).clamp_min(1)


def numbered(names: Sequence[int]) -> tuple[int, ...]:
    """The same names as numbers from 0 on, in the order in which they first occur."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def expand(values_S: Tensor, lengths: Sequence[int]) -> Tensor:
    """Every sequence's value at each of its tokens, [L]; nothing synchronises with the host."""
    repeats_S = torch.tensor(lengths, dtype=torch.int64).to(values_S.device, non_blocking=True)
    return values_S.repeat_interleave(repeats_S, output_size=sum(lengths))


def _select(values: Tensor, starts: Sequence[int], samples: Sequence[int]) -> Tensor:
    # A view of each chosen response alone: this runs for every micro-batch, over the batch of the
    # whole step.
    return torch.cat([values[:0], *(values[starts[i] : starts[i + 1]] for i in samples)])
