"""Mixtures of experts: what their layouts and the rollout engine cannot do is refused before anything is built."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import configured, refusal

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 18,
}
QWEN2 = {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_experts": None,
    "n_routed_experts": 6,
    "norm_topk_prob": True,
}
TENSOR_2 = "--tensor-model-parallel-size 2 --sequence-parallel"
ENGINE = "--rollout-engine sglang --sglang-url http://localhost:30000"


@pytest.fixture
def given(base):
    """A command line with a mixture of experts, whose config.json has more fields."""

    def make(**fields):
        model = {name: value for name, value in {**MODEL, **fields}.items() if value is not None}
        Path("model", "config.json").write_text(json.dumps(model))
        return base

    return make


@pytest.mark.parametrize(
    ("fields", "flags", "ranks", "message"),
    [
        (
            {},
            "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
            2,
            "--tensor-model-parallel-size is 2 but megatron-core trains mixtures of experts over several "
            "tensor-parallel ranks only with --sequence-parallel; add it.",
        ),
        (
            {},
            "--share-prompts",
            1,
            "--share-prompts is on but the model is a mixture of experts, whose routing is recorded, replayed and "
            "counted for each sample; remove it.",
        ),
        (
            {},
            "--expert-model-parallel-size 4",
            4,
            "--expert-model-parallel-size is 4 but the model's number of experts is 6; choose a divisor of it.",
        ),
        (
            {},
            "--expert-tensor-parallel-size 4",
            4,
            "--expert-tensor-parallel-size is 4 but the model's moe_intermediate_size is 18; choose a divisor of it.",
        ),
        (
            {},
            TENSOR_2.replace("2", "4"),
            4,
            "--expert-tensor-parallel-size is 4 but the model's moe_intermediate_size is 18; choose a divisor of it.",
        ),
        (
            {**QWEN2, "shared_expert_intermediate_size": 25},
            TENSOR_2,
            2,
            "--tensor-model-parallel-size is 2 but the model's inner size of the shared expert is 25; choose a divisor "
            "of it.",
        ),
        (
            {},
            f"{TENSOR_2} --expert-model-parallel-size 2",
            2,
            "WORLD_SIZE is 2 but --expert-model-parallel-size × --expert-tensor-parallel-size (unset: "
            "--tensor-model-parallel-size) × --pipeline-model-parallel-size is 4; start a multiple of that with "
            "torchrun --nproc-per-node, or lower one of them.",
        ),
        (
            {"tie_word_embeddings": True},
            ENGINE,
            1,
            "--hf-checkpoint is 'model', whose config.json has tie_word_embeddings, which SGLang ignores for mixtures "
            "of experts, so that it would sample from another model; give a checkpoint with an output layer of its "
            "own, or use --rollout-engine local.",
        ),
        (
            {"mlp_only_layers": [0]},
            ENGINE,
            1,
            "--hf-checkpoint is 'model', 3 of whose 4 layers have experts, but SGLang makes experts of all layers of "
            "this family, so that it would sample from another model; give a checkpoint without dense layers, or use "
            "--rollout-engine local.",
        ),
        (
            {"decoder_sparse_step": 2},
            ENGINE,
            1,
            "--hf-checkpoint is 'model', 2 of whose 4 layers have experts, but SGLang makes experts of all layers of "
            "this family, so that it would sample from another model; give a checkpoint without dense layers, or use "
            "--rollout-engine local.",
        ),
        (
            {"num_experts_per_tok": 1, "norm_topk_prob": True},
            "",
            1,
            "model/config.json has norm_topk_prob true with num_experts_per_tok 1: every expert is weighted by 1 and "
            "the router has no gradient; use a checkpoint with norm_topk_prob false or with several experts per token.",
        ),
        ({"num_experts_per_tok": 7}, "", 1, "model/config.json has num_experts_per_tok 7, of 6 experts."),
        (
            {"model_type": "qwen3"},
            "",
            1,
            "model/config.json has model_type 'qwen3', which does not match Qwen3MoeForCausalLM.",
        ),
        (
            {**GLM, "first_k_dense_replace": -1},
            "",
            1,
            "model/config.json has first_k_dense_replace -1, which must be 0 or more.",
        ),
        (
            {**GLM, "norm_topk_prob": False},
            "",
            1,
            "model/config.json has norm_topk_prob False with num_experts_per_tok 2, which is not supported.",
        ),
        (
            {**GLM, "n_group": 4, "topk_group": 1},
            "",
            1,
            "model/config.json has n_group 4 and topk_group 1, which do not fit 2 of 6 experts.",
        ),
        (
            {**GLM, "n_group": 2, "topk_group": 2},
            "",
            1,
            "model/config.json has topk_group 2 with num_experts_per_tok 2, but the ratio must be 2.",
        ),
        (
            {"num_experts": 0},
            "",
            1,
            "--hf-checkpoint is 'model', whose config.json has num_experts 0, which must be a whole number above 0.",
        ),
        (
            {**GLM, "routed_scaling_factor": -1},
            "",
            1,
            "--hf-checkpoint is 'model', whose config.json has routed_scaling_factor -1, which must be a number above "
            "0.",
        ),
    ],
    ids=[
        "tensor without sequence parallelism",
        "shared prompts",
        "experts over ranks",
        "an expert over ranks",
        "an expert over tensor-parallel ranks",
        "a shared expert over ranks",
        "ranks",
        "sglang, tied",
        "sglang, first layer dense",
        "sglang, every second layer sparse",
        "one expert per token, normalized",
        "more experts per token than there are",
        "the type of a dense model",
        "dense layers before the first",
        "sigmoid scores as they are",
        "groups of experts that do not fit",
        "more experts per group than two",
        "no experts",
        "a negative scale",
    ],
)
def test_what_cannot_work_is_refused(given, fields, flags, ranks, message):
    assert refusal(given(**fields) + flags, ranks) == message


@pytest.mark.parametrize(
    ("fields", "flags", "ranks"),
    [
        ({}, f"{TENSOR_2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", 2),
        ({}, "--expert-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2", 4),
        ({"tie_word_embeddings": True, "mlp_only_layers": [1]}, "", 1),
        ({}, ENGINE, 1),
        (GLM, ENGINE, 1),
        ({"num_experts": None, "num_local_experts": 6}, "--expert-model-parallel-size 3", 3),
    ],
    ids=["tensor", "context and pipeline", "tied and mixed", "sglang", "sglang, dense layers of glm", "another name"],
)
def test_what_works_is_accepted(given, fields, flags, ranks):
    samples = "--rollout-batch-size 6 "
    assert configured(given(**fields) + samples + flags, ranks).megatron.hf_checkpoint == "model"


def test_a_dense_model_may_have_its_experts_on_one_rank(base):
    assert configured(base + "--expert-tensor-parallel-size 1").megatron.expert_tensor_parallel_size == 1
    assert refusal(base + "--expert-tensor-parallel-size 2") == (
        "--expert-tensor-parallel-size is 2 but the model has no experts; leave it at 1."
    )
