"""The worker extension of vLLM servers, without vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from slime_tis.trainer.engines.vllm.worker.slime_tis_vllm import WorkerExtension


def worker(**sizes: int) -> WorkerExtension:
    """A worker that serves a model with these sizes."""
    extension = WorkerExtension()
    extension.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(**sizes))
    return extension


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 64, "vocab_size": 16, "max_position_embeddings": 512},
        {"hidden_size": 64, "intermediate_size": 8},
        {},
    ],
    ids=["equal sizes", "an unknown size", "no sizes"],
)
def test_a_server_of_the_same_sizes_is_accepted(config: dict[str, Any]) -> None:
    served = worker(hidden_size=64, vocab_size=16, max_position_embeddings=64)
    assert served.slime_tis_extension(config) == ""


def test_a_different_size_is_named() -> None:
    served = worker(hidden_size=64, vocab_size=16)
    difference = served.slime_tis_extension({"hidden_size": 96, "vocab_size": 16})
    assert difference == "hidden_size is 64, but 96 in --hf-checkpoint"
