"""Mixtures of experts in the in-process engine: transformers has experts stacked, files and updates one by one."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_tis.trainer.engines.local.checkpoint import (
    linear_weight_names,
    load_model,
    load_tokenizer,
    weights_by_file_name,
)
from slime_tis.trainer.engines.local.engine import LocalEngine
from slime_tis.trainer.engines.weight_rounding import round_fp8, round_int8
from tests.checkpoints import make_checkpoint

FAMILIES = ("qwen3_moe", "qwen2_moe", "glm4_moe")
TOKENS = [1, 3, 14, 15, 9, 26, 5, 35, 8]
SIZES = {"num_hidden_layers": 3}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """Two checkpoints of a family, which differ in their weights."""
    root = tmp_path_factory.mktemp(request.param)
    return [make_checkpoint(root / str(seed), request.param, seed=seed, **SIZES) for seed in range(2)]


def tensors(path):
    return load_file(path / "model.safetensors")


def make_engine(path, precision="fp32"):
    return LocalEngine(path, load_tokenizer(path), precision=precision)


def scores(engine):
    return engine.prompt_log_probs(TOKENS)["the local engine"]


def test_weights_have_the_names_and_values_of_the_file(pair):
    model, file = load_model(pair[0], torch.float32), tensors(pair[0])
    weights = weights_by_file_name(model)
    assert weights.keys() == file.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, file[name]), name
    with torch.no_grad():
        weights["model.layers.2.mlp.experts.3.up_proj.weight"].fill_(7.0)
    stacked = model.get_parameter("model.layers.2.mlp.experts.gate_up_proj")
    assert (stacked[3] == 7.0).all(1).tolist() == [False] * 24 + [True] * 24


def test_an_update_replaces_every_weight(pair):
    first, second = (make_engine(path) for path in pair)
    assert scores(first) != scores(second)
    first.update_weights(tensors(pair[1]).items, version=1)
    assert scores(first) == scores(second)


@pytest.mark.parametrize(("precision", "rounding"), [("fp8", round_fp8), ("int8", round_int8)], ids=["fp8", "int8"])
def test_eight_bit_engines_round_experts_and_leave_routers(pair, tmp_path, precision, rounding):
    file = tensors(pair[0])
    rounded = {
        name: rounding(weight) if re.search(r"_proj\.weight$", name) else weight  # not gate.weight, not lm_head
        for name, weight in file.items()
    }
    shutil.copytree(pair[0], tmp_path, dirs_exist_ok=True)
    save_file(rounded, tmp_path / "model.safetensors", {"format": "pt"})
    engine, expected = make_engine(pair[0], precision), scores(make_engine(tmp_path))
    for _ in range(2):  # as loaded, and as updated
        assert scores(engine) == expected
        engine.update_weights(file.items, version=1)
    names = linear_weight_names(load_model(pair[0], torch.float32))
    assert names == {name for name in file if name.endswith("_proj.weight")}


def test_weights_in_a_checkpoint_are_taken_up_as_they_are(pair, tmp_path):
    first, second = (make_engine(path, "int8") for path in pair)
    first.save_weights(tmp_path)
    second.load_weights(tmp_path, version=4)
    assert scores(second) == scores(first) and second.weight_version == 4
