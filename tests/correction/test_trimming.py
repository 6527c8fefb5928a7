"""Limits that follow the batch: second-moment trimming, and bounds by length and noise."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import pairwise
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slime_tis import Correction, Ranks, RolloutCorrectionConfig, adaptive_bounds, correct
from slime_tis.correction.modes import Level
from slime_tis.correction.rejection import order_statistic, second_moment_limit
from tests.correction import expected as oracle

INF, NAN = math.inf, math.nan


def over_ranks(
    parts: list[torch.Tensor], function: Callable[[torch.Tensor, Ranks], torch.Tensor]
) -> list[float]:
    """What `function` returns for the part of each data-parallel rank, one thread per rank."""
    barrier = Barrier(len(parts))
    tables = [torch.zeros(0)] * len(parts)

    def ranks_of(rank: int) -> Ranks:
        def all_reduce(table, op):
            tables[rank] = table
            barrier.wait()
            stacked = torch.stack(tables)
            total = stacked.sum(0) if op == "sum" else stacked.amax(0)
            # No rank may store its next table before every rank has read this one.
            barrier.wait()
            return total

        return Ranks(data=all_reduce)

    with ThreadPoolExecutor(len(parts)) as pool:
        results = pool.map(lambda rank: function(parts[rank], ranks_of(rank)), range(len(parts)))
        return [value.item() for value in results]


def limit_over_ranks(parts: list[torch.Tensor], bound: float) -> list[float]:
    return over_ranks(parts, lambda part, ranks: second_moment_limit(part, bound, ranks))


BY_HAND = {
    # Δ², bound → the smallest Δ² that is dropped
    "the mean of three is 0.5, of four 0.75": ([1.5, 0.25, 0.5, 0.75], 0.5, 1.5),
    "the same just below": ([1.5, 0.25, 0.5, 0.75], 0.4999, 0.75),
    "ties leave together": ([0.25, 1.0, 1.0, 1.0], 0.75, 1.0),
    "ties stay together": ([0.25, 1.0, 1.0, 1.0], 0.8125, INF),
    "everything leaves": ([2.0, 2.0], 1.0, 2.0),
    "all zero": ([0.0, 0.0, 0.0], 1e-30, INF),
    "nothing valid": ([INF, INF], 1.0, INF),
    "no tokens": ([], 1.0, INF),
    "not a number": ([NAN, 0.5, INF, 3.0, NAN], 1.0, 3.0),
    "not a number alone": ([NAN, NAN], 1.0, INF),
    "subnormal": ([0.0, 5e-324], 1e-324 * 2, INF),
    "neighbours": ([1.0, 1.0 + 2**-23], 1.0, 1.0 + 2**-23),
    "the largest numbers": ([1e308, 1e12, 1.0], 1e11, 1e12),
}


LIMITS_BY_HAND = pytest.mark.parametrize(
    ("squares", "bound", "expected"), BY_HAND.values(), ids=BY_HAND
)


@LIMITS_BY_HAND
def test_limit_by_hand(squares, bound, expected):
    values = torch.tensor(squares, dtype=torch.float64)
    assert second_moment_limit(values, bound).item() == expected


@LIMITS_BY_HAND
def test_the_limit_of_one_rank_by_hand(squares, bound, expected):
    values = torch.tensor(squares, dtype=torch.float64)
    assert limit_over_ranks([values], bound) == [expected]


@LIMITS_BY_HAND
def test_the_limit_of_three_ranks_by_hand(squares, bound, expected):
    """The second rank has no tokens."""
    values = torch.tensor(squares, dtype=torch.float64)
    parts = [values[:1], values[1:1], values[1:]]
    assert limit_over_ranks(parts, bound) == [expected] * 3


SQUARES = st.floats(0, 4, width=32) | st.sampled_from([0.0, 0.25, 0.3, 1.0])


@settings(max_examples=150)
@given(
    st.lists(SQUARES, max_size=40),
    st.floats(1e-3, 4),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_limit_of_split_batches_is_that_of_fractions(squares, bound, cuts, dtype):
    whole = torch.tensor(squares, dtype=dtype)
    values = whole.tolist()
    means = [sum(map(Fraction, sorted(values)[:m])) / m for m in range(1, len(values) + 1)]
    # Rounding may decide otherwise if a mean is this close to the bound.
    assume(all(abs(mean - Fraction(bound)) > 1e-9 for mean in means))
    expected = oracle.second_moment_limit(values, bound)
    assert second_moment_limit(whole, bound).item() == expected
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [whole[first:last] for first, last in pairwise(edges)]
    assert limit_over_ranks(parts, bound) == [expected] * len(parts)


@pytest.fixture(scope="module")
def million_squares() -> torch.Tensor:
    return torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).square()


def test_ranks_agree_on_the_limit_of_a_million_tokens(million_squares):
    parts = list(million_squares.split([17, 299_983, (1 << 20) - 300_000]))
    limit = second_moment_limit(million_squares, 0.5).item()
    assert limit_over_ranks(parts, 0.5) == [limit] * 3


def test_the_limit_of_a_million_tokens_meets_its_bound(million_squares):
    limit = second_moment_limit(million_squares, 0.5).item()
    mean_below = million_squares[million_squares < limit].double().mean()
    mean_with_ties = million_squares[million_squares <= limit].double().mean()
    assert mean_below <= 0.5 < mean_with_ties


def test_without_a_bound_there_is_no_limit():
    assert correct(RolloutCorrectionConfig(), [], [], []).global_batch.second_moment_limit is None


def test_the_limit_of_an_empty_batch_is_infinite():
    config = RolloutCorrectionConfig(rs_second_moment_bound=0.1)
    limit = correct(config, [], [], []).global_batch.second_moment_limit
    assert limit is not None
    assert limit.item() == INF


UP, DOWN = [0.1] * 4, [-0.1] * 4
SEQUENCES = [[0.1, -0.1, 0.1, -0.1], UP, [-0.1, 0.1, -0.1, 0.1], DOWN]
K3 = (math.exp(0.1) + math.exp(-0.1)) / 2 - 1  # 0.0050042
SD = math.sqrt(2 * K3 * 4)  # 0.2000833
Z_UP = (0.4 + 4 * K3 - 4 * 5e-5) / SD  # 2.0982
Z_DOWN = (0.4 - 4 * K3 - 4 * 5e-5) / SD  # 1.8981


def reject(level: Level = "geometric", **options: Any) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(use_rs=True, rs_level=level, **options)


def of_log_ratios(
    config: RolloutCorrectionConfig, deltas: list[Any]
) -> Correction[list[torch.Tensor]]:
    """The correction of sequences with these log-ratios; every rollout log-prob is 0."""
    train = [torch.as_tensor(delta, dtype=torch.float64) for delta in deltas]
    rollout = [torch.zeros_like(delta) for delta in train]
    mask = [torch.ones_like(delta) for delta in train]
    return correct(config, train, rollout, mask)


def kept(correction: Correction) -> list[bool]:
    """Whether any token of each sequence is accepted."""
    return (correction.accepted_per_sequence > 0).tolist()


def noise(lengths: list[int], sd: float, seed: int = 0) -> list[torch.Tensor]:
    """Log-ratios of healthy sequences: normal, with E[exp Δ] = 1."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in lengths:
        normal = torch.randn(length, generator=generator, dtype=torch.float64)
        sequences.append(sd * normal - sd * sd / 2)
    return sequences


BOUNDS_BY_HAND = pytest.mark.parametrize(
    ("options", "accepted", "z_score"),
    [
        pytest.param({"rs_z_score": 1.89}, [True, False, True, False], 1.89, id="z-score 1.89"),
        pytest.param({"rs_z_score": 1.91}, [True, False, True, True], 1.91, id="z-score 1.91"),
        pytest.param({"rs_z_score": 2.11}, [True] * 4, 2.11, id="z-score 2.11"),
        pytest.param({"rs_target_fraction": 0.24}, [True] * 4, Z_UP, id="share 0.24"),
        pytest.param(
            {"rs_target_fraction": 0.25}, [True, False, True, True], Z_DOWN, id="share 0.25"
        ),
        pytest.param(
            {"rs_target_fraction": 0.5},
            [True, False, True, False],
            (4 * K3 - 4 * 5e-5) / SD,
            id="share 0.5",
        ),
    ],
)


@pytest.mark.parametrize("level", ["geometric", "sequence"])
@BOUNDS_BY_HAND
def test_rejected_sequences_by_hand(level, options, accepted, z_score):
    correction = of_log_ratios(reject(level, **options), SEQUENCES)
    assert kept(correction) == accepted
    values = correction.statistics.metrics()
    assert values[f"mis_rs_{level}_seq_masked_fraction"] == accepted.count(False) / 4


@pytest.mark.parametrize("level", ["geometric", "sequence"])
@BOUNDS_BY_HAND
def test_bounds_by_hand(level, options, accepted, z_score):
    values = of_log_ratios(reject(level, **options), SEQUENCES).statistics.metrics()
    assert values["mis_rs_k3"] == pytest.approx(K3, rel=1e-12)
    assert values["mis_rs_z_score"] == pytest.approx(z_score, rel=2e-5)
    half = values["mis_rs_z_score"] * SD / 4 + 5e-5
    scale = 4 if level == "sequence" else 1
    assert values["mis_rs_lower_bound"] == pytest.approx(math.exp(scale * (-K3 - half)))
    assert values["mis_rs_upper_bound"] == pytest.approx(math.exp(scale * (-K3 + half)))


def test_bounds_follow_the_length_of_a_sequence():
    # A mean of 0.02 is 2 deviations of 100 tokens with sd 0.1, and 6.3 of 1000.
    alternating = torch.tensor([0.1, -0.1], dtype=torch.float64).repeat(500)
    batch = [alternating[:100] + 0.02, *[alternating] * 20, alternating + 0.02]
    accepted = kept(of_log_ratios(reject(rs_z_score=3.0), batch))
    assert accepted == [*[True] * 21, False]


def test_exact_sequences_do_not_narrow_the_bounds():
    """The scale is that of the noisy sequences. Otherwise, each of them would be rejected."""
    exact = [torch.zeros(64, dtype=torch.float64)] * 30
    noisy = noise([64] * 10, 0.02)
    assert kept(of_log_ratios(reject(rs_z_score=6.0), exact + noisy)) == [True] * 40


@pytest.mark.parametrize(
    ("share", "accepted"),
    [(1 / 7, [True] * 7), (3 / 7, [True, True, True, True, False, False, False])],
    ids=["a share of one keeps all three", "a share of three rejects all three"],
)
def test_equally_bad_sequences_are_rejected_together(share, accepted):
    """Rounding that depends on how the batch is split does not separate the three worst."""
    batch = [*SEQUENCES, [0.3] * 4, [0.3] * 4, [0.3 + 1e-9] * 4]
    assert kept(of_log_ratios(reject(rs_target_fraction=share), batch)) == accepted


@pytest.mark.parametrize("token", [-30.0, 20.0, 5.0], ids="token {}".format)
@pytest.mark.parametrize("sd", [0.005, 0.1], ids="sd {}".format)
class TestACorruptToken:
    """60 healthy sequences; a token of sequence 4 is replaced."""

    CONFIG = reject(rs_z_score=4.0)

    @pytest.fixture
    def healthy(self, sd: float) -> list[torch.Tensor]:
        return noise([12, 64, 300] * 20, sd)

    @pytest.fixture
    def corrupted(self, healthy: list[torch.Tensor], token: float) -> Correction:
        deltas = [delta.clone() for delta in healthy]
        deltas[4][7] = token
        return of_log_ratios(self.CONFIG, deltas)

    def test_its_part_of_k3_is_bounded(self, healthy, corrupted, sd, token):
        """A token counts in k3 with at most e − 2, however far off it is."""
        clean = of_log_ratios(self.CONFIG, healthy).global_batch.adaptive_bounds.k3.item()
        assert clean == pytest.approx(sd * sd / 2, rel=0.1)
        of_token = math.e - 2 if token > 0 else 1 / math.e
        expected = clean + of_token / (20 * (12 + 64 + 300))
        k3 = corrupted.global_batch.adaptive_bounds.k3.item()
        assert k3 == pytest.approx(expected, rel=0.01)

    def test_only_its_sequence_is_rejected(self, corrupted):
        assert kept(corrupted) == [index != 4 for index in range(60)]


ADAPTIVE = pytest.mark.parametrize(
    "options", [{"rs_z_score": 3.0}, {"rs_target_fraction": 0.5}], ids=["z-score", "share"]
)


@ADAPTIVE
@pytest.mark.parametrize("delta", [0.0, 4e-5, -4e-5], ids="{} nats".format)
def test_equal_engines_lose_nothing(options, delta):
    """float32 log-softmax differs by up to 4e-5 nats, with one sign in a complete sequence."""
    batch = [[delta] * length for length in (1, 12, 3000, 100_000)]
    assert kept(of_log_ratios(reject(**options), batch)) == [True] * 4


@ADAPTIVE
def test_bounds_of_equal_engines_have_a_margin(options):
    values = of_log_ratios(reject(**options), [[0.0] * 9]).statistics.metrics()
    assert values["mis_rs_k3"] == 0.0
    assert values["mis_rs_lower_bound"] == pytest.approx(math.exp(-5e-5))


@settings(max_examples=60)
@given(st.integers(1, 40), st.floats(0.01, 0.9), st.integers(0, 1000))
def test_the_share_is_rejected_to_the_sequence(count, share, seed):
    found = of_log_ratios(
        reject(rs_target_fraction=share), noise([5 + i for i in range(count)], 0.05, seed)
    )
    assert kept(found).count(False) == math.floor(share * count + 1e-9)


def test_a_sequence_alone_is_its_own_scale():
    """z of the rejected sequence is 2.07 alone, and 2.098 in the complete batch."""
    config = reject(rs_z_score=2.08)
    assert kept(of_log_ratios(config, SEQUENCES)) == [True, False, True, True]
    assert kept(of_log_ratios(config, [UP])) == [True]


def test_adaptive_bounds_need_the_sums_of_a_micro_batch():
    with pytest.raises(ValueError, match=r"pass Correction\.sequence_sums of each micro-batch"):
        adaptive_bounds(reject(rs_z_score=2.08), [])


def test_adaptive_bounds_need_an_adaptive_option():
    sums = of_log_ratios(reject(rs_z_score=2.08), [UP]).sequence_sums
    with pytest.raises(ValueError, match="need --rs-z-score or --rs-target-fraction"):
        adaptive_bounds(reject(), [sums])


@pytest.mark.parametrize("level", ["geometric", "sequence"])
@pytest.mark.parametrize("z_score", [5e-324, 1e308])
def test_absurd_z_scores_stay_finite(level, z_score):
    correction = of_log_ratios(reject(level, rs_z_score=z_score), [[], *SEQUENCES, [9e3] * 3])
    assert kept(correction)[1:] == [z_score > 1] * 5
    assert all(math.isfinite(value) for value in correction.statistics.metrics().values())


@settings(max_examples=60)
@given(
    st.lists(st.floats(0, 4) | st.sampled_from([0.0, 0.25, 5e-324, 1e300, math.inf]), max_size=20),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_order_statistics_of_split_values(values, index, cut):
    whole, rank = torch.tensor(values, dtype=torch.float64), torch.tensor(float(index))
    expected = (sorted(values) + [math.inf] * 21)[index]
    assert order_statistic(whole, rank).item() == expected
    found = over_ranks(
        [whole[:cut], whole[cut:]], lambda part, ranks: order_statistic(part, rank, ranks)
    )
    assert found == [expected] * 2
