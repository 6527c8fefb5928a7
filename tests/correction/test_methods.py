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


def test_interpolation_by_hand():
    # Current version 5: a token of version 5, 4 or unknown keeps its own log-prob, one of version 3
    # goes half the way. v = −1 is not a version of 6 steps ago, whose α would be 5/6.
    current = torch.tensor([-1.0] * 5 + [torch.nan])
    rollout = torch.full((6,), -2.0)
    versions = torch.tensor([5, 4, 3, 1, -1, 1])
    old = interpolate_old_log_probs(current, rollout, 5, versions)
    assert old.tolist() == [-2.0, -2.0, -1.5, -1.25, -2.0, -2.0]


def test_an_interpolated_policy_has_no_gradient():
    current = torch.zeros(2, requires_grad=True)
    old = interpolate_old_log_probs(current, torch.ones(2), 3, torch.tensor([1, 1]))
    assert not old.requires_grad


def test_interpolation_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"log_probs has shape \(2,\), rollout_log_probs \(3,\)"):
        interpolate_old_log_probs(torch.zeros(2), torch.ones(3), 3, torch.tensor([1, 1]))


def test_interpolation_takes_version_0_as_a_version():
    rollout = torch.tensor([-2.0])
    versions = torch.tensor([0])  # the initial weights sampled the token
    old = interpolate_old_log_probs(torch.tensor([-1.0]), rollout, 5, versions)
    assert old.tolist() == pytest.approx([-2.0 + 4 / 5])


# Mean log-ratios old − current of valid tokens: 0.2, 0.2 and 0.05; the last sequence has no valid
# token.
OLD = [
    torch.tensor([0.1, 0.3]),
    torch.tensor([0.2, 9.0]),
    torch.tensor([0.05]),
    torch.tensor([5.0]),
]
CURRENT = [torch.zeros(2), torch.zeros(2), torch.zeros(1), torch.zeros(1)]
MASKS = [torch.ones(2), torch.tensor([1, 0]), torch.ones(1), torch.zeros(1)]
ADVANTAGES = torch.tensor([-1.0, 1.0, -1.0, -1.0])
MISSING = [torch.tensor([0.1, torch.nan]), *OLD[1:]]
"""The same with one log-prob missing in the first sequence."""


def test_opsm_drops_far_sequences_of_negative_advantage():
    kept = off_policy_sequence_mask(CURRENT, OLD, ADVANTAGES, MASKS, delta=0.1)
    assert kept.tolist() == [False, True, True, True]


def test_opsm_of_packed_sequences():
    kept = off_policy_sequence_mask(
        torch.cat(CURRENT),
        torch.cat(OLD),
        ADVANTAGES,
        torch.cat(MASKS),
        delta=0.1,
        lengths=[2, 2, 1, 1],
    )
    assert kept.tolist() == [False, True, True, True]


# The mean of [0.1, NaN] is 0.1 over valid tokens and 0.05 if NaN counts as 0; delta is between.
@pytest.mark.parametrize(("policy", "first_kept"), [("reject", False), ("neutral", True)])
def test_opsm_of_a_missing_log_prob(policy, first_kept):
    kept = off_policy_sequence_mask(
        CURRENT, MISSING, ADVANTAGES, MASKS, delta=0.08, nonfinite_policy=policy
    )
    assert kept.tolist() == [first_kept, True, True, True]


def test_opsm_names_a_missing_log_prob():
    message = "sequence 0, position 1: train log-prob 0.0, rollout log-prob nan"
    with pytest.raises(ValueError, match=message):
        off_policy_sequence_mask(
            CURRENT, MISSING, ADVANTAGES, MASKS, delta=0.08, nonfinite_policy="raise"
        )


def test_opsm_refuses_advantages_of_another_batch():
    with pytest.raises(ValueError, match="for 4 sequences and a mask of shape"):
        off_policy_sequence_mask(CURRENT, OLD, ADVANTAGES[:2], MASKS, delta=0.1)


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
def test_opsm_uses_the_advantage_of_each_token(advantages, mask, accepted):
    old = torch.full((1, 3), -1.0)
    current = torch.full((1, 3), -2.0)
    if not mask[1]:
        old[0, 1] = 1e30  # masked garbage is not in the mean
    kept = off_policy_sequence_mask(
        current, old, torch.tensor([advantages]), torch.tensor([mask]), delta=0.1
    )
    assert kept.tolist() == [accepted]


def test_opsm_keeps_all_valid_tokens_of_near_sequences():
    old = torch.full((1, 3), -1.0)
    current = torch.full((1, 3), -2.0)
    advantages = torch.tensor([[-1.0, 2.0, -1.0]])
    mask = torch.tensor([[1, 0, 1]])
    kept = off_policy_sequence_mask(current, old, advantages, mask, delta=1.1)
    assert kept.tolist() == [[True, False, True]]


def test_opsm_keeps_sequences_without_advantage():
    old = torch.full((3, 2), -1.0)
    current = torch.full((3, 2), -2.0)
    advantages = torch.tensor([0.0, -0.0, -1e-30])
    kept = off_policy_sequence_mask(current, old, advantages, torch.ones(3, 2), delta=0.1)
    assert kept.tolist() == [True, True, False]


def test_opsm_of_tokens_is_the_same_in_every_layout():
    lengths = [3, 2, 0, 1]
    generator = torch.Generator().manual_seed(4)
    old, current, advantages = torch.randn(3, 6, generator=generator).unbind()
    mask = torch.tensor([1, 1, 0, 1, 1, 1])
    packed = off_policy_sequence_mask(current, old, advantages, mask, delta=0.1, lengths=lengths)
    listed = off_policy_sequence_mask(
        list(current.split(lengths)),
        list(old.split(lengths)),
        list(advantages.split(lengths)),
        list(mask.split(lengths)),
        delta=0.1,
    )
    assert torch.equal(torch.cat(listed), packed)
    assert packed.any()
    assert not packed.all()


# TOPR: mean Δ of −0.5, −0.5, 0.5 and 0.5 at advantages 1, −1, −2 and 0.
TOPR_DELTA = torch.tensor([[-0.2, -0.8], [-0.2, -0.8], [0.9, 0.1], [0.9, 0.1]])
TOPR_ADVANTAGES = torch.tensor([1.0, -1.0, -2.0, 0.0])


@pytest.fixture(scope="module")
def topr():
    return correct(
        RolloutCorrectionConfig.preset("topr"),
        TOPR_DELTA,
        torch.zeros(4, 2),
        torch.ones(4, 2),
        advantages=TOPR_ADVANTAGES[:, None].expand(4, 2),
    )


def test_topr_weights_by_hand(topr):
    """1 at advantages of at least 0, else min(exp(mean Δ), 1)."""
    expected = [1.0, math.exp(-0.5), 1.0, 1.0]
    assert topr.weights[:, 0].tolist() == pytest.approx(expected)
    assert topr.mask.all()


def test_topr_metrics_by_hand(topr):
    expected = {
        "mis_clip_fraction_high": 0.5,
        "mis_clip_fraction_low": 0.25,
        "mis_weight_min": math.exp(-0.5),
        "mis_weight_max": 1.0,
    }
    metrics = topr.statistics.metrics()
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


SIGNED_BOUNDS = {
    "use_tis": True,
    "tis_mode": "clip",
    "tis_lower_bound": 0.7,
    "tis_upper_bound": 1.2,
    "tis_lower_bound_negative": 0.0,
    "tis_upper_bound_negative": 1.05,
}


@pytest.mark.parametrize("advantage", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_results_are_finite_at_non_finite_advantages(level, advantage):
    config = RolloutCorrectionConfig(tis_level=level, **SIGNED_BOUNDS)
    delta = torch.tensor([[0.3, -0.9, 0.1]])
    advantages = torch.full((1, 3), advantage)
    corrected = correct(config, delta, torch.zeros(1, 3), torch.ones(1, 3), advantages=advantages)
    assert corrected.weights.isfinite().all()
    metrics = corrected.statistics.metrics()
    assert all(math.isfinite(value) for value in metrics.values())


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


@pytest.mark.parametrize("name", ["topr", "dppo_tv"], ids=["bounds by sign", "direction away"])
def test_presets_that_read_advantages_require_them(name):
    zeros = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="advantages="):
        correct(RolloutCorrectionConfig.preset(name), zeros, zeros, zeros)
