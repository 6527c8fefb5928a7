"""What the rollout engine is sent of an update, and how much of the update that is.

    source(weights, version)  →  round each tensor as --weight-update-rounding says  →  rollout engine
                                   ↘ a fixed sample of rows: trained and sent values, now and at the update before

With trained weights w and what the engine has of them r, both as changes since the update before:

    absorbed = share of the elements with Δw ≠ 0 whose Δr = 0,    received = ⟨Δr, Δw⟩ / ⟨Δw, Δw⟩
"""

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slime_tis.trainer.engines.engine import SentRows, WeightSource
from slime_tis.trainer.engines.weight_rounding import Precision, WeightRounder, coarser, round_nearest, rounds
from slime_tis.trainer.storage.checkpoints import UPDATE_SAMPLES

SAMPLED = 61
"""One row in so many is sampled; an odd number, so that no pattern of heads is met in step."""
MOST_SAMPLED = 65_536
"""Elements of one tensor that are sampled, unless a single row has more; smaller tensors are checked completely."""
BLOCKS = 32
"""Blocks of rows and of columns whose changes are known: a shard on one of up to `BLOCKS` / 2 ranks contains one."""
EMBEDDING, OUTPUT_LAYER = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """Every `stride`-th row of a tensor, in float32 on the CPU."""

    stride: int
    trained: Tensor
    sent: Tensor
    """The same rows as the engine holds them."""
    share: float
    """Of the tensor's elements, those that are sampled."""
    rounded: bool
    """Whether the engine's precision is coarser than that of training."""


class WeightUpdates:
    """Rounds and measures the weights on their way to the rollout engine."""

    def __init__(
        self, rounder: WeightRounder, precision_of: Callable[[str], Precision | None], *, samples_all: bool
    ) -> None:
        """Begins before the first update.

        Args:
            rounder: how tensors are rounded before they are sent.
            precision_of: the precision in which the engine holds the tensor of a name; None where it is not known.
            samples_all: whether to sample tensors too that the engine does not round, and to keep rows for
                `sent_rows`.
        """
        self.rounder = rounder
        self.sampled: dict[str, SampledRows] = {}
        """Of the version sent last, by tensor."""
        self.precision: Precision | None = None
        """The coarsest precision of a sampled tensor; None where none is known."""
        self._precision_of, self._samples_all = precision_of, samples_all
        self._version: int | None = None
        self._earlier: dict[str, SampledRows] = {}
        self._checked: dict[str, tuple[int, int, Tensor]] = {}  # first row, stride and rows, by tensor
        self._sums: dict[str, Tensor] = {}
        self._earlier_sums: dict[str, Tensor] = {}

    def source(self, weights: WeightSource, version: int) -> WeightSource:
        """The weights as they are to be sent under this version; a source may be called again for the same one."""

        def rounded() -> Iterator[tuple[str, Tensor]]:
            if version != self._version:
                self._earlier, self._earlier_sums = self.sampled, self._sums
            self._version, self.sampled, self._checked, self._sums = version, {}, {}, {}
            self.rounder.begin(version)
            for name, weight in weights():
                precision = self._precision_of(name)
                if precision is None:
                    yield name, weight
                    continue
                sent = self.rounder(name, weight, precision)
                if self._samples_all or rounds(weight.dtype, precision):
                    self.sampled[name] = sample_rows(weight, sent, precision)
                    self.precision = coarser(precision, self.precision or precision)
                if self._samples_all:
                    self._checked[name] = checked_rows(name, sent, precision, version)
                    self._sums[name] = block_sums(round_nearest(sent.detach(), precision))
                yield name, sent

        return rounded

    def metrics(self) -> dict[str, float]:
        """rollout/update_… of the last update; empty for the first one, and where no rounded weight moved.

        Sums over the sample, in which each tensor counts by its size.
        """
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
        """Whether the update changed any row of the fixed sample, as the engine holds it."""
        pairs = ((self._earlier.get(name), now) for name, now in self.sampled.items())
        return any(before is not None and not torch.equal(before.sent, now.sent) for before, now in pairs)

    def sent_rows(self) -> dict[str, SentRows]:
        """What the engine must contain after an update; the embedding's rows are also those of a tied output layer."""
        found = {}
        for name, (first, stride, rows) in self._checked.items():
            sums = self._sums[name]
            changed = sums != self._earlier_sums.get(name, sums)
            found[name] = SentRows(
                first=first,
                stride=stride,
                rows=rows,
                changed=bool(changed.any()),
                changed_everywhere=bool(changed.all()),
            )
        if OUTPUT_LAYER not in found and EMBEDDING in found:
            found[OUTPUT_LAYER] = found[EMBEDDING]
        return found

    def save_samples(self, directory: Path) -> None:
        """Puts the sample of the version sent last into an unfinished checkpoint: the next update is measured by it."""
        tensors = {f"trained.{name}": rows.trained for name, rows in self.sampled.items()}
        tensors |= {f"sent.{name}": rows.sent for name, rows in self.sampled.items()}
        shapes = {name: [rows.stride, rows.share, rows.rounded] for name, rows in self.sampled.items()}
        save_file(tensors, directory / UPDATE_SAMPLES, metadata={"shapes": json.dumps(shapes)})

    def load_samples(self, directory: Path, version: int) -> None:
        """Takes up what `save_samples` wrote of this version; without such a file the next update has no metrics."""
        path = directory / UPDATE_SAMPLES
        if not path.exists():
            return
        with safe_open(str(path), "pt") as file:
            shapes: dict[str, tuple[int, float, bool]] = json.loads(file.metadata()["shapes"])
            self.sampled = {
                name: SampledRows(
                    stride=stride,
                    trained=file.get_tensor(f"trained.{name}"),
                    sent=file.get_tensor(f"sent.{name}"),
                    share=share,
                    rounded=rounded,
                )
                for name, (stride, share, rounded) in shapes.items()
            }
        self._version = version


def sample_rows(weight: Tensor, sent: Tensor, precision: Precision) -> SampledRows:
    """A sample of a tensor and of what the engine makes of it; the same rows for every version."""
    stride = row_stride(weight)
    trained = weight[::stride].detach().float()
    return SampledRows(
        stride=stride,
        trained=trained.to("cpu", copy=True),
        sent=round_nearest(sent[::stride].detach(), precision).to("cpu", copy=True),
        share=trained.numel() / weight.numel(),
        rounded=rounds(weight.dtype, precision),
    )


def checked_rows(name: str, sent: Tensor, precision: Precision, version: int) -> tuple[int, int, Tensor]:
    """First row, stride and rows that the engine is compared with: all of a small tensor, else random by version."""
    stride = 1 if sent.numel() < MOST_SAMPLED else row_stride(sent)
    first = random.Random(f"{version} {name}").randrange(min(stride, len(sent)))
    return first, stride, round_nearest(sent[first::stride].detach(), precision).to("cpu", copy=True)


def block_sums(weight: Tensor) -> Tensor:
    """Sums of the bits of each block of a float32 tensor's rows and columns, on the CPU.

    A sum that changes proves that the block did; two changes that cancel in a sum go unnoticed.
    """
    bits_OI = weight.contiguous().view(torch.int32).reshape(len(weight), -1)
    found = []
    for sums in (bits_OI.sum(1, dtype=torch.int64), bits_OI.sum(0, dtype=torch.int64)):
        blocks = min(BLOCKS, len(sums))
        block = torch.arange(len(sums), device=sums.device) * blocks // len(sums)
        found.append(sums.new_zeros(blocks).index_add_(0, block, sums))
    return torch.cat(found).cpu()


def row_stride(weight: Tensor) -> int:
    """How far apart the sampled rows of a tensor are: SAMPLED, or more where that would be too many elements."""
    width = weight.numel() // len(weight)
    rows = max(MOST_SAMPLED // width, 1)
    return max(SAMPLED, -(-len(weight) // rows) | 1)
