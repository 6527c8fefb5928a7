"""The library against plain loops, over every combination of options."""

import pytest
import torch
from hypothesis import given, settings

from slime_tis import RolloutCorrectionConfig, correct
from tests.correction.expected import Expected, expected_correction
from tests.correction.strategies import batches, configurations


def tensors(batch: tuple[list, list, list], dtype: torch.dtype = torch.float64) -> tuple[list, list, list]:
    train, rollout, mask = batch
    return (
        [torch.tensor(x, dtype=dtype) for x in train],
        [torch.tensor(x, dtype=dtype) for x in rollout],
        [torch.tensor(x, dtype=torch.bool) for x in mask],
    )


def assert_agrees(config: RolloutCorrectionConfig, batch: tuple[list, list, list], result: Expected) -> None:
    found = correct(config, *tensors(batch))
    for weights, expected in zip(found.weights, result.weights, strict=True):
        assert weights.tolist() == pytest.approx(expected, rel=2e-6, abs=1e-7)
    assert [mask.tolist() for mask in found.mask] == result.mask
    assert found.accepted_per_sequence.tolist() == [sum(mask) for mask in result.mask]
    assert found.masked_in_per_sequence.tolist() == [sum(mask) for mask in batch[2]]
    values = found.statistics.metrics()
    deviations = [name for name in result.metrics if name.endswith("weight_std")]
    for name in deviations:  # of float32 weights: rounding remains
        assert values.pop(name) == pytest.approx(result.metrics.pop(name), rel=1e-6, abs=1e-6)
    assert values == pytest.approx(result.metrics, rel=1e-6, abs=1e-7)


@settings(max_examples=400)
@given(configurations(), batches())
def test_finite_batches(config: RolloutCorrectionConfig, batch: tuple[list, list, list]) -> None:
    assert_agrees(config, batch, expected_correction(config, *batch))


@settings(max_examples=200)
@given(configurations(), batches(wild=True))
def test_batches_with_non_finite_values(config: RolloutCorrectionConfig, batch: tuple[list, list, list]) -> None:
    result = expected_correction(config, *batch)
    found = correct(config, *tensors(batch))
    assert [mask.tolist() for mask in found.mask] == result.mask
    for weights, expected in zip(found.weights, result.weights, strict=True):
        assert weights.tolist() == pytest.approx(expected, rel=2e-6, abs=1e-7)
