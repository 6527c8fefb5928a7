"""Writes a Hugging Face checkpoint directory.

Its configuration and tokenizer are those of another checkpoint.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slime_tis.hf_tensors import INDEX, SINGLE

SIDE_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
"""Suffixes of files other than weights: configuration, tokenizer, chat template and code."""

SHARD_BYTES = 5 * 2**30
"""Size of a file of weights, as on the Hugging Face hub."""


def side_files(directory: Path) -> list[Path]:
    """Returns the files that `write_hf_checkpoint` copies, sorted.

    These are `SIDE_FILES` without hidden files and indices of weights.
    """
    files = []
    for path in directory.iterdir():
        is_hidden = path.name.startswith(".")
        is_index = path.name.endswith(".index.json")
        if path.is_file() and path.suffix in SIDE_FILES and not is_hidden and not is_index:
            files.append(path)
    return sorted(files)


def write_hf_checkpoint(
    directory: Path, named_tensors: Iterable[tuple[str, Tensor]], *, like: Path, shard_bytes: int
) -> None:
    """Writes a checkpoint that transformers, SGLang and other readers of safetensors load.

    Args:
        directory: Existing directory without weights.
        named_tensors: Tensors by Hugging Face name, consumed lazily; after an OSError the caller
            must exhaust them if iterating is a collective.
        like: Checkpoint whose configuration and tokenizer are copied; config.json gets the `dtype`
            of the matrices.
        shard_bytes: Maximum size of a file of weights, except for a single larger tensor.
    """
    for path in side_files(like):
        shutil.copyfile(path, directory / path.name)
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = 0
    total = 0
    matrix_dtypes: set[torch.dtype] = set()
    vector_dtypes: set[torch.dtype] = set()
    for name, tensor in named_tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            shards.append(_write_shard(directory, len(shards), shard))
            shard = {}
            size = 0
        # A copy, because safetensors refuses tensors that share memory, such as views of a buffer.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
        if tensor.dim() > 1:
            matrix_dtypes.add(tensor.dtype)
        else:
            vector_dtypes.add(tensor.dtype)
        del tensor  # frees it on the GPU before the next one is gathered
    shards.append(_write_shard(directory, len(shards), shard))
    _name_shards(directory, shards, total)
    # Vectors may be more precise: the biases of routers are in float32.
    dtypes = matrix_dtypes or vector_dtypes
    if len(dtypes) == 1:
        _write_dtype(directory / "config.json", dtypes.pop())


def _write_dtype(path: Path, dtype: torch.dtype) -> None:
    """Sets the type of the weights in a config.json."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the field's name before transformers 4.56
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_shard(directory: Path, index: int, tensors: dict[str, Tensor]) -> list[str]:
    """Writes one file of weights and returns the names in it."""
    try:
        save_file(tensors, _partial(directory, index), metadata={"format": "pt"})
    except SafetensorError as error:  # raised on a full disk
        raise OSError(str(error)) from error
    return list(tensors)


def _name_shards(directory: Path, shards: list[list[str]], total: int) -> None:
    """Gives the files their final names, and writes the index if there are several.

    The names contain the number of files, which was unknown while they were written.
    """
    if len(shards) == 1:
        _partial(directory, 0).rename(directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        _partial(directory, i).rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _partial(directory: Path, index: int) -> Path:
    return directory / f"part-{index}.safetensors"
