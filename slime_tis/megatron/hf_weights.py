"""Weights between Hugging Face checkpoints and megatron-core's tensor- and pipeline-parallel shards, both ways.

Every Megatron parameter is made of one or more Hugging Face tensors. `RULES` says which, and `LAYOUTS` how each kind
is cut over the tensor-parallel ranks and joined again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime_tis.errors import first_line
from slime_tis.hf_directory import check_tensors, read_model_config, tensor_files
from slime_tis.megatron.architecture import HfConfig, Model
from slime_tis.megatron.parallel import Parallel


@dataclass(frozen=True)
class Layout:
    """How whole tensors and tensor-parallel shards of one kind of parameter relate."""

    split: Callable[[list[Tensor], int, int, HfConfig], Tensor]
    """(whole tensors, rank, size, hf_config) → this rank's shard."""
    join: Callable[[list[Tensor], HfConfig], list[Tensor]]
    """(shards of all ranks, hf_config) → whole tensors."""


def _split_vocab(tensors: list[Tensor], rank: int, size: int, hf: HfConfig) -> Tensor:
    rows = -(-hf.vocab_size // size)
    shard = tensors[0][rank * rows : (rank + 1) * rows]
    return torch.cat([shard, shard.new_zeros(rows - len(shard), *shard.shape[1:])])


def _split_qkv(tensors: list[Tensor], rank: int, size: int, hf: HfConfig) -> Tensor:
    """Megatron keeps, for every key-value group, its query heads, then its key, then its value."""
    groups = hf.num_key_value_heads
    per_group = [tensor.unflatten(0, (groups, -1)) for tensor in tensors]
    return torch.cat(per_group, 1).chunk(size)[rank].flatten(0, 1)


def _join_qkv(shards: list[Tensor], hf: HfConfig) -> list[Tensor]:
    joined = torch.cat(shards).unflatten(0, (hf.num_key_value_heads, -1))
    queries = hf.num_attention_heads // hf.num_key_value_heads
    head = joined.shape[1] // (queries + 2)
    return [part.flatten(0, 1) for part in joined.split([queries * head, head, head], 1)]


def _join_gated(shards: list[Tensor], hf: HfConfig) -> list[Tensor]:
    gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
    return [torch.cat(gates), torch.cat(ups)]


LAYOUTS = {
    "replicated": Layout(lambda t, rank, size, hf: t[0], lambda shards, hf: [shards[0]]),
    "rows": Layout(lambda t, rank, size, hf: t[0].chunk(size, 1)[rank], lambda shards, hf: [torch.cat(shards, 1)]),
    "vocab": Layout(_split_vocab, lambda shards, hf: [torch.cat(shards)[: hf.vocab_size]]),
    "qkv": Layout(_split_qkv, _join_qkv),
    "gated": Layout(lambda t, rank, size, hf: torch.cat([part.chunk(size)[rank] for part in t]), _join_gated),
}

_QKV = tuple(f"self_attn.{x}_proj" for x in "qkv")

# Megatron name (within its layer) → (layout, Hugging Face names). transformer-engine fuses a norm into the linear
# layer that follows it, hence two names for the same weight.
LAYER_RULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "input_layernorm.weight": ("replicated", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.layer_norm_weight": ("replicated", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": ("qkv", tuple(f"{name}.weight" for name in _QKV)),
    "self_attention.linear_qkv.bias": ("qkv", tuple(f"{name}.bias" for name in _QKV)),
    "self_attention.q_layernorm.weight": ("replicated", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("replicated", ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": ("rows", ("self_attn.o_proj.weight",)),
    "pre_mlp_layernorm.weight": ("replicated", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": ("replicated", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": ("gated", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("rows", ("mlp.down_proj.weight",)),
}
RULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "embedding.word_embeddings.weight": ("vocab", ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": ("replicated", ("model.norm.weight",)),
    "output_layer.weight": ("vocab", ("lm_head.weight",)),
}


def rule(name: str, first_layer: int) -> tuple[Layout, list[str]]:
    """The layout and the Hugging Face tensors of a Megatron parameter, whose stage begins at `first_layer`."""
    if name in RULES:
        layout, sources = RULES[name]
        return LAYOUTS[layout], list(sources)
    _, _, index, within = name.split(".", 3)  # decoder.layers.I.…
    layout, sources = LAYER_RULES[within]
    return LAYOUTS[layout], [f"model.layers.{int(index) + first_layer}.{source}" for source in sources]


class HfTensors:
    """The tensors of a Hugging Face checkpoint directory, read one at a time."""

    def __init__(self, directory: str | Path, *, tied: bool) -> None:
        """Looks which there are, and where.

        Args:
            directory: Of the checkpoint.
            tied: Whether the output layer has the embeddings' weights, as `tie_word_embeddings` of config.json says.
        """
        self.directory, self.tied = Path(directory), tied
        self.files = tensor_files(directory)

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        if name == "lm_head.weight" and self.tied:
            name = "model.embed_tokens.weight"
        if name not in self.files:
            why = ", and its config.json does not tie it to the embeddings" if name == "lm_head.weight" else ""
            raise ValueError(f"{self.directory} has no tensor {name}{why}; the checkpoint is incomplete.")
        path = self.files[name]
        try:
            with safe_open(str(path), "pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: the tensor {name} cannot be read ({first_line(error)}).") from None
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: the tensor {name} holds NaN or infinity; the checkpoint is damaged.")
        return tensor


def load_hf_weights(model: Model, directory: str | Path, parallel: Parallel) -> None:
    """Fills this rank's shard of the model from a Hugging Face checkpoint.

    Raises:
        ValueError: a tensor is missing, damaged, of another shape than the model's, or holds NaN or infinity.
    """
    check_tensors(directory, read_model_config(directory))
    tensors = HfTensors(directory, tied=model.hf_config.tie_word_embeddings)
    first_layer = _first_layer(model, parallel)
    for name, parameter in model.module.named_parameters():
        layout, sources = rule(name, first_layer)
        shard = layout.split(
            [tensors[source] for source in sources],
            parallel.tensor_rank,
            parallel.tensor_size,
            model.hf_config,
        )
        if shard.shape != parameter.shape:
            raise ValueError(f"{directory}: {sources} give {tuple(shard.shape)} for {name} {tuple(parameter.shape)}")
        with torch.no_grad():
            parameter.copy_(shard)


def named_hf_tensors(model: Model, parallel: Parallel) -> Iterator[tuple[str, Tensor]]:
    """Streams the model's weights as whole tensors under their Hugging Face names.

    A collective: every rank must iterate to the end, and every rank gets every tensor, on its own device. At most one
    parameter is whole at a time.
    """
    for stage in range(parallel.pipeline_size):
        mine = stage == parallel.pipeline_rank
        names = [name for name, _ in model.module.named_parameters()] if mine else None
        names = parallel.broadcast_from_stage(names, stage)
        parameters = dict(model.module.named_parameters())
        first_layer = stage * (model.config.num_layers // parallel.pipeline_size)
        for name in names or []:
            if name == "output_layer.weight" and model.hf_config.tie_word_embeddings:
                continue
            layout, targets = rule(name, first_layer)
            whole = None
            if mine:
                shard = parameters[name].detach()
                whole_everywhere = layout is LAYOUTS["replicated"] or parallel.tensor_size == 1
                shards = [shard] if whole_everywhere else _gather_shards(shard, parallel)
                whole = layout.join(shards, model.hf_config)
            if parallel.pipeline_size > 1:
                whole = _broadcast_tensors(whole, stage, parallel)
            assert whole is not None
            yield from zip(targets, whole, strict=True)


def _first_layer(model: Model, parallel: Parallel) -> int:
    return int(parallel.pipeline_rank * (model.config.num_layers // parallel.pipeline_size))


def _gather_shards(shard: Tensor, parallel: Parallel) -> list[Tensor]:
    shards = [torch.empty_like(shard) for _ in range(parallel.tensor_size)]
    dist.all_gather(shards, shard.contiguous(), group=mpu.get_tensor_model_parallel_group())
    return shards


def _broadcast_tensors(tensors: list[Tensor] | None, stage: int, parallel: Parallel) -> list[Tensor]:
    described = parallel.broadcast_from_stage([(t.shape, t.dtype) for t in tensors or []], stage)
    device = parallel.backend.device
    tensors = tensors or [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in described]
    source = dist.get_global_rank(parallel.pipeline_group, stage)
    for i, tensor in enumerate(tensors):
        tensors[i] = tensor.contiguous()
        dist.broadcast(tensors[i], source, parallel.pipeline_group)
    return tensors
