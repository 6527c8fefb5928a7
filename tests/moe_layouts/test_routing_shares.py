"""Rank 0 sends every data-parallel rank the experts of that rank's samples."""

import pytest
import torch

from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.megatron.batch import shard
from slime_tis.trainer.megatron.routing_replay import drop_routing, receive_routing
from tests.megatron.passes import on_ranks

LAYOUTS = {
    "data": (2, {}),
    "data and tensor": (4, {"tensor_model_parallel_size": 2}),
    "data and pipeline": (4, {"pipeline_model_parallel_size": 2}),
    "data and context": (4, {"context_parallel_size": 2}),
    "tensor and context": (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
}


def samples():
    """Samples with experts of two types, with weights, without either, and without tokens."""
    chance = torch.Generator().manual_seed(0)
    found = [Sample() for _ in range(8)]
    for number, sample in enumerate(found):
        shape = (0 if number == 2 else 3 + number, 2, 4)
        dtype = torch.int16 if number % 3 else torch.uint8
        if number != 5:
            sample.rollout_routed_experts = torch.randint(0, 200, shape, generator=chance).to(dtype)
        if number > 3:
            sample.rollout_routing_weights = torch.rand(shape, generator=chance)
    return found


def check(parallel, directory, layout):
    sampled, expected = samples(), samples()
    if not parallel.is_main:
        drop_routing([sampled])
    shares = [shard(sampled, rank, parallel.data_size) for rank in range(parallel.data_size)]
    receive_routing(parallel, shares)
    for number, (sample, whole) in enumerate(zip(sampled, expected, strict=True)):
        has = parallel.is_main or number % parallel.data_size == parallel.data_rank
        for name in ("rollout_routed_experts", "rollout_routing_weights"):
            found, wanted = getattr(sample, name), getattr(whole, name) if has else None
            assert (found is None) == (wanted is None), (parallel.rank, number, name)
            if wanted is not None:
                torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_receives_its_share(layout, tmp_path):
    ranks, sizes = LAYOUTS[layout]
    on_ranks(check, tmp_path, sizes, ranks)
