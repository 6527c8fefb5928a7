"""Weight updates and checksums inside a vLLM server.

A server loads it with `--worker-extension-cls slime_tis_vllm.WorkerExtension`.

The Python that has vllm does not have slime_tis, so this file imports only vllm, torch and the
standard library. Launched servers find it on PYTHONPATH. `POST /collective_rpc` calls its methods
on every rank.

On a CPU, vLLM 0.32 computes with copies of the weights that it packs for oneDNN:

* A linear layer keeps only the packed copy; its `weight` becomes empty, and so its checksum in
  `/weight_checker` is that of nothing. `weight_checksums` reads the packed copy back.
* An output layer that is tied to the embedding keeps both. A reload renews the embedding but not
  the packed copy. `load_checkpoint` packs it again.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

READ_ROWS = 256
"""Inputs of a packed layer that are read at once."""


class WorkerExtension:
    """Methods that vLLM adds to its workers; `self` is the worker."""

    model_runner: Any
    reload_weights: Any

    def load_checkpoint(self, path: str, num_tensors: int) -> str:
        """Loads a Hugging Face checkpoint in place.

        Args:
            path: Directory with safetensors.
            num_tensors: Number of tensors that the sender wrote.

        Returns:
            A problem of the files, before which nothing was changed, or an empty text.

        Raises:
            Exception: vLLM's own errors, after which the weights are partly loaded: the server must
                not sample before another update.
        """
        problem = checkpoint_problem(Path(path), num_tensors)
        if problem:
            return problem
        self.reload_weights(weights_path=path)
        repack_tied_head(self.model_runner.get_model())
        return ""

    def repack_tied_weights(self) -> None:
        """Ends an update by another transport: renews copies that vLLM leaves old."""
        repack_tied_head(self.model_runner.get_model())

    def weight_checksums(self) -> dict[str, str]:
        """SHA-256 of each tensor that this rank computes with, by vLLM's name."""
        checksums = {}
        with torch.inference_mode():
            for name, weight in used_weights(self.model_runner.get_model()):
                data = weight.cpu().contiguous().view(-1).view(torch.uint8)
                checksums[name] = hashlib.sha256(data.numpy().tobytes()).hexdigest()
        return checksums


def checkpoint_problem(directory: Path, num_tensors: int) -> str:
    """Why the files cannot be loaded, or an empty text; reads the header of each file."""
    # vLLM has safetensors; this file is also imported where it is missing.
    from safetensors import SafetensorError, safe_open

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return f"{directory} has no safetensors"
    names: set[str] = set()
    for file in files:
        try:
            # It also compares the header's offsets with the size of the file.
            with safe_open(file, "pt") as tensors:
                names.update(tensors.keys())
        except (SafetensorError, OSError) as error:
            return f"{file}: {error}"
    if len(names) != num_tensors:
        return f"{directory} has {len(names)} tensors, but {num_tensors} were written"
    return ""


def repack_tied_head(model: torch.nn.Module) -> None:
    """Packs the embedding again for output layers that are tied to it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        # Only on a CPU does an output layer have a packed copy.
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def used_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and values of the weights that the model computes with."""
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}" if module_name else name
            if name == "weight" and hasattr(module, "cpu_linear"):
                yield full_name, packed_weight(module)
            elif parameter.numel() > 0:
                yield full_name, parameter.detach()


def packed_weight(layer: Any) -> torch.Tensor:
    """Reads the weight of a packed layer, [outputs, inputs]: its outputs for unit vectors.

    A product with 1 and sums with 0 are exact, so each row of the identity gives one column of the
    weight.
    """
    if layer.weight.ndim == 2:
        num_inputs = layer.weight.shape[1]
    else:
        # vLLM removed the weight, and kept its size.
        num_inputs = layer.input_size_per_partition
    identity = torch.eye(num_inputs, dtype=layer.weight.dtype)
    columns = []
    for rows in identity.split(READ_ROWS):
        columns.append(layer.cpu_linear(rows, layer.weight, None))
    return torch.cat(columns).T
