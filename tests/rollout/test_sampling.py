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


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "expected"), FILTERED.values(), ids=FILTERED
)
def test_filtered_logits_are_those_of_the_table(temperature, top_p, top_k, expected):
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        filtered = filtered_logits(
            LOGITS[:, order], temperature=temperature, top_p=top_p, top_k=top_k
        )
        torch.testing.assert_close(
            log_softmax(filtered).exp(), torch.tensor([expected])[:, order], rtol=0, atol=1e-6
        )


def test_ties_nan_and_temperature_zero():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    probs = log_softmax(filtered_logits(logits, temperature=1.0, top_p=1.0, top_k=2)).exp()
    assert probs[0].tolist() == pytest.approx(
        [1 / (2 + math.e), math.e / (2 + math.e), 1 / (2 + math.e), 0.0]
    )
    tokens, log_probs, _ = sample_tokens(
        torch.full((1, 5), torch.nan),
        torch.tensor([0.5]).double(),
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
    )
    assert 0 <= tokens.item() < 5
    assert math.isnan(log_probs.item())
    tokens, log_probs, _ = sample_tokens(
        LOGITS, torch.tensor([0.99]).double(), temperature=0.0, top_p=0.5, top_k=1
    )
    assert tokens.tolist() == [0]
    assert log_probs.item() == pytest.approx(math.log(0.4), abs=1e-6)


@pytest.mark.parametrize("vocab", [49152, 151936])
def test_log_probs_of_a_large_vocabulary_are_not_biased(vocab):
    """torch's log_softmax is 4e-6 and 1.2e-5 above the float64 one here, at every token."""
    logits = 4.0 * torch.randn(4, vocab, generator=torch.Generator().manual_seed(0))
    error = log_softmax(logits) - logits.double().log_softmax(-1)
    assert error.mean().abs() < 2e-7 and error.abs().max() < 5e-6
    assert torch.equal(
        log_softmax(filtered_logits(logits, temperature=1.0, top_p=1.0, top_k=-1)),
        log_softmax(logits),
    )
    greedy, log_prob, _ = token_sampling.sample_tokens(
        logits, torch.zeros(4), temperature=0.0, top_p=1.0, top_k=-1
    )
    assert torch.equal(log_prob, log_softmax(logits).gather(-1, greedy[:, None])[:, 0])


@pytest.mark.parametrize("block", [2, 3, 512])
def test_inverse_cdf_takes_the_first_token_past_the_uniform(monkeypatch, block):
    monkeypatch.setattr(token_sampling, "CDF_CHUNK", block)
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    expected = {0.0: 1, 0.2499: 1, 0.25: 3, 0.7499: 3, 0.75: 4, math.nextafter(1.0, 0.0): 4}
    for uniform, token in expected.items():
        assert inverse_cdf(probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_inverse_cdf_of_a_large_vocabulary_is_that_of_a_float64_table():
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
def test_draws_follow_the_probabilities_that_are_reported(temperature, top_p, top_k):
    draws = 40_000
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3)).expand(draws, -1)
    uniforms = prompt_uniforms(7, 0, 0, draws, 1)[:, 0]
    tokens, log_probs, _ = sample_tokens(
        logits, uniforms, temperature=temperature, top_p=top_p, top_k=top_k
    )
    table = log_softmax(
        filtered_logits(logits[:1], temperature=temperature, top_p=top_p, top_k=top_k)
    )[0]
    torch.testing.assert_close(log_probs, table[tokens], rtol=0.0, atol=1e-6)
    counts, expected = torch.bincount(tokens, minlength=12).double(), draws * table.double().exp()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    assert (
        chi_square < 31.3
    )  # the 0.999 quantile at 11 degrees of freedom; fewer where tokens are omitted


def test_uniforms_depend_on_seed_prompt_and_occurrence_and_on_nothing_else():
    table = prompt_uniforms(1, 2, 0, 4, 6)
    assert table.dtype == torch.float64
    assert torch.equal(table, prompt_uniforms(1, 2, 0, 4, 6))
    assert torch.equal(
        table[:2], prompt_uniforms(1, 2, 0, 2, 6)
    )  # more samples leave the first ones be
    others = [
        prompt_uniforms(*key, 4, 6)
        for key in [(2, 2, 0), (1, 3, 0), (2, 1, 0), (1, 2, 1), (-1, 2, 0)]
    ]
    assert all(not torch.isin(table, other).any() for other in others)
