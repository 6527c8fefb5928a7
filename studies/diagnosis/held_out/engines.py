"""Engines with replaceable parts: they sample episodes and score them again.

A fault replaces parts of one engine. A scene has the engines of training and rollout, without and
with the fault, and decides for each sample which one it meets.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from studies.diagnosis.held_out.models import END, IMAGE, PAD, Task, World, padded


@dataclass(kw_only=True)
class Sample:
    """One response while it grows."""

    task: Task
    step: int
    index: int
    """Index in the step."""
    response: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Reported by the rollout engine."""
    turn_starts: list[int] = field(default_factory=list)
    """Index of the first sampled token of the second turn, if there is one."""
    neighbors: list[Sample] = field(default_factory=list, repr=False)
    """Other samples of the step; engines that mix up samples read them."""
    versions: list[int] = field(default_factory=list)
    """Reported weight versions; empty means the step."""

    @property
    def visible(self) -> list[int]:
        """The prompt that a model reads: images instead of placeholders."""
        images = iter(self.task.pixels)
        return [next(images) if token == IMAGE else token for token in self.task.prompt]


@dataclass(kw_only=True)
class Reading:
    """One row of a forward pass, and which response tokens it predicts."""

    tokens: list[int]
    sources: list[int | None]
    """Per token its index in the response; None for the prompt and for inserted tokens."""
    positions: list[int] | None = None
    """None counts from 0."""
    mask: Tensor | None = None
    """[T, T] True for attended pairs; None means causal."""
    covers: Callable[[int], bool] = lambda _: True
    """Whether this reading predicts response token i."""
    stale_prefix: int = 0
    """Tokens whose keys and values come from the engine's older cache."""

    def rows(self, length: int) -> dict[int, int]:
        """Response index → row of the logits, up to index `length`, the next token."""
        place: dict[int, int] = {}
        for row, source in enumerate(self.sources):
            if source is not None and self.covers(source):
                place[source] = row - 1
        if self.covers(length):
            place[length] = len(self.tokens) - 1
        return place


Reader = Callable[[Sample], list[Reading]]
Logits = Callable[[Tensor, Sample, int], Tensor]
"""Changes the logits [V] that predict response token i of a sample."""
Value = Callable[[Tensor, int], float]
"""Reported value, in nats, of a token, from the logits [V]."""
Report = Callable[[list[Sample], random.Random], None]
"""Changes samples in place before they are reported."""


def plain(sample: Sample) -> list[Reading]:
    prompt = sample.visible
    return [reading(prompt, sample.response)]


def reading(prompt: Sequence[int], response: Sequence[int]) -> Reading:
    sources: list[int | None] = [None] * len(prompt)
    sources.extend(range(len(response)))
    return Reading(tokens=[*prompt, *response], sources=sources)


def log_prob(logits_V: Tensor, token: int) -> float:
    return float(logits_V.log_softmax(-1)[token])


@dataclass(kw_only=True)
class Engine:
    """A model and everything around it that a fault can change."""

    model: Callable[[int], Any]
    """Step → model."""
    read: Reader = plain
    logits: Logits = lambda logits, *_: logits
    """For sampling and for the reported values."""
    reported: Logits | None = None
    """For the reported values, if they use other logits than sampling."""
    value: Value = log_prob
    report: Report = lambda *_: None
    rounded_cache: Callable[[Tensor], Tensor] | None = None
    """Rounds keys (after RoPE) and values."""
    cache_model: Callable[[int], Any] | None = None
    """Step → model that computed the keys and values of a stale prefix."""
    dtype: torch.dtype = torch.float32
    """Of weights and arithmetic."""
    temperature: float = 1.0
    """Of sampling and of the reported values; both engines have it."""
    models: dict[int, Any] = field(default_factory=dict, init=False, repr=False)
    """The model of the last step that was asked for."""

    def model_at(self, step: int) -> Any:
        if step not in self.models:
            self.models.clear()  # SmolLM2 has half a gigabyte
            model = self.model(step)
            # Only parameters: a checkpoint that is loaded in bf16 keeps RoPE's frequencies in fp32.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(self.dtype)
            self.models[step] = model
        return self.models[step]


class EngineCache(DynamicCache):
    """Keys and values of one forward pass, changed as an engine's cache changes them."""

    def __init__(self, engine: Engine, prefix: Any, lengths: Sequence[int]) -> None:
        super().__init__()
        self.engine = engine
        self.prefix = prefix
        self.lengths = lengths

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys = key_states.clone()
        values = value_states.clone()
        if self.prefix is not None:
            old = self.prefix.layers[layer_idx]
            for row, length in enumerate(self.lengths):
                keys[row, :, :length] = old.keys[row, :, :length]
                values[row, :, :length] = old.values[row, :, :length]
        rounding = self.engine.rounded_cache
        if rounding is not None:
            keys = rounding(keys)
            values = rounding(values)
        return super().update(keys, values, layer_idx, *args, **kwargs)


@torch.inference_mode()
def forward(engine: Engine, step: int, readings: Sequence[Reading]) -> Tensor:
    """[B, T, V] logits of rows that are padded on the right."""
    model = engine.model_at(step)
    tokens = padded([row.tokens for row in readings])
    size, width = tokens.shape
    arguments: dict[str, Any] = {}
    positions = torch.arange(width).expand(size, -1).clone()
    full = torch.ones(size, width, width, dtype=torch.bool).tril()
    for index, row in enumerate(readings):
        if row.positions is not None:
            positions[index, : len(row.positions)] = torch.tensor(row.positions)
        if row.mask is not None:
            full[index, : len(row.tokens), : len(row.tokens)] = row.mask
    if any(row.mask is not None for row in readings) or engine.cache_model is not None:
        dtype = next(model.parameters()).dtype
        lowest = torch.finfo(dtype).min
        additive = torch.zeros(size, 1, width, width, dtype=dtype)
        arguments["attention_mask"] = additive.masked_fill(~full[:, None], lowest)
    if engine.rounded_cache is not None or engine.cache_model is not None:
        prefix = None
        lengths = [row.stale_prefix for row in readings]
        if engine.cache_model is not None:
            older = engine.cache_model(step)
            prefix = older(tokens, position_ids=positions, use_cache=True).past_key_values
        arguments["past_key_values"] = EngineCache(engine, prefix, lengths)
        arguments["use_cache"] = True
    output = model(tokens, position_ids=positions, **arguments)
    return output.logits.float() / engine.temperature


def predictions(engine: Engine, step: int, samples: Sequence[Sample]) -> list[dict[int, Tensor]]:
    """Per sample: response index → logits [V]; the index after the last is the next token."""
    readings = []
    owners = []
    for number, sample in enumerate(samples):
        for row in engine.read(sample):
            if row.rows(len(sample.response)):
                readings.append(row)
                owners.append(number)
    logits = forward(engine, step, readings)
    result: list[dict[int, Tensor]] = [{} for _ in samples]
    for index, (row, owner) in enumerate(zip(readings, owners, strict=True)):
        for place, at in row.rows(len(samples[owner].response)).items():
            result[owner][place] = logits[index, at]
    return result


def append(engine: Engine, sample: Sample, logits_V: Tensor, rng: torch.Generator) -> int:
    """Samples the next token and its reported log-prob."""
    place = len(sample.response)
    shaped = engine.logits(logits_V, sample, place)
    token = int(torch.multinomial(shaped.softmax(-1), 1, generator=rng))
    told = shaped
    if engine.reported is not None:
        told = engine.reported(logits_V, sample, place)
    sample.log_probs.append(engine.value(told, token))
    sample.response.append(token)
    sample.mask.append(1)
    return token


@torch.inference_mode()
def sample_step(world: World, engine: Engine, samples: Sequence[Sample], seed: int) -> None:
    """Samples responses of one step in place."""
    if not samples:
        return
    rng = torch.Generator().manual_seed(seed)
    step = samples[0].step
    if not world.is_tiny:
        sample_cached(world, engine, samples, rng)
        return
    unfinished = list(samples)
    while unfinished:
        logits = predictions(engine, step, unfinished)
        still = []
        for sample, predicted in zip(unfinished, logits, strict=True):
            token = append(engine, sample, predicted[len(sample.response)], rng)
            if token == END and sample.task.followup and not sample.turn_starts:
                sample.response += sample.task.followup
                sample.mask += [0] * len(sample.task.followup)
                sample.log_probs += [0.0] * len(sample.task.followup)
                sample.turn_starts.append(len(sample.response))
            if token != world.end and len(sample.response) < world.max_response:
                still.append(sample)
        unfinished = still


def sample_cached(
    world: World, engine: Engine, samples: Sequence[Sample], rng: torch.Generator
) -> None:
    """Token by token with a KV cache, for SmolLM2; prompts are padded on the left."""
    model = engine.model_at(samples[0].step)
    prompts = [engine.read(sample)[0].tokens for sample in samples]
    width = max(map(len, prompts))
    tokens = torch.tensor([[PAD] * (width - len(row)) + row for row in prompts])
    attended = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    positions = (attended.cumsum(1) - 1).clamp_min(0)
    output = model(tokens, attention_mask=attended, position_ids=positions, use_cache=True)
    unfinished = list(range(len(samples)))
    while unfinished:
        cache = output.past_key_values
        if engine.rounded_cache is not None:
            for layer in cache.layers:
                layer.keys = engine.rounded_cache(layer.keys)
                layer.values = engine.rounded_cache(layer.values)
        fed = [PAD] * len(samples)
        for index in list(unfinished):
            sample = samples[index]
            logits = output.logits[index, -1].float() / engine.temperature
            fed[index] = append(engine, sample, logits, rng)
            if fed[index] == world.end or len(sample.response) >= world.max_response:
                unfinished.remove(index)
        attended = torch.cat([attended, torch.ones(len(samples), 1, dtype=torch.long)], 1)
        positions = positions[:, -1:] + 1
        output = model(
            torch.tensor(fed)[:, None],
            attention_mask=attended,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )


@torch.inference_mode()
def score(engine: Engine, samples: Sequence[Sample]) -> list[tuple[list[float], list[float]]]:
    """Log-probs and entropies, in nats, of all response tokens."""
    if not samples:
        return []
    result = []
    for sample, predicted in zip(
        samples, predictions(engine, samples[0].step, samples), strict=True
    ):
        log_probs = []
        entropies = []
        for place, token in enumerate(sample.response):
            logits = engine.logits(predicted[place], sample, place)
            told = logits
            if engine.reported is not None:
                told = engine.reported(predicted[place], sample, place)
            log_probs.append(engine.value(told, token))
            distribution = logits.log_softmax(-1)
            entropies.append(float(torch.special.entr(distribution.exp()).sum()))
        result.append((log_probs, entropies))
    return result
