"""slime's placement flags as torchrun's ranks and launched servers."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from slime_tis.options.flags import Flag

PLACEMENT = (
    "--actor-num-nodes",
    "--actor-num-gpus-per-node",
    "--num-gpus-per-node",
    "--colocate",
    "--rollout-num-gpus",
    "--rollout-num-gpus-per-engine",
    "--offload",
    "--offload-train",
    "--offload-rollout",
)
"""Flags that assign GPUs; torchrun and --ENGINE-launch replace them."""
GPUS_PER_NODE = 8
"""slime's default of --actor-num-gpus-per-node and --num-gpus-per-node."""
STAGES = (
    "--sglang-pp-size",
    "--sglang-pipeline-parallel-size",
    "--vllm-pipeline-parallel-size",
)
"""Flags of the servers' pipeline stages."""
# `place` tries every size up to this one. A larger number in a flag counts as this one.
MAX_GPUS = 1024


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The ranks of training, and the servers beside them."""

    nodes: int
    ranks_per_node: int
    data_parallel: int
    """Replicas of the model, at least 1."""
    servers: int
    """Servers for --ENGINE-launch on the first machine; 0 if they do not fit beside the ranks."""
    tensor_parallel: int
    """GPUs of one stage of a server."""

    @property
    def ranks(self) -> int:
        """Ranks of training on all nodes."""
        return self.nodes * self.ranks_per_node


def place(given: Mapping[str, Flag]) -> Placement:
    """Returns ranks with complete replicas that divide a step's samples, and servers on other GPUs.

    With --colocate, half of a node's GPUs train if the layout fits them, otherwise all of them do.
    `--ENGINE-launch` starts servers only on the first machine, so the servers of several nodes must
    be started by hand.
    """
    nodes = count(given, "--actor-num-nodes", 1)
    trained = min(count(given, "--actor-num-gpus-per-node", GPUS_PER_NODE), MAX_GPUS)
    machine = max(min(count(given, "--num-gpus-per-node", GPUS_PER_NODE), MAX_GPUS), trained)
    is_shared = "--colocate" in given
    if is_shared and "--num-gpus-per-node" not in given:
        machine = trained

    # Some layouts divide no number of ranks. The command then keeps slime's number, and train.py's
    # message about the layout appears below it.
    sizes = [size for size in range(trained, 0, -1) if _fits(given, size * nodes)]
    fits = bool(sizes)
    sizes = sizes or [trained]
    if is_shared:
        # slime's servers use the GPUs of training; here they need GPUs that training leaves free.
        halves = [size for size in sizes if size <= max(trained // 2, 1)]
        sizes = halves or sizes
    ranks = sizes[0]

    # GPUs of one server = stages × GPUs of one stage.
    stages = max(count(given, name, 1) for name in STAGES)
    per_server = count(given, "--rollout-num-gpus-per-engine", 1)
    free = machine - ranks
    wanted = free
    if not is_shared:
        wanted = count(given, "--rollout-num-gpus", per_server)
    servers = max(wanted // per_server, 1)
    if nodes > 1 or not fits or servers * per_server > free:
        servers = 0
    return Placement(
        nodes=nodes,
        ranks_per_node=ranks,
        data_parallel=max(nodes * ranks // _replica(given), 1),
        servers=servers,
        tensor_parallel=max(per_server // stages, 1),
    )


def _fits(given: Mapping[str, Flag], ranks: int) -> bool:
    """Whether ranks hold complete replicas of layers and experts, and divide a step's samples."""
    replica = _replica(given)
    tensor = count(given, "--tensor-model-parallel-size", 1)
    pipeline = count(given, "--pipeline-model-parallel-size", 1)
    experts = count(given, "--expert-model-parallel-size", 1) * pipeline
    if experts > pipeline:
        # As in Megatron-core, the tensor-parallel size of experts is by default that of the layers.
        experts *= count(given, "--expert-tensor-parallel-size", tensor)
    # Without --global-batch-size this is 0, which every number of replicas divides.
    samples = count(given, "--global-batch-size", 0)
    return ranks % replica == 0 and ranks % experts == 0 and samples % (ranks // replica) == 0


def _replica(given: Mapping[str, Flag]) -> int:
    """Ranks that together hold the model once."""
    parts = ("tensor-model", "pipeline-model", "context")
    return math.prod(count(given, f"--{part}-parallel-size", 1) for part in parts)


def count(given: Mapping[str, Flag], name: str, default: int) -> int:
    """Returns a flag's positive integer; the default if the flag is missing or something else."""
    if name not in given:
        return default
    value = " ".join(given[name].values)
    if re.fullmatch(r"[1-9][0-9]{0,8}", value) is None:
        return default
    return int(value)
