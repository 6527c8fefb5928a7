"""Layers that only some model families have, in plain torch, as megatron-core spec modules."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from slime_tis.trainer.megatron.layers import TorchRMSNorm


class NormThenAdd(nn.Module):
    """residual + norm(output), in the place of megatron-core's `bias_dropout_add`."""

    def __init__(self, config: TransformerConfig, offset: float = 0.0) -> None:
        """`offset`: see `TorchRMSNorm`."""
        super().__init__()
        norm = TorchRMSNorm(config, config.hidden_size, config.layernorm_epsilon, offset=offset)
        self.weight = norm.weight
        # A registered module would give the weight a second name.
        self._norm = (norm,)

    @property
    def norm(self) -> TorchRMSNorm:
        """The norm of the output."""
        return self._norm[0]

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Returns the function that megatron-core applies to the output of attention or MLP."""

        def add(
            output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
        ) -> Tensor:
            output, bias = output_and_bias
            if bias is not None:
                output = output + bias
            normalized: Tensor = self.norm(output)
            return residual + normalized

        return add


class AllHeadsNorm(nn.Module):
    """RMSNorm over the features of all heads, which tensor-parallel ranks divide."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, heads: int, group: Any
    ) -> None:
        """Makes the weights of this rank's heads.

        Args:
            config: megatron-core's configuration.
            hidden_size: Features of a head.
            eps: ε of the norm.
            heads: Heads on all ranks.
            group: The tensor-parallel ranks.
        """
        super().__init__()
        self.features = heads * hidden_size
        self.eps = eps
        self.group = group
        own_features = self.features // group.size()
        self.weight = nn.Parameter(torch.ones(own_features, dtype=config.params_dtype))
        # megatron-core's gradient norm then counts the weights of every rank
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes x [..., heads of this rank, d]."""
        wide = x.flatten(-2).float()
        squares = wide.square().sum(-1, keepdim=True)
        # The sum over the ranks is an input of every rank. The second function sums its gradient.
        total = reduce_from_tensor_model_parallel_region(squares, group=self.group)
        total = copy_to_tensor_model_parallel_region(total, group=self.group)
        scale = (total / self.features + self.eps).rsqrt()
        normalized = (wide * scale * self.weight).to(x.dtype)
        output: Tensor = normalized.unflatten(-1, x.shape[-2:])
        return output

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Returns the weight as one of the parts that tensor-parallel ranks save and load."""
        parts: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets
        )
        return parts


class ClampedSwiGLU(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """gate · σ(α · gate) · (up + 1), with gate ≤ limit and |up| ≤ limit.

    Source: gpt-oss, gpt_oss/torch/model.py, swiglu.
    """

    def __init__(self, config: TransformerConfig, alpha: float, limit: float) -> None:
        super().__init__(config=config)
        self.alpha = alpha
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2·inner] → [..., inner]."""
        gate, up = x.chunk(2, -1)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        output: Tensor = gate * torch.sigmoid(self.alpha * gate) * (up + 1)
        return output


class ExpertRowLinear(RowParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """The second linear layer of an expert, with a bias."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Without these, megatron-core would count the bias on one tensor-parallel rank only, and
        # sum the gradients of different experts over these ranks.
        self.bias.tensor_model_parallel = True
        self.bias.sequence_parallel = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[tokens, inner] → [tokens, hidden], and the bias."""
        output, bias = super().forward(x)
        # megatron-core's MLP adds the bias in place, which autograd forbids for a view.
        return output.clone(), bias
