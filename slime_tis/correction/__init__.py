"""Rollout correction: from the log-probs of two policies to weights, masks and mergeable statistics."""

from slime_tis.correction.adaptive import AdaptiveBounds, adaptive_bounds
from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.context_parallel import ResponseSlices, context_parallel_slices, response_slices
from slime_tis.correction.correct import Correction, correct
from slime_tis.correction.criteria import CRITERIA, Criterion, parse_criteria
from slime_tis.correction.metrics import batch_norm_factor, figures
from slime_tis.correction.off_policy_mask import off_policy_sequence_mask
from slime_tis.correction.presets import PRESETS
from slime_tis.correction.proximal import interpolate_old_log_probs
from slime_tis.correction.ratio import LOG_RATIO_BOUND, LOG_RATIO_LIMIT
from slime_tis.correction.statistics import Statistics

__all__ = [
    "CRITERIA",
    "LOG_RATIO_BOUND",
    "LOG_RATIO_LIMIT",
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
    "parse_criteria",
    "response_slices",
]
