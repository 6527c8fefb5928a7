"""What is decided once all tokens have been seen: one line per sequence, on the reduced table.

Shapes: suffix _S is per sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.correction.adaptive import AdaptiveBounds
from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.criteria import LEVEL_AGGREGATION
from slime_tis.correction.ratio import safe_exp, sequence_log_weights
from slime_tis.correction.rejection import sequence_accepted
from slime_tis.correction.statistics import ADAPTIVE_SUMS, MAXIMA, MINIMA, mismatch_terms, sum_names
from slime_tis.correction.weights import bounded_weights, inside

LARGEST_EXPONENT = 700.0
"""The ratio of a whole sequence is reported up to e^700, where float64 ends; its weight ends at e^20."""


@dataclass(frozen=True)
class SequencePass:
    """Weights and verdicts of whole sequences, and what they add to the statistics."""

    weight_S: Tensor | None
    """Bounded weight of the sequence; None where weights differ from token to token or are off."""
    keep_S: Tensor
    """1.0 where the sequence as a whole is kept."""
    kept_S: Tensor
    """Number of kept tokens."""
    sums: Tensor
    """`Statistics.sums`, in the order of `sum_names`."""
    mins: Tensor
    """`Statistics.mins` of what is measured per sequence; +inf for what differs from token to token."""
    maxs: Tensor
    """`Statistics.maxs` likewise."""


def sequence_pass(
    config: RolloutCorrectionConfig, columns: dict[str, Tensor], bounds: AdaptiveBounds | None = None
) -> SequencePass:
    """Sequence-wide weights, rejection and statistics.

    Args:
        columns: The table of sequences, name to [S] float64, reduced over context-parallel ranks.
        bounds: Of the global batch, where rejection is adaptive.
    """
    present = (columns["valid"] > 0).to(torch.float64)
    terms = mismatch_terms(columns, present)
    extremes = {"log_ppl_diff": (terms["log_ppl_diff"], terms["measured_sequences"])}
    bounded = None
    if config.use_tis and not config.has_token_weights:
        log_weight = sequence_log_weights(LEVEL_AGGREGATION[config.tis_level], columns["log_ratio"], columns["valid"])
        raw = safe_exp(log_weight)
        bounded = bounded_weights(raw, config.tis_mode, *config.is_bounds)
        terms |= _weight_terms(config, raw, bounded * present, present)
        unbounded = log_weight.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp_()
        extremes |= {"ratio": (unbounded, present), "weight": (bounded, present)}
    elif config.use_tis:
        terms |= {name: columns[source] for name, source in TOKEN_WEIGHT_TERMS.items()}
        terms |= _sequence_means(config, columns, present)
        extremes["sequence_weight"] = (1 + terms["sequence_weight_excess"], present)

    keep = _rejection(config, columns, bounds, present, terms)
    if config.vetoes:
        offending = columns["catastrophic"]
        terms |= {"catastrophic_tokens": offending, "catastrophic_sequences": (offending > 0).to(torch.float64)}
        keep = keep * (offending == 0)
    if config.rs_second_moment_bound is not None:
        terms["trimmed_tokens"] = columns["trimmed"]
    if bounded is not None and config.tis_mode == "mask":
        keep = keep * inside(bounded)
    terms["kept_tokens"] = kept = keep * columns["kept"]

    lowest, highest = _extremes(extremes)
    return SequencePass(
        weight_S=bounded,
        keep_S=keep,
        kept_S=kept,
        sums=torch.stack([terms[name] for name in sum_names(config)], 1).sum(0),
        mins=lowest,
        maxs=highest,
    )


TOKEN_WEIGHT_TERMS = {
    "weights": "valid",
    "raw_weight_excess": "raw_excess",
    "weight": "weight",
    "weight_excess": "weight_excess",
    "weight_excess_squared": "weight_excess_squared",
    "weight_high": "high",
    "weight_low": "low",
}
"""Weights that differ from token to token count once per valid token: name of the sum to column of the table."""


def _weight_terms(
    config: RolloutCorrectionConfig, raw_S: Tensor, bounded_S: Tensor, present_S: Tensor
) -> dict[str, Tensor]:
    """Sequence-wide weights count once per sequence with a valid token."""
    lower, upper = config.is_bounds
    excess = (bounded_S - 1) * present_S
    return {
        "weights": present_S,
        "raw_weight_excess": (raw_S - 1) * present_S,
        "weight": bounded_S,
        "weight_excess": excess,
        "weight_excess_squared": excess.square(),
        "weight_high": (raw_S > upper) * present_S,
        "weight_low": (raw_S < lower) * present_S,
    }


def _rejection(
    config: RolloutCorrectionConfig,
    columns: dict[str, Tensor],
    bounds: AdaptiveBounds | None,
    present_S: Tensor,
    terms: dict[str, Tensor],
) -> Tensor:
    """1.0 where all sequence-wide criteria keep the sequence; `terms` gets what is rejected, together and each."""
    keep = torch.ones_like(present_S)
    for criterion in config.rejections:
        if criterion.per_token:
            rejected = columns[f"outside:{criterion.name}"]
        else:
            accepted = sequence_accepted(criterion, columns, bounds)
            keep = keep * accepted
            rejected = (1 - accepted) * columns["valid"]
        terms[f"rs_tokens:{criterion.name}"] = rejected
        terms[f"rs_sequences:{criterion.name}"] = (rejected > 0).to(torch.float64)
    if config.rejections:
        rejected = columns["valid"] - keep * columns["rs_kept"]
        terms |= {"rs_tokens": rejected, "rs_sequences": (rejected > 0).to(torch.float64)}
    if bounds is not None:
        judged_by = (bounds.k3, bounds.z_score, *bounds.log_bounds(config.rs_level))
        terms |= {name: value * present_S for name, value in zip(ADAPTIVE_SUMS, judged_by, strict=True)}
    return keep


def _sequence_means(
    config: RolloutCorrectionConfig, columns: dict[str, Tensor], present_S: Tensor
) -> dict[str, Tensor]:
    """The mean weight of each sequence after the mode, and whether that before it is out of bounds."""
    lower, upper = config.is_bounds
    n = columns["valid"].clamp_min(1)
    excess, raw = columns["weight_excess"] / n, 1 + columns["raw_excess"] / n
    return {
        "sequence_weight_excess": excess,
        "sequence_weight_excess_squared": excess.square(),
        "sequence_weight_high": (raw > upper) * present_S,
        "sequence_weight_low": (raw < lower) * present_S,
    }


def _extremes(measured: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Minima and maxima in the order of `MINIMA` and `MAXIMA`; ±inf for what is not measured.

    Args:
        measured: Name to values [S], and 1.0 where they count.
    """
    nothing = torch.zeros_like(next(iter(measured.values()))[0])
    pairs = [measured.get(name, (nothing, nothing)) for name in MAXIMA]
    values, present = (torch.nn.functional.pad(torch.stack(part), (0, 1)) for part in zip(*pairs, strict=True))
    lowest = values.masked_fill(present == 0, torch.inf).amin(1)
    highest = values.masked_fill(present == 0, -torch.inf).amax(1)
    return lowest[: len(MINIMA)], highest
