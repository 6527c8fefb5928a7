"""Ranks that share a global batch agree with one rank that has all of it."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slime_tis import (
    Correction,
    GlobalBatch,
    Ranks,
    RolloutCorrectionConfig,
    context_parallel_slices,
    correct,
    response_slices,
)
from slime_tis.correction.context_parallel import AllReduce, ResponseSlices
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
    """float64, with NaN, infinities, holes over the cuts, and a sample without rollout
    log-probs."""
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


@pytest.fixture(scope="module")
def alone() -> list[Correction[list[torch.Tensor]]]:
    """The correction of the complete batch on one rank, for each configuration."""
    return [correct(config, *batch()) for config in CONFIGS]


@pytest.mark.parametrize("index", range(len(CONFIGS)), ids="configuration {}".format)
class TestContextParallelRanks:
    """Each rank, with its slices of all sequences, agrees with one rank that has them all."""

    def test_weights(self, ranks, alone, index):
        for rank, results in enumerate(ranks):
            weights = results["sliced"][index][0]
            for own, shape, complete in zip(weights, SHAPES, alone[index].weights, strict=True):
                expected = take(complete, shape, rank, len(ranks))
                torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)
                if CONFIGS[index] in BY_JOINING:  # joined log-probs arrive to the bit
                    assert torch.equal(own, expected)

    def test_masks(self, ranks, alone, index):
        for rank, results in enumerate(ranks):
            masks = results["sliced"][index][1]
            for own, shape, complete in zip(masks, SHAPES, alone[index].mask, strict=True):
                assert own.tolist() == take(complete, shape, rank, len(ranks)).tolist()

    def test_second_moment_limits(self, ranks, alone, index):
        for results in ranks:
            limit = results["sliced"][index][2]
            assert limit == alone[index].global_batch.second_moment_limit

    def test_metrics(self, ranks, alone, index):
        expected = alone[index].statistics.metrics()
        for results in ranks:
            metrics = results["sliced"][index][3]
            assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-6)

    def test_sequence_sums(self, ranks, alone, index):
        expected = alone[index].sequence_sums
        for results in ranks:
            sums = results["sliced"][index][4]
            assert sums.accepted.tolist() == expected.accepted.tolist()
            if CONFIGS[index] in BY_JOINING:
                assert torch.equal(stacked(sums), stacked(expected))


@pytest.mark.parametrize("index", range(len(CONFIGS)), ids="configuration {}".format)
class TestDataParallelRanks:
    """Each rank, with its share of the sequences, agrees with one rank that has them all.

    The last rank has no sequences.
    """

    def test_weights(self, ranks, alone, index):
        sharing = len(ranks) - 1
        for rank in range(sharing):
            weights = ranks[rank]["sharded"][index][0]
            expected = alone[index].weights[rank::sharing]
            torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)

    def test_masks(self, ranks, alone, index):
        sharing = len(ranks) - 1
        for rank in range(sharing):
            masks = ranks[rank]["sharded"][index][1]
            expected = alone[index].mask[rank::sharing]
            torch.testing.assert_close(masks, expected, rtol=0, atol=0)

    def test_second_moment_limits(self, ranks, alone, index):
        for results in ranks[:-1]:
            limit = results["sharded"][index][2]
            assert limit == alone[index].global_batch.second_moment_limit

    def test_metrics(self, ranks, alone, index):
        expected = alone[index].statistics.metrics()
        for results in ranks[:-1]:
            metrics = results["sharded"][index][3]
            assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-6)


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


class TestSlicesOfAWorkedExample:
    """10 tokens, prompt 3, two ranks: chunks of 3 positions.

    Rank 0 has the positions 0-2 and 9, rank 1 has 3-8. In the joined cases, a response of 2 tokens
    comes first, which rank 1 holds alone.
    """

    JOINED = torch.arange(1.0, 10.0)

    @pytest.fixture
    def both_ranks(self) -> list[ResponseSlices]:
        return [response_slices([4, 10], [2, 7], rank, 2) for rank in (0, 1)]

    @pytest.mark.parametrize(
        ("rank", "padded_length", "expected"),
        [
            pytest.param(0, None, (slice(0, 1), slice(0, 0)), id="rank 0"),
            pytest.param(1, None, (slice(1, 4), slice(4, 7)), id="rank 1"),
            pytest.param(0, 16, (slice(0, 2), slice(0, 0)), id="rank 0 with padding"),
        ],
    )
    def test_slices_of_one_sequence(self, rank, padded_length, expected):
        slices = context_parallel_slices(10, 7, rank, 2, padded_length=padded_length)
        assert slices == expected

    def test_local_lengths(self, both_ranks):
        assert both_ranks[0].local_lengths == (0, 1)
        assert both_ranks[1].local_lengths == (2, 6)

    def test_slices_of_joined_responses(self, both_ranks):
        assert both_ranks[0].slice_flat(self.JOINED).tolist() == [3]
        assert both_ranks[1].slice_flat(self.JOINED).tolist() == [1, 2, 4, 5, 6, 7, 8, 9]

    def test_slices_of_a_list(self, both_ranks):
        responses = list(self.JOINED.split([2, 7]))
        slices = [response.tolist() for response in both_ranks[1].slice_list(responses)]
        assert slices == [[1, 2], [4, 5, 6, 7, 8, 9]]

    def test_scatter_puts_tokens_back(self, both_ranks):
        table = torch.stack([self.JOINED, -self.JOINED], 1)
        scattered = [slices.scatter(slices.slice_flat(table)) for slices in both_ranks]
        assert scattered[0].tolist() == [[0, 0], [0, 0], [3, -3], *[[0, 0]] * 6]
        assert torch.equal(scattered[0] + scattered[1], table)


@pytest.mark.parametrize("level", ["prefix", "segment"])
def test_weights_of_levels_that_need_complete_sequences(level):
    config = RolloutCorrectionConfig(use_tis=True, tis_level=level)
    message = f"--tis-level {level} needs complete sequences.*slices=response_slices"
    with pytest.raises(ValueError, match=message):
        correct(config, [], [], [], global_batch=GlobalBatch(ranks=Ranks(context=unchanged)))


@pytest.mark.parametrize("level", ["prefix", "segment"])
def test_rejection_at_levels_that_need_complete_sequences(level):
    config = RolloutCorrectionConfig(use_rs=True, rs_level=level)
    message = f"--rs-level {level} needs complete sequences"
    with pytest.raises(ValueError, match=message):
        correct(config, [], [], [], global_batch=GlobalBatch(ranks=Ranks(context=unchanged)))


class TestSlicesOfOneSequence:
    """This rank holds six tokens of one sequence."""

    CONFIG = RolloutCorrectionConfig(use_tis=True, tis_level="prefix")

    @pytest.fixture
    def six_tokens(self) -> GlobalBatch:
        slices = response_slices([10], [7], 1, 2)
        return GlobalBatch(ranks=Ranks(context=unchanged, slices=slices))

    def test_a_list_of_six_tokens_is_accepted(self, six_tokens):
        six = [torch.zeros(6)]
        correction = correct(self.CONFIG, six, six, six, global_batch=six_tokens)
        assert correction.weights[0].tolist() == [0] * 6

    def test_a_padded_row_of_six_tokens_is_accepted(self, six_tokens):
        six = torch.zeros(1, 6)
        correction = correct(self.CONFIG, six, six, six, global_batch=six_tokens)
        assert correction.weights.shape == (1, 6)

    @pytest.mark.parametrize("lengths", [[5], [6, 6]], ids=["five tokens", "two sequences"])
    def test_other_sequences_are_refused(self, six_tokens, lengths):
        sequences = [torch.zeros(length) for length in lengths]
        with pytest.raises(ValueError, match=r"tokens but slices has \[6\] on this rank"):
            correct(self.CONFIG, sequences, sequences, sequences, global_batch=six_tokens)


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


def correction(ranks: Ranks) -> Correction[torch.Tensor]:
    mask = torch.ones(2, 2)
    return correct(CONFIG, LOG_PROBS + 0.5, LOG_PROBS, mask, global_batch=GlobalBatch(ranks=ranks))


Call = tuple[str, str]
"""The group and the operation of a collective."""


def named(name: str, calls: list[Call]) -> AllReduce:

    def all_reduce(values: torch.Tensor, op: str) -> torch.Tensor:
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


@pytest.mark.parametrize("name", ["data", "context"])
def test_one_group_is_enough(gloo, name):
    ranks = Ranks.from_groups(**{name: gloo})
    assert not ranks.is_one
    assert ranks.all_reduce(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]


def test_without_groups_there_is_one_rank():
    assert Ranks().is_one


def named_ranks(calls: list[Call], *, both: bool, slices: ResponseSlices | None = None) -> Ranks:
    """Ranks whose collectives change nothing and are appended to `calls`."""
    return Ranks(
        context=named("context", calls),
        data=named("data", calls),
        data_and_context=named("both", calls) if both else None,
        slices=slices,
    )


def test_collectives_over_two_groups():
    calls: list[Call] = []
    correction(Ranks()).statistics.all_reduce(named_ranks(calls, both=False))
    # Sums are already those of complete sequences; extremes are of this rank's tokens.
    # The maxima come first because the ratios of sequences are summed relative to the largest.
    assert calls == [
        ("context", "max"),
        ("data", "max"),
        ("data", "sum"),
        ("context", "min"),
        ("data", "min"),
    ]


def test_collectives_over_the_joint_group():
    calls: list[Call] = []
    correction(Ranks()).statistics.all_reduce(named_ranks(calls, both=True))
    assert calls == [("both", "max"), ("data", "sum"), ("both", "min")]


def test_joined_sequences_are_not_counted_twice():
    """At level prefix, each context-parallel rank has the complete sequences."""
    calls: list[Call] = []
    config = RolloutCorrectionConfig(use_tis=True, tis_level="prefix", rs_second_moment_bound=0.1)
    ranks = named_ranks(calls, both=True, slices=response_slices([2], [1], 0, 1))
    train = [torch.tensor([-1.0])]
    rollout = [torch.tensor([-1.5])]
    correct(config, train, rollout, [torch.ones(1)], global_batch=GlobalBatch(ranks=ranks))
    assert calls == [("context", "sum"), *[("data", "sum")] * 7]


def pickled(value: Correction) -> Correction:
    return pickle.loads(pickle.dumps(value))


def test_a_pickled_correction_keeps_its_tensors(gloo):
    original = correction(Ranks.from_groups(data=gloo))
    loaded = pickled(original)
    assert loaded.weights.equal(original.weights)
    assert loaded.mask.equal(original.mask)
    assert loaded.mean(torch.ones(2, 2)).item() == original.mean(torch.ones(2, 2)).item()
    assert loaded.statistics.metrics() == original.statistics.metrics()


def test_a_pickled_correction_loses_its_process_groups(gloo):
    loaded = pickled(correction(Ranks.from_groups(data=gloo)))
    with pytest.raises(RuntimeError, match=r"these Ranks were pickled.* pass Ranks.from_groups"):
        correction(loaded.global_batch.ranks)


def test_a_copied_correction_keeps_its_process_groups(gloo):
    copied = copy.deepcopy(correction(Ranks.from_groups(data=gloo)))
    assert copied.global_batch.ranks.over_data(torch.tensor([3.0])).tolist() == [3.0]
