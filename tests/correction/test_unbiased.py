"""Unbiasedness by enumeration: vocabulary 3, length 3, all 27 sequences.

With E over the rollout policy taken exactly, the sequence-level untruncated estimator is the
on-policy policy gradient; the others differ from it by their closed-form bias.
"""

import itertools
from typing import Any

import pytest
import torch

from slime_tis import RolloutCorrectionConfig, correct

VOCABULARY = 3
LENGTH = 3
SEQUENCES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
UNBOUNDED = {
    "use_tis": True,
    "tis_upper_bound": 1e9,
    "policy_loss": "reinforce",
    "use_rollout_logprobs": True,
}


def random_logits(seed: int) -> torch.Tensor:
    """Logits of a policy with memory: [position, previous token (3 = start), token]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LENGTH, VOCABULARY + 1, VOCABULARY, generator=generator, dtype=torch.float64)


def log_probs(logits: torch.Tensor) -> torch.Tensor:
    """log π of each token of each of the 27 sequences, [27, 3]."""
    previous = torch.cat([torch.full((27, 1), VOCABULARY), SEQUENCES[:, :-1]], 1)
    return logits.log_softmax(-1)[torch.arange(LENGTH), previous, SEQUENCES]


REWARD = torch.randn(27, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
THETA = random_logits(1)
ROLLOUT = log_probs(THETA + 0.4 * random_logits(2))
RATIO = (log_probs(THETA) - ROLLOUT).exp()
"""ρ of each token."""

WHOLE_RATIO = RATIO.prod(1, keepdim=True)
"""Πρ of each sequence."""


def estimate(weights: torch.Tensor) -> torch.Tensor:
    """E_rollout[Σ_t w_t·R·∇log π_θ(t)], exactly, by the loss −w·R·log π_θ."""
    theta = THETA.clone().requires_grad_()
    probability = ROLLOUT.sum(1, keepdim=True).exp()
    terms = probability * weights.double() * REWARD[:, None] * log_probs(theta)
    return torch.autograd.grad(terms.sum(), theta)[0]


def on_policy_gradient() -> torch.Tensor:
    """∇E_θ[R]."""
    theta = THETA.clone().requires_grad_()
    probability = log_probs(theta).sum(1).exp()
    return torch.autograd.grad((probability * REWARD).sum(), theta)[0]


def weights_of(**options: Any) -> torch.Tensor:
    """Weights [27, 3] of the correction, 0 if a token is rejected."""
    config = RolloutCorrectionConfig(**{**UNBOUNDED, **options})
    corrected = correct(config, log_probs(THETA), ROLLOUT, torch.ones(27, 3, dtype=torch.bool))
    return corrected.weights * corrected.mask


def bias(closed_form_weights: torch.Tensor) -> torch.Tensor:
    """Closed form: E_rollout[Σ_t (w_t − Πρ)·R·∇log π_θ(t)]."""
    return estimate(closed_form_weights - WHOLE_RATIO)


def test_the_sequence_level_is_unbiased():
    weights = weights_of(tis_level="sequence")
    torch.testing.assert_close(estimate(weights), on_policy_gradient(), rtol=0, atol=1e-6)


def test_the_prefix_level_is_unbiased_for_rewards_of_tokens():
    # If each token earns its own reward, Π_{s≤t} ρ_s suffices for the reward of token t.
    generator = torch.Generator().manual_seed(9)
    token_reward = torch.randn(LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)
    earned = token_reward[torch.arange(LENGTH), SEQUENCES]
    weights = weights_of(tis_level="prefix").double()
    off_policy = (ROLLOUT.sum(1, keepdim=True).exp() * weights * earned).sum()
    on_policy = (log_probs(THETA).sum(1, keepdim=True).exp() * earned).sum()
    assert off_policy.item() == pytest.approx(on_policy.item(), abs=1e-6)


# options of the correction, and their weights as a formula of ρ
BIASED = {
    "token": ({"tis_level": "token"}, RATIO),
    "geometric": (
        {"tis_level": "geometric"},
        RATIO.log().mean(1, keepdim=True).exp().expand(27, 3),
    ),
    "prefix": ({"tis_level": "prefix"}, RATIO.cumprod(1)),
    "truncated token": (
        {"tis_level": "token", "tis_upper_bound": 1.2},
        RATIO.clamp(max=1.2),
    ),
    "truncated sequence": (
        {"tis_level": "sequence", "tis_upper_bound": 1.2},
        WHOLE_RATIO.clamp(max=1.2).expand(27, 3),
    ),
    "masked token": (
        {
            "tis_level": "token",
            "tis_mode": "mask",
            "tis_lower_bound": 0.8,
            "tis_upper_bound": 1.3,
        },
        torch.where((RATIO >= 0.8) & (RATIO <= 1.3), RATIO, 0.0),
    ),
    "rejected sequence": (
        {
            "tis_level": "sequence",
            "use_rs": True,
            "rs_level": "sequence",
            "rs_lower_bound": 0.5,
            "rs_upper_bound": 2.0,
        },
        torch.where((WHOLE_RATIO >= 0.5) & (WHOLE_RATIO <= 2.0), WHOLE_RATIO, 0.0).expand(27, 3),
    ),
}


@pytest.mark.parametrize(("options", "closed_form"), BIASED.values(), ids=BIASED)
def test_the_bias_is_its_closed_form(options, closed_form):
    difference = estimate(weights_of(**options)) - on_policy_gradient()
    torch.testing.assert_close(difference, bias(closed_form), rtol=0, atol=1e-6)
    assert difference.abs().max() > 1e-3
