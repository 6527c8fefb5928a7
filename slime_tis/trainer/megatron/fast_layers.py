"""megatron-core's linear layers with the products of `matrix_products`."""

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_tis.trainer.matrix_products import trained_linear


class FastColumnLinear(ColumnParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """A linear layer whose output features are divided over the tensor-parallel ranks."""

    def _forward_impl(  # megatron-core's signature
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: ProcessGroup | None,
        **options: Any,
    ) -> Tensor:
        """Returns x Wᵀ + b."""
        if sequence_parallel:
            # megatron-core gathers the input in this method.
            output: Tensor = super()._forward_impl(
                input,
                weight,
                bias=bias,
                allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=True,
                tp_group=tp_group,
                **options,
            )
            return output
        output = trained_linear(input, weight, tp_group if allreduce_dgrad else None)
        if bias is not None:
            output = output + bias
        return output


class FastRowLinear(RowParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """A linear layer whose input features are divided over the tensor-parallel ranks."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **_: Any) -> Tensor:
        """Returns this rank's part of x Wᵀ; megatron-core adds the parts and the bias."""
        return trained_linear(input, weight)


def use_fast_products(layer: ModuleSpec) -> None:
    """Changes the specification of a dense layer with torch modules."""
    attention = layer.submodules.self_attention.submodules
    attention.linear_qkv = FastColumnLinear
    attention.linear_proj = FastRowLinear
    mlp = layer.submodules.mlp
    mlp.submodules.linear_fc1 = FastColumnLinear
    mlp.submodules.linear_fc2 = FastRowLinear
