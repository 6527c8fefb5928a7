"""megatron-core's configuration of a model, and what it has no fields for."""

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class ModelConfig(TransformerConfig):  # type: ignore[misc]  # megatron-core has no types
    """The configuration of the layers of one model."""

    norms_all_heads: bool = False
    """Whether norms of queries and keys are over all heads. megatron-core's `qk_layernorm` is then
    off: with it, gradients of the norms' weights would be summed over tensor-parallel ranks, which
    is wrong for weights that these ranks divide."""
    norms_outputs: bool = False
    """Whether outputs of attention and MLP are normalized in addition to their inputs."""
    latent_query_channels: int | None = None
    """With latent attention, features of a head's queries and keys; `kv_channels` are those of its
    values. None with grouped queries."""
    latent_norm_epsilon: float | None = None
    """With latent attention, ε of the norms of latent vectors; None for transformers' value."""
    delta_net_values: int = 0
    """With gated delta nets, float32 values per token that one saves for autograd, over all
    tensor-parallel ranks."""
    latent_width: int = 0
    """With latent attention, features of the latent vectors before and after their norms, which
    every tensor-parallel rank keeps."""
