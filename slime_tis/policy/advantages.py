"""Rewards → advantages, per sample or token. Shapes: G groups (prompts) of n samples each."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_tis.correction.context_parallel import ONE_RANK, Ranks
from slime_tis.policy.config import PolicyConfig

MAX_REWARD = 1e150
"""Largest magnitude of a reward: the squares of larger ones overflow in float64, and all advantages
would be 0."""
EPSILON = 1e-6
"""Added to standard deviations, so that equal rewards get advantage 0 instead of 0/0."""
ROUNDING = 1e-12
"""An advantage below this share of the return is rounding: all returns are equal."""


def grpo(rewards: Tensor, *, normalize_std: bool = True, accepted: Tensor | None = None) -> Tensor:
    """Group-relative advantage.

        A_i = (r_i − mean_group r) / (std_group r + ε)

    Source: "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    Shao et al. (https://arxiv.org/abs/2402.03300), §4.1.2; without the division: "Understanding
    R1-Zero-Like Training", Liu et al. (https://arxiv.org/abs/2503.20783).

    Args:
        rewards: [G, n], n ≥ 2.
        normalize_std: Divide by the group's (unbiased) standard deviation.
        accepted: [G, n] bool: samples in mean and deviation; other samples get 0. None for all.

    Returns:
        [G, n] in the dtype of the rewards, computed in float64; exactly 0 in a group of equal
        rewards.

    Raises:
        ValueError: There are fewer than two samples, or the reward of an accepted sample is not
            finite.
    """
    centred, count = _centred(rewards, accepted, "grpo")
    if not normalize_std:
        return _as(rewards, centred)
    deviation = (centred.square().sum(1, keepdim=True) / (count - 1).clamp_min(1)).sqrt()
    return _as(rewards, centred / (deviation + EPSILON))


def rloo(rewards: Tensor, *, accepted: Tensor | None = None) -> Tensor:
    """Leave-one-out advantage: the baseline is the mean of the group's other samples.

        A_i = r_i − 1/(n−1) Σ_{j≠i} r_j = n/(n−1) · (r_i − mean_group r)

    Source: "Back to Basics: Revisiting REINFORCE Style Optimization", Ahmadian et al.
    (https://arxiv.org/abs/2402.14740), eq. 6.

    Args, returns and raises as `grpo`.
    """
    centred, count = _centred(rewards, accepted, "rloo")
    return _as(rewards, centred * (count / (count - 1).clamp_min(1)))


def reinforce_plus_plus_baseline(
    rewards: Tensor, valid_tokens: Tensor, *, accepted: Tensor | None = None
) -> Tensor:
    """Group mean as the baseline, then one scale for the complete batch.

        A_i = whiten(r_i − mean_group r), mean and variance over all valid tokens of the batch

    Source: "REINFORCE++: Stabilizing Critic-Free Policy Optimization", Hu et al.
    (https://arxiv.org/abs/2501.03262), §3.

    Args, returns and raises as `grpo`; `valid_tokens` [G, n] are numbers of trained tokens, the
    weights of the batch statistics.
    """
    centred, _ = _centred(rewards, accepted, "reinforce_plus_plus_baseline")
    return _as(rewards, whiten(centred, _counted_tokens(valid_tokens, accepted)))


def reinforce_plus_plus(
    rewards: Tensor, valid_tokens: Tensor, *, accepted: Tensor | None = None
) -> Tensor:
    """One baseline and one scale for the complete batch.

        A_i = whiten(r_i), mean and variance over all valid tokens of the batch

    Source: "REINFORCE++: Stabilizing Critic-Free Policy Optimization", Hu et al.
    (https://arxiv.org/abs/2501.03262), §3, without KL and discount; `token_returns` has these.

    Args, returns and raises as `reinforce_plus_plus_baseline`, for n ≥ 1.
    """
    weights = _counted_tokens(valid_tokens, accepted)
    is_counted = torch.ones_like(rewards) * weights > 0
    _refuse_nonfinite(rewards, is_counted, "reinforce_plus_plus")
    return _as(rewards, whiten(rewards.double(), weights))


def token_returns(
    rewards_B: Tensor, kl_BT: Tensor, mask_BT: Tensor, *, kl_coef: float, gamma: float
) -> Tensor:
    """Discounted sums of the rewards from each token on, with the KL as a cost per token.

        G_t = Σ_{j ≥ t} γ^{j−t} r_j,   r_j = −β · kl_j, and at the last trained token r_j + R

    The discount counts all tokens, the KL only trained ones.

    Source: "REINFORCE++", Hu et al. (https://arxiv.org/abs/2501.03262), eq. 9 and 10; slime,
    utils/ppo_utils.py, get_reinforce_plus_plus_returns.

    Args:
        rewards_B: R per sample.
        kl_BT: Estimate of the KL from the reference policy per token, nats.
        mask_BT: Nonzero at trained tokens; padded with 0.
        kl_coef: β.
        gamma: γ.

    Returns:
        float64 [B, T]; a sample without trained tokens has 0.
    """
    trained_BT = mask_BT != 0
    # The number of trained tokens from each token on is 1 at the last trained token.
    is_last_BT = trained_BT & (trained_BT.flip(1).cumsum(1).flip(1) == 1)
    returns_BT = torch.where(trained_BT, -kl_coef * kl_BT.double(), 0.0)
    returns_BT = returns_BT + torch.where(is_last_BT, rewards_B.double()[:, None], 0.0)
    # Each pass doubles the number of tokens in every sum.
    width = 1
    while width < returns_BT.shape[1]:
        later_BT = torch.zeros_like(returns_BT)
        later_BT[:, :-width] = returns_BT[:, width:]
        returns_BT = returns_BT + gamma**width * later_BT
        width *= 2
    return returns_BT


def optimal_token_baseline(
    rewards_BT: Tensor,
    mask_BT: Tensor,
    group_B: Tensor,
    log_probs_BT: Tensor,
    sum_pi_squared_BT: Tensor,
    *,
    weights_BT: Tensor | None = None,
    zero_tail: bool = True,
    ranks: Ranks = ONE_RANK,
) -> Tensor:
    """Advantages with the baseline at each position that minimizes the gradient's variance.

        A_t = G_t − B_t,   B_t = Σ_i G_it W_it / Σ_i W_it,   W_it = Σ_{j≤t} w_ij² e_ij,
        e = (1 − π)² + Σ_{v≠y} π_v²

    G_t is the sum of the rewards from t on, and e is `score_norm_squared`, or 0 if that is not
    finite.

    Source: verl, core_algos.py, compute_optimal_token_baseline_advantage.

    Args:
        rewards_BT: Rewards per token.
        mask_BT: Nonzero at trained tokens.
        group_B: int64: a sample's prompt, numbered from 0 and the same on all ranks.
        log_probs_BT: log π of the sampled token y under the policy before the step.
        sum_pi_squared_BT: Σ_v π_v² over the vocabulary, per token.
        weights_BT: Importance weights per token; None for 1.
        zero_tail: As in verl, no baseline at positions that only a prompt's longest sample has.
        ranks: Data-parallel ranks. They may have samples of the same prompts, and other lengths T.

    Returns:
        float64 [B, T]: 0 at masked tokens, and at positions where all samples of a prompt have the
        same return. If a prompt has one sample, there is no baseline.

    Raises:
        ValueError: The reward of a trained token is not finite.
    """
    _refuse_nonfinite(rewards_BT, mask_BT != 0, "optimal_token_baseline")
    trained_BT = torch.where(mask_BT != 0, rewards_BT.double(), 0.0)
    mask_BT = (mask_BT != 0).double()
    # Sums from each token to the end: torch has only sums from the start.
    returns_BT = trained_BT.flip(1).cumsum(1).flip(1)
    energy_BT = score_norm_squared(log_probs_BT, sum_pi_squared_BT)
    if weights_BT is not None:
        energy_BT = energy_BT * weights_BT.double().square()
    counts_BT = (mask_BT > 0) & energy_BT.isfinite()
    path_BT = torch.where(counts_BT, energy_BT, 0.0).cumsum(1) * mask_BT
    baseline_BT = _token_baseline(returns_BT, path_BT, mask_BT, group_B, zero_tail, ranks)
    advantages_BT = (returns_BT - baseline_BT) * mask_BT
    return torch.where(advantages_BT.abs() > ROUNDING * returns_BT.abs(), advantages_BT, 0.0)


def _token_baseline(
    returns_BT: Tensor,
    path_BT: Tensor,
    mask_BT: Tensor,
    group_B: Tensor,
    zero_tail: bool,
    ranks: Ranks,
) -> Tensor:
    """B_t of `optimal_token_baseline` for each sample, from G_t and W_t; 0 without a baseline."""
    position_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    is_longer_BT = position_T < mask_BT.sum(1, keepdim=True)
    columns = torch.stack([path_BT, returns_BT * path_BT, is_longer_BT.double()], 2)
    # Ranks may have other samples and lengths: all use the largest size, so that sums add up.
    local_groups = 0
    if len(group_B):
        local_groups = int(group_B.max()) + 1
    size = torch.tensor([local_groups, mask_BT.shape[1]], device=mask_BT.device)
    groups, width = ranks.over_data(size, "max").tolist()
    padding = columns.new_zeros(len(columns), width - columns.shape[1], 3)
    # The last column, of ones, counts samples.
    columns = pad(torch.cat([columns, padding], 1), (0, 1), value=1.0)
    local_sums = columns.new_zeros(groups, width, 4).index_add_(0, group_B, columns)
    sums = ranks.over_data(local_sums)
    total_BT, weighted_BT, longer_BT, samples_BT = sums[group_B, : mask_BT.shape[1]].unbind(2)
    baseline_BT = torch.where((total_BT > 0) & (samples_BT > 1), weighted_BT / total_BT, 0.0)
    if zero_tail:
        # No baseline for the longest sample after the last token of the second longest one.
        is_longest_B1 = (is_longer_BT & (longer_BT == 1)).any(1, keepdim=True)
        baseline_BT = torch.where(is_longest_B1 & (longer_BT <= 1), 0.0, baseline_BT)
    return baseline_BT


def score_norm_squared(log_probs: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """Squared norm of the gradient of log π(y) in the logits, float64 of any shape.

        e = (1 − π)² + Σ_{v≠y} π_v²

    verl computes 1 − 2π + Σ_v π_v² in float32, which is 0 for nearly deterministic tokens.
    """
    log_probs = log_probs.double()
    own = log_probs.expm1().square()
    # The second term is at most (1 − π)²; rounding may leave this range.
    others = sum_pi_squared.double() - (2 * log_probs).exp()
    return own + others.clamp_min(0).minimum(own)


def minimum_variance_baseline(
    rewards_B: Tensor,
    group_B: Tensor,
    gradient_norms_B: Tensor,
    *,
    log_weights_B: Tensor | None = None,
) -> Tensor:
    """Advantages with one baseline per prompt that minimizes the weighted gradient's variance.

        A_i = R_i − b,   b = Σ_i w_i² ‖g_i‖² R_i / Σ_i w_i² ‖g_i‖²   over the samples of a prompt

    Source: "VCPO", Huang et al. (https://arxiv.org/abs/2602.17616); the authors'
    staleness_utils.py, compute_opob_baseline. Weights are log-weights here: in the authors' code, a
    sequence ratio beyond float32 makes the baseline NaN.

    Args:
        rewards_B: Rewards per sample.
        group_B: int64: number of a sample's prompt.
        gradient_norms_B: ‖g_i‖, the norm of the gradient of the sample's log π in the parameters;
            or the root of Σ_t `score_norm_squared`, the norm in the logits.
        log_weights_B: log w_i per sample, for example Σ_t Δ_t; None for 0.

    Returns:
        float64 [B]: exactly 0 if a prompt has equal rewards, without baseline if all gradients of a
        prompt are 0.

    Raises:
        ValueError: A reward is not finite.
    """
    _refuse_nonfinite(
        rewards_B, torch.ones_like(rewards_B, dtype=torch.bool), "minimum_variance_baseline"
    )
    log_share_B = 2 * gradient_norms_B.double().log()
    if log_weights_B is not None:
        log_share_B = log_share_B + 2 * log_weights_B.double()
    advantages_B = rewards_B.double().clone()
    for group in group_B.unique():
        members = group_B == group
        logits = log_share_B[members]
        if not logits.isneginf().all():
            rewards = rewards_B[members].double()
            # Relative to the lowest reward, so that equal rewards give exactly 0.
            relative = rewards - rewards.min()
            # The softmax of log w²‖g‖² is w²‖g‖² / Σ w²‖g‖², without overflow.
            advantages_B[members] = relative - logits.softmax(0) @ relative
    return advantages_B


def whiten(values: Tensor, weights: Tensor, ranks: Ranks = ONE_RANK) -> Tensor:
    """(x − μ) / (σ + ε) with weighted mean and (population) standard deviation.

    It is 0 at weight 0, and exactly 0 if all values with a weight are equal. The computation is in
    float64, the result in the dtype of the values. Data-parallel `ranks` have other values of the
    same batch.
    """
    if not values.numel():
        return values
    counted = weights > 0
    weight = weights.double()
    # Relative to the lowest value, so that equal values give exactly 0.
    lowest = torch.where(counted, values.double(), torch.inf).amin()
    lowest = ranks.over_data(lowest, "min")
    relative = torch.where(counted, values.double() - lowest, 0.0)
    sums = ranks.over_data(torch.stack([weight.sum(), (relative * weight).sum()]))
    total = sums[0].clamp_min(1)
    centred = relative - sums[1] / total
    variance = ranks.over_data((centred.square() * weight).sum()) / total
    return _as(values, torch.where(counted, centred / (variance.sqrt() + EPSILON), 0.0))


def advantages(
    rewards: Tensor,
    valid_tokens: Tensor,
    config: PolicyConfig,
    accepted: Tensor | None = None,
    given: Tensor | None = None,
) -> Tensor:
    """The advantages [G, n] of the options; `given` advantages replace the estimator's.

    Other arguments as in `grpo` and `reinforce_plus_plus_baseline`.
    """
    values = given
    if config.has_token_rewards:
        # The trainer normalizes over tokens, after it has added their KL and the discount.
        if values is not None:
            return values
        if config.advantage_estimator == "reinforce_plus_plus":
            return rewards
        centred, _ = _centred(rewards, accepted, config.advantage_estimator)
        return _as(rewards, centred)
    if values is None:
        values = ESTIMATORS[config.advantage_estimator](rewards, valid_tokens, config, accepted)
    if not config.normalize_advantages:
        return values
    return whiten(values, _counted_tokens(valid_tokens, accepted))


ESTIMATORS: dict[str, Callable[[Tensor, Tensor, PolicyConfig, Tensor | None], Tensor]] = {
    "grpo": lambda rewards, _, config, accepted: grpo(
        rewards, normalize_std=not config.disable_grpo_std_normalization, accepted=accepted
    ),
    "rloo": lambda rewards, _, config, accepted: rloo(rewards, accepted=accepted),
    "reinforce_plus_plus": (
        lambda rewards, valid, _, accepted: reinforce_plus_plus(rewards, valid, accepted=accepted)
    ),
    "reinforce_plus_plus_baseline": (
        lambda rewards, valid, _, accepted: reinforce_plus_plus_baseline(
            rewards, valid, accepted=accepted
        )
    ),
    # The trainer later subtracts a baseline from the rewards, per token.
    "optimal_token_baseline": lambda rewards, *_: rewards,
}
"""Estimators by their command-line name."""


def _centred(rewards: Tensor, accepted: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """Rewards minus the group's mean of accepted samples, and the number of these [G, 1].

    Rejected samples have 0. The computation is in float64: in float32 the mean of eight rewards of
    0.35 is off by 3e-8, and the division by ε makes this 0.03.
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        shape = tuple(rewards.shape)
        raise ValueError(
            f"{name} compares samples of one prompt: rewards must be [groups, n ≥ 2], got {shape}"
        )
    if accepted is None:
        accepted = torch.ones_like(rewards)
    counted = accepted.bool()
    _refuse_nonfinite(rewards, counted, name)
    count = counted.sum(1, keepdim=True).double()
    # Relative to the lowest reward, so that equal rewards give exactly 0.
    lowest = torch.where(counted, rewards.double(), torch.inf).amin(1, keepdim=True)
    relative = torch.where(counted, rewards.double() - lowest, 0.0)
    mean = relative.sum(1, keepdim=True) / count.clamp_min(1)
    return torch.where(counted, relative - mean, 0.0), count


def _counted_tokens(valid_tokens: Tensor, accepted: Tensor | None) -> Tensor:
    """The trained tokens per sample, 0 for samples that are not accepted."""
    if accepted is None:
        return valid_tokens
    return valid_tokens * accepted


def _refuse_nonfinite(rewards: Tensor, counted: Tensor, name: str) -> None:
    """Raises ValueError for the first counted reward that is NaN or infinite."""
    wrong = counted & ~rewards.isfinite()
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"{name}: the reward at {index} is {rewards[index].item()}; pass finite rewards, or"
            " reject the sample."
        )


def _as(rewards: Tensor, advantages: Tensor) -> Tensor:
    """Advantages in the dtype of the rewards, or in the default dtype for integer rewards."""
    if rewards.dtype.is_floating_point:
        return advantages.to(rewards.dtype)
    return advantages.to(torch.get_default_dtype())
