"""Records the results of an execution's operations for every token, and its log-probs.

A `Recorder` copies the results while a model runs. It can also replace each result by the result of
another recording. Then every operation gets the inputs of that recording, and an operation that
still gives another result differs by itself.

Shapes: suffix _N rows of one call, _T the packed tokens of all samples, _F features.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

IN_A_LAYER = (
    "norm before attention",
    "query latent projection",
    "query latent norm",
    "query projection",
    "key projection",
    "value projection",
    "query-key-value-gate projection",
    "rate-decay projection",
    "key-value latent projection",
    "key-value latent norm",
    "query norm",
    "key norm",
    "query rope",
    "key rope",
    "attention",
    "output projection",
    "norm after attention",
    "residual after attention",
    "norm before MLP",
    "router logits",
    "router",
    "experts",
    "shared expert before its gate",
    "shared expert",
    "gate projection",
    "up projection",
    "activation",
    "down projection",
    "MLP",
    "norm after MLP",
    "residual after MLP",
)
"""Operations of a layer in the order of computation."""
EMBEDDING = "embedding"
FINAL_NORM = "final norm"
HEAD = "output layer"
LAYER_END = IN_A_LAYER[-1]


class Operation(NamedTuple):
    """An operation of a model."""

    name: str
    """`EMBEDDING`, one of `IN_A_LAYER`, `FINAL_NORM` or `HEAD`."""
    layer: int | None = None
    """Number from 0; None outside the layers."""

    def __str__(self) -> str:
        if self.layer is None:
            return self.name
        return f"{self.name} of layer {self.layer}"

    @property
    def order(self) -> tuple[float, int]:
        """Sorts operations by the order of computation."""
        if self.layer is not None:
            return self.layer, IN_A_LAYER.index(self.name)
        if self.name == EMBEDDING:
            return -1, 0
        return float("inf"), (FINAL_NORM, HEAD).index(self.name)


class Rows(NamedTuple):
    """The rows of a call that are tokens of the samples; the others are padding."""

    shape: tuple[int, int]
    """Sequences and columns of the call."""
    row_N: Tensor
    """Index in the call's flattened sequences and columns."""
    token_N: Tensor
    """The packed token."""


@dataclass(frozen=True)
class Result:
    """What one operation computed for every token."""

    values_TF: Tensor
    is_recorded_T: Tensor
    """bool: whether the execution computed the token."""


@dataclass(kw_only=True)
class Recording:
    """One execution of the samples."""

    name: str
    """The execution, for example `decode`."""
    precision: str
    results: dict[Operation, Result] = field(default_factory=dict)
    log_probs_T: Tensor
    """float32; NaN also for tokens without one."""
    is_scored_T: Tensor
    """bool: whether the execution gave a log-prob."""
    shapes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of forward passes by sequences and columns."""


class Recorder:
    """Copies results of operations, and replaces them if `substitutes` has the operation."""

    def __init__(self, total: int, substitutes: Recording | None = None) -> None:
        """`total` is the number of packed tokens."""
        self.total = total
        self.substitutes = {} if substitutes is None else substitutes.results
        self.results: dict[Operation, Result] = {}
        self.shapes: dict[tuple[int, int], int] = {}
        self.rows: Rows | None = None
        """The tokens of the running pass; None records nothing."""
        self.head_rows: Rows | None = None
        """The tokens whose logits the running pass computes."""

    def begin(self, rows: Rows, head_rows: Rows | None = None) -> None:
        """Announces a forward pass. By default, all tokens of the pass get logits."""
        self.rows = rows
        self.head_rows = head_rows or rows
        self.shapes[rows.shape] = self.shapes.get(rows.shape, 0) + 1

    def take(self, operation: Operation, output: Tensor) -> Tensor | None:
        """Copies the output [sequences, columns, …] of an operation in the running pass.

        Returns:
            The output to use instead; None keeps it.
        """
        rows = self.head_rows if operation.name == HEAD else self.rows
        if rows is None:
            return None
        output_rows = output.detach().reshape(rows.shape[0] * rows.shape[1], -1)
        result = self.results.get(operation)
        if result is None:
            result = Result(
                torch.zeros(self.total, output_rows.shape[1], dtype=output.dtype),
                torch.zeros(self.total, dtype=torch.bool),
            )
            self.results[operation] = result
        result.values_TF[rows.token_N] = output_rows[rows.row_N].cpu()
        result.is_recorded_T[rows.token_N] = True
        substitute = self.substitutes.get(operation)
        if substitute is None or substitute.values_TF.shape[1] != output_rows.shape[1]:
            return None
        is_replaced_N = substitute.is_recorded_T[rows.token_N]
        replaced_rows = output_rows.clone()
        tokens_N = rows.token_N[is_replaced_N]
        replaced_rows[rows.row_N[is_replaced_N]] = substitute.values_TF[tokens_N].to(replaced_rows)
        return replaced_rows.reshape(output.shape)


@dataclass(frozen=True, kw_only=True)
class Site:
    """A module whose output or first input has the results of some operations."""

    module: nn.Module
    operations: tuple[Operation, ...]
    is_input: bool = False
    """Whether the module's first input is the result."""
    split: Callable[[Tensor], Sequence[Tensor]] = lambda value: [value]
    """Returns one result per operation."""
    join: Callable[[Sequence[Tensor], Tensor], Tensor] = lambda parts, value: parts[0]
    """The inverse: (results, a tensor of the wanted shape) → the module's value."""


def split_in_half(value: Tensor) -> Sequence[Tensor]:
    """Returns the two results of a joint gate and up projection; see `Site.split`."""
    return value.chunk(2, -1)


def side_by_side(results: Sequence[Tensor], value: Tensor) -> Tensor:
    """Joins results whose features follow each other in a module's value; see `Site.join`."""
    return torch.cat(list(results), -1).reshape(value.shape)


@contextmanager
def hooked(sites: Sequence[Site], recorder: Recorder) -> Iterator[None]:
    """Records the sites' results during the block."""
    with ExitStack() as stack:
        for site in sites:
            if site.is_input:
                handle = site.module.register_forward_pre_hook(_before(site, recorder))
            else:
                handle = site.module.register_forward_hook(_after(site, recorder))
            stack.callback(handle.remove)
        yield


def _observed(site: Site, recorder: Recorder, value: Tensor) -> Tensor | None:
    """Records a module's value; returns the value to use instead, or None."""
    parts = list(site.split(value))
    is_replaced = False
    for index, operation in enumerate(site.operations):
        replaced = recorder.take(operation, parts[index])
        if replaced is not None:
            parts[index] = replaced
            is_replaced = True
    if not is_replaced:
        return None
    return site.join(parts, value)


def _before(site: Site, recorder: Recorder) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> Any:
        replaced = _observed(site, recorder, args[0])
        if replaced is None:
            return None
        return (replaced, *args[1:])

    return hook


def _after(site: Site, recorder: Recorder) -> Callable[..., Any]:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        is_tuple = isinstance(output, tuple)
        replaced = _observed(site, recorder, output[0] if is_tuple else output)
        if replaced is None:
            return None
        if is_tuple:
            return (replaced, *output[1:])
        return replaced

    return hook


@contextmanager
def replaced_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces a function of a module during the block; does nothing if there is none."""
    original = getattr(owner, name, None)
    if original is None:
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
