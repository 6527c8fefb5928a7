"""Tiny random Hugging Face checkpoints of each model family."""

import json
from pathlib import Path

import torch
from tokenizers import processors
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from slime_tis.demo import sort_digits
from slime_tis.hf_model import load_causal_lm

FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM),
    "mimo": (Qwen2Config, Qwen2ForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "kimi_k2": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
}
PUBLISHED_FIELDS = {
    "mimo": {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"},
    "kimi_k2": {"model_type": "kimi_k2"},
}
"""Fields of published checkpoints of families that transformers does not know, by family."""
PAD, BOS, EOS = 0, 1, 2
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNO >+-*=:.,?"
VOCAB_SIZE = 3 + len(CHARACTERS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' + message['content'] + '.' }}{% endfor"
    " %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LATENT_SIZES = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    # norms of latent vectors have another ε, which this one would reveal
    "rms_norm_eps": 1e-2,
}
DEEPSEEK_V3_SIZES = {**LATENT_SIZES, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
DELTA_NET_SIZES = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    # a smaller ε magnifies rounding errors of outputs near 0
    "rms_norm_eps": 1e-2,
}
FURTHER_SIZES = {
    "qwen3_5": DELTA_NET_SIZES,
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 6},
    "deepseek_v2": {**LATENT_SIZES, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "deepseek_v3": DEEPSEEK_V3_SIZES,
    "kimi_k2": DEEPSEEK_V3_SIZES,
    "glm4_moe_lite": LATENT_SIZES,
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_next": {
        **DELTA_NET_SIZES,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}
"""Further sizes of mixtures of experts and recurrences, by family."""


def make_tokenizer(*, adds_bos=False):
    """A byte-level BPE without merges: every character is a token; `adds_bos` as in Llama's."""
    characters = [
        "Ġ" if character == " " else character for character in CHARACTERS
    ]  # byte-level space
    tokenizer = sort_digits.make_tokenizer(128, characters, ("<pad>", "<bos>", "<eos>"))
    tokenizer.chat_template = CHAT_TEMPLATE
    if adds_bos:
        template = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
        tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def make_checkpoint(path, family, *, seed=0, **sizes):
    """Writes a random float32 model of a family with a tokenizer to `path`, and returns it.

    Weights are ten times larger than the families' initialization, so that the next-token
    distribution is far from uniform. Norm weights and biases differ from 1 and 0, so that a
    converter that swaps them fails.
    """
    config_class, model_class = FAMILIES[family]
    config = config_class(
        **{**SIZES, **FURTHER_SIZES.get(family, {}), "initializer_range": 0.2, **sizes},
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
    )
    # norms of these families add 1 to their weights
    norm_mean = 0.0 if family in ("gemma3", "qwen3_5", "qwen3_next") else 1.0
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1, generator=generator)
            elif name.endswith("sinks"):
                parameter.normal_(0.0, 0.3, generator=generator)
            elif name.endswith("A_log"):
                # Heads then remember a few tokens or many. At the families' initialization they
                # forget most at once, and rounding errors of their small outputs are magnified.
                parameter.uniform_(-5.0, 0.0, generator=generator)
            elif name.endswith("linear_attn.norm.weight"):
                parameter.normal_(1.0, 0.1, generator=generator)
            elif "norm" in name:
                parameter.normal_(norm_mean, 0.1, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1, generator=generator)
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    model.save_pretrained(path)
    config_file = Path(path) / "config.json"
    fields = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(fields | PUBLISHED_FIELDS.get(family, {}), indent=2))
    make_tokenizer().save_pretrained(path)
    return Path(path)


def architecture_of_family(family):
    """The architecture in config.json of a family's checkpoints."""
    _, model_class = FAMILIES[family]
    published = PUBLISHED_FIELDS.get(family, {})
    return published.get("architectures", [model_class.__name__])[0]


def architecture_of(directory):
    """The architecture that config.json names."""
    return json.loads((Path(directory) / "config.json").read_text())["architectures"][0]


def transformers_model(directory):
    """transformers' float32 model of a checkpoint, in evaluation mode."""
    return load_causal_lm(directory, torch.float32, architecture=architecture_of(directory))


def make_task(directory, architecture="Qwen3ForCausalLM"):
    """The files that a recipe names: checkpoint/config.json, train.jsonl and eval.jsonl."""
    (directory / "checkpoint").mkdir(parents=True, exist_ok=True)
    (directory / "checkpoint" / "config.json").write_text(
        json.dumps({"architectures": [architecture]})
    )
    for name in ("train.jsonl", "eval.jsonl"):
        (directory / name).write_text('{"prompt": "21>", "label": "12"}\n')
