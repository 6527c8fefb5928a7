"""The ranks that share a global batch: from process groups, in one collective or two, and in another process."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

from slime_tis import GlobalBatch, Ranks, RolloutCorrectionConfig, correct, response_slices

CONFIG = RolloutCorrectionConfig(use_tis=True, tis_batch_normalize=True)
LOG_PROBS = torch.tensor([[-1.0, -2.0], [-0.5, -1.5]])


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def correction(ranks):
    mask = torch.ones(2, 2)
    return correct(CONFIG, LOG_PROBS + 0.5, LOG_PROBS, mask, global_batch=GlobalBatch(ranks=ranks))


def named(name, calls):

    def all_reduce(values, op):
        calls.append((name, op))
        return values

    return all_reduce


def test_the_world_before_init_process_group_is_refused():
    assert dist.group.WORLD is None
    with pytest.raises(ValueError, match=r"WORLD is None before torch.distributed.init_process_group; call that first"):
        Ranks.from_groups(data=dist.group.WORLD)


def test_one_group_is_enough(world):
    for ranks in (Ranks.from_groups(data=world), Ranks.from_groups(context=world)):
        assert not ranks.is_one
        assert ranks.all_reduce(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert Ranks().is_one


def test_the_group_of_both_is_one_collective():
    calls = []
    context, data, both = (named(name, calls) for name in ("context", "data", "both"))
    statistics = correction(Ranks()).statistics
    statistics.all_reduce(Ranks(context=context, data=data))
    # Sums are of whole sequences already; extremes are of this rank's tokens.
    assert calls == [("data", "sum"), ("context", "min"), ("data", "min"), ("context", "max"), ("data", "max")]
    calls.clear()
    statistics.all_reduce(Ranks(context=context, data=data, data_and_context=both))
    assert calls == [("data", "sum"), ("both", "min"), ("both", "max")]


def test_sequences_that_were_put_together_are_reduced_over_data_parallel_ranks_alone():
    """At the level prefix every context-parallel rank has the whole sequences, and would count them twice."""
    calls = []
    context, data, both = (named(name, calls) for name in ("context", "data", "both"))
    config = RolloutCorrectionConfig(use_tis=True, tis_level="prefix", rs_second_moment_bound=0.1)
    ranks = Ranks(context=context, data=data, data_and_context=both, slices=response_slices([2], [1], 0, 1))
    tokens = [[torch.tensor([value])] for value in (-1.0, -1.5, 1.0)]
    correct(config, *tokens, global_batch=GlobalBatch(ranks=ranks))
    assert calls == [("context", "sum"), *[("data", "sum")] * 7]


def test_a_pickled_correction_computes_without_its_process_groups(world):
    found = correction(Ranks.from_groups(data=world))
    loaded = pickle.loads(pickle.dumps(found))
    assert loaded.weights.equal(found.weights) and loaded.mask.equal(found.mask)
    assert loaded.mean(torch.ones(2, 2)).item() == found.mean(torch.ones(2, 2)).item()
    assert loaded.statistics.metrics() == found.statistics.metrics()
    with pytest.raises(RuntimeError, match=r"these Ranks were pickled.* pass Ranks.from_groups"):
        correction(loaded.global_batch.ranks)


def test_a_copy_in_the_same_process_reduces_as_before(world):
    ranks = copy.deepcopy(correction(Ranks.from_groups(data=world)).global_batch.ranks)
    assert ranks.over_data(torch.tensor([3.0])).tolist() == [3.0]
