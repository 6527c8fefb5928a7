"""The interpolated proximal policy, and off-policy sequence masking."""

import pytest
import torch

from slime_tis import interpolate_old_log_probs, off_policy_sequence_mask


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


def test_a_token_of_unknown_version_keeps_the_log_prob_of_the_rollout() -> None:
    """v = −1 is not a version of 6 steps ago, whose α would be 5/6."""
    old = interpolate_old_log_probs(torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -2.0]), 5, torch.tensor([-1, 3]))
    assert old.tolist() == [-2.0, -1.5]


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
    missing = [torch.tensor([0.1, torch.nan]), *old[1:]]
    found = {
        policy: off_policy_sequence_mask(current, missing, advantages, masks, delta=0.08, nonfinite_policy=policy)
        for policy in ("reject", "neutral")
    }
    assert [found[policy].tolist()[0] for policy in ("reject", "neutral")] == [False, True]  # means 0.1 and 0.05
    with pytest.raises(ValueError, match=r"sequence 0, position 1: train log-prob 0.0, rollout log-prob nan"):
        off_policy_sequence_mask(current, missing, advantages, masks, delta=0.08, nonfinite_policy="raise")
    with pytest.raises(ValueError, match="for 4 sequences; pass one each"):
        off_policy_sequence_mask(current, old, advantages[:2], masks, delta=0.1)
