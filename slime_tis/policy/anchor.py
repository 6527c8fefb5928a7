"""Which policy the loss is anchored on, and which forward passes that takes."""

from collections.abc import Callable, Sequence

from torch import Tensor

from slime_tis.correction import RolloutCorrectionConfig, batch_norm_factor, correct

Reduction = Callable[[Tensor], Tensor]


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


def kept_samples(
    correction: RolloutCorrectionConfig,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    *,
    sum_context: Reduction,
) -> list[bool]:
    """Which of a rank's samples have a token left after rejection; a collective of context-parallel ranks."""
    found = correct(
        correction,
        list(train_log_probs),
        list(rollout_log_probs),
        list(loss_masks),
        reduce_sequences=sum_context,
    )
    return (found.kept_per_sequence > 0).tolist()


def normalizes(correction: RolloutCorrectionConfig) -> bool:
    """Whether the weights are divided by their mean over the global batch."""
    return correction.use_tis and correction.tis_batch_normalize


def global_weight_mean(
    correction: RolloutCorrectionConfig,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    *,
    sum_context: Reduction,
    sum_data: Reduction,
) -> Tensor:
    """Mean bounded weight over the global batch of a step; a collective of the last pipeline stage.

    Args:
        correction: with batch normalisation on.
        train_log_probs: this rank's slices, per sample.
        rollout_log_probs: the same of the rollout policy.
        loss_masks: the same of the masks.
        sum_context: sums over context-parallel ranks.
        sum_data: sums over data-parallel ranks.

    Returns:
        A scalar, float64.
    """
    statistics = correct(
        correction,
        list(train_log_probs),
        list(rollout_log_probs),
        list(loss_masks),
        reduce_sequences=sum_context,
        reduce_batch=sum_data,
    ).statistics
    return batch_norm_factor(correction, statistics.reduce(sum_data, lambda x: x, lambda x: x))
