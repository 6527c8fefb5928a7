"""Compares two recordings.

Finds the first operation that differs, and whether it still differs if the inputs are equal.

Shapes: suffix _T the packed tokens of all samples, _K the compared tokens, F features, V the
vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.parity.recording import EMBEDDING, FINAL_NORM, HEAD, LAYER_END, Place, Recording
from slime_tis.parity.samples import Samples

KL_ROWS = 16
"""Tokens whose complete distributions are compared at once, which bounds the memory."""
LARGER = 16.0
"""Ratio from which a later operation's own error is named in addition to the first one."""
ROUNDING = 8.0
"""Steps of the coarser data type at 1 that rounding explains, in proportion to the largest
value."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two tensors."""

    values: int
    """Number of compared values."""
    differing: int
    """Number of values that differ. NaN differs from every value, also from NaN; 0 equals −0."""
    nan: int
    """Number of differing values that are NaN in one tensor at least."""
    largest: float
    """max abs(a − b); NaN if a value is NaN."""
    scale: float
    """max abs(a), of finite values."""
    token: int | None
    """The first packed token with a differing value."""
    width: int = 1
    """Values per token."""

    @property
    def is_equal(self) -> bool:
        """Whether all values are equal."""
        return self.differing == 0

    @property
    def share(self) -> float:
        """Share of values that differ."""
        return self.differing / max(self.values, 1)

    @property
    def relative(self) -> float:
        """`largest` divided by `scale`."""
        if self.is_equal:
            return 0.0
        return self.largest / self.scale if self.scale > 0 else math.inf

    @property
    def bits(self) -> float:
        """Leading bits that agree, −log2 of `relative`; infinity if all values are equal."""
        if self.is_equal:
            return math.inf
        if not 0 < self.relative < math.inf:
            return 0.0
        return max(-math.log2(self.relative), 0.0)


@dataclass(frozen=True, kw_only=True)
class OperationDifference:
    """The difference of one operation's results."""

    place: Place
    difference: Difference
    own: Difference | None = None
    """The difference if both executions get the reference's inputs; None if that was not run."""
    dtypes: tuple[str, str]
    """Data types of both results."""


@dataclass(frozen=True, kw_only=True)
class LogProbs:
    """The difference of log-probs, in nats."""

    tokens: int
    difference: Difference
    mean: float
    """Mean abs(Δ)."""
    kl_mean: float | None
    """Mean KL(reference‖other) over the complete distributions; None without logits."""
    kl_max: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two executions of the same tokens."""

    reference: Recording
    other: Recording
    samples: Samples
    log_probs: LogProbs
    operations: list[OperationDifference]
    """In the order of computation."""

    @property
    def first(self) -> OperationDifference | None:
        """The first operation that differs."""
        for operation in self.operations:
            if not operation.difference.is_equal:
                return operation
        return None

    @property
    def largest_own(self) -> OperationDifference | None:
        """The operation with the largest own error in proportion to its result."""
        largest = None
        for operation in self.operations:
            if operation.own is None or operation.own.is_equal:
                continue
            if largest is None or not _size(operation) <= _size(largest):
                largest = operation
        return largest

    @property
    def larger(self) -> OperationDifference | None:
        """A later operation whose own error is far larger than the first one's; None without."""
        first = self.first
        largest = self.largest_own
        if first is None or largest is None or largest.place == first.place:
            return None
        steps = [torch.finfo(getattr(torch, dtype)).eps for dtype in largest.dtypes]
        if _size(largest) <= max(LARGER * first.difference.relative, ROUNDING * max(steps)):
            return None
        return largest

    @property
    def is_equal(self) -> bool:
        """Whether all log-probs and all recorded results are equal."""
        return self.log_probs.difference.is_equal and self.first is None

    @property
    def hidden_states(self) -> list[OperationDifference]:
        """Embedding, ends of layers, final norm and output layer."""
        outside = (EMBEDDING, FINAL_NORM, HEAD, LAYER_END)
        return [row for row in self.operations if row.place.operation in outside]

    def within(self, layer: int | None) -> list[OperationDifference]:
        """Operations of one layer; None: of none."""
        if layer is None:
            return []
        return [row for row in self.operations if row.place.layer == layer]


def _size(operation: OperationDifference) -> float:
    """An own error in proportion to the result; infinity for NaN."""
    assert operation.own is not None
    relative = operation.own.relative
    return math.inf if math.isnan(relative) else relative


def compare(
    reference: Recording, other: Recording, isolated: Recording | None, samples: Samples
) -> Comparison:
    """Compares two recordings.

    Args:
        reference: The execution that is taken as right.
        other: The other execution.
        isolated: The other execution, each of whose operations got the reference's inputs.
        samples: The tokens of all three.
    """
    operations = []
    shared = [place for place in reference.places if place in other.places]
    for place in sorted(shared, key=lambda place: place.order):
        difference = _place_difference(reference, other, place)
        if difference is None:
            continue
        own = None
        if isolated is not None and place in isolated.places:
            own = _place_difference(reference, isolated, place)
        dtypes = []
        for recording in (reference, other):
            dtypes.append(_dtype_name(recording.places[place].values_TF.dtype))
        operations.append(
            OperationDifference(
                place=place, difference=difference, own=own, dtypes=(dtypes[0], dtypes[1])
            )
        )
    return Comparison(
        reference=reference,
        other=other,
        samples=samples,
        log_probs=_log_probs(reference, other),
        operations=operations,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place_difference(a: Recording, b: Recording, place: Place) -> Difference | None:
    """Compares results of one operation; None if they have other sizes or no common token."""
    first = a.places[place]
    second = b.places[place]
    if first.values_TF.shape != second.values_TF.shape:
        return None
    is_common_T = first.is_recorded_T & second.is_recorded_T
    if not is_common_T.any():
        return None
    tokens_K = is_common_T.nonzero().squeeze(1)
    return difference(first.values_TF[tokens_K], second.values_TF[tokens_K], tokens_K)


def difference(a_TF: Tensor, b_TF: Tensor, tokens_K: Tensor) -> Difference:
    """Compares the rows of two tensors of the same shape, of any data types.

    Args:
        a_TF: The reference.
        b_TF: The other tensor.
        tokens_K: The packed tokens of the rows.
    """
    a = a_TF.float()
    b = b_TF.float()
    # NaN != NaN is true.
    differs = a != b
    is_nan = a.isnan() | b.isnan()
    largest = 0.0
    token = None
    if differs.any():
        # Equal values are left out, because ∞ − ∞ is NaN.
        largest = float((a[differs] - b[differs]).abs().max())
        token = int(tokens_K[differs.any(-1)][0])
    finite = a[a.isfinite()]
    return Difference(
        values=a.numel(),
        differing=int(differs.sum()),
        nan=int(is_nan.sum()),
        largest=largest,
        scale=float(finite.abs().max()) if finite.numel() else 0.0,
        token=token,
        width=a.shape[-1],
    )


def _log_probs(reference: Recording, other: Recording) -> LogProbs:
    is_common_T = reference.is_scored_T & other.is_scored_T
    tokens_K = is_common_T.nonzero().squeeze(1)
    a = reference.log_probs_T[tokens_K, None]
    b = other.log_probs_T[tokens_K, None]
    result = difference(a, b, tokens_K)
    kl = _kl(reference, other)
    mean = 0.0
    if not result.is_equal:
        deltas = torch.where(a == b, 0.0, (a - b).abs())
        mean = float(deltas.mean())
    return LogProbs(
        tokens=len(tokens_K),
        difference=result,
        mean=mean,
        kl_mean=None if kl is None else float(kl.mean()),
        kl_max=None if kl is None else float(kl.max()),
    )


def _kl(reference: Recording, other: Recording) -> Tensor | None:
    """Returns KL(reference‖other) [K] in float64, nats; None if one side has no logits.

    KL(p‖q) = Σ_v p_v (log p_v − log q_v)
    """
    place = Place(HEAD)
    if place not in reference.places or place not in other.places:
        return None
    first = reference.places[place]
    second = other.places[place]
    is_common_T = first.is_recorded_T & second.is_recorded_T
    if first.values_TF.shape != second.values_TF.shape or not is_common_T.any():
        return None
    parts = []
    for rows in is_common_T.nonzero().squeeze(1).split(KL_ROWS):
        log_p = first.values_TF[rows].double().log_softmax(-1)
        log_q = second.values_TF[rows].double().log_softmax(-1)
        terms = log_p.exp() * (log_p - log_q)
        # 0 · log 0 is 0.
        parts.append(terms.masked_fill(log_p == -math.inf, 0.0).sum(-1))
    return torch.cat(parts)
