"""Rewards without normalization.

slime does this with `--disable-rewards-normalization`, and for REINFORCE++ without a baseline.
"""

from argparse import Namespace
from collections.abc import Sequence

from slime_tis.trainer.data.sample import Sample


def raw_rewards(args: Namespace, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Returns the rewards to log and the rewards to train on, which are the same.

    It is a function for `--custom-reward-post-process-path`.
    """
    # Every sample has a reward here; `or` is only for the type, which allows None.
    rewards = [float(sample.reward or 0.0) for sample in samples]
    return rewards, list(rewards)
