"""Which policy the loss is anchored on, and which forward passes that takes."""

from slime_tis.correction import RolloutCorrectionConfig


def anchors_on_recomputed(correction: RolloutCorrectionConfig, steps_per_rollout: int) -> bool:
    """Whether the loss takes log π_old from a forward pass before the rollout's first step.

    With one step per rollout π_old is the policy of the training forward itself, detached; then only batch
    normalisation asks for the pass, whose mean weight must be known beforehand.
    """
    if correction.use_rollout_logprobs or correction.old_logprobs == "interpolate":
        return False
    return normalizes(correction) or steps_per_rollout > 1


def needs_old_log_probs(
    correction: RolloutCorrectionConfig, steps_per_rollout: int, reject_before_advantage: bool = False
) -> bool:
    """Whether that forward pass is made: for the loss, to measure the mismatch of π_old itself, or to reject early."""
    asked_for = correction.get_mismatch_metrics or reject_before_advantage
    return asked_for or anchors_on_recomputed(correction, steps_per_rollout)


def normalizes(correction: RolloutCorrectionConfig) -> bool:
    """Whether the weights are divided by their mean over the global batch."""
    return correction.use_tis and correction.tis_batch_normalize
