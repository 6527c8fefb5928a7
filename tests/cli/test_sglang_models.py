"""Windows that SGLang ignores: refused with its servers if a sequence is longer."""

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


ACCEPTED = {
    "sequences within the window": ({}, f"{SGLANG} --rollout-max-context-len 32"),
    "no window": ({"sliding_window": None}, SGLANG),
    "windows that SGLang has": (GEMMA, SGLANG),
    "vLLM": ({}, VLLM),
    "the local engine": ({}, ""),
}


@pytest.mark.parametrize(("fields", "flags"), ACCEPTED.values(), ids=ACCEPTED)
def test_models_that_engines_read_right_are_accepted(given, fields, flags):
    configured(given(**fields) + flags)
