"""Rollout correction: from the log-probs of two policies to weights, masks and mergeable statistics."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_tis.correction.adaptive import AdaptiveBounds, adaptive_bounds
    from slime_tis.correction.config import RolloutCorrectionConfig
    from slime_tis.correction.context_parallel import ResponseSlices, context_parallel_slices, response_slices
    from slime_tis.correction.criteria import CRITERIA, Criterion, parse_criteria
    from slime_tis.correction.global_batch import THIS_CALL, GlobalBatch
    from slime_tis.correction.modes import MODES
    from slime_tis.correction.off_policy_mask import off_policy_sequence_mask
    from slime_tis.correction.presets import PRESETS
    from slime_tis.correction.proximal import interpolate_old_log_probs
    from slime_tis.correction.ranks import AllReduce, Ranks, ReduceOp
    from slime_tis.correction.ratio import LOG_RATIO_BOUND, LOG_RATIO_LIMIT
    from slime_tis.correction.rollout_correction import Correction, correct
    from slime_tis.correction.statistics import Statistics
    from slime_tis.correction.sums import SequenceSums
    from slime_tis.correction.token_pass import TokenPassFunction, torch_token_pass

__all__ = [
    "CRITERIA",
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
    "TokenPassFunction",
    "adaptive_bounds",
    "context_parallel_slices",
    "correct",
    "interpolate_old_log_probs",
    "off_policy_sequence_mask",
    "parse_criteria",
    "response_slices",
    "torch_token_pass",
]

_EXPORTS = {
    "adaptive": ("AdaptiveBounds", "adaptive_bounds"),
    "config": ("RolloutCorrectionConfig",),
    "context_parallel": ("ResponseSlices", "context_parallel_slices", "response_slices"),
    "criteria": ("CRITERIA", "Criterion", "parse_criteria"),
    "global_batch": ("THIS_CALL", "GlobalBatch"),
    "modes": ("MODES",),
    "off_policy_mask": ("off_policy_sequence_mask",),
    "presets": ("PRESETS",),
    "proximal": ("interpolate_old_log_probs",),
    "ranks": ("AllReduce", "Ranks", "ReduceOp"),
    "ratio": ("LOG_RATIO_BOUND", "LOG_RATIO_LIMIT"),
    "rollout_correction": ("Correction", "correct"),
    "statistics": ("Statistics",),
    "sums": ("SequenceSums",),
    "token_pass": ("TokenPassFunction", "torch_token_pass"),
}
"""Modules and the public names of each; imported when a name is first used, so that the config needs no torch."""

_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a public name on its first use (PEP 562)."""
    if name in _EXPORTS:  # a submodule, as if all of them had been imported
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
