"""Drawing tokens: hand-computed distributions, and draws that follow them."""

import math

import pytest
import torch

from slime_tis.trainer.engines.local import token_sampling
from slime_tis.trainer.engines.local.token_sampling import (
    filtered_logits,
    inverse_cdf,
    log_softmax,
    prompt_uniforms,
    sample_tokens,
)

PROBS = [0.4, 0.3, 0.15, 0.1, 0.05]
LOGITS = torch.tensor([PROBS]).log() + 3.0  # logits are known up to a constant
OUT = 0.0


FILTERED = {
    "plain": (1.0, 1.0, -1, PROBS),
    "top-k of all": (1.0, 1.0, 9, PROBS),
    "temperature": (
        0.5,
        1.0,
        -1,
        [0.16 / 0.285, 0.09 / 0.285, 0.0225 / 0.285, 0.01 / 0.285, 0.0025 / 0.285],
    ),
    "top-k": (1.0, 1.0, 2, [4 / 7, 3 / 7, OUT, OUT, OUT]),
    "top-p that a token reaches": (1.0, 0.65, -1, [4 / 7, 3 / 7, OUT, OUT, OUT]),
    "top-p within a token": (1.0, 0.75, -1, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, OUT, OUT]),
    "top-p of the first": (1.0, 0.01, -1, [1.0, OUT, OUT, OUT, OUT]),
    # The first two of top-k's 0.4, 0.3, 0.15 are 0.82 of their sum.
    "top-p after top-k": (1.0, 0.8, 3, [4 / 7, 3 / 7, OUT, OUT, OUT]),
    # At temperature 0.5 the first token has 0.56, the second 0.32.
    "top-p after temperature": (0.5, 0.6, -1, [0.16 / 0.25, 0.09 / 0.25, OUT, OUT, OUT]),
}


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [3, 0, 4, 2, 1]], ids=["sorted", "unsorted"])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "expected"), FILTERED.values(), ids=FILTERED
)
def test_filtered_logits_are_those_of_the_table(temperature, top_p, top_k, expected, order):
    logits = LOGITS[:, order]
    filtered = filtered_logits(logits, temperature=temperature, top_p=top_p, top_k=top_k)
    probs = log_softmax(filtered).exp()
    torch.testing.assert_close(probs, torch.tensor([expected])[:, order], rtol=0, atol=1e-6)


def test_ties_at_the_limit_of_top_k_are_kept():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    filtered = filtered_logits(logits, temperature=1.0, top_p=1.0, top_k=2)
    total = 2 + math.e
    expected = [1 / total, math.e / total, 1 / total, 0.0]
    assert log_softmax(filtered).exp()[0].tolist() == pytest.approx(expected)


def test_nan_logits_give_a_token_with_log_prob_nan():
    logits = torch.full((1, 5), torch.nan)
    uniforms = torch.tensor([0.5]).double()
    tokens, log_probs, _ = sample_tokens(logits, uniforms, temperature=1.0, top_p=1.0, top_k=-1)
    assert 0 <= tokens.item() < 5
    assert math.isnan(log_probs.item())


def test_temperature_zero_takes_the_likeliest_token():
    uniforms = torch.tensor([0.99]).double()
    tokens, log_probs, _ = sample_tokens(LOGITS, uniforms, temperature=0.0, top_p=0.5, top_k=1)
    assert tokens.tolist() == [0]
    # the log-prob refers to the distribution at temperature 1
    assert log_probs.item() == pytest.approx(math.log(0.4), abs=1e-6)


@pytest.fixture(scope="module", params=[49152, 151936])
def many_logits(request: pytest.FixtureRequest) -> torch.Tensor:
    """[4, V] logits of a large vocabulary."""
    return 4.0 * torch.randn(4, request.param, generator=torch.Generator().manual_seed(0))


def test_log_probs_of_a_large_vocabulary_are_not_biased(many_logits):
    """torch's log_softmax is 4e-6 and 1.2e-5 above the float64 one here, at every token."""
    error = log_softmax(many_logits) - many_logits.double().log_softmax(-1)
    assert error.mean().abs() < 2e-7
    assert error.abs().max() < 5e-6


def test_an_empty_filter_changes_no_log_prob(many_logits):
    filtered = filtered_logits(many_logits, temperature=1.0, top_p=1.0, top_k=-1)
    assert torch.equal(log_softmax(filtered), log_softmax(many_logits))


def test_greedy_log_probs_are_those_of_the_distribution(many_logits):
    greedy, log_prob, _ = sample_tokens(
        many_logits, torch.zeros(4), temperature=0.0, top_p=1.0, top_k=-1
    )
    expected = log_softmax(many_logits).gather(-1, greedy[:, None])[:, 0]
    assert torch.equal(log_prob, expected)


@pytest.mark.parametrize("block", [2, 3, 512])
@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (math.nextafter(1.0, 0.0), 4)],
    ids=str,
)
def test_inverse_cdf_takes_the_first_token_past_the_uniform(monkeypatch, block, uniform, token):
    monkeypatch.setattr(token_sampling, "CDF_CHUNK", block)
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    assert inverse_cdf(probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_inverse_cdf_of_a_large_vocabulary_follows_a_float64_table():
    generator = torch.Generator().manual_seed(0)
    probs = (3.0 * torch.randn(64, 50_021, generator=generator)).softmax(-1)
    uniforms = torch.rand(64, dtype=torch.float64, generator=generator)
    tokens = inverse_cdf(probs, uniforms)
    cumulative = probs.double().cumsum(-1)
    below = torch.nn.functional.pad(cumulative, (1, 0)).gather(-1, tokens[:, None]).squeeze(-1)
    above = cumulative.gather(-1, tokens[:, None]).squeeze(-1)
    targets = uniforms * cumulative[:, -1]
    assert ((below <= targets + 1e-12) & (targets < above + 1e-12)).all()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, -1), (0.7, 0.9, -1), (1.0, 1.0, 3)],
    ids=["plain", "temperature and top-p", "top-k"],
)
def test_draws_follow_the_reported_probabilities(temperature, top_p, top_k):
    draws = 40_000
    filters = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3)).expand(draws, -1)
    uniforms = prompt_uniforms(7, 0, 0, draws, 1)[:, 0]
    tokens, log_probs, _ = sample_tokens(logits, uniforms, **filters)
    table = log_softmax(filtered_logits(logits[:1], **filters))[0]
    torch.testing.assert_close(log_probs, table[tokens], rtol=0.0, atol=1e-6)
    counts = torch.bincount(tokens, minlength=12).double()
    expected = draws * table.double().exp()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    # the 0.999 quantile at 11 degrees of freedom; fewer if tokens are omitted
    assert chi_square < 31.3


TABLE = prompt_uniforms(1, 2, 0, 4, 6)
"""[4 samples, 6 tokens] of seed 1, prompt 2, occurrence 0."""


def test_uniforms_are_repeated():
    assert TABLE.dtype == torch.float64
    assert torch.equal(TABLE, prompt_uniforms(1, 2, 0, 4, 6))


def test_more_samples_do_not_change_the_first():
    assert torch.equal(TABLE[:2], prompt_uniforms(1, 2, 0, 2, 6))


@pytest.mark.parametrize(
    ("seed", "prompt", "occurrence"),
    [(2, 2, 0), (-1, 2, 0), (1, 3, 0), (2, 1, 0), (1, 2, 1)],
    ids=str,
)
def test_uniforms_differ_by_seed_prompt_occurrence(seed, prompt, occurrence):
    assert not torch.isin(TABLE, prompt_uniforms(seed, prompt, occurrence, 4, 6)).any()
