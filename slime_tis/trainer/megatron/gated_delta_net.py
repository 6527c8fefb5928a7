"""Gated delta nets, as a megatron-core spec module in plain torch.

megatron-core's own `GatedDeltaNet` needs fla (Triton) to be built, and refuses packed sequences and
context parallelism. The names of its weights are kept.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import _split_tensor_factory
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from slime_tis.trainer.megatron.gated_delta_rule import CHUNK, gated_delta_rule
from slime_tis.trainer.megatron.model_config import ModelConfig
from slime_tis.trainer.megatron.packing import AttentionRows, PackedSequences

KEY_EPSILON = 1e-6
"""ε of the norm of queries and keys in transformers."""


@dataclass(frozen=True, kw_only=True)
class DeltaNetSizes:
    """Numbers of heads and features of a gated delta net."""

    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    """Heads of values, a multiple of `key_heads`; consecutive ones share a query and a key."""
    key: int
    """Features of a query and of a key."""
    value: int
    """Features of a value."""
    kernel: int
    """Tokens that the convolution sees, itself included."""

    @property
    def convolved(self) -> int:
        """Features of all queries, keys and values."""
        return 2 * self.key_heads * self.key + self.value_heads * self.value

    @property
    def saved_values(self) -> int:
        """Values per token that a layer saves for autograd, within 5% in runs on a CPU.

        Inputs and outputs of the convolution: 3 vectors. Keys repeated for their heads of values: 4
        vectors. Values and outputs: 9 vectors. Matrices of a chunk: 8. States of a chunk: 2.
        """
        repeated = self.value_heads * self.key
        values = self.value_heads * self.value
        vectors = 3 * self.convolved + 4 * repeated + 9 * values
        matrices = 8 * self.value_heads * CHUNK
        states = 2 * repeated * self.value // CHUNK
        return vectors + matrices + states


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """Attention with a recurrent state, in the place of megatron-core's `SelfAttention`.

    With the projections q', k', v', z, b, a of a hidden state, and a causal convolution over the
    last tokens, feature by feature,

        q = norm(silu(conv(q'))) / √d_k,   k = norm(silu(conv(k'))),   v = silu(conv(v'))
        log α = −exp(A) · softplus(a + a₀),   β = σ(b)
        o = `gated_delta_rule`(q, k, v, log α, β),   y = W_o (rmsnorm(o) · silu(z))

    Tensor-parallel ranks divide the heads. Context-parallel ranks gather the projections, and each
    computes the states of complete sequences.

    Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule", Yang et al.
    (https://arxiv.org/abs/2412.06464), section 3.4, as in Qwen3-Next.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_number: int,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        sizes: DeltaNetSizes,
    ) -> None:
        """Makes the weights of this rank's heads."""
        super().__init__(config=config)
        self.layer_number = layer_number
        self.sizes = sizes
        self.tensor_group = pg_collection.tp
        self.context_group = pg_collection.cp
        ranks = self.tensor_group.size()
        self.key_heads = sizes.key_heads // ranks
        self.value_heads = sizes.value_heads // ranks
        values = sizes.value_heads * sizes.value
        # As in files, the rows of a key head are together: q', k', then its v' and z.
        self.in_proj_qkvz = self._divided_linear(sizes.convolved + values)
        self.in_proj_ba = self._divided_linear(2 * sizes.value_heads)
        dtype = config.params_dtype
        channels = sizes.convolved // ranks
        self.conv1d = nn.Conv1d(
            channels, channels, sizes.kernel, groups=channels, bias=False, dtype=dtype
        )
        self.A_log = nn.Parameter(torch.zeros(self.value_heads, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.zeros(self.value_heads, dtype=dtype))
        for divided in (self.conv1d.weight, self.A_log, self.dt_bias):
            # megatron-core's gradient norm then counts the weights of every rank
            divided.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.out_norm = GatedNorm(config, sizes.value, self.tensor_group)
        self.out_proj = RowParallelLinear(
            values,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tensor_group,
        )

    def _divided_linear(self, outputs: int) -> ColumnParallelLinear:
        """Returns a layer whose heads are divided over the tensor-parallel ranks."""
        return ColumnParallelLinear(
            self.config.hidden_size,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            tp_group=self.tensor_group,
        )

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: PackedSequences, **__: Any
    ) -> tuple[Tensor, None]:
        """[tokens, 1, hidden size] → the same, and None instead of a bias."""
        layout = packed_seq_params
        qkvz, _bias = self.in_proj_qkvz(hidden_states)
        ba, _bias = self.in_proj_ba(hidden_states)
        mixed, z, b, a = self._parts(qkvz.squeeze(1), ba.squeeze(1))
        inputs = torch.cat([mixed, b, a], -1)
        if self.context_group.size() > 1:
            # gathers along the first dimension, the tokens
            inputs = gather_from_sequence_parallel_region(inputs, group=self.context_group)
        outputs = [self._over_time(inputs, rows) for rows in layout.rows]
        normalized = self.out_norm(layout.packed(outputs), z)
        output, _bias = self.out_proj(normalized.flatten(1)[:, None])
        return output, None

    def _parts(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Splits projections, in which the parts of a key head are together.

        Returns:
            q', k' and v' of all heads [tokens, channels]; z [tokens, value heads, d_v]; b and a
            [tokens, value heads].
        """
        sizes = self.sizes
        values = sizes.value_heads // sizes.key_heads * sizes.value
        by_head = qkvz.unflatten(-1, (self.key_heads, -1))
        query, key, value, z = by_head.split([sizes.key, sizes.key, values, values], -1)
        mixed = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], -1)
        b, a = ba.unflatten(-1, (self.key_heads, 2, -1)).unbind(-2)
        return mixed, z.reshape(len(z), self.value_heads, sizes.value), b.flatten(1), a.flatten(1)

    def _over_time(self, inputs: Tensor, rows: AttentionRows) -> Tensor:
        """Runs the convolution and the rule over each row, which is a complete sequence.

        Args:
            inputs: q', k', v', b and a of the tokens of all context-parallel ranks.
            rows: The sequences, or the segments after the prompts that they share.

        Returns:
            [rows, value heads, Lq, d_v] of the tokens that are queries in attention.
        """
        sizes = self.sizes
        channels = self._channels()
        sequences = rows.gather(inputs[:, None], rows.key_index).squeeze(1)
        mixed, b, a = sequences.split([sum(channels), self.value_heads, self.value_heads], -1)
        before = F.pad(mixed.mT, (sizes.kernel - 1, 0))
        convolved = F.silu(self.conv1d(before)).mT
        query, key, value = convolved.split(channels, -1)
        output = gated_delta_rule(
            self._key_heads(query) * sizes.key**-0.5,
            self._key_heads(key),
            value.unflatten(-1, (self.value_heads, sizes.value)).transpose(1, 2),
            self._log_decay(a).transpose(1, 2),
            b.sigmoid().transpose(1, 2),
        )
        if rows.mask is None:
            return output
        # A row also has tokens that are no queries. A query is the last token that it sees.
        position = rows.mask.sum(-1, keepdim=True) - 1  # [rows, 1, Lq, 1]
        return output.gather(2, position.expand(-1, self.value_heads, -1, sizes.value))

    def _channels(self) -> list[int]:
        """Returns the numbers of this rank's features of queries, keys and values."""
        keys = self.key_heads * self.sizes.key
        return [keys, keys, self.value_heads * self.sizes.value]

    def _key_heads(self, x: Tensor) -> Tensor:
        """Normalizes queries or keys, and repeats them for their heads of values.

        [rows, T, key heads · d_k] → [rows, value heads, T, d_k].
        """
        wide = x.unflatten(-1, (self.key_heads, self.sizes.key)).float()
        scale = (wide.square().sum(-1, keepdim=True) + KEY_EPSILON).rsqrt()
        repeats = self.value_heads // self.key_heads
        normalized: Tensor = (wide * scale).transpose(1, 2)
        return normalized.repeat_interleave(repeats, 1)

    def _log_decay(self, a: Tensor) -> Tensor:
        """log α [rows, T, value heads] in float32: exp(A) overflows in float16."""
        log_decay: Tensor = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        return log_decay

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns the weights as parts that tensor-parallel ranks save and load."""
        parts: dict[str, Any] = super().sharded_state_dict(
            prefix, sharded_offsets, metadata, **kwargs
        )
        divided = {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "conv1d.weight": self.conv1d.weight,
        }
        first_dimension = dict.fromkeys(divided, 0)
        parts |= make_sharded_tensors_for_checkpoint(
            divided, prefix, first_dimension, sharded_offsets
        )
        # One tensor each for queries, keys and values: joined, their order of channels would depend
        # on the number of ranks.
        convolution = f"{prefix}conv1d.weight"
        parts[convolution] = _split_tensor_factory(
            parts[convolution], self._channels(), ["query", "key", "value"], 0
        )
        return parts


class GatedNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · weight · silu(gate), for each head."""

    def __init__(self, config: ModelConfig, features: int, group: Any) -> None:
        """`group`: the tensor-parallel ranks, which have the same weight for their heads."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features, dtype=config.params_dtype))
        self.eps = config.layernorm_epsilon
        self.group = group

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [tokens, heads of this rank, features] → the same shape."""
        # sums the gradients of the heads of all ranks
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.group)
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        # rounds as transformers does
        normalized = weight * (wide * scale).to(x.dtype)
        output: Tensor = (normalized * F.silu(gate.float())).to(x.dtype)
        return output
