"""LoRA adapters that the local engine applies without merging them into its weights.

    y = round(W) x + s · B A x

Only W is rounded to fp8, int8 or int4. A and B have the type in which the engine computes: float32
with those precisions, otherwise the engine's own. Merging would round W + s · B A, and lose small
adapters.
"""

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
            ValueError: The model has no such linear layer.
        """
        match = TENSOR.fullmatch(name)
        if match is None or not isinstance(self._linear(match["layer"]), nn.Linear):
            raise ValueError(
                f"the adapter has {name!r}, but the rollout model has no such linear layer"
            )
        layer = match["layer"]
        linear = self._linear(layer)
        if layer not in self._layers:
            self._layers[layer] = UnmergedAdapter(self._scale)
            linear.register_forward_hook(self._layers[layer])
        self._layers[layer].matrices[match["matrix"]] = tensor.detach().to(
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

    def _linear(self, layer: str) -> Any:
        try:
            return self._model.get_submodule(layer)
        except AttributeError:
            return None
