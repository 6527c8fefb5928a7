"""Filters of dynamic sampling: which groups of samples are trained on, and which are replaced by fresh prompts."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from slime_tis.trainer.data.sample import Sample

SMALLEST_DEVIATION = 1e-6
"""Standard deviation of the rewards of a group up to which they count as equal."""


@dataclass
class DynamicFilterOutput:
    """What a dynamic sampling filter says of a group, as slime has it."""

    keep: bool
    """Whether the group is trained on."""

    reason: str | None = None
    """Why it is not: counted as rollout/dynamic_filter/drop_REASON."""

    keep_when_insufficient: bool = False
    """Whether a group that is not to be kept is trained on all the same where dropping it would take another batch."""


def check_reward_nonzero_std(args: Namespace, samples: Sequence[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keeps the groups whose rewards differ: the others have advantage 0 and teach nothing.

        keep = std(r_1 … r_n) > 1e-6

    Source: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", Yu et al.
    (https://arxiv.org/abs/2503.14476), section 3.2.

    Args:
        args: The program's options, which are not used.
        samples: of one prompt, scored.
        kwargs: nothing that it needs.

    Returns:
        with the reason `zero_std_REWARD` where the rewards are equal.
    """
    rewards = [float(sample.get_reward_value(args) or 0.0) for sample in samples]
    keep = len(rewards) > 1 and stdev(rewards) > SMALLEST_DEVIATION
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: Namespace, samples: Sequence[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """Prefers groups whose rewards differ, and fills the rollout with others where a batch has too few of them.

    Args:
        args: The program's options, which are not used.
        samples: of one prompt, scored.
        kwargs: nothing that it needs.
    """
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = True
    return output
