"""Signs of wrong log-probs: sums over a batch, and the metrics made of them."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime_tis.token_signs import TokenSums, WeightProbe, sign_metrics, token_sums

SAMPLES = 8
LENGTH = 12


def log_probs(seed: int = 0) -> Tensor:
    """Log-probs [8, 12] of both signs of surprise."""
    generator = torch.Generator().manual_seed(seed)
    return -3 * torch.rand(SAMPLES, LENGTH, generator=generator) - 0.05


TRAIN = log_probs()
MASK = torch.ones(SAMPLES, LENGTH)


def signs(rollout: Tensor, train: Tensor = TRAIN, mask: Tensor = MASK) -> dict[str, float]:
    return sign_metrics(token_sums(train, rollout, mask))


def named_sums(rollout: Tensor) -> TokenSums:
    return TokenSums(*token_sums(TRAIN, rollout, MASK))


def test_equal_log_probs_show_nothing():
    metrics = signs(TRAIN.clone())
    assert metrics["rest_abs_diff"] == pytest.approx(0, abs=1e-12)
    assert metrics["placeholder_fraction"] == 0
    assert metrics["log_prob_dependence"] == 0
    assert metrics["shifted_sample_fraction"] == 0


def test_sums_of_a_batch_by_hand():
    train = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
    rollout = torch.tensor([[-1.5, 0.0], [-0.5, -1.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    sums = TokenSums(*token_sums(train, rollout, mask).tolist())
    assert (sums.tokens, sums.samples, sums.zeros) == (3, 2, 1)
    assert sums.size == pytest.approx(2.5)
    assert sums.zero_size == pytest.approx(2.0)
    assert sums.ratio == pytest.approx(math.exp(0.5) - 1 + math.exp(-2) - 1)


def test_a_placeholder_is_a_log_prob_of_zero():
    rollout = TRAIN.clone()
    rollout[:, -1] = 0.0
    metrics = signs(rollout)
    assert metrics["placeholder_fraction"] == pytest.approx(1 / LENGTH)
    assert metrics["placeholder_size"] == pytest.approx(-TRAIN[:, -1].mean().item(), rel=1e-6)
    assert metrics["rest_abs_diff"] == pytest.approx(0, abs=1e-12)


def shifted(rollout: Tensor) -> Tensor:
    return torch.cat([rollout[:, 1:], rollout[:, -1:]], 1)


SHIFTS = {
    "the next token's": (shifted(TRAIN), 1.0),
    "the previous token's": (torch.cat([TRAIN[:, :1], TRAIN[:, :-1]], 1), 1.0),
    "the next sample's": (TRAIN.roll(-1, 0), 1.0),
    "the next token's in two samples": (torch.cat([shifted(TRAIN[:2]), TRAIN[2:]]), 0.25),
    "none": (TRAIN + 0.3 * log_probs(1), 0.0),
}
"""Reported log-probs, and the share of shifted samples."""


@pytest.mark.parametrize(("rollout", "share"), SHIFTS.values(), ids=SHIFTS)
def test_shifted_samples_are_counted(rollout, share):
    assert signs(rollout)["shifted_sample_fraction"] == share


def test_short_samples_show_no_shift():
    mask = MASK.clone()
    mask[:, 4:] = 0
    assert "shifted_sample_fraction" not in signs(shifted(TRAIN), mask=mask)


def test_a_clamp_makes_equal_smallest_log_probs():
    metrics = signs(TRAIN.clamp(min=-1.5))
    assert metrics["bounded_tokens"] == (TRAIN < -1.52).sum().item()
    assert metrics["bounded_spread"] > 0.3


def skewed_parts(bound: float = -math.inf) -> Tensor:
    """Sums of 16 ranks whose engine has bf16 noise and reports no log-prob below the bound."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(len(TokenSums._fields), dtype=torch.float64)
    for _ in range(16):
        rollout = -4 * torch.rand(4, 50, generator=generator).square()
        noise = 0.05 * torch.randn(rollout.shape, generator=generator)
        total += token_sums(rollout + noise, rollout.clamp(min=bound), torch.ones(4, 50))
    return total


def test_smallest_log_probs_of_many_ranks_are_no_bound():
    assert sign_metrics(skewed_parts())["bounded_tokens"] == 0


def test_a_bound_on_all_ranks_is_counted():
    metrics = sign_metrics(skewed_parts(bound=-3.0))
    assert metrics["bounded_tokens"] > 100
    assert metrics["bounded_spread"] > 0.2


def test_equal_tokens_of_two_ranks_have_no_spread():
    parts = []
    for lowest in (-5.0, -8.0):
        rollout = torch.tensor([[-1.0, lowest], [-1.0, lowest]])
        parts.append(token_sums(rollout - 0.1, rollout, torch.ones(2, 2)))
    metrics = sign_metrics(parts[0] + parts[1])
    assert metrics["bounded_tokens"] == 4
    assert metrics["bounded_spread"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("factor", [0.5, 0.99, 1.5])
def test_a_factor_is_an_exact_dependence(factor):
    dependence = signs(factor * TRAIN)["log_prob_dependence"]
    assert abs(dependence) == pytest.approx(1, abs=1e-6)


def test_noise_of_one_engine_is_no_dependence():
    noise = torch.randn(SAMPLES, LENGTH, generator=torch.Generator().manual_seed(1))
    assert abs(signs(TRAIN + 0.3 * noise)["log_prob_dependence"]) < 0.35


def test_mass_that_sampling_removed_makes_one_sign():
    metrics = signs(TRAIN + 0.2)
    assert metrics["rest_positive_share"] == 0
    assert metrics["rest_abs_diff"] == pytest.approx(0.2)
    assert metrics["rest_large_share"] == 0


def test_log_probs_above_zero_are_counted():
    assert signs(-TRAIN)["above_zero_fraction"] == 1


def test_two_samples_with_the_mismatch_are_its_concentration():
    rollout = TRAIN.repeat(2, 1)
    rollout[[3, 11]] -= 1.0
    metrics = signs(rollout, TRAIN.repeat(2, 1), MASK.repeat(2, 1))
    assert metrics["largest_samples_share"] == pytest.approx(1, abs=1e-6)


def test_single_samples_are_all_of_their_micro_batches():
    rollout = TRAIN - 0.1
    parts = [token_sums(TRAIN[i : i + 1], rollout[i : i + 1], MASK[:1]) for i in range(SAMPLES)]
    assert signs(rollout)["largest_samples_fraction"] == 1 / SAMPLES
    assert sign_metrics(torch.stack(parts).sum(0))["largest_samples_fraction"] == 1


def test_ages_split_the_mismatch():
    rollout = TRAIN.clone()
    rollout[0] -= 0.5
    age = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    age[0] = 3
    age[1] = -1
    metrics = sign_metrics(token_sums(TRAIN, rollout, MASK, age_BT=age))
    assert metrics["weight_staleness"] == pytest.approx(3 / 7)
    assert metrics["stale_age"] == 3
    assert metrics["mismatch_k3_kl_stale"] == pytest.approx(math.exp(0.5) - 1.5, rel=1e-5)
    assert metrics["mismatch_k3_kl_fresh"] == pytest.approx(0, abs=1e-12)


def test_the_documentation_defines_every_sign():
    age = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    age[0] = 1
    weights = (torch.tensor(2), torch.tensor(1))
    metrics = sign_metrics(token_sums(TRAIN, TRAIN, MASK, age_BT=age, weights=weights))
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
    missing = [name for name in metrics if f"`{name}`" not in page]
    # The correction's own metric, on the page of metrics.
    assert missing == ["nonfinite_token_fraction"]


EXTREMES = {
    "minus infinity": -math.inf,
    "NaN": math.nan,
    "an engine's -9999": -9999.0,
    "-1e6": -1e6,
    "100 nats": -100.0,
    "0": 0.0,
}


@pytest.mark.parametrize("value", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("side", ["train", "rollout"])
def test_metrics_of_extreme_log_probs_are_finite(value, side):
    train = TRAIN.clone()
    rollout = TRAIN.clone()
    changed = {"train": train, "rollout": rollout}[side]
    changed[0, :3] = value
    assert all(map(math.isfinite, signs(rollout, train).values()))


def test_a_masked_batch_has_no_metrics():
    assert signs(TRAIN, mask=torch.zeros_like(MASK)) == {}


@pytest.mark.parametrize("shape", [(0, LENGTH), (SAMPLES, 0)], ids=["no sample", "no token"])
def test_an_empty_batch_has_no_metrics(shape):
    empty = torch.zeros(shape)
    assert signs(empty, empty, empty) == {}


def test_masked_values_have_no_effect():
    mask = MASK.clone()
    mask[:, -2:] = 0
    rollout = TRAIN.clone()
    rollout[:, -2:] = math.nan
    assert signs(rollout, mask=mask) == signs(TRAIN, mask=mask)


def test_sums_of_two_parts_are_those_of_the_batch():
    rollout = TRAIN + 0.1
    parts = [token_sums(TRAIN[i : i + 4], rollout[i : i + 4], MASK[:4]) for i in (0, 4)]
    whole = named_sums(rollout)
    both = TokenSums(*(parts[0] + parts[1]))
    assert both.size == pytest.approx(whole.size.item())
    assert both.tokens == whole.tokens


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Linear(100, 60)


def test_the_first_call_of_a_probe_compares_nothing(model):
    assert WeightProbe().compare(model) is None


def test_a_probe_counts_changed_weights(model):
    probe = WeightProbe(per_tensor=6000)
    probe.compare(model)
    with torch.no_grad():
        model.weight[:30] += 1
    probed, changed = probe.compare(model) or (None, None)
    assert (probed, changed) == (3000, 1500)


def test_a_probe_compares_no_frozen_weights(model):
    model.requires_grad_(False)
    probe = WeightProbe()
    probe.compare(model)
    assert probe.compare(model) is None
