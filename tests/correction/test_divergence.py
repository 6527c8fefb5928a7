"""Binary divergence masks against the peers' own code, exact fractions and the limits."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import pytest
import torch

from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.correction.divergence import BINARY_DIVERGENCES, binary_kl, binary_kl_max, binary_tv
from tests.golden.methods import Case, cases


@dataclass(frozen=True)
class MaskOfPeer:
    """A recorded mask of another library, and the options that ask for it here."""

    case: Case
    divergence: str
    policy: str
    """The input that is compared: `logp` (current policy) or `old`."""
    anchor: str
    """The input that it is compared with: `old` or `sampler`."""
    options: dict[str, Any]
    inexact: Callable[[Case], torch.Tensor]
    """Tokens [B, T] that the library decides by its rounding or by another convention."""


def masks_of_peers() -> Iterator[Any]:
    """Parameters of every recorded mask."""
    for entry in cases("prime_rl.default"):
        (case,) = entry.values
        bounds = {
            "bound": case.params["dppo_mask_high"],
            "bound_negative": case.params["dppo_mask_low"],
        }
        mask = MaskOfPeer(case, "binary_tv", "logp", "sampler", bounds, no_advantage)
        yield pytest.param(mask, id=entry.id)
    for entry in cases("prime_rl.ipo"):
        (case,) = entry.values
        options = {"direction": "both", "bound": case.params["ipo_threshold"]}
        mask = MaskOfPeer(case, "binary_tv", "logp", "sampler", options, exact)
        yield pytest.param(mask, id=entry.id)
    for entry in [*cases("verl.dppo_tv"), *cases("verl.dppo_kl"), *cases("skyrl.dppo")]:
        (case,) = entry.values
        # verl's entries are named verl.dppo_KIND-…
        of_verl = {"dppo_type": f"binary_{entry.id[10:12]}"}
        peer = case.params.get("dppo", of_verl)
        bound = case.params.get("clip_ratio")
        high = peer.get("delta_high", case.params.get("clip_ratio_high", bound))
        low = peer.get("delta_low", case.params.get("clip_ratio_low", bound))
        anchor = case.params.get("anchor", "sampler" if "dppo" in case.params else "old")
        bounds = {"bound": high, "bound_negative": low}
        mask = MaskOfPeer(case, peer["dppo_type"], "logp", anchor, bounds, no_advantage)
        yield pytest.param(mask, id=entry.id)
    for entry in cases("areal.rejection_sampling", metric="binary_kl"):
        (case,) = entry.values
        options = {
            "direction": "both",
            "level": case.params["level"],
            "bound": case.params["upper"],
        }
        mask = MaskOfPeer(case, "binary_kl_max", "old", "sampler", options, infinite_in_areal)
        yield pytest.param(mask, id=entry.id)
    for entry in cases("openrlhf.policy_loss", is_correction_gating="binary_kl"):
        (case,) = entry.values
        level = {"token": "token", "seq": "sequence"}[case.params["is_correction_level"]]
        options = {
            "direction": "both",
            "level": level,
            "bound": case.params["is_correction_threshold"][1],
        }
        mask = MaskOfPeer(case, "binary_kl", "old", "sampler", options, exact)
        yield pytest.param(mask, id=entry.id)


def exact(case: Case) -> torch.Tensor:
    return torch.zeros_like(case.input("mask")).bool()


def no_advantage(case: Case) -> torch.Tensor:
    return case.input("advantages") == 0


def infinite_in_areal(case: Case) -> torch.Tensor:
    """Tokens that AReaL drops for an infinite or missing KL.

    That is its result if one policy's float32 log-prob is 0 and the other's is not.
    """
    infinite = (case.input("old") == 0) != (case.input("sampler") == 0)
    if case.params["level"] == "sequence":
        return infinite.any(1, keepdim=True).expand_as(infinite)
    return infinite


@pytest.mark.parametrize("peer", masks_of_peers())
def test_masks_equal_the_peers_where_they_are_exact(peer):
    case = peer.case
    options = {f"divergence_mask_{name}": value for name, value in peer.options.items()}
    config = RolloutCorrectionConfig(divergence_mask=peer.divergence, **options)
    mask = case.input("mask")
    corrected = correct(
        config,
        case.input(peer.policy),
        case.input(peer.anchor),
        mask,
        advantages=case.input("advantages"),
    )
    compared = mask.bool() & ~case.inexact("kept") & ~peer.inexact(case)
    assert compared.any()
    assert torch.equal(corrected.mask[compared], case.output("kept").bool()[compared])


def exact_kl(p: Fraction, q: Fraction) -> float:
    """KL(p ‖ q) of two coins in 50 digits."""
    total = Decimal(0)
    with localcontext(prec=50):
        for a, b in ((p, q), (1 - p, 1 - q)):
            probability = Decimal(a.numerator) / a.denominator
            other = Decimal(b.numerator) / b.denominator
            total += probability * (probability / other).ln()
    return float(total)


@pytest.mark.parametrize("p", [Fraction(1, 10**9), Fraction(1, 3), 1 - Fraction(1, 10**4)], ids=str)
@pytest.mark.parametrize("shift", [Fraction(1, 10**3), Fraction(-1, 10**6)], ids=str)
def test_divergences_equal_exact_arithmetic(p, shift):
    q = p * (1 + shift)
    if p > Fraction(1, 2):  # the complement is the small number
        q = 1 - (1 - p) * (1 + shift)
    log_p = torch.tensor(math.log(p), dtype=torch.float64)
    log_q = torch.tensor(math.log(q), dtype=torch.float64)
    assert binary_tv(log_p, log_q).item() == pytest.approx(float(abs(p - q)), rel=1e-6)
    kl = binary_kl(log_p, log_q)
    assert kl.item() == pytest.approx(exact_kl(q, p), rel=1e-3, abs=1e-16)
    reverse = binary_kl(log_q, log_p)
    assert binary_kl_max(log_p, log_q) == torch.maximum(kl, reverse)


@pytest.mark.parametrize("divergence", BINARY_DIVERGENCES)
@pytest.mark.parametrize("log_prob", [0.0, -1e-9, -0.3, -100.0, -9999.0, -1e6], ids=str)
def test_equal_policies_have_no_divergence(divergence, log_prob):
    log_probs = torch.tensor([log_prob])
    assert BINARY_DIVERGENCES[divergence](log_probs, log_probs).item() == 0.0


def test_a_certain_token_has_a_finite_kl():
    kl = binary_kl(torch.tensor([0.0]), torch.tensor([-0.3]))
    # KL(q ‖ p) with q = e^−0.3 and 1 − p = 2^−25
    q = math.exp(-0.3)
    expected = -0.3 * q + (1 - q) * (math.log(1 - q) + 25 * math.log(2))
    assert kl.item() == pytest.approx(expected, rel=1e-6)


def test_float32_probabilities_have_no_kl_of_certain_tokens():
    """1 − 1e-8 is 1 in float32, so a clamp at 1e-8 leaves log(0)."""
    certain = torch.tensor([0.0, -1e-9])
    assert float32_kl(certain, certain, 1e-8).isnan().all()


def float32_kl(log_p: torch.Tensor, log_q: torch.Tensor, epsilon: float) -> torch.Tensor:
    """KL(q ‖ p) as published code computes it: float32 probabilities, clamped."""
    p = log_p.exp().clamp(epsilon, 1 - epsilon)
    q = log_q.exp().clamp(epsilon, 1 - epsilon)
    return q * (q.log() - p.log()) + (1 - q) * ((1 - q).log() - (1 - p).log())


@pytest.mark.parametrize(
    ("noise", "mean", "negative"),
    [(3.5e-3, 1.7e-3, 0.07), (3.5e-4, 1.8e-4, 0.35)],
    ids=["larger noise", "smaller noise"],
)
def test_float32_probabilities_make_the_divergence_negative(noise, mean, negative):
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(20_000, 64, generator=generator)
    rollout = logits.log_softmax(1)
    token = torch.multinomial(rollout.exp(), 1, generator=generator)
    train = (logits + noise * torch.randn(logits.shape, generator=generator)).log_softmax(1)
    log_p = train.gather(1, token).squeeze(1)
    log_q = rollout.gather(1, token).squeeze(1)
    assert (log_p - log_q).abs().mean().item() == pytest.approx(mean, rel=0.05)
    negative_fraction = (float32_kl(log_p, log_q, 1e-8) < 0).double().mean().item()
    assert negative_fraction == pytest.approx(negative, abs=0.02)
    assert (binary_kl(log_p, log_q) >= 0).all()


def test_direction_away_accepts_tokens_without_an_advantage():
    config = RolloutCorrectionConfig(divergence_mask="binary_tv", divergence_mask_bound=0.1)
    policy = torch.tensor([[-0.1, -0.1, -3.0]])
    anchor = torch.tensor([[-3.0, -3.0, -0.1]])
    advantages = torch.tensor([[1.0, 0.0, 0.0]])
    corrected = correct(config, policy, anchor, torch.ones(1, 3), advantages=advantages)
    assert corrected.mask.tolist() == [[False, True, True]]


def roll_options(case: Case) -> dict[str, Any] | None:
    """Our options for a filter of ROLL.

    None for several filters and for levels that ROLL defines differently.
    """
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
    if first["agg_type"] != "token":
        return None
    return {
        "divergence_mask": "binary_tv",
        "divergence_mask_bound": 0.2,
        "divergence_mask_direction": "both",
    }


ROLL = [
    entry
    for entry in cases("roll.train_infer_correction")
    if roll_options(*entry.values) is not None
]


@pytest.mark.parametrize("case", ROLL)
def test_corrections_equal_roll(case):
    config = RolloutCorrectionConfig(
        use_tis=True,
        tis_level=case.params["weight_type"],
        tis_upper_bound=case.params["upper_bound"] or math.inf,
        **roll_options(case),
    )
    old = case.input("old")
    mask = case.input("mask").bool()
    corrected = correct(config, old, case.input("sampler"), mask, current_log_probs=old)
    kept = case.output("kept").bool() & mask
    assert torch.equal(corrected.mask, kept)
    weights = case.output("weights")
    torch.testing.assert_close(corrected.weights[kept], weights[kept], rtol=1e-6, atol=0)


def test_twenty_cases_of_roll_are_compared():
    assert len(ROLL) == 20
