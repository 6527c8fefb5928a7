"""Faults of the input: prompts, turns, images, positions and attention masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from studies.diagnosis.held_out.engines import Engine, Reader, Reading, Sample, plain, reading
from studies.diagnosis.held_out.models import (
    ANSWER,
    ASSISTANT,
    BOS,
    NEWLINE,
    PAD,
    SYSTEM,
    TOOL,
    USER,
    WORD,
    World,
)
from studies.diagnosis.held_out.network_faults import Build


def reads(read: Reader) -> Build:
    def build(_: World, engine: Engine) -> Engine:
        return replace(engine, read=read)

    return build


def on_prompt(change: Callable[[list[int]], list[int]]) -> Build:
    return reads(lambda sample: [reading(change(sample.visible), sample.response)])


def another_system(prompt: list[int]) -> list[int]:
    changed = list(prompt)
    if SYSTEM in prompt[:3]:
        place = prompt.index(SYSTEM) + 1
        changed[place] = WORD + (prompt[place] - WORD + 3) % 7
    return changed


def another_template(prompt: list[int]) -> list[int]:
    renamed = {SYSTEM: TOOL, USER: SYSTEM, ASSISTANT: USER}
    return [renamed.get(token, token) for token in prompt]


def bos_in_the_middle(prompt: list[int]) -> list[int]:
    half = len(prompt) // 2
    return [*prompt[:half], BOS, *prompt[half:]]


def cut_if_long(prompt: list[int]) -> list[int]:
    return prompt[-9:] if len(prompt) > 13 else prompt


def doubled(prompt: list[int]) -> list[int]:
    return [prompt[0], *prompt]


def padded_left(prompt: list[int]) -> list[int]:
    return [PAD, PAD, PAD, *prompt]


# Turns


def newline_before_turns(sample: Sample) -> list[Reading]:
    """One more token before each later turn of the template."""
    if not sample.turn_starts:
        return plain(sample)
    place = sample.turn_starts[0] - len(sample.task.followup)
    row = plain(sample)[0]
    at = len(sample.task.prompt) + place
    row.tokens.insert(at, NEWLINE)
    row.sources.insert(at, None)
    return [row]


def per_turn(sample: Sample, kept: Callable[[int], bool]) -> list[Reading]:
    """The second turn is read without the first turn's tokens that are not kept."""
    if not sample.turn_starts:
        return plain(sample)
    start = sample.turn_starts[0]
    first = plain(sample)[0]
    first.covers = lambda place: place < start
    prompt = sample.visible
    tokens = list(prompt)
    sources: list[int | None] = [None] * len(prompt)
    for place, token in enumerate(sample.response):
        if place >= start or kept(place):
            tokens.append(token)
            sources.append(place)
    second = Reading(tokens=tokens, sources=sources, covers=lambda place: place >= start)
    return [first, second]


def thinking_removed(sample: Sample) -> list[Reading]:
    if ANSWER not in sample.response:
        return plain(sample)
    end = sample.response.index(ANSWER)
    return per_turn(sample, lambda place: place > end)


def history_lost(sample: Sample) -> list[Reading]:
    """The second turn is read without the first answer."""
    if not sample.turn_starts:
        return plain(sample)
    place = sample.turn_starts[0] - len(sample.task.followup)
    return per_turn(sample, lambda index: index >= place)


# Images, and prompts of other samples


def with_pixels(change: Callable[[Sample], list[int]]) -> Reader:
    def read(sample: Sample) -> list[Reading]:
        task = replace(sample.task, pixels=change(sample))
        return [reading(replace(sample, task=task).visible, sample.response)]

    return read


def neighbor_pixels(sample: Sample) -> list[int]:
    return other_task(sample).task.pixels


def other_task(sample: Sample) -> Sample:
    """A sample of the step with another prompt."""
    for neighbor in sample.neighbors:
        if neighbor.task is not sample.task:
            return neighbor
    raise ValueError("All samples of the step have one prompt.")


def neighbor_prompt(sample: Sample) -> list[Reading]:
    """A collision in the prefix cache."""
    return [reading(other_task(sample).visible, sample.response)]


def packed(count: int) -> Reader:
    """Attends to other samples of its pack, which come first; positions start at 0 again."""

    def read(sample: Sample) -> list[Reading]:
        others: list[int] = []
        positions: list[int] = []
        for neighbor in sample.neighbors[:count]:
            text = [*neighbor.visible, *neighbor.response]
            others += text
            positions += range(len(text))
        row = reading([*others, *sample.visible], sample.response)
        row.positions = [*positions, *range(len(row.tokens) - len(others))]
        row.mask = causal(len(row.tokens))
        return [row]

    return read


# Positions


def with_positions(position: Callable[[Sample, int, int], int]) -> Reader:
    """Positions follow from the sample, the prompt's length and the index."""

    def read(sample: Sample) -> list[Reading]:
        row = plain(sample)[0]
        start = len(sample.task.prompt)
        row.positions = [position(sample, start, at) for at in range(len(row.tokens))]
        return [row]

    return read


def gap(sample: Sample, start: int, at: int) -> int:
    return at + 4 * (at >= start)


def gap_of_sample(sample: Sample, start: int, at: int) -> int:
    """As image tokens with three-dimensional positions, if one engine counts them otherwise."""
    return at + (1 + sample.index % 4) * (at >= start)


def restarted(sample: Sample, start: int, at: int) -> int:
    """Context-parallel chunks of 16 whose positions overlap by 5."""
    return at - 5 * (at // 16)


# Attention masks


def causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def with_mask(change: Callable[[Tensor, int], Tensor]) -> Reader:
    """The causal mask [T, T] is changed, given the prompt's length."""

    def read(sample: Sample) -> list[Reading]:
        row = plain(sample)[0]
        row.mask = change(causal(len(row.tokens)), len(sample.task.prompt))
        return [row]

    return read


def window(size: int) -> Callable[[Tensor, int], Tensor]:
    return lambda mask, _: mask.triu(1 - size)


def sinks(mask: Tensor, _: int) -> Tensor:
    """KV eviction: the first 2 tokens and the last 8 stay."""
    kept = mask.triu(-7)
    kept[:, :2] = mask[:, :2]
    return kept


def sees_all_of_prompt(mask: Tensor, start: int) -> Tensor:
    seen = mask.clone()
    seen[:start, :start] = True
    return seen


def without_newest(mask: Tensor, start: int) -> Tensor:
    """Decoded tokens miss the key of the token before: it is written too late."""
    seen = mask.clone()
    for row in range(start, len(mask)):
        seen[row, row - 1] = False
    return seen


def chunked(mask: Tensor, start: int) -> Tensor:
    """Chunked prefill: tokens of the prompt do not attend to earlier chunks of 6."""
    seen = mask.clone()
    for row in range(start):
        seen[row, : row // 6 * 6] = False
    return seen


def without_every_fifth(mask: Tensor, _: int) -> Tensor:
    """Lost blocks of a paged cache: keys 4, 9, 14 … are attended by nobody but themselves."""
    seen = mask.clone()
    for column in range(4, len(mask), 5):
        seen[column + 1 :, column] = False
    return seen
