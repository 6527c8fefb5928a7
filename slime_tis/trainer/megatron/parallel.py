"""The process groups, and the choice of device, collective library and layer implementation."""

import importlib
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.rerun_state_machine import (
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from slime_tis.correction import Ranks
from slime_tis.errors import first_line
from slime_tis.trainer.configs.megatron import Environment, MegatronConfig, read_environment

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """This process's ranks and groups, and collectives over them."""

    device: torch.device
    transformer_engine: bool
    """Whether transformer-engine computes the layers: on a GPU, if it is installed."""
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    context_rank: int
    context_size: int
    data_rank: int
    data_size: int
    expert_rank: int
    """Rank in the group that divides the experts of a layer."""
    expert_size: int
    expert_tensor_rank: int
    """Rank in the group that divides each expert."""
    expert_tensor_size: int
    local_size: int
    tensor_group: dist.ProcessGroup
    expert_group: dist.ProcessGroup
    expert_tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    data_and_context_group: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the embedding."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the output layer, the log-probs and the loss."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        """The global rank."""
        return dist.get_rank()

    @property
    def size(self) -> int:
        """Number of processes of the job."""
        return dist.get_world_size()

    def largest(self, value: int) -> int:
        """Returns the largest value of all ranks; a collective with one host synchronization."""
        if self.size == 1:
            return value
        largest = torch.tensor([value], device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    @property
    def ranks(self) -> Ranks:
        """The reductions over the context- and data-parallel ranks, in place."""
        context = None
        data = None
        both = None
        if self.context_size > 1:
            context = self.context_group
        if self.data_size > 1:
            data = self.data_group
        if context is not None and data is not None:
            both = self.data_and_context_group
        if context is None and data is None:
            return Ranks()
        return Ranks.from_groups(context=context, data=data, data_and_context=both)

    def broadcast_from_stage(self, value: T, stage: int) -> T:
        """Returns a small Python object of pipeline stage `stage` on every stage."""
        if self.pipeline_size == 1:
            return value
        values: list[T] = [value]  # torch replaces the element
        dist.broadcast_object_list(values, group=self.pipeline_group, group_src=stage)
        return values[0]

    def broadcast_from_last_stage(self, value: T) -> T:
        """Returns a small Python object of the last pipeline stage on every stage."""
        return self.broadcast_from_stage(value, self.pipeline_size - 1)

    def all_gather_data(self, value: T) -> list[T]:
        """Returns a small Python object of every data-parallel rank, by rank."""
        return _all_gather(value, self.data_size, self.data_group)

    def all_gather_data_and_context(self, value: T) -> list[T]:
        """Returns a small Python object of every data- and context-parallel rank, by rank."""
        return _all_gather(value, self.data_size * self.context_size, self.data_and_context_group)


def _all_gather(value: T, size: int, group: dist.ProcessGroup) -> list[T]:
    gathered: list[T] = [value] * size
    if size > 1:
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def trains_with_transformer_engine(config: MegatronConfig, *, has_gpu: bool) -> bool:
    """Returns whether transformer-engine computes the layers.

    Raises:
        ValueError: --transformer-impl transformer_engine requests it, but it is not possible.
    """
    if config.transformer_impl == "local":
        return False
    problem = ""
    if not has_gpu:
        problem = "transformer-engine needs a GPU"
    elif config.precision == "fp32":
        # its unfused attention supports float32, but pads sequences and has no context parallelism
        problem = (
            "transformer-engine's flash and fused attention do not support float32; add --bf16 or"
            " --fp16"
        )
    else:
        try:
            importlib.import_module("transformer_engine.pytorch")
        except (ImportError, OSError, RuntimeError) as error:
            # OSError and RuntimeError: a build for another version of CUDA
            problem = f"transformer_engine.pytorch does not import: {first_line(error)}"
    if problem and config.transformer_impl is not None:
        raise ValueError(
            f"--transformer-impl transformer_engine: {problem}, or use --transformer-impl local."
        )
    return not problem


def initialize(config: MegatronConfig) -> Parallel:
    """Starts torch.distributed, with or without torchrun, and megatron-core; seeds every rank."""
    environment = read_environment(os.environ)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    backend = "gloo"
    if has_gpu:
        device = torch.device("cuda", environment.local_rank)
        backend = "nccl"
    transformer_engine = trains_with_transformer_engine(config, has_gpu=has_gpu)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if has_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        timeout = timedelta(minutes=config.distributed_timeout_minutes)
        _start_process_group(backend, environment, timeout)
    mpu.initialize_model_parallel(
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        distributed_timeout_minutes=config.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    torch.manual_seed(config.seed)
    # megatron-core's other random-state tracker queries the CUDA driver.
    model_parallel_cuda_manual_seed(config.seed, inference_rng_tracker=not has_gpu)
    groups = {
        "tensor": mpu.get_tensor_model_parallel_group(),
        "pipeline": mpu.get_pipeline_model_parallel_group(),
        "context": mpu.get_context_parallel_group(),
        "data": mpu.get_data_parallel_group(),
        "expert": mpu.get_expert_model_parallel_group(),
        "expert_tensor": mpu.get_expert_tensor_parallel_group(),
    }
    fields: dict[str, Any] = {}
    for name, group in groups.items():
        fields[f"{name}_rank"] = group.rank()
        fields[f"{name}_size"] = group.size()
        fields[f"{name}_group"] = group
    return Parallel(
        device=device,
        transformer_engine=transformer_engine,
        local_size=environment.local_world_size,
        data_and_context_group=mpu.get_data_parallel_group(with_context_parallel=True),
        **fields,
    )


def _start_process_group(backend: str, environment: Environment, timeout: timedelta) -> None:
    """Connects to the other ranks; a process without a launcher is the only rank.

    Raises:
        ValueError: The network interface does not exist, or a rank did not connect.
    """
    if not environment.launched:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    requested = os.environ.get("GLOO_SOCKET_IFNAME")
    if backend == "gloo" and requested:
        interfaces = [name for _, name in socket.if_nameindex()]
        if not set(requested.split(",")) <= set(interfaces):
            raise ValueError(
                f"GLOO_SOCKET_IFNAME is {requested!r}, but this host's interfaces are"
                f" {', '.join(interfaces)}."
            )
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:  # torch has a dozen error types here
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = first_line(error)[:200]
        raise ValueError(
            f"rank {environment.rank} of {environment.world_size} did not connect to the other"
            f" ranks at {address}: {reason}; check that MASTER_ADDR and MASTER_PORT are equal"
            " on all ranks and that the port is free."
        ) from error


def connect_store() -> dist.Store | None:
    """Returns a separate connection to the ranks' key-value store; None for a single rank."""
    if dist.get_world_size() == 1:
        return None
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
    )
    # torchrun may restart the ranks; the store then has the entries of the failed attempt
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"slime_tis/{attempt}", store)


def lost_contact(error: BaseException | None) -> bool:
    """Returns whether an error, or its cause, comes from a collective whose other ranks ended."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and "gloo" in str(error):  # it has no class for this
            return True
        error = error.__cause__ or error.__context__
    return False


def shut_down() -> None:
    """Ends megatron-core's groups and torch.distributed."""
    mpu.destroy_model_parallel()
    # megatron-core 0.16.1 forgets this group. Its threads would live on, and a process that is
    # forked later would wait for them for ever when it replaces the group.
    mpu._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    destroy_rerun_state_machine()
    if dist.is_initialized():
        dist.destroy_process_group()
