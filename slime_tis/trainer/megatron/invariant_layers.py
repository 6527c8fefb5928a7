"""megatron-core's linear layers with products whose rows do not depend on the batch."""

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_tis.trainer.invariant.operations import Tiles, trained_linear
from slime_tis.trainer.invariant.self_check import (
    ATTENTION_OUTPUT,
    DOWN,
    GATE_UP,
    QKV,
    Kernels,
)


class InvariantColumnLinear(ColumnParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """A linear layer whose output features are divided over the tensor-parallel ranks."""

    def __init__(self, *args: Any, tiles: Tiles, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tiles = tiles

    def _forward_impl(  # megatron-core's signature
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        tp_group: ProcessGroup | None,
        **_: Any,
    ) -> Tensor:
        """Returns x Wᵀ + b."""
        output = trained_linear(input, weight, self.tiles, tp_group if allreduce_dgrad else None)
        if bias is not None:
            output = output + bias
        return output


class InvariantRowLinear(RowParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """A linear layer whose input features are divided over the tensor-parallel ranks."""

    def __init__(self, *args: Any, tiles: Tiles, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tiles = tiles

    def _forward_impl(self, input: Tensor, weight: Tensor, **_: Any) -> Tensor:
        """Returns this rank's part of x Wᵀ; megatron-core adds the parts and the bias."""
        return trained_linear(input, weight, self.tiles)


def use_invariant_operations(layer: ModuleSpec, kernels: Kernels) -> None:
    """Changes the specification of a dense layer with torch modules."""

    def column(name: str) -> ModuleSpec:
        return ModuleSpec(InvariantColumnLinear, params={"tiles": kernels.tiles[name]})

    def row(name: str) -> ModuleSpec:
        return ModuleSpec(InvariantRowLinear, params={"tiles": kernels.tiles[name]})

    attention = layer.submodules.self_attention.submodules
    attention.linear_qkv = column(QKV)
    attention.linear_proj = row(ATTENTION_OUTPUT)
    attention.core_attention = ModuleSpec(attention.core_attention, params={"invariant": True})
    mlp = layer.submodules.mlp
    mlp.submodules.linear_fc1 = column(GATE_UP)
    mlp.submodules.linear_fc2 = row(DOWN)
    mlp.params = {**(mlp.params or {}), "vectorized_silu": kernels.vectorized_silu}
