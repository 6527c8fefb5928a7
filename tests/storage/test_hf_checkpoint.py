"""Checkpoints that are written: shards, index, configuration; what is copied, and what a failure leaves."""

import json

import pytest
import torch
from safetensors.torch import load_file

from slime_tis.trainer.storage.hf_checkpoint import write_hf_checkpoint
from tests.runs import largest_file


@pytest.fixture
def like(tmp_path):
    """A checkpoint directory with every kind of file."""
    source = tmp_path / "like"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama", "torch_dtype": "float16"}')
    for name in (
        *("tokenizer.model", "merges.txt", "chat_template.jinja", "model-00001-of-00002.safetensors"),
        *("qwen.tiktoken", "tokenization_qwen.py"),
        *("model.safetensors.index.json", "pytorch_model.bin", ".slime_tis_export.json", ".gitattributes"),
    ):
        (source / name).write_text(name)
    (source / "original.json").mkdir()
    return source


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "written").mkdir()
    return tmp_path / "written"


SIDE = [
    *("chat_template.jinja", "config.json", "merges.txt", "qwen.tiktoken", "tokenization_qwen.py", "tokenizer.model")
]


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_one_file_and_what_lies_beside_the_weights(directory, like):
    weights = {"a": torch.tensor([1.0, -2.5]), "b": torch.zeros(2, 3)}
    write_hf_checkpoint(directory, weights.items(), like=like, shard_bytes=32)
    assert names(directory) == sorted([*SIDE, "model.safetensors"])
    assert (directory / "merges.txt").read_text() == "merges.txt"
    assert json.loads((directory / "config.json").read_text()) == {"model_type": "llama", "dtype": "float32"}
    loaded = load_file(directory / "model.safetensors")
    assert loaded["a"].tolist() == [1.0, -2.5] and loaded["b"].shape == (2, 3)


def test_shards_hold_at_most_their_bytes_but_for_a_larger_tensor(directory, like):
    sizes = {"a": 10, "b": 10, "c": 30, "d": 5, "e": 15}  # elements of 2 bytes, 40 bytes per file
    weights = {name: torch.full((size,), 1.0, dtype=torch.bfloat16) for name, size in sizes.items()}
    write_hf_checkpoint(directory, weights.items(), like=like, shard_bytes=40)
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names(directory) == sorted([*SIDE, *files, "model.safetensors.index.json"])
    assert [sorted(load_file(directory / file)) for file in files] == [["a", "b"], ["c"], ["d", "e"]]
    assert json.loads((directory / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 140},
        "weight_map": {"a": files[0], "b": files[0], "c": files[1], "d": files[2], "e": files[2]},
    }
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"


def test_views_that_share_memory_are_written_as_tensors_of_their_own(directory, like):
    whole = torch.arange(6.0).view(2, 3)
    write_hf_checkpoint(directory, [("row", whole[0]), ("transposed", whole.T)], like=like, shard_bytes=100)
    loaded = load_file(directory / "model.safetensors")
    assert loaded["row"].tolist() == [0.0, 1.0, 2.0]
    assert loaded["transposed"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_a_full_disk_is_an_error_of_the_system_and_the_rest_is_left_to_iterate(directory, like):
    given = []

    def weights():
        for i in range(4):
            given.append(i)
            yield f"w{i}", torch.zeros(100_000, dtype=torch.uint8)

    stream = weights()
    with largest_file(50_000), pytest.raises(OSError, match="File too large"):
        write_hf_checkpoint(directory, stream, like=like, shard_bytes=100_000)
    assert given == [0, 1]
    assert [name for name, _ in stream] == ["w2", "w3"]
