"""Numbers of a comparison, against hand-computed values."""

import math

import pytest
import torch

from slime_tis.parity.comparison import difference

INF = math.inf
CASES = {
    "equal": ([1.0, 2.0], [1.0, 2.0], 0, 0.0),
    "one value": ([1.0, 2.0], [1.0, 2.5], 1, 0.5),
    "zero and minus zero": ([0.0, 1.0], [-0.0, 1.0], 0, 0.0),
    "equal infinities": ([INF, -INF], [INF, -INF], 0, 0.0),
    "infinity and a number": ([INF, 1.0], [3.0, 1.0], 1, INF),
    "opposite infinities": ([INF, 1.0], [-INF, 1.0], 1, INF),
    "one subnormal": ([0.0, 1.0], [1e-45, 1.0], 1, 1.401298464324817e-45),
    "sentinels": ([-9999.0, 1.0], [-1e6, 1.0], 1, 990001.0),
}


@pytest.mark.parametrize(("a", "b", "differing", "largest"), CASES.values(), ids=[*CASES])
def test_difference_of_two_rows(a, b, differing, largest):
    result = difference(torch.tensor([a]), torch.tensor([b]), torch.tensor([7]))
    assert result.differing == differing
    assert result.largest == largest
    assert result.token == (7 if differing else None)


@pytest.mark.parametrize("other", [math.nan, 1.0], ids=["NaN", "a number"])
def test_nan_differs(other):
    result = difference(
        torch.tensor([[math.nan, 1.0]]), torch.tensor([[other, 1.0]]), torch.tensor([0])
    )
    assert result.differing == result.nan == 1
    assert math.isnan(result.largest)


def test_bits_count_the_leading_digits_that_agree():
    step = torch.finfo(torch.bfloat16).eps
    a = torch.tensor([[1.0]], dtype=torch.bfloat16)
    b = torch.tensor([[1.0 + step]], dtype=torch.bfloat16)
    result = difference(a, b, torch.tensor([0]))
    assert result.relative == step
    assert result.bits == 7


def test_data_types_may_differ():
    exact = torch.tensor([[1.0 + 2**-10]])
    result = difference(exact, exact.bfloat16(), torch.tensor([0]))
    assert result.largest == 2**-10
