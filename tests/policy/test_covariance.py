"""Clip-Cov and KL-Cov against verl, over splits and ranks, and at the limits."""

import math

import pytest
import torch

from slime_tis.policy.config import CovarianceRule
from slime_tis.policy.covariance import covariance_limit
from slime_tis.policy.losses import clip_cov, kl_cov, ppo_clip
from tests.correction.test_trimming import over_ranks
from tests.golden.methods import cases
from tests.policy.test_losses_2026 import check, policies


@pytest.mark.parametrize("case", cases("verl.kl_cov"))
def test_kl_cov_equals_verl(case):
    log_prob, old, advantage = policies(case)
    options = case.params["policy_loss"]
    limit = covariance_limit(log_prob, advantage, case.input("mask"), CovarianceRule(share=options["kl_cov_ratio"]))
    selected = limit.selects(log_prob.detach(), advantage) & (case.input("mask") > 0)
    if selected.sum() > max(1, int(options["kl_cov_ratio"] * case.input("mask").sum())):
        assert case.batch == "tiny"  # equal covariances, of which verl takes one
        return
    check(case, kl_cov(log_prob, old, advantage, selected, coef=options["ppo_kl_coef"]), log_prob, "token-mean")


@pytest.mark.parametrize("case", cases("verl.clip_cov"))
def test_clip_cov_equals_verl_without_its_draw(case):
    """Where verl draws some of the candidates, as many are selected here."""
    log_prob, old, advantage = policies(case)
    options, mask = case.params["policy_loss"], case.input("mask")
    clips = {"clip_low": case.params["clip_ratio_low"], "clip_high": case.params["clip_ratio_high"]}
    rule = CovarianceRule(share=options["clip_cov_ratio"], lower=options["clip_cov_lb"], upper=options["clip_cov_ub"])
    _, clipped = ppo_clip(log_prob.detach(), old, advantage, **clips)
    limit = covariance_limit(log_prob, advantage, mask, rule)
    selected = limit.selects(log_prob.detach(), advantage) & (mask > 0) & (clipped == 0)
    dropped = (mask > 0) & ~case.output("kept").bool()
    if rule.share < 1:  # clipped tokens, which have no gradient, may be selected here
        assert 0 <= selected.sum() <= dropped.sum() + 1
        return
    assert torch.equal(selected, dropped)
    loss, _ = clip_cov(log_prob, old, advantage, selected, **clips)
    check(case, loss, log_prob, "token-mean")


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(400, generator=generator) > 0.2).float()
    return -torch.rand(400, generator=generator) * 5, torch.randn(400, generator=generator), mask


@pytest.mark.parametrize(
    "rule", [CovarianceRule(share=0.05), CovarianceRule(share=0.04, lower=0.5, upper=2.0)], ids=str
)
def test_the_largest_covariances_are_selected_for_every_split_over_ranks(rule):
    log_probs, advantages, mask = batch()
    a, log_p = (x[mask > 0].double() for x in (advantages, log_probs))
    c = (a - a.mean()) * (log_p - log_p.mean())
    inside = c[(c > rule.lower) & (c < rule.upper)].sort(descending=True).values
    expected = inside[: int(rule.share * len(c))].tolist()
    limit = covariance_limit(log_probs, advantages, mask, rule)
    selected = limit.selects(log_probs, advantages) & (mask > 0)
    found = limit.candidates(log_probs, advantages)[selected].sort(descending=True).values
    assert found.tolist() == pytest.approx(expected) and len(expected) > 10
    parts = [torch.arange(start, 400, 3) for start in range(3)]

    def count_of(part, ranks):
        rank_limit = covariance_limit(log_probs[part], advantages[part], mask[part], rule, ranks)
        return (rank_limit.selects(log_probs[part], advantages[part]) & (mask[part] > 0)).sum()

    assert sum(over_ranks(parts, count_of)) == len(expected)


@pytest.mark.parametrize("mask", [0.0, 1.0], ids=["no token", "tokens without log-probs"])
def test_nothing_is_selected_without_usable_tokens(mask):
    log_probs = torch.full((5,), math.nan)
    limit = covariance_limit(log_probs, torch.ones(5), torch.full((5,), mask), CovarianceRule(share=0.5))
    assert not limit.selects(log_probs, torch.ones(5)).any()
