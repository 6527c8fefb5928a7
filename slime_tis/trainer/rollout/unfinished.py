"""Partially generated groups (`--partial-rollout`): the next batch resumes some, the others wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.engines.engine import RolloutEngine


@dataclass(frozen=True, kw_only=True)
class BufferChoice:
    """Indices into the list of unfinished groups; the other groups are dropped."""

    returned: list[int]
    left: list[int]


Choose = Callable[[Sequence[list[Sample]], int], BufferChoice]
"""Chooses at most this number of groups; a collective."""


@dataclass(kw_only=True)
class Unfinished:
    """The unfinished groups of a run: waiting groups first, then the groups that the engine resumes."""

    engine: RolloutEngine
    choose: Choose | None = None
    """The buffer filter; None resumes every group."""
    waiting: list[list[Sample]] = field(default_factory=list)
    dropped: int = 0
    """Groups dropped since the last call of `metrics`."""

    def groups(self) -> list[list[Sample]]:
        """Returns all unfinished groups, for a checkpoint."""
        return [*self.waiting, *self.engine.unfinished()]

    def take(self, count: int) -> int:
        """Chooses the groups that the next batch of `count` resumes, and returns their number; a collective."""
        groups = self.groups()
        if self.choose is not None and groups:
            chosen = self.choose(groups, count)
            self.waiting = [groups[index] for index in chosen.left]
            self.dropped += len(groups) - len(chosen.returned) - len(chosen.left)
            self.engine.resume_unfinished([groups[index] for index in chosen.returned])
        return len(self.engine.unfinished())

    def metrics(self) -> dict[str, float]:
        """Returns rollout/buffer_… with a buffer filter, and resets the counts."""
        if self.choose is None:
            return {}
        metrics = {"rollout/buffer_waiting": float(len(self.waiting)), "rollout/buffer_dropped": float(self.dropped)}
        self.dropped = 0
        return metrics
