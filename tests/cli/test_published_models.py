"""Sizes of published models: their number of parameters is that of the published files."""

import json
import math

import pytest

from slime_tis.hf_directory import load_config
from slime_tis.hf_tensors import expected_tensors
from slime_tis.trainer.port.published_models import model_from_script

PARAMETERS = {
    "Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "phi-4": 14_659_507_200,
    "SmolLM3-3B": 3_075_098_624,
    "OLMo-2-1124-7B": 7_298_617_344,
    "GLM-4-9B-0414": 9_400_279_040,
    "gemma-3-1b-it": 999_885_952,
    "gpt-oss-120b": 116_829_156_672,
    # without its layers for multi-token prediction
    "Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    # without its layer for multi-token prediction
    "DeepSeek-V3": 671_026_419_200,
    "Kimi-K2-Instruct": 1_026_408_232_448,
}


def test_a_distilled_model_has_the_sizes_of_its_own_family():
    model = model_from_script({}, "/models/DeepSeek-R1-0528-Qwen3-8B")
    assert model["architectures"] == ["Qwen3ForCausalLM"]


def test_the_sizes_of_a_distilled_model_are_unknown():
    assert model_from_script({}, "/models/DeepSeek-R1-Distill-Llama-8B") is None


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_parameters_of_published_models(name, tmp_path):
    model = model_from_script({}, f"/models/{name}")
    (tmp_path / "config.json").write_text(json.dumps(model))
    total = sum(math.prod(shape) for _, shape in expected_tensors(load_config(tmp_path)))
    assert total == PARAMETERS[name]
