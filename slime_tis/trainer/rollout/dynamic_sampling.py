"""Dynamic sampling: batches of scored groups in, as many accepted groups as a rollout trains on out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.engines.engine import RolloutUnavailable
from slime_tis.trainer.rollout.filter_hub import DynamicFilterOutput

Groups = list[list[Sample]]
DynamicFilter = Callable[[Sequence[list[Sample]]], list[DynamicFilterOutput]]
"""Judges the groups of a batch; a collective."""

PREFIX = "rollout/dynamic_filter/"
MOST_REASONS = 64
"""Reasons that are counted one by one; those beyond are counted together."""
OTHER = "other"


@dataclass(kw_only=True)
class Collected:
    """The groups of one rollout."""

    groups: Groups = field(default_factory=list)
    """Those that are trained on."""
    sampled: Groups = field(default_factory=list)
    """All that were sampled for them, in the order of their prompts."""
    metrics: dict[str, float] = field(default_factory=dict)
    """rollout/dynamic_filter/NAME; empty without a filter."""


def collect(batches: Iterator[Groups], size: int, judge: DynamicFilter | None, *, max_batches: int) -> Collected:
    """Takes batches until `size` groups are accepted; what is accepted beyond them is left out.

    Args:
        batches: scored groups, endlessly; numbered here over all batches.
        size: groups of the rollout.
        judge: the filter; None accepts all.
        max_batches: batches after which a filter that drops too much ends the run.

    Raises:
        RolloutUnavailable: too few groups are accepted within `max_batches`.
    """
    found = Collected()
    if judge is None:
        found.groups = found.sampled = next(batches)
        return found
    reasons: Counter[str] = Counter()
    accepted = dropped = 0
    for number, batch in enumerate(batches, start=1):
        renumber(batch, found.sampled)
        found.sampled += batch
        kept = accepted_groups(batch, judge(batch), size - accepted, reasons)
        accepted, dropped = accepted + len(kept), dropped + len(batch) - len(kept)
        found.groups += kept[: size - len(found.groups)]
        if accepted >= size:
            break
        if number == max_batches:
            raise RolloutUnavailable(
                f"the dynamic sampling filter accepted {accepted} of the {len(found.sampled)} prompts of {number} "
                f"batches, and a rollout needs {size} (dropped: {_listed(reasons)}); choose other prompts, raise "
                "--dynamic-sampling-max-batches, or use a filter with keep_when_insufficient."
            )
    rewards = [sample.reward or 0.0 for group in found.sampled for sample in group]
    found.metrics = {
        f"{PREFIX}batches": float(number),
        f"{PREFIX}sampled": float(len(found.sampled)),
        f"{PREFIX}dropped": float(dropped),
        f"{PREFIX}unused": float(accepted - size),
        f"{PREFIX}raw_reward": sum(rewards) / max(len(rewards), 1),
        **{f"{PREFIX}drop_{reason}": float(count) for reason, count in sorted(reasons.items())},
    }
    return found


def accepted_groups(
    batch: Sequence[list[Sample]], outputs: Sequence[DynamicFilterOutput], missing: int, reasons: Counter[str]
) -> Groups:
    """The groups of a batch that are trained on, in their order; counts the reasons of the others.

    A group with `keep_when_insufficient` is dropped as long as enough others are left to fill the rollout.

    Args:
        batch: scored groups.
        outputs: what the filter says of each.
        missing: groups that the rollout lacks.
        reasons: counts of earlier batches, to be added to.
    """
    kept, left = [], len(batch)
    for group, output in zip(batch, outputs, strict=True):
        if output.keep or (output.keep_when_insufficient and left <= missing):
            kept.append(group)
            continue
        left -= 1
        if output.reason:
            known = output.reason in reasons or len(reasons) < MOST_REASONS
            reasons[output.reason if known else OTHER] += 1
    return kept


def renumber(batch: Sequence[Sequence[Sample]], earlier: Sequence[Sequence[Sample]]) -> None:
    """Numbers the groups and samples of a batch on from those of the earlier batches of the rollout."""
    groups, samples = len(earlier), sum(map(len, earlier))
    for group in batch:
        for sample in group:
            sample.group_index = (sample.group_index or 0) + groups
            sample.index = (sample.index or 0) + samples
            if sample.rollout_id is not None:
                sample.rollout_id += samples


def _listed(reasons: Counter[str]) -> str:
    """The most frequent reasons, for the error message."""
    shown = [f"{reason} {count}" for reason, count in reasons.most_common(3)]
    return ", ".join(shown) or "no reason given"
