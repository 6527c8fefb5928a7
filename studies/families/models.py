"""Tiny models of the families, with sizes that servers on a CPU accept."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.megatron.family_models import YARN

SIZES: Mapping[str, Any] = {
    "hidden_size": 128,
    # vLLM's attention on a CPU ends the server with heads of 16.
    "head_dim": 64,
    # A wide vocabulary makes the end of a sequence rare, and answers long.
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
LATENT: Mapping[str, Any] = {
    **SIZES,
    # the published sizes, for which servers have kernels
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": 96,
    "n_shared_experts": 2,
    "moe_intermediate_size": 64,
    # Published files have this field, which SGLang reads and transformers does not.
    "moe_layer_freq": 1,
}
SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
GREEDY = {"topk_method": "greedy", "scoring_func": "softmax"}
GROUPS = {"n_group": 4, "topk_group": 2}
MIMO_CONFIG = """
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
"""As in the published checkpoint: transformers does not know the type."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A tiny random model."""

    title: str
    """The family, and what distinguishes the model from others of it."""
    family: str
    """Name in `tests.checkpoints.FAMILIES`."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Python files of the checkpoint, which the server runs: --trust-remote-code."""


MODELS: Mapping[str, Model] = {
    "mistral": Model(
        title="Mistral",
        family="mistral",
        fields={**SIZES, "sliding_window": None},
    ),
    "mistral_windows": Model(
        title="Mistral with windows",
        family="mistral",
        fields={**SIZES, "sliding_window": 6},
    ),
    "phi3": Model(
        title="Phi-4",
        family="phi3",
        fields={
            **SIZES,
            "num_attention_heads": 2,
            "partial_rotary_factor": 0.75,
            "sliding_window": None,
        },
    ),
    "smollm3": Model(
        title="SmolLM3",
        family="smollm3",
        # The fourth layer has no positions.
        fields={**SIZES, "num_hidden_layers": 4},
    ),
    "olmo2": Model(
        title="OLMo 2",
        family="olmo2",
        fields={**SIZES, "num_attention_heads": 2},
    ),
    "seed_oss": Model(title="Seed-OSS", family="seed_oss", fields=SIZES),
    "mimo": Model(
        title="MiMo",
        family="mimo",
        fields={
            **SIZES,
            # SGLang and vLLM take hidden_size / num_attention_heads for the size of a head.
            "num_attention_heads": 2,
            "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
        },
        code={"configuration_mimo.py": MIMO_CONFIG},
    ),
    "glm4": Model(title="GLM-4-0414", family="glm4", fields=SIZES),
    "gemma3": Model(
        title="Gemma 3",
        family="gemma3",
        # The sixth layer has no window.
        fields={
            **SIZES,
            "num_hidden_layers": 6,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_next": Model(title="Qwen3-Next", family="qwen3_next", fields=SIZES),
    "qwen3_5": Model(title="Qwen3.5", family="qwen3_5", fields=SIZES),
    "gpt_oss": Model(title="gpt-oss", family="gpt_oss", fields={**SIZES, "sliding_window": 6}),
    "deepseek_v2": Model(
        title="DeepSeek-V2-Lite",
        family="deepseek_v2",
        fields={**LATENT, **GREEDY, "q_lora_rank": None, "rope_parameters": YARN},
    ),
    "deepseek_v3": Model(
        title="DeepSeek-V3",
        family="deepseek_v3",
        fields={**LATENT, **SIGMOID, **GROUPS, "rope_parameters": YARN},
    ),
    "moonlight": Model(
        title="Moonlight",
        family="deepseek_v3",
        fields={**LATENT, **SIGMOID, "q_lora_rank": None},
    ),
    "kimi_k2": Model(
        title="Kimi-K2",
        family="kimi_k2",
        fields={**LATENT, **SIGMOID, "rope_parameters": {**YARN, "factor": 32.0}},
    ),
    "glm4_moe_lite": Model(
        title="GLM-4.7-Flash",
        family="glm4_moe_lite",
        # The published file has this field, too, which vLLM reads.
        fields={**LATENT, **SIGMOID, "first_k_dense_replace": 1},
    ),
}
"""Models by name. rms_norm_eps is 0.01 in latent attention, as `tests.checkpoints` has it, so that
another ε in the norms of latent vectors shows."""
