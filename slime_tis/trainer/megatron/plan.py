"""`slime-tis plan`: memory and sizes of a run on any number of ranks, computed on one machine without weights.

The model and megatron-core's gradient buffers of one rank of every pipeline stage are built under torch's
`FakeTensorMode`, with the `fake` process group of that number of ranks. Their sizes are exact. Optimizer state is
computed from them: megatron-core reads values while it builds the optimizer. Activations are the estimate of
`memory.bytes_per_token`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from slime_tis.hf_directory import moe_sizes
from slime_tis.trainer.megatron.architecture import HfConfig, build_model, indivisible, read_hf_config
from slime_tis.trainer.megatron.engine import wrap
from slime_tis.trainer.megatron.memory import bytes_per_token
from slime_tis.trainer.megatron.parallel import Parallel, initialize, shut_down
from slime_tis.trainer.options.megatron import MegatronConfig

GIB = 2**30
USABLE = 0.9
"""Share of a GPU's memory that tensors may take; the remainder is for libraries, communication and fragmentation."""
MIN_TOKENS = 2048
"""Tokens that a recommended layout must fit into one micro-batch."""
MAX_TENSOR_SIZE = 8
"""Ranks of a node: tensor parallelism over nodes is slow."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Memory of one rank of a pipeline stage, in bytes."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    temporary: int
    """Gradient of the largest weight, before it is added to its buffer."""
    per_token: int
    """Activations and logits per token of a micro-batch, at the peak of a step."""

    @property
    def fixed(self) -> int:
        """Memory that does not depend on the micro-batch."""
        return self.weights + self.gradients + self.optimizer + self.temporary

    def tokens(self, memory: float) -> int:
        """Tokens of the largest micro-batch in this number of bytes."""
        return max(int(memory - self.fixed) // self.per_token, 0)


@contextmanager
def fake_rank(config: MegatronConfig, world_size: int, rank: int) -> Iterator[Parallel]:
    """One of `world_size` ranks, without the others; its collectives do nothing, its tensors have no memory."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        parallel = initialize(config)
        with FakeTensorMode():
            yield parallel
    finally:
        shut_down()


def stages(config: MegatronConfig, world_size: int) -> list[Stage]:
    """The memory of one rank of each pipeline stage.

    Raises:
        ValueError: the model or the ranks do not divide; the message names every such size.
    """
    if problems := layout_problems(config, world_size):
        raise ValueError(" ".join(problems))
    size = config.pipeline_model_parallel_size
    return [_stage(config, world_size, index * world_size // size) for index in range(size)]


def _stage(config: MegatronConfig, world_size: int, rank: int) -> Stage:
    with fake_rank(config, world_size, rank) as parallel:
        model = build_model(config.hf_checkpoint, config, parallel)
        ddp = wrap(model, config)
        gradients = sum(buffer.grad_data.nbytes for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers])
        weights = [(each.numel(), 1, not getattr(each, "allreduce", True)) for each in model.module.parameters()]
        return _stage_of(config, world_size, weights, gradients, model.config)


def _stage_of(
    config: MegatronConfig,
    world_size: int,
    weights: Sequence[tuple[int, int, bool]],
    gradients: int,
    transformer: TransformerConfig,
) -> Stage:
    """The memory of a rank with these weights: (values, number of such weights, is an expert's)."""
    itemsize, per_value = (4, 8) if config.precision == "fp32" else (2, 12)
    optimizer = 0
    for size, count, is_expert in weights:
        shards = world_size // (config.expert_parallel_size if is_expert else _replica(config))
        optimizer += per_value * size * count // (shards if config.use_distributed_optimizer else 1)
    if config.precision != "fp32" and config.transformer_impl != "local" and transformer.num_moe_experts is None:
        transformer = copy.copy(transformer)
        transformer.use_te_activation_func = False  # transformer-engine's layers save more
    parameters = sum(size * count for size, count, _ in weights)
    return Stage(
        parameters=parameters,
        weights=itemsize * parameters,
        gradients=gradients,
        optimizer=optimizer,
        temporary=itemsize * max(size for size, _, _ in weights),
        per_token=bytes_per_token(transformer, 0, config.log_probs_chunk_size) + _backward_bytes(transformer),
    )


def _backward_bytes(config: TransformerConfig) -> int:
    """Bytes per token of the gradients that exist at once while one layer is differentiated.

    They are those of the product in the MLP, of gate and up (3 inner vectors), and of its input and output (3 hidden).
    """
    inner = config.ffn_hidden_size
    if config.num_moe_experts is not None:
        inner = max(inner if 0 in config.moe_layer_freq else 0, config.moe_router_topk * config.moe_ffn_hidden_size)
    return int(config.params_dtype.itemsize * 3 * (inner / config.tensor_model_parallel_size + config.hidden_size))


def _replica(config: MegatronConfig) -> int:
    """Ranks among which an optimizer shard is not repeated: tensor × pipeline; context ranks share it, too."""
    return config.tensor_model_parallel_size * config.pipeline_model_parallel_size


def layout_problems(config: MegatronConfig, world_size: int) -> list[str]:
    """Every size that does not divide, in words."""
    hf = read_hf_config(config.hf_checkpoint)
    problems = indivisible(hf, config)
    if world_size % config.model_parallel_size:
        problems.append(
            f"{world_size} ranks are not a multiple of tensor × pipeline × context {config.model_parallel_size}."
        )
    if moe_sizes(hf) is not None:
        if world_size % config.expert_parallel_size:
            sizes = f"expert × expert-tensor × pipeline {config.expert_parallel_size}"
            problems.append(f"{world_size} ranks are not a multiple of {sizes}.")
        if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
            problems.append("Mixtures of experts with --tensor-model-parallel-size need --sequence-parallel.")
    return problems


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One weight of the whole model, or the weights of all experts with the same role in a layer."""

    name: str
    layer: int | None
    size: int
    """Number of values."""
    count: int
    """Number of experts with such a weight; 1 for other weights."""
    is_sharded: bool
    """Whether tensor-parallel ranks divide it."""
    is_expert: bool


@dataclass(frozen=True, kw_only=True)
class Census:
    """The weights of a whole model, from which the memory of any layout follows."""

    weights: tuple[Weight, ...]
    transformer: TransformerConfig
    tied: bool

    @property
    def total(self) -> int:
        """The number of parameters of the model."""
        return sum(weight.size * weight.count for weight in self.weights)

    def stages(self, config: MegatronConfig, world_size: int) -> list[Stage]:
        """What `stages` builds, without building it; gradient buffers without padding."""
        pipeline, tensor = config.pipeline_model_parallel_size, config.tensor_model_parallel_size
        expert_tensor = config.expert_tensor_parallel_size or tensor
        per_stage = self.transformer.num_layers // pipeline
        sizes: list[list[tuple[int, int, bool]]] = [[] for _ in range(pipeline)]
        for weight in self.weights:
            shards = expert_tensor if weight.is_expert else tensor if weight.is_sharded else 1
            count = weight.count // (config.expert_model_parallel_size if weight.is_expert else 1)
            shard = weight.size // shards, count, weight.is_expert
            if weight.layer is not None:
                sizes[weight.layer // per_stage].append(shard)
                continue
            is_embedding = weight.name.startswith("embedding.")
            sizes[0 if is_embedding else -1].append(shard)
            if is_embedding and self.tied and pipeline > 1:
                sizes[-1].append(shard)
        transformer = copy.copy(self.transformer)
        transformer.tensor_model_parallel_size, transformer.sequence_parallel = tensor, config.sequence_parallel
        return [
            _stage_of(config, world_size, stage, 4 * sum(size * count for size, count, _ in stage), transformer)
            for stage in sizes
        ]


def census(config: MegatronConfig) -> Census:
    """Builds the model on one rank, with one expert per layer."""
    moe = moe_sizes(read_hf_config(config.hf_checkpoint))
    experts = 1 if moe is None else moe.num_experts
    alone = replace(
        config,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=None if moe is None else 1,
        sequence_parallel=False,
    )
    with fake_rank(alone, experts, 0) as parallel:
        model = build_model(alone.hf_checkpoint, alone, parallel)
        weights = []
        for name, parameter in model.module.named_parameters():
            is_expert = not getattr(parameter, "allreduce", True)
            layer = int(name.split(".")[2]) if name.startswith("decoder.layers.") else None
            weights.append(
                Weight(
                    name=name,
                    layer=layer,
                    size=parameter.numel(),
                    count=experts if is_expert else 1,
                    is_sharded=getattr(parameter, "tensor_model_parallel", False),
                    is_expert=is_expert,
                )
            )
        return Census(weights=tuple(weights), transformer=model.config, tied=bool(model.hf_config.tie_word_embeddings))


def smallest_layout(
    config: MegatronConfig, whole: Census, world_size: int, memory: float
) -> tuple[int, MegatronConfig] | None:
    """The fewest ranks, up to `world_size`, whose ranks all fit `MIN_TOKENS` tokens; None if no layout does.

    Layouts of powers of two without context parallelism, with the distributed optimizer; of equal numbers of ranks the
    one with the smallest pipeline, then the smallest tensor size, then the smallest expert size.
    """
    is_sparse = whole.transformer.num_moe_experts is not None
    for ranks in _powers(world_size):
        for pipeline, tensor, expert in product(_powers(ranks), _powers(min(ranks, MAX_TENSOR_SIZE)), _powers(ranks)):
            if expert > 1 and not is_sparse:
                continue
            layout = replace(
                config,
                tensor_model_parallel_size=tensor,
                pipeline_model_parallel_size=pipeline,
                context_parallel_size=1,
                expert_model_parallel_size=expert,
                expert_tensor_parallel_size=1 if is_sparse else None,
                sequence_parallel=tensor > 1,
                use_distributed_optimizer=True,
            )
            if layout_problems(layout, ranks):
                continue
            if min(stage.tokens(memory) for stage in whole.stages(layout, ranks)) >= MIN_TOKENS:
                return ranks, layout
    return None


def _powers(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit]


def plan(config: MegatronConfig, world_size: int, *, gpu_memory: float, bandwidth: float) -> str:
    """The plan as text.

    Args:
        config: Model, parallel sizes and precision.
        world_size: Number of ranks.
        gpu_memory: Memory of each rank's GPU, GiB.
        bandwidth: Bandwidth from training to rollout, GB/s.

    Raises:
        ValueError: the model or the ranks do not divide.
    """
    logging.getLogger("megatron").setLevel(logging.ERROR)
    hf = read_hf_config(config.hf_checkpoint)
    ranks, whole = stages(config, world_size), census(config)
    memory = USABLE * gpu_memory * GIB
    data = world_size // config.model_parallel_size
    update = whole.total * (4 if config.precision == "fp32" else 2)
    lines = [
        f"{config.hf_checkpoint}: {whole.total:,} parameters ({hf.architectures[0]}), {config.precision}",
        f"{world_size} ranks: tensor {config.tensor_model_parallel_size} × pipeline {len(ranks)} × context "
        f"{config.context_parallel_size} × data {data}, expert {config.expert_model_parallel_size}",
        "",
        *_table(ranks, memory),
        "",
        f"Tokens: of the largest micro-batch in {USABLE:.0%} of {gpu_memory:g} GiB.",
        f"Weight update: {update / 1e9:.2f} GB, {update / 1e9 / bandwidth:.2f} s at {bandwidth:g} GB/s.",
        _replay(hf),
    ]
    if min(stage.tokens(memory) for stage in ranks) == 0:
        lines.append("This layout does not fit.")
    smallest = smallest_layout(config, whole, world_size, memory)
    if smallest is None:
        lines.append(f"No layout of up to {world_size} ranks fits {MIN_TOKENS:,} tokens.")
    else:
        lines.append(f"Smallest layout that fits {MIN_TOKENS:,} tokens: {_flags(*smallest)}")
    return "\n".join(filter(None, lines))


def _table(ranks: Sequence[Stage], memory: float) -> Iterator[str]:
    columns = ("weights", "gradients", "optimizer", "fixed")
    yield f"{'stage':>5} {'parameters':>16} " + " ".join(f"{name:>12}" for name in (*columns, "per token", "tokens"))
    for index, stage in enumerate(ranks):
        sizes = " ".join(f"{getattr(stage, name) / GIB:8.2f} GiB" for name in columns)
        per_token = f"{stage.per_token / 2**20:8.3f} MiB"
        yield f"{index:5} {stage.parameters:16,} {sizes} {per_token} {stage.tokens(memory):12,}"


def _replay(hf: HfConfig) -> str:
    moe = moe_sizes(hf)
    if moe is None:
        return ""
    return f"Routing replay: {2 * len(moe.layers) * moe.top_k:,} bytes per token."


def _flags(ranks: int, config: MegatronConfig) -> str:
    sizes = (
        ("--tensor-model-parallel-size", config.tensor_model_parallel_size),
        ("--pipeline-model-parallel-size", config.pipeline_model_parallel_size),
        ("--expert-model-parallel-size", config.expert_model_parallel_size),
        ("--expert-tensor-parallel-size", config.expert_tensor_parallel_size or 1),
    )
    words = [f"{flag} {size}" for flag, size in sizes if size > 1]
    if config.expert_tensor_parallel_size == 1 and config.tensor_model_parallel_size > 1:
        words.append("--expert-tensor-parallel-size 1")
    words += ["--sequence-parallel"] if config.sequence_parallel else []
    return f"{ranks} ranks, {' '.join([*words, '--use-distributed-optimizer'])}"
