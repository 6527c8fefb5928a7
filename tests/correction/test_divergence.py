"""Binary divergence masks against the peers' own code, exact fractions and the limits."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.correction.divergence import BINARY_DIVERGENCES, binary_kl, binary_kl_max, binary_tv
from tests.golden.methods import Case, cases


def accepted(case: Case, divergence: str, policy: str, anchor: str, **options: Any) -> Tensor:
    """The mask of `correct`, [B, T] bool."""
    config = RolloutCorrectionConfig(
        divergence_mask=divergence,  # type: ignore[arg-type]
        **{f"divergence_mask_{name}": value for name, value in options.items()},
    )
    inputs = case.input(policy), case.input(anchor), case.input("mask")
    return correct(config, *inputs, advantages=case.input("advantages")).mask


def assert_equal_where_exact(case: Case, ours: Tensor, *, also_inexact: Tensor | None = None) -> None:
    """Compares the decisions that are exact in the peer's arithmetic."""
    theirs = case.output("kept").bool()
    compared = case.input("mask").bool() & ~case.inexact("kept")
    if also_inexact is not None:
        compared &= ~also_inexact
    assert torch.equal(ours[compared], theirs[compared]) and compared.any()


@pytest.mark.parametrize("case", cases("prime_rl.default"))
def test_directional_total_variation_equals_prime_rl(case: Case) -> None:
    high, low = case.params["dppo_mask_high"], case.params["dppo_mask_low"]
    ours = accepted(case, "binary_tv", "logp", "sampler", bound=high, bound_negative=low)
    assert_equal_where_exact(case, ours, also_inexact=case.input("advantages") == 0)


@pytest.mark.parametrize("case", cases("prime_rl.ipo"))
def test_absolute_total_variation_equals_prime_rl(case: Case) -> None:
    assert_equal_where_exact(
        case, accepted(case, "binary_tv", "logp", "sampler", direction="both", bound=case.params["ipo_threshold"])
    )


@pytest.mark.parametrize("kind", ["tv", "kl"])
@pytest.mark.parametrize("method", ["verl.dppo", "skyrl.dppo"])
def test_directional_masks_equal_verl_and_skyrl(method: str, kind: str) -> None:
    entries = cases(f"verl.dppo_{kind}") if method == "verl.dppo" else cases("skyrl.dppo")
    for (case,) in (entry.values for entry in entries):
        options = case.params.get("dppo", {"dppo_type": f"binary_{kind}"})
        if options["dppo_type"] != f"binary_{kind}":
            continue
        bound = case.params.get("clip_ratio")
        high = options.get("delta_high", case.params.get("clip_ratio_high", bound))
        low = options.get("delta_low", case.params.get("clip_ratio_low", bound))
        anchor = case.params.get("anchor", "sampler" if method == "skyrl.dppo" else "old")
        ours = accepted(case, f"binary_{kind}", "logp", anchor, bound=high, bound_negative=low)
        assert_equal_where_exact(case, ours, also_inexact=case.input("advantages") == 0)


@pytest.mark.parametrize("case", cases("areal.rejection_sampling", metric="binary_kl"))
def test_symmetric_kl_equals_areal(case: Case) -> None:
    mask = case.input("mask").bool()
    level = case.params["level"]
    ours = accepted(case, "binary_kl_max", "old", "sampler", direction="both", level=level, bound=case.params["upper"])
    # AReaL drops a token if one policy's float32 log-prob is 0 and the other's is not: an infinite KL or NaN.
    infinite = (case.input("old") == 0) != (case.input("sampler") == 0)
    infinite = infinite.any(1, keepdim=True).expand_as(mask) if level == "sequence" else infinite
    assert_equal_where_exact(case, ours, also_inexact=infinite)


@pytest.mark.parametrize("case", cases("openrlhf.policy_loss", is_correction_gating="binary_kl"))
def test_one_way_kl_equals_openrlhf(case: Case) -> None:
    level = {"token": "token", "seq": "sequence"}[case.params["is_correction_level"]]
    bound = case.params["is_correction_threshold"][1]
    ours = accepted(case, "binary_kl", "old", "sampler", direction="both", level=level, bound=bound)
    assert_equal_where_exact(case, ours)


def exact_kl(p: Fraction, q: Fraction) -> float:
    """KL(p ‖ q) of two coins in 50 digits."""
    with localcontext(prec=50):
        ratio = [
            (Decimal(a.numerator) / a.denominator, Decimal(b.numerator) / b.denominator)
            for a, b in ((p, q), (1 - p, 1 - q))
        ]
        return float(sum(a * (a / b).ln() for a, b in ratio))


@pytest.mark.parametrize("p", [Fraction(1, 10**9), Fraction(1, 3), 1 - Fraction(1, 10**4)], ids=str)
@pytest.mark.parametrize("shift", [Fraction(1, 10**3), Fraction(-1, 10**6)], ids=str)
def test_divergences_equal_exact_arithmetic(p: Fraction, shift: Fraction) -> None:
    q = p * (1 + shift) if p < Fraction(1, 2) else 1 - (1 - p) * (1 + shift)
    log_p, log_q = torch.tensor([math.log(p), math.log(q)], dtype=torch.float64).unbind()
    assert binary_tv(log_p, log_q).item() == pytest.approx(float(abs(p - q)), rel=1e-6)
    assert binary_kl(log_p, log_q).item() == pytest.approx(exact_kl(q, p), rel=1e-3, abs=1e-16)
    assert binary_kl_max(log_p, log_q) == torch.maximum(binary_kl(log_p, log_q), binary_kl(log_q, log_p))


@pytest.mark.parametrize("divergence", BINARY_DIVERGENCES)
@pytest.mark.parametrize("log_prob", [0.0, -1e-9, -0.3, -1e4], ids=str)
def test_equal_policies_have_no_divergence(divergence: str, log_prob: float) -> None:
    log_probs = torch.tensor([log_prob])
    assert BINARY_DIVERGENCES[divergence](log_probs, log_probs).item() == 0.0


def test_a_log_prob_of_zero_has_a_finite_divergence() -> None:
    kl = binary_kl(torch.tensor([0.0]), torch.tensor([-0.3]))
    rest = 1 - math.exp(-0.3)
    assert kl.item() == pytest.approx(-0.3 * math.exp(-0.3) + rest * (math.log(rest) + 25 * math.log(2)), rel=1e-6)


def float32_kl(log_p: Tensor, log_q: Tensor, epsilon: float) -> Tensor:
    """KL(q ‖ p) as published code computes it: float32 probabilities, clamped."""
    p, q = (x.exp().clamp(epsilon, 1 - epsilon) for x in (log_p, log_q))
    return q * (q.log() - p.log()) + (1 - q) * ((1 - q).log() - (1 - p).log())


def test_float32_probabilities_make_certain_tokens_nan() -> None:
    certain = torch.tensor([0.0, -1e-9])
    assert float32_kl(certain, certain, 1e-8).isnan().all()
    assert torch.equal(binary_kl(certain, certain), torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize(("noise", "mean", "negative"), [(3.5e-3, 1.7e-3, 0.07), (3.5e-4, 1.8e-4, 0.35)], ids=str)
def test_float32_probabilities_make_the_divergence_negative(noise: float, mean: float, negative: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(20_000, 64, generator=generator)
    rollout = logits.log_softmax(1)
    token = torch.multinomial(rollout.exp(), 1, generator=generator)
    train = (logits + noise * torch.randn(logits.shape, generator=generator)).log_softmax(1)
    log_p, log_q = (x.gather(1, token).squeeze(1) for x in (train, rollout))
    assert (log_p - log_q).abs().mean().item() == pytest.approx(mean, rel=0.05)
    assert (float32_kl(log_p, log_q, 1e-8) < 0).double().mean().item() == pytest.approx(negative, abs=0.02)
    assert (binary_kl(log_p, log_q) >= 0).all()


def roll_filter(case: Case) -> dict[str, Any] | None:
    """ROLL's filter of one level in our options; None for several filters and the levels with another definition."""
    (first, *more) = case.params["filters"]
    if more or "segment" in (first["agg_type"], case.params["weight_type"]):
        return None
    if first.get("ratio_enabled"):
        return {"use_rs": True, "rs_level": first["agg_type"], "rs_lower_bound": 0.8, "rs_upper_bound": 1.2}
    mask = {"divergence_mask": "binary_tv", "divergence_mask_bound": 0.2, "divergence_mask_direction": "both"}
    return mask if first["agg_type"] == "token" else None


def test_weights_and_filters_equal_roll() -> None:
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
        torch.testing.assert_close(found.weights[kept], case.output("weights")[kept], rtol=1e-6, atol=0)
        compared += 1
    assert compared == 20
