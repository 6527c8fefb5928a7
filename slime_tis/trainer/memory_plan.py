"""`slime-tis plan`: memory and sizes of a run on any number of ranks, computed on one machine without weights.

The model is built once, on one rank, under torch's `FakeTensorMode` with the `fake` process group.
Its weights give the memory of any layout; `tests/megatron/test_plan.py` compares it with what
megatron-core builds on each rank. The padding of the distributed optimizer's buffers, less than 64
values per weight, is not counted. Activations are estimated: in the schedule 1F1B, stage s of P
holds P − s micro-batches.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from slime_tis.hf_directory import moe_sizes, read_model_config
from slime_tis.trainer.cli.file_checks import layout_problems
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron.architecture import build_model, read_hf_config
from slime_tis.trainer.megatron.memory import bytes_per_token
from slime_tis.trainer.megatron.parallel import Parallel, initialize, shut_down

if TYPE_CHECKING:  # its import must follow that of slime_tis.trainer.megatron
    from megatron.core.transformer.transformer_config import TransformerConfig

GIB = 2**30
MAX_RANKS = 65_536
USABLE = 0.9
"""Share of a GPU's memory that tensors may take; the remainder is for libraries, communication and
fragmentation."""
MIN_TOKENS = 2048
"""Tokens that a recommended layout must fit into one micro-batch."""
MAX_TENSOR_SIZE = 8
"""Ranks of a node: tensor parallelism over nodes is slow."""


class Weight(NamedTuple):
    """A weight of the whole model, or a rank's shard of it; with `copies` experts, the weights with the same role."""

    rows: int
    size: int
    """Number of values."""
    copies: int
    layer: int | None
    """None for the embedding, the last norm and the output layer."""
    is_embedding: bool
    is_sharded: bool
    """Whether tensor-parallel ranks divide it."""
    is_expert: bool


def _backward_bytes(config: TransformerConfig) -> int:
    """Bytes per token of the gradients that exist at once while one layer is differentiated.

    The MLP has gradients of its product, gate and up (3 inner vectors), of its input, output and
    residual (3 hidden).
    """
    inner = config.ffn_hidden_size
    if config.num_moe_experts is not None:
        inner = max(
            inner if 0 in config.moe_layer_freq else 0,
            config.moe_router_topk * config.moe_ffn_hidden_size,
        )
    return int(
        config.params_dtype.itemsize
        * 3
        * (inner / config.tensor_model_parallel_size + config.hidden_size)
    )


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
    """Activations per token of a micro-batch, at the peak of a step, of all micro-batches that the
    stage holds."""

    @property
    def fixed(self) -> int:
        """Memory that does not depend on the micro-batch."""
        return self.weights + self.gradients + self.optimizer + self.temporary

    def tokens(self, memory: float) -> int:
        """Tokens of the largest micro-batch in this number of bytes."""
        return max(int(memory - self.fixed) // self.per_token, 0)


@dataclass(frozen=True, kw_only=True)
class Census:
    """The weights of a whole model, from which the memory of any layout follows."""

    weights: tuple[Weight, ...]
    transformer: TransformerConfig
    tied: bool

    @property
    def total(self) -> int:
        """The number of parameters of the model."""
        return sum(weight.size * weight.copies for weight in self.weights)

    def stages(self, config: MegatronConfig, world_size: int) -> list[Stage]:
        """The memory of one rank of each pipeline stage."""
        pipeline, tensor = config.pipeline_model_parallel_size, config.tensor_model_parallel_size
        per_stage = self.transformer.num_layers // pipeline
        shards: list[list[Weight]] = [[] for _ in range(pipeline)]
        for weight in self.weights:
            first = pipeline - 1 if weight.layer is None else weight.layer // per_stage
            if weight.is_embedding:
                first = 0
            size, copies = weight.size, weight.copies
            if weight.is_expert:
                size //= config.expert_tensor_parallel_size or tensor
                copies //= config.expert_model_parallel_size
            elif weight.is_sharded and weight.layer is None:  # the vocabulary is padded
                size = -(-weight.rows // tensor) * (weight.size // weight.rows)
            elif weight.is_sharded:
                size //= tensor
            for stage in {first, pipeline - 1} if weight.is_embedding and self.tied else {first}:
                shards[stage].append(weight._replace(size=size, copies=copies))
        return [self._stage(config, world_size, index, shard) for index, shard in enumerate(shards)]

    def _stage(
        self, config: MegatronConfig, world_size: int, index: int, shard: Sequence[Weight]
    ) -> Stage:
        itemsize, per_value = (4, 8) if config.precision == "fp32" else (2, 12)
        stages = config.pipeline_model_parallel_size
        transformer = copy.copy(self.transformer)
        transformer.tensor_model_parallel_size = config.tensor_model_parallel_size
        transformer.sequence_parallel = config.sequence_parallel
        transformer.context_parallel_size = config.context_parallel_size
        transformer.expert_tensor_parallel_size = config.expert_tensor_parallel_size
        # a stage holds the micro-batches of itself and of the stages after it
        in_flight = stages - index
        transformer.num_layers = transformer.num_layers // stages * in_flight
        transformer.pipeline_model_parallel_size = in_flight
        if (
            config.precision != "fp32"
            and config.transformer_impl != "local"
            and transformer.num_moe_experts is None
        ):
            transformer.use_te_activation_func = False  # transformer-engine's layers save more
        optimizer = 0
        for weight in shard:
            # context-parallel ranks share the optimizer state, too
            repeats = (
                config.expert_parallel_size
                if weight.is_expert
                else config.tensor_model_parallel_size * stages
            )
            ranks = world_size // repeats if config.use_distributed_optimizer else 1
            optimizer += per_value * weight.size * weight.copies // ranks
        parameters = sum(weight.size * weight.copies for weight in shard)
        return Stage(
            parameters=parameters,
            weights=itemsize * parameters,
            gradients=4 * parameters,
            optimizer=optimizer,
            temporary=itemsize * max(weight.size for weight in shard),
            per_token=bytes_per_token(transformer, 0, config.log_probs_chunk_size)
            + _backward_bytes(transformer),
        )


@contextmanager
def fake_rank(config: MegatronConfig, world_size: int, rank: int = 0) -> Iterator[Parallel]:
    """One of `world_size` ranks, without the others; its collectives do nothing, its tensors have no memory."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        parallel = initialize(
            replace(config, transformer_impl=None)
        )  # transformer-engine cannot be built on the CPU
        with FakeTensorMode():
            yield parallel
    finally:
        shut_down()


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
    with fake_rank(alone, experts) as parallel:
        model = build_model(alone.hf_checkpoint, alone, parallel)
        weights = []
        for name, parameter in model.module.named_parameters():
            is_expert = not getattr(parameter, "allreduce", True)
            weight = Weight(
                rows=len(parameter),
                size=parameter.numel(),
                copies=experts if is_expert else 1,
                layer=int(name.split(".")[2]) if name.startswith("decoder.layers.") else None,
                is_embedding=name.startswith("embedding."),
                is_sharded=getattr(parameter, "tensor_model_parallel", False),
                is_expert=is_expert,
            )
            weights.append(weight)
        return Census(
            weights=tuple(weights),
            transformer=model.config,
            tied=bool(model.hf_config.tie_word_embeddings),
        )


def smallest_layout(
    config: MegatronConfig, whole: Census, world_size: int, memory: float
) -> tuple[int, MegatronConfig] | None:
    """The fewest ranks, up to `world_size`, whose ranks all fit `MIN_TOKENS` tokens; None if no layout does.

    Layouts of powers of two without context parallelism, with the distributed optimizer; of equal
    numbers of ranks the one with the smallest pipeline, then the smallest tensor size, then the
    smallest expert size.
    """
    model, moe = (
        read_model_config(config.hf_checkpoint),
        moe_sizes(read_hf_config(config.hf_checkpoint)),
    )
    for ranks in _powers(world_size):
        for pipeline, tensor, expert in product(
            _powers(ranks), _powers(min(ranks, MAX_TENSOR_SIZE)), _powers(ranks)
        ):
            if expert > 1 and moe is None:
                continue
            layout = replace(
                config,
                tensor_model_parallel_size=tensor,
                pipeline_model_parallel_size=pipeline,
                context_parallel_size=1,
                expert_model_parallel_size=expert,
                expert_tensor_parallel_size=None if moe is None else 1,
                sequence_parallel=tensor > 1,
                use_distributed_optimizer=True,
            )
            if any(layout_problems(layout, model, moe, ranks)):
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
        ValueError: the model or the ranks do not divide, or a number is out of range.
    """
    for flag, value, most in (
        ("--world-size", world_size, MAX_RANKS),
        ("--gpu-memory", gpu_memory, 1e6),
    ):
        if not 0 < value <= most:
            raise ValueError(f"{flag} is {value:g}; it must be above 0 and at most {most:g}.")
    if not 0 < bandwidth < math.inf:
        raise ValueError(f"--bandwidth is {bandwidth:g}; it must be above 0.")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    hf = read_hf_config(config.hf_checkpoint)
    moe = moe_sizes(hf)
    if problems := [
        *layout_problems(config, read_model_config(config.hf_checkpoint), moe, world_size)
    ]:
        raise ValueError(" ".join(problems))
    whole = census(config)
    ranks = whole.stages(config, world_size)
    memory = USABLE * gpu_memory * GIB
    data = world_size // config.model_parallel_size
    update = whole.total * (4 if config.precision == "fp32" else 2)
    lines = [
        (
            f"{config.hf_checkpoint}: {whole.total:,} parameters ({hf.architectures[0]}),"
            f" {config.precision}"
        ),
        (
            f"{world_size} ranks: tensor {config.tensor_model_parallel_size} × pipeline"
            f" {len(ranks)} × context {config.context_parallel_size} × data {data}, expert"
            f" {config.expert_model_parallel_size}"
        ),
        "",
        *_table(ranks, memory),
        "",
        f"tokens: the largest micro-batch that fits into {USABLE:.0%} of {gpu_memory:g} GiB.",
        (
            f"Weight update: {update / 1e9:.2f} GB, {update / 1e9 / bandwidth:.2f} s at"
            f" {bandwidth:g} GB/s."
        ),
        f"Routing replay: {2 * len(moe.layers) * moe.top_k:,} bytes per token." if moe else "",
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
    yield f"{'stage':>5} {'parameters':>16} " + " ".join(
        f"{name:>12}" for name in (*columns, "per token", "tokens")
    )
    for index, stage in enumerate(ranks):
        sizes = " ".join(f"{getattr(stage, name) / GIB:8.2f} GiB" for name in columns)
        per_token = f"{stage.per_token / 2**20:8.3f} MiB"
        yield f"{index:5} {stage.parameters:16,} {sizes} {per_token} {stage.tokens(memory):12,}"


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
    return (
        f"{ranks} rank{'s' if ranks > 1 else ''},"
        f" {' '.join([*words, '--use-distributed-optimizer'])}"
    )
