"""Proof that trained tokens are sampled tokens.

A response token counts as sampled if the input of one request, and the tokens which that request
sampled so far, are exactly the tokens before it. Tokens that were decoded and tokenized again
differ, and so do all tokens after them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from slime_tis.trainer.data.sample import Sample, SamplingMask
from slime_tis.trainer.engines.function_requests import Generation


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One request and its answer, or the response of an aborted sample."""

    input_ids: list[int]
    generation: Generation
    is_trained: list[int] | None = None
    """1 for each sampled token; None if all were."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The request that sampled each response token."""

    request: list[int]
    """Number of the request; -1 if the token was not sampled."""
    place: list[int]
    longest: int | None
    """The request whose input and answer agree with most of the sample's tokens."""
    agreeing: int


def provenance(
    tokens: Sequence[int], response_length: int, requests: Sequence[Sampled]
) -> Provenance:
    """Finds the request that sampled each response token; of several with the same input, the longest agreement."""
    tokens, first = list(tokens), len(tokens) - response_length
    agreeing = []
    for number, one in enumerate(requests):
        start = len(one.input_ids)
        if tokens[:start] == one.input_ids:
            after, ids = tokens[start:], one.generation.token_ids
            same = next(
                (i for i, (a, b) in enumerate(zip(after, ids, strict=False)) if a != b), None
            )
            agreeing.append((start + (min(len(after), len(ids)) if same is None else same), number))
    request, place = [-1] * response_length, [0] * response_length
    for end, number in sorted(agreeing):
        start, mask = len(requests[number].input_ids), requests[number].is_trained
        for position in range(max(start, first), end):
            if mask is None or mask[position - start]:
                request[position - first], place[position - first] = number, position - start
    longest = max(agreeing, default=(0, None))
    return Provenance(request=request, place=place, longest=longest[1], agreeing=longest[0])


def first_difference(tokens: Sequence[int], requests: Sequence[Sampled]) -> tuple[int, int | None]:
    """Returns the first position at which tokens differ from the request that they agree with longest.

    Returns:
        The position, and the token there of the request's input or answer; None after the end of
        the answer.
    """
    position, token = -1, None
    for one in requests:
        engine_ids = [*one.input_ids, *one.generation.token_ids]
        pairs = enumerate(zip(tokens, engine_ids, strict=False))
        end = min(len(tokens), len(engine_ids))
        agreeing = next((index for index, (given, own) in pairs if given != own), end)
        if agreeing > position:
            position = agreeing
            token = engine_ids[agreeing] if agreeing < len(engine_ids) else None
    return position, token


def copy_engine_records(sample: Sample, found: Provenance, requests: Sequence[Sampled]) -> None:
    """Copies log-probs, versions, servers, sampling masks and experts of sampled tokens; others get the last value."""
    sources = list(zip(found.request, found.place, strict=True))
    generations = [one.generation for one in requests]
    sample.rollout_log_probs = [
        generations[number].log_probs[place] if number >= 0 else given
        for (number, place), given in zip(sources, sample.rollout_log_probs, strict=True)
    ]
    for name, source in {
        "weight_versions": "weight_versions",
        "rollout_workers": "workers",
    }.items():
        lists = [getattr(generation, source) for generation in generations]
        values = [
            lists[number][place] if number >= 0 and lists[number] else None
            for number, place in sources
        ]
        last = next((value for value in values if value is not None), None)
        if last is not None:
            setattr(sample, name, [last := last if value is None else value for value in values])
    if any(one.sampling_mask is not None for one in generations):
        sample.sampling_mask = _sampling_mask(sources, generations)
    if found.longest is not None:
        sample.rollout_routed_experts = _routing(sample, found, requests, "routed_experts")
        sample.rollout_routing_weights = _routing(sample, found, requests, "routing_weights")


def _sampling_mask(
    sources: Sequence[tuple[int, int]], generations: Sequence[Generation]
) -> SamplingMask:
    masks = [one.candidates for one in generations]
    starts = list(accumulate(map(len, masks), initial=0))
    rows = [starts[number] + place if number >= 0 else starts[-1] for number, place in sources]
    return SamplingMask.cat([*masks, SamplingMask.unrecorded(1)]).select(
        torch.tensor(rows, dtype=torch.int64)
    )


def _routing(
    sample: Sample, found: Provenance, requests: Sequence[Sampled], name: str
) -> Tensor | None:
    """Returns the rows of the input tokens; each sampled token takes the rows of its request."""
    assert found.longest is not None
    rows: Tensor | None = getattr(requests[found.longest].generation, name)
    if rows is None:
        return None
    rows = rows[: min(found.agreeing, len(sample.tokens)) - 1].clone()
    first = len(sample.tokens) - sample.response_length
    for offset, (number, place) in enumerate(zip(found.request, found.place, strict=True)):
        if number not in (-1, found.longest):
            source = getattr(requests[number].generation, name)
            fed, row = first + offset - 1, len(requests[number].input_ids) + place - 1
            if source is not None and row < len(source) and fed < len(rows):
                rows[fed] = source[row]
    return rows
