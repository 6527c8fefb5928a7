"""Names, shapes and files of the tensors of a Hugging Face checkpoint, without reading weights.

Each ValueError names the file.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from slime_tis.atomic_files import parse_object
from slime_tis.errors import first_line, quoted, quoted_path
from slime_tis.families import delta_net_layers, family_of, layer_weights
from slime_tis.family_weights import MODEL_WEIGHTS, Weight
from slime_tis.hf_directory import load_config, moe_sizes

REQUIRED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
"""Fields of config.json that every model has."""
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the supported types of weights."""
INDEX = "model.safetensors.index.json"
"""File that maps tensor names to safetensors files."""
SINGLE = "model.safetensors"
"""File with all tensors, if there is no index."""
FINGERPRINT_BLOCKS = 64
"""Number of evenly spaced blocks of 4 KiB that `weights_fingerprint` reads per file."""


def tensor_files(directory: str | Path) -> dict[str, Path]:
    """Returns the files by tensor name.

    Raises:
        ValueError: A file is missing, damaged, or outside the directory.
    """
    directory = Path(directory)
    index = directory / INDEX
    if index.is_file():
        return _indexed_files(directory, index)
    single = directory / SINGLE
    if not single.is_file():
        raise ValueError(
            f"{directory} has no {SINGLE} and no {INDEX}; only checkpoints in safetensors are read."
        )
    return dict.fromkeys(tensors_of(single), single)


def weights_fingerprint(directory: str | Path) -> bytes:
    """Returns a SHA-256 of the weight files' sizes and of samples of their content.

    Training changes almost every weight, so a few blocks per file are enough to tell models apart.
    A change of single weights can remain unnoticed.
    """
    digest = hashlib.sha256()
    for path in sorted(set(tensor_files(directory).values())):
        size = path.stat().st_size
        digest.update(str(size).encode())
        with open(path, "rb") as file:
            for number in range(FINGERPRINT_BLOCKS):
                file.seek(size * number // FINGERPRINT_BLOCKS)
                digest.update(file.read(4096))
    return digest.digest()


def check_tensors(directory: str | Path, model: Mapping[str, Any]) -> None:
    """Checks that a checkpoint has all tensors of the model, and reads only the files' headers.

    Raises:
        ValueError: A tensor is missing, or has another shape or an unsupported type.
    """
    for name in REQUIRED_FIELDS:
        if model.get(name) is None:
            raise ValueError(
                f"{Path(directory) / 'config.json'} has no {name}, which every model has."
            )
    files = tensor_files(directory)
    headers: dict[Path, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, shape in expected_tensors(load_config(directory)):
        if name not in files:
            raise ValueError(f"{directory} has no tensor {name}, which its config.json asks for.")
        path = files[name]
        if path not in headers:
            headers[path] = tensors_of(path)
        if name not in headers[path]:
            raise ValueError(f"{path} has no tensor {name}, which {INDEX} says it has.")
        kind, actual = headers[path][name]
        if actual != shape:
            raise ValueError(
                f"{path}: the tensor {name} has the shape {list(actual)}, but by config.json it is"
                f" {list(shape)}."
            )
        if kind not in FLOAT_TYPES:
            raise ValueError(
                f"{path}: the tensor {name} is of type {kind}, not one of {', '.join(FLOAT_TYPES)}."
            )


def expected_tensors(hf: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and shape of every tensor of a model.

    Args:
        hf: transformers' configuration of the model.
    """
    sizes = dimensions(hf)
    for name, weight in MODEL_WEIGHTS.items():
        if name != "output_layer.weight" or not hf.tie_word_embeddings:
            yield from _file_tensors(weight, sizes)
    moe = moe_sizes(hf)
    sparse_layers = () if moe is None else moe.layers
    delta_nets = delta_net_layers(hf)
    for layer in range(hf.num_hidden_layers):
        weights = layer_weights(
            hf, is_sparse=layer in sparse_layers, has_delta_net=layer in delta_nets
        )
        for weight in weights.values():
            for name, shape in _file_tensors(weight, sizes):
                yield f"model.layers.{layer}.{name}", shape


def _file_tensors(
    weight: Weight, sizes: Mapping[str, int]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of the tensors of a weight, for each expert if it belongs to one."""
    for tensor in weight.tensors:
        shape = tuple(sizes[dimension] for dimension in tensor.shape)
        if "{expert}" not in tensor.name:
            yield tensor.name, shape
            continue
        for expert in range(sizes["experts"]):
            yield tensor.name.format(expert=expert), shape


def dimensions(hf: Any) -> dict[str, int]:
    """Returns the sizes of a model that `FileTensor.shape` names."""
    sizes = {
        "one": 1,
        "vocab": hf.vocab_size,
        "hidden": hf.hidden_size,
        "inner": hf.intermediate_size,
        "gate_up": 2 * hf.intermediate_size,
    }
    if family_of(hf).attention.latent:
        sizes |= _latent_dimensions(hf)
    else:
        sizes |= _grouped_dimensions(hf)
    if family_of(hf).attention.has_delta_nets:
        sizes |= _delta_net_dimensions(hf)
    moe = moe_sizes(hf)
    if moe is not None:
        sizes["experts"] = moe.num_experts
        sizes["expert_inner"] = moe.intermediate_size
        sizes["expert_gate_up"] = 2 * moe.intermediate_size
        sizes["shared_inner"] = moe.shared_intermediate_size or 0
    return sizes


def _grouped_dimensions(hf: Any) -> dict[str, int]:
    """Returns the sizes of attention with grouped queries."""
    head = head_size(hf)
    heads = hf.num_attention_heads
    groups = hf.num_key_value_heads
    return {
        "head": head,
        "heads": heads,
        "queries": heads * head,
        "queries_and_gates": 2 * heads * head,
        "keys": groups * head,
        "qkv": (heads + 2 * groups) * head,
    }


def _latent_dimensions(hf: Any) -> dict[str, int]:
    """Returns the sizes of multi-head latent attention."""
    heads = hf.num_attention_heads
    return {
        "query_rank": hf.q_lora_rank or 0,
        "latent_queries": heads * (hf.qk_nope_head_dim + hf.qk_rope_head_dim),
        "rank": hf.kv_lora_rank,
        "rank_and_rotated": hf.kv_lora_rank + hf.qk_rope_head_dim,
        "keys_and_values": heads * (hf.qk_nope_head_dim + hf.v_head_dim),
        "values": heads * hf.v_head_dim,
    }


def _delta_net_dimensions(hf: Any) -> dict[str, int]:
    """Returns the sizes of gated delta nets."""
    keys = hf.linear_num_key_heads * hf.linear_key_head_dim
    values = hf.linear_num_value_heads * hf.linear_value_head_dim
    return {
        "value_heads": hf.linear_num_value_heads,
        "delta_value": hf.linear_value_head_dim,
        "delta_values": values,
        "delta_qkv": 2 * keys + values,
        "delta_qkvz": 2 * keys + 2 * values,
        "delta_ba": 2 * hf.linear_num_value_heads,
        "kernel": hf.linear_conv_kernel_dim,
    }


def positioned_size(hf: Any) -> int:
    """Returns the features of a query head that may have a rotary embedding."""
    if family_of(hf).attention.latent:
        rotated: int = hf.qk_rope_head_dim
        return rotated
    return head_size(hf)


def head_size(hf: Any) -> int:
    """Returns the number of features of a head's output, and with grouped queries of a query."""
    if family_of(hf).attention.latent:
        value_size: int = hf.v_head_dim
        return value_size
    size: int = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return size


def _indexed_files(directory: Path, index: Path) -> dict[str, Path]:
    weight_map = parse_object(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(
            f"{index} has no weight_map, an object that names the file of each tensor."
        )
    paths: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file:
            raise ValueError(
                f"{index} names {quoted(file)} for the tensor {quoted(name)}, which is not a file"
                " name."
            )
        if file not in paths:
            paths[file] = _file_within(directory, index, file)
    return {name: paths[file] for name, file in weight_map.items()}


def _file_within(directory: Path, index: Path, file: str) -> Path:
    """Returns the path of a file in an index.

    Links may lead outside of the directory, as in Hugging Face's cache, but names may not.
    """
    name = PurePosixPath(file)
    if "\0" in file or "\\" in file or name.is_absolute() or ".." in name.parts:
        raise ValueError(
            f"{index} names {quoted(file)}, which is not a file within the directory; files outside"
            " are not read."
        )
    path = directory / file
    if not path.is_file():
        raise ValueError(
            f"{index} names {quoted(file)}, which does not exist; download the checkpoint again."
        )
    return path


def tensors_of(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the types and shapes of the tensors in a safetensors file, from the header.

    Raises:
        ValueError: The file cannot be read, or is no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        open(path, "rb").close()  # safetensors reports a file without read permission as missing
        tensors = {}
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118  # the file is no dictionary
                header = file.get_slice(name)
                tensors[name] = (header.get_dtype(), tuple(header.get_shape()))
        return tensors
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{quoted_path(path)} cannot be read as safetensors ({first_line(error)}); download it"
            " again."
        ) from None
