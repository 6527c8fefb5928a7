"""Groups whose stragglers were aborted (`--partial-rollout`): which go on in the next batch, and which wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.engines.engine import RolloutEngine


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Places of groups among those that are unfinished; the others are dropped."""

    returned: list[int]
    """These go on in the next batch, in this order."""
    left: list[int]
    """These wait for a later one."""


Choose = Callable[[Sequence[list[Sample]], int], Chosen]
"""Chooses at most so many of the groups; a collective."""


@dataclass(kw_only=True)
class Unfinished:
    """The unfinished groups of a run: those that the engine has, and those that wait, which come first."""

    engine: RolloutEngine
    choose: Choose | None = None
    """None goes on with all of them."""
    waiting: list[list[Sample]] = field(default_factory=list)
    dropped: int = 0
    """Groups that were neither taken nor left, since `metrics`."""

    def groups(self) -> list[list[Sample]]:
        """All of them, as a checkpoint has them."""
        return [*self.waiting, *self.engine.unfinished()]

    def take(self, count: int) -> int:
        """Lets the engine go on with those that are chosen in its next batch; a collective.

        Args:
            count: Groups of that batch.

        Returns:
            how many of them are unfinished ones.
        """
        groups = self.groups()
        if self.choose is not None and groups:
            chosen = self.choose(groups, count)
            self.waiting = [groups[place] for place in chosen.left]
            self.dropped += len(groups) - len(chosen.returned) - len(chosen.left)
            self.engine.resume_unfinished([groups[place] for place in chosen.returned])
        return len(self.engine.unfinished())

    def metrics(self) -> dict[str, float]:
        """rollout/buffer_… of a run with a filter."""
        if self.choose is None:
            return {}
        found = {"rollout/buffer_waiting": float(len(self.waiting)), "rollout/buffer_dropped": float(self.dropped)}
        self.dropped = 0
        return found
