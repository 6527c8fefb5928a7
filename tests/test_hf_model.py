"""Hugging Face checkpoints that load completely, and those that do not."""

import json
import math
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_tis.analysis.diagnosis.rescore import load_model as load_for_diagnosis
from slime_tis.trainer.engines.local.load_model import load_model as load_for_sampling
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.faults.test_hostile_files import Evil


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A checkpoint of each family, with and without tied embeddings."""
    directory = tmp_path_factory.mktemp("models")
    return {
        (family, tied): make_checkpoint(
            directory / f"{family}_{tied}", family, tie_word_embeddings=tied
        )
        for family in FAMILIES
        for tied in (False, True)
    }


def edit_tensors(model, edit):
    weights = load_file(model / "model.safetensors")
    edit(weights)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def edit_config(model, **fields):
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


OUTPUT = "model.layers.1.self_attn.o_proj.weight"


def remove(weights):
    del weights[OUTPUT]


def remove_many(weights):
    for name in [name for name in weights if name.startswith("model.layers.1.")]:
        del weights[name]


def rename(weights):
    weights["model.layers.1.attention.o_proj.weight"] = weights.pop(OUTPUT)


def add(weights):
    weights["v_head.weight"] = torch.zeros(1, 32)


def make_nan(weights):
    weights[OUTPUT][0, 0] = math.nan


def make_infinite(weights):
    weights["model.norm.weight"][0] = -math.inf


def make_narrow(weights):
    weights[OUTPUT] = weights[OUTPUT][:, :8].contiguous()


INCOMPLETE = {
    remove: f"lacks {OUTPUT}; give a complete checkpoint",
    remove_many: "lacks model.layers.1.input_layernorm.weight, .* and .* more; give",
    rename: f"lacks {OUTPUT}; give a complete checkpoint",
    add: "has tensors that .* does not have: v_head.weight; give",
    make_nan: f"holds NaN or infinity in {OUTPUT}; give",
    make_infinite: "holds NaN or infinity in model.norm.weight; give",
    make_narrow: f"has tensors of another shape: {OUTPUT}; give",
}
"""Edits of the tensors, and the message."""

LOADERS = {
    "diagnose": lambda path: load_for_diagnosis(str(path)),
    "local engine": lambda path: load_for_sampling(path, torch.float32),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe"])
@pytest.mark.parametrize("edit", INCOMPLETE, ids=lambda edit: edit.__name__)
def test_an_incomplete_checkpoint_is_refused(edit, family, loader, models, tmp_path, capfd):
    shutil.copytree(models[family, False], tmp_path / "model")
    edit_tensors(tmp_path / "model", edit)
    with pytest.raises(ValueError, match=INCOMPLETE[edit]) as error:
        LOADERS[loader](tmp_path / "model")
    assert str(tmp_path / "model") in str(error.value)
    assert capfd.readouterr() == ("", "")  # without transformers' table


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_complete_checkpoint_loads(tied, family, loader, models):
    assert LOADERS[loader](models[family, tied]).config.tie_word_embeddings is tied


ADDED = {
    "an output layer beside tied embeddings": lambda weights: weights.update(
        {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    ),
    "rotary frequencies of old checkpoints": lambda weights: weights.update(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    ),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", ADDED)
def test_tensors_that_change_nothing_are_no_alarm(name, loader, models, tmp_path):
    shutil.copytree(models["llama", True], tmp_path / "model")
    edit_tensors(tmp_path / "model", ADDED[name])
    LOADERS[loader](tmp_path / "model")


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("model_type", ["gpt2", "bert", "llama", "mamba"])
def test_another_model_type_is_refused(model_type, loader, models, tmp_path):
    shutil.copytree(models["qwen3", False], tmp_path / "model")
    edit_config(tmp_path / "model", model_type=model_type)
    with pytest.raises(ValueError, match="model"):
        LOADERS[loader](tmp_path / "model")


@pytest.mark.parametrize("loader", LOADERS)
def test_a_pickled_checkpoint_runs_no_code(loader, models, tmp_path):
    shutil.copytree(models["qwen3", False], tmp_path / "model")
    os.remove(tmp_path / "model" / "model.safetensors")
    torch.save(
        {"model.norm.weight": Evil(tmp_path / "ran")}, tmp_path / "model" / "pytorch_model.bin"
    )
    with pytest.raises(ValueError, match="which are never loaded") as error:
        LOADERS[loader](tmp_path / "model")
    assert not (tmp_path / "ran").exists()
    assert "weights_only" not in str(error.value)
