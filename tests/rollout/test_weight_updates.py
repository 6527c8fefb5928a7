"""What of an update arrives: metrics by hand, the sample, and the same numbers whoever streams."""

import pytest
import torch

from slime_tis.trainer.engines.weight_rounding import WeightRounder, round_nearest
from slime_tis.trainer.engines.weight_updates import WeightUpdates, row_stride

BF16 = 2.0**-7
"""Distance of neighbouring bf16 numbers in [1, 2)."""


def updates_of(rounding="nearest", precision="bf16", *, samples_all=False):
    return WeightUpdates(WeightRounder(rounding, 0), lambda name: precision, samples_all=samples_all)


def push(updates, version, **tensors):
    return dict(updates.source(lambda: tensors.items(), version)())


def test_metrics_by_hand():
    updates = updates_of()
    push(updates, 0, w=torch.ones(4), v=torch.full((2,), 1.5))
    assert updates.metrics() == {}
    # three of four rows are not sampled where a tensor has 61 rows or fewer: the first row counts for all
    push(updates, 1, w=torch.full((4,), 1 + BF16 / 4), v=torch.full((2,), 1.5 + BF16))
    found = updates.metrics()
    assert found["rollout/update_absorbed"] == pytest.approx(4 / 6)
    # |Δ|² is 4 · (h/4)² of w, absorbed, and 2 · h² of v
    assert found["rollout/update_absorbed_norm"] == pytest.approx((0.25 / 2.25) ** 0.5)
    assert found["rollout/update_received"] == pytest.approx(2 / 2.25)


def test_a_step_over_the_midpoint_arrives_too_large():
    updates = updates_of()
    push(updates, 0, w=torch.full((1,), 1 + 0.45 * BF16))
    push(updates, 1, w=torch.full((1,), 1 + 0.55 * BF16))
    assert updates.metrics()["rollout/update_received"] == pytest.approx(10, rel=1e-4)
    push(updates, 2, w=torch.full((1,), 1 + 0.55 * BF16))
    assert updates.metrics() == {}  # nothing moved


def test_a_version_sent_again_is_compared_with_the_one_before():
    updates = updates_of()
    push(updates, 0, w=torch.ones(1))
    push(updates, 1, w=torch.full((1,), 1 + BF16))
    once = updates.metrics()
    push(updates, 1, w=torch.full((1,), 1 + BF16))
    assert (
        updates.metrics()
        == once
        == {
            "rollout/update_absorbed": 0.0,
            "rollout/update_absorbed_norm": 0.0,
            "rollout/update_received": pytest.approx(1.0),
        }
    )


@pytest.mark.parametrize(
    ("rounding", "low", "high"),
    [("nearest", 0.0, 0.0), ("stochastic", 0.75, 1.25), ("error-compensated", 0.75, 1.25)],
)
def test_small_steps_from_a_bf16_checkpoint(rounding, low, high):
    generator = torch.Generator().manual_seed(0)
    sign = torch.randn(61 * 1024, 64, generator=generator).sign()
    start = round_nearest(0.0313 + torch.rand(sign.shape, generator=generator) / 16, "bf16")
    updates = updates_of(rounding)
    push(updates, 0, w=start)
    for version in (1, 2, 3):
        push(updates, version, w=start + version * 2e-5 * sign)
        found = updates.metrics()
        assert low <= found["rollout/update_received"] <= high
        # most elements do not change whatever the rounding: the few that do change by a whole distance
        assert found["rollout/update_absorbed"] > 0.6


def test_the_sample_is_small_and_only_of_what_is_rounded():
    updates = updates_of()
    push(updates, 0, big=torch.zeros(49152, 576), bias=torch.zeros(576), half=torch.zeros(8, 8).bfloat16())
    assert set(updates.sampled) == {"big", "bias"}
    assert updates.sampled["big"].trained.numel() <= 65_536 and updates.sampled["bias"].trained.numel() == 10
    assert updates.sampled["big"].share == pytest.approx(113 / 49152, rel=0.02)
    assert row_stride(torch.zeros(10, 100_000)) == 61 and row_stride(torch.zeros(1000, 65_536)) == 1001
    everything = updates_of(precision="fp32", samples_all=True)
    push(everything, 0, half=torch.zeros(8, 8))
    assert set(everything.sampled) == {"half"}


def test_nearest_hands_the_very_tensors_on():
    tensors = {"w": torch.randn(4, 4)}
    assert push(updates_of(), 0, **tensors)["w"] is tensors["w"]
