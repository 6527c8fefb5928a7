"""Second-moment trimming: by hand, against fractions, and of a batch that is split over micro-batches and ranks."""

import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import pairwise
from threading import Barrier

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slime_tis import Ranks, RolloutCorrectionConfig, correct
from slime_tis.correction.rules import second_moment_limit
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
    assume(all(abs(mean - Fraction(bound)) > 1e-9 for mean in means))  # no verdict hangs on rounding
    expected = oracle.second_moment_limit(values, bound)
    assert second_moment_limit(whole, bound).item() == expected
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [whole[first:last] for first, last in pairwise(edges)]
    assert limit_over_ranks(parts, bound) == [expected] * len(parts)


def test_a_million_tokens_over_ranks():
    squares = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).square()
    alone = second_moment_limit(squares, 0.5).item()
    assert limit_over_ranks([squares[:17], squares[17:300_000], squares[300_000:]], 0.5) == [alone] * 3
    assert squares[squares < alone].double().mean() <= 0.5 < squares[squares <= alone].double().mean()


def test_no_bound_means_no_limit():
    assert correct(RolloutCorrectionConfig(), [], [], []).global_batch.second_moment_limit is None
    config = RolloutCorrectionConfig(rs_second_moment_bound=0.1)
    limit = correct(config, [], [], []).global_batch.second_moment_limit
    assert limit is not None and limit.item() == INF
