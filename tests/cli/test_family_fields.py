"""Fields of config.json that a family reads, with values that transformers accepts by itself."""

import json

import pytest

from slime_tis.families import FAMILIES as FAMILIES_OF_TRAINING
from slime_tis.hf_directory import load_config, moe_layers, read_model_config
from slime_tis.trainer.cli.file_checks import layout_problems
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.port.published_models import name_problem
from slime_tis.unsupported_families import UNSUPPORTED
from tests.checkpoints import FAMILIES, FURTHER_SIZES, SIZES, architecture_of_family

WINDOWS = ["full_attention", "sliding_attention"]
REFUSED = {
    "one flag for two layers": ("smollm3", {"no_rope_layers": [1]}, "1 entries in no_rope_layers"),
    "one type for two layers": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse"]},
        "1 entries in mlp_layer_types",
    ),
    "a window of no token": ("mistral", {"sliding_window": 0}, "sliding_window 0"),
    "a window of -1 tokens": ("gemma3", {"sliding_window": -1}, "sliding_window -1"),
    "windows without a size": (
        "gpt_oss",
        {"layer_types": WINDOWS, "sliding_window": None},
        "no sliding_window",
    ),
    "no size of values": ("deepseek_v3", {"v_head_dim": None}, "no v_head_dim"),
    "no number of chosen experts": (
        "deepseek_v2",
        {"num_experts_per_tok": None},
        "no num_experts_per_tok, which DeepSeek-V2-Lite needs",
    ),
    "no groups of experts": ("deepseek_v3", {"n_group": None}, "no n_group"),
    "no first sparse layer": (
        "deepseek_v3",
        {"first_k_dense_replace": None},
        "no first_k_dense_replace",
    ),
    "heads of values that keys do not divide": (
        "qwen3_next",
        {"linear_num_value_heads": 3},
        "linear_num_value_heads 3, which must be a multiple of linear_num_key_heads 2",
    ),
    "a recurrence in a family without one": (
        "qwen3",
        {"layer_types": ["linear_attention", "full_attention"]},
        "'linear_attention' in layer_types",
    ),
    "dense layers before the first": (
        "deepseek_v2",
        {"first_k_dense_replace": -1},
        "first_k_dense_replace -1",
    ),
    "windows in some layers": (
        "mistral",
        {"layer_types": WINDOWS, "sliding_window": 8},
        "'full_attention' in layer_types",
    ),
    "a bias of the output": ("seed_oss", {"attention_out_bias": True}, "attention_out_bias True"),
    "attention without biases": ("gpt_oss", {"attention_bias": False}, "attention_bias false"),
    "no selection bias": ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
    "a scale of experts": (
        "qwen3_moe",
        {"routed_scaling_factor": 2.5},
        "routed_scaling_factor 2.5",
    ),
    "another type of the model": (
        "mistral",
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8},
        "'mistral', which transformers reads as 'ministral'",
    ),
}


def write_config(directory, family, fields):
    """Writes config.json of a tiny model with other values of some fields."""
    config_class, _ = FAMILIES[family]
    config = config_class(**{**SIZES, **FURTHER_SIZES.get(family, {})}).to_dict()
    config["architectures"] = [architecture_of_family(family)]
    (directory / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(("family", "fields", "words"), REFUSED.values(), ids=REFUSED)
def test_what_training_cannot_read_is_refused(family, fields, words, tmp_path):
    write_config(tmp_path, family, fields)
    with pytest.raises(ValueError, match=words):
        read_model_config(tmp_path)
        load_config(tmp_path)


def test_a_window_of_0_that_is_off_is_accepted(tmp_path):
    # transformers writes this value
    write_config(tmp_path, "qwen2_moe", {"sliding_window": 0, "use_sliding_window": False})
    read_model_config(tmp_path)
    assert load_config(tmp_path).sliding_window == 0


def test_key_value_heads_of_null_are_as_many_as_heads(tmp_path):
    write_config(tmp_path, "phi3", {"num_key_value_heads": None})
    model = read_model_config(tmp_path)
    assert load_config(tmp_path).num_key_value_heads == SIZES["num_attention_heads"]
    config = MegatronConfig(hf_checkpoint=str(tmp_path), tensor_model_parallel_size=2)
    assert list(layout_problems(config, model, None, 2)) == []


def test_types_of_layers_decide_without_a_first_sparse_layer(tmp_path):
    types = ["dense", "sparse"]
    fields = {"mlp_layer_types": types, "first_k_dense_replace": None}
    write_config(tmp_path, "glm4_moe_lite", fields)
    assert moe_layers(load_config(tmp_path)) == [1]


ALTERNATIVES = {
    "Qwen3_5ForConditionalGeneration": "It reads images.* Train the text model of a dense Qwen3.5",
    "Qwen3_5MoeForConditionalGeneration": "only dense text models.* Train Qwen3-Next",
    "Qwen3_5MoeForCausalLM": "only dense text models.* Train Qwen3-Next",
}


@pytest.mark.parametrize(("architecture", "words"), ALTERNATIVES.items(), ids=ALTERNATIVES)
def test_siblings_of_a_family_are_refused_with_an_alternative(architecture, words, tmp_path):
    write_config(tmp_path, "qwen3", {"architectures": [architecture]})
    with pytest.raises(ValueError, match=words):
        read_model_config(tmp_path)


def test_port_gives_the_reason_for_models_with_images():
    assert "It reads images" in name_problem("/models/Qwen3.5-35B-A3B")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_refused_family_is_not_supported(name):
    assert name not in FAMILIES_OF_TRAINING
