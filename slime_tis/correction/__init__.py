"""Rollout correction: log-probs of two policies become weights, masks and mergeable statistics."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_tis.correction.api import (
        THIS_CALL,
        Correction,
        GlobalBatch,
        correct,
        interpolate_old_log_probs,
        off_policy_sequence_mask,
    )
    from slime_tis.correction.config import LOG_PROB_LIMIT, PRESETS, RolloutCorrectionConfig
    from slime_tis.correction.context_parallel import (
        AllReduce,
        Ranks,
        ReduceOp,
        ResponseSlices,
        context_parallel_slices,
        response_slices,
    )
    from slime_tis.correction.modes import CRITERIA, LEVELS, MODES, Criterion, parse_criteria
    from slime_tis.correction.ratio import (
        LOG_RATIO_BOUND,
        LOG_RATIO_LIMIT,
        is_log_prob,
        safe_exp,
        within_bound,
    )
    from slime_tis.correction.rejection import AdaptiveBounds, adaptive_bounds
    from slime_tis.correction.sequence_pass import perplexities
    from slime_tis.correction.statistics import Statistics
    from slime_tis.correction.sums import SequenceSums

__all__ = [
    "CRITERIA",
    "LEVELS",
    "LOG_PROB_LIMIT",
    "LOG_RATIO_BOUND",
    "LOG_RATIO_LIMIT",
    "MODES",
    "PRESETS",
    "THIS_CALL",
    "AdaptiveBounds",
    "AllReduce",
    "Correction",
    "Criterion",
    "GlobalBatch",
    "Ranks",
    "ReduceOp",
    "ResponseSlices",
    "RolloutCorrectionConfig",
    "SequenceSums",
    "Statistics",
    "adaptive_bounds",
    "context_parallel_slices",
    "correct",
    "interpolate_old_log_probs",
    "is_log_prob",
    "off_policy_sequence_mask",
    "parse_criteria",
    "perplexities",
    "response_slices",
    "safe_exp",
    "within_bound",
]

_MODULES = (
    "modes",
    "config",
    "ratio",
    "context_parallel",
    "statistics",
    "rejection",
    "sums",
    "sequence_pass",
    "token_pass",
    "api",
    "reference",
)
"""Imported when a name is first used, in this order: the options come first, and need no torch."""


def __getattr__(name: str) -> Any:
    """Imports a public name or a submodule on its first use (PEP 562)."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    for module in _MODULES if name in __all__ else ():
        value = getattr(importlib.import_module(f"{__name__}.{module}"), name, None)
        if value is not None:
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
