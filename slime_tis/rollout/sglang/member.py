"""A server and what is known of it; and how long one waits for it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal

from slime_tis.rollout.sglang.server import Server


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for servers, in seconds."""

    recovery: float = 120.0
    """With no server left, until the run gives up."""

    first_wait: float = 0.5
    """Before a request is tried again; doubled with every further failure."""

    longest_wait: float = 30.0
    """Before a request is tried again, at most."""

    probe: float = 5.0
    """Between two looks at a server's health."""


@dataclass(eq=False)
class Member:
    """A server and what is known of it."""

    server: Server
    holds_weights: bool = True
    """False for a router."""
    state: Literal["live", "suspect", "dead", "returned"] = "dead"
    longest_input: int | None = None
    """Most tokens that it takes, where it tells."""
    version: int = -1
    """Of the weights it has; -1 where they are not known."""
    trusted: bool = True
    """Whether the version that it names is that of its weights: not after an update that broke off."""
    reason: str = "it has not answered yet"
    """Why it is dead or suspect."""
    since: float = field(default_factory=time.time)
    """When that began."""
    in_flight: int = 0
    """Requests that it is answering."""
    answered: bool = False
    """Whether it answered a request since the last look at its health."""
    seen: bool = False
    """Whether it ever answered."""
    strikes: int = 0
    """Health checks failed in a row."""
    pushes: int = 0
    """Updates of its weights that it took."""
    lost_pushes: int = 0
    """Updates of its weights failed in a row."""
    out: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is taken out: what it was asked is then given up."""
