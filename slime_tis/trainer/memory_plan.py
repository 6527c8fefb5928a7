"""`slime-tis plan`: memory and sizes of a run on any number of ranks.

It runs on one machine and needs no weights. The model is built once, on one rank, under torch's
`FakeTensorMode` with the `fake` process group. The memory of any layout follows from its weights;
`tests/megatron/test_plan.py` compares it with what megatron-core builds on each rank. The padding
of the distributed optimizer's buffers, less than 64 values per weight, is not counted. Activations
are estimated: in the schedule 1F1B, stage s of P holds P − s micro-batches.
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

from slime_tis.families import family_of
from slime_tis.hf_directory import moe_sizes, read_model_config
from slime_tis.trainer.adapter_plan import adapter_lines
from slime_tis.trainer.cli.file_checks import layout_problems
from slime_tis.trainer.cli.train_arguments import Layout
from slime_tis.trainer.configs.adapter_targets import check_adapters
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron.architecture import build_model, read_hf_config
from slime_tis.trainer.megatron.frozen_weights import freeze_weights, untrained_message
from slime_tis.trainer.megatron.memory import bytes_per_token
from slime_tis.trainer.megatron.parallel import Parallel, initialize, shut_down

if TYPE_CHECKING:  # its import must follow that of slime_tis.trainer.megatron
    from slime_tis.trainer.megatron.model_config import ModelConfig

GIB = 2**30
"""Bytes in a GiB."""
MAX_RANKS = 65_536
"""Largest number of ranks that a plan accepts."""
MAX_GPU_MEMORY = 1e6
"""Largest memory of a GPU that a plan accepts, GiB."""
USABLE = 0.9
"""Share of a GPU's memory for tensors. The remainder is for libraries, communication and
fragmentation."""
MIN_TOKENS = 2048
"""Tokens that a recommended layout must fit into one micro-batch."""
MAX_TENSOR_SIZE = 8
"""Ranks of a node: tensor parallelism over nodes is slow."""


class Weight(NamedTuple):
    """A weight of the model, or a rank's shard of a weight.

    An expert's weight represents the equal weights of `copies` experts.
    """

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
    is_trained: bool
    """False if --freeze-params-name-list or --only-train-params-name-list excludes it."""


def _backward_bytes(config: ModelConfig) -> int:
    """Bytes per token of the gradients that exist at once while one layer is differentiated.

    In the MLP these are gradients of product, gate and up (3 inner vectors), and of input, output
    and residual (3 hidden vectors).
    """
    inner = config.ffn_hidden_size
    if config.num_moe_experts is not None:
        chosen_experts = config.moe_router_topk * config.moe_ffn_hidden_size
        has_dense_layers = 0 in config.moe_layer_freq
        if has_dense_layers:
            inner = max(inner, chosen_experts)
        else:
            inner = chosen_experts
    values = 3 * (inner / config.tensor_model_parallel_size + config.hidden_size)
    return int(config.params_dtype.itemsize * values)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Memory of one rank of a pipeline stage, in bytes."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    saved_weights: int
    """The weights that a checkpoint has: with LoRA only the adapters."""
    temporary: int
    """Gradient of the largest trained weight, before it is added to its buffer; 0 if the stage has
    nothing to train, which is refused."""
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
    """The weights of a model, from which the memory of any layout follows."""

    weights: tuple[Weight, ...]
    transformer: ModelConfig
    tied: bool

    @property
    def total(self) -> int:
        """Number of parameters of the model."""
        return sum(weight.size * weight.copies for weight in self.weights)

    @property
    def trained(self) -> int:
        """Number of parameters that are trained."""
        return sum(weight.size * weight.copies for weight in self.weights if weight.is_trained)

    def stages(self, config: MegatronConfig, world_size: int) -> list[Stage]:
        """Returns the memory of a rank, stage by stage."""
        pipeline = config.pipeline_model_parallel_size
        tensor = config.tensor_model_parallel_size
        per_stage = self.transformer.num_layers // pipeline
        shards: list[list[Weight]] = [[] for _ in range(pipeline)]
        for weight in self.weights:
            size = weight.size
            copies = weight.copies
            if weight.is_expert:
                size //= config.expert_tensor_parallel_size or tensor
                copies //= config.expert_model_parallel_size
            elif weight.is_sharded and weight.layer is None:
                # The vocabulary is padded to a multiple of the tensor-parallel size.
                size = -(-weight.rows // tensor) * (weight.size // weight.rows)
            elif weight.is_sharded:
                size //= tensor
            stages = {pipeline - 1}  # the last norm and the output layer
            if weight.layer is not None:
                stages = {weight.layer // per_stage}
            elif weight.is_embedding:
                stages = {0}
                if self.tied:
                    # The output layer of the last stage has its own copy.
                    stages = {0, pipeline - 1}
            for stage in stages:
                shards[stage].append(weight._replace(size=size, copies=copies))
        return [self._stage(config, world_size, index, shard) for index, shard in enumerate(shards)]

    def _stage(
        self, config: MegatronConfig, world_size: int, index: int, shard: Sequence[Weight]
    ) -> Stage:
        """Returns the memory of a rank of one stage, whose shards of weights are given."""
        itemsize = 2
        # Adam's two moments and the float32 copy of the weight; fp32 training needs no copy.
        optimizer_bytes = 12
        if config.precision == "fp32":
            itemsize = 4
            optimizer_bytes = 8
        stages = config.pipeline_model_parallel_size
        transformer = copy.copy(self.transformer)
        transformer.tensor_model_parallel_size = config.tensor_model_parallel_size
        transformer.sequence_parallel = config.sequence_parallel
        transformer.context_parallel_size = config.context_parallel_size
        transformer.expert_tensor_parallel_size = config.expert_tensor_parallel_size
        # A stage holds the micro-batches of itself and of the stages after it.
        in_flight = stages - index
        transformer.num_layers = transformer.num_layers // stages * in_flight
        transformer.pipeline_model_parallel_size = in_flight
        has_engine = config.precision != "fp32" and config.transformer_impl != "local"
        if has_engine and transformer.num_moe_experts is None:
            # As `architecture` sets it: transformer-engine's layers keep more activations.
            transformer.use_te_activation_func = False
        optimizer = 0
        trained = [weight for weight in shard if weight.is_trained]
        for weight in trained:
            sharing_ranks = 1
            if config.use_distributed_optimizer:
                model_parallel = config.tensor_model_parallel_size * stages
                if weight.is_expert:
                    model_parallel = config.expert_parallel_size
                # Context-parallel ranks share the optimizer state, too.
                sharing_ranks = world_size // model_parallel
            optimizer += optimizer_bytes * weight.size * weight.copies // sharing_ranks
        activations = bytes_per_token(transformer, 0, config.log_probs_chunk_size)
        parameters = sum(weight.size * weight.copies for weight in shard)
        saved = parameters
        if config.trains_adapters:
            saved = sum(weight.size * weight.copies for weight in trained)
        return Stage(
            parameters=parameters,
            saved_weights=itemsize * saved,
            weights=itemsize * parameters,
            # megatron-core adds up gradients in float32, whatever the precision.
            gradients=4 * sum(weight.size * weight.copies for weight in trained),
            optimizer=optimizer,
            temporary=itemsize * max((weight.size for weight in trained), default=0),
            per_token=activations + _backward_bytes(transformer),
        )


@contextmanager
def fake_rank(config: MegatronConfig, world_size: int, rank: int = 0) -> Iterator[Parallel]:
    """One of `world_size` ranks, without the others.

    Collectives do nothing, and tensors have no memory.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        # transformer-engine cannot be built on the CPU.
        parallel = initialize(replace(config, transformer_impl=None))
        with FakeTensorMode():
            yield parallel
    finally:
        shut_down()


def census(config: MegatronConfig) -> Census:
    """Builds the model on one rank, with one expert per layer."""
    moe = moe_sizes(read_hf_config(config.hf_checkpoint))
    experts = 1
    expert_tensor_size = None
    if moe is not None:
        experts = moe.num_experts
        expert_tensor_size = 1
    one_rank = replace(
        config,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=expert_tensor_size,
        sequence_parallel=False,
    )
    # With one rank for each expert, this rank builds one expert per layer, not all.
    with fake_rank(one_rank, experts) as parallel:
        model = build_model(one_rank.hf_checkpoint, one_rank, parallel)
        freeze_weights(model, one_rank, parallel)
        weights = []
        for name, parameter in model.module.named_parameters():
            # megatron-core marks the weights of experts in this way.
            is_expert = not getattr(parameter, "allreduce", True)
            copies = 1
            if is_expert:
                copies = experts
            layer = None
            if name.startswith("decoder.layers."):
                layer = int(name.split(".")[2])
            weight = Weight(
                rows=len(parameter),
                size=parameter.numel(),
                copies=copies,
                layer=layer,
                is_embedding=name.startswith("embedding."),
                is_sharded=getattr(parameter, "tensor_model_parallel", False),
                is_expert=is_expert,
                is_trained=parameter.requires_grad,
            )
            weights.append(weight)
        return Census(
            weights=tuple(weights),
            transformer=model.config,
            tied=bool(model.hf_config.tie_word_embeddings),
        )


def smallest_layout(
    config: MegatronConfig, weights: Census, world_size: int, memory: float
) -> tuple[int, MegatronConfig] | None:
    """Finds the layout with the fewest ranks that all fit `MIN_TOKENS` tokens.

    Sizes are powers of two, without context parallelism, with the distributed optimizer. Among
    layouts of equally many ranks, the smallest pipeline wins, then the smallest tensor size, then
    the smallest expert size.

    Returns:
        Number of ranks, at most `world_size`, and the layout; None if no layout fits.
    """
    model = read_model_config(config.hf_checkpoint)
    moe = moe_sizes(read_hf_config(config.hf_checkpoint))
    expert_tensor_size = None
    if moe is not None:
        expert_tensor_size = 1
    for ranks in _powers(world_size):
        # `product` varies its last argument first, so the first layout that fits wins the ties.
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
                expert_tensor_parallel_size=expert_tensor_size,
                sequence_parallel=tensor > 1,
                use_distributed_optimizer=True,
            )
            if any(layout_problems(layout, model, moe, ranks)):
                continue
            stages = weights.stages(layout, ranks)
            if not all(stage.temporary for stage in stages):
                continue  # a stage with nothing to train
            tokens = [stage.tokens(memory) for stage in stages]
            if min(tokens) >= MIN_TOKENS:
                return ranks, layout
    return None


def _powers(limit: int) -> list[int]:
    """Returns the powers of two up to `limit`."""
    return [1 << exponent for exponent in range(limit.bit_length())]


def plan(layout: Layout, world_size: int, *, gpu_memory: float, bandwidth: float) -> str:
    """Returns the plan as text.

    Args:
        layout: Model, parallel sizes, precision, and the rollout engine.
        world_size: Number of ranks.
        gpu_memory: Memory per GPU and rank, GiB.
        bandwidth: Bandwidth from training to rollout, GB/s.

    Raises:
        ValueError: The model or the ranks do not divide, a number is out of range, or a layer can
            have no LoRA adapter.
    """
    config = layout.megatron
    _check_numbers(world_size, gpu_memory, bandwidth)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    hf = read_hf_config(config.hf_checkpoint)
    moe = moe_sizes(hf)
    model = read_model_config(config.hf_checkpoint)
    check_adapters(config, family_of(hf))
    problems = " ".join(layout_problems(config, model, moe, world_size))
    if problems:
        raise ValueError(problems)
    weights = census(config)
    stages = weights.stages(config, world_size)
    trained = list(_trained(config, weights, stages))
    memory = USABLE * gpu_memory * GIB
    data = world_size // config.model_parallel_size
    update = _update_bytes(config, weights) / 1e9
    lines = [
        f"{config.hf_checkpoint}: {weights.total:,} parameters ({hf.architectures[0]}),"
        f" {config.precision}",
        f"{world_size} ranks: tensor {config.tensor_model_parallel_size} × pipeline"
        f" {len(stages)} × context {config.context_parallel_size} × data {data}, expert"
        f" {config.expert_model_parallel_size}",
    ]
    if config.bf16_if_fast and not config.bf16:
        # The run may be on another machine than the plan.
        lines.append("--bf16-if-fast: the plan is for float32; add --bf16 if the run chooses it.")
    lines += trained
    lines += _table(stages, memory)
    lines += _copies(config, stages)
    lines += adapter_lines(layout, hf, weights.trained)
    lines += [
        f"tokens: the largest micro-batch that fits into {USABLE:.0%} of {gpu_memory:g} GiB.",
        f"Weight update: {update:.4g} GB, {update / bandwidth:.3g} s at {bandwidth:g} GB/s.",
    ]
    if moe is not None:
        replayed = 2 * len(moe.layers) * moe.top_k  # int16 per chosen expert
        lines.append(f"Routing replay: {replayed:,} bytes per token.")
    tokens = [stage.tokens(memory) for stage in stages]
    if min(tokens) == 0:
        lines.append("This layout does not fit.")
    lines.append(_recommendation(config, weights, world_size, memory))
    return "\n".join(lines)


def _update_bytes(config: MegatronConfig, weights: Census) -> int:
    """Returns the bytes that an update sends to the rollout engine."""
    itemsize = 2
    if config.precision == "fp32":
        itemsize = 4
    if not config.trains_adapters:
        return weights.total * itemsize
    if config.rollout_lora == "unmerged":
        return weights.trained * itemsize
    # Weights with merged adapters are sent in float32.
    return (weights.total - weights.trained) * 4


def _check_numbers(world_size: int, gpu_memory: float, bandwidth: float) -> None:
    """Raises ValueError for a number out of range."""
    limits = (
        ("--world-size", world_size, MAX_RANKS),
        ("--gpu-memory", gpu_memory, MAX_GPU_MEMORY),
    )
    for flag, value, limit in limits:
        # NaN fails this comparison, too.
        if not 0 < value <= limit:
            raise ValueError(f"{flag} is {value:g}; it must be above 0 and at most {limit:g}.")
    if not 0 < bandwidth < math.inf:
        raise ValueError(f"--bandwidth is {bandwidth:g}; it must be above 0.")


def _recommendation(config: MegatronConfig, weights: Census, world_size: int, memory: float) -> str:
    """Returns the line about the smallest layout that fits."""
    smallest = smallest_layout(config, weights, world_size, memory)
    if smallest is None:
        return f"No layout of up to {world_size} ranks fits {MIN_TOKENS:,} tokens."
    ranks, layout = smallest
    count = f"{ranks} ranks"
    if ranks == 1:
        count = "1 rank"
    flags = " ".join(_flags(layout))
    return f"Smallest layout that fits {MIN_TOKENS:,} tokens: {count}, {flags}"


def _trained(config: MegatronConfig, weights: Census, stages: Sequence[Stage]) -> Iterator[str]:
    """Yields a line about frozen weights or adapters; nothing if all weights are trained.

    Raises:
        ValueError: A stage has nothing to train.
    """
    if config.trains_adapters:
        yield (
            f"{weights.trained:,} of these parameters are LoRA adapters; the others are frozen and"
            " have no gradient and no optimizer state."
        )
    selected = config.selected_weights
    if selected is None:
        return
    option, _ = selected
    if not all(stage.temporary for stage in stages):
        raise ValueError(untrained_message(option, len(stages)))
    yield (
        f"{weights.trained:,} parameters are trained; the others have no gradient and no"
        " optimizer state."
    )


def _copies(config: MegatronConfig, stages: Sequence[Stage]) -> Iterator[str]:
    """Yields a line about the memory of --async-save; nothing without it."""
    if config.async_save:
        copies = max(stage.saved_weights + stage.optimizer for stage in stages)
        yield (
            f"--async-save: up to {copies / GIB:.2f} GiB of main memory per rank, for copies of"
            " weights and optimizer state."
        )


def _table(stages: Sequence[Stage], memory: float) -> Iterator[str]:
    """Yields a header, and a line for each pipeline stage."""
    yield (
        f"{'stage':>5} {'parameters':>16} {'weights':>12} {'gradients':>12} {'optimizer':>12}"
        f" {'fixed':>12} {'per token':>12} {'tokens':>12}"
    )
    for index, stage in enumerate(stages):
        yield (
            f"{index:5} {stage.parameters:16,} {stage.weights / GIB:8.2f} GiB"
            f" {stage.gradients / GIB:8.2f} GiB {stage.optimizer / GIB:8.2f} GiB"
            f" {stage.fixed / GIB:8.2f} GiB {stage.per_token / 2**20:8.3f} MiB"
            f" {stage.tokens(memory):12,}"
        )


def _flags(config: MegatronConfig) -> list[str]:
    """Returns the flags of a layout."""
    sizes = {
        "--tensor-model-parallel-size": config.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": config.pipeline_model_parallel_size,
        "--expert-model-parallel-size": config.expert_model_parallel_size,
    }
    flags = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
    # Unset, it is the tensor-parallel size.
    if config.expert_tensor_parallel_size == 1 and config.tensor_model_parallel_size > 1:
        flags.append("--expert-tensor-parallel-size 1")
    if config.sequence_parallel:
        flags.append("--sequence-parallel")
    flags.append("--use-distributed-optimizer")
    return flags
