"""Samples of weights that are too old to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slime_tis.rollout.sample import Sample


def mask_stale_samples(
    groups: Sequence[Sequence[Sample]], version: int, limit: int | None
) -> tuple[list[list[Sample]], int]:
    """Clears the loss mask of samples whose oldest token was sampled more than `limit` versions ago.

    They stay in their groups, so that batches keep their shape; without a token to train on they take no part in
    the loss, nor in the baseline of their group.

    Args:
      groups: samples of each prompt.
      version: of the policy's weights, in optimizer steps.
      limit: largest lag that is kept; None keeps all.

    Returns:
      the groups, and the number of samples left out.
    """
    found, left_out = [], 0
    for group in groups:
        kept = []
        for sample in group:
            stale = limit is not None and version - min(sample.weight_versions, default=version) > limit
            left_out += stale
            kept.append(replace(sample, loss_mask=[0] * len(sample.loss_mask)) if stale else sample)
        found.append(kept)
    return found, left_out
