"""Dynamic sampling: filters of scored groups, and batches until enough groups for a rollout are accepted."""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import stdev
from typing import Any

from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable

Groups = list[list[Sample]]
PREFIX = "rollout/dynamic_filter/"
MAX_REASONS = 64
"""Distinct reasons with a separate metric; further reasons count as `other`."""


@dataclass
class DynamicFilterOutput:
    """slime's verdict of a dynamic sampling filter."""

    keep: bool
    reason: str | None = None
    """Why the group is dropped: counted as rollout/dynamic_filter/drop_REASON."""
    keep_when_insufficient: bool = False
    """Whether to train on a dropped group rather than to sample another batch."""


DynamicFilter = Callable[[Sequence[list[Sample]]], list[DynamicFilterOutput]]
"""Judges the groups of a batch; a collective."""


def check_reward_nonzero_std(
    args: Namespace, samples: Sequence[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """Keeps groups whose rewards differ: the others have advantage 0.

        keep = std(r_1 … r_n) > 1e-6

    Source: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", Yu et al.
    (https://arxiv.org/abs/2503.14476), section 3.2.
    """
    rewards = [float(sample.get_reward_value(args) or 0.0) for sample in samples]
    keep = len(rewards) > 1 and stdev(rewards) > 1e-6
    return DynamicFilterOutput(
        keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}"
    )


def check_reward_nonzero_std_with_fallback(
    args: Namespace, samples: Sequence[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """Prefers groups whose rewards differ; others fill the rollout if the batch has too few of them."""
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = True
    return output


@dataclass(kw_only=True)
class Collected:
    """The groups of one rollout."""

    groups: Groups = field(default_factory=list)
    sampled: Groups = field(default_factory=list)
    """All sampled groups, in the order of their prompts."""
    metrics: dict[str, float] = field(default_factory=dict)
    """rollout/dynamic_filter/NAME; empty without a filter."""


def collect(
    batches: Iterator[Groups], size: int, judge: DynamicFilter | None, *, max_batches: int
) -> Collected:
    """Takes scored batches until `size` groups are accepted; further accepted groups are not used."""
    rollout = Collected()
    if judge is None:
        rollout.groups = rollout.sampled = next(batches)
        return rollout
    reasons: Counter[str] = Counter()
    accepted = dropped = 0
    for number, batch in enumerate(batches, start=1):
        earlier_samples = sum(map(len, rollout.sampled))
        for sample in (
            sample for group in batch for sample in group
        ):  # continues the numbers of earlier batches
            sample.group_index = (sample.group_index or 0) + len(rollout.sampled)
            sample.index = (sample.index or 0) + earlier_samples
            if sample.rollout_id is not None:
                sample.rollout_id += earlier_samples
        rollout.sampled += batch
        kept = accepted_groups(batch, judge(batch), size - accepted, reasons)
        accepted, dropped = accepted + len(kept), dropped + len(batch) - len(kept)
        rollout.groups += kept[: size - len(rollout.groups)]
        if accepted >= size:
            break
        if number == max_batches:
            raise RolloutUnavailable(
                f"the dynamic sampling filter accepted {accepted} of the {len(rollout.sampled)}"
                f" prompts of {number} batches, and a rollout needs {size} (dropped:"
                f" {dict(reasons.most_common(3))}); choose other prompts, raise"
                " --dynamic-sampling-max-batches, or use a filter with keep_when_insufficient."
            )
    rewards = [sample.reward or 0.0 for group in rollout.sampled for sample in group]
    rollout.metrics = {
        f"{PREFIX}batches": float(number),
        f"{PREFIX}sampled": float(len(rollout.sampled)),
        f"{PREFIX}dropped": float(dropped),
        f"{PREFIX}unused": float(accepted - size),
        f"{PREFIX}raw_reward": sum(rewards) / max(len(rewards), 1),
        **{f"{PREFIX}drop_{reason}": float(count) for reason, count in sorted(reasons.items())},
    }
    return rollout


def accepted_groups(
    batch: Sequence[list[Sample]],
    outputs: Sequence[DynamicFilterOutput],
    missing: int,
    reasons: Counter[str],
) -> Groups:
    """Returns the accepted groups of a batch in order, and counts the reasons of the others.

    A group with `keep_when_insufficient` is accepted only if too few other groups remain to fill
    the rollout, which needs `missing` groups.
    """
    kept, remaining = [], len(batch)
    for group, output in zip(batch, outputs, strict=True):
        if output.keep or (output.keep_when_insufficient and remaining <= missing):
            kept.append(group)
            continue
        remaining -= 1
        if output.reason:
            known = output.reason in reasons or len(reasons) < MAX_REASONS
            reasons[output.reason if known else "other"] += 1
    return kept
