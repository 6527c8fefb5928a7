"""The named sums: of each sequence, and over sequences; their fields are the columns of the tables that ranks reduce.

Which optional parts there are follows from the configuration alone, so that a rank without a sequence has the same
columns as the others. `stacked` and `named` go from fields to columns and back.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig

V = TypeVar("V")
SumsT = TypeVar("SumsT")


@dataclass(frozen=True, kw_only=True)
class TokenWeightSums(Generic[V]):
    """Σ over the valid tokens of a sequence, of weights w that differ from token to token."""

    before_minus_1: V | None
    """w − 1 before the mode; None at the token level, where it is `SequenceSums.ratio_minus_1`."""
    total: V
    """w after the mode."""
    minus_1: V
    """w − 1 after the mode."""
    minus_1_squared: V
    """(w − 1)² after the mode."""
    high: V
    """Tokens with w above the upper bound before the mode."""
    low: V
    """Tokens with w below the lower bound before the mode."""


@dataclass(frozen=True, kw_only=True)
class CriterionSums(Generic[V]):
    """Σ over the valid tokens of a sequence, for one rejection criterion; both None where it goes by Σ Δ."""

    outside: V | None = None
    """Tokens out of bounds, for a verdict per token and for the maximum of a sequence."""
    divergence: V | None = None
    """k2 or k3, for the sum or mean of a sequence."""


@dataclass(frozen=True, kw_only=True)
class SequenceSums(Generic[V]):
    """Σ over the tokens of a sequence. `correct` has them as [S] float64 tensors, over whole sequences."""

    masked_in: V
    """Tokens of the loss mask."""
    valid: V
    """Usable tokens: tokens with finite log-probs, or all tokens under the neutral policy."""
    nonfinite: V
    """Tokens with a non-finite log-prob."""
    train: V
    """log π_train, over finite tokens."""
    log_ratio: V
    """Δ, over valid tokens, as everything below."""
    abs_log_ratio: V
    """|Δ|."""
    ratio_minus_1: V
    """ρ − 1 with ρ = exp(clamp(Δ, −20, 20))."""
    ratio_minus_1_squared: V
    """(ρ − 1)²."""
    rs_accepted: V
    """Tokens that no per-token rejection criterion rejects."""
    accepted: V
    """Tokens that mask mode and trimming accept, too."""
    weights: TokenWeightSums[V] | None
    """Where weights differ from token to token."""
    criteria: dict[str, CriterionSums[V]]
    """By the name of the criterion, in the order of `config.rejections`."""
    clamped_k3: V | None
    """k3 of Δ clamped to ±1, under adaptive bounds."""
    catastrophic: V | None
    """Tokens beyond a veto threshold."""
    trimmed: V | None
    """Tokens that second-moment trimming rejects."""


@dataclass(frozen=True, kw_only=True)
class PerplexitySums(Generic[V]):
    """Σ over the sequences with a finite token, of the mean log-probs of their finite tokens."""

    training_log_ppl: V
    training_ppl: V
    rollout_log_ppl: V
    rollout_ppl: V
    log_ppl_diff: V
    log_ppl_abs_diff: V
    ppl_ratio: V


@dataclass(frozen=True, kw_only=True)
class WeightSums(Generic[V]):
    """Σ of the weights w: over valid tokens, or over sequences where a sequence has one weight."""

    count: V
    before_minus_1: V
    """w − 1 before the mode."""
    total: V
    """w after the mode."""
    minus_1: V
    """w − 1 after the mode."""
    minus_1_squared: V
    """(w − 1)² after the mode."""
    high: V
    """Above the upper bound before the mode."""
    low: V
    """Below the lower bound before the mode."""


@dataclass(frozen=True, kw_only=True)
class SequenceWeightSums(Generic[V]):
    """Σ over sequences of the mean w̄ of their tokens' weights."""

    minus_1: V
    """w̄ − 1 after the mode."""
    minus_1_squared: V
    """(w̄ − 1)² after the mode."""
    high: V
    """Sequences with w̄ above the upper bound before the mode."""
    low: V
    """Sequences with w̄ below the lower bound before the mode."""


@dataclass(frozen=True, kw_only=True)
class Counts(Generic[V]):
    """Tokens, and sequences with at least one of them."""

    tokens: V
    sequences: V


@dataclass(frozen=True, kw_only=True)
class RejectionSums(Generic[V]):
    """What the rejection criteria reject."""

    together: Counts[V]
    """By any of them."""
    criteria: dict[str, Counts[V]]
    """By each, by its name."""


@dataclass(frozen=True, kw_only=True)
class BoundSums(Generic[V]):
    """The adaptive bounds, once per sequence, so that merging leaves their mean as it is."""

    k3: V
    z_score: V
    log_lower: V
    log_upper: V


@dataclass(frozen=True, kw_only=True)
class BatchSums(Generic[V]):
    """Σ over the sequences of a batch, from which the metrics are computed."""

    sequences: V
    """Sequences with a valid token."""
    measured_sequences: V
    """Sequences with a finite token."""
    masked_in_tokens: V
    tokens: V
    """Valid tokens."""
    nonfinite_tokens: V
    accepted_tokens: V
    log_ratio: V
    abs_log_ratio: V
    ratio_minus_1: V
    ratio_squared_minus_1: V
    """ρ² − 1 over tokens."""
    sequence_ratio_squared_minus_1: V
    """ρ² − 1 over sequences, with ρ = exp(clamp(Σ Δ, −20, 20))."""
    perplexity: PerplexitySums[V]
    weights: WeightSums[V] | None
    """Under `use_tis`."""
    sequence_weights: SequenceWeightSums[V] | None
    """Where weights differ from token to token."""
    rejection: RejectionSums[V] | None
    """Where there are rejection criteria."""
    bounds: BoundSums[V] | None
    """Under adaptive bounds."""
    veto: Counts[V] | None
    """Catastrophic tokens, where there is a veto."""
    trimmed_tokens: V | None
    """Under second-moment trimming."""


@dataclass(frozen=True, kw_only=True)
class Extremes(Generic[V]):
    """Minima or maxima over the tokens and sequences of a batch; ±inf without any."""

    log_ppl_diff: V
    ratio: V
    """The weight before the mode."""
    sequence_weight: V
    """The mean weight of a sequence, after the mode."""
    weight: V
    """The weight inside the bounds in mask mode; in the other modes the same as `ratio`."""


def stacked(sums: object) -> Tensor:
    """All fields, in their order, as columns [S, k] (or as [k] where they are scalars)."""
    return torch.stack(_values(sums), -1)


def named(like: SumsT, values: Iterable[Any]) -> SumsT:
    """An object with the parts of `like`, its fields filled with `values` in their order."""
    iterator = iter(values)
    filled: SumsT = _filled(like, iterator)
    assert next(iterator, None) is None, "more columns than fields"
    return filled


@lru_cache(maxsize=64)
def sequence_columns(config: RolloutCorrectionConfig) -> SequenceSums[Any]:
    """The parts that the sums of a sequence have under a configuration; the values of the fields mean nothing."""
    before = None if config.tis_level == "token" else 0.0
    weights = TokenWeightSums(**_blank(TokenWeightSums, ("before_minus_1",)), before_minus_1=before)
    return SequenceSums(
        **_blank(SequenceSums, ("weights", "criteria", "clamped_k3", "catastrophic", "trimmed")),
        weights=weights if config.has_token_weights else None,
        criteria={
            criterion.name: CriterionSums(
                outside=0.0 if criterion.per_token or criterion.aggregation == "max" else None,
                divergence=0.0 if criterion.sums_divergence else None,
            )
            for criterion in config.rejections
        },
        clamped_k3=0.0 if config.adaptive else None,
        catastrophic=0.0 if config.vetoes else None,
        trimmed=0.0 if config.rs_second_moment_bound is not None else None,
    )


@lru_cache(maxsize=64)
def batch_columns(config: RolloutCorrectionConfig) -> BatchSums[Any]:
    """The parts that the sums of a batch have under a configuration; the values of the fields mean nothing."""
    optional = ("perplexity", "weights", "sequence_weights", "rejection", "bounds", "veto", "trimmed_tokens")
    counts = Counts(**_blank(Counts))
    rejection = RejectionSums(together=counts, criteria={criterion.name: counts for criterion in config.rejections})
    return BatchSums(
        **_blank(BatchSums, optional),
        perplexity=PerplexitySums(**_blank(PerplexitySums)),
        weights=WeightSums(**_blank(WeightSums)) if config.use_tis else None,
        sequence_weights=SequenceWeightSums(**_blank(SequenceWeightSums)) if config.has_token_weights else None,
        rejection=rejection if config.rejections else None,
        bounds=BoundSums(**_blank(BoundSums)) if config.adaptive else None,
        veto=counts if config.vetoes else None,
        trimmed_tokens=0.0 if config.rs_second_moment_bound is not None else None,
    )


_VALUES = (Tensor, float, int)

EXTREMES: Extremes[Any] = Extremes(log_ppl_diff=0.0, ratio=0.0, sequence_weight=0.0, weight=0.0)
"""The fields of the extremes, which every configuration has."""


def number_of_columns(like: object) -> int:
    """How many values `named` takes."""
    return len(_values(like))


def _blank(cls: type, without: tuple[str, ...] = ()) -> dict[str, Any]:
    return {field.name: 0.0 for field in fields(cls) if field.name not in without}


def _parts(node: Any) -> dict[str, Any]:
    return node if isinstance(node, dict) else vars(node)  # `dataclasses.fields` would cost more than small sums do


def _values(node: Any) -> list[Any]:
    """Returns the values of the fields, with nested parts expanded."""
    found: list[Any] = []
    for part in _parts(node).values():
        if isinstance(part, _VALUES):
            found.append(part)
        elif part is not None:
            found += _values(part)
    return found


def _filled(node: Any, values: Iterator[Any]) -> Any:
    parts = {
        name: next(values) if isinstance(part, _VALUES) else None if part is None else _filled(part, values)
        for name, part in _parts(node).items()
    }
    return parts if isinstance(node, dict) else type(node)(**parts)
