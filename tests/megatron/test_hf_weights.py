"""Tensors of a Hugging Face checkpoint that are there, tied, or missing."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_tis.trainer.megatron.hf_weights import HfTensors
from tests.checkpoints import make_checkpoint


def test_an_output_layer_is_tied_where_the_config_says_so_and_otherwise_has_to_be_there(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embeddings, head = tensors["model.embed_tokens.weight"], tensors.pop("lm_head.weight")
    assert torch.equal(HfTensors(tmp_path, tied=False)["lm_head.weight"], head)
    save_file(tensors, file, {"format": "pt"})
    assert torch.equal(HfTensors(tmp_path, tied=True)["lm_head.weight"], embeddings)
    message = f"{re.escape(str(tmp_path))} has no tensor lm_head.weight, and its config.json does not tie it to"
    with pytest.raises(ValueError, match=message):
        HfTensors(tmp_path, tied=False)["lm_head.weight"]
    with pytest.raises(ValueError, match=r"has no tensor model.layers.9.x; the checkpoint is incomplete"):
        HfTensors(tmp_path, tied=True)["model.layers.9.x"]
