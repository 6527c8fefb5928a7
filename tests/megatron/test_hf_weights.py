"""Present, tied and missing tensors of a Hugging Face checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_tis.trainer.megatron.hf_weights import HfTensors
from tests.checkpoints import make_checkpoint


def test_an_untied_output_layer_must_be_present(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embeddings, head = tensors["model.embed_tokens.weight"], tensors.pop("lm_head.weight")
    assert torch.equal(HfTensors(tmp_path, tied=False)["lm_head.weight"], head)
    save_file(tensors, file, {"format": "pt"})
    assert torch.equal(HfTensors(tmp_path, tied=True)["lm_head.weight"], embeddings)
    with pytest.raises(ValueError, match="does not tie it"):
        HfTensors(tmp_path, tied=False)["lm_head.weight"]
    with pytest.raises(ValueError, match="the checkpoint is incomplete"):
        HfTensors(tmp_path, tied=True)["model.layers.9.x"]
