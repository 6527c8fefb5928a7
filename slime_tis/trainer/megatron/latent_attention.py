"""Multi-head latent attention, as a megatron-core spec module in plain torch.

megatron-core's own `MLASelfAttention` needs transformer-engine, and its rotary embedding knows
neither shared prompts nor the packing here.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention
from torch import Tensor, nn

from slime_tis.trainer.megatron.layers import TorchRMSNorm
from slime_tis.trainer.megatron.model_config import ModelConfig

LATENT_EPSILON = 1e-6
"""transformers' ε of the norms of latent vectors, whatever rms_norm_eps is."""


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Numbers of features of multi-head latent attention."""

    query_rank: int | None
    """Of the latent vector of queries; None if queries are a projection of the hidden state."""
    rank: int
    """Of the latent vector of keys and values."""
    plain: int
    """Of the part of a head's queries and keys without positions."""
    rotated: int
    """Of the part with a rotary embedding, which all heads share in keys."""
    value: int
    """Of a head's values."""


class LatentAttention(Attention):  # type: ignore[misc]  # megatron-core has no types
    """Attention whose keys and values are projections of one latent vector per token.

    With the latent vectors c_q = norm(W_dq h) and c = norm(W_dkv h), head i has

        q_i = [W_uq,i c_q, rope(W_qr,i c_q)],   k_i = [W_uk,i c, rope(W_kr h)],   v_i = W_uv,i c

    The projections that the file joins stay joined: queries, [W_dkv, W_kr], and [W_uk, W_uv].

    Source: "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model"
    (https://arxiv.org/abs/2405.04434), section 2.1.
    """

    def __init__(
        self,
        config: ModelConfig,
        submodules: Any,
        layer_number: int,
        attn_mask_type: Any,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        sizes: LatentSizes,
    ) -> None:
        """`config.kv_channels` is the number of features of a value."""
        super().__init__(
            config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, pg_collection
        )
        self.sizes = sizes
        # megatron-core's `Attention.forward` reads both.
        self.q_layernorm: TorchRMSNorm | None = None
        self.k_layernorm = None
        heads = config.num_attention_heads
        hidden = config.hidden_size
        query_size = heads * (sizes.plain + sizes.rotated)
        epsilon = config.latent_norm_epsilon
        if epsilon is None:
            epsilon = LATENT_EPSILON
        if sizes.query_rank is None:
            self.linear_q_proj = self._divided_linear(hidden, query_size)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, sizes.query_rank)
            self.q_layernorm = TorchRMSNorm(config, sizes.query_rank, epsilon)
            self.linear_q_up_proj = self._divided_linear(sizes.query_rank, query_size)
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, sizes.rank + sizes.rotated)
        self.kv_layernorm = TorchRMSNorm(config, sizes.rank, epsilon)
        self.linear_kv_up_proj = self._divided_linear(
            sizes.rank, heads * (sizes.plain + sizes.value)
        )

    def _divided_linear(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        """Returns a layer whose heads are divided over the tensor-parallel ranks."""
        return ColumnParallelLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            tp_group=self.pg_collection.tp,
        )

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values [tokens, 1, heads of this rank, d].

        Queries and keys begin with the rotated part, where `TorchAttention` expects it.
        """
        sizes = self.sizes
        query = self._queries(hidden_states).unflatten(-1, (-1, sizes.plain + sizes.rotated))
        plain_query, rotated_query = query.split([sizes.plain, sizes.rotated], -1)
        joined = self.linear_kv_down_proj(hidden_states)
        latent, rotated_key = joined.split([sizes.rank, sizes.rotated], -1)
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        key_value = key_value.unflatten(-1, (-1, sizes.plain + sizes.value))
        plain_key, value = key_value.split([sizes.plain, sizes.value], -1)
        # The heads of all ranks have this part of the key. Both functions sum its gradient.
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            rotated_key = gather_from_sequence_parallel_region(rotated_key, group=group)
        else:
            rotated_key = copy_to_tensor_model_parallel_region(rotated_key, group=group)
        rotated_keys = rotated_key.unsqueeze(-2).expand(*plain_key.shape[:-1], -1)
        return (
            torch.cat([rotated_query, plain_query], -1),
            torch.cat([rotated_keys, plain_key], -1),
            value,
        )

    def _queries(self, hidden_states: Tensor) -> Tensor:
        """Returns the queries of this rank's heads, [tokens, 1, heads·d]."""
        if self.sizes.query_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            assert self.q_layernorm is not None  # made with `query_rank`
            latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            query, _ = self.linear_q_up_proj(latent)
        queries: Tensor = query
        return queries

    def backward_dw(self) -> None:
        """megatron-core's hook for delayed gradients of weights, which are not used."""


class ReplicatedLinear(nn.Module):
    """A linear layer without bias that every tensor-parallel rank holds."""

    def __init__(self, config: ModelConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # megatron-core sums the gradient of weights with this mark over the tensor-parallel ranks
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs]."""
        return F.linear(x, self.weight)
