"""The tokens that truncated sampling (top-p, top-k) could draw at each position of a response.

Shapes: suffix _M one value per token of the sets, one position after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The candidate tokens at each position, in compressed sparse rows (CSR).

    Position i has the set token_ids[s : s + lengths[i]] with s = Σ_{j<i} lengths[j]. A length of 0 means the whole
    vocabulary: nothing was cut, no set was recorded, or the token is not the policy's.
    """

    token_ids: Tensor
    """[M] int32, the sets of all positions one after another."""
    lengths: Tensor
    """[positions] int32, the tokens of each position's set."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return torch.equal(self.token_ids, other.token_ids) and torch.equal(self.lengths, other.lengths)

    __hash__ = None  # type: ignore[assignment]  # tensors compare by value and can be changed

    @classmethod
    def from_sets(cls, sets: Sequence[Sequence[int]]) -> SamplingMask:
        """The mask of sets given as lists of token ids, an empty one for a position without a recorded set."""
        ids = [token for allowed in sets for token in allowed]
        return cls(
            torch.tensor(ids, dtype=torch.int32), torch.tensor([len(allowed) for allowed in sets], dtype=torch.int32)
        )

    @classmethod
    def unrecorded(cls, positions: int) -> SamplingMask:
        """Returns a mask of `count` positions without a recorded set."""
        return cls(torch.zeros(0, dtype=torch.int32), torch.zeros(positions, dtype=torch.int32))

    @classmethod
    def cat(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """The positions of several masks, one after another."""
        if not masks:
            return cls.unrecorded(0)
        return cls(torch.cat([mask.token_ids for mask in masks]), torch.cat([mask.lengths for mask in masks]))

    def sets(self) -> list[list[int]]:
        """The token ids of each position."""
        return [ids.tolist() for ids in self.token_ids.split(self.lengths.tolist())]

    def position_of_token(self) -> Tensor:
        """[M] int64: the position that each token id belongs to; nothing synchronises with the host."""
        positions = torch.arange(len(self), device=self.lengths.device)
        return positions.repeat_interleave(self.lengths, output_size=len(self.token_ids))

    def select(self, positions: Tensor) -> SamplingMask:
        """The sets at the given positions [int64], in that order."""
        starts = self.lengths.cumsum(0) - self.lengths
        lengths = self.lengths[positions]
        shift = starts[positions] - (lengths.cumsum(0) - lengths)
        index_M = torch.arange(int(lengths.sum()), device=lengths.device) + shift.repeat_interleave(lengths)
        return SamplingMask(self.token_ids[index_M], lengths)

    def split(self, positions: Sequence[int]) -> list[SamplingMask]:
        """Splits the mask by numbers of positions, into separate memory: a pickled view contains the whole tensor."""
        lengths = self.lengths.split(list(positions))
        token_ids = self.token_ids.split([int(part.sum()) for part in lengths])
        return [SamplingMask(ids.clone(), part.clone()) for ids, part in zip(token_ids, lengths, strict=True)]

    def contains(self, token_ids: Tensor) -> Tensor:
        """Whether each position's set has the token given for it, bool [positions]; True where no set was recorded."""
        position_M = self.position_of_token()
        found_M = self.token_ids == token_ids[position_M]
        found = torch.zeros(len(self), dtype=torch.int64, device=self.lengths.device)
        return (found.index_add_(0, position_M, found_M.long()) > 0) | (self.lengths == 0)

    def without(self, forgotten: Tensor) -> SamplingMask:
        """The same positions, without the sets of those where `forgotten` [positions] is True."""
        stays_M = ~forgotten[self.position_of_token()]
        return SamplingMask(self.token_ids[stays_M], self.lengths.masked_fill(forgotten, 0))

    def to(self, device: torch.device | str) -> SamplingMask:
        """The same sets on another device."""
        return SamplingMask(self.token_ids.to(device, non_blocking=True), self.lengths.to(device, non_blocking=True))
