"""The metrics of a rollout."""

from collections.abc import Sequence

from slime_tis.rollout.sample import Sample, SampleStatus


def rollout_metrics(groups: Sequence[Sequence[Sample]], version: int) -> dict[str, float]:
    """Means over the samples of a rollout, as rollout/NAME.

    Args:
        groups: the scored samples of every prompt.
        version: of the training policy's weights, in optimizer steps, when training on the samples begins.
    """
    samples = [sample for group in groups for sample in group]
    staleness = [version - sampled_by for sample in samples for sampled_by in sample.trained_versions]
    metrics = {
        "raw_reward": _mean([sample.reward or 0.0 for sample in samples]),
        "response_len": _mean([sample.response_length for sample in samples]),
        "truncated": _mean([sample.status is SampleStatus.TRUNCATED for sample in samples]),
        "aborted": _mean([sample.status is SampleStatus.ABORTED for sample in samples]),
        "weight_staleness": _mean(staleness),
        "weight_staleness_max": float(max(staleness, default=0)),
        "mixed_versions": _mean([len(set(sample.trained_versions)) > 1 for sample in samples]),
        "zero_std_groups": _mean([len({sample.reward for sample in group}) == 1 for group in groups]),
    }
    metrics |= {f"reward/{key}": value for key, value in mean_parts(samples).items()}
    return {f"rollout/{name}": value for name, value in metrics.items()}


def mean_parts(samples: Sequence[Sample]) -> dict[str, float]:
    """The mean of every number of rewards that are dicts, over the samples that have it."""
    keys = dict.fromkeys(key for sample in samples for key in sample.reward_parts)
    return {key: _mean([sample.reward_parts[key] for sample in samples if key in sample.reward_parts]) for key in keys}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
