"""The interpolated proximal policy, off-policy sequence masking, and bounds by the sign of the
advantage."""

import math

import pytest
import torch

from slime_tis import (
    RolloutCorrectionConfig,
    correct,
    interpolate_old_log_probs,
    off_policy_sequence_mask,
)


def test_interpolation_by_hand_without_a_gradient():
    # Current version 5: a token of version 5, 4 or unknown keeps its own log-prob, one of version 3
    # goes half the way. v = −1 is not a version of 6 steps ago, whose α would be 5/6.
    current, rollout = torch.tensor([-1.0] * 5 + [torch.nan]), torch.full((6,), -2.0)
    old = interpolate_old_log_probs(current, rollout, 5, torch.tensor([5, 4, 3, 1, -1, 1]))
    assert old.tolist() == [-2.0, -2.0, -1.5, -1.25, -2.0, -2.0]
    current = torch.zeros(2, requires_grad=True)
    assert not interpolate_old_log_probs(
        current, torch.ones(2), 3, torch.tensor([1, 1])
    ).requires_grad
    with pytest.raises(ValueError, match=r"log_probs has shape \(2,\), rollout_log_probs \(3,\)"):
        interpolate_old_log_probs(current, torch.ones(3), 3, torch.tensor([1, 1]))


def test_interpolation_takes_version_0_as_a_version():
    rollout, versions = (
        torch.tensor([-2.0]),
        torch.tensor([0]),
    )  # the initial weights sampled the token
    old = interpolate_old_log_probs(torch.tensor([-1.0]), rollout, 5, versions)
    assert old.tolist() == pytest.approx([-2.0 + 4 / 5])


def test_off_policy_sequence_mask():
    """Mean log-ratios old − current: 0.2, 0.2, 0.05, and a sequence without valid tokens."""
    old = [
        torch.tensor([0.1, 0.3]),
        torch.tensor([0.2, 9.0]),
        torch.tensor([0.05]),
        torch.tensor([5.0]),
    ]
    current = [torch.zeros(2), torch.zeros(2), torch.zeros(1), torch.zeros(1)]
    masks = [torch.ones(2), torch.tensor([1, 0]), torch.ones(1), torch.zeros(1)]
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    kept = off_policy_sequence_mask(current, old, advantages, masks, delta=0.1)
    assert kept.tolist() == [False, True, True, True]
    packed = off_policy_sequence_mask(
        torch.cat(current),
        torch.cat(old),
        advantages,
        torch.cat(masks),
        delta=0.1,
        lengths=[2, 2, 1, 1],
    )
    assert packed.tolist() == kept.tolist()
    missing = [torch.tensor([0.1, torch.nan]), *old[1:]]
    found = {
        policy: off_policy_sequence_mask(
            current, missing, advantages, masks, delta=0.08, nonfinite_policy=policy
        )
        for policy in ("reject", "neutral")
    }
    assert [found[policy].tolist()[0] for policy in ("reject", "neutral")] == [
        False,
        True,
    ]  # means 0.1 and 0.05
    with pytest.raises(
        ValueError, match=r"sequence 0, position 1: train log-prob 0.0, rollout log-prob nan"
    ):
        off_policy_sequence_mask(
            current, missing, advantages, masks, delta=0.08, nonfinite_policy="raise"
        )
    with pytest.raises(ValueError, match="for 4 sequences and a mask of shape"):
        off_policy_sequence_mask(current, old, advantages[:2], masks, delta=0.1)


# advantages, mask → accepted tokens; log π_old − log π_θ is 1 at every trained token
OPSM_BY_TOKEN = {
    "signs differ": ([2.0, -1.0, -0.5], [1, 1, 1], [True, False, False]),
    "a masked token has the largest advantage": (
        [-1.0, 5.0, -1.0],
        [1, 0, 1],
        [False, False, False],
    ),
    "a masked token has the only negative advantage": (
        [1.0, -5.0, 1.0],
        [1, 0, 1],
        [True, False, True],
    ),
    "a masked token has no advantage": ([-1.0, math.nan, 1.0], [1, 0, 1], [False, False, True]),
    "advantages of 0": ([0.0, -0.0, -1.0], [1, 1, 1], [True, True, False]),
}


@pytest.mark.parametrize(
    ("advantages", "mask", "accepted"), OPSM_BY_TOKEN.values(), ids=OPSM_BY_TOKEN
)
def test_opsm_goes_by_the_advantage_of_each_token(advantages, mask, accepted):
    old, current = torch.full((1, 3), -1.0), torch.full((1, 3), -2.0)
    if not mask[1]:
        old[0, 1] = 1e30  # masked garbage is not in the mean
    inputs = torch.tensor([advantages]), torch.tensor([mask])
    kept = off_policy_sequence_mask(current, old, *inputs, delta=0.1)
    assert kept.tolist() == [accepted]
    near = off_policy_sequence_mask(current, old, *inputs, delta=1.1)
    assert near.tolist() == [[bool(value) for value in mask]]


def test_opsm_keeps_sequences_without_advantage():
    old, current = torch.full((3, 2), -1.0), torch.full((3, 2), -2.0)
    kept = off_policy_sequence_mask(
        current, old, torch.tensor([0.0, -0.0, -1e-30]), torch.ones(3, 2), delta=0.1
    )
    assert kept.tolist() == [True, True, False]


def test_opsm_of_tokens_is_the_same_in_every_layout():
    lengths = [3, 2, 0, 1]
    generator = torch.Generator().manual_seed(4)
    old, current, advantages = torch.randn(3, 6, generator=generator).unbind()
    mask = torch.tensor([1, 1, 0, 1, 1, 1])
    packed = off_policy_sequence_mask(current, old, advantages, mask, delta=0.1, lengths=lengths)
    inputs = [list(x.split(lengths)) for x in (current, old, advantages, mask)]
    listed = off_policy_sequence_mask(*inputs, delta=0.1)
    assert torch.equal(torch.cat(listed), packed)
    assert not packed.all() and packed.any()


def test_topr_by_hand():
    """Mean Δ of −0.5, −0.5, 0.5 and 0.5: weight 1 at advantages of at least 0, else min(exp(mean
    Δ), 1)."""
    delta = torch.tensor([[-0.2, -0.8], [-0.2, -0.8], [0.9, 0.1], [0.9, 0.1]])
    advantages = torch.tensor([1.0, -1.0, -2.0, 0.0])[:, None].expand(4, 2)
    found = correct(
        RolloutCorrectionConfig.preset("topr"),
        delta,
        torch.zeros_like(delta),
        torch.ones_like(delta),
        advantages=advantages,
    )
    assert (
        found.weights[:, 0].tolist() == pytest.approx([1.0, math.exp(-0.5), 1.0, 1.0])
        and found.mask.all()
    )
    metrics = found.statistics.metrics()
    assert metrics["mis_clip_fraction_high"] == 0.5 and metrics["mis_clip_fraction_low"] == 0.25
    assert (
        metrics["mis_weight_min"] == pytest.approx(math.exp(-0.5))
        and metrics["mis_weight_max"] == 1.0
    )


@pytest.mark.parametrize("advantage", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_non_finite_advantages_leave_weights_and_metrics_finite(level, advantage):
    bounds = {
        "tis_lower_bound": 0.7,
        "tis_lower_bound_negative": 0.0,
        "tis_upper_bound_negative": 1.05,
    }
    config = RolloutCorrectionConfig(
        use_tis=True, tis_mode="clip", tis_level=level, tis_upper_bound=1.2, **bounds
    )
    delta, mask = torch.tensor([[0.3, -0.9, 0.1]]), torch.ones(1, 3)
    found = correct(
        config, delta, torch.zeros(1, 3), mask, advantages=torch.full((1, 3), advantage)
    )
    assert found.weights.isfinite().all() and all(
        map(math.isfinite, found.statistics.metrics().values())
    )


@pytest.mark.parametrize(
    ("advantages", "weight"),
    [([math.nan, -1.0], math.exp(-0.5)), ([math.nan, 1.0], 1.0), ([math.nan, math.nan], 1.0)],
    ids=["negative", "positive", "missing"],
)
def test_finite_advantages_decide_the_sign_of_a_sequence(advantages, weight):
    delta = torch.tensor([[-0.2, -0.8]])
    corrected = correct(
        RolloutCorrectionConfig.preset("topr"),
        delta,
        torch.zeros(1, 2),
        torch.ones(1, 2),
        advantages=torch.tensor([advantages]),
    )
    assert corrected.weights.tolist()[0] == pytest.approx([weight, weight])


@pytest.mark.parametrize("name", ["topr", "dppo_tv"])
def test_signs_and_directions_need_advantages(name):
    with pytest.raises(ValueError, match="advantages="):
        correct(RolloutCorrectionConfig.preset(name), *torch.zeros(3, 2, 4).unbind())
