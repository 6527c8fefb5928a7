"""Every supported family against Hugging Face: logits, and a round trip of the weights, on one and two ranks."""

from pathlib import Path

import pytest

from slime_tis.hf_directory import FAMILIES
from tests.checkpoints import FAMILIES as CHECKPOINTS
from tests.checkpoints import make_checkpoint
from tests.megatron.parity_worker import compare_all
from tests.megatron.passes import on_ranks

# The vocabulary is odd, so that it is padded on two tensor-parallel ranks.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GROUPS = {
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.25,
    "first_k_dense_replace": 0,
}
CASES = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "llama": ("llama", {"vocab_size": 67, "rope_parameters": LLAMA3_ROPE}),
    "qwen3_moe, weights of the best sum to 1": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe, weights of the best as they are": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe, first layer dense": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen3_moe, every second layer sparse": ("qwen3_moe", {"num_hidden_layers": 3, "decoder_sparse_step": 2}),
    "qwen2_moe, weights of the best as they are": ("qwen2_moe", {"norm_topk_prob": False}),
    "qwen2_moe, weights of the best sum to 1, no bias": ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False}),
    "glm4_moe, first layer dense": ("glm4_moe", {}),
    "glm4_moe, groups, norms, biases, two shared experts": ("glm4_moe", GROUPS),
    "glm4_moe, one expert per token": ("glm4_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_and_weights_match_transformers(ranks: int, tmp_path: Path) -> None:
    for name, (family, sizes) in CASES.items():
        make_checkpoint(tmp_path / name, family, **sizes)
    layout = {"tensor_model_parallel_size": ranks}
    on_ranks(compare_all, tmp_path, layout, ranks)
    assert len(list(tmp_path.glob("*/parity_*"))) == ranks * len(CASES)


def test_every_family_that_the_command_line_accepts_is_compared() -> None:
    compared = {CHECKPOINTS[family][1].__name__ for family, _ in CASES.values()}
    assert compared == set(FAMILIES)
