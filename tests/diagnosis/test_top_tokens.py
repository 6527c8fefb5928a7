"""The likeliest tokens of both engines show settings of the sampler, and nothing else."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slime_tis.analysis.diagnosis.top_tokens import Position, TopTokens, compare_top_tokens

POSITIONS = 16
TOKENS = 8
"""Number of the likeliest tokens."""
VOCABULARY = 64
LENGTH = 12
"""Tokens of a text."""
Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(texts [B, T], logits [B, V]) → the rollout engine's logits."""


def compared(change: Change, noise: float = 0.003) -> TopTokens:
    """Both engines' likeliest tokens after random texts."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(VOCABULARY // 2, (POSITIONS, LENGTH), generator=generator)
    logits = 2 * torch.randn(POSITIONS, VOCABULARY, generator=generator)
    # About half of the likely tokens come before.
    logits[:, : VOCABULARY // 2] += 1
    train = logits.log_softmax(-1)
    top = change(texts, logits.clone()).log_softmax(-1).topk(TOKENS)
    positions = []
    for text, row, tokens, values in zip(texts, train, top.indices, top.values, strict=True):
        rollout = {int(t): float(v) for t, v in zip(tokens, values, strict=True) if v > -math.inf}
        positions.append(Position(text.tolist(), {t: float(row[t]) for t in rollout}, rollout))
    return compare_top_tokens(positions, noise)


def presence(texts: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits - 0.7 * torch.zeros_like(logits).scatter(1, texts, 1)


def processed(processor: Any) -> Change:
    return lambda texts, logits: processor(texts, logits)


NOISE = torch.randn(POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(1))
SETTINGS: dict[str, tuple[Change, str, str]] = {
    "temperature 1.2": (lambda _, x: x / 1.2, "temperature", "1.2 times"),
    "temperature 0.9 with noise": (
        lambda _, x: x / 0.9 + 0.002 * NOISE,
        "temperature",
        "0.9 times",
    ),
    "repetition penalty": (
        processed(RepetitionPenaltyLogitsProcessor(1.1)),
        "penalty",
        "came before",
    ),
    "presence penalty": (presence, "penalty", "by 0.7 nats"),
    "bias": (processed(SequenceBiasLogitsProcessor([[[5], 1.5]])), "penalty", "token ids [5]"),
    "banned tokens": (
        processed(SuppressTokensLogitsProcessor([1, 2, 3], device="cpu")),
        "truncated_sampling",
        "omits",
    ),
    "top-p": (processed(TopPLogitsWarper(0.8)), "truncated_sampling", "omits other tokens"),
    "top-k": (processed(TopKLogitsWarper(4)), "truncated_sampling", "omits other tokens"),
    "min-p": (processed(MinPLogitsWarper(0.1)), "truncated_sampling", "omits other tokens"),
    "soft cap": (lambda _, x: 5 * (x / 5).tanh(), "", "no setting of the sampler"),
    "likeliest token raised": (
        lambda _, x: x + 0.5 * (x == x.amax(1, keepdim=True)),
        "",
        "no setting of the sampler",
    ),
    "other network": (lambda _, x: x + 0.3 * NOISE, "", "no setting of the sampler"),
    "precision": (lambda _, x: x + 0.002 * NOISE, "", "they agree"),
    "equal": (lambda _, x: x, "", "they agree"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_setting_of_the_sampler_is_named(name: str) -> None:
    change, cause, words = SETTINGS[name]
    result = compared(change)
    assert result.cause == cause, result
    assert words in result.evidence


@pytest.mark.parametrize("size", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_noise_is_never_a_setting(size: float, seed: int) -> None:
    noise = torch.randn(POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    assert compared(lambda _, x: x + size * noise, noise=0.15).cause == ""


def test_all_other_tokens_count_as_one() -> None:
    train = {0: math.log(0.5), 1: math.log(0.25)}
    rollout = {0: math.log(0.4), 1: math.log(0.3)}
    position = Position([0], train, rollout)
    result = compare_top_tokens([position, position], 0.0)
    kl = 0.5 * math.log(0.5 / 0.4) + 0.25 * math.log(0.25 / 0.3) + 0.25 * math.log(0.25 / 0.3)
    assert (
        result.size
        == "the 2 likeliest tokens at 2 positions (75% of the probability) have a KL divergence of"
        f" {kl:.2g} nats and differ by at most {math.log(0.5 / 0.4):.2g}"
    )
