"""Every gradient equals transformers': all families on one rank, dense models on several ranks."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from slime_tis.families import FAMILIES
from tests.checkpoints import VOCAB_SIZE, architecture_of_family, make_checkpoint
from tests.megatron.family_models import FAMILY_MODELS
from tests.megatron.gradients import (
    OPTIONS,
    beyond_tolerance,
    differences_from,
    differing_gradients,
    make_samples,
    relative_differences,
    trained_engine,
    transformers_gradients,
)
from tests.megatron.passes import RECOMPUTE_LAYERS

GROUPS = {
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.25,
}
BIASES: dict[str, tuple[str, dict[str, Any]]] = {"qwen2, biases": ("qwen2", {})}
TIED_NORMS = {"qwen3, tied, norms": ("qwen3", {"tie_word_embeddings": True})}
DENSE = BIASES | TIED_NORMS
MODELS: dict[str, tuple[str, dict[str, Any]]] = DENSE | {
    "llama, odd vocabulary": ("llama", {"vocab_size": 67}),
    "qwen3_moe, first layer dense": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen2_moe, gated shared expert": ("qwen2_moe", {"norm_topk_prob": False}),
    "glm4_moe, groups, norms, biases, shared experts": ("glm4_moe", GROUPS),
    **FAMILY_MODELS,
}
ONE_RANK_OPTIONS: dict[str, dict[str, Any]] = {
    "two samples at a time": {},
    "all samples packed": {"micro_batch_size": 8},
    "each sample apart": {"micro_batch_size": 1, "share_prompts": False},
    "distributed optimizer": {"use_distributed_optimizer": True},
    "recomputed layers": RECOMPUTE_LAYERS,
    "recomputed block": RECOMPUTE_LAYERS | {"recompute_method": "block"},
    "recomputed attention": {"recompute_granularity": "selective"},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {}),
    "tensor": (2, {"tensor_model_parallel_size": 2}),
    "tensor and sequence": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "context": (2, {"context_parallel_size": 2}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2}),
}


def test_every_gradient_in_one_process(tmp_path):
    assert differing_gradients(tmp_path, MODELS, {}, 1, ONE_RANK_OPTIONS) == {}


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_every_gradient_of_dense_models_on_ranks(ranks, layout, tmp_path):
    assert differing_gradients(tmp_path, DENSE, layout, ranks, OPTIONS) == {}


FAMILY_LAYERS = {
    name: FAMILY_MODELS[name]
    for name in (
        "mistral, window",
        "olmo2, grouped queries",
        "glm4, biases",
        "gemma3, a linear rope, untied",
        "qwen3_5, grouped values",
    )
}
"""Dense models whose layers differ most from Llama's."""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_every_gradient_of_family_layers_on_ranks(ranks, layout, tmp_path):
    assert differing_gradients(tmp_path, FAMILY_LAYERS, layout, ranks, OPTIONS) == {}


FOUR_RANKS: dict[str, dict[str, Any]] = {
    "tensor and pipeline": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
    },
    "tensor and context": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "context_parallel_size": 2,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", FOUR_RANKS.values(), ids=list(FOUR_RANKS))
def test_every_gradient_of_family_layers_on_four_ranks(layout, tmp_path):
    assert differing_gradients(tmp_path, FAMILY_LAYERS, layout, 4, OPTIONS) == {}


def test_every_supported_family_is_compared():
    compared = {architecture_of_family(family) for family, _ in MODELS.values()}
    assert compared == set(FAMILIES)


@dataclass(frozen=True)
class Step:
    """One step of a mixture of experts in this process, and the gradient by transformers."""

    engine: Any
    result: Any
    expected: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def step(parallel, tmp_path_factory):
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")
    samples = make_samples(VOCAB_SIZE)
    engine, result = trained_engine(checkpoint, parallel, samples)
    return Step(engine, result, transformers_gradients(checkpoint, samples))


PLANTED = {
    "norm of keys": ("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight"}),
    "queries, keys and values": (
        "self_attention.linear_qkv.weight",
        {f"self_attn.{part}_proj.weight" for part in "qkv"},
    ),
    "router": ("mlp.router.weight", {"mlp.gate.weight"}),
    "expert": (
        "mlp.experts.local_experts.3.linear_fc1.weight",
        {f"mlp.experts.3.{part}_proj.weight" for part in ("gate", "up")},
    ),
}


@pytest.mark.parametrize(("megatron_name", "hf_names"), PLANTED.values(), ids=list(PLANTED))
def test_a_wrong_scale_of_one_gradient_is_found(megatron_name, hf_names, step):
    weight = step.engine.model.module.get_parameter(f"decoder.layers.1.{megatron_name}")
    correct = weight.main_grad.clone()
    weight.main_grad.mul_(1.0001)
    differing = beyond_tolerance(differences_from(step.expected, step.engine, step.result))
    weight.main_grad.copy_(correct)
    assert differing.keys() == {f"model.layers.1.{name}" for name in hf_names}


def test_a_wrong_norm_is_found(step):
    halved = {name: gradient / 2 for name, gradient in step.expected.items()}
    differing = beyond_tolerance(differences_from(halved, step.engine, step.result))
    assert differing == {"norm": pytest.approx(1, rel=1e-6)}  # clipped gradients are equal


def test_missing_or_nan_gradients_are_found():
    one = torch.ones(2)
    expected = {"equal": one, "missing": one, "nan": one}
    actual = {"equal": one, "added": one, "nan": one * torch.nan}
    differing = beyond_tolerance(relative_differences(actual, expected))
    assert differing.keys() == {"missing", "added", "nan"}
