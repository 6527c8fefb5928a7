"""Faults of the sampler and of the reported log-probs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from studies.diagnosis.held_out.engines import Engine, Logits, Report, Sample, Value, score
from studies.diagnosis.held_out.models import (
    ANSWER,
    DIGRAPHS,
    EOS,
    FIRST_HALF,
    SECOND_HALVES,
    WORD,
    World,
)
from studies.diagnosis.held_out.network_faults import Build


def on_logits(change: Logits) -> Build:
    return lambda _, engine: replace(engine, logits=change)


def sampled_only(change: Logits) -> Build:
    """Sampling uses changed logits; the reported values do not."""
    return lambda _, engine: replace(engine, logits=change, reported=lambda logits, *_: logits)


def on_value(value: Value) -> Build:
    return lambda _, engine: replace(engine, value=value)


def on_report(report: Report) -> Build:
    return lambda _, engine: replace(engine, report=report)


def on_row(change: Callable[[list[float], random.Random], list[float]]) -> Build:
    """Every sample's list of log-probs is changed."""

    def report(samples: list[Sample], rng: random.Random) -> None:
        for sample in samples:
            sample.log_probs = change(sample.log_probs, rng)

    return on_report(report)


def raw_log_probs(_: World, engine: Engine) -> Engine:
    """Reported before the division by the temperature."""
    return replace(engine, reported=lambda logits, *_: logits * engine.temperature)


# Sampler


def divided(temperature: float) -> Logits:
    return lambda logits, *_: logits / temperature


def early_temperature(logits_V: Tensor, _: Sample, place: int) -> Tensor:
    return logits_V / 0.6 if place < 6 else logits_V


def thinking_temperature(logits_V: Tensor, sample: Sample, place: int) -> Tensor:
    """Another temperature until the answer begins."""
    return logits_V if ANSWER in sample.response[:place] else logits_V / 0.6


def soft_cap(logits_V: Tensor, *_: object) -> Tensor:
    return 5.0 * (logits_V / 5.0).tanh()


def truncated(kind: str, value: float) -> Logits:
    def change(logits_V: Tensor, *_: object) -> Tensor:
        order = logits_V.argsort(descending=True)
        probability = logits_V[order].softmax(-1)
        ranks = torch.arange(len(order))
        if kind == "top-p":
            kept = probability.cumsum(-1) - probability < value
        elif kind == "top-k":
            kept = ranks < value
        elif kind == "min-p":
            kept = probability >= value * probability[0]
        else:  # XTC: leave out all but the last of the tokens above the threshold
            kept = ranks >= max(int((probability > value).sum()) - 1, 0)
        keep = torch.empty_like(kept)
        keep[order] = kept
        return logits_V.masked_fill(~keep, -torch.inf)

    return change


def repetition_penalty(logits_V: Tensor, sample: Sample, place: int) -> Tensor:
    changed = logits_V.clone()
    seen = torch.tensor(sorted({*sample.task.prompt, *sample.response[:place]}))
    values = changed[seen]
    changed[seen] = torch.where(values > 0, values / 1.3, values * 1.3)
    return changed


def presence_penalty(logits_V: Tensor, sample: Sample, place: int) -> Tensor:
    changed = logits_V.clone()
    for token in set(sample.response[:place]):
        changed[token] -= 0.8
    return changed


def biased(token: int, value: float) -> Logits:
    def change(logits_V: Tensor, *_: object) -> Tensor:
        changed = logits_V.clone()
        changed[token] += value
        return changed

    return change


def minimum_length(logits_V: Tensor, _: Sample, place: int) -> Tensor:
    changed = logits_V.clone()
    if place < 14:
        changed[EOS] = -torch.inf
    return changed


def no_repeated_pair(logits_V: Tensor, sample: Sample, place: int) -> Tensor:
    """Tokens that would repeat a pair of tokens are banned."""
    text = [*sample.task.prompt, *sample.response[:place]]
    changed = logits_V.clone()
    for before, after in itertools.pairwise(text):
        if before == text[-1]:
            changed[after] = -torch.inf
    return changed


def grammar(logits_V: Tensor, _: Sample, place: int) -> Tensor:
    """Structured output: words with an odd number are banned at every third token."""
    changed = logits_V.clone()
    if place % 3 == 2:
        changed[WORD + 1 :: 2] = -torch.inf
    return changed


def uniform_mixture(logits_V: Tensor, *_: object) -> Tensor:
    return (0.9 * logits_V.softmax(-1) + 0.1 / len(logits_V)).log()


def noisy_logits(logits_V: Tensor, *_: object) -> Tensor:
    return logits_V + 0.4 * torch.randn(len(logits_V))


def likelier_second(logits_V: Tensor, *_: object) -> Tensor:
    """The likeliest token loses 0.8: a diversity trick of beam search."""
    changed = logits_V.clone()
    changed[logits_V.argmax()] -= 0.8
    return changed


def padded_vocabulary(logits_V: Tensor, *_: object) -> Tensor:
    """Rows of zeros that pad the vocabulary are part of the softmax."""
    return torch.cat([logits_V, torch.zeros(128)])


def watermark(logits_V: Tensor, sample: Sample, place: int) -> Tensor:
    """Half of the vocabulary, chosen by the token before, is raised by 1."""
    before = [*sample.task.prompt, *sample.response[:place]][-1]
    generator = torch.Generator().manual_seed(before)
    raised = torch.rand(len(logits_V), generator=generator) < 0.5
    return logits_V + raised


# Values


def argmax_value(logits_V: Tensor, _: int) -> float:
    return float(logits_V.log_softmax(-1).max())


def smoothed_label(logits_V: Tensor, token: int) -> float:
    log_probs = logits_V.log_softmax(-1)
    return float(0.9 * log_probs[token] + 0.1 * log_probs.mean())


def with_z_loss(logits_V: Tensor, token: int) -> float:
    normalizer = logits_V.logsumexp(-1)
    return float(logits_V[token] - normalizer - 0.01 * normalizer**2)


def next_id(logits_V: Tensor, token: int) -> float:
    """An added token moves the ids of the upper half of the vocabulary by one."""
    half = len(logits_V) // 2
    moved = token + 1 if half < token < len(logits_V) - 1 else token
    return float(logits_V.log_softmax(-1)[moved])


def saturated_sum(logits_V: Tensor, token: int) -> float:
    """The maximum is not subtracted, and the sum of exponentials saturates.

    In fp16 it saturates at 65504. Logits of tiny models are smaller, and so is the limit here.
    """
    total = logits_V.double().exp().sum().clamp(max=64.0)
    return float(logits_V[token]) - math.log(float(total))


def below_maximum(logits_V: Tensor, token: int) -> float:
    """The maximum is subtracted and not the logarithm of the sum."""
    return float(logits_V[token] - logits_V.max())


def raw_logit(logits_V: Tensor, token: int) -> float:
    return float(logits_V[token])


def bf16_logits(logits_V: Tensor, token: int) -> float:
    return float(logits_V.bfloat16().float().log_softmax(-1)[token])


def coarse_probability(logits_V: Tensor, token: int) -> float:
    """The probability has 6 bits."""
    probability = float(logits_V.softmax(-1)[token])
    return math.log(max(round(probability * 63), 0.5) / 63)


def with_floor(logits_V: Tensor, token: int) -> float:
    return math.log(float(logits_V.softmax(-1)[token]) + 0.02)


def negative_entropy(logits_V: Tensor, _: int) -> float:
    return -float(torch.special.entr(logits_V.softmax(-1)).sum())


def scaled_value(factor: float) -> Value:
    return lambda logits, token: factor * float(logits.log_softmax(-1)[token])


# Lists of values


def neighbors_values(samples: list[Sample]) -> dict[int, list[float]]:
    """Values before any change, by the sample's index in the step."""
    values: dict[int, list[float]] = {}
    for sample in samples:
        for each in (sample, *sample.neighbors):
            values.setdefault(each.index, list(each.log_probs))
    return values


def exchanged(samples: list[Sample], _: random.Random) -> None:
    """Values of the next sample of the step, as far as they reach."""
    values = neighbors_values(samples)
    for sample in samples:
        other = values[sample.neighbors[0].index]
        own = values[sample.index]
        length = min(len(own), len(other))
        sample.log_probs = [*other[:length], *own[length:]]


def aborted_prefix(samples: list[Sample], _: random.Random) -> None:
    """The first 6 values are of an attempt that was aborted, for the same prompt."""
    values = neighbors_values(samples)
    for sample in samples:
        length = min(6, len(sample.log_probs))
        attempt = values[sample.neighbors[-1].index]
        sample.log_probs[:length] = [*attempt, *sample.log_probs][:length]


def end_appended(world: World, engine: Engine) -> Engine:
    """Every response ends with the end token, which has 0 as log-prob, sampled or not."""

    def report(samples: list[Sample], _: random.Random) -> None:
        for sample in samples:
            if sample.response[-1] != world.end:
                sample.response.append(world.end)
                sample.mask.append(1)
                sample.log_probs.append(0.0)
            sample.log_probs[-1] = 0.0

    return replace(engine, report=report)


def replaced(share: float, value: float) -> Report:
    """A share of the values, at least one of each batch, is one number."""

    def report(samples: list[Sample], rng: random.Random) -> None:
        for sample in samples:
            for place in range(len(sample.log_probs)):
                if rng.random() < share:
                    sample.log_probs[place] = value
        samples[0].log_probs[1 % len(samples[0].log_probs)] = value

    return report


def only_first(row: list[float], _: random.Random) -> list[float]:
    return [row[0], *[0.0] * (len(row) - 1)]


def trained_tool_output(samples: list[Sample], _: random.Random) -> None:
    """Tokens of the environment are trained; they have 0 as log-prob."""
    for sample in samples:
        sample.mask = [1] * len(sample.mask)


def late_mask(samples: list[Sample], _: random.Random) -> None:
    """The mask comes two tokens early, so that the environment's last tokens are trained."""
    for sample in samples:
        sample.mask = [*sample.mask[2:], 1, 1][: len(sample.mask)]


def shifted(by: int) -> Callable[[list[float], random.Random], list[float]]:
    return lambda row, _: [*row[by:], *row[-1:] * by][: len(row)]


def shifted_second_turn(samples: list[Sample], _: random.Random) -> None:
    """From the second turn on, the first value is lost."""
    for sample in samples:
        if sample.turn_starts:
            start = sample.turn_starts[0]
            own = sample.log_probs
            sample.log_probs = [*own[:start], *own[start + 1 :], own[-1]][: len(own)]


def mean_of_row(row: list[float], _: random.Random) -> list[float]:
    return [sum(row) / len(row)] * len(row)


def cumulative(row: list[float], _: random.Random) -> list[float]:
    total = 0.0
    sums = []
    for value in row:
        total += value
        sums.append(total)
    return sums


def by_length(row: list[float], _: random.Random) -> list[float]:
    return [value / math.sqrt(len(row)) for value in row]


def without_last(row: list[float], _: random.Random) -> list[float]:
    """The last value is missing, and the one before is repeated."""
    return [*row[:-1], row[-2] if len(row) > 1 else -1.0]


def blocks_exchanged(row: list[float], _: random.Random) -> list[float]:
    """Chunks of 5 values come back in the wrong order."""
    return [*row[5:10], *row[:5], *row[10:]]


def reversed_row(row: list[float], _: random.Random) -> list[float]:
    return row[::-1]


def smoothed_row(row: list[float], _: random.Random) -> list[float]:
    smooth = []
    for place, value in enumerate(row):
        smooth.append(0.6 * value + 0.4 * row[max(place - 1, 0)])
    return smooth


def noisy_row(row: list[float], rng: random.Random) -> list[float]:
    return [value + rng.gauss(0, 0.25) for value in row]


def offset(row: list[float], _: random.Random) -> list[float]:
    return [value - 0.12 for value in row]


def rounded_row(row: list[float], _: random.Random) -> list[float]:
    return [round(value, 1) for value in row]


def retokenised(samples: list[Sample], _: random.Random) -> None:
    """Text is encoded again, which joins the halves of words; values do not move."""
    for sample in samples:
        joined: list[int] = []
        for token in sample.response:
            if SECOND_HALVES <= token < SECOND_HALVES + DIGRAPHS and joined[-1:] == [FIRST_HALF]:
                joined[-1] = WORD + token - SECOND_HALVES
            else:
                joined.append(token)
        sample.response = joined
        sample.log_probs = sample.log_probs[: len(joined)]
        sample.mask = sample.mask[: len(joined)]
        sample.turn_starts = []


# Values of other models


def scored_by(samples: list[Sample], model_of: Callable[[int], object]) -> None:
    """Replaces all values by those of another model."""
    engine = Engine(model=model_of)
    for sample, (values, _) in zip(samples, score(engine, samples), strict=True):
        sample.log_probs = values


def draft_values(share: float) -> Build:
    """A share of the values is of the draft model of speculative decoding."""

    def build(world: World, engine: Engine) -> Engine:
        def report(samples: list[Sample], rng: random.Random) -> None:
            own = [list(sample.log_probs) for sample in samples]
            scored_by(samples, lambda _: world.draft)
            for sample, values in zip(samples, own, strict=True):
                for place, value in enumerate(values):
                    if rng.random() >= share:
                        sample.log_probs[place] = value

        return replace(engine, report=report)

    return build


def older_half(honest: bool, lag: int = 1) -> Build:
    """Generation was interrupted by an update: the first half has older weights."""

    def build(world: World, engine: Engine) -> Engine:
        def report(samples: list[Sample], _: random.Random) -> None:
            own = [list(sample.log_probs) for sample in samples]
            step = samples[0].step
            older = max(step - lag, 0)
            scored_by(samples, lambda _: world.at(older))
            for sample, values in zip(samples, own, strict=True):
                half = len(values) // 2
                sample.log_probs[half:] = values[half:]
                if honest:
                    sample.versions = [older] * half + [step] * (len(values) - half)

        return replace(engine, report=report)

    return build


def averaged_with_older(world: World, engine: Engine) -> Engine:
    """Mean of the log-probs of two replicas, one of which has the first weights."""

    def report(samples: list[Sample], _: random.Random) -> None:
        own = [list(sample.log_probs) for sample in samples]
        scored_by(samples, lambda _: world.at(0))
        for sample, values in zip(samples, own, strict=True):
            pairs = zip(sample.log_probs, values, strict=True)
            sample.log_probs = [(first + second) / 2 for first, second in pairs]

    return replace(engine, report=report)


def honest_versions(lag: int) -> Build:
    def build(world: World, engine: Engine) -> Engine:
        def model(step: int) -> object:
            return world.at(max(step - lag, 0))

        def report(samples: list[Sample], _: random.Random) -> None:
            for sample in samples:
                older = max(sample.step - lag, 0)
                sample.versions = [older] * len(sample.response)

        return replace(engine, model=model, report=report)

    return build
