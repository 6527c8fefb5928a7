"""The metrics of a rollout."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from slime_tis.trainer.data.sample import Sample, SampleStatus, by_rollout


def rollout_metrics(
    groups: Sequence[Sequence[Sample]], version: int, *, are_episodes: bool = False
) -> dict[str, float]:
    """Returns means over the rollouts of a batch as rollout/NAME.

    Observations do not count as response tokens. Failed calls count only in the rewards.

    Args:
        groups: The samples per prompt.
        version: Version of the policy, in optimizer steps.
        are_episodes: Adds `episode_metrics`, also if no sample has a sign of several turns.
    """
    rollouts: list[list[Sample]] = []
    has_equal_rewards: list[bool] = []
    for group in groups:
        rollouts_of_group = by_rollout(group)
        rollouts += rollouts_of_group
        rewards = set(map(rollout_reward, rollouts_of_group))
        has_equal_rewards.append(len(rewards) == 1)

    successful = [rollout for rollout in rollouts if not rollout[0].failure]
    staleness: list[int] = []
    has_mixed_versions: list[bool] = []
    for rollout in successful:
        versions: list[int] = []
        for sample in rollout:
            versions += sample.trained_versions
        staleness += [version - sampled_by for sampled_by in versions]
        has_mixed_versions.append(len(set(versions)) > 1)

    truncated = [has_status(rollout, SampleStatus.TRUNCATED) for rollout in successful]
    aborted = [has_status(rollout, SampleStatus.ABORTED) for rollout in successful]
    metrics = {
        "raw_reward": _mean(list(map(rollout_reward, rollouts))),
        "response_len": _mean(list(map(_effective_length, successful))),
        "truncated": _mean(truncated),
        "aborted": _mean(aborted),
        "weight_staleness": _mean(staleness),
        "weight_staleness_max": float(max(staleness, default=0)),
        "mixed_versions": _mean(has_mixed_versions),
        "zero_std_groups": _mean(has_equal_rewards),
    }
    reward_parts = mean_parts(list(chain.from_iterable(successful)))
    for name, mean in reward_parts.items():
        metrics[f"reward/{name}"] = mean
    # A run keeps its columns if one batch has only answers of one turn.
    if are_episodes or any(map(_is_episode, chain.from_iterable(groups))):
        metrics |= episode_metrics(rollouts, successful)
    return {f"rollout/{name}": value for name, value in metrics.items()}


def episode_metrics(
    rollouts: Sequence[Sequence[Sample]], successful: Sequence[Sequence[Sample]]
) -> dict[str, float]:
    """Returns the outcomes of a generate function, and means over its successful calls."""
    metrics = {"generate_failed": 1 - len(successful) / max(len(rollouts), 1)}
    reasons = Counter(rollout[0].failure for rollout in rollouts)
    for reason, count in reasons.items():
        # None counts the successful calls.
        if reason:
            metrics[f"generate_failed/{reason}"] = float(count)

    retokenized: list[int] = []
    turns: list[int] = []
    observation_lengths: list[int] = []
    seconds: list[float] = []
    for rollout in successful:
        response_length = sum(sample.response_length for sample in rollout)
        observation_lengths.append(response_length - _effective_length(rollout))
        retokenized.append(sum(sample.retokenized for sample in rollout))
        turns.append(sum(sample.turns for sample in rollout))
        seconds.append(sum(sample.non_generation_time for sample in rollout))

    has_retokenized = [tokens > 0 for tokens in retokenized]
    tokens = sum(map(_effective_length, successful))
    return metrics | {
        "retokenized": _mean(has_retokenized),
        "retokenized_tokens": sum(retokenized) / max(tokens, 1),
        "segments": _mean(list(map(len, successful))),
        "turns": _mean(turns),
        "observation_len": _mean(observation_lengths),
        "non_generation_time": _mean(seconds),
    }


def pass_rates(groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Returns the probability that at least one of k samples of a prompt is correct, as pass@k.

        pass@k = mean over prompts of 1 − C(n − c, k) / C(n, k),   k = 1, 2, 4, … ≤ n

    A prompt has n rollouts, c of them correct: with a reward of exactly 1.

    Source: "Evaluating Large Language Models Trained on Code", Chen et al.
    (https://arxiv.org/abs/2107.03374), eq. 1; names and powers of two as in slime,
    observability/metric_utils.py, compute_pass_rate.

    Args:
        groups: The samples per prompt. A prompt with fewer than k rollouts does not count in
            pass@k.
    """
    counts: list[tuple[int, int]] = []
    for group in groups:
        rewards = list(map(rollout_reward, by_rollout(group)))
        counts.append((len(rewards), rewards.count(1.0)))
    largest = max((n for n, _ in counts), default=0)
    rates: dict[str, float] = {}
    # math.comb(n − c, k) is 0 if fewer than k answers are wrong.
    k = 1
    while k <= largest:
        estimates: list[float] = []
        for n, correct in counts:
            if n >= k:
                estimates.append(1 - math.comb(n - correct, k) / math.comb(n, k))
        rates[f"pass@{k}"] = _mean(estimates)
        k *= 2
    return rates


def rollout_reward(rollout: Sequence[Sample]) -> float:
    """Returns the reward of a rollout, which is the sum over its segments."""
    return sum(sample.reward or 0.0 for sample in rollout)


def has_status(rollout: Sequence[Sample], status: SampleStatus) -> bool:
    """Returns whether a segment of a rollout has a status."""
    return any(sample.status is status for sample in rollout)


def mean_parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the mean of every part of dictionary rewards, over the samples that have it."""
    values_by_name: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward_parts.items():
            values_by_name.setdefault(name, []).append(value)
    return {name: _mean(values) for name, values in values_by_name.items()}


def _effective_length(rollout: Sequence[Sample]) -> int:
    """Returns the number of trained tokens of a rollout."""
    return sum(sample.effective_response_length for sample in rollout)


def _is_episode(sample: Sample) -> bool:
    """Whether only a generate function can have made the sample."""
    return sample.turns != 1 or 0 in sample.loss_mask or bool(sample.failure)


def _mean(values: Sequence[float]) -> float:
    if not values:
        return 0.0
    return sum(values) / len(values)
