"""Rounds weight matrices to 8 bits and back, to emulate an engine that stores them so.

Only the rounding of the weights is emulated: the rounded values are returned in float32 and computed with in
float32, and activations are not rounded. Scales are per output channel (row), the usual choice of serving
engines for weights: with one scale a matrix, one large row costs all the others their resolution.
"""

import torch
from torch import Tensor

FP8_MAX = 448.0  # largest finite float8_e4m3fn


def round_fp8(weight_OI: Tensor) -> Tensor:
    """The nearest float8_e4m3fn multiples of a row's scale.

      s_o = max_i |w_oi| / 448,   w'_oi = s_o · e4m3(w_oi / s_o)

    Source of the format: "FP8 Formats for Deep Learning", Micikevicius et al.
    (https://arxiv.org/abs/2209.05433), table 1.

    Args:
        weight_OI: [outputs, inputs] weights.

    Returns:
        [outputs, inputs] float32.
    """
    weight_OI = weight_OI.float()
    scale_O1 = row_scale(weight_OI, FP8_MAX)
    scaled_OI = (weight_OI / scale_O1).clamp(-FP8_MAX, FP8_MAX)
    return scaled_OI.to(torch.float8_e4m3fn).float() * scale_O1


def round_bits(weight_OI: Tensor, bits: int) -> Tensor:
    """The nearest integer multiples of a row's scale, symmetric around 0, as `round_int8` with another width.

      n = 2^(bits−1) − 1,   s_o = max_i |w_oi| / n,   w'_oi = s_o · round(w_oi / s_o)

    Args:
        weight_OI: [outputs, inputs] weights.
        bits: of an integer, its sign among them.

    Returns:
        [outputs, inputs] float32.
    """
    weight_OI = weight_OI.float()
    largest = 2.0 ** (bits - 1) - 1
    scale_O1 = row_scale(weight_OI, largest)
    return (weight_OI / scale_O1).round().clamp(-largest, largest) * scale_O1


def round_int8(weight_OI: Tensor) -> Tensor:
    """The nearest integer multiples of a row's scale, symmetric around 0: -128 is not used.

      s_o = max_i |w_oi| / 127,   w'_oi = s_o · round(w_oi / s_o)

    Halves are rounded to even. Source: "Quantizing deep convolutional networks for efficient inference",
    Krishnamoorthi (https://arxiv.org/abs/1806.08342), section 2.2.

    Args:
        weight_OI: [outputs, inputs] weights.

    Returns:
        [outputs, inputs] float32.
    """
    return round_bits(weight_OI, 8)


def row_scale(weight_OI: Tensor, largest: float) -> Tensor:
    """max |w| / largest of each row; the smallest normal number where a row is zero or nearly so."""
    return (weight_OI.abs().amax(-1, keepdim=True) / largest).clamp_min(torch.finfo(torch.float32).tiny)
