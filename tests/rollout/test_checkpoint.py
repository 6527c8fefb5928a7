"""Checkpoint directories: what is read from them, and what is refused."""

import pytest
import torch

from slime_tis.trainer.engines.local.checkpoint import eos_token_ids, load_model, load_tokenizer
from tests.checkpoints import EOS, make_checkpoint


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    for load in (load_tokenizer, lambda path: load_model(path, torch.float32)):
        with pytest.raises(ValueError) as refusal:
            load(tmp_path / "none")
        assert str(refusal.value) == (
            f"--hf-checkpoint is '{tmp_path / 'none'}', which has no config.json; give a directory that holds a "
            "Hugging Face checkpoint."
        )


def test_eos_is_the_generation_configurations_or_the_tokenizers(tmp_path):
    path = make_checkpoint(tmp_path, "llama")
    model, tokenizer = load_model(path, torch.float32), load_tokenizer(path)
    for configured, expected in ((7, (7,)), ([7, 9], (7, 9)), (None, (EOS,))):
        model.generation_config.eos_token_id = configured
        assert eos_token_ids(model, tokenizer) == expected
