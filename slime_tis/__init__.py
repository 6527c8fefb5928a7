"""Measures and corrects the mismatch between rollout and training log-probs in RL for language models."""

from slime_tis.correction import (
    PRESETS,
    AdaptiveBounds,
    Correction,
    Criterion,
    ResponseSlices,
    RolloutCorrectionConfig,
    Statistics,
    adaptive_bounds,
    batch_norm_factor,
    context_parallel_slices,
    correct,
    figures,
    interpolate_old_log_probs,
    off_policy_sequence_mask,
    response_slices,
)

__all__ = [
    "PRESETS",
    "AdaptiveBounds",
    "Correction",
    "Criterion",
    "ResponseSlices",
    "RolloutCorrectionConfig",
    "Statistics",
    "adaptive_bounds",
    "batch_norm_factor",
    "context_parallel_slices",
    "correct",
    "figures",
    "interpolate_old_log_probs",
    "off_policy_sequence_mask",
    "response_slices",
]
