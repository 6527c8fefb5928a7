"""Rounding of weights, against tables worked out by hand."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis.trainer.engines.weight_rounding import round_bits, round_fp8, round_int8


def test_int8_rounds_to_multiples_of_the_row_scale():
    weight = torch.tensor([[127.0, -127.0, 0.4, 0.6, 0.5, 1.5], [1.27, 0.0, 0.003, 0.006, -0.016, 0.024]])
    expected = torch.tensor([[127.0, -127.0, 0.0, 1.0, 0.0, 2.0], [1.27, 0.0, 0.0, 0.01, -0.02, 0.02]])
    torch.testing.assert_close(round_int8(weight), expected, rtol=0.0, atol=1e-7)


def test_four_bits_are_fifteen_multiples_of_the_row_scale():
    weight = torch.tensor([[7.0, -7.0, 0.4, 0.6, -3.6], [0.7, 0.0, 0.03, 0.06, 0.14]])
    expected = torch.tensor([[7.0, -7.0, 0.0, 1.0, -4.0], [0.7, 0.0, 0.0, 0.1, 0.1]])
    torch.testing.assert_close(round_bits(weight, 4), expected, rtol=0.0, atol=1e-7)


def test_fp8_rounds_to_e4m3_multiples_of_the_row_scale():
    # With 448 in the row the scale is 1. e4m3 has 3 bits of mantissa: steps of 1/8 in [1, 2), of 32 in
    # [256, 448], and of 2^-9 below 2^-6; halves go to the even mantissa.
    weight = torch.tensor([[448.0, 1.0625, 1.1875, 1.07, -300.0, 310.0, 2.0**-9, 2.0**-11, 0.0]])
    expected = torch.tensor([[448.0, 1.0, 1.25, 1.125, -288.0, 320.0, 2.0**-9, 0.0, 0.0]])
    assert torch.equal(round_fp8(weight), expected)
    assert torch.equal(round_fp8(weight / 8), expected / 8)


def test_rows_of_zeros_and_of_tiny_numbers_stay_finite():
    weight = torch.tensor([[0.0, 0.0], [1e-44, -1e-44], [3e38, -3e38]])
    for rounding in (round_fp8, round_int8):
        rounded = rounding(weight)
        assert torch.isfinite(rounded).all()
        assert rounded[0].tolist() == [0.0, 0.0]


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.floats(-6.0, 6.0))
def test_rounding_errs_by_half_a_step_at_most_and_again_by_nothing(seed, log_scale):
    weight = 10.0**log_scale * torch.randn(5, 33, generator=torch.Generator().manual_seed(seed))
    largest = weight.abs().amax(-1, keepdim=True)
    int8, fp8 = round_int8(weight), round_fp8(weight)
    assert ((int8 - weight).abs() <= largest / 127 * 0.5 * (1 + 1e-5)).all()
    fp8_step = torch.maximum(weight.abs() / 8, largest / 448 * 2.0**-9)  # a mantissa of 3 bits; then subnormal
    assert ((fp8 - weight).abs() <= 0.5 * fp8_step * (1 + 1e-5)).all()
    torch.testing.assert_close(round_int8(int8), int8, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(round_fp8(fp8), fp8, rtol=1e-6, atol=0.0)


def test_bfloat16_weights_are_rounded_in_float32():
    weight = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert round_fp8(weight).dtype == torch.float32
    assert torch.equal(round_int8(weight), round_int8(weight.float()))
