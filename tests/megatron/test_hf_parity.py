"""Every supported family against Hugging Face: logits, and weights there and back, at tensor-parallel size 1 and 2."""

from pathlib import Path

import pytest

from slime_tis.hf_directory import ARCHITECTURES
from slime_tis.megatron.architecture import FAMILIES
from tests.checkpoints import make_checkpoint
from tests.megatron.parity_worker import compare_all
from tests.runs import free_port, spawn

# A vocabulary that 2 does not divide, so that the padding of a tensor-parallel vocabulary is in play.
CASES = {
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "llama": {
        "vocab_size": 67,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_and_weights_are_those_of_transformers(ranks: int, tmp_path: Path) -> None:
    for family, sizes in CASES.items():
        make_checkpoint(tmp_path / family, family, **sizes)
    spawn(compare_all, (ranks, free_port(), str(tmp_path)), ranks)
    assert len(list(tmp_path.glob("*/parity_*"))) == ranks * len(CASES)


def test_the_command_line_accepts_the_families_that_can_be_built() -> None:
    assert set(ARCHITECTURES) == set(FAMILIES)
