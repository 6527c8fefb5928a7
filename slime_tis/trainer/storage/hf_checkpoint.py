"""Writes weights as a Hugging Face checkpoint directory, with the configuration and tokenizer of another one."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slime_tis.hf_directory import INDEX, SINGLE

SIDE_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
"""Suffixes of the files that a checkpoint has beside its weights: configuration, tokenizer, chat template and code."""

SHARD_BYTES = 5 * 2**30
"""Size of a file of weights, as on the Hugging Face hub."""


def side_files(directory: Path) -> list[Path]:
    """Lists the files of a checkpoint that `write_hf_checkpoint` copies.

    These are the files with one of the suffixes in `SIDE_FILES`, except hidden ones and indices of weights.
    """
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_file()
        and path.suffix in SIDE_FILES
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
    )


def write_hf_checkpoint(
    directory: Path, named_tensors: Iterable[tuple[str, Tensor]], *, like: Path, shard_bytes: int
) -> None:
    """Writes a checkpoint that transformers, SGLang and every other reader of safetensors loads.

    Weights are copied to the CPU one shard at a time. Whoever needs the directory to be complete or absent writes it
    under another name and renames it, as `storage.exports` does.

    Args:
        directory: an existing directory without weights.
        named_tensors: weights under their Hugging Face names, whole tensors on any device; consumed lazily.
        like: checkpoint directory whose configuration and tokenizer are copied; `dtype` of config.json becomes the
            type of the matrices.
        shard_bytes: size that a file of weights does not exceed, except for a single larger tensor.

    Raises:
        ValueError: there are no weights.
        OSError: a file cannot be written; `named_tensors` is left where it is, and a caller for whom iterating it is
            a collective has to exhaust it.
    """
    for path in side_files(like):
        shutil.copyfile(path, directory / path.name)
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0
    dtypes: set[torch.dtype] = set()
    of_vectors: set[torch.dtype] = set()
    for name, tensor in named_tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            shards.append(_write_shard(directory, len(shards), shard))
            shard, size = {}, 0
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
        (dtypes if tensor.dim() > 1 else of_vectors).add(tensor.dtype)
        del tensor
    if not shard:
        raise ValueError("there are no weights to write: the model has no parameters.")
    shards.append(_write_shard(directory, len(shards), shard))
    _name_shards(directory, shards, total)
    # Vectors may be more precise than the matrices: the biases of routers are in float32.
    _set_dtype(directory / "config.json", dtypes or of_vectors)


def _write_shard(directory: Path, index: int, tensors: dict[str, Tensor]) -> list[str]:
    """Writes one file of weights and returns the names in it."""
    try:
        save_file(tensors, _partial(directory, index), metadata={"format": "pt"})
    except SafetensorError as error:  # what the library raises where the disk is full
        raise OSError(str(error)) from error
    return list(tensors)


def _name_shards(directory: Path, shards: list[list[str]], total: int) -> None:
    """Gives the files their final names, which contain the number of files, and writes the index of several."""
    if len(shards) == 1:
        _partial(directory, 0).rename(directory / SINGLE)
        return
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(files):
        _partial(directory, i).rename(directory / file)
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _partial(directory: Path, index: int) -> Path:
    return directory / f"part-{index}.safetensors"


def _set_dtype(config_file: Path, dtypes: set[torch.dtype]) -> None:
    """Writes the type of the weights into config.json, where all have the same."""
    if len(dtypes) > 1:
        return
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the field's name before transformers 4.56
    config["dtype"] = str(dtypes.pop()).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
