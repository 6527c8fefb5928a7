"""Rounds weights to the precision of a rollout engine: to the nearest number, or at random.

An optimizer step of 1e-6 is far below the distance of neighbouring bfloat16 numbers, 2.4e-4 at a
weight of 0.05. Rounded to nearest, a weight changes only after many steps have added up. With
stochastic rounding, the rollout engine's weights follow the trained weights on average.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from slime_tis.trainer.configs.rollout import Rounding

Precision = Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4"]
"""Precision of a tensor in an engine; fp8, int8 and int4 have a scale per row."""

COARSENESS: list[Precision] = ["fp32", "fp16", "bf16", "int8", "fp8", "int4"]
"""Precisions by their effect on log-probs, smallest first."""
DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""Tensor dtypes of precisions; fp8, int8 and int4 are emulated in the dtype of training."""
FP8_MAX = 448.0
"""Largest float8_e4m3fn number."""
FLOATS = {"fp16": (10, -14), "bf16": (7, -126), "fp8": (3, -6)}
"""Per floating-point format: mantissa bits, and the exponent of the smallest normal number."""
LARGEST = {"fp16": 65504.0, "bf16": 3.3895314e38, "fp8": FP8_MAX, "int8": 127.0, "int4": 7.0}
"""Largest number per format, before a scale."""
CHANCES = 2**16
"""Number of distinct random values of stochastic rounding: float32 has 16 more bits than
bfloat16."""


def coarser(first: Precision, second: Precision) -> Precision:
    """The precision with the larger effect on log-probs."""
    return max(first, second, key=lambda precision: COARSENESS.index(precision))


def round_fp8(weight_OI: Tensor) -> Tensor:
    """Rounds to float8_e4m3fn multiples of a scale per row, in float32.

      s_o = max_i |w_oi| / 448,   w'_oi = s_o · e4m3(w_oi / s_o)

    Serving engines use a scale per output channel too. Activations are not rounded.

    Source of the format: "FP8 Formats for Deep Learning", Micikevicius et al.
    (https://arxiv.org/abs/2209.05433), table 1.
    """
    weight_OI = weight_OI.float()
    scale_O1 = row_scale(weight_OI, FP8_MAX)
    scaled_OI = (weight_OI / scale_O1).clamp(-FP8_MAX, FP8_MAX)
    return scaled_OI.to(torch.float8_e4m3fn).float() * scale_O1


def round_bits(weight_OI: Tensor, bits: int) -> Tensor:
    """Rounds to integer multiples of a scale per row, in float32; `bits` includes the sign.

      n = 2^(bits−1) − 1,   s_o = max_i |w_oi| / n,   w'_oi = s_o · round(w_oi / s_o)

    Symmetric around 0: −2^(bits−1) is not used. Halves are rounded to even. Source: "Quantizing
    deep convolutional networks for efficient inference", Krishnamoorthi
    (https://arxiv.org/abs/1806.08342), section 2.2.
    """
    weight_OI = weight_OI.float()
    largest = 2.0 ** (bits - 1) - 1
    scale_O1 = row_scale(weight_OI, largest)
    return (weight_OI / scale_O1).round().clamp(-largest, largest) * scale_O1


round_int8 = partial(round_bits, bits=8)
ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": round_fp8,
    "int8": round_int8,
    "int4": partial(round_bits, bits=4),
}
"""Functions of precisions with a scale per row."""


def row_scale(weight_OI: Tensor, largest: float) -> Tensor:
    """Row-wise max |w| / largest; the smallest normal number if a row is (almost) zero."""
    scale_O1 = weight_OI.abs().amax(-1, keepdim=True) / largest
    # A scale of 0 would make 0 / 0 = NaN of a row of zeros.
    return scale_O1.clamp_min(torch.finfo(torch.float32).tiny)


def round_nearest(weight: Tensor, precision: Precision) -> Tensor:
    """The nearest numbers that an engine of this precision can hold, in float32."""
    if precision in ROUNDINGS:
        return ROUNDINGS[precision](weight)
    return weight.to(DTYPES[precision]).float()


def round_stochastic(weight: Tensor, precision: Precision, generator: torch.Generator) -> Tensor:
    """One of the two nearest numbers of the precision, in float32; the nearer is likelier.

      w' = sgn(w) · s · h · ⌊|w| / (s·h) + u⌋,   u uniform in [0, 1),   E[w'] = w

    with the scale s of the row (else 1) and the distance h of neighbouring numbers at |w|/s. A
    representable number stays unchanged. Source: "Deep Learning with Limited Numerical Precision",
    Gupta et al. (https://arxiv.org/abs/1502.02551), section 3.
    """
    weight = weight.float()
    if precision == "fp32":
        return weight
    largest = LARGEST[precision]
    scale = None
    scaled = weight.abs()
    if precision in ROUNDINGS:
        scale = row_scale(weight, largest)
        scaled = scaled / scale
        # Division may make the row's largest number smaller; then the engine would compute another
        # scale from the rounded row.
        scaled = torch.where(scaled > largest * (1 - 1e-6), largest, scaled)
    step = spacing(scaled, precision)
    chance = torch.empty_like(scaled, dtype=torch.int32).random_(CHANCES, generator=generator)
    uniform = chance.float().div_(CHANCES)
    # In place, because an embedding may have several GB in float32.
    rounded = (scaled / step).add_(uniform).floor_().mul_(step).clamp_max_(largest)
    if scale is not None:
        rounded.mul_(scale)
    return torch.copysign(rounded, weight)


def spacing(magnitude: Tensor, precision: Precision) -> Tensor:
    """Distance of neighbouring numbers of a precision at non-negative float32 numbers.

    It is 2^(exponent − mantissa bits), and 1 for the integer formats.
    """
    if precision not in FLOATS:
        return torch.ones_like(magnitude)
    mantissa, lowest = FLOATS[precision]
    # Bits 23 to 30 of a float32 are its exponent + 127. Below the smallest normal number, the
    # distance stays constant (subnormal numbers).
    exponent = (magnitude.contiguous().view(torch.int32) >> 23).sub_(127).clamp_min_(lowest)
    # At least 1: the distance must itself be a normal float32 number.
    biased = (exponent - mantissa + 127).clamp_min_(1)
    return (biased << 23).view(torch.float32)


@dataclass(frozen=True)
class WeightRounder:
    """Rounds the weights of every update (--weight-update-rounding).

    The same version is always rounded identically, so all engines and repeated sends agree.
    """

    rounding: Rounding
    seed: int

    def __call__(self, name: str, weight: Tensor, precision: Precision, version: int) -> Tensor:
        """Returns the tensor to send; it is `weight` itself if no stochastic rounding is needed."""
        if self.rounding == "nearest" or not rounds(weight.dtype, precision):
            return weight
        digest = hashlib.sha256(f"{self.seed} {name} {version}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big") >> 1  # torch takes seeds below 2^63
        generator = torch.Generator(weight.device).manual_seed(seed)
        rounded = round_stochastic(weight, precision, generator)
        return rounded.to(DTYPES.get(precision, torch.float32))


def rounds(dtype: torch.dtype, precision: Precision) -> bool:
    """Whether an engine of this precision rounds weights of this dtype."""
    if precision in ROUNDINGS:
        return True
    engine_dtype = DTYPES[precision]
    # A wider common type means that the engine's type cannot represent every weight.
    return torch.promote_types(dtype, engine_dtype) != engine_dtype
