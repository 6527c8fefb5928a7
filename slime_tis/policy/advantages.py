"""Rewards → advantages, per sample. Shapes: G groups (prompts) of n samples each."""

from collections.abc import Callable

from torch import Tensor

from slime_tis.policy.config import PolicyConfig

EPSILON = 1e-6  # keeps a group whose rewards are all equal at advantage 0 instead of 0/0


def grpo(rewards: Tensor, *, normalize_std: bool = True) -> Tensor:
    """Group-relative advantage.

        A_i = (r_i − mean_group r) / (std_group r + ε)

    Source: "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", Shao et al.
    (https://arxiv.org/abs/2402.03300), §4.1.2; without the division: "Understanding R1-Zero-Like Training", Liu et
    al. (https://arxiv.org/abs/2503.20783).

    Args:
        rewards: [G, n], n ≥ 2.
        normalize_std: divide by the group's standard deviation (the unbiased one).

    Returns:
        [G, n].
    """
    _check_groups(rewards, "grpo")
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if not normalize_std:
        return centred
    return centred / (rewards.std(dim=1, keepdim=True) + EPSILON)


def rloo(rewards: Tensor) -> Tensor:
    """Leave-one-out advantage: the baseline of a sample is the mean of its siblings.

        A_i = r_i − 1/(n−1) Σ_{j≠i} r_j = n/(n−1) · (r_i − mean_group r)

    Source: "Back to Basics: Revisiting REINFORCE Style Optimization", Ahmadian et al.
    (https://arxiv.org/abs/2402.14740), eq. 6.

    Args:
        rewards: [G, n], n ≥ 2.

    Returns:
        [G, n].
    """
    _check_groups(rewards, "rloo")
    n = rewards.shape[1]
    return (rewards - rewards.mean(dim=1, keepdim=True)) * (n / (n - 1))


def reinforce_plus_plus_baseline(rewards: Tensor, valid_tokens: Tensor) -> Tensor:
    """Group mean as the baseline, then one scale for the whole batch.

        A_i = whiten(r_i − mean_group r), mean and variance over all valid tokens of the batch

    Source: "REINFORCE++: Stabilizing Critic-Free Policy Optimization", Hu et al.
    (https://arxiv.org/abs/2501.03262), §3.

    Args:
        rewards: [G, n].
        valid_tokens: [G, n] trained tokens of each sample, the weights of the batch statistics.

    Returns:
        [G, n].
    """
    return whiten(rewards - rewards.mean(dim=1, keepdim=True), valid_tokens)


def whiten(values: Tensor, weights: Tensor) -> Tensor:
    """(x − μ) / (σ + ε) with weighted mean and (population) standard deviation; unchanged shape."""
    total = weights.sum().clamp_min(1)
    mean = (values * weights).sum() / total
    variance = ((values - mean).square() * weights).sum() / total
    return (values - mean) / (variance.sqrt() + EPSILON)


def advantages(rewards: Tensor, valid_tokens: Tensor, config: PolicyConfig) -> Tensor:
    """The advantages that the options ask for.

    Args:
        rewards: [G, n].
        valid_tokens: [G, n] trained tokens of each sample.
        config: the estimator and its options.

    Returns:
        [G, n].
    """
    found = ESTIMATORS[config.advantage_estimator](rewards, valid_tokens, config)
    return whiten(found, valid_tokens) if config.normalize_advantages else found


ESTIMATORS: dict[str, Callable[[Tensor, Tensor, PolicyConfig], Tensor]] = {
    "grpo": lambda rewards, _, config: grpo(rewards, normalize_std=not config.disable_grpo_std_normalization),
    "rloo": lambda rewards, _, config: rloo(rewards),
    "reinforce_plus_plus_baseline": lambda rewards, valid, _: reinforce_plus_plus_baseline(rewards, valid),
}
"""Estimators by their command-line name."""


def _check_groups(rewards: Tensor, name: str) -> None:
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"{name} compares samples of one prompt: rewards must be [groups, n ≥ 2], got {tuple(rewards.shape)}"
        )
