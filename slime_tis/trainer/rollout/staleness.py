"""Leaves samples out of training: those that weights that are too old have sampled, and those that were removed."""

from collections.abc import Sequence

from slime_tis.trainer.data.sample import Sample


def mask_stale_samples(groups: Sequence[Sequence[Sample]], version: int, limit: int | None) -> int:
    """Zeroes the loss mask of samples whose oldest token was sampled more than `limit` versions ago.

    The samples are changed in place and stay in their groups, so that batches keep their shape; without a token to
    train on they take no part in the loss, nor in the baseline of their group.

    Args:
        groups: samples of each prompt.
        version: of the policy's weights, in optimizer steps.
        limit: largest staleness that is trained on, in optimizer steps; None means any.

    Returns:
        The number of samples masked.
    """
    if limit is None:
        return 0
    samples = [sample for group in groups for sample in group]
    stale = [sample for sample in samples if version - min(sample.trained_versions, default=version) > limit]
    for sample in stale:
        sample.loss_mask = [0] * len(sample.loss_mask)
    return len(stale)


def mask_removed_samples(groups: Sequence[Sequence[Sample]]) -> None:
    """Zeroes the loss mask of samples that a function removed; their rewards stay in the baselines of their groups."""
    for sample in (sample for group in groups for sample in group):
        if sample.remove_sample:
            sample.loss_mask = [0] * len(sample.loss_mask)
