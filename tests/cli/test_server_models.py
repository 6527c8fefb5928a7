"""Models that a server would read in another way are refused with it."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import configured, refusal

MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "sliding_window": 32,
}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention"],
}
SGLANG = "--rollout-engine sglang --sglang-url http://localhost:30000"
VLLM = "--rollout-engine vllm --vllm-url http://localhost:8000"


@pytest.fixture
def given(base):
    """A command line with a model with windows, whose config.json has more fields."""

    def make(**fields):
        Path("model", "config.json").write_text(json.dumps({**MISTRAL, **fields}))
        return base

    return make


def test_longer_sequences_than_the_window_are_refused(given):
    message = refusal(given() + SGLANG)
    assert "windows of 32 tokens, which SGLang ignores" in message
    assert "up to 64 tokens" in message


def test_the_window_that_transformers_assumes_counts(given):
    # Without the field, transformers' Mistral has windows of 4096 tokens.
    line = given(sliding_window=None, max_position_embeddings=8192)
    model = json.loads(Path("model", "config.json").read_text())
    del model["sliding_window"]
    Path("model", "config.json").write_text(json.dumps(model))
    assert "windows of 4096 tokens" in refusal(line + SGLANG)


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def test_gpt_oss_on_vllm_is_refused(given):
    message = refusal(given(**GPT_OSS) + VLLM)
    assert "vLLM does not apply a weight update" in message


ACCEPTED = {
    "sequences within the window": ({}, f"{SGLANG} --rollout-max-context-len 32"),
    "no window": ({"sliding_window": None}, SGLANG),
    "windows that SGLang has": (GEMMA, SGLANG),
    "vLLM": ({}, VLLM),
    "the local engine": ({}, ""),
    "gpt-oss on the local engine": (GPT_OSS, ""),
    "gpt-oss on SGLang": (GPT_OSS, SGLANG),
}


@pytest.mark.parametrize(("fields", "flags"), ACCEPTED.values(), ids=ACCEPTED)
def test_models_that_engines_read_right_are_accepted(given, fields, flags):
    configured(given(**fields) + flags)


MOONLIGHT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
}
EPSILONS = {
    "SGLang": (SGLANG, 1e-5),
    "vLLM": (VLLM, 1e-5),
    "the local engine": ("", None),
    "given": (f"{SGLANG} --latent-norm-epsilon 1e-6", 1e-6),
}


@pytest.mark.parametrize(("flags", "epsilon"), EPSILONS.values(), ids=EPSILONS)
def test_norms_of_latents_have_the_epsilon_of_the_engine(given, flags, epsilon):
    arguments = configured(given(**MOONLIGHT) + flags)
    assert arguments.megatron.latent_norm_epsilon == epsilon


def test_an_epsilon_of_latents_without_latent_attention_is_refused(given):
    message = refusal(given(sliding_window=None) + "--latent-norm-epsilon 1e-5")
    assert "Mistral has no latent attention" in message
