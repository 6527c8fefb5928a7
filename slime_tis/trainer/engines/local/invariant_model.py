"""A transformers model whose log-probs of a token do not depend on the batch or the cache.

Two public hooks of transformers are enough: modules can be replaced, and attention functions can be
registered. Its norms and rotary embeddings already depend on one row only; training rounds as they
do.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slime_tis.trainer.invariant.operations import KEYS, Tiles, attention, linear, silu
from slime_tis.trainer.invariant.self_check import (
    ATTENTION_OUTPUT,
    DOWN,
    GATE_UP,
    HEAD,
    QKV,
    Kernels,
)

ATTENTION = "slime_tis_invariant"
"""Name of the attention function in transformers' table."""
LAYERS = {
    "q_proj": QKV,
    "k_proj": QKV,
    "v_proj": QKV,
    "o_proj": ATTENTION_OUTPUT,
    "gate_proj": GATE_UP,
    "up_proj": GATE_UP,
    "down_proj": DOWN,
    "lm_head": HEAD,
}
"""Linear layers by transformers' names, in Llama, Qwen2 and Qwen3."""
ROW_PARALLEL = (ATTENTION_OUTPUT, DOWN)
"""Layers whose sum tensor-parallel ranks divide."""
ACTIVATION = "act_fn"
"""Name of the module that computes silu."""


class InvariantLinear(nn.Linear):
    """A linear layer with the parameters of another one."""

    def __init__(self, layer: nn.Linear, tiles: Tiles, parts: int) -> None:
        # nn.Linear would allocate other parameters.
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = layer.weight
        self.bias = layer.bias
        self.tiles = tiles
        self.parts = parts

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] → [..., out_features]."""
        return linear(input, self.weight, self.bias, self.tiles, self.parts)


class InvariantSiLU(nn.Module):
    """silu of a rollout model."""

    def __init__(self, vectorized: bool) -> None:
        super().__init__()
        self.vectorized = vectorized

    def forward(self, x: Tensor) -> Tensor:
        """[..., inner size] → [..., inner size]."""
        return silu(x, vectorized=self.vectorized)


def install(model: PreTrainedModel, kernels: Kernels) -> None:
    """Replaces the linear layers, silu and the attention of a dense model.

    Raises:
        ValueError: The model has a linear layer that is not in `LAYERS`.
    """
    for name, module in list(model.named_modules()):
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        if isinstance(module, nn.Linear):
            if child not in LAYERS:
                raise ValueError(
                    f"--true-on-policy does not know the linear layer {name!r} of this model;"
                    " remove the flag."
                )
            layer = LAYERS[child]
            parts = kernels.ranks if layer in ROW_PARALLEL else 1
            setattr(parent, child, InvariantLinear(module, kernels.tiles[layer], parts))
        elif child == ACTIVATION:
            setattr(parent, child, InvariantSiLU(kernels.vectorized_silu))
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention_of_transformers)
    model.config._attn_implementation = ATTENTION


def batching_options(kernels: Kernels) -> dict[str, Any]:
    """Returns the arguments of `ContinuousBatching` that belong to an installed model."""
    return {
        "vocabulary_part": kernels.vocabulary_part,
        "key_block": KEYS,
        "cache_dtype": torch.float32,
    }


def attention_of_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns the attention [B, T, H, d] in transformers' interface.

    Args:
        module: The attention module.
        query: [B, H, T, d].
        key: [B, G, S, d], with the cached keys.
        value: The same.
        attention_mask: [B or 1, 1, T, S or more], bool, or a number that is 0 if a query sees a
            key. None for causal attention.
        scaling: Factor of the scores; None: d^−0.5.
    """
    seen = None
    if attention_mask is not None:
        seen = attention_mask[:, 0, :, : key.shape[2]]
        if seen.is_floating_point():
            seen = seen == 0
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    output = attention(query, key, value, seen, scaling)
    return output.transpose(1, 2).contiguous(), None
