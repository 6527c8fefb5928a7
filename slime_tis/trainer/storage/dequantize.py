"""Writes a quantized checkpoint as bfloat16, which training and the local engine read.

    python -m slime_tis.trainer.storage.dequantize DIR OUT_DIR

Two formats are known. DeepSeek's fp8 has one scale for each block of a matrix, and a weight is its
8-bit number times the scale of its block. gpt-oss' mxfp4 has one scale for 32 numbers of four bits.
transformers 5.23 loads both as bfloat16, but its `save_pretrained` writes fp8 numbers again.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from slime_tis.atomic_files import parse_object
from slime_tis.command_signals import raise_on_signals, status_after
from slime_tis.errors import quoted, quoted_path
from slime_tis.hf_tensors import tensor_files
from slime_tis.trainer.storage import exports
from slime_tis.trainer.storage.hf_writer import SHARD_BYTES, write_hf_checkpoint

FP8_SCALE = "_scale_inv"
"""Ending of the name of fp8 scales; the rest is the name of the weight."""
MXFP4_BLOCKS = "_blocks"
"""Ending of the name of packed 4-bit numbers."""
MXFP4_SCALES = "_scales"
"""Ending of the name of their scales."""


def dequantize(directory: str | Path, target: str | Path) -> Path:
    """Writes a checkpoint in bfloat16, all or nothing.

    Args:
        directory: A checkpoint in fp8 or mxfp4.
        target: A directory that is absent, empty, or of an earlier conversion.

    Returns:
        The written directory.

    Raises:
        ValueError: The format is another one, a tensor is missing or has scales of another shape,
            or the target has other files.
    """
    source = Path(directory)
    path = source / "config.json"
    if not path.is_file():
        raise ValueError(
            f"DIR is {quoted_path(directory)} but holds no config.json; give a Hugging Face"
            " directory, not a name of the Hub."
        )
    config = parse_object(path.read_bytes(), str(path))
    block = _block_size(config, source)
    out = Path(target).resolve()
    exports.check_target(out, f"OUT_DIR is {quoted_path(target)}", "conversion")
    unfinished = exports.begin(out)
    try:
        tensors = dequantized_tensors(source, block)
        write_hf_checkpoint(unfinished, tensors, like=source, shard_bytes=SHARD_BYTES)
        written = unfinished / "config.json"
        fields = json.loads(written.read_text())
        del fields["quantization_config"]
        written.write_text(json.dumps(fields, indent=2))
    except BaseException:
        exports.discard(unfinished)
        raise
    return exports.finish(unfinished, out)


def _block_size(config: Mapping[str, Any], directory: Path) -> tuple[int, int]:
    """Returns rows and columns of a block of fp8; (1, 1) for mxfp4, which has no such blocks."""
    where = f"{quoted_path(directory)} has the quantization_config"
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        raise ValueError(f"{quoted_path(directory)} has no quantization_config; use it as it is.")
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return 1, 1
    block: Any = quantization.get("weight_block_size")
    is_pair = isinstance(block, list) and len(block) == 2
    if method != "fp8" or not is_pair or not all(type(size) is int and size > 0 for size in block):
        raise ValueError(
            f"{where} {quoted(quantization)}; known are mxfp4, and fp8 with a weight_block_size of"
            " two numbers."
        )
    rows, columns = block
    return rows, columns


def dequantized_tensors(directory: Path, block: tuple[int, int]) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors of a checkpoint, one at a time, without scales.

    Args:
        directory: The checkpoint.
        block: Rows and columns of a block of fp8.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    files = tensor_files(directory)
    for name in files:
        if name.endswith((FP8_SCALE, MXFP4_SCALES)):
            continue
        tensor = _read(files, name)
        if name.endswith(MXFP4_BLOCKS):
            stem = name.removesuffix(MXFP4_BLOCKS)
            scales = _read(files, stem + MXFP4_SCALES)
            _check_scales(stem + MXFP4_SCALES, scales, list(tensor.shape[:-1]))
            yield stem, convert_moe_packed_tensors(tensor, scales)
        elif tensor.dtype == torch.float8_e4m3fn:
            if tensor.ndim != 2:
                raise ValueError(
                    f"the fp8 tensor {name} has the shape {list(tensor.shape)}, but only matrices"
                    " have known blocks; give a checkpoint with one matrix for each weight."
                )
            scales = _read(files, name + FP8_SCALE)
            blocks = [-(-size // step) for size, step in zip(tensor.shape, block, strict=True)]
            _check_scales(name + FP8_SCALE, scales, blocks)
            yield name, scaled_blocks(tensor, scales, block)
        else:
            yield name, tensor


def _check_scales(name: str, scales: Tensor, blocks: list[int]) -> None:
    """Refuses scales that do not have one number for each block."""
    if list(scales.shape) != blocks:
        raise ValueError(
            f"the tensor {name} has the shape {list(scales.shape)}, but its weight has"
            f" {blocks} blocks by the quantization_config; download the checkpoint again."
        )


def scaled_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Returns weight · scale in bfloat16, with one scale per block of the weight.

    Args:
        weight: [out, in], fp8.
        scale: [⌈out / rows⌉, ⌈in / columns⌉], float32.
        block: Rows and columns of a block; the last ones may be smaller.
    """
    rows, columns = block
    wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    wide = wide[: weight.shape[0], : weight.shape[1]]
    return (weight.float() * wide).bfloat16()


def _read(files: Mapping[str, Path], name: str) -> Tensor:
    if name not in files:
        raise ValueError(f"the checkpoint has no tensor {name}; download it again.")
    with safe_open(str(files[name]), "pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def main() -> int:
    """Converts the checkpoint that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(description="Writes a quantized checkpoint as bfloat16.")
    parser.add_argument("directory", help="a Hugging Face checkpoint in fp8 or mxfp4")
    parser.add_argument("out_dir", help="a directory that is absent, empty or of an earlier run")
    arguments = parser.parse_args()
    raise_on_signals()
    try:
        print(dequantize(arguments.directory, arguments.out_dir))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        return status_after(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
