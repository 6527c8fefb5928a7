"""Requests in progress, and the cache slots that hold their sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.generation import Generation, Request, StopStrings


@dataclass(kw_only=True)
class Counts:
    """Counts of computed work: `reused` input tokens were in the cache, `preempted` requests lost their slot."""

    steps: int = 0
    decoded: int = 0
    passes: int = 0
    prefilled: int = 0
    reused: int = 0
    preempted: int = 0


@dataclass(eq=False, kw_only=True)
class Work:
    """A request in progress."""

    request: Request
    order: int
    """Position in the order of arrival."""
    limit: int
    """Maximum tokens to sample."""
    stop_token_ids: frozenset[int]
    stop: StopStrings
    uniforms: Iterator[float]
    distribution: tuple[float, float, int]
    """Temperature, top-p and top-k."""
    future: asyncio.Future[None] | None = None
    """Done once `generation` is set, or cancelled."""
    generation: Generation | None = None
    """The answer."""
    pending: list[int] = field(default_factory=list)
    """Tokens that are not in the cache; at least one while the request has a slot."""
    waited: int = 0
    """Decode steps since the request was ready for prefill."""
    token_ids: list[int] = field(default_factory=list)
    """Sampled so far."""
    log_probs: list[float] = field(default_factory=list)
    sets: list[Tensor] = field(default_factory=list)
    """Candidate tokens of each sampled token, if recorded; empty for the whole vocabulary."""

    @property
    def known(self) -> list[int]:
        """The input and the sampled tokens."""
        return self.request.token_ids + self.token_ids

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for the answer."""
        return self.future is not None and self.future.done()

    @property
    def sampling(self) -> Sampling:
        """How it is sampled."""
        return self.request.options.sampling


@dataclass(eq=False, kw_only=True)
class Slot:
    """A sequence in the cache."""

    index: int
    row: int
    """Row of the cache that contains the tokens; `index` after the next forward pass."""
    tokens: list[int] = field(default_factory=list)
    """Tokens whose keys and values are in the slot."""
    session: tuple[int, str | None] | None = None
    """The conversation that may continue; None once its sample is complete."""
    used: int = 0
    """Step of the last use."""
    logits: Tensor | None = None
    """Logits after the tokens, until the request samples from them."""
    work: Work | None = None
    """The request in the slot; None if the tokens are only kept for reuse."""

    @property
    def pending(self) -> list[int]:
        """The tokens of the request that are not in the cache."""
        return self.work.pending if self.work else []

    @property
    def cached_soon(self) -> list[int]:
        """The tokens in the cache after the prefill."""
        return self.tokens + self.pending

    def may_share(self, tokens: Sequence[int], count: int) -> bool:
        """Whether the slot may share the first `count` tokens: the last of them is equal."""
        last = count - 1
        if last < len(self.tokens):
            return self.tokens[last] == tokens[last]
        return last < len(self.tokens) + len(self.pending) and self.pending[last - len(self.tokens)] == tokens[last]
