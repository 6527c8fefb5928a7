"""Tiny models of the families, with the properties that distinguish them from Llama."""

from typing import Any

FAMILY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 6}),
    "phi3, fused projections": ("phi3", {"head_dim": 8, "sliding_window": None}),
    "phi3, window, partial rotation, tied": (
        "phi3",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3, every fourth layer without positions": (
        "smollm3",
        {"head_dim": 8, "num_hidden_layers": 4, "tie_word_embeddings": True},
    ),
    "olmo2, one head per group": ("olmo2", {"head_dim": 8, "num_key_value_heads": 4}),
    "olmo2, grouped queries": ("olmo2", {}),
    "mimo": ("mimo", {}),
    "glm4, biases": ("glm4", {}),
    "glm4, no biases": ("glm4", {"attention_bias": False}),
}
"""Name → family and fields of config.json that differ from `tests.checkpoints.SIZES`."""
