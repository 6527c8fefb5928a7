"""Binary divergence masks against the peers' own code, exact fractions and the limits."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
import torch

from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.correction.divergence import BINARY_DIVERGENCES, binary_kl, binary_kl_max, binary_tv
from tests.golden.methods import cases


def masks_of_peers():
    """(case, divergence, current policy and anchor, options, where the peer's arithmetic is not
    exact) of each peer."""
    for entry in cases("prime_rl.default"):
        (case,) = entry.values
        bounds = {
            "bound": case.params["dppo_mask_high"],
            "bound_negative": case.params["dppo_mask_low"],
        }
        yield pytest.param(
            case, "binary_tv", ("logp", "sampler"), bounds, no_advantage, id=entry.id
        )
    for entry in cases("prime_rl.ipo"):
        (case,) = entry.values
        options = {"direction": "both", "bound": case.params["ipo_threshold"]}
        yield pytest.param(case, "binary_tv", ("logp", "sampler"), options, exact, id=entry.id)
    for entry in [*cases("verl.dppo_tv"), *cases("verl.dppo_kl"), *cases("skyrl.dppo")]:
        (case,) = entry.values
        peer = case.params.get(
            "dppo", {"dppo_type": f"binary_{entry.id[10:12]}"}
        )  # verl.dppo_KIND-…
        bound = case.params.get("clip_ratio")
        high = peer.get("delta_high", case.params.get("clip_ratio_high", bound))
        low = peer.get("delta_low", case.params.get("clip_ratio_low", bound))
        anchor = case.params.get("anchor", "sampler" if "dppo" in case.params else "old")
        bounds = {"bound": high, "bound_negative": low}
        yield pytest.param(
            case, peer["dppo_type"], ("logp", anchor), bounds, no_advantage, id=entry.id
        )
    for entry in cases("areal.rejection_sampling", metric="binary_kl"):
        (case,) = entry.values
        options = {
            "direction": "both",
            "level": case.params["level"],
            "bound": case.params["upper"],
        }
        yield pytest.param(
            case, "binary_kl_max", ("old", "sampler"), options, infinite_in_areal, id=entry.id
        )
    for entry in cases("openrlhf.policy_loss", is_correction_gating="binary_kl"):
        (case,) = entry.values
        level = {"token": "token", "seq": "sequence"}[case.params["is_correction_level"]]
        options = {
            "direction": "both",
            "level": level,
            "bound": case.params["is_correction_threshold"][1],
        }
        yield pytest.param(case, "binary_kl", ("old", "sampler"), options, exact, id=entry.id)


def exact(case):
    return torch.zeros_like(case.input("mask")).bool()


def no_advantage(case):
    return case.input("advantages") == 0


def infinite_in_areal(case):
    """AReaL drops a token if one policy's float32 log-prob is 0 and the other's is not: an infinite
    KL or NaN."""
    infinite = (case.input("old") == 0) != (case.input("sampler") == 0)
    return (
        infinite.any(1, keepdim=True).expand_as(infinite)
        if case.params["level"] == "sequence"
        else infinite
    )


@pytest.mark.parametrize(("case", "divergence", "policies", "options", "inexact"), masks_of_peers())
def test_masks_equal_the_peers_where_they_are_exact(case, divergence, policies, options, inexact):
    options = {f"divergence_mask_{name}": value for name, value in options.items()}
    config = RolloutCorrectionConfig(divergence_mask=divergence, **options)
    policy, anchor = map(case.input, policies)
    ours = correct(
        config, policy, anchor, case.input("mask"), advantages=case.input("advantages")
    ).mask
    compared = case.input("mask").bool() & ~case.inexact("kept") & ~inexact(case)
    assert torch.equal(ours[compared], case.output("kept").bool()[compared]) and compared.any()


def exact_kl(p, q):
    """KL(p ‖ q) of two coins in 50 digits."""
    with localcontext(prec=50):
        ratio = [
            (Decimal(a.numerator) / a.denominator, Decimal(b.numerator) / b.denominator)
            for a, b in ((p, q), (1 - p, 1 - q))
        ]
        return float(sum(a * (a / b).ln() for a, b in ratio))


@pytest.mark.parametrize("p", [Fraction(1, 10**9), Fraction(1, 3), 1 - Fraction(1, 10**4)], ids=str)
@pytest.mark.parametrize("shift", [Fraction(1, 10**3), Fraction(-1, 10**6)], ids=str)
def test_divergences_equal_exact_arithmetic(p, shift):
    q = p * (1 + shift) if p < Fraction(1, 2) else 1 - (1 - p) * (1 + shift)
    log_p, log_q = torch.tensor([math.log(p), math.log(q)], dtype=torch.float64).unbind()
    assert binary_tv(log_p, log_q).item() == pytest.approx(float(abs(p - q)), rel=1e-6)
    assert binary_kl(log_p, log_q).item() == pytest.approx(exact_kl(q, p), rel=1e-3, abs=1e-16)
    assert binary_kl_max(log_p, log_q) == torch.maximum(
        binary_kl(log_p, log_q), binary_kl(log_q, log_p)
    )


@pytest.mark.parametrize("divergence", BINARY_DIVERGENCES)
@pytest.mark.parametrize("log_prob", [0.0, -1e-9, -0.3, -1e4], ids=str)
def test_equal_policies_have_no_divergence(divergence, log_prob):
    log_probs = torch.tensor([log_prob])
    assert BINARY_DIVERGENCES[divergence](log_probs, log_probs).item() == 0.0


def test_certain_tokens_have_a_finite_divergence_and_none_in_float32_probabilities():
    kl = binary_kl(torch.tensor([0.0]), torch.tensor([-0.3]))
    rest = 1 - math.exp(-0.3)
    assert kl.item() == pytest.approx(
        -0.3 * math.exp(-0.3) + rest * (math.log(rest) + 25 * math.log(2)), rel=1e-6
    )
    certain = torch.tensor([0.0, -1e-9])
    assert float32_kl(certain, certain, 1e-8).isnan().all()
    assert torch.equal(binary_kl(certain, certain), torch.zeros(2, dtype=torch.float64))


def float32_kl(log_p, log_q, epsilon):
    """KL(q ‖ p) as published code computes it: float32 probabilities, clamped."""
    p, q = (x.exp().clamp(epsilon, 1 - epsilon) for x in (log_p, log_q))
    return q * (q.log() - p.log()) + (1 - q) * ((1 - q).log() - (1 - p).log())


@pytest.mark.parametrize(
    ("noise", "mean", "negative"), [(3.5e-3, 1.7e-3, 0.07), (3.5e-4, 1.8e-4, 0.35)], ids=str
)
def test_float32_probabilities_make_the_divergence_negative(noise, mean, negative):
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(20_000, 64, generator=generator)
    rollout = logits.log_softmax(1)
    token = torch.multinomial(rollout.exp(), 1, generator=generator)
    train = (logits + noise * torch.randn(logits.shape, generator=generator)).log_softmax(1)
    log_p, log_q = (x.gather(1, token).squeeze(1) for x in (train, rollout))
    assert (log_p - log_q).abs().mean().item() == pytest.approx(mean, rel=0.05)
    assert (float32_kl(log_p, log_q, 1e-8) < 0).double().mean().item() == pytest.approx(
        negative, abs=0.02
    )
    assert (binary_kl(log_p, log_q) >= 0).all()


def test_direction_away_accepts_tokens_without_an_advantage():
    config = RolloutCorrectionConfig(divergence_mask="binary_tv", divergence_mask_bound=0.1)
    policy, anchor = torch.tensor([[-0.1, -0.1, -3.0]]), torch.tensor([[-3.0, -3.0, -0.1]])
    advantages = torch.tensor([[1.0, 0.0, 0.0]])
    assert correct(
        config, policy, anchor, torch.ones(1, 3), advantages=advantages
    ).mask.tolist() == [[False, True, True]]


def roll_filter(case):
    """ROLL's filter of one level in our options; None for several filters and the levels with
    another definition."""
    first, *more = case.params["filters"]
    if more or "segment" in (first["agg_type"], case.params["weight_type"]):
        return None
    if first.get("ratio_enabled"):
        return {
            "use_rs": True,
            "rs_level": first["agg_type"],
            "rs_lower_bound": 0.8,
            "rs_upper_bound": 1.2,
        }
    mask = {
        "divergence_mask": "binary_tv",
        "divergence_mask_bound": 0.2,
        "divergence_mask_direction": "both",
    }
    return mask if first["agg_type"] == "token" else None


def test_weights_and_filters_equal_roll():
    compared = 0
    for (case,) in (entry.values for entry in cases("roll.train_infer_correction")):
        options = roll_filter(case)
        if options is None:
            continue
        upper = case.params["upper_bound"] or math.inf
        config = RolloutCorrectionConfig(
            use_tis=True, tis_level=case.params["weight_type"], tis_upper_bound=upper, **options
        )
        old, mask = case.input("old"), case.input("mask").bool()
        found = correct(config, old, case.input("sampler"), mask, current_log_probs=old)
        kept = case.output("kept").bool() & mask
        assert torch.equal(found.mask, kept)
        torch.testing.assert_close(
            found.weights[kept], case.output("weights")[kept], rtol=1e-6, atol=0
        )
        compared += 1
    assert compared == 20
