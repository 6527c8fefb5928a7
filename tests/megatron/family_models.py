"""Tiny models of the families, with the properties that distinguish them from Llama."""

from typing import Any

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
"""DeepSeek-V3's, with a shorter original context, so that every frequency differs."""
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
    "seed_oss, biases": ("seed_oss", {}),
    "seed_oss, no biases": ("seed_oss", {"attention_bias": False}),
    "mimo": ("mimo", {}),
    "glm4, biases": ("glm4", {}),
    "glm4, no biases": ("glm4", {"attention_bias": False}),
    "gemma3, five of six layers with windows": (
        "gemma3",
        {
            "num_hidden_layers": 6,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3, a linear rope, untied": (
        "gemma3",
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gpt_oss, sinks, windows, biases": ("gpt_oss", {}),
    "deepseek_v2, queries without latent vectors": (
        "deepseek_v2",
        {"q_lora_rank": None, "n_shared_experts": 2},
    ),
    "deepseek_v3, YaRN, groups": (
        "deepseek_v3",
        {"rope_parameters": YARN, "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3, Moonlight": ("deepseek_v3", {"q_lora_rank": None, "n_shared_experts": 2}),
    "kimi_k2": ("kimi_k2", {"rope_parameters": {**YARN, "factor": 32.0}}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next, a dense layer, one head of values per key": (
        "qwen3_next",
        {
            "layer_types": ["full_attention", "linear_attention"],
            "linear_num_value_heads": 2,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5, grouped values": (
        "qwen3_5",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            }
        },
    ),
    "qwen3_5, one head of values per key, tied": (
        "qwen3_5",
        {
            "layer_types": ["full_attention", "linear_attention"],
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    # without experts, prompts are shared
    "qwen3_next, dense": ("qwen3_next", {"mlp_only_layers": [0, 1]}),
}
"""Name → family and fields of config.json that differ from `tests.checkpoints.SIZES`."""
