"""Gives each data-parallel rank the routed experts of its samples.

Every rank has all samples, but only rank 0 has their experts, which are ten times as large as the rest of a sample.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.megatron.parallel import Parallel

FIELDS = ("rollout_routed_experts", "rollout_routing_weights")


def drop_routing(groups: Sequence[Sequence[Sample]]) -> None:
    """Removes the experts of samples, and their weights."""
    for sample in (sample for group in groups for sample in group):
        sample.rollout_routed_experts = sample.rollout_routing_weights = None


def receive_routing(parallel: Parallel, shares: Sequence[Sequence[Sample]]) -> None:
    """Sets the experts of this rank's samples, and their weights, to rank 0's; a collective.

    `shares` has the samples of each data-parallel rank, equal on every rank except for `FIELDS`.
    """
    if parallel.size == 1:
        return
    values = [[(sample, name, getattr(sample, name)) for sample in share for name in FIELDS] for share in shares]
    box = [[[None if value is None else (value.shape, value.dtype) for *_, value in share] for share in values]]
    dist.broadcast_object_list(box, src=0)
    for data_rank, (share, descriptions) in enumerate(zip(values, box[0], strict=True)):
        for (sample, name, value), description in zip(share, descriptions, strict=True):
            if parallel.is_main:
                if description is not None:
                    _pass_on(parallel, data_rank, value.contiguous().flatten().view(torch.uint8))
            elif parallel.data_rank == data_rank:
                setattr(sample, name, None if description is None else _received(parallel, *description))


def _received(parallel: Parallel, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    data = torch.empty(shape.numel() * dtype.itemsize, dtype=torch.uint8)
    return _pass_on(parallel, parallel.data_rank, data).cpu().view(dtype).view(shape)


def _pass_on(parallel: Parallel, data_rank: int, data: Tensor) -> Tensor:
    """Sends bytes from rank 0 to the first rank of a data-parallel rank, and from there to its other ranks.

    Megatron's groups have no common group of a data-parallel rank: the bytes go through its context-parallel,
    tensor-parallel and pipeline-parallel groups. They are bytes because NCCL has no int16.
    """
    if not data.numel():
        return data
    data = data.to(parallel.backend.device)
    is_first_stage, is_first_slice = parallel.is_first_stage, parallel.tensor_rank == 0
    if data_rank > 0 and is_first_stage and is_first_slice and parallel.context_rank == 0:
        if parallel.is_main:
            dist.send(data, group=parallel.data_group, group_dst=data_rank)
            return data
        dist.recv(data, group=parallel.data_group, group_src=0)
    for size, group, takes_part in (
        (parallel.context_size, parallel.context_group, is_first_stage and is_first_slice),
        (parallel.tensor_size, parallel.tensor_group, is_first_stage),
        (parallel.pipeline_size, parallel.pipeline_group, True),
    ):
        if size > 1 and takes_part:
            dist.broadcast(data, group=group, group_src=0)
    return data
