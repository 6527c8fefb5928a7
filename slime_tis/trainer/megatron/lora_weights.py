"""Converts LoRA adapters between PEFT's format and the shards of megatron-core's ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.errors import quoted_path
from slime_tis.peft_directory import (
    AdapterConfig,
    check_all_layers,
    read_adapter_tensors,
    tensor_name,
)
from slime_tis.trainer.megatron.architecture import Model
from slime_tis.trainer.megatron.hf_weights import all_gather, broadcast_tensors, rule
from slime_tis.trainer.megatron.lora import Adapter, adapters_of
from slime_tis.trainer.megatron.parallel import Parallel


@dataclass(frozen=True, kw_only=True)
class AdaptedLayer:
    """One Hugging Face projection with an adapter: its name, and A and B on this rank."""

    name: str
    """Such as model.layers.0.self_attn.q_proj."""
    down: Tensor
    up: Tensor
    adapter: Adapter


def adapted_layers(model: Model, parallel: Parallel) -> list[AdaptedLayer]:
    """Returns the adapted projections of this rank's layers."""
    first_layer = parallel.pipeline_rank * (model.config.num_layers // parallel.pipeline_size)
    layers = []
    for weight_name, adapter in adapters_of(model.module).items():
        _, sources = rule(weight_name, model.hf_config, first_layer)
        for source in sources:
            name = source.removesuffix(".weight")
            projection = name.rpartition(".")[2]
            if projection not in adapter.down:
                continue
            layer = AdaptedLayer(
                name=name,
                down=adapter.down[projection].detach(),
                up=adapter.up[projection].detach(),
                adapter=adapter,
            )
            layers.append(layer)
    # Families whose files fuse projections are refused at the command line.
    projections = sum(len(adapter.down) for adapter in adapters_of(model.module).values())
    assert len(layers) == projections
    return layers


def named_adapter_tensors(model: Model, parallel: Parallel) -> Iterator[tuple[str, Tensor]]:
    """Streams complete A and B by PEFT's names; a collective, to be iterated to the end."""
    mine = adapted_layers(model, parallel)
    for stage in range(parallel.pipeline_size):
        is_mine = stage == parallel.pipeline_rank
        names: list[str] = []
        if is_mine:
            names = [layer.name for layer in mine]
        names = parallel.broadcast_from_stage(names, stage)
        for number, name in enumerate(names):
            complete = None
            if is_mine:
                complete = _complete(mine[number], parallel)
            if parallel.pipeline_size > 1:
                complete = broadcast_tensors(complete, stage, parallel)
            assert complete is not None
            down, up = complete
            yield tensor_name(name, "A"), down
            yield tensor_name(name, "B"), up


def adapter_config(model: Model) -> AdapterConfig:
    """Returns the settings of the model's adapters for PEFT."""
    adapters = list(adapters_of(model.module).values())
    targets = {name for adapter in adapters for name in adapter.down}
    settings = adapters[0].settings
    return AdapterConfig(rank=settings.rank, alpha=settings.alpha, targets=tuple(sorted(targets)))


@torch.no_grad()
def load_adapter(model: Model, directory: str, parallel: Parallel) -> None:
    """Sets this rank's shards of the adapters from a directory of PEFT.

    Raises:
        ValueError: A tensor is missing, unreadable, not finite, or of another shape, or the file
            has tensors of layers that the model does not have.
    """
    subject = f"--lora-adapter-path is {quoted_path(directory)}"
    tensors = read_adapter_tensors(directory, subject)
    check_all_layers(tensors, model.config.num_layers, subject)
    for layer in adapted_layers(model, parallel):
        for matrix, parameter in (("A", layer.down), ("B", layer.up)):
            name = tensor_name(layer.name, matrix)
            if name not in tensors:
                raise ValueError(f"{subject} but it has no tensor {name}.")
            shard = _shard(tensors[name], matrix, layer.adapter, parallel)
            if shard.shape != parameter.shape:
                raise ValueError(
                    f"{subject} but its tensor {name} has the shape {list(tensors[name].shape)},"
                    " which does not fit the model and the rank."
                )
            parameter.copy_(shard)


def _complete(layer: AdaptedLayer, parallel: Parallel) -> list[Tensor]:
    """Returns complete A and B; a collective of the tensor-parallel ranks."""
    if layer.adapter.divides_input:
        return [torch.cat(all_gather(layer.down, parallel.tensor_group), 1), layer.up]
    return [layer.down, torch.cat(all_gather(layer.up, parallel.tensor_group), 0)]


def _shard(tensor: Tensor, matrix: str, adapter: Adapter, parallel: Parallel) -> Tensor:
    """Returns this rank's part of a complete A or B."""
    if matrix == "A" and adapter.divides_input:
        return tensor.chunk(parallel.tensor_size, 1)[parallel.tensor_rank]
    if matrix == "B" and not adapter.divides_input:
        return tensor.chunk(parallel.tensor_size, 0)[parallel.tensor_rank]
    return tensor
