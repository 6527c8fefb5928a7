"""Rounds the weights sent to the rollout engine and measures how much of an update arrives.

    source(weights, version)  →  round as --weight-update-rounding says  →  rollout engine
                                   ↘ sampled rows: trained and sent values of this and the last
                                   update

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
EMBEDDING = "model.embed_tokens.weight"
"""Name of the token embedding in Hugging Face checkpoints."""
OUTPUT_LAYER = "lm_head.weight"
"""Name of the output layer in Hugging Face checkpoints."""


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
        """Creates an empty record; the first update has no metrics.

        Args:
            rounder: Rounds the tensors that are sent.
            precision_of: The engine's precision of a tensor, by name; None for an unknown tensor.
            samples_all: Also sample unrounded tensors, for `sent_rows`.
        """
        self.rounder = rounder
        self.sampled: dict[str, SampledRows] = {}
        self.precision: Precision | None = None
        """The coarsest known precision of a sampled tensor."""
        self._precision_of = precision_of
        self._samples_all = samples_all
        self._version: int | None = None
        self._earlier: dict[str, SampledRows] = {}
        self._sent: dict[str, SentRows] = {}
        self._sums: dict[str, Tensor] = {}
        self._earlier_sums: dict[str, Tensor] = {}

    def source(self, weights: WeightSource, version: int) -> WeightSource:
        """Returns the source of the rounded weights of this version, which records samples.

        The source may be called again for the same version.
        """

        def rounded() -> Iterator[tuple[str, Tensor]]:
            # A repeated version keeps the samples of the version before it.
            if version != self._version:
                self._earlier = self.sampled
                self._earlier_sums = self._sums
            self._version = version
            self.sampled = {}
            self._sent = {}
            self._sums = {}
            for name, weight in weights():
                precision = self._precision_of(name)
                if precision is None:
                    yield name, weight
                    continue
                sent = self.rounder(name, weight, precision, version)
                if self._samples_all or rounds(weight.dtype, precision):
                    self.sampled[name] = sampled_rows(weight, sent, precision)
                    self.precision = coarser(precision, self.precision or precision)
                if self._samples_all:
                    rows = round_nearest(sent.detach(), precision)
                    self._record_sent(name, rows, version)
                yield name, sent

        return rounded

    def _record_sent(self, name: str, rows: Tensor, version: int) -> None:
        """Keeps the rows that the engine must have and whether they differ from the last update."""
        stride = 1
        if rows.numel() >= MAX_SAMPLED_ELEMENTS:
            stride = row_stride(rows)
        # Each version checks other rows, so that a stale row is found sooner or later. The name in
        # the seed makes tensors of equal shape check different rows.
        first = random.Random(f"{version} {name}").randrange(min(stride, len(rows)))
        sums = block_sums(rows)
        self._sums[name] = sums
        # The first update has nothing to compare with and counts as unchanged.
        changed = sums != self._earlier_sums.get(name, sums)
        self._sent[name] = SentRows(
            first=first,
            stride=stride,
            rows=rows[first::stride].to("cpu", copy=True),
            changed=bool(changed.any()),
            changed_everywhere=bool(changed.all()),
        )

    def metrics(self) -> dict[str, float]:
        """Returns rollout/update_… of the last update; empty if no rounded weight moved.

        Tensors are weighted by size: the sums over sampled rows are divided by the sampled share.
        """
        moved = absorbed = square = absorbed_square = product = 0.0
        for name in self.sampled.keys() & self._earlier.keys():
            now = self.sampled[name]
            before = self._earlier[name]
            if not now.rounded:
                continue
            trained = now.trained - before.trained
            received = now.sent - before.sent
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
        for name in self.sampled.keys() & self._earlier.keys():
            if not torch.equal(self._earlier[name].sent, self.sampled[name].sent):
                return True
        return False

    def sent_rows(self) -> dict[str, SentRows]:
        """Returns the rows that the engine must contain after an update, by tensor name."""
        rows: dict[str, SentRows] = {}
        # A tied output layer is not sent, but an engine may list it: it has the embedding's rows.
        if EMBEDDING in self._sent:
            rows[OUTPUT_LAYER] = self._sent[EMBEDDING]
        return rows | self._sent

    def save_samples(self, directory: Path) -> None:
        """Writes the last version's samples into an unfinished checkpoint.

        A resumed run needs them for the metrics of its first update.
        """
        fields = {name: vars(rows) for name, rows in self.sampled.items()}
        torch.save(fields, directory / UPDATE_SAMPLES)

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


def sampled_rows(weight: Tensor, sent: Tensor, precision: Precision) -> SampledRows:
    """Returns evenly spaced rows of a trained tensor and of the tensor sent for it."""
    stride = row_stride(weight)
    trained = weight[::stride].detach().float()
    # The engine itself rounds to nearest what --weight-update-rounding has left unrounded.
    rounded = round_nearest(sent[::stride].detach(), precision)
    return SampledRows(
        # `copy`: the trainer changes a CPU tensor in place at its next step.
        trained=trained.to("cpu", copy=True),
        sent=rounded.to("cpu", copy=True),
        share=trained.numel() / weight.numel(),
        rounded=rounds(weight.dtype, precision),
    )


def block_sums(weight: Tensor) -> Tensor:
    """Sums the bits of a float32 tensor per block of rows and per block of columns.

    A changed sum proves a changed block; two changes that cancel in a sum go unnoticed.
    """
    # Sums of bits as integers are exact and do not depend on the order of summation.
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
    # Rounded up, and made odd as MIN_ROW_STRIDE is.
    stride = -(-len(weight) // rows) | 1
    return max(MIN_ROW_STRIDE, stride)
