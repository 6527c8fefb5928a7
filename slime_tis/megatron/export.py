"""The policy as a Hugging Face directory, for everybody else."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slime_tis.megatron.checkpoint import CheckpointError
from slime_tis.megatron.engine import TrainingEngine
from slime_tis.storage import exports

SHARD_BYTES = 5 * 2**30  # of one safetensors file, as the Hugging Face hub has them
COPIED = (".json", ".jinja", ".txt", ".model")
"""Ends of the names of the files that go along from the checkpoint: configuration and tokenizer."""


def save_hf(directory: str | Path, engine: TrainingEngine) -> Path | None:
    """Writes the policy as a Hugging Face directory, under another name until it is whole; a collective.

    Returns:
        Where it is, on the main process: `directory`, or one beside it with a number where somebody else's files have
        come to `directory` meanwhile. None on the others.

    Raises:
        CheckpointError: it could not be written; what was at `directory` is as it was.
    """
    tensors = engine.named_hf_tensors()
    if not engine.parallel.is_main:
        for _ in tensors:
            pass
        return None
    final = Path(directory).resolve()
    copied = [
        file
        for file in Path(engine.config.hf_checkpoint).iterdir()
        if file.is_file() and file.suffix in COPIED and "index" not in file.name and file.name != exports.MARKER
    ]
    unfinished = None
    try:
        unfinished = exports.begin(final, [file.name for file in copied])
        for file in copied:
            shutil.copyfile(file, unfinished / file.name)
        _write_safetensors(unfinished, tensors)
        _set_dtype(unfinished / "config.json", engine.config.bf16)
        return exports.finish(unfinished, final)
    except (OSError, SafetensorError) as error:
        for _ in tensors:  # other ranks take part in it
            pass
        if unfinished is not None:
            exports.discard(unfinished)
        raise CheckpointError(f"could not write {final}: {error}") from error


def _write_safetensors(directory: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        if held:
            save_file(held, str(directory / f"part-{len(files)}.safetensors"), metadata={"format": "pt"})
            files.append(list(held))
            held.clear()

    for name, tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if size + bytes_ > SHARD_BYTES:
            flush()
            size = 0
        held[name] = tensor.cpu().contiguous().clone()
        size, total = size + bytes_, total + bytes_
    flush()
    if len(files) == 1:
        (directory / "part-0.safetensors").rename(directory / "model.safetensors")
        return
    weight_map = {}
    for index, names in enumerate(files):
        name = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / f"part-{index}.safetensors").rename(directory / name)
        weight_map.update(dict.fromkeys(names, name))
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=2) + "\n")


def _set_dtype(config_file: Path, bf16: bool) -> None:
    config = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16" if bf16 else "float32"
    config_file.write_text(json.dumps(config, indent=2) + "\n")
