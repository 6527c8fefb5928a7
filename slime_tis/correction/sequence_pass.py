"""What is decided once all tokens have been seen: verdicts and weights of whole sequences, on the reduced table.

Shapes: suffix _S is per sequence.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_tis.correction.adaptive import AdaptiveBounds
from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.criteria import LEVEL_AGGREGATION
from slime_tis.correction.ratio import LOG_RATIO_BOUND, in_float32, indicator, safe_exp, sequence_log_weights
from slime_tis.correction.rejection import sequence_accepted
from slime_tis.correction.sums import (
    BatchSums,
    BoundSums,
    Counts,
    Extremes,
    PerplexitySums,
    RejectionSums,
    SequenceSums,
    SequenceWeightSums,
    WeightSums,
    stacked,
)

LARGEST_EXPONENT = 700.0
"""The ratio of a whole sequence is reported up to e^700, where float64 ends; its weight ends at e^20."""
LOG_PPL_BOUND = 80.0
"""exp of a perplexity is taken up to e^80, so that sums of perplexities stay finite."""


@dataclass(frozen=True)
class SequencePass:
    """Weights and verdicts of whole sequences, and what they add to the statistics."""

    weight_S: Tensor | None
    """Bounded weight of the sequence; None where weights differ from token to token or are off."""
    accept_S: Tensor
    """1.0 where the sequence as a whole is accepted."""
    accepted_S: Tensor
    """Number of accepted tokens."""
    sums: Tensor
    """`BatchSums` as columns."""
    mins: Tensor
    """`Extremes` of per-sequence values as columns; +inf for per-token values."""
    maxs: Tensor
    """The same for the maxima, with −inf."""


def sequence_pass(
    config: RolloutCorrectionConfig, sums_S: SequenceSums[Tensor], bounds: AdaptiveBounds | None = None
) -> SequencePass:
    """Sequence-wide weights, rejection and statistics.

    Args:
        config: The options.
        sums_S: Sums over whole sequences, reduced over context-parallel ranks.
        bounds: Of the global batch, where rejection is adaptive.
    """
    nonempty_S = (sums_S.valid > 0).to(torch.float64)
    weight_S, weights = _sequence_weights(config, sums_S, nonempty_S)
    accept_S, rejection = _rejection(config, sums_S, bounds)
    if sums_S.catastrophic is not None:
        accept_S = accept_S * (sums_S.catastrophic == 0)
    if weight_S is not None and config.mode.rejects:
        accept_S = accept_S * indicator(torch.gt, weight_S, 0.0)
    accepted_S = accept_S * sums_S.accepted
    terms_S = replace(
        _mismatch_terms(sums_S, nonempty_S, accepted_S),
        weights=weights,
        sequence_weights=_means_of_token_weights(config, sums_S, nonempty_S),
        rejection=rejection,
        bounds=None if bounds is None else _bound_terms(config, bounds, nonempty_S),
        veto=None if sums_S.catastrophic is None else _counts(sums_S.catastrophic),
        trimmed_tokens=sums_S.trimmed,
    )
    mins, maxs = _extremes(config, sums_S, terms_S, weight_S, nonempty_S)
    return SequencePass(
        weight_S=weight_S,
        accept_S=accept_S,
        accepted_S=accepted_S,
        sums=stacked(terms_S).sum(0),
        mins=mins,
        maxs=maxs,
    )


def _mismatch_terms(sums_S: SequenceSums[Tensor], nonempty_S: Tensor, accepted_S: Tensor) -> BatchSums[Tensor]:
    """What each sequence adds to the sums that measure the gap; nothing where it has no valid token.

    Perplexities are of the tokens whose log-probs are finite. A token that counts as ratio 1 (the neutral policy) has
    no log-prob.
    """
    finite_S = sums_S.masked_in - sums_S.nonfinite
    measured_S = (finite_S > 0).to(torch.float64)
    n_S = finite_S.clamp_min(1)
    training_S, difference_S = -sums_S.train / n_S, -sums_S.log_ratio / n_S
    rollout_S = training_S - difference_S
    return BatchSums(
        sequences=nonempty_S,
        measured_sequences=measured_S,
        masked_in_tokens=sums_S.masked_in,
        tokens=sums_S.valid,
        nonfinite_tokens=sums_S.nonfinite,
        accepted_tokens=accepted_S,
        log_ratio=sums_S.log_ratio,
        abs_log_ratio=sums_S.abs_log_ratio,
        ratio_minus_1=sums_S.ratio_minus_1,
        ratio_squared_minus_1=sums_S.ratio_minus_1_squared + 2 * sums_S.ratio_minus_1,
        sequence_ratio_squared_minus_1=torch.expm1(2 * sums_S.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)),
        perplexity=PerplexitySums(
            training_log_ppl=training_S,
            training_ppl=_exp(training_S) * measured_S,
            rollout_log_ppl=rollout_S,
            rollout_ppl=_exp(rollout_S) * measured_S,
            log_ppl_diff=difference_S,
            log_ppl_abs_diff=difference_S.abs(),
            ppl_ratio=_exp(difference_S) * measured_S,
        ),
        weights=None,
        sequence_weights=None,
        rejection=None,
        bounds=None,
        veto=None,
        trimmed_tokens=None,
    )


def _sequence_weights(
    config: RolloutCorrectionConfig, sums_S: SequenceSums[Tensor], nonempty_S: Tensor
) -> tuple[Tensor | None, WeightSums[Tensor] | None]:
    """The bounded weight of each sequence, where it has one, and what it adds to the statistics.

    Weights that differ from token to token count once per valid token, others once per sequence with one.
    """
    own = sums_S.weights
    if own is not None:
        before_S = sums_S.ratio_minus_1 if own.before_minus_1 is None else own.before_minus_1
        return None, WeightSums(
            count=sums_S.valid,
            before_minus_1=before_S,
            total=own.total,
            minus_1=own.minus_1,
            minus_1_squared=own.minus_1_squared,
            high=own.high,
            low=own.low,
        )
    if not config.use_tis:
        return None, None
    lower, upper = config.is_bounds
    raw_S = safe_exp(sequence_log_weights(LEVEL_AGGREGATION[config.tis_level], sums_S.log_ratio, sums_S.valid))
    weight_S = config.mode.bound(raw_S, in_float32(lower), in_float32(upper))
    minus_1_S = (weight_S - 1) * nonempty_S
    return weight_S, WeightSums(
        count=nonempty_S,
        before_minus_1=(raw_S - 1) * nonempty_S,
        total=weight_S * nonempty_S,
        minus_1=minus_1_S,
        minus_1_squared=minus_1_S.square(),
        high=(raw_S > upper) * nonempty_S,
        low=(raw_S < lower) * nonempty_S,
    )


def _means_of_token_weights(
    config: RolloutCorrectionConfig, sums_S: SequenceSums[Tensor], nonempty_S: Tensor
) -> SequenceWeightSums[Tensor] | None:
    """The mean weight of each sequence after the mode, and whether that before it is out of bounds."""
    own = sums_S.weights
    if own is None:
        return None
    lower, upper = config.is_bounds
    n_S = sums_S.valid.clamp_min(1)
    minus_1_S = own.minus_1 / n_S
    raw_S = 1 + (sums_S.ratio_minus_1 if own.before_minus_1 is None else own.before_minus_1) / n_S
    return SequenceWeightSums(
        minus_1=minus_1_S,
        minus_1_squared=minus_1_S.square(),
        high=(raw_S > upper) * nonempty_S,
        low=(raw_S < lower) * nonempty_S,
    )


def _rejection(
    config: RolloutCorrectionConfig, sums_S: SequenceSums[Tensor], bounds: AdaptiveBounds | None
) -> tuple[Tensor, RejectionSums[Tensor] | None]:
    """1.0 where all sequence-wide criteria accept the sequence; what is rejected, together and by each."""
    accept_S, criteria = torch.ones_like(sums_S.valid), {}
    for criterion in config.rejections:
        outside_S = sums_S.criteria[criterion.name].outside
        if criterion.per_token and outside_S is not None:
            rejected_S = outside_S
        else:
            accepted_S = sequence_accepted(criterion, sums_S, bounds)
            accept_S = accept_S * accepted_S
            rejected_S = (1 - accepted_S) * sums_S.valid
        criteria[criterion.name] = _counts(rejected_S)
    if not criteria:
        return accept_S, None
    return accept_S, RejectionSums(together=_counts(sums_S.valid - accept_S * sums_S.rs_accepted), criteria=criteria)


def _bound_terms(config: RolloutCorrectionConfig, bounds: AdaptiveBounds, nonempty_S: Tensor) -> BoundSums[Tensor]:
    log_lower, log_upper = bounds.log_bounds(config.rs_level)
    return BoundSums(
        k3=bounds.k3 * nonempty_S,
        z_score=bounds.z_score * nonempty_S,
        log_lower=log_lower * nonempty_S,
        log_upper=log_upper * nonempty_S,
    )


def _extremes(
    config: RolloutCorrectionConfig,
    sums_S: SequenceSums[Tensor],
    terms_S: BatchSums[Tensor],
    weight_S: Tensor | None,
    nonempty_S: Tensor,
) -> tuple[Tensor, Tensor]:
    """`Extremes` of the sequences as columns: minima and maxima, ±inf for what is not measured."""
    none_S = torch.zeros_like(nonempty_S)
    values = Extremes(log_ppl_diff=terms_S.perplexity.log_ppl_diff, ratio=none_S, sequence_weight=none_S, weight=none_S)
    counts = Extremes(log_ppl_diff=terms_S.measured_sequences, ratio=none_S, sequence_weight=none_S, weight=none_S)
    if weight_S is not None:
        log_weight = sequence_log_weights(LEVEL_AGGREGATION[config.tis_level], sums_S.log_ratio, sums_S.valid)
        ratio_S = log_weight.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp_()
        values, counts = (
            replace(values, ratio=ratio_S, weight=weight_S),
            replace(counts, ratio=nonempty_S, weight=nonempty_S),
        )
    if terms_S.sequence_weights is not None:
        values = replace(values, sequence_weight=1 + terms_S.sequence_weights.minus_1)
        counts = replace(counts, sequence_weight=nonempty_S)
    table, present = (torch.nn.functional.pad(stacked(part), (0, 0, 0, 1)) for part in (values, counts))
    return table.masked_fill(present == 0, torch.inf).amin(0), table.masked_fill(present == 0, -torch.inf).amax(0)


def _counts(tokens_S: Tensor) -> Counts[Tensor]:
    return Counts(tokens=tokens_S, sequences=(tokens_S > 0).to(torch.float64))


def _exp(log_value_S: Tensor) -> Tensor:
    return log_value_S.clamp(-LOG_PPL_BOUND, LOG_PPL_BOUND).exp_()
