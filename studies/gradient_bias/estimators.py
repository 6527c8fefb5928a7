"""Exact bias and variance of the corrected policy gradient, on responses that can be enumerated.

The model. A response has T tokens, drawn independently from three with probabilities π(v) =
softmax(θ)_v. Token v is worth q_v, and an answer is right (R = 1) where its tokens together, Σ_t
q_{y_t}, are worth half a standard deviation more than the training policy expects: about three
times in ten at any length, and no token alone decides it. The rollout policy differs by Δ_v = log
π_train(v) − log π_rollout(v), which under π_train has the standard deviation σ and the correlation
κ with the quality: near 0 a mismatch is noise that the reward does not see, near 1 a drift along
it.

What is estimated: g = ∇_θ E_train[R] = E_train[(R − b)·Σ_t (e_{y_t} − π)]. One response gives

    ĝ = (R − b)·Σ_t m_t·w_t·(e_{y_t} − π),     b = E_rollout[R],

and a batch the mean of ĝ over all its responses: what train.py does by default, at π_θ = π_old.

Why it can be enumerated. R and, except at the level `prefix`, w and m depend only on the number of
occurrences of each token. There are (T+1)(T+2)/2 such counts, and their probabilities are
multinomial: sums over 3^4096 responses become sums over the counts that matter. `slime_tis.correct`
computes weights and masks: at token level for the three tokens, at sequence and geometric level for
the sum or mean of Δ, as a response of one token.

Shapes: suffix _V the three tokens, _C counts, _N simulated responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.policy.losses import ppo_clip

TRAIN_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
"""π_train of the three tokens."""
QUALITY_V = torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
"""q of the three tokens."""
THRESHOLD = 0.5
"""What a right answer is worth above the expectation, in standard deviations."""
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
NEGLIGIBLE = -105.0
"""Counts with a smaller log-probability are ignored: times the largest squared weight, e^40, it is
1e-28."""

CHI2_2_95 = 5.991
"""95 % quantile of χ² with two degrees of freedom."""
AT_ONCE = 2**21
"""Tokens that are simulated at a time."""
UNBOUNDED = 1e9  # the library's own clamp of the log-weight at 20 remains
ESTIMATORS: dict[str, RolloutCorrectionConfig] = {
    "uncorrected": RolloutCorrectionConfig(),
    "token TIS": RolloutCorrectionConfig(use_tis=True),
    "token MIS": RolloutCorrectionConfig(use_tis=True, tis_mode="mask", tis_lower_bound=0.5),
    "sequence IS, unbounded": RolloutCorrectionConfig(
        use_tis=True, tis_level="sequence", tis_upper_bound=UNBOUNDED
    ),
    "sequence TIS": RolloutCorrectionConfig(use_tis=True, tis_level="sequence"),
    "sequence MIS": RolloutCorrectionConfig(
        use_tis=True, tis_level="sequence", tis_mode="mask", tis_lower_bound=0.5
    ),
    "geometric RS": RolloutCorrectionConfig(
        use_rs=True, rs_level="geometric", rs_lower_bound=0.95, rs_upper_bound=1.05
    ),
    "bypass PPO": RolloutCorrectionConfig(use_rollout_logprobs=True),
    "prefix TIS": RolloutCorrectionConfig(use_tis=True, tis_level="prefix"),
}
"""What is compared, by name: weights are bounded by 2 where not said otherwise."""
ENUMERABLE = tuple(name for name, config in ESTIMATORS.items() if config.tis_level != "prefix")


@dataclass(frozen=True)
class Mismatch:
    """The two policies."""

    rollout_V: Tensor
    """π_rollout of the three tokens."""
    log_ratio_V: Tensor
    """Δ_v = log π_train(v) − log π_rollout(v)."""

    @classmethod
    def of_size(cls, sigma: float, correlation: float) -> Mismatch:
        """π_rollout(v) ∝ π_train(v)·exp(−σ·d_v), where d has mean 0 and variance 1 under π_train.

        Args:
            sigma: σ, the standard deviation of Δ under π_train.
            correlation: κ, the correlation of Δ with the quality under π_train.
        """
        rollout_V = (TRAIN_V.log() - sigma * mismatch_direction(correlation)).softmax(0)
        return cls(rollout_V, TRAIN_V.log() - rollout_V.log())


def mismatch_direction(correlation: float) -> Tensor:
    """d_V: a part along the quality, the rest across it."""
    along_V = standardized(QUALITY_V)
    across_V = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    across_V = standardized(across_V - (TRAIN_V @ (across_V * along_V)) * along_V)
    return correlation * along_V + math.sqrt(1 - correlation**2) * across_V


def standardized(values_V: Tensor) -> Tensor:
    """Shifted and scaled to mean 0 and variance 1 under π_train."""
    centered_V = values_V - TRAIN_V @ values_V
    return centered_V / (TRAIN_V @ centered_V**2).sqrt()


@dataclass(frozen=True)
class Moments:
    """Of ĝ, which is 0 for a rejected response."""

    mean_V: Tensor
    """E[ĝ]."""
    variance: float
    """Trace of the covariance of ĝ; the mean of N responses has 1/N of it."""
    kept: float
    """Share of the responses that have a token left."""
    fourth: float
    """E[|ĝ − mean|⁴], by which the variance of simulated responses is uncertain."""

    @classmethod
    def of(cls, probability: Tensor, estimate_V: Tensor, kept: Tensor) -> Moments:
        """From the estimates [*, 3], their probabilities and whether they are kept."""
        mean_V = probability @ estimate_V
        squares = ((estimate_V - mean_V) ** 2).sum(1)
        kept_share = float(probability[kept].sum())
        return cls(
            mean_V, float(probability @ squares), kept_share, float(probability @ squares**2)
        )

    def mean_radius(self, responses: int) -> float:
        """Returns a 95 % bound on the distance of the simulated `mean_V` from the truth.

        ĝ lies in a plane; the squared distance is at most χ² of two degrees of freedom, times the
        larger eigenvalue of the covariance, which its trace bounds.
        """
        return math.sqrt(CHI2_2_95 * self.variance / responses)

    def deviation_radius(self, responses: int) -> float:
        """1.96 standard errors of √variance of simulated responses, by the delta method."""
        spread = math.sqrt(max(self.fourth - self.variance**2, 0.0) / responses)
        return 1.96 * spread / (2 * math.sqrt(self.variance)) if self.variance else 0.0


def true_gradient(length: int) -> Tensor:
    """g = ∇_θ E_train[R], by enumeration."""
    counts_CV, probability_C = likely_counts(TRAIN_V, length)
    reward_C = reward(counts_CV, length)
    advantage_C = reward_C - probability_C @ reward_C
    return probability_C @ estimates(advantage_C, counts_CV)


def enumerated(config: RolloutCorrectionConfig, mismatch: Mismatch, length: int) -> Moments:
    """The moments of an estimator, over all counts that are not negligibly rare.

    Args:
        config: the correction, at any level that does not depend on the order of the tokens.
        mismatch: the two policies.
        length: T, in tokens.
    """
    counts_CV, probability_C = likely_counts(mismatch.rollout_V, length)
    reward_C = reward(counts_CV, length)
    advantage_C = reward_C - probability_C @ reward_C
    if config.use_rollout_logprobs:
        weight_CV = clipped_ratios(mismatch.log_ratio_V)[reward_C.long()]
        mask_CV = torch.ones_like(weight_CV)
    elif {config.tis_level, config.rs_level} == {"token"}:
        weight_CV, mask_CV = (
            value.expand_as(counts_CV) for value in corrected(config, mismatch.log_ratio_V)
        )
    else:
        sums_C = counts_CV @ mismatch.log_ratio_V
        by_mean = "geometric" in (config.tis_level, config.rs_level)
        weight_CV, mask_CV = (
            value[:, None] for value in corrected(config, sums_C / length if by_mean else sums_C)
        )
    kept_CV = counts_CV * mask_CV
    return Moments.of(
        probability_C, estimates(advantage_C, kept_CV * weight_CV), kept_CV.sum(1) > 0
    )


def simulated(
    config: RolloutCorrectionConfig, mismatch: Mismatch, length: int, responses: int
) -> Moments:
    """The moments of an estimator from sampled responses, corrected by the library as they are.

    Args:
        config: any correction.
        mismatch: the two policies.
        length: T, in tokens.
        responses: how many are drawn.
    """
    generator = torch.Generator().manual_seed(0)
    baseline = right_answers(mismatch.rollout_V, length)
    sizes = [len(part) for part in torch.arange(responses).split(max(AT_ONCE // length, 1))]
    parts = [
        _simulated_estimates(config, mismatch, length, baseline, size, generator) for size in sizes
    ]
    estimate_NV, kept_N = (torch.cat(values) for values in zip(*parts, strict=True))
    return Moments.of(
        torch.full((responses,), 1 / responses, dtype=torch.float64), estimate_NV, kept_N
    )


def _simulated_estimates(
    config: RolloutCorrectionConfig,
    mismatch: Mismatch,
    length: int,
    baseline: float,
    responses: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """ĝ of sampled responses, [N, 3], and which of them have a token left."""
    uniform_NT = torch.rand(responses, length, generator=generator, dtype=torch.float64)
    tokens_NT = torch.bucketize(uniform_NT, mismatch.rollout_V.cumsum(0)[:2])
    reward_N = reward(torch.stack([(tokens_NT == v).sum(1) for v in range(3)], 1).double(), length)
    log_ratio_NT = mismatch.log_ratio_V[tokens_NT]
    if config.use_rollout_logprobs:
        weight_NT = clipped_ratios(mismatch.log_ratio_V)[reward_N.long()[:, None], tokens_NT]
        mask_NT = torch.ones_like(weight_NT)
    else:
        found = correct(
            config,
            log_ratio_NT,
            torch.zeros_like(log_ratio_NT),
            torch.ones_like(tokens_NT, dtype=torch.bool),
        )
        weight_NT, mask_NT = found.weights.double(), found.mask.double()
    terms_NT = mask_NT * weight_NT
    terms_NV = torch.stack([torch.where(tokens_NT == v, terms_NT, 0.0).sum(1) for v in range(3)], 1)
    return estimates(reward_N - baseline, terms_NV), mask_NT.sum(1) > 0


def estimates(advantage: Tensor, terms_V: Tensor) -> Tensor:
    """ĝ = A·Σ_v c_v·(e_v − π), with c_v the weights of the occurrences of token v added up."""
    return advantage[:, None] * (terms_V - terms_V.sum(1, keepdim=True) * TRAIN_V)


def likely_counts(policy_V: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """How often each token occurs, [C, 3] float64, and the multinomial probability of that, [C]."""
    reach = math.sqrt(
        -NEGLIGIBLE * length / 2
    )  # Hoeffding: P(|n − Tp| > reach) is at most exp(−2·reach²/T) a side
    first, second = (
        torch.arange(
            max(0, math.floor(length * p - reach)), min(length, math.ceil(length * p + reach)) + 1
        )
        for p in policy_V[:2].tolist()
    )
    first_C, second_C = (value.flatten() for value in torch.meshgrid(first, second, indexing="ij"))
    counts_CV = torch.stack([first_C, second_C, length - first_C - second_C], 1).double()
    counts_CV = counts_CV[counts_CV[:, 2] >= 0]
    log_probability_C = (
        math.lgamma(length + 1) - torch.lgamma(counts_CV + 1).sum(1) + counts_CV @ policy_V.log()
    )
    likely_C = log_probability_C > NEGLIGIBLE
    return counts_CV[likely_C], log_probability_C[likely_C].exp()


def reward(counts_CV: Tensor, length: int) -> Tensor:
    """1 where the tokens together are worth enough, else 0."""
    mean = TRAIN_V @ QUALITY_V
    deviation = (TRAIN_V @ (QUALITY_V - mean) ** 2).sqrt()
    return (
        counts_CV @ QUALITY_V >= length * mean + THRESHOLD * math.sqrt(length) * deviation
    ).double()


def right_answers(policy_V: Tensor, length: int) -> float:
    """E[R] under a policy."""
    counts_CV, probability_C = likely_counts(policy_V, length)
    return float(probability_C @ reward(counts_CV, length))


def corrected(config: RolloutCorrectionConfig, log_ratio_N: Tensor) -> tuple[Tensor, Tensor]:
    """The library's weights and mask of responses of one token each, float64 [N]."""
    found = correct(
        config,
        log_ratio_N,
        torch.zeros_like(log_ratio_N),
        torch.ones_like(log_ratio_N),
        lengths=[1] * len(log_ratio_N),
    )
    return found.weights.double(), found.mask.double()


def clipped_ratios(log_ratio_V: Tensor) -> Tensor:
    """Returns [2, 3]: factors of A·∇log π in PPO's loss on the rollout policy, A < 0 and A > 0."""
    log_prob_2V = log_ratio_V.repeat(2, 1).requires_grad_()
    sign_2V = torch.tensor([[-1.0], [1.0]], dtype=torch.float64).expand_as(log_prob_2V)
    loss_2V, _ = ppo_clip(
        log_prob_2V, torch.zeros_like(log_prob_2V), sign_2V, clip_low=CLIP_LOW, clip_high=CLIP_HIGH
    )
    (gradient_2V,) = torch.autograd.grad(loss_2V.sum(), log_prob_2V)
    return -gradient_2V / sign_2V
