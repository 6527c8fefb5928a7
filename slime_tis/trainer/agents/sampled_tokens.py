"""Proof that trained tokens are sampled tokens.

A response token counts as sampled if a request sampled it after exactly the same tokens. A token
that was decoded and tokenized again may differ; then it and all later tokens do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from slime_tis.trainer.data.sample import Sample, SamplingMask
from slime_tis.trainer.engines.function_requests import Generation, common_prefix

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One request and its answer, or the response of an aborted sample."""

    input_ids: list[int]
    generation: Generation
    is_trained: list[int] | None = None
    """1 for each sampled token; None if all were."""

    @property
    def token_ids(self) -> list[int]:
        """The input and the sampled tokens."""
        return [*self.input_ids, *self.generation.token_ids]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The request that sampled each response token."""

    request: list[int]
    """Number of the request; -1 if the token was not sampled."""
    offset: list[int]
    """Index of the token in the request's answer; 0 if the token was not sampled."""
    longest: int | None
    """The request whose input and answer have the longest common prefix with the sample."""
    agreeing: int
    """Number of tokens in that prefix."""

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """`request` and `offset` per response token."""
        return list(zip(self.request, self.offset, strict=True))


def provenance(
    tokens: Sequence[int], response_length: int, requests: Sequence[Sampled]
) -> Provenance:
    """Finds the request that sampled each response token.

    If several requests have the same input, the request with the longest common prefix counts.
    """
    tokens = list(tokens)
    first = len(tokens) - response_length
    agreements: list[tuple[int, int]] = []
    for number, sampled in enumerate(requests):
        end = common_prefix(tokens, sampled.token_ids)
        # If the inputs differ already, the answer was sampled after other tokens.
        if end >= len(sampled.input_ids):
            agreements.append((end, number))
    request = [-1] * response_length
    offset = [0] * response_length
    # In ascending order, so that longer agreements overwrite shorter ones.
    agreements.sort()
    for end, number in agreements:
        start = len(requests[number].input_ids)
        mask = requests[number].is_trained
        for position in range(max(start, first), end):
            if mask is None or mask[position - start]:
                request[position - first] = number
                offset[position - first] = position - start
    if not agreements:
        return Provenance(request=request, offset=offset, longest=None, agreeing=0)
    agreeing, longest = agreements[-1]
    return Provenance(request=request, offset=offset, longest=longest, agreeing=agreeing)


def first_difference(tokens: Sequence[int], requests: Sequence[Sampled]) -> tuple[int, int | None]:
    """Compares a sample with the request that has the longest common prefix.

    Returns:
        The first position that differs, and the request's token there; None after the end of the
        answer.
    """
    tokens = list(tokens)
    position = -1
    token = None
    for sampled in requests:
        engine_ids = sampled.token_ids
        end = common_prefix(tokens, engine_ids)
        if end > position:
            position = end
            token = None
            if end < len(engine_ids):
                token = engine_ids[end]
    return position, token


def copy_engine_records(sample: Sample, origin: Provenance, requests: Sequence[Sampled]) -> None:
    """Copies log-probs, versions, servers, sampling masks and experts of sampled tokens.

    Other tokens keep their log-prob, and get the version and server of the token before them.
    """
    generations = [sampled.generation for sampled in requests]
    log_probs = list(sample.rollout_log_probs)
    versions: list[int | None] = []
    workers: list[int | None] = []
    for index, (number, offset) in enumerate(origin.pairs):
        version = None
        worker = None
        if number >= 0:
            generation = generations[number]
            log_probs[index] = generation.log_probs[offset]
            if generation.weight_versions:
                version = generation.weight_versions[offset]
            if generation.workers:
                worker = generation.workers[offset]
        versions.append(version)
        workers.append(worker)
    sample.rollout_log_probs = log_probs
    sample.weight_versions = _filled(versions) or sample.weight_versions
    sample.rollout_workers = _filled(workers) or sample.rollout_workers
    if any(generation.sampling_mask is not None for generation in generations):
        sample.sampling_mask = _sampling_mask(origin, generations)
    if origin.longest is not None:
        sample.rollout_routed_experts = _routing(sample, origin, requests, "routed_experts")
        sample.rollout_routing_weights = _routing(sample, origin, requests, "routing_weights")


def _filled(values: Sequence[Value | None]) -> list[Value]:
    """Replaces None by the last value before it, else by the first value; empty without values."""
    present = [value for value in values if value is not None]
    if not present:
        return []
    last = present[0]
    filled: list[Value] = []
    for value in values:
        if value is not None:
            last = value
        filled.append(last)
    return filled


def _sampling_mask(origin: Provenance, generations: Sequence[Generation]) -> SamplingMask:
    """Returns the candidates at each response token, from the request that sampled it."""
    masks = [generation.candidates for generation in generations]
    starts = list(accumulate(map(len, masks), initial=0))
    # Tokens that were not sampled have the number -1 and the offset 0: the last row.
    masks.append(SamplingMask.unrecorded(1))
    rows = [starts[number] + offset for number, offset in origin.pairs]
    return SamplingMask.cat(masks).select(torch.tensor(rows, dtype=torch.int64))


def _routing(
    sample: Sample, origin: Provenance, requests: Sequence[Sampled], name: str
) -> Tensor | None:
    """Returns a record per fed token of the longest request; sampled tokens take their request's.

    The engine feeds a token to sample the next one, so the last token has no record.
    """
    assert origin.longest is not None
    rows: Tensor | None = getattr(requests[origin.longest].generation, name)
    if rows is None:
        return None
    rows = rows[: origin.agreeing - 1].clone()
    first = len(sample.tokens) - sample.response_length
    for index, (number, offset) in enumerate(origin.pairs):
        if number in (-1, origin.longest):
            continue
        source = getattr(requests[number].generation, name)
        fed = first + index - 1
        row = len(requests[number].input_ids) + offset - 1
        if source is not None and row < len(source) and fed < len(rows):
            rows[fed] = source[row]
    return rows
