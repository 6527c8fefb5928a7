"""Converts weights between Hugging Face checkpoints and megatron-core, in both directions.

The weights of megatron-core are tensor-, pipeline- and expert-parallel shards.
Every Megatron weight consists of one or more Hugging Face tensors, which `slime_tis.families`
lists. `LAYOUTS` defines how each kind is split over the tensor-parallel ranks and joined.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_tis.errors import first_line
from slime_tis.families import family_of, stacks_experts
from slime_tis.family_weights import MODEL_WEIGHTS
from slime_tis.hf_directory import read_model_config
from slime_tis.hf_tensors import check_tensors, tensor_files
from slime_tis.trainer.megatron.architecture import HfConfig, Model
from slime_tis.trainer.megatron.lora import adapters_of, is_adapter_parameter, merged
from slime_tis.trainer.megatron.parallel import Parallel


@dataclass(frozen=True)
class Layout:
    """Splits tensors of one kind of parameter into tensor-parallel shards, and joins them."""

    split: Callable[[list[Tensor], int, int, HfConfig], Tensor]
    """(complete tensors, rank, size, hf_config) → this rank's shard."""
    join: Callable[[list[Tensor], HfConfig], list[Tensor]]
    """(shards of all ranks, hf_config) → complete tensors."""


def _split_vocab(tensors: list[Tensor], rank: int, size: int, hf: HfConfig) -> Tensor:
    """Returns this rank's rows; zeros pad the vocabulary to a multiple of the number of ranks."""
    rows = math.ceil(hf.vocab_size / size)
    shard = tensors[0][rank * rows : (rank + 1) * rows]
    return torch.cat([shard, shard.new_zeros(rows - len(shard), *shard.shape[1:])])


def _split_qkv(tensors: list[Tensor], rank: int, size: int, hf: HfConfig) -> Tensor:
    """Returns this rank's key-value groups.

    For each group, Megatron stores its query heads, then its key, then its value.
    """
    return _split_groups(tensors, rank, size, hf.num_key_value_heads)


def _split_groups(tensors: list[Tensor], rank: int, size: int, groups: int) -> Tensor:
    """Returns this rank's groups, each with its rows of all tensors."""
    per_group = [tensor.unflatten(0, (groups, -1)) for tensor in tensors]
    return torch.cat(per_group, 1).chunk(size)[rank].flatten(0, 1)


def _join_qkv(shards: list[Tensor], hf: HfConfig) -> list[Tensor]:
    """Returns query, key and value; the inverse of `_split_qkv`."""
    joined = torch.cat(shards).unflatten(0, (hf.num_key_value_heads, -1))
    queries = hf.num_attention_heads // hf.num_key_value_heads
    head = joined.shape[1] // (queries + 2)
    return [tensor.flatten(0, 1) for tensor in joined.split([queries * head, head, head], 1)]


def _split_fused_qkv(tensors: list[Tensor], rank: int, size: int, hf: HfConfig) -> Tensor:
    """Returns this rank's key-value groups of one tensor with all queries, keys and values."""
    heads = hf.num_attention_heads
    groups = hf.num_key_value_heads
    head = len(tensors[0]) // (heads + 2 * groups)
    parts = tensors[0].split([heads * head, groups * head, groups * head])
    return _split_qkv(list(parts), rank, size, hf)


def _split_gated_qkv(tensors: list[Tensor], rank: int, size: int, hf: HfConfig) -> Tensor:
    """Returns this rank's key-value groups of attention with output gates.

    The file has the gates of a head after its queries. For each group, Megatron stores its query
    heads, their gates, its key, then its value.
    """
    queries_and_gates, key, value = tensors
    by_head = queries_and_gates.unflatten(0, (hf.num_attention_heads, 2, -1))
    query = by_head[:, 0].flatten(0, 1)
    gate = by_head[:, 1].flatten(0, 1)
    return _split_qkv([query, gate, key, value], rank, size, hf)


def _join_gated_qkv(shards: list[Tensor], hf: HfConfig) -> list[Tensor]:
    """Returns query and gate, key and value; the inverse of `_split_gated_qkv`."""
    joined = torch.cat(shards).unflatten(0, (hf.num_key_value_heads, -1))
    queries = hf.num_attention_heads // hf.num_key_value_heads
    head = joined.shape[1] // (2 * queries + 2)
    query, gate, key, value = joined.split([queries * head, queries * head, head, head], 1)
    by_head = [part.reshape(hf.num_attention_heads, head, -1) for part in (query, gate)]
    return [torch.cat(by_head, 1).flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)]


def _three_parts(hf: Any) -> list[int]:
    """Returns the channels of the queries, keys and values of a gated delta net."""
    keys = hf.linear_num_key_heads * hf.linear_key_head_dim
    return [keys, keys, hf.linear_num_value_heads * hf.linear_value_head_dim]


def _split_three_parts(tensors: list[Tensor], rank: int, size: int, hf: HfConfig) -> Tensor:
    """Returns this rank's channels of queries, of keys, and of values."""
    parts = tensors[0].split(_three_parts(hf))
    return torch.cat([part.chunk(size)[rank] for part in parts])


def _join_three_parts(shards: list[Tensor], hf: HfConfig) -> list[Tensor]:
    """Returns the channels of all ranks; the inverse of `_split_three_parts`."""
    sizes = [part // len(shards) for part in _three_parts(hf)]
    by_part = zip(*(shard.split(sizes) for shard in shards), strict=True)
    return [torch.cat([torch.cat(part) for part in by_part])]


def _split_delta_qkvz(tensors: list[Tensor], rank: int, size: int, hf: Any) -> Tensor:
    """Returns this rank's key heads; each has a query, a key, its values, and their gates."""
    qkv, z = tensors
    return _split_groups([*qkv.split(_three_parts(hf)), z], rank, size, hf.linear_num_key_heads)


def _join_delta_qkvz(shards: list[Tensor], hf: Any) -> list[Tensor]:
    """Returns queries, keys and values, and the gates; the inverse of `_split_delta_qkvz`."""
    heads = hf.linear_num_key_heads
    queries, keys, values = [part // heads for part in _three_parts(hf)]
    by_head = torch.cat(shards).unflatten(0, (heads, -1))
    parts = [part.flatten(0, 1) for part in by_head.split([queries, keys, values, values], 1)]
    return [torch.cat(parts[:3]), parts[3]]


def _split_delta_ba(tensors: list[Tensor], rank: int, size: int, hf: Any) -> Tensor:
    """Returns this rank's key heads; each has the rates, then the decays, of its values."""
    return _split_groups(tensors, rank, size, hf.linear_num_key_heads)


def _join_delta_ba(shards: list[Tensor], hf: Any) -> list[Tensor]:
    """Returns rates and decays; the inverse of `_split_delta_ba`."""
    by_head = torch.cat(shards).unflatten(0, (hf.linear_num_key_heads, 2, -1))
    return [part.flatten(0, 1) for part in by_head.unbind(1)]


def _split_gated(tensors: list[Tensor], rank: int, size: int, hf: HfConfig) -> Tensor:
    """Returns this rank's rows of the gate projection, then those of the up projection."""
    shards = [tensor.chunk(size, -2)[rank] for tensor in tensors]
    return torch.cat(shards, -2)


def _join_gated(shards: list[Tensor], hf: HfConfig) -> list[Tensor]:
    """Returns the gate and the up projection; the inverse of `_split_gated`."""
    gates = []
    ups = []
    for shard in shards:
        gate, up = shard.chunk(2, -2)
        gates.append(gate)
        ups.append(up)
    return [torch.cat(gates, -2), torch.cat(ups, -2)]


def _split_fused_gated(tensors: list[Tensor], rank: int, size: int, hf: HfConfig) -> Tensor:
    """Returns this rank's rows of both halves of a tensor with gate and up projection."""
    return _split_gated(list(tensors[0].chunk(2)), rank, size, hf)


def _split_alternating(tensors: list[Tensor], rank: int, size: int, hf: HfConfig) -> Tensor:
    """Returns the weight of an expert of gpt-oss: gate, then up.

    The file has [in, 2·inner] with gate and up in turns, or a bias [2·inner]. Ranks do not divide
    these experts.
    """
    gate_then_up = torch.cat([tensors[0][..., ::2], tensors[0][..., 1::2]], -1)
    if gate_then_up.dim() == 1:
        return gate_then_up
    return gate_then_up.mT


def _join_alternating(shards: list[Tensor], hf: HfConfig) -> list[Tensor]:
    """Returns the file's tensor of a stack of experts; the inverse of `_split_alternating`."""
    stack = shards[0]  # weights [experts, 2·inner, in], or biases [experts, 2·inner]
    if stack.dim() == 3:
        stack = stack.mT
    return [stack.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)]


# "rows" and "gated" count dimensions from the last one, because experts are joined in a stack
# [experts, out, in].
LAYOUTS = {
    "replicated": Layout(lambda t, rank, size, hf: t[0], lambda shards, hf: [shards[0]]),
    "rows": Layout(
        lambda t, rank, size, hf: t[0].chunk(size, -1)[rank],
        lambda shards, hf: [torch.cat(shards, -1)],
    ),
    "columns": Layout(
        lambda t, rank, size, hf: t[0].chunk(size)[rank],
        lambda shards, hf: [torch.cat(shards)],
    ),
    "vocab": Layout(_split_vocab, lambda shards, hf: [torch.cat(shards)[: hf.vocab_size]]),
    "qkv": Layout(_split_qkv, _join_qkv),
    "fused_qkv": Layout(_split_fused_qkv, lambda shards, hf: [torch.cat(_join_qkv(shards, hf))]),
    "gated_qkv": Layout(_split_gated_qkv, _join_gated_qkv),
    "gated": Layout(_split_gated, _join_gated),
    "transposed": Layout(
        lambda t, rank, size, hf: t[0].mT,
        lambda shards, hf: [shards[0].mT],
    ),
    "alternating": Layout(_split_alternating, _join_alternating),
    "three_parts": Layout(_split_three_parts, _join_three_parts),
    "delta_qkvz": Layout(_split_delta_qkvz, _join_delta_qkvz),
    "delta_ba": Layout(_split_delta_ba, _join_delta_ba),
    "fused_gated": Layout(
        _split_fused_gated, lambda shards, hf: [torch.cat(_join_gated(shards, hf))]
    ),
}

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""transformer-engine's names of norms that it fuses into the next linear layer, and the names of
`Family.weights`."""
EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
"""Matches a routed expert's local index in the name of a weight."""
GATHERED_BYTES = 2**30
"""Bytes of routed experts' weights that one collective gathers; at least one expert per rank."""


def rule(
    name: str, hf: HfConfig, first_layer: int, first_expert: int = 0
) -> tuple[Layout, list[str]]:
    """Returns a Megatron weight's layout, and the names of the Hugging Face tensors.

    Args:
        name: Megatron's name, which counts layers and experts from the rank's first one.
        hf: Configuration of the model.
        first_layer: The rank's first layer.
        first_expert: The rank's first routed expert.
    """
    if name in MODEL_WEIGHTS:
        weight = MODEL_WEIGHTS[name]
        return LAYOUTS[weight.layout], [tensor.name for tensor in weight.tensors]
    _, _, index, within = name.split(".", 3)  # decoder.layers.I.…
    within = FUSED_NORMS.get(within, within)
    local = EXPERT.search(within)
    weight = family_of(hf).weights[EXPERT.sub("*", within)]
    expert = first_expert + int(local[0]) if local else None
    prefix = f"model.layers.{int(index) + first_layer}"
    sources = [f"{prefix}.{tensor.name.format(expert=expert)}" for tensor in weight.tensors]
    return LAYOUTS[weight.layout], sources


class HfTensors:
    """The tensors of a Hugging Face checkpoint directory, read one at a time."""

    def __init__(self, directory: str | Path, *, tied: bool) -> None:
        self.tied = tied
        self.files = tensor_files(directory)

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """Returns a tensor, or one expert of a tensor with all experts.

        Raises:
            ValueError: The tensor cannot be read, or has NaN or infinity.
        """
        from safetensors import SafetensorError, safe_open

        if name == "lm_head.weight" and self.tied:
            name = "model.embed_tokens.weight"
        path = self.files[name]
        try:
            with safe_open(str(path), "pt") as file:
                tensor: Tensor
                if expert is None:
                    tensor = file.get_tensor(name)
                else:
                    tensor = file.get_slice(name)[expert]
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path}: the tensor {name} cannot be read ({first_line(error)})."
            ) from None
        if not tensor.isfinite().all():
            raise ValueError(
                f"{path}: the tensor {name} holds NaN or infinity; the checkpoint is damaged."
            )
        return tensor


def load_hf_weights(model: Model, directory: str | Path, parallel: Parallel) -> None:
    """Fills this rank's shard of the model from a Hugging Face checkpoint.

    Raises:
        ValueError: A tensor is missing, unreadable, not finite, or has another shape.
    """
    check_tensors(directory, read_model_config(directory))
    tensors = HfTensors(directory, tied=model.hf_config.tie_word_embeddings)
    hf = model.hf_config
    first_layer = parallel.pipeline_rank * (model.config.num_layers // parallel.pipeline_size)
    first_expert = _first_expert(model, parallel, parallel.expert_rank)
    for name, parameter in named_weights(model.module).items():
        layout, sources = rule(name, hf, first_layer, first_expert)
        local_expert = EXPERT.search(name)
        expert_in_stack = None
        if local_expert is None:
            rank = parallel.tensor_rank
            size = parallel.tensor_size
        else:
            rank = parallel.expert_tensor_rank
            size = parallel.expert_tensor_size
            if stacks_experts(hf):
                expert_in_stack = first_expert + int(local_expert[0])
        complete = [tensors.read(source, expert_in_stack) for source in sources]
        shard = layout.split(complete, rank, size, hf)
        if shard.shape != parameter.shape:
            raise ValueError(
                f"{directory}: {sources} give {tuple(shard.shape)} for {name}"
                f" {tuple(parameter.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(shard)


def named_hf_tensors(
    model: Model, parallel: Parallel, *, rounds_merged: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Streams the model's weights as complete tensors under Hugging Face names.

    A collective: every rank must iterate to the end.

    Args:
        model: This rank's part of the model.
        parallel: The ranks.
        rounds_merged: Whether weights with a merged LoRA adapter have the model's precision. They
            are float32 otherwise, so that the receiver's rounding is the only one.
    """
    weights = named_weights(model.module)
    adapters = adapters_of(model.module)
    for stage in range(parallel.pipeline_size):
        mine = stage == parallel.pipeline_rank
        first_layer = stage * (model.config.num_layers // parallel.pipeline_size)
        batches = _gathering_order(weights, model, parallel) if mine else []
        for names in parallel.broadcast_from_stage(batches, stage):
            if names == ["output_layer.weight"] and model.hf_config.tie_word_embeddings:
                continue
            complete = None
            if mine:
                shards = []
                for name in names:
                    shard = weights[name].detach()
                    if name in adapters:
                        dtype = shard.dtype if rounds_merged else torch.float32
                        shard = merged(shard, adapters[name]).to(dtype)
                    shards.append(shard)
                complete = _gather_shards(shards, names[0], model, parallel)
            if parallel.pipeline_size > 1:
                complete = broadcast_tensors(complete, stage, parallel)
            assert complete is not None
            yield from _under_hf_names(names, complete, model, parallel, first_layer)


def named_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the model's own weights on this rank: parameters, and the biases of routers.

    These biases are buffers, since they are not trained by gradients. LoRA adapters are left out.
    """
    weights: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if not is_adapter_parameter(name):
            weights[name] = parameter
    for name, buffer in module.named_buffers():
        if name.endswith(".expert_bias"):
            weights[name] = buffer
    return weights


def copied_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Returns a copy of `named_weights`."""
    return {name: weight.detach().clone() for name, weight in named_weights(module).items()}


@contextmanager
def replaced_weights(module: torch.nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Inside the block, the module has these weights; afterwards, its previous ones."""

    @torch.no_grad()
    def assign(values: dict[str, Tensor]) -> None:
        for name, weight in named_weights(module).items():
            weight.copy_(values[name])

    previous = copied_weights(module)
    assign(weights)
    try:
        yield
    finally:
        assign(previous)


def _gathering_order(
    weights: dict[str, Tensor], model: Model, parallel: Parallel
) -> list[list[str]]:
    """Returns the names of this rank's weights in the batches in which they are gathered.

    Experts' weights with the same role are gathered together, other weights one by one. If the file
    has one tensor for all experts of a layer, they are in one batch.
    """
    are_stacked = stacks_experts(model.hf_config)
    by_role: dict[str, list[str]] = {}
    for name in weights:
        by_role.setdefault(EXPERT.sub("*", name), []).append(name)
    batches = []
    for names in by_role.values():
        gathered = weights[names[0]].nbytes * parallel.expert_size * parallel.expert_tensor_size
        size = max(GATHERED_BYTES // gathered, len(names) if are_stacked else 1)
        batches += [names[start : start + size] for start in range(0, len(names), size)]
    return batches


def _gather_shards(
    shards: list[Tensor], name: str, model: Model, parallel: Parallel
) -> list[Tensor]:
    """Returns the Hugging Face tensors [weights, …] that consist of these shards on all ranks.

    `weights` is 1, or the number of experts on all ranks for a batch of experts' weights. `name` is
    the name of the first shard.
    """
    layout, _ = rule(name, model.hf_config, 0)
    if EXPERT.search(name) is None:
        gathered = shards
        if layout is not LAYOUTS["replicated"]:
            gathered = all_gather(shards[0], parallel.tensor_group)
        return [tensor[None] for tensor in layout.join(gathered, model.hf_config)]
    gathered = all_gather(torch.stack(shards), parallel.expert_tensor_group)
    stacked = layout.join(gathered, model.hf_config)
    return [torch.cat(all_gather(tensor, parallel.expert_group)) for tensor in stacked]


def _under_hf_names(
    names: Sequence[str], tensors: list[Tensor], model: Model, parallel: Parallel, first_layer: int
) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor of `_gather_shards` with its name, in the order of experts' owners."""
    is_expert = EXPERT.search(names[0]) is not None
    if is_expert and stacks_experts(model.hf_config):
        _, targets = rule(names[0], model.hf_config, first_layer)
        yield from zip(targets, tensors, strict=True)
        return
    owners = parallel.expert_size if is_expert else 1
    for index, (owner, name) in enumerate(product(range(owners), names)):
        first_expert = _first_expert(model, parallel, owner)
        _, targets = rule(name, model.hf_config, first_layer, first_expert)
        for target, tensor in zip(targets, tensors, strict=True):
            yield target, tensor[index]


def _first_expert(model: Model, parallel: Parallel, owner: int) -> int:
    """Returns the first routed expert of expert-parallel rank `owner`; 0 for a dense model."""
    return owner * ((model.config.num_moe_experts or 0) // parallel.expert_size)


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Returns the tensors of all ranks of a group, by rank; a collective."""
    if group.size() == 1:
        return [tensor]
    gathered = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return gathered


def broadcast_tensors(tensors: list[Tensor] | None, stage: int, parallel: Parallel) -> list[Tensor]:
    """Returns the tensors of pipeline stage `stage`, None on the other stages; a collective."""
    sizes = [(tensor.shape, tensor.dtype) for tensor in tensors or []]
    sizes = parallel.broadcast_from_stage(sizes, stage)
    if tensors is None:
        device = parallel.device
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in sizes]
    tensors = [tensor.contiguous() for tensor in tensors]
    for tensor in tensors:
        dist.broadcast(tensor, group=parallel.pipeline_group, group_src=stage)
    return tensors
