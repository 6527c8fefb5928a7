"""LoRA adapters that the local engine applies without merging them into its weights.

    y = round(W) x + s · B A x

Only W is rounded to fp8, int8 or int4. A and B have the type in which the engine computes: float32
with those precisions, otherwise the engine's own. Merging would round W + s · B A, and lose small
adapters.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slime_tis.peft_directory import TENSOR, tensor_name


class UnmergedAdapter:
    """The adapter of one linear layer, as a forward hook; no effect until both A and B arrive."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.matrices: dict[str, Tensor] = {}
        """A and B."""

    def __call__(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Returns the sum of the layer's and the adapter's output."""
        if len(self.matrices) < 2:
            return output
        low_rank = F.linear(inputs[0], self.matrices["A"]) * self.scale
        return output + F.linear(low_rank, self.matrices["B"])


class UnmergedAdapters:
    """The adapters of a model of transformers, by the names of PEFT's tensors."""

    def __init__(self, model: Any, scale: float) -> None:
        """Prepares a model; `scale` is s."""
        self._model = model
        self._scale = scale
        self._layers: dict[str, UnmergedAdapter] = {}

    def assign(self, name: str, tensor: Tensor) -> None:
        """Sets A or B of a layer.

        Raises:
            ValueError: The model has no such linear layer, or the tensor has another shape.
        """
        match = TENSOR.fullmatch(name)
        linear = None
        if match is not None:
            linear = self._linear(match["layer"])
        if match is None or linear is None:
            raise ValueError(f"the adapter has {name!r}, but the model has no such linear layer")
        layer = match["layer"]
        adapter = self._layers.get(layer)
        if adapter is None:
            adapter = UnmergedAdapter(self._scale)
        check_shape(name, tensor, linear, match["matrix"], adapter.matrices)
        if layer not in self._layers:
            self._layers[layer] = adapter
            linear.register_forward_hook(adapter)
        adapter.matrices[match["matrix"]] = tensor.detach().to(
            linear.weight.device, linear.weight.dtype, copy=True
        )

    def tensors(self) -> dict[str, Tensor]:
        """Returns A and B of all layers."""
        tensors = {}
        for layer, adapter in self._layers.items():
            for matrix, tensor in adapter.matrices.items():
                tensors[tensor_name(layer, matrix)] = tensor
        return tensors

    @property
    def dtype(self) -> torch.dtype:
        """Type of A and B, in which the model computes."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    def _linear(self, layer: str) -> nn.Linear | None:
        """Returns a linear layer of the model; None if it has none of this name."""
        try:
            module = self._model.get_submodule(layer)
        except AttributeError:
            return None
        if not isinstance(module, nn.Linear):
            return None
        return module


def check_shape(
    name: str, tensor: Tensor, linear: nn.Linear, matrix: str, matrices: Mapping[str, Tensor]
) -> None:
    """Refuses A or B that does not fit its layer, or the rank of the layer's other matrix.

    Args:
        name: PEFT's name of the tensor.
        tensor: A, which must be [rank, in], or B, which must be [out, rank].
        linear: The layer.
        matrix: "A" or "B".
        matrices: A and B that the layer already has.

    Raises:
        ValueError: The shape is wrong.
    """
    rank: int | str = "rank"
    if matrix == "A":
        if "B" in matrices:
            rank = matrices["B"].shape[1]
        needed = [rank, linear.in_features]
    else:
        if "A" in matrices:
            rank = matrices["A"].shape[0]
        needed = [linear.out_features, rank]
    shape = list(tensor.shape)
    fits = len(shape) == 2
    for size, expected in zip(shape, needed, strict=False):
        fits = fits and expected in (size, "rank")
    if not fits:
        shown = ", ".join(map(str, needed))
        raise ValueError(
            f"the adapter's tensor {name} has the shape {shape}, but the model needs [{shown}]"
        )
