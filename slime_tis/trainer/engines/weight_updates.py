"""Rounds the weights sent to the rollout engine and measures how much of an update arrives.

    source(weights, version)  →  round each tensor as --weight-update-rounding says  →  rollout engine
                                   ↘ a fixed sample of rows: trained and sent values, now and at the
                                   update before

With changes Δw of the trained weights and Δr of the engine's weights since the previous update:

    absorbed = share of the elements with Δw ≠ 0 whose Δr = 0,    received = ⟨Δr, Δw⟩ / ⟨Δw, Δw⟩
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slime_tis.errors import first_line
from slime_tis.torch_files import load_tensors
from slime_tis.trainer.engines.rollout_engine import SentRows, WeightSource
from slime_tis.trainer.engines.weight_rounding import (
    Precision,
    WeightRounder,
    coarser,
    round_nearest,
    rounds,
)
from slime_tis.trainer.storage.checkpoint_files import UPDATE_SAMPLES

MIN_ROW_STRIDE = 61
"""Every 61st row is sampled; an odd stride does not align with the pattern of heads."""
MAX_SAMPLED_ELEMENTS = 65_536
"""Sampled elements per tensor, unless a single row has more; smaller tensors are checked
completely."""
BLOCKS = 32
"""Blocks of rows and of columns with known changes; a shard of up to `BLOCKS` / 2 ranks contains
one."""
EMBEDDING, OUTPUT_LAYER = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """Evenly spaced rows of a tensor, in float32 on the CPU."""

    trained: Tensor
    sent: Tensor
    share: float
    """Sampled share of the tensor's elements."""
    rounded: bool
    """Whether the engine's precision is coarser than the training precision."""


class WeightUpdates:
    """Rounds and measures the weights on their way to the rollout engine."""

    def __init__(
        self,
        rounder: WeightRounder,
        precision_of: Callable[[str], Precision | None],
        *,
        samples_all: bool,
    ) -> None:
        """`precision_of` an unknown tensor is None; `samples_all` also samples unrounded tensors, for `sent_rows`."""
        self.rounder = rounder
        self.sampled: dict[str, SampledRows] = {}
        self.precision: Precision | None = None
        """The coarsest known precision of a sampled tensor."""
        self._precision_of, self._samples_all = precision_of, samples_all
        self._version: int | None = None
        self._earlier: dict[str, SampledRows] = {}
        self._sent: dict[str, SentRows] = {}
        self._sums: dict[str, Tensor] = {}
        self._earlier_sums: dict[str, Tensor] = {}

    def source(self, weights: WeightSource, version: int) -> WeightSource:
        """The rounded weights of this version; a source may be called again for the same version."""

        def rounded() -> Iterator[tuple[str, Tensor]]:
            if version != self._version:
                self._earlier, self._earlier_sums = self.sampled, self._sums
            self._version, self.sampled, self._sent, self._sums = version, {}, {}, {}
            for name, weight in weights():
                precision = self._precision_of(name)
                if precision is None:
                    yield name, weight
                    continue
                sent = self.rounder(name, weight, precision, version)
                if self._samples_all or rounds(weight.dtype, precision):
                    stride = row_stride(weight)
                    trained = weight[::stride].detach().float()
                    self.sampled[name] = SampledRows(
                        trained=trained.to("cpu", copy=True),
                        sent=round_nearest(sent[::stride].detach(), precision).to("cpu", copy=True),
                        share=trained.numel() / weight.numel(),
                        rounded=rounds(weight.dtype, precision),
                    )
                    self.precision = coarser(precision, self.precision or precision)
                if self._samples_all:
                    rows = round_nearest(sent.detach(), precision)
                    stride = 1 if rows.numel() < MAX_SAMPLED_ELEMENTS else row_stride(rows)
                    first = random.Random(f"{version} {name}").randrange(min(stride, len(rows)))
                    sums = self._sums[name] = block_sums(rows)
                    changed = sums != self._earlier_sums.get(name, sums)
                    self._sent[name] = SentRows(
                        first=first,
                        stride=stride,
                        rows=rows[first::stride].to("cpu", copy=True),
                        changed=bool(changed.any()),
                        changed_everywhere=bool(changed.all()),
                    )
                yield name, sent

        return rounded

    def metrics(self) -> dict[str, float]:
        """rollout/update_… of the last update, tensors weighted by size; empty if no rounded weight moved."""
        moved = absorbed = square = absorbed_square = product = 0.0
        for name in self.sampled.keys() & self._earlier.keys():
            now, before = self.sampled[name], self._earlier[name]
            if not now.rounded:
                continue
            trained, received = now.trained - before.trained, now.sent - before.sent
            lost = (received == 0) & (trained != 0)
            moved += trained.count_nonzero().item() / now.share
            absorbed += lost.count_nonzero().item() / now.share
            square += trained.square().sum(dtype=torch.float64).item() / now.share
            absorbed_square += trained[lost].square().sum(dtype=torch.float64).item() / now.share
            product += (trained * received).sum(dtype=torch.float64).item() / now.share
        if square == 0:
            return {}
        return {
            "rollout/update_absorbed": absorbed / moved,
            "rollout/update_absorbed_norm": math.sqrt(absorbed_square / square),
            "rollout/update_received": product / square,
        }

    @property
    def moved(self) -> bool:
        """Whether the update changed any sampled row in the engine's precision."""
        pairs = ((self._earlier.get(name), now) for name, now in self.sampled.items())
        return any(
            before is not None and not torch.equal(before.sent, now.sent) for before, now in pairs
        )

    def sent_rows(self) -> dict[str, SentRows]:
        """The rows that the engine must contain after an update; a tied output layer has the embedding's rows."""
        tied = {OUTPUT_LAYER: self._sent[EMBEDDING]} if EMBEDDING in self._sent else {}
        return tied | self._sent

    def save_samples(self, directory: Path) -> None:
        """Writes the last version's samples into an unfinished checkpoint, for the metrics of the next update."""
        torch.save(
            {name: vars(rows) for name, rows in self.sampled.items()}, directory / UPDATE_SAMPLES
        )

    def load_samples(self, directory: Path, version: int) -> None:
        """Restores the samples of this version; without the file the next update has no metrics.

        Raises:
            ValueError: The file has other content.
        """
        path = directory / UPDATE_SAMPLES
        if not path.exists():
            return
        fields = load_tensors(path)
        try:
            self.sampled = {name: SampledRows(**rows) for name, rows in fields.items()}
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} does not hold sampled rows: {first_line(error)}; restore the checkpoint."
            ) from error
        self._version = version


def block_sums(weight: Tensor) -> Tensor:
    """Sums of the bits of each block of a float32 tensor's rows and columns, on the CPU.

    A changed sum proves a changed block; two changes that cancel in a sum go unnoticed.
    """
    bits_OI = weight.contiguous().view(torch.int32).reshape(len(weight), -1)
    block_totals = []
    for sums in (bits_OI.sum(1, dtype=torch.int64), bits_OI.sum(0, dtype=torch.int64)):
        blocks = min(BLOCKS, len(sums))
        block = torch.arange(len(sums), device=sums.device) * blocks // len(sums)
        block_totals.append(sums.new_zeros(blocks).index_add_(0, block, sums))
    return torch.cat(block_totals).cpu()


def row_stride(weight: Tensor) -> int:
    """Distance of sampled rows: MIN_ROW_STRIDE, or more if that samples too many elements."""
    width = weight.numel() // len(weight)
    rows = max(MAX_SAMPLED_ELEMENTS // width, 1)
    return max(MIN_ROW_STRIDE, -(-len(weight) // rows) | 1)
