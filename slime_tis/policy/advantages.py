"""Rewards → advantages, per sample. Shapes: G groups (prompts) of n samples each."""

from collections.abc import Callable

import torch
from torch import Tensor

from slime_tis.policy.config import PolicyConfig

MAX_REWARD = 1e150
"""Largest magnitude of a reward: the squares of larger ones overflow in float64, and all advantages would be 0."""
EPSILON = 1e-6  # keeps a group whose rewards are all equal at advantage 0 instead of 0/0


def grpo(rewards: Tensor, *, normalize_std: bool = True, accepted: Tensor | None = None) -> Tensor:
    """Group-relative advantage.

        A_i = (r_i − mean_group r) / (std_group r + ε)

    Source: "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", Shao et al.
    (https://arxiv.org/abs/2402.03300), §4.1.2; without the division: "Understanding R1-Zero-Like Training", Liu et
    al. (https://arxiv.org/abs/2503.20783).

    Args:
        rewards: [G, n], n ≥ 2.
        normalize_std: divide by the group's standard deviation (the unbiased one).
        accepted: [G, n] bool, the samples that the mean and the deviation are of; the others get 0. None for all.

    Returns:
        [G, n].
    """
    centred, count = _centred(rewards, accepted, "grpo")
    if not normalize_std:
        return centred
    deviation = (centred.square().sum(1, keepdim=True) / (count - 1).clamp_min(1)).sqrt()
    return centred / (deviation + EPSILON)


def rloo(rewards: Tensor, *, accepted: Tensor | None = None) -> Tensor:
    """Leave-one-out advantage: the baseline of a sample is the mean of its siblings.

        A_i = r_i − 1/(n−1) Σ_{j≠i} r_j = n/(n−1) · (r_i − mean_group r)

    Source: "Back to Basics: Revisiting REINFORCE Style Optimization", Ahmadian et al.
    (https://arxiv.org/abs/2402.14740), eq. 6.

    Args and returns as `grpo`.
    """
    centred, count = _centred(rewards, accepted, "rloo")
    return centred * (count / (count - 1).clamp_min(1))


def reinforce_plus_plus_baseline(rewards: Tensor, valid_tokens: Tensor, *, accepted: Tensor | None = None) -> Tensor:
    """Group mean as the baseline, then one scale for the whole batch.

        A_i = whiten(r_i − mean_group r), mean and variance over all valid tokens of the batch

    Source: "REINFORCE++: Stabilizing Critic-Free Policy Optimization", Hu et al.
    (https://arxiv.org/abs/2501.03262), §3.

    Args and returns as `grpo`; `valid_tokens` [G, n] are the trained tokens of each sample, the weights of the batch
    statistics.
    """
    centred, _ = _centred(rewards, accepted, "reinforce_plus_plus_baseline")
    return whiten(centred, valid_tokens if accepted is None else valid_tokens * accepted)


def optimal_token_baseline(
    rewards_BT: Tensor,
    mask_BT: Tensor,
    group_B: Tensor,
    log_probs_BT: Tensor,
    sum_pi_squared_BT: Tensor,
    *,
    weights_BT: Tensor | None = None,
    zero_tail: bool = True,
) -> Tensor:
    """Advantages whose baseline at each position minimizes the variance of the gradient of the prompt's samples.

        A_t = G_t − B_t,   B_t = Σ_i G_it W_it / Σ_i W_it,   W_it = Σ_{j≤t} w_ij² e_ij,   e = (1 − π)² + Σ_{v≠y} π_v²

    G_t is the sum of the rewards from t on, and e the squared norm of the gradient of log π(y) in the logits.

    Source: verl, core_algos.py, compute_optimal_token_baseline_advantage, which computes e as 1 − 2π + Σ_v π_v² in
    float32: for sure tokens that is 0, and so is the baseline. Here Σ_{v≠y} π_v² is at most (1 − π)², as it must be.

    Args:
        rewards_BT: reward of each token.
        mask_BT: nonzero at tokens of the loss.
        group_B: int64, number of the prompt of each sample.
        log_probs_BT: log π of the sampled token y under the policy before the step.
        sum_pi_squared_BT: Σ_v π_v² over the vocabulary, at each token.
        weights_BT: importance weights of the tokens; None for 1.
        zero_tail: no baseline where the longest sample of a prompt is longer than all others, as in verl.

    Returns:
        float64 [B, T], 0 where masked; without baseline for the only sample of a prompt.
    """
    mask_BT = (mask_BT != 0).double()
    returns_BT = (rewards_BT.double() * mask_BT).flip(1).cumsum(1).flip(1)
    log_probs_BT = torch.where(mask_BT > 0, log_probs_BT.double(), 0.0)
    rest_BT = log_probs_BT.expm1().square()
    others_BT = (sum_pi_squared_BT.double() - (2 * log_probs_BT).exp()).clamp_min(0).minimum(rest_BT)
    energy_BT = (rest_BT + others_BT) * (1.0 if weights_BT is None else weights_BT.double().square())
    path_BT = torch.where(mask_BT > 0, energy_BT, 0.0).cumsum(1) * mask_BT
    baseline_BT = torch.zeros_like(returns_BT)
    for group in group_B.unique():
        members = (group_B == group).nonzero().squeeze(1)
        if len(members) < 2:
            continue
        total_T = path_BT[members].sum(0)
        weighted_T = (returns_BT[members] * path_BT[members]).sum(0)
        baseline_BT[members] = torch.where(total_T > 0, weighted_T / total_T, 0.0)
        lengths, order = mask_BT[members].sum(1).sort()
        if zero_tail and lengths[-1] > lengths[-2]:
            baseline_BT[members[order[-1]], int(lengths[-2]) :] = 0.0
    return (returns_BT - baseline_BT) * mask_BT


def whiten(values: Tensor, weights: Tensor) -> Tensor:
    """(x − μ) / (σ + ε) with weighted mean and (population) standard deviation; 0 where the weight is."""
    total = weights.sum().clamp_min(1)
    mean = (values * weights).sum() / total
    variance = ((values - mean).square() * weights).sum() / total
    return torch.where(weights > 0, (values - mean) / (variance.sqrt() + EPSILON), 0.0)


def advantages(
    rewards: Tensor,
    valid_tokens: Tensor,
    config: PolicyConfig,
    accepted: Tensor | None = None,
    given: Tensor | None = None,
) -> Tensor:
    """The advantages [G, n] that the options ask for; `given` ones replace the estimator's. Arguments as above."""
    values = given
    if values is None:
        values = ESTIMATORS[config.advantage_estimator](rewards, valid_tokens, config, accepted)
    if not config.normalize_advantages:
        return values
    return whiten(values, valid_tokens if accepted is None else valid_tokens * accepted)


ESTIMATORS: dict[str, Callable[[Tensor, Tensor, PolicyConfig, Tensor | None], Tensor]] = {
    "grpo": lambda rewards, _, config, accepted: grpo(
        rewards, normalize_std=not config.disable_grpo_std_normalization, accepted=accepted
    ),
    "rloo": lambda rewards, _, config, accepted: rloo(rewards, accepted=accepted),
    "reinforce_plus_plus_baseline": lambda rewards, valid, _, accepted: reinforce_plus_plus_baseline(
        rewards, valid, accepted=accepted
    ),
}
"""Estimators by their command-line name."""


def _centred(rewards: Tensor, accepted: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """(rewards less the mean of the accepted samples of their group, 0 where not accepted; their number [G, 1])."""
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        shape = tuple(rewards.shape)
        raise ValueError(f"{name} compares samples of one prompt: rewards must be [groups, n ≥ 2], got {shape}")
    weight = torch.ones_like(rewards) if accepted is None else accepted.to(rewards)
    count = weight.sum(1, keepdim=True)
    mean = (rewards * weight).sum(1, keepdim=True) / count.clamp_min(1)
    return (rewards - mean) * weight, count
