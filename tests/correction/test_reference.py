"""`correct` against the one-page reference, and that against plain loops, over every combination of options."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis import RolloutCorrectionConfig, correct, functional
from slime_tis.correction.reference import reference_correct
from tests.correction.expected import expected_correction
from tests.correction.strategies import batches, configurations, policy_batch, policy_configurations

Batch = tuple[list, list, list]
SOME, REST = slice(0, 3), slice(3, 7)


def padded(batch, dtype=torch.float64):
    """Train and rollout log-probs [B, T], NaN in the padding, and the mask."""
    width = max((len(x) for x in batch[0]), default=0) + 1
    fill = (math.nan, math.nan, False)
    dtypes = (dtype, dtype, torch.bool)
    return [
        torch.tensor([[*x, *[f] * (width - len(x))] for x in xs], dtype=d).view(len(xs), width)
        for xs, f, d in zip(batch, fill, dtypes, strict=True)
    ]


def assert_metrics(found, expected, deviation):
    """Equal but for rounding; `deviation` is that of the standard deviations, which small weights lose digits of."""
    found, expected = dict(found), dict(expected)
    for name in [name for name in expected if name.endswith("weight_std")]:
        assert found.pop(name) == pytest.approx(expected.pop(name), rel=1e-6, abs=deviation)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)


def assert_agrees(config, batch, reference):
    found = correct(config, *padded(batch))
    torch.testing.assert_close(found.weights.double(), reference.weights, rtol=2e-6, atol=1e-7)
    assert torch.equal(found.mask, reference.mask)
    assert found.accepted_per_sequence.tolist() == reference.mask.sum(1).tolist()
    assert found.masked_in_per_sequence.tolist() == [sum(mask) for mask in batch[2]]


def assert_is(reference, expected):
    for weights, mask, row, row_mask in zip(
        reference.weights, reference.mask, expected.weights, expected.mask, strict=True
    ):
        assert weights[: len(row)].tolist() == pytest.approx(row, rel=1e-9, abs=1e-12)
        assert mask[: len(row)].tolist() == row_mask and not mask[len(row) :].any() and not weights[len(row) :].any()


@settings(max_examples=300)
@given(configurations(), batches())
def test_finite_batches(config, batch):
    reference = reference_correct(config, *padded(batch))
    assert_agrees(config, batch, reference)
    assert_metrics(correct(config, *padded(batch)).statistics.metrics(), reference.metrics, 1e-6)
    expected = expected_correction(config, *batch)
    assert_is(reference, expected)
    assert_metrics(reference.metrics, expected.metrics, 1e-7)


@settings(max_examples=150)
@given(configurations(), batches(wild=True))
def test_batches_with_non_finite_values(config, batch):
    reference = reference_correct(config, *padded(batch))
    assert_agrees(config, batch, reference)
    assert_is(reference, expected_correction(config, *batch))


@settings(max_examples=150)
@given(policy_configurations(), st.integers(0, 1000))
def test_the_current_policy_and_advantages(config, seed):
    """Padded, packed, in lists, in micro-batches, and as the traced function."""
    batch = policy_batch(seed)
    reference = reference_correct(config, **batch)
    found = correct(config, **batch)
    torch.testing.assert_close(found.weights.double(), reference.weights, rtol=2e-6, atol=1e-7)
    assert torch.equal(found.mask, reference.mask)
    metrics = found.statistics.metrics()
    assert_metrics(metrics, reference.metrics, 1e-6)
    lists = correct(config, **{name: list(x) for name, x in batch.items()})
    packed = correct(config, **{name: x.reshape(-1) for name, x in batch.items()}, lengths=[19] * 7)
    for weights, mask in (
        (packed.weights.view(7, 19), packed.mask.view(7, 19)),
        map(torch.stack, (lists.weights, lists.mask)),
    ):
        torch.testing.assert_close(weights, found.weights, rtol=1e-6, atol=0)
        assert torch.equal(mask, found.mask)
    known = {"global_batch": found.global_batch}
    parts = [correct(config, **{name: x[rows] for name, x in batch.items()}, **known) for rows in (SOME, REST)]
    torch.testing.assert_close(torch.cat([part.weights for part in parts]), found.weights, rtol=1e-6, atol=0)
    assert torch.equal(torch.cat([part.mask for part in parts]), found.mask)
    assert_metrics(parts[0].statistics.merge(parts[1].statistics).metrics(), metrics, 1e-9)
    if not config.batch_options:
        traced = functional.correct(config, **batch)
        torch.testing.assert_close(traced.weights, found.weights, rtol=2e-6, atol=1e-7)
        assert torch.equal(traced.mask, found.mask)


def test_the_reference_refuses_non_finite_tokens_too():
    config = RolloutCorrectionConfig(use_tis=True, nonfinite_policy="raise")
    train, mask = torch.tensor([[0.0, math.nan]]), torch.tensor([[1, 1]])
    with pytest.raises(ValueError, match="a log-prob is not finite; fix the sample or choose --nonfinite-policy"):
        reference_correct(config, train, torch.zeros(1, 2), mask)
    assert reference_correct(config, train, torch.zeros(1, 2), torch.tensor([[1, 0]])).weights.tolist() == [[1, 0]]
