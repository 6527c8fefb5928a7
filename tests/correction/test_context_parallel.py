"""Ranks that share a global batch give what one gives: process groups, context-parallel slices, empty ranks."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slime_tis import (
    GlobalBatch,
    Ranks,
    RolloutCorrectionConfig,
    context_parallel_slices,
    correct,
    response_slices,
)
from slime_tis.correction.sums import stacked
from tests.correction.expected import expected_correction
from tests.runs import free_port, spawn


def options(level, mode, rs_level, second_moment=None, **adaptive):
    return RolloutCorrectionConfig(
        use_tis=True,
        tis_level=level,
        tis_mode=mode,
        tis_batch_normalize=True,
        use_rs=True,
        rs_level=rs_level,
        **(adaptive or {"rs_lower_bound": 0.7, "rs_upper_bound": 1.5}),
        rs_veto_threshold=0.05,
        rs_second_moment_bound=second_moment,
        rollout_rs="token_k3,seq_mean_k2,seq_max_k3",
        rollout_rs_threshold="0.4,0.2,1.5",
    )


CONFIGS = [
    options("token", "truncate", "geometric"),
    options("sequence", "clip", "token"),
    options("geometric", "mask", "sequence"),
    options("token", "mask", "token"),
    options("token", "truncate", "geometric", 0.07),
    options("sequence", "truncate", "token", 0.02),
    options("token", "truncate", "geometric", rs_z_score=1.1),
    options("sequence", "clip", "sequence", rs_target_fraction=0.4),
    options("prefix", "truncate", "segment"),
    options("segment", "mask", "prefix"),
    options("sequence", "clip", "prefix"),
    options("segment", "truncate", "geometric"),
    options("prefix", "clip", "token", 0.05),
    options("segment", "clip", "geometric", rs_target_fraction=0.4),
]
BY_JOINING = [
    config for config in CONFIGS if {config.tis_level, config.rs_level} & {"prefix", "segment"}
]
# (prompt, response): longer than a row, shorter than the group, a single token.
SHAPES = [(5, 300), (1, 9), (40, 3), (2, 1), (7, 64), (1, 2)]


def batch():
    """float64, with NaN, infinities, holes over the cuts, and a sample without rollout log-probs."""
    generator = torch.Generator().manual_seed(3)
    rollout = [-torch.rand(response, generator=generator) for _, response in SHAPES]
    train = [r + 0.3 * torch.randn(len(r), generator=generator) for r in rollout]
    mask = [torch.rand(len(r), generator=generator) > 0.2 for r in rollout]
    train[0][17], train[0][200], train[4][20], rollout[4][40] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        -torch.inf,
    )
    mask[0][70:80], mask[0][140:155], mask[4][:] = False, False, True
    return [x.double() for x in train], [*rollout[:-1], None], [x.long() for x in mask]


def places(rank, size):
    return response_slices([p + r for p, r in SHAPES], [r for _, r in SHAPES], rank, size)


def take(whole, shape, rank, size):
    if whole is None:
        return None
    prompt, response = shape
    first, second = context_parallel_slices(prompt + response, response, rank, size)
    return torch.cat([whole[first], whole[second]])


def world():
    return Ranks.from_groups(context=dist.group.WORLD)


def unchanged(table, op):
    return table


def _sliced(rank, size):
    """Every rank holds its zigzag slices of all sequences."""
    local = [
        [take(x, shape, rank, size) for x, shape in zip(xs, SHAPES, strict=True)] for xs in batch()
    ]
    results = []
    for config in CONFIGS:
        calls = []

        def counted(table, op, calls=calls):
            calls.append(table.shape)
            return world().over_context(table, op)

        ranks = Ranks(context=counted, slices=places(rank, size))
        found = correct(config, *local, global_batch=GlobalBatch(ranks=ranks))
        if config in BY_JOINING:
            assert calls == [(sum(r for _, r in SHAPES), 3)]
            packed = [
                torch.cat(
                    [
                        torch.full_like(t, torch.nan) if x is None else x
                        for x, t in zip(xs, local[0], strict=True)
                    ]
                )
                for xs in local
            ]
            of_packed = correct(
                config,
                *packed,
                lengths=[len(x) for x in local[0]],
                global_batch=GlobalBatch(ranks=ranks),
            )
            assert torch.equal(of_packed.weights, torch.cat(found.weights))
            assert torch.equal(of_packed.mask, torch.cat(found.mask))
        else:
            assert calls[:-1] == ([(512, 2)] * 7 if config.rs_second_moment_bound else [])
            assert calls[-1][0] == len(SHAPES)
        statistics = found.statistics.all_reduce(world())
        limit = found.global_batch.second_moment_limit
        results.append(
            (found.weights, found.mask, limit, statistics.metrics(), found.sequence_sums)
        )
    return results


def _sharded(rank, size):
    """Sequences are dealt out over data-parallel ranks; the last rank has none."""
    local = [xs[rank :: size - 1] if rank < size - 1 else [] for xs in batch()]
    results = []
    for config in CONFIGS:
        ranks = Ranks.from_groups(data=dist.group.WORLD)
        found = correct(config, *local, global_batch=GlobalBatch(ranks=ranks))
        statistics = found.statistics.all_reduce(ranks)
        results.append(
            (
                found.weights,
                found.mask,
                found.global_batch.second_moment_limit,
                statistics.metrics(),
            )
        )
    return results


FAR_BELOW = [[-400.0], [-380.0, -17.0], [-390.0]]
"""Δ of the tokens of sequences whose ratios are all 0 in float64."""


def _far_below(rank, size):
    """Metrics of sequences far below, dealt out over data-parallel ranks."""
    deltas = [torch.tensor(row, dtype=torch.float64) for row in FAR_BELOW[rank::size]]
    others = [[torch.zeros_like(row) for row in deltas], [torch.ones(len(row)) for row in deltas]]
    statistics = correct(RolloutCorrectionConfig(use_tis=True), deltas, *others).statistics
    return statistics.all_reduce(Ranks.from_groups(data=dist.group.WORLD)).metrics()


def _rank(rank, size, port, folder):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    found = {
        "sliced": _sliced(rank, size),
        "sharded": _sharded(rank, size),
        "far below": _far_below(rank, size),
    }
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    size, folder = request.param, tmp_path_factory.mktemp("ranks")
    spawn(_rank, args=(size, free_port(), str(folder)), nprocs=size)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(size)]


def test_context_parallel_ranks_agree_with_one(ranks):
    size = len(ranks)
    for c, config in enumerate(CONFIGS):
        whole = correct(config, *batch())
        for rank in range(size):
            weights, mask, limit, values, sums = ranks[rank]["sliced"][c]
            for i, shape in enumerate(SHAPES):
                expected = take(whole.weights[i], shape, rank, size)
                torch.testing.assert_close(weights[i], expected, rtol=1e-6, atol=1e-6)
                assert mask[i].tolist() == take(whole.mask[i], shape, rank, size).tolist()
                assert config not in BY_JOINING or torch.equal(
                    weights[i], expected
                )  # joined values arrive to the bit
            assert sums.accepted.tolist() == whole.sequence_sums.accepted.tolist()
            assert config not in BY_JOINING or torch.equal(
                stacked(sums), stacked(whole.sequence_sums)
            )
            assert limit == whole.global_batch.second_moment_limit
            assert values == pytest.approx(whole.statistics.metrics(), rel=1e-6, abs=1e-6)


def test_data_parallel_ranks_agree_with_one(ranks):
    size = len(ranks)
    for c, config in enumerate(CONFIGS):
        whole = correct(config, *batch())
        for rank in range(size - 1):
            weights, mask, limit, values = ranks[rank]["sharded"][c]
            assert limit == whole.global_batch.second_moment_limit
            for x, y in zip(weights, whole.weights[rank :: size - 1], strict=True):
                torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
            assert [x.tolist() for x in mask] == [x.tolist() for x in whole.mask[rank :: size - 1]]
            assert values == pytest.approx(whole.statistics.metrics(), rel=1e-6, abs=1e-6)


def test_data_parallel_ranks_merge_ratios_far_below(ranks):
    config = RolloutCorrectionConfig(use_tis=True)
    rollout = [[0.0] * len(row) for row in FAR_BELOW]
    mask = [[True] * len(row) for row in FAR_BELOW]
    expected = expected_correction(config, FAR_BELOW, rollout, mask).metrics
    for found in ranks:
        assert found["far below"] == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("total", "response"), [(10, 7), (3, 2), (16, 16), (1, 1), (33, 1), (9, 0)]
)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_slices_cover_the_response_once(total, response, size):
    owned = []
    for rank in range(size):
        for part in context_parallel_slices(total, response, rank, size):
            owned += range(response)[part]
    # The first token of a sequence without a prompt has no logits that predict it.
    expected = range(1, response) if total == response and size > 1 else range(response)
    assert sorted(owned) == list(expected)


def test_slices_of_a_worked_example():
    # 10 tokens, prompt 3, two ranks: chunks of 3 positions; rank 0 has positions 0-2 and 9, rank 1
    # has 3-8.
    assert context_parallel_slices(10, 7, 0, 2) == (slice(0, 1), slice(0, 0))
    assert context_parallel_slices(10, 7, 1, 2) == (slice(1, 4), slice(4, 7))
    assert context_parallel_slices(10, 7, 0, 2, padded_length=16) == (slice(0, 2), slice(0, 0))
    # The worked example after a response of 2 tokens, which rank 1 holds alone.
    whole = torch.arange(1.0, 10.0)
    of_ranks = [response_slices([4, 10], [2, 7], rank, 2) for rank in (0, 1)]
    assert [slices.local_lengths for slices in of_ranks] == [(0, 1), (2, 6)]
    assert [slices.slice_flat(whole).tolist() for slices in of_ranks] == [
        [3],
        [1, 2, 4, 5, 6, 7, 8, 9],
    ]
    assert [x.tolist() for x in of_ranks[1].slice_list(list(whole.split([2, 7])))] == [
        [1, 2],
        [4, 5, 6, 7, 8, 9],
    ]
    table = torch.stack([whole, -whole], 1)
    spread = [slices.scatter(slices.slice_flat(table)) for slices in of_ranks]
    assert spread[0].tolist() == [[0, 0], [0, 0], [3, -3], *[[0, 0]] * 6]
    assert torch.equal(sum(spread), table)


@pytest.mark.parametrize("level", ["prefix", "segment"])
def test_levels_that_need_whole_sequences_say_so(level):
    config = RolloutCorrectionConfig(use_tis=True, tis_level=level)
    with pytest.raises(
        ValueError, match=f"--tis-level {level} needs complete sequences.*slices=response_slices"
    ):
        correct(config, [], [], [], global_batch=GlobalBatch(ranks=Ranks(context=unchanged)))
    config = RolloutCorrectionConfig(use_rs=True, rs_level=level)
    with pytest.raises(ValueError, match=f"--rs-level {level} needs complete sequences"):
        correct(config, [], [], [], global_batch=GlobalBatch(ranks=Ranks(context=unchanged)))


def test_slices_of_other_sequences_are_refused():
    config = RolloutCorrectionConfig(use_tis=True, tis_level="prefix")
    ranks = Ranks(context=unchanged, slices=response_slices([10], [7], 1, 2))
    known = {"global_batch": GlobalBatch(ranks=ranks)}
    six, five = torch.zeros(6), torch.zeros(5)
    assert correct(config, [six], [six], [six], **known).weights[0].tolist() == [0] * 6
    assert correct(config, six[None], six[None], six[None], **known).weights.shape == (1, 6)
    with pytest.raises(ValueError, match=r"tokens but slices has \[6\] on this rank"):
        correct(config, [five], [five], [five], **known)
    with pytest.raises(ValueError, match=r"tokens but slices has \[6\] on this rank"):
        correct(config, [six, six], [six, six], [six, six], **known)


def test_no_sequences_are_joined_too():
    config = RolloutCorrectionConfig(use_tis=True, tis_level="segment", tis_batch_normalize=True)
    calls = []

    def counted(table, op):
        calls.append(table.shape)
        return table

    empty = torch.zeros(0)
    known = GlobalBatch(ranks=Ranks(context=counted, slices=response_slices([], [], 0, 2)))
    assert correct(config, [], [], [], global_batch=known).weights == []
    packed = correct(config, empty, empty, empty, lengths=[], global_batch=known)
    assert packed.weights.shape == (0,) and calls == [(0, 3), (0, 3)]


CONFIG = RolloutCorrectionConfig(use_tis=True, tis_batch_normalize=True)
LOG_PROBS = torch.tensor([[-1.0, -2.0], [-0.5, -1.5]])


@pytest.fixture
def gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
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
    with pytest.raises(
        ValueError,
        match=r"WORLD is None before torch.distributed.init_process_group; call that first",
    ):
        Ranks.from_groups(data=dist.group.WORLD)


def test_one_group_is_enough(gloo):
    for ranks in (Ranks.from_groups(data=gloo), Ranks.from_groups(context=gloo)):
        assert not ranks.is_one
        assert ranks.all_reduce(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert Ranks().is_one


def test_collectives_of_both_groups_and_of_joined_sequences():
    calls = []
    context, data, both = (named(name, calls) for name in ("context", "data", "both"))
    statistics = correction(Ranks()).statistics
    statistics.all_reduce(Ranks(context=context, data=data))
    # Sums are of whole sequences already; extremes are of this rank's tokens.
    # The maxima come first, because the ratios of sequences are summed relative to the largest one.
    assert calls == [
        ("context", "max"),
        ("data", "max"),
        ("data", "sum"),
        ("context", "min"),
        ("data", "min"),
    ]
    calls.clear()
    statistics.all_reduce(Ranks(context=context, data=data, data_and_context=both))
    assert calls == [("both", "max"), ("data", "sum"), ("both", "min")]
    # At the level prefix every context-parallel rank has the whole sequences, and would count them
    # twice.
    calls = []
    context, data, both = (named(name, calls) for name in ("context", "data", "both"))
    config = RolloutCorrectionConfig(use_tis=True, tis_level="prefix", rs_second_moment_bound=0.1)
    ranks = Ranks(
        context=context, data=data, data_and_context=both, slices=response_slices([2], [1], 0, 1)
    )
    tokens = [[torch.tensor([value])] for value in (-1.0, -1.5, 1.0)]
    correct(config, *tokens, global_batch=GlobalBatch(ranks=ranks))
    assert calls == [("context", "sum"), *[("data", "sum")] * 7]


def test_a_pickled_correction_loses_its_process_groups_and_a_copy_keeps_them(gloo):
    found = correction(Ranks.from_groups(data=gloo))
    loaded = pickle.loads(pickle.dumps(found))
    assert loaded.weights.equal(found.weights) and loaded.mask.equal(found.mask)
    assert loaded.mean(torch.ones(2, 2)).item() == found.mean(torch.ones(2, 2)).item()
    assert loaded.statistics.metrics() == found.statistics.metrics()
    with pytest.raises(RuntimeError, match=r"these Ranks were pickled.* pass Ranks.from_groups"):
        correction(loaded.global_batch.ranks)
    ranks = copy.deepcopy(correction(Ranks.from_groups(data=gloo)).global_batch.ranks)
    assert ranks.over_data(torch.tensor([3.0])).tolist() == [3.0]
