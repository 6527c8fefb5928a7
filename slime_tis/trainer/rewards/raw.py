"""Rewards without normalization: slime's `--disable-rewards-normalization` and REINFORCE++ without a baseline."""

from argparse import Namespace
from collections.abc import Sequence

from slime_tis.trainer.data.sample import Sample


def raw_rewards(args: Namespace, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Returns the rewards of samples twice, as logged and as trained on; for `--custom-reward-post-process-path`."""
    rewards = [
        float(sample.reward or 0.0) for sample in samples
    ]  # scored before the hook: none is missing
    return rewards, list(rewards)
