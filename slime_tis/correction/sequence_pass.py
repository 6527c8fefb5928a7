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
from slime_tis.correction.statistics import ADAPTIVE_SUMS, MINIMA, mismatch_terms, sum_names
from slime_tis.correction.token_pass import has_token_weights
from slime_tis.correction.weights import bounded_weights, inside


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
    """`Statistics.mins` of what is measured per sequence; +inf for weights that differ from token to token."""
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
    bounded = None
    if config.use_tis and not has_token_weights(config):
        raw = _sequence_weights(config, columns)
        bounded = bounded_weights(raw, config.tis_mode, *config.is_bounds)
        terms |= _weight_terms(config, raw, bounded * present, present)
    elif config.use_tis:
        terms |= {name: columns[source] for name, source in TOKEN_WEIGHT_TERMS.items()}

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

    lowest, highest = _extremes(terms["log_ppl_diff"], bounded, present)
    return SequencePass(
        weight_S=bounded,
        keep_S=keep,
        kept_S=kept,
        sums=torch.stack([terms[name] for name in sum_names(config)], 1).sum(0),
        mins=lowest,
        maxs=highest,
    )


def _sequence_weights(config: RolloutCorrectionConfig, columns: dict[str, Tensor]) -> Tensor:
    """exp(clamp(L, −20, 20)) of every sequence."""
    aggregation = LEVEL_AGGREGATION[config.tis_level]
    return safe_exp(sequence_log_weights(aggregation, columns["log_ratio"], columns["valid"]))


TOKEN_WEIGHT_TERMS = {
    "weights": "valid",
    "raw_weight_excess": "raw_excess",
    "weight": "weight",
    "weight_squared": "weight_squared",
    "weight_high": "high",
    "weight_low": "low",
}
"""Weights that differ from token to token count once per valid token: name of the sum to column of the table."""


def _weight_terms(
    config: RolloutCorrectionConfig, raw_S: Tensor, bounded_S: Tensor, present_S: Tensor
) -> dict[str, Tensor]:
    """Sequence-wide weights count once per sequence with a valid token."""
    lower, upper = config.is_bounds
    truncates = config.tis_mode == "truncate"
    return {
        "weights": present_S,
        "raw_weight_excess": (raw_S - 1) * present_S,
        "weight": bounded_S,
        "weight_squared": bounded_S.square(),
        "weight_high": (raw_S > upper) * present_S,
        "weight_low": torch.zeros_like(raw_S) if truncates else (raw_S < lower) * present_S,
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


def _extremes(log_ppl_diff_S: Tensor, weight_S: Tensor | None, present_S: Tensor) -> tuple[Tensor, Tensor]:
    """Minima and maxima in the order of `MINIMA` and `MAXIMA`, over sequences with a valid token."""
    measured = [log_ppl_diff_S] if weight_S is None else [log_ppl_diff_S, weight_S]
    values = torch.stack(measured, 1)
    values = torch.cat([values, values.new_zeros(1, len(measured))])
    absent = torch.cat([present_S, present_S.new_zeros(1)])[:, None] == 0
    lowest = values.masked_fill(absent, torch.inf).amin(0)
    highest = values.masked_fill(absent, -torch.inf).amax(0)
    missing = lowest.new_full((len(MINIMA) - len(measured),), torch.inf)
    return torch.cat([lowest, missing]), torch.cat([highest, -missing])
