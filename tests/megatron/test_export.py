"""Exports: complete or absent, loadable by transformers, and never over unknown files."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_tis.trainer.megatron import checkpoint
from slime_tis.trainer.megatron.checkpoint import save_hf
from slime_tis.trainer.megatron.engine import TrainingEngine
from slime_tis.trainer.options.megatron import MegatronConfig


@pytest.fixture(scope="module")
def engine(model, parallel):
    return TrainingEngine(MegatronConfig(hf_checkpoint=str(model)), parallel, temperature=1.0, total_steps=10)


@pytest.mark.parametrize("shard_bytes", [2**40, 10_000])
def test_the_hugging_face_directory_loads_with_the_weights(shard_bytes, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    assert save_hf(tmp_path / "hf", engine) == tmp_path / "hf"
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", shard_bytes)
    save_hf(tmp_path / "hf", engine)  # again, over the first
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters())
    for name, tensor in engine.named_hf_tensors():
        assert torch.equal(loaded[name], tensor)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").get_vocab()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float32"
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (shard_bytes == 10_000)
    listed = json.loads((tmp_path / "hf" / ".slime_tis_export.json").read_text())["files"]
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {*listed, ".slime_tis_export.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_link_to_an_export_stays_a_link(engine, tmp_path):
    save_hf(tmp_path / "real", engine)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "model.safetensors").write_bytes(b"old")
    assert save_hf(tmp_path / "link", engine) == tmp_path / "real"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "model.safetensors").stat().st_size > 10_000


def test_a_model_that_is_itself_an_export_is_copied_without_its_marker(engine, tmp_path):
    save_hf(tmp_path / "first", engine)
    config = MegatronConfig(hf_checkpoint=str(tmp_path / "first"))
    save_hf(tmp_path / "hf", TrainingEngine(config, engine.parallel, temperature=1.0, total_steps=1))
    listed = json.loads((tmp_path / "hf" / ".slime_tis_export.json").read_text())["files"]
    assert "model.safetensors" in listed and ".slime_tis_export.json" not in listed
