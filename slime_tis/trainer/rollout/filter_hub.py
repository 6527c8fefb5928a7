"""Dynamic sampling: samples batches until a filter has accepted enough groups for a rollout."""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
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
    # Every sample has a reward here; `or` is only for the type, which allows None.
    rewards = [float(sample.get_reward_value(args) or 0.0) for sample in samples]
    if len(rewards) > 1 and stdev(rewards) > 1e-6:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: Namespace, samples: Sequence[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """Prefers groups whose rewards differ; other groups fill the rollout if these are too few."""
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = True
    return output


@dataclass(kw_only=True)
class Collected:
    """The groups of one rollout."""

    groups: Groups = field(default_factory=list)
    sampled: Groups = field(default_factory=list)
    """All sampled groups, in prompt order."""
    metrics: dict[str, float] = field(default_factory=dict)
    """rollout/dynamic_filter/NAME; empty without a filter."""


def collect(
    batches: Iterator[Groups], size: int, judge: DynamicFilter | None, *, max_batches: int
) -> Collected:
    """Takes scored batches until `size` groups are accepted.

    Accepted groups beyond `size` are counted as unused.

    Raises:
        RolloutUnavailable: `max_batches` batches have too few accepted groups.
    """
    rollout = Collected()
    if judge is None:
        rollout.groups = rollout.sampled = next(batches)
        return rollout
    reasons: Counter[str] = Counter()
    for number, batch in enumerate(batches, start=1):
        _continue_numbers(batch, rollout.sampled)
        rollout.sampled += batch
        missing = size - len(rollout.groups)
        rollout.groups += accepted_groups(batch, judge(batch), missing, reasons)
        accepted = len(rollout.groups)
        if accepted >= size:
            break
        if number == max_batches:
            raise RolloutUnavailable(
                f"the dynamic sampling filter accepted {accepted} of the {len(rollout.sampled)}"
                f" prompts of {number} batches, and a rollout needs {size} (dropped:"
                f" {dict(reasons.most_common(3))}); choose other prompts, raise"
                " --dynamic-sampling-max-batches, or use a filter with keep_when_insufficient."
            )
    # The last batch is sampled as one, so it may have more groups than are missing.
    del rollout.groups[size:]
    rewards = [sample.reward or 0.0 for sample in chain.from_iterable(rollout.sampled)]
    rollout.metrics = {
        f"{PREFIX}batches": float(number),
        f"{PREFIX}sampled": float(len(rollout.sampled)),
        f"{PREFIX}dropped": float(len(rollout.sampled) - accepted),
        f"{PREFIX}unused": float(accepted - size),
        f"{PREFIX}raw_reward": sum(rewards) / max(len(rewards), 1),
    }
    for reason, count in sorted(reasons.items()):
        rollout.metrics[f"{PREFIX}drop_{reason}"] = float(count)
    return rollout


def _continue_numbers(batch: Groups, earlier: Groups) -> None:
    """Numbers the groups and samples of a batch after those of the rollout's earlier batches."""
    # Every batch is numbered from 0.
    earlier_groups = len(earlier)
    earlier_samples = sum(map(len, earlier))
    for sample in chain.from_iterable(batch):
        sample.group_index = (sample.group_index or 0) + earlier_groups
        sample.index = (sample.index or 0) + earlier_samples
        if sample.rollout_id is not None:
            sample.rollout_id += earlier_samples


def accepted_groups(
    batch: Sequence[list[Sample]],
    outputs: Sequence[DynamicFilterOutput],
    missing: int,
    reasons: Counter[str],
) -> Groups:
    """Returns the accepted groups of a batch in order, and counts why others are dropped.

    A group with `keep_when_insufficient` is accepted only if too few other groups remain to fill
    the rollout, which needs `missing` groups.
    """
    kept = []
    remaining = len(batch)
    for group, output in zip(batch, outputs, strict=True):
        if output.keep or (output.keep_when_insufficient and remaining <= missing):
            kept.append(group)
            continue
        remaining -= 1
        if output.reason:
            reason = output.reason
            # A reason may contain a number, and each reason is a column in every tracker.
            if reason not in reasons and len(reasons) >= MAX_REASONS:
                reason = "other"
            reasons[reason] += 1
    return kept
