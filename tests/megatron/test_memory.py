"""The token budget of micro-batches: bytes of a token and free memory by hand, and which options replace it."""

from types import SimpleNamespace

import pytest
import torch

from slime_tis.trainer.megatron import memory
from slime_tis.trainer.megatron.engine import TrainingEngine
from slime_tis.trainer.megatron.memory import TokenBudget, bytes_per_token, free_memory
from slime_tis.trainer.options.megatron import MegatronConfig

SMOLLM2 = {
    "params_dtype": torch.float32,
    "num_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_query_groups": 3,
    "kv_channels": 64,
    "ffn_hidden_size": 1536,
    "num_moe_experts": None,
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "recompute_granularity": None,
    "qk_layernorm": False,
    "use_te_activation_func": True,
}
HEAD = 12 * 576
"""Of log-probs: hidden states, a copy and their gradient."""
PER_LAYER = 4 * 576 + 5 * 576 + 2 * 192 + 2 * 1536


BF16 = {"params_dtype": torch.bfloat16}
TENSOR = {"tensor_model_parallel_size": 2}
EXPERTS = {
    "num_moe_experts": 8,
    "moe_layer_freq": [1] * 30,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 512,
    "moe_shared_expert_intermediate_size": None,
}
CASES = {
    "fp32": ({}, 0, -1, 4 * 30 * PER_LAYER + HEAD),
    "transformer-engine": ({"use_te_activation_func": False}, 0, -1, 4 * 30 * (PER_LAYER + 3 * 1536) + HEAD),
    "fp32, logits requested": ({}, 49152, -1, 4 * 30 * PER_LAYER + HEAD + 16 * 49152),
    "log-probs in chunks": ({}, 49152, 256, 4 * 30 * PER_LAYER + HEAD + 8 * 49152),
    "bf16, logits requested": (BF16, 49152, -1, 2 * 30 * PER_LAYER + 10 * 576 + 18 * 49152),
    "tensor": (TENSOR, 49152, -1, 4 * 30 * (4 * 576 + (PER_LAYER - 4 * 576) // 2) + HEAD + 8 * 49152),
    "tensor and sequence": (TENSOR | {"sequence_parallel": True}, 0, -1, 2 * 30 * PER_LAYER + HEAD),
    "recomputation": ({"recompute_granularity": "full"}, 0, -1, 4 * (30 * 576 + PER_LAYER) + HEAD),
    "norms of queries and keys": ({"qk_layernorm": True}, 0, -1, 4 * 30 * (PER_LAYER + 576 + 2 * 192) + HEAD),
    "experts": (EXPERTS, 0, -1, 4 * 30 * (PER_LAYER - 2 * 1536 + 4 * 1024) + HEAD),
}


@pytest.mark.parametrize(("changes", "logits", "chunk_size", "expected"), CASES.values(), ids=list(CASES))
def test_bytes_of_a_token_by_hand(changes, logits, chunk_size, expected):
    config = SimpleNamespace(**SMOLLM2 | changes)
    assert bytes_per_token(config, logits, chunk_size) == expected


@pytest.mark.parametrize(
    ("free", "tokens"), [(2 * 1000 * 999, 512), (2 * 1000 * 512, 512), (1500 * 2, 1), (100, 1), (0, 1)]
)
def test_the_budget_is_a_power_of_two_that_fits_half_of_the_memory(free, tokens):
    assert TokenBudget.that_fits(free, 1000).tokens == tokens


def test_free_memory_is_shared_and_bounded_by_the_container(monkeypatch, tmp_path):
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert (free_memory(cpu, 1), free_memory(cpu, 4)) == (1000, 250)
    for name, text in (
        ("memory.max", "900\n"),
        ("memory.current", "700\n"),
        ("memory.stat", "anon 5\ninactive_file 40\n"),
    ):
        (tmp_path / name).write_text(text)
    assert (free_memory(cpu, 1), free_memory(cpu, 2)) == (240, 120)
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(cpu, 1) == 1000
    (tmp_path / "memory.max").write_text("100\n")
    assert free_memory(cpu, 1) == 0


def test_options_take_precedence(model, parallel):
    def budget(**options):
        config = MegatronConfig(hf_checkpoint=str(model), **options)
        return TrainingEngine(config, parallel, temperature=1.0, total_steps=1).token_budget

    assert budget(micro_batch_size=2) is None
    assert budget(use_dynamic_batch_size=True, max_tokens_per_gpu=100) == TokenBudget(tokens=100)
    found = budget()
    assert found is not None and found.reason is not None and found.tokens > 10_000
