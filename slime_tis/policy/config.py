"""Options of the policy objective, and the forward passes that they need."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from slime_tis.correction.config import RolloutCorrectionConfig, loss_option
from slime_tis.options.fields import REJECTS, Limits, check_fields

CLIPPING_LOSSES = (
    "--policy-loss=ppo",
    "--policy-loss=cispo",
    "--policy-loss=gspo",
    "--policy-loss=aspo",
    "--policy-loss=clip_cov",
    "--policy-loss=experimental_ctpo",
)
"""Losses with a clip range."""
OPSM_DELTAS = {"rollout": 0.1, "old": 1e-4}
"""Default bound per policy, in nats per token.

π_old differs from π_θ only by training. From the rollout policy π_θ also differs by the engines'
noise: k3 ± √(2·k3/T) over T tokens, which is 0.02 ± 0.01 for fp8 weights and 300 tokens.
"""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The objective of the policy, without the rollout correction."""

    advantage_estimator: Literal[
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "optimal_token_baseline",
    ] = loss_option("grpo")
    """Baseline and scale for rewards: grpo (group mean and deviation), rloo (mean of the other
    samples), reinforce_plus_plus (batch mean and deviation), reinforce_plus_plus_baseline (group
    mean, batch deviation) or optimal_token_baseline (least variance at each token; costs a forward
    pass)."""
    kl_coef: Annotated[float, Limits(ge=0, le=1_000)] = loss_option(0.0)
    """Coefficient of the KL from the reference policy in the rewards of reinforce_plus_plus, with
    or without baseline; above 0 it costs two forward passes."""
    gamma: Annotated[float, Limits(gt=0, le=1)] = loss_option(1.0)
    """Discount per token of reinforce_plus_plus."""
    disable_grpo_std_normalization: bool = loss_option(False, needs=("--advantage-estimator=grpo",))
    """grpo without division by the deviation (Dr. GRPO)."""
    normalize_advantages: bool = loss_option(False)
    """Normalize advantages to mean 0 and deviation 1 over the global batch's valid tokens."""
    custom_advantage_function_path: str | None = loss_option(None, metavar="FUNCTION")
    """User function that sets each token's advantage."""
    use_rollout_entropy: bool = loss_option(
        False, needs=("--custom-advantage-function-path", "--loss-type=custom_loss")
    )
    """Give user functions the old policy's entropy of each token; costs a forward pass."""
    loss_type: Literal["policy_loss", "custom_loss"] = loss_option("policy_loss")
    """policy_loss (by the other options of this group) or custom_loss (user function)."""
    custom_loss_function_path: str | None = loss_option(
        None, metavar="FUNCTION", needs=("--loss-type=custom_loss",)
    )
    """User function that computes the loss from logits."""
    custom_pg_loss_reducer_function_path: str | None = loss_option(None, metavar="FUNCTION")
    """User function that reduces token losses, for example slime_tis.policy.reducers.dr_grpo."""
    eps_clip: Annotated[float, Limits(gt=0, le=1, hint="0.2 is customary")] = loss_option(
        0.2, needs=(*CLIPPING_LOSSES, "--policy-loss=experimental_cppo")
    )
    """Lower clip: 1 - eps_clip."""
    eps_clip_high: Annotated[
        float | None, Limits(gt=0, le=1_000_000, also=(math.inf,), hint="remove it for --eps-clip")
    ] = loss_option(None, needs=CLIPPING_LOSSES)
    """Upper clip: 1 + eps_clip_high; unset: eps_clip."""
    eps_clip_c: Annotated[
        float | None, Limits(gt=1, le=1_000_000, hint="remove it for no dual clip")
    ] = loss_option(
        None, needs=("--policy-loss=ppo", "--policy-loss=aspo", "--policy-loss=experimental_ctpo")
    )
    """Dual-clip bound on the ratio at negative advantages (TRL's delta), or on aspo's weights (its
    source: 3)."""
    use_kl_loss: bool = loss_option(False)
    """Add kl_loss_coef times the KL from the reference policy to the loss."""
    kl_loss_coef: Annotated[float, Limits(ge=0, le=1_000)] = loss_option(
        0.0, needs=("--use-kl-loss",)
    )
    """Coefficient of the KL loss; 0 only reports the KL."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = loss_option(
        "k1", needs=("--use-kl-loss", "--kl-coef")
    )
    """KL estimator, nats per token; low_var_kl is k3 clamped to ±10."""
    use_unbiased_kl: bool = loss_option(False, needs=("--use-kl-loss",))
    """Multiply the KL estimate by the ratio π_θ/π_old (DeepSeek-V3.2)."""
    ref_update_interval: Annotated[int | None, Limits(ge=1, le=1_000_000)] = loss_option(
        None, needs=("--use-kl-loss", "--kl-coef")
    )
    """Rollouts after which the policy becomes the reference policy; unset: the reference stays."""
    rollout_pull_coef: Annotated[
        float, Limits(ge=0, le=1_000, hint="0.1 is the value of the comparison study")
    ] = loss_option(0.0)
    """Coefficient of (log π_θ - log π_rollout)² of every trained token, also rejected ones."""
    staleness_decay: Annotated[float, Limits(gt=0, le=1)] = loss_option(1.0)
    """Multiply a token's policy loss by staleness_decay^staleness."""
    sapo_tau_pos: Annotated[float, Limits(gt=0, le=1_000)] = loss_option(
        1.0, needs=("--policy-loss=sapo",)
    )
    """SAPO's temperature at positive advantages."""
    sapo_tau_neg: Annotated[float, Limits(gt=0, le=1_000)] = loss_option(
        1.05, needs=("--policy-loss=sapo",)
    )
    """SAPO's temperature at other advantages."""
    cov_ratio: Annotated[float, Limits(gt=0, le=1)] = loss_option(
        2e-4, needs=("--policy-loss=clip_cov", "--policy-loss=kl_cov")
    )
    """Share of tokens selected by the covariance of log-prob and advantage."""
    clip_cov_lower_bound: Annotated[float, Limits(ge=-1_000, le=1_000)] = loss_option(
        1.0, needs=("--policy-loss=clip_cov",)
    )
    """Smallest selected covariance."""
    clip_cov_upper_bound: Annotated[float, Limits(ge=-1_000, le=1_000)] = loss_option(
        5.0, needs=("--policy-loss=clip_cov",)
    )
    """Largest selected covariance."""
    kl_cov_coef: Annotated[float, Limits(ge=0, le=1_000)] = loss_option(
        1.0, needs=("--policy-loss=kl_cov",)
    )
    """Coefficient of the KL penalty on selected tokens."""
    experimental_cppo_budget: Annotated[float, Limits(ge=0, le=1)] = loss_option(
        0.02, needs=("--policy-loss=experimental_cppo",)
    )
    """Mean divergence per token that experimental_cppo allows in the prefix of a token; --eps-clip
    bounds the token."""
    dro_beta: Annotated[float, Limits(ge=0, le=1_000)] = loss_option(
        0.1, needs=("--policy-loss=dro",)
    )
    """Coefficient β of the quadratic pull to the old policy."""
    entropy_coef: Annotated[float, Limits(ge=-100, le=100)] = loss_option(0.0)
    """Coefficient of the entropy bonus."""
    calculate_per_token_loss: bool = loss_option(False)
    """Average the loss over all tokens of the global batch; otherwise average per-sample token
    means."""
    use_opsm: bool = loss_option(False)
    """Mask tokens of negative advantage in sequences that the policy has moved away from (OPSM)."""
    opsm_policy: Literal["rollout", "old"] = loss_option("rollout", needs=("--use-opsm",))
    """Policy that use_opsm compares with π_θ: rollout (paper) or old (slime)."""
    opsm_delta: Annotated[
        float | None, Limits(gt=0, le=1_000, hint="remove it for the default")
    ] = loss_option(None, needs=("--use-opsm",))
    """Bound on the mean log-ratio, nats per token; unset: rollout 0.1, old 1e-4 (slime)."""
    reject_before_advantage: bool = loss_option(False, needs=REJECTS)
    """Exclude rejected samples from their group's baseline; costs a forward pass."""

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_token_rewards()
        if self.clip_cov_lower_bound >= self.clip_cov_upper_bound:
            raise ValueError(
                f"--clip-cov-lower-bound {self.clip_cov_lower_bound} is not below"
                f" --clip-cov-upper-bound {self.clip_cov_upper_bound}; lower it."
            )

    def _check_token_rewards(self) -> None:
        """Refuses a KL coefficient or a discount that the estimator does not use."""
        estimator = self.advantage_estimator
        if self.kl_coef > 0 and not estimator.startswith("reinforce_plus_plus"):
            # slime computes the KL for other estimators as well, and then leaves it out.
            raise ValueError(
                f"--kl-coef is {self.kl_coef:g} but --advantage-estimator {estimator} has no KL in"
                " its rewards; use --use-kl-loss --kl-loss-coef, or reinforce_plus_plus."
            )
        if self.kl_coef > 0 and self.kl_loss_coef > 0:
            raise ValueError(
                f"--kl-coef is {self.kl_coef:g} and --kl-loss-coef is {self.kl_loss_coef:g}; keep"
                " one of the two."
            )
        if self.gamma < 1 and estimator != "reinforce_plus_plus":
            raise ValueError(
                f"--gamma is {self.gamma:g} but --advantage-estimator {estimator} has no discount;"
                " use reinforce_plus_plus, or remove --gamma."
            )

    @property
    def has_token_rewards(self) -> bool:
        """Whether advantages are per token, because of a KL or a discount."""
        return self.kl_coef > 0 or self.gamma < 1

    @property
    def needs_reference(self) -> bool:
        """Whether a forward pass computes the reference policy's log-probs."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def has_token_baseline(self) -> bool:
        """Whether advantages are per token and need log π_old and Σ_v π_v²."""
        return self.advantage_estimator == "optimal_token_baseline"

    @property
    def stays_close_to_rollouts(self) -> bool:
        """Whether the loss keeps the policy close to the rollout policy."""
        return self.rollout_pull_coef > 0 or (self.use_opsm and self.opsm_policy == "rollout")

    @property
    def clip_high(self) -> float:
        """The upper clip range: eps_clip_high, or eps_clip if that is unset."""
        if self.eps_clip_high is None:
            return self.eps_clip
        return self.eps_clip_high

    @property
    def opsm_bound(self) -> float:
        """The bound of off-policy sequence masking: opsm_delta, or the policy's default."""
        if self.opsm_delta is None:
            return OPSM_DELTAS[self.opsm_policy]
        return self.opsm_delta


COVARIANCE_LOSSES = ("clip_cov", "kl_cov")
"""Losses that select tokens by covariance.

Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", Cui et al.
(https://arxiv.org/abs/2505.22617), eq. 10 to 13; verl, core_algos.py. There, Clip-Cov draws tokens
at random among the candidates. Here it takes the largest covariances, because a random draw would
depend on the micro-batches.
"""


def uses_recomputed_old_policy(correction: RolloutCorrectionConfig, steps_per_rollout: int) -> bool:
    """Whether the loss takes log π_old from a forward pass before the rollout's first step.

    With one step per rollout, π_old is π_θ of the training forward, detached. Then only corrections
    that need statistics of the global batch need this pass.
    """
    return old_policy_name(correction, steps_per_rollout) == "recomputed"


def old_policy_name(correction: RolloutCorrectionConfig, steps_per_rollout: int) -> str:
    """The source of log π_old in the loss.

    Returns:
        "rollout", "interpolated", "recomputed" (by a forward pass before the first step), or
        "current" (π_θ, detached).
    """
    if correction.use_rollout_logprobs:
        return "rollout"
    if correction.old_logprobs == "interpolate":
        return "interpolated"
    selects_tokens = correction.policy_loss in COVARIANCE_LOSSES
    if steps_per_rollout > 1 or needs_global_batch(correction) or selects_tokens:
        return "recomputed"
    return "current"


def needs_old_log_probs(
    correction: RolloutCorrectionConfig, steps_per_rollout: int, policy: PolicyConfig
) -> bool:
    """Whether a forward pass before the rollout's first step computes log π_old."""
    if uses_recomputed_old_policy(correction, steps_per_rollout):
        return True
    if policy.reject_before_advantage or policy.has_token_baseline:
        return True
    if policy.use_rollout_entropy:
        return True
    # In bypass mode the rollout policy is the old policy, also in the rewards.
    if policy.kl_coef > 0 and not correction.use_rollout_logprobs:
        return True
    # With one step per rollout, the training forward itself measures π_old.
    if correction.get_mismatch_metrics and steps_per_rollout > 1:
        return True
    # User functions for advantages or the loss get log π_old; in bypass mode it is the rollout's.
    has_user_objective = (
        policy.custom_advantage_function_path is not None or policy.loss_type == "custom_loss"
    )
    return has_user_objective and not correction.use_rollout_logprobs


def needs_global_batch(correction: RolloutCorrectionConfig) -> bool:
    """Whether a micro-batch's correction depends on statistics of the complete step.

    These are the mean weight of batch normalisation, the limit of second-moment trimming, and
    adaptive bounds.
    """
    normalizes = correction.use_tis and correction.tis_batch_normalize
    return normalizes or bool(correction.batch_options)


def without_correction(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """The same configuration without weights and rejection; only statistics remain."""
    return replace(
        config,
        use_tis=False,
        use_rs=False,
        rs_z_score=None,
        rs_target_fraction=None,
        rs_veto_threshold=None,
        rs_veto_upper_threshold=None,
        rs_second_moment_bound=None,
        divergence_mask=None,
        rollout_rs=None,
        rollout_rs_threshold=None,
    )


def clip_is_inactive(correction: RolloutCorrectionConfig, steps_per_rollout: int) -> bool:
    """Whether π_θ/π_old is always 1, so that clip ranges have no effect.

    This holds with one optimizer step per rollout if π_old is the policy of this step, recomputed
    or from the same forward pass.
    """
    return steps_per_rollout == 1 and old_policy_name(correction, 1) in ("recomputed", "current")
