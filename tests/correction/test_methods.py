"""Second-moment trimming, the interpolated proximal policy, and off-policy sequence masking."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis import RolloutCorrectionConfig, correct, figures, interpolate_old_log_probs, off_policy_sequence_mask


def test_trimming_by_hand() -> None:
    """Δ² = 0.01, 0.04, 0.25, 1: the mean of the first three is 0.1, of all 0.325."""
    config = RolloutCorrectionConfig(rs_second_moment_bound=0.11)
    delta = [torch.tensor([0.1, 1.0, 5.0]), torch.tensor([-0.5, 0.2])]
    masks = [torch.tensor([1, 1, 0]), torch.ones(2)]
    found = correct(config, delta, [torch.zeros(3), torch.zeros(2)], masks)
    assert [m.tolist() for m in found.mask] == [[True, False, False], [True, True]]
    assert found.kept_per_sequence.tolist() == [1, 2]
    values = figures(config, found.statistics)
    assert values["mis_second_moment_masked_fraction"] == 0.25 and values["gradient_kept_fraction"] == 0.75


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=30), st.floats(0.01, 2.0))
def test_trimming_drops_the_largest_and_no_more_than_needed(values: list[float], bound: float) -> None:
    config = RolloutCorrectionConfig(rs_second_moment_bound=bound)
    delta = torch.tensor(values, dtype=torch.float64)
    kept = correct(config, [delta], [torch.zeros_like(delta)], [torch.ones_like(delta)]).mask[0]
    squares = sorted(v * v for v in values)
    inside, outside = delta[kept].square(), delta[~kept].square()
    assert inside.numel() == 0 or inside.mean() <= bound * (1 + 1e-9)
    if outside.numel():
        assert inside.numel() == 0 or inside.max() < outside.min()
        prefix = [math.fsum(squares[: m + 1]) / (m + 1) for m in range(len(squares))]
        within = sum(mean <= bound for mean in prefix)
        assert outside.min().item() == pytest.approx(squares[within])


def test_interpolation_by_hand() -> None:
    """Current version 5: a token of version 5 or 4 keeps its own log-prob, one of version 3 goes half the way."""
    old = interpolate_old_log_probs(
        torch.tensor([-1.0, -1.0, -1.0, -1.0, torch.nan]),
        torch.tensor([-2.0, -2.0, -2.0, -2.0, -2.0]),
        5,
        torch.tensor([5, 4, 3, 1, 1]),
    )
    assert old.tolist() == [-2.0, -2.0, -1.5, -1.25, -2.0]


def test_interpolation_carries_no_gradient_and_checks_shapes() -> None:
    current = torch.zeros(2, requires_grad=True)
    assert not interpolate_old_log_probs(current, torch.ones(2), 3, torch.tensor([1, 1])).requires_grad
    with pytest.raises(ValueError, match=r"log_probs has shape \(2,\), rollout_log_probs \(3,\)"):
        interpolate_old_log_probs(current, torch.ones(3), 3, torch.tensor([1, 1]))


def test_off_policy_sequence_mask() -> None:
    """Mean log-ratios old − current: 0.2, 0.2, 0.05, and a sequence without valid tokens."""
    old = [torch.tensor([0.1, 0.3]), torch.tensor([0.2, 9.0]), torch.tensor([0.05]), torch.tensor([5.0])]
    current = [torch.zeros(2), torch.zeros(2), torch.zeros(1), torch.zeros(1)]
    masks = [torch.ones(2), torch.tensor([1, 0]), torch.ones(1), torch.zeros(1)]
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    kept = off_policy_sequence_mask(current, old, advantages, masks, delta=0.1)
    assert kept.tolist() == [False, True, True, True]
    packed = off_policy_sequence_mask(
        torch.cat(current), torch.cat(old), advantages, torch.cat(masks), delta=0.1, lengths=[2, 2, 1, 1]
    )
    assert packed.tolist() == kept.tolist()
    with pytest.raises(ValueError, match="for 4 sequences; pass one each"):
        off_policy_sequence_mask(current, old, advantages[:2], masks, delta=0.1)
