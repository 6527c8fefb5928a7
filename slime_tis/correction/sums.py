"""Named sums per sequence and per batch; their fields are columns of tables that ranks reduce.

Only the configuration decides which optional parts exist, so a rank without a sequence has the same
columns as the others. `stacked` converts fields to columns, `named` converts columns to fields.
`sequence_columns`, `batch_columns` and `EXTREMES` have the number of the column in each field.
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
class WeightSums(Generic[V]):
    """Sums of weights w, over tokens, over sequences, or over per-sequence mean weights.

    Both Σw and Σ(w − 1) are kept, for accuracy in float32: w − 1 is exactly −1 for a weight of
    e^−17, and w has only a few digits of the difference between 1 and 1.000001.
    """

    before: V | None
    """w before the mode; None for mean weights."""
    before_minus_1: V | None
    """w − 1 before the mode; None at the token level, where it is `ratio_minus_1`, and for mean
    weights."""
    total: V
    """w after the mode."""
    total_squared: V
    """w² after the mode."""
    minus_1: V
    """w − 1 after the mode."""
    minus_1_squared: V
    """(w − 1)² after the mode."""
    high: V
    """Weights above the upper bound before the mode."""
    low: V
    """Weights below the lower bound before the mode."""


@dataclass(frozen=True, kw_only=True)
class SequenceSums(Generic[V]):
    """Σ over a sequence's tokens; in `Correction`, [S] float64 tensors of complete sequences."""

    masked_in: V
    """Tokens of the loss mask."""
    valid: V
    """Usable tokens: tokens with finite log-probs, or all tokens under the neutral policy."""
    nonfinite: V
    """Tokens with a non-finite log-prob."""
    train: V
    """log π_train, over finite tokens."""
    log_ratio: V
    """Δ, over valid tokens; so are the sums below."""
    abs_log_ratio: V
    """|Δ|."""
    ratio_minus_1: V
    """ρ − 1 with ρ = exp(clamp(Δ, −20, 20))."""
    ratio_minus_1_squared: V
    """(ρ − 1)²."""
    rs_accepted: V
    """Tokens that no per-token rejection criterion rejects."""
    accepted: V
    """Tokens that per-token criteria, mask mode and trimming all accept."""
    weights: WeightSums[V] | None
    """None unless weights differ from token to token."""
    criteria: dict[str, V]
    """By the name of a criterion: its divergence, if that is summed, or its tokens out of bounds;
    without the criteria that follow from Σ Δ."""
    clamped_k3: V | None
    """k3 of Δ clamped to ±1, under adaptive bounds."""
    catastrophic: V | None
    """Tokens beyond a veto threshold."""
    trimmed: V | None
    """Tokens that second-moment trimming rejects."""
    advantage: V | None
    """Advantages, if the bounds of the weights depend on their sign."""


@dataclass(frozen=True, kw_only=True)
class PerplexitySums(Generic[V]):
    """Σ over sequences with a finite token; perplexities count only finite tokens."""

    training_log_ppl: V
    training_ppl: V
    rollout_log_ppl: V
    rollout_ppl: V
    log_ppl_diff: V
    log_ppl_abs_diff: V
    ppl_ratio: V


@dataclass(frozen=True, kw_only=True)
class Counts(Generic[V]):
    """Tokens, and sequences with at least one of them."""

    tokens: V
    sequences: V


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
    sequence_weight: V
    """exp(Σ Δ − m) over sequences, with m the batch's largest Σ Δ, so that nothing overflows and
    not all are 0."""
    sequence_weight_squared: V
    """exp(Σ Δ − m)² over sequences."""
    perplexity: PerplexitySums[V]
    weights: WeightSums[V] | None
    """Under `use_tis`, over tokens if weights differ from token to token, else over sequences."""
    mean_weights: WeightSums[V] | None
    """Over sequences, of the mean weight of their tokens, if weights differ from token to token."""
    rejected: dict[str, Counts[V]]
    """By the name of the criterion; "" is any criterion. Empty without criteria."""
    bounds: BoundSums[V] | None
    """Under adaptive bounds."""
    veto: Counts[V] | None
    """Catastrophic tokens, under a veto."""
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
    sequence_log_ratio: V
    """Σ Δ of a sequence. `BatchSums.sequence_weight` and its square are relative to the maximum."""


def stacked(sums: object) -> Tensor:
    """All fields, in their order, as columns [S, k], or as [k] if they are scalars."""
    return torch.stack(_values(sums), -1)


def named(like: SumsT, values: Iterable[Any]) -> SumsT:
    """An object with the parts of `like`, its fields filled with `values` in their order."""
    iterator = iter(values)
    filled: SumsT = _filled(like, iterator)
    assert next(iterator, None) is None, "more columns than fields"
    return filled


def number_of_columns(like: object) -> int:
    """How many values `named` takes."""
    return len(_values(like))


@lru_cache(maxsize=64)
def sequence_columns(config: RolloutCorrectionConfig) -> SequenceSums[int]:
    """The columns of a sequence's sums, with the optional parts of the configuration."""
    weights = None
    if config.has_token_weights:
        weights = _blank(WeightSums)
        if config.tis_level == "token":
            # Σ(w − 1) before the mode is Σ(ρ − 1) at this level, which is a column already.
            weights = _blank(WeightSums, before_minus_1=None)
    criteria = {}
    for criterion in config.rejections:
        if not criterion.uses_log_ratio:
            criteria[criterion.name] = 0
    columns = _blank(
        SequenceSums,
        weights=weights,
        criteria=criteria,
        clamped_k3=_present_if(config.adaptive),
        catastrophic=_present_if(config.vetoes),
        trimmed=_present_if(config.rs_second_moment_bound is not None),
        advantage=_present_if(config.signs_bounds),
    )
    return _numbered(columns)


@lru_cache(maxsize=64)
def batch_columns(config: RolloutCorrectionConfig) -> BatchSums[int]:
    """The columns of a batch's sums, with the optional parts of the configuration."""
    counts = _blank(Counts)
    weights = None
    if config.use_tis:
        weights = _blank(WeightSums)
    bounds = None
    if config.adaptive:
        bounds = _blank(BoundSums)
    veto = None
    if config.vetoes:
        veto = counts
    mean_weights = None
    if config.has_token_weights:
        # Of mean weights, only those after the mode are summed.
        mean_weights = _blank(WeightSums, before=None, before_minus_1=None)
    rejected = {}
    if config.rejections:
        rejected[""] = counts
    for criterion in config.rejections:
        rejected[criterion.name] = counts
    columns = _blank(
        BatchSums,
        perplexity=_blank(PerplexitySums),
        weights=weights,
        mean_weights=mean_weights,
        rejected=rejected,
        bounds=bounds,
        veto=veto,
        trimmed_tokens=_present_if(config.rs_second_moment_bound is not None),
    )
    return _numbered(columns)


def _blank(cls: type[SumsT], **parts: Any) -> SumsT:
    """An object with these parts, and 0 in all other fields."""
    zeros = {field.name: 0 for field in fields(cls)}  # type: ignore[arg-type]
    return cls(**(zeros | parts))


def _present_if(is_on: bool) -> int | None:
    """The placeholder of a column that only some configurations have."""
    if is_on:
        return 0
    return None


def _numbered(columns: SumsT) -> SumsT:
    """The same object with the number of its column in each field."""
    return named(columns, range(number_of_columns(columns)))


_VALUES = (Tensor, float, int)


def _parts(node: Any) -> dict[str, Any]:
    """The fields of a dataclass, or the items of a dict, in their order."""
    # `dataclasses.fields` would take longer than the sums of a small batch.
    if isinstance(node, dict):
        return node
    of_object: dict[str, Any] = vars(node)
    return of_object


def _values(node: Any) -> list[Any]:
    """The numbers or tensors of an object and its parts, depth first; None is left out."""
    values: list[Any] = []
    for part in _parts(node).values():
        if isinstance(part, _VALUES):
            values.append(part)
        elif part is not None:
            values += _values(part)
    return values


def _filled(node: Any, values: Iterator[Any]) -> Any:
    """A copy of an object with the next values of the iterator, in the order of `_values`."""
    parts = {}
    for name, part in _parts(node).items():
        if isinstance(part, _VALUES):
            parts[name] = next(values)
        elif part is None:
            parts[name] = None
        else:
            parts[name] = _filled(part, values)
    if isinstance(node, dict):
        return parts
    return type(node)(**parts)


EXTREMES: Extremes[int] = _numbered(_blank(Extremes))
"""The columns of the extremes, which every configuration has."""
