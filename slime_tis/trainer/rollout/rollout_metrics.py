"""The metrics of a rollout."""

from collections import Counter
from collections.abc import Sequence

from slime_tis.trainer.data.sample import Sample, SampleStatus, by_rollout


def rollout_metrics(
    groups: Sequence[Sequence[Sample]], version: int, *, are_episodes: bool = False
) -> dict[str, float]:
    """Returns means over the rollouts of a batch as rollout/NAME, without observations and failed calls.

    `version` is the version of the policy in optimizer steps; `are_episodes` adds
    `episode_metrics`.
    """
    rollouts = [rollout for group in groups for rollout in by_rollout(group)]
    made = [rollout for rollout in rollouts if not rollout[0].failure]
    samples = [sample for rollout in made for sample in rollout]
    staleness = [
        version - sampled_by for sample in samples for sampled_by in sample.trained_versions
    ]
    metrics = {
        "raw_reward": _mean([rollout_reward(rollout) for rollout in rollouts]),
        "response_len": _mean(
            [sum(sample.effective_response_length for sample in rollout) for rollout in made]
        ),
        "truncated": _mean([has_status(rollout, SampleStatus.TRUNCATED) for rollout in made]),
        "aborted": _mean([has_status(rollout, SampleStatus.ABORTED) for rollout in made]),
        "weight_staleness": _mean(staleness),
        "weight_staleness_max": float(max(staleness, default=0)),
        "mixed_versions": _mean(
            [len({v for one in rollout for v in one.trained_versions}) > 1 for rollout in made]
        ),
        "zero_std_groups": _mean(
            [len(set(map(rollout_reward, by_rollout(group)))) == 1 for group in groups]
        ),
    }
    metrics |= {f"reward/{key}": value for key, value in mean_parts(samples).items()}
    are_episodes |= any(
        one.turns != 1 or 0 in one.loss_mask or one.failure for group in groups for one in group
    )
    if are_episodes:
        metrics |= episode_metrics(rollouts, made)
    return {f"rollout/{name}": value for name, value in metrics.items()}


def episode_metrics(
    rollouts: Sequence[Sequence[Sample]], made: Sequence[Sequence[Sample]]
) -> dict[str, float]:
    """Returns outcomes of the calls of a generate function, and means over the successful calls `made`."""
    reasons = Counter(rollout[0].failure for rollout in rollouts if rollout[0].failure)
    tokens = sum(sample.effective_response_length for rollout in made for sample in rollout)
    retokenized = [sum(sample.retokenized for sample in rollout) for rollout in made]
    return {
        "generate_failed": 1 - len(made) / max(len(rollouts), 1),
        **{f"generate_failed/{reason}": float(count) for reason, count in reasons.items()},
        "retokenized": _mean([count > 0 for count in retokenized]),
        "retokenized_tokens": sum(retokenized) / max(tokens, 1),
        "segments": _mean([len(rollout) for rollout in made]),
        "turns": _mean([sum(sample.turns for sample in rollout) for rollout in made]),
        "observation_len": _mean(
            [
                sum(one.response_length - one.effective_response_length for one in rollout)
                for rollout in made
            ]
        ),
        "non_generation_time": _mean(
            [sum(sample.non_generation_time for sample in rollout) for rollout in made]
        ),
    }


def rollout_reward(rollout: Sequence[Sample]) -> float:
    """Returns the reward of a rollout, which is the sum over its segments."""
    return sum(sample.reward or 0.0 for sample in rollout)


def has_status(rollout: Sequence[Sample], status: SampleStatus) -> bool:
    """Returns whether a segment of a rollout has a status."""
    return any(sample.status is status for sample in rollout)


def mean_parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the mean of each number of dictionary rewards, over the samples that have it."""
    keys = dict.fromkeys(key for sample in samples for key in sample.reward_parts)
    return {
        key: _mean([sample.reward_parts[key] for sample in samples if key in sample.reward_parts])
        for key in keys
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
