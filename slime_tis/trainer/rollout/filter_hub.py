"""Filters of dynamic sampling: which groups of samples are trained on, and which are replaced by fresh prompts."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from slime_tis.trainer.data.sample import Sample

MIN_DEVIATION = 1e-6


@dataclass
class DynamicFilterOutput:
    """slime's verdict of a dynamic sampling filter."""

    keep: bool
    reason: str | None = None
    """Why the group is dropped: counted as rollout/dynamic_filter/drop_REASON."""
    keep_when_insufficient: bool = False
    """Whether to train on a dropped group rather than to sample another batch."""


def check_reward_nonzero_std(args: Namespace, samples: Sequence[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keeps groups whose rewards differ: the others have advantage 0.

        keep = std(r_1 … r_n) > 1e-6

    Source: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", Yu et al.
    (https://arxiv.org/abs/2503.14476), section 3.2.
    """
    rewards = [float(sample.get_reward_value(args) or 0.0) for sample in samples]
    keep = len(rewards) > 1 and stdev(rewards) > MIN_DEVIATION
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: Namespace, samples: Sequence[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """Prefers groups whose rewards differ; others fill the rollout if the batch has too few of them."""
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = True
    return output
