"""Which policy the loss is proximal to (π_old), and which forward passes that takes."""

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.policy.config import COVARIANCE_RULES, PolicyConfig


def uses_recomputed_old_policy(correction: RolloutCorrectionConfig, steps_per_rollout: int) -> bool:
    """Whether the loss takes log π_old from a forward pass before the rollout's first step.

    With one step per rollout π_old is the policy of the training forward itself, detached; then only a correction
    that must know something of the global batch beforehand asks for the pass.
    """
    return old_policy_name(correction, steps_per_rollout) == "recomputed"


def old_policy_name(correction: RolloutCorrectionConfig, steps_per_rollout: int) -> str:
    """Whose log-probs the loss takes as log π_old: "rollout", "interpolated", "recomputed", or "current" (π_θ)."""
    if correction.use_rollout_logprobs:
        return "rollout"
    if correction.old_logprobs == "interpolate":
        return "interpolated"
    early = needs_global_batch(correction) or correction.policy_loss in COVARIANCE_RULES
    return "recomputed" if early or steps_per_rollout > 1 else "current"


def needs_old_log_probs(correction: RolloutCorrectionConfig, steps_per_rollout: int, policy: PolicyConfig) -> bool:
    """Whether that forward pass is made: for the loss, the mismatch of π_old itself, early rejection or advantages.

    User functions for advantages or the loss get them, too, where they are not the rollout's. Measuring
    takes none with one step per rollout, where the training forward computes π_old.
    """
    measures = correction.get_mismatch_metrics and steps_per_rollout > 1
    has_own_objective = policy.custom_advantage_function_path is not None or policy.loss_type == "custom_loss"
    is_given = has_own_objective and not correction.use_rollout_logprobs
    shapes_advantages = policy.reject_before_advantage or policy.has_token_baseline
    return measures or shapes_advantages or is_given or uses_recomputed_old_policy(correction, steps_per_rollout)


def needs_global_batch(correction: RolloutCorrectionConfig) -> bool:
    """Returns whether a micro-batch's correction depends on values of the whole step.

    That is the mean weight of batch normalisation, the limit of second-moment trimming, and adaptive bounds.
    """
    normalizes = correction.use_tis and correction.tis_batch_normalize
    return normalizes or bool(correction.batch_options)


def clip_is_inactive(correction: RolloutCorrectionConfig, steps_per_rollout: int) -> bool:
    """Whether π_θ/π_old is 1 at every token of every step, so that no clip range has any effect.

    That is so with one optimizer step per rollout where π_old is the policy of that very step: recomputed, or this
    forward pass itself.
    """
    return steps_per_rollout == 1 and old_policy_name(correction, 1) in ("recomputed", "current")
