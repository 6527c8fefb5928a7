"""Limits that follow the batch, by hand and over ranks: second-moment trimming, and bounds by length and noise."""

import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import pairwise
from threading import Barrier

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slime_tis import Ranks, RolloutCorrectionConfig, adaptive_bounds, correct
from slime_tis.correction.rejection import order_statistic, second_moment_limit
from tests.correction import expected as oracle

INF, NAN = math.inf, math.nan


def over_ranks(parts, find):
    """What each rank finds in its part with the data-parallel ranks, one thread per rank."""
    barrier, tables = Barrier(len(parts)), [torch.zeros(0)] * len(parts)

    def ranks_of(rank):
        def all_reduce(table, op):
            tables[rank] = table
            barrier.wait()
            total = torch.stack(tables).sum(0) if op == "sum" else torch.stack(tables).amax(0)
            barrier.wait()
            return total

        return Ranks(data=all_reduce)

    with ThreadPoolExecutor(len(parts)) as pool:
        found = pool.map(lambda rank: find(parts[rank], ranks_of(rank)), range(len(parts)))
        return [value.item() for value in found]


def limit_over_ranks(parts, bound):
    return over_ranks(parts, lambda part, ranks: second_moment_limit(part, bound, ranks))


BY_HAND = {
    # Δ², bound → the smallest that leaves
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


@pytest.mark.parametrize("case", BY_HAND)
def test_limit_by_hand(case):
    squares, bound, expected = BY_HAND[case]
    whole = torch.tensor(squares, dtype=torch.float64)
    assert second_moment_limit(whole, bound).item() == expected
    assert limit_over_ranks([whole], bound) == [expected]
    assert limit_over_ranks([whole[:1], whole[1:1], whole[1:]], bound) == [expected] * 3


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
    assume(
        all(abs(mean - Fraction(bound)) > 1e-9 for mean in means)
    )  # no verdict hangs on rounding
    expected = oracle.second_moment_limit(values, bound)
    assert second_moment_limit(whole, bound).item() == expected
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [whole[first:last] for first, last in pairwise(edges)]
    assert limit_over_ranks(parts, bound) == [expected] * len(parts)


def test_limits_of_a_million_tokens_over_ranks_and_without_a_bound():
    squares = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).square()
    alone = second_moment_limit(squares, 0.5).item()
    assert (
        limit_over_ranks([squares[:17], squares[17:300_000], squares[300_000:]], 0.5) == [alone] * 3
    )
    assert (
        squares[squares < alone].double().mean() <= 0.5 < squares[squares <= alone].double().mean()
    )
    assert correct(RolloutCorrectionConfig(), [], [], []).global_batch.second_moment_limit is None
    config = RolloutCorrectionConfig(rs_second_moment_bound=0.1)
    limit = correct(config, [], [], []).global_batch.second_moment_limit
    assert limit is not None and limit.item() == INF


UP, DOWN = [0.1] * 4, [-0.1] * 4
SEQUENCES = [[0.1, -0.1, 0.1, -0.1], UP, [-0.1, 0.1, -0.1, 0.1], DOWN]
K3 = (math.exp(0.1) + math.exp(-0.1)) / 2 - 1  # 0.0050042
SD = math.sqrt(2 * K3 * 4)  # 0.2000833
Z_UP = (0.4 + 4 * K3 - 4 * 5e-5) / SD  # 2.0982
Z_DOWN = (0.4 - 4 * K3 - 4 * 5e-5) / SD  # 1.8981


def reject(level="geometric", **options):
    return RolloutCorrectionConfig(use_rs=True, rs_level=level, **options)


def of_log_ratios(config, deltas, **known):
    train = [torch.as_tensor(delta, dtype=torch.float64) for delta in deltas]
    return correct(
        config,
        train,
        [torch.zeros_like(x) for x in train],
        [torch.ones_like(x) for x in train],
        **known,
    )


def kept(found):
    return (found.accepted_per_sequence > 0).tolist()


def noise(lengths, sd, seed=0):
    """Log-ratios of healthy sequences: normal, with E[exp Δ] = 1."""
    generator = torch.Generator().manual_seed(seed)
    return [
        sd * torch.randn(n, generator=generator, dtype=torch.float64) - sd * sd / 2 for n in lengths
    ]


@pytest.mark.parametrize("level", ["geometric", "sequence"])
@pytest.mark.parametrize(
    ("options", "expected", "z_score"),
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
def test_by_hand(level, options, expected, z_score):
    config = reject(level, **options)
    found = of_log_ratios(config, SEQUENCES)
    assert kept(found) == expected
    values = found.statistics.metrics()
    assert values["mis_rs_k3"] == pytest.approx(K3, rel=1e-12)
    assert values["mis_rs_z_score"] == pytest.approx(z_score, rel=2e-5)
    half = values["mis_rs_z_score"] * SD / 4 + 5e-5
    scale = 4 if level == "sequence" else 1
    assert values["mis_rs_lower_bound"] == pytest.approx(math.exp(scale * (-K3 - half)))
    assert values["mis_rs_upper_bound"] == pytest.approx(math.exp(scale * (-K3 + half)))
    assert values[f"mis_rs_{level}_seq_masked_fraction"] == expected.count(False) / 4


def test_length_exact_sequences_and_ties_count():
    # A mean of 0.02 is 2 deviations of 100 tokens with sd 0.1, and 6.3 of 1000.
    alternating = torch.tensor([0.1, -0.1], dtype=torch.float64).repeat(500)
    batch = [alternating[:100] + 0.02, *[alternating] * 20, alternating + 0.02]
    assert kept(of_log_ratios(reject(rs_z_score=3.0), batch)) == [*[True] * 21, False]
    # The scale is that of the noisy ones, or every one of them would be rejected.
    batch = [*[torch.zeros(64, dtype=torch.float64)] * 30, *noise([64] * 10, 0.02)]
    assert kept(of_log_ratios(reject(rs_z_score=6.0), batch)) == [True] * 40
    # Three equal worst ones and a share of one: none leaves; rounding that depends on the cut does
    # not part them.
    batch = [*SEQUENCES, [0.3] * 4, [0.3] * 4, [0.3 + 1e-9] * 4]
    assert kept(of_log_ratios(reject(rs_target_fraction=1 / 7), batch)) == [True] * 7
    assert kept(of_log_ratios(reject(rs_target_fraction=3 / 7), batch)) == [
        *[True] * 4,
        *[False] * 3,
    ]


@pytest.mark.parametrize("token", [-30.0, 20.0, 5.0])
@pytest.mark.parametrize("sd", [0.005, 0.1])
def test_what_is_to_be_rejected_does_not_widen_the_bounds(token, sd):
    """A token counts in k3 with e − 2 at the most, however far off it is."""
    config = reject(rs_z_score=4.0)
    healthy = noise([12, 64, 300] * 20, sd)
    clean = of_log_ratios(config, healthy).global_batch.adaptive_bounds
    corrupted = [delta.clone() for delta in healthy]
    corrupted[4][7] = token
    found = of_log_ratios(config, corrupted)
    assert clean is not None and found.global_batch.adaptive_bounds is not None
    assert clean.k3.item() == pytest.approx(sd * sd / 2, rel=0.1)
    widened = (math.e - 2 if token > 0 else 1 / math.e) / (20 * (12 + 64 + 300))
    assert found.global_batch.adaptive_bounds.k3.item() == pytest.approx(
        clean.k3.item() + widened, rel=0.01
    )
    assert kept(found) == [i != 4 for i in range(60)]


@pytest.mark.parametrize(
    "options", [{"rs_z_score": 3.0}, {"rs_target_fraction": 0.5}], ids=["z-score", "share"]
)
def test_equal_engines_lose_nothing(options):
    """No difference at all, and one of 4e-5 nats with one sign, as float32 log-softmax has it."""
    for delta in (0.0, 4e-5, -4e-5):
        found = of_log_ratios(reject(**options), [[delta] * n for n in (1, 12, 3000, 100_000)])
        assert kept(found) == [True] * 4
    values = of_log_ratios(reject(**options), [[0.0] * 9]).statistics.metrics()
    assert values["mis_rs_k3"] == 0.0 and values["mis_rs_lower_bound"] == pytest.approx(
        math.exp(-5e-5)
    )


@settings(max_examples=60)
@given(st.integers(1, 40), st.floats(0.01, 0.9), st.integers(0, 1000))
def test_the_share_is_rejected_to_the_sequence(count, share, seed):
    found = of_log_ratios(
        reject(rs_target_fraction=share), noise([5 + i for i in range(count)], 0.05, seed)
    )
    assert kept(found).count(False) == math.floor(share * count + 1e-9)


def test_a_sequence_alone_is_its_own_scale_and_bounds_need_tables():
    """z of the rejected sequence is 2.07 alone, and 2.098 in the whole batch."""
    config = reject(rs_z_score=2.08)
    assert kept(of_log_ratios(config, SEQUENCES)) == [True, False, True, True]
    alone = of_log_ratios(config, [UP])
    assert kept(alone) == [True]
    with pytest.raises(ValueError, match=r"pass Correction\.sequence_sums of each micro-batch"):
        adaptive_bounds(config, [])
    with pytest.raises(ValueError, match="need --rs-z-score or --rs-target-fraction"):
        adaptive_bounds(reject(), [alone.sequence_sums])


@pytest.mark.parametrize("level", ["geometric", "sequence"])
@pytest.mark.parametrize("z_score", [5e-324, 1e308])
def test_absurd_z_scores_stay_finite(level, z_score):
    config = reject(level, rs_z_score=z_score)
    found = of_log_ratios(config, [[], *SEQUENCES, [9e3] * 3])
    assert kept(found)[1:] == [z_score > 1] * 5
    assert all(math.isfinite(value) for value in found.statistics.metrics().values())


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
