"""Mixtures of experts on two ranks against transformers: logits, and a round trip of the weights."""

import pytest

from tests.checkpoints import make_checkpoint
from tests.megatron.passes import on_ranks
from tests.megatron.test_hf_parity import compare_all

CASES = {
    "qwen3_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "qwen2_moe": {},
    "glm4_moe": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 2},
}
LAYOUTS = {
    "experts": {"expert_model_parallel_size": 2},
    "tensor and experts": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "matrices of each expert": {"expert_tensor_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_weights_match_transformers(layout, tmp_path):
    for family, sizes in CASES.items():
        make_checkpoint(tmp_path / family, family, **sizes)
    on_ranks(compare_all, tmp_path, LAYOUTS[layout])
    assert len(list(tmp_path.glob("*/parity_*"))) == 2 * len(CASES)
