"""Weight updates and checksums inside a vLLM server.

A server loads it with `--worker-extension-cls slime_tis_vllm.WorkerExtension`.

The Python that has vllm does not have slime_tis, so this file imports only vllm, torch and the
standard library. Launched servers find it on PYTHONPATH. `POST /collective_rpc` calls the methods
of the extension on every rank.

On a CPU, vLLM 0.32 computes with copies of the weights that it packs for oneDNN:

* A linear layer keeps only the packed copy; its `weight` becomes empty, and so its checksum in
  `/weight_checker` is that of nothing. `weight_checksums` reads the packed copy back.
* An output layer that is tied to the embedding keeps both. A reload renews the embedding but not
  the packed copy. `load_checkpoint` and the transport pack it again.
* Experts are packed in place, but only when the server starts. After a reload the kernel would read
  plain weights as packed ones. `load_checkpoint` and the transport pack them, too.

vLLM's rotary kernel for CPUs is wrong in latent attention; `correct_rotation` replaces it there.

vLLM's transports need GPUs. `register_transport` adds one over gloo, with the request bodies of
vLLM's NCCL transport.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

READ_ROWS = 256
"""Inputs of a packed layer that are read at once."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Fields of config.json that shape the weights, with the same names in vLLM."""
TRANSPORT = "slime_tis_gloo"
"""Name of the transport, for `--weight-transfer-config`."""


class WorkerExtension:
    """Methods that vLLM adds to its workers; `self` is the worker."""

    model_config: Any
    model_runner: Any
    reload_weights: Any

    def slime_tis_extension(self, config: Mapping[str, Any]) -> str:
        """Compares the served model with a config.json of the trainer.

        A trainer calls it first, so it also shows that the server has the extension.

        Returns:
            The first size that differs, or an empty text.
        """
        served = self.model_config.hf_text_config
        for name in SIZES:
            expected = config.get(name)
            size = getattr(served, name, None)
            if expected is not None and size is not None and size != expected:
                return f"{name} is {size}, but {expected} in --hf-checkpoint"
        return ""

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
        model = self.model_runner.get_model()
        repack_tied_head(model)
        repack_experts(model)
        return ""

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


def repack_experts(model: torch.nn.Module) -> None:
    """Packs the experts of all layers, which a reload has just replaced by plain weights."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts):
            experts.process_weights_after_loading(module)


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
    elif hasattr(layer, "input_size_per_partition"):
        # vLLM removed the weight, and kept its size.
        num_inputs = layer.input_size_per_partition
    else:
        # A layer that tensor-parallel ranks do not divide, such as a router.
        num_inputs = layer.input_size
    identity = torch.eye(num_inputs, dtype=layer.weight.dtype)
    columns = []
    for rows in identity.split(READ_ROWS):
        columns.append(layer.cpu_linear(rows, layer.weight, None))
    return torch.cat(columns).T


@dataclass
class GlooInit:
    """Body of `/init_weight_transfer_engine`."""

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int = 1
    timeout: float = 600.0
    """Longest wait for the trainer, in seconds."""


@dataclass
class GlooUpdate:
    """Body of `/update_weights`: tensors in the order of their broadcasts."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


def register_transport() -> None:
    """Registers the transport `slime_tis_gloo` in this worker."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import reload

    class GlooTransport(WeightTransferEngine):  # type: ignore[misc]  # vllm is not checked
        """Receives weights by broadcasts from rank 0, the trainer."""

        init_info_cls = GlooInit
        update_info_cls = GlooUpdate
        supports_draft_weight_update = False
        group: Any = None

        def init_transfer_engine(self, init_info: GlooInit) -> None:
            wait = timedelta(seconds=init_info.timeout)
            address = init_info.master_address
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = wait
            options._devices = [gloo.create_device(hostname=address)]
            store = dist.TCPStore(address, init_info.master_port, is_master=False, timeout=wait)
            rank = init_info.rank_offset + self.parallel_config.rank
            self.group = gloo(store, rank, init_info.world_size, options)

        def start_weight_update(self) -> None:
            reload.initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: GlooUpdate) -> None:
            def received() -> Iterator[tuple[str, torch.Tensor]]:
                for name, dtype, shape in zip(
                    update_info.names, update_info.dtype_names, update_info.shapes, strict=True
                ):
                    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                    self.group.broadcast(tensor, 0).wait()
                    yield name, tensor

            self.model.load_weights(received())

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)
            repack_tied_head(self.model)
            repack_experts(self.model)

        def shutdown(self) -> None:
            self.group = None

    WeightTransferEngineFactory.register_engine(TRANSPORT, GlooTransport)


def correct_rotation() -> None:
    """Rotates queries and keys of latent attention by torch on a CPU.

    These queries are [tokens, heads, features], and their keys are a part of wider rows. vLLM
    0.32's kernel for CPUs takes a head for a token, and writes keys into other parts of the rows.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu

    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Any:
        if query.ndim == 3:
            return self.forward_native(positions, query, key)
        return kernel(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu


# A worker imports this module before it builds its model and its transport, which vLLM looks up by
# name. Tests import this module without vllm.
if find_spec("vllm") is not None:
    correct_rotation()
    register_transport()
