"""Checks the sampling masks of a rollout before it is trained on, and measures them."""

import math
from collections.abc import Sequence

import torch

from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.data.sampling_mask import SamplingMask


def check_sampling_masks(groups: Sequence[Sequence[Sample]], *, truncates_sampling: bool) -> dict[str, float]:
    """Takes out sets that lack the very token that was sampled, and measures the sets of a rollout.

    Under such a set the token would have probability 0. Its log-prob becomes NaN, so that --nonfinite-policy decides
    what becomes of it, and its set is removed, so that the training engine's log-prob is finite.

    Args:
        groups: the samples of every prompt, changed in place.
        truncates_sampling: whether top-p or top-k leave out tokens.

    Returns:
        rollout/sampling_mask_… metrics; empty where nothing is truncated and no sample has a mask.
    """
    samples = [sample for group in groups for sample in group]
    if not truncates_sampling and all(sample.sampling_mask is None for sample in samples):
        return {}
    masks = [sample.sampling_mask or SamplingMask.unrecorded(sample.response_length) for sample in samples]
    whole = SamplingMask.cat(masks)
    token_ids = torch.tensor([token for sample in samples for token in sample.response_ids], dtype=torch.int32)
    outside = ~whole.contains(token_ids)
    trained = torch.tensor([masked_in for sample in samples for masked_in in sample.loss_mask]) > 0
    recorded = whole.lengths > 0
    if outside.any():
        for sample, mask, where in zip(samples, masks, outside.split([len(mask) for mask in masks]), strict=True):
            if where.any():
                sample.sampling_mask = mask.without(where)
                for position in where.nonzero().squeeze(1).tolist():
                    sample.rollout_log_probs[position] = math.nan
    return {
        "rollout/sampling_mask_tokens": float(whole.lengths.sum()) / max(int(recorded.sum()), 1),
        "rollout/sampling_mask_missing": float((trained & ~recorded).sum()) / max(int(trained.sum()), 1),
        "rollout/sampling_mask_violations": float(outside.sum()),
    }


def require_sampling_masks(path: str, groups: Sequence[Sequence[Sample]]) -> None:
    """Refuses loaded samples whose sets are not recorded, though sampling was truncated.

    Raises:
        ValueError: a sample that is trained on has no mask.
    """
    lacking = sum(sample.sampling_mask is None and any(sample.loss_mask) for group in groups for sample in group)
    if lacking:
        raise ValueError(
            f"the rollout data {str(path)!r} has {lacking} samples without a sampling mask, but --rollout-top-p or "
            "--rollout-top-k is set, so that training could not use the distribution that they were sampled from; "
            "leave the two out if nothing was truncated, or add --allow-truncation-bias."
        )
