"""Every gradient of mixtures of experts equals transformers' on every parallel layout."""

from typing import Any

import pytest

from tests.megatron.family_models import FAMILY_MODELS
from tests.megatron.gradients import OPTIONS, differing_gradients
from tests.megatron.test_gradients import GROUPS

FAMILY_MODELS_WITH_EXPERTS = (
    "deepseek_v2, queries without latent vectors",
    "deepseek_v3, YaRN, groups",
    "glm4_moe_lite",
    "qwen3_next",
)
STACKED: dict[str, tuple[str, dict[str, Any]]] = {"gpt_oss": ("gpt_oss", {})}
"""Experts with biases, which tensor-parallel ranks do not divide."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe, tied, first layer dense": (
        "qwen3_moe",
        {"tie_word_embeddings": True, "mlp_only_layers": [0]},
    ),
    "qwen2_moe, gated shared expert": ("qwen2_moe", {}),
    "glm4_moe, groups, norms, biases, shared experts": ("glm4_moe", GROUPS),
    **{name: FAMILY_MODELS[name] for name in FAMILY_MODELS_WITH_EXPERTS},
}
EXPERTS_2 = {"expert_model_parallel_size": 2}
TENSOR_2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CONTEXT_2 = {"context_parallel_size": 2}
PIPELINE_2 = {"pipeline_model_parallel_size": 2}
WHOLE_EXPERTS = {"expert_tensor_parallel_size": 1}
SPLIT_EXPERTS = {"expert_tensor_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {}),
    "experts": (2, EXPERTS_2),
    "split experts": (2, SPLIT_EXPERTS),
    "tensor, split experts": (2, TENSOR_2),
    "tensor, whole experts": (2, TENSOR_2 | WHOLE_EXPERTS),
    "tensor and experts": (2, TENSOR_2 | WHOLE_EXPERTS | EXPERTS_2),
    "context": (2, CONTEXT_2),
    "context, split experts": (2, CONTEXT_2 | SPLIT_EXPERTS),
    "context and experts": (2, CONTEXT_2 | EXPERTS_2),
    "pipeline": (2, PIPELINE_2),
    "pipeline and experts": (4, PIPELINE_2 | EXPERTS_2),
    "tensor, split experts on two pairs of ranks": (4, TENSOR_2 | EXPERTS_2),
    "tensor and data, whole experts": (4, TENSOR_2 | WHOLE_EXPERTS),
    "tensor and pipeline, whole experts": (4, TENSOR_2 | PIPELINE_2 | WHOLE_EXPERTS),
    "tensor and context, whole experts": (4, TENSOR_2 | CONTEXT_2 | WHOLE_EXPERTS),
}


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_every_gradient_of_experts(ranks, layout, tmp_path):
    assert differing_gradients(tmp_path, MODELS, layout, ranks, OPTIONS) == {}


WHOLE_LAYOUTS = {
    "experts": LAYOUTS["experts"],
    "tensor, whole experts": LAYOUTS["tensor, whole experts"],
    "tensor and experts": LAYOUTS["tensor and experts"],
    "context": LAYOUTS["context"],
    "pipeline": LAYOUTS["pipeline"],
    "tensor and experts on two pairs of ranks": (4, TENSOR_2 | WHOLE_EXPERTS | EXPERTS_2),
    "tensor and pipeline": LAYOUTS["tensor and pipeline, whole experts"],
    "tensor and context": LAYOUTS["tensor and context, whole experts"],
}


@pytest.mark.parametrize(("ranks", "layout"), WHOLE_LAYOUTS.values(), ids=list(WHOLE_LAYOUTS))
def test_every_gradient_of_experts_with_biases(ranks, layout, tmp_path):
    assert differing_gradients(tmp_path, STACKED, layout, ranks, OPTIONS) == {}
