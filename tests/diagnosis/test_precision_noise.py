"""The table of rounding noise, and the precisions that a noise fits."""

import math

import pytest

from examples.tables import read_rows
from slime_tis.analysis.diagnosis.precision_noise import (
    MARGIN,
    NOISE,
    Noise,
    fits,
    possible_precisions,
)
from studies.precision_noise.measure import RESULTS, Row

KINDS = {
    "fp16": ("fp16",),
    "bf16": ("bf16", "bf16 weights"),
    "int8": ("int8",),
    "fp8": ("fp8", "fp8 weights and activations", "fp8 KV cache"),
    "int4": ("int4",),
}
"""Rollout precisions of the study that an entry of the table describes."""


def measured(name: str) -> list[float]:
    """Noise of all models whose coarser precision is the named one."""
    noise = []
    for row in read_rows(RESULTS, Row):
        if row.rollout in KINDS[name] and row.training in ("fp32", name):
            noise.append(row.noise)
    return noise


@pytest.mark.parametrize("name", NOISE)
def test_the_table_has_the_measured_range(name: str) -> None:
    noise = measured(name)
    assert NOISE[name].smallest == pytest.approx(min(noise), rel=0.1)
    assert NOISE[name].largest == pytest.approx(max(noise), rel=0.1)


@pytest.mark.parametrize("name", NOISE)
def test_a_precision_fits_all_its_measurements(name: str) -> None:
    assert all(fits(name, noise) for noise in measured(name))


def test_the_density_by_hand() -> None:
    # ln 4 is the distance of the ends, so the standard deviation is ln(4)/4 < 0.35.
    noise = Noise(smallest=0.01, largest=0.04)
    assert noise.likelihood(0.02) == pytest.approx(1 / 0.35)
    assert noise.likelihood(0.04) == pytest.approx(
        math.exp(-0.5 * (math.log(2) / 0.35) ** 2) / 0.35
    )


@pytest.mark.parametrize("noise", [0.0, 1e-9, 1e-3, 0.02, 0.1, 0.5])
def test_probabilities_are_at_most_1(noise: float) -> None:
    possible = possible_precisions(noise)
    assert possible
    assert 0 < sum(possible.values()) <= 1 + 1e-12


@pytest.mark.parametrize("noise", [10.0, math.inf, math.nan])
def test_no_precision_makes_any_noise(noise: float) -> None:
    assert possible_precisions(noise) == {}


def test_an_unknown_precision_fits_nothing() -> None:
    assert not fits("fp4", 0.01)


def test_the_margin_is_above_the_largest() -> None:
    assert MARGIN > 1
