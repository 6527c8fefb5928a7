"""Mixtures of experts: impossible layouts and engines are refused before anything is built."""

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
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 6,
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


# fields of config.json, flags, ranks, part of the message
REFUSED = {
    "tensor without sequence parallelism": (
        {},
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
        2,
        "--sequence-parallel",
    ),
    "shared prompts": ({}, "--share-prompts", 1, "--share-prompts"),
    "experts over ranks": ({}, "--expert-model-parallel-size 4", 4, "number of experts is 6"),
    "an expert over ranks": (
        {},
        f"{TENSOR_2} --expert-tensor-parallel-size 4",
        4,
        "moe_intermediate_size is 18",
    ),
    "a shared expert over ranks": (
        QWEN2 | {"shared_expert_intermediate_size": 25},
        TENSOR_2,
        2,
        "shared expert is 25",
    ),
    "experts with biases over ranks": (
        GPT_OSS,
        TENSOR_2,
        2,
        "experts with biases need 1",
    ),
    "ranks": ({}, f"{TENSOR_2} --expert-model-parallel-size 2", 2, "world size is 2"),
    "sglang, tied": ({"tie_word_embeddings": True}, ENGINE, 1, "ties embeddings"),
    "sglang, first layer dense": ({"mlp_only_layers": [0]}, ENGINE, 1, "dense layers"),
    "one expert per token, normalized": (
        {"num_experts_per_tok": 1, "norm_topk_prob": True},
        "",
        1,
        "norm_topk_prob",
    ),
    "more experts per token than there are": ({"num_experts_per_tok": 7}, "", 1, "of 6 experts"),
    "the type of a dense model": ({"model_type": "qwen3"}, "", 1, "'qwen3'"),
    "dense layers before the first": (
        GLM | {"first_k_dense_replace": -1},
        "",
        1,
        "first_k_dense_replace -1",
    ),
    "one expert per token of gpt-oss": (
        GPT_OSS | {"num_experts_per_tok": 1},
        "",
        1,
        "num_experts_per_tok 1",
    ),
    "groups that do not fit": (GLM | {"n_group": 4, "topk_group": 1}, "", 1, "n_group 4"),
    "no experts": ({"num_experts": 0}, "", 1, "num_experts"),
}


@pytest.mark.parametrize(("fields", "flags", "ranks", "part"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused(given, fields, flags, ranks, part):
    assert part in refusal(given(**fields) + flags, ranks)


@pytest.mark.parametrize(
    ("fields", "flags", "ranks"),
    [
        ({}, f"{TENSOR_2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", 2),
        (
            {},
            (
                "--expert-model-parallel-size 2 --context-parallel-size 2"
                " --pipeline-model-parallel-size 2"
            ),
            4,
        ),
        ({"tie_word_embeddings": True, "mlp_only_layers": [1]}, "", 1),
        ({}, ENGINE, 1),
        (GLM, ENGINE, 1),
        ({"num_experts": None, "num_local_experts": 6}, "--expert-model-parallel-size 3", 3),
    ],
    ids=[
        "tensor",
        "context and pipeline",
        "tied and mixed",
        "sglang",
        "sglang, dense layers of glm",
        "another name",
    ],
)
def test_what_works_is_accepted(given, fields, flags, ranks):
    samples = "--rollout-batch-size 6 "
    assert configured(given(**fields) + samples + flags, ranks).megatron.hf_checkpoint == "model"


def test_a_dense_model_may_have_its_experts_on_one_rank(base):
    assert (
        configured(base + "--expert-tensor-parallel-size 1").megatron.expert_tensor_parallel_size
        == 1
    )
