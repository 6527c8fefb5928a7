"""Bounds of the weights by the sign of the advantage, against the reference, by hand and over splits."""

import math
from typing import Any, get_args

import pytest
import torch

from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.correction.modes import Level, ModeName
from slime_tis.correction.reference import reference_correct
from tests.correction.test_divergence import random_batch

SIGNED: dict[str, Any] = {"use_tis": True, "tis_lower_bound": 0.7, "tis_upper_bound": 1.2}
NEGATIVE: dict[str, dict[str, float]] = {
    "truncate": {"tis_upper_bound_negative": 1.05},
    "clip": {"tis_lower_bound_negative": 0.0, "tis_upper_bound_negative": 1.05},
    "mask": {"tis_lower_bound_negative": 0.9, "tis_upper_bound_negative": math.inf},
}


@pytest.mark.parametrize("level", get_args(Level))
@pytest.mark.parametrize("mode", get_args(ModeName))
def test_weights_equal_the_reference_in_every_layout_and_split(mode: ModeName, level: Level) -> None:
    config = RolloutCorrectionConfig(
        **SIGNED, **NEGATIVE[mode], tis_mode=mode, tis_level=level, tis_batch_normalize=True
    )
    batch = random_batch()
    expected = reference_correct(config, **{name: values.double() for name, values in batch.items()})
    found = correct(config, **batch)
    torch.testing.assert_close(found.weights.double(), expected.weights, rtol=2e-6, atol=1e-7)
    assert torch.equal(found.mask, expected.mask)
    metrics = found.statistics.metrics()
    assert metrics == {name: pytest.approx(value, rel=1e-5, abs=1e-7) for name, value in expected.metrics.items()}
    packed = correct(config, **{name: x.reshape(-1) for name, x in batch.items()}, lengths=[19] * 7)
    torch.testing.assert_close(packed.weights.view(7, 19), found.weights, rtol=1e-6, atol=0)
    halves = [
        correct(config, **{name: x[rows] for name, x in batch.items()}, global_batch=found.global_batch)
        for rows in (slice(0, 3), slice(3, 7))
    ]
    assert torch.equal(torch.cat([half.weights for half in halves]), found.weights)
    merged = halves[0].statistics.merge(halves[1].statistics).metrics()
    assert merged == {name: pytest.approx(value, rel=1e-9, abs=1e-12) for name, value in metrics.items()}


def test_topr_by_hand() -> None:
    """Mean Δ of −0.5, −0.5, 0.5 and 0.5: weight 1 at advantages of at least 0, else min(exp(mean Δ), 1)."""
    delta = torch.tensor([[-0.2, -0.8], [-0.2, -0.8], [0.9, 0.1], [0.9, 0.1]])
    advantages = torch.tensor([1.0, -1.0, -2.0, 0.0])[:, None].expand(4, 2)
    found = correct(
        RolloutCorrectionConfig.preset("topr"),
        delta,
        torch.zeros_like(delta),
        torch.ones_like(delta),
        advantages=advantages,
    )
    assert found.weights[:, 0].tolist() == pytest.approx([1.0, math.exp(-0.5), 1.0, 1.0]) and found.mask.all()
    metrics = found.statistics.metrics()
    assert metrics["mis_clip_fraction_high"] == 0.5 and metrics["mis_clip_fraction_low"] == 0.25
    assert metrics["mis_weight_min"] == pytest.approx(math.exp(-0.5)) and metrics["mis_weight_max"] == 1.0


@pytest.mark.parametrize("advantage", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_non_finite_advantages_leave_weights_and_metrics_finite(level: Level, advantage: float) -> None:
    config = RolloutCorrectionConfig(**SIGNED, **NEGATIVE["clip"], tis_mode="clip", tis_level=level)
    delta, mask = torch.tensor([[0.3, -0.9, 0.1]]), torch.ones(1, 3)
    found = correct(config, delta, torch.zeros(1, 3), mask, advantages=torch.full((1, 3), advantage))
    assert found.weights.isfinite().all() and all(map(math.isfinite, found.statistics.metrics().values()))


def test_bounds_by_sign_need_advantages() -> None:
    with pytest.raises(ValueError, match="advantages="):
        correct(RolloutCorrectionConfig.preset("topr"), *torch.zeros(3, 2, 4).unbind())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "reversed": ({"tis_mode": "clip", "tis_lower_bound_negative": 2.0}, "--tis-lower-bound-negative 2.0 is not below"),
    "equal in mask mode": ({"tis_mode": "mask", "tis_lower_bound_negative": 1.2}, "--tis-lower-bound-negative"),
    "a lower bound of truncate": ({"tis_lower_bound_negative": 0.1}, "no effect with --tis-mode truncate"),
    "an upper bound of 0": ({"tis_upper_bound_negative": 0.0}, "above 0"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_impossible_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig(**SIGNED, **options)
