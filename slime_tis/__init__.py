"""Measures and corrects the mismatch of rollout and training log-probs in RL for LLMs."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_tis.correction import (
        PRESETS,
        AdaptiveBounds,
        Correction,
        Criterion,
        GlobalBatch,
        Ranks,
        ResponseSlices,
        RolloutCorrectionConfig,
        Statistics,
        adaptive_bounds,
        context_parallel_slices,
        correct,
        interpolate_old_log_probs,
        off_policy_sequence_mask,
        response_slices,
    )

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "AdaptiveBounds",
    "Correction",
    "Criterion",
    "GlobalBatch",
    "Ranks",
    "ResponseSlices",
    "RolloutCorrectionConfig",
    "Statistics",
    "adaptive_bounds",
    "context_parallel_slices",
    "correct",
    "interpolate_old_log_probs",
    "off_policy_sequence_mask",
    "response_slices",
]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use (PEP 562): the command line starts without torch."""
    if name in ("correction", "functional"):
        return importlib.import_module(f"slime_tis.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slime_tis import correction

    value = getattr(correction, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
