"""slime's --disable-rewards-normalization: rewards are advantages."""

from argparse import Namespace

from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.rewards.raw import raw_rewards


def test_rewards_are_returned_unchanged_twice():
    samples = [Sample(reward=value) for value in (0.0, -1.5, 3.0)]
    raw, trained = raw_rewards(Namespace(), samples)
    assert raw == trained == [0.0, -1.5, 3.0]
