"""Compares two recordings.

Finds the first operation that differs, and whether it still differs if the inputs are equal.

Shapes: suffix _T the packed tokens of all samples, _K the compared tokens, F features, V the
vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.parity.recording import EMBEDDING, FINAL_NORM, HEAD, LAYER_END, Operation, Recording
from slime_tis.parity.samples import Samples

KL_ROWS = 16
"""Tokens whose complete distributions are compared at once, which bounds the memory."""
LARGER = 16.0
"""Ratio to the first difference above which a later operation's own error is named, too."""
ROUNDING = 8.0
"""Largest own error that rounding explains, in steps of the coarser data type at 1."""


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
    """How the results of one operation differ."""

    operation: Operation
    difference: Difference
    own: Difference | None = None
    """The difference if both executions get the reference's inputs; None if that was not run."""
    dtypes: tuple[str, str]
    """Data types of both results."""

    @property
    def own_error(self) -> float:
        """The own difference relative to the largest value, infinity for NaN; 0 if not measured."""
        if self.own is None:
            return 0.0
        relative = self.own.relative
        return math.inf if math.isnan(relative) else relative

    @property
    def rounding(self) -> float:
        """Largest own error that the coarser data type explains."""
        steps = [torch.finfo(getattr(torch, dtype)).eps for dtype in self.dtypes]
        return ROUNDING * max(steps)


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
    cause: str = ""
    """The fault of the LoRA adapter, or why none is named; empty if none was searched for."""

    @property
    def first(self) -> OperationDifference | None:
        """The first operation that differs."""
        for row in self.operations:
            if not row.difference.is_equal:
                return row
        return None

    @property
    def largest_fault(self) -> OperationDifference | None:
        """The operation with the largest own error; None if rounding explains all own errors."""
        largest = None
        for row in self.operations:
            if row.own_error <= row.rounding:
                continue
            if largest is None or row.own_error > largest.own_error:
                largest = row
        return largest

    @property
    def later_fault(self) -> OperationDifference | None:
        """`largest_fault` if it comes after `first` and is far larger, else None."""
        first = self.first
        largest = self.largest_fault
        if first is None or largest is None or largest.operation == first.operation:
            return None
        if largest.own_error <= LARGER * first.difference.relative:
            return None
        return largest

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains every own difference; False if none was measured."""
        first = self.first
        return first is not None and first.own is not None and self.largest_fault is None

    @property
    def is_equal(self) -> bool:
        """Whether all log-probs and all recorded results are equal."""
        return self.log_probs.difference.is_equal and self.first is None

    @property
    def hidden_states(self) -> list[OperationDifference]:
        """Embedding, ends of layers, final norm and output layer."""
        outside = (EMBEDDING, FINAL_NORM, HEAD, LAYER_END)
        return [row for row in self.operations if row.operation.name in outside]

    def within(self, layer: int | None) -> list[OperationDifference]:
        """Operations of one layer; None: of none."""
        if layer is None:
            return []
        return [row for row in self.operations if row.operation.layer == layer]


def compare(
    reference: Recording, other: Recording, isolated: Recording | None, samples: Samples
) -> Comparison:
    """Compares two recordings.

    Args:
        reference: The execution that is taken as right.
        other: The other execution.
        isolated: The other execution, each of whose operations got the reference's inputs; None if
            that was not run.
        samples: The tokens of all three.
    """
    rows = []
    shared = [operation for operation in reference.results if operation in other.results]
    for operation in sorted(shared, key=lambda operation: operation.order):
        difference = _operation_difference(reference, other, operation)
        if difference is None:
            continue
        own = None
        if isolated is not None and operation in isolated.results:
            own = _operation_difference(reference, isolated, operation)
        row = OperationDifference(
            operation=operation,
            difference=difference,
            own=own,
            dtypes=(_dtype_name(reference, operation), _dtype_name(other, operation)),
        )
        rows.append(row)
    return Comparison(
        reference=reference,
        other=other,
        samples=samples,
        log_probs=_log_probs(reference, other),
        operations=rows,
    )


def _dtype_name(recording: Recording, operation: Operation) -> str:
    dtype = recording.results[operation].values_TF.dtype
    return str(dtype).removeprefix("torch.")


def _operation_difference(a: Recording, b: Recording, operation: Operation) -> Difference | None:
    """Compares results of one operation; None if they have other sizes or no common token."""
    first = a.results[operation]
    second = b.results[operation]
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
    operation = Operation(HEAD)
    if operation not in reference.results or operation not in other.results:
        return None
    first = reference.results[operation]
    second = other.results[operation]
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
