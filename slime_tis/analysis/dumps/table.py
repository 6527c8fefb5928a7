"""One row per response token: log-probs of both engines, and the effects of the correction.

Shapes: suffix _N the tokens of all samples, one sample after another; _S the samples.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from slime_tis.correction import LOG_PROB_LIMIT
from slime_tis.errors import first_line, quoted

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt8 = NDArray[np.uint8]
Bool = NDArray[np.bool_]
Column = NDArray[Any]

REQUIRED_COLUMNS = ("train_log_prob", "old_log_prob", "rollout_log_prob", "loss_mask")
"""Columns that every table has."""
TOKEN_COLUMNS: dict[str, type] = {
    "train_log_prob": np.float32,
    "old_log_prob": np.float32,
    "rollout_log_prob": np.float32,
    "loss_mask": np.uint8,
    "token": np.int32,
    "weight": np.float32,
    "bounded_weight": np.float32,
    "rejected": np.int32,
    "vetoed": np.uint8,
    "advantage": np.float32,
    "entropy": np.float32,
    "weight_version": np.int32,
    "rollout_worker": np.int32,
    "turn": np.int32,
    "experts": np.int32,
}
"""Token columns with their types. Experts are [N, layers, k], all others [N]."""
SAMPLE_COLUMNS: dict[str, type] = {
    "step": np.int32,
    "sample_index": np.int32,
    "group": np.int32,
    "reward": np.float32,
    "truncated": np.uint8,
}
"""Numeric sample columns, [S], with their types."""
TEXT_COLUMNS = ("text", "prompt_text")
"""Sample columns of text."""
OBJECT_COLUMNS: dict[str, Any] = {"text": "", "prompt_text": "", "prompt": np.zeros(0, np.int32)}
"""Sample columns that are tuples, with the entry of a sample that has no value."""
COLUMNS: dict[str, type] = TOKEN_COLUMNS | SAMPLE_COLUMNS | dict.fromkeys(OBJECT_COLUMNS, object)
METADATA: dict[str, type | tuple[type, ...]] = {
    "source": str,
    "run": str,
    "precision": str,
    "rollout_precision": str,
    "tokenizer": str,
    "old_policy": str,
    "flags": dict,
    "policy": dict,
    "sampled": dict,
    "temperature": (int, float),
    "num_experts": int,
    "replays_experts": bool,
    "criteria": list,
    "workers": list,
}
"""Metadata keys that this program reads, with the types of the values."""
MISSING: dict[type, float] = {np.float32: float("nan"), np.int32: -1, np.uint8: 0}
"""Value of a sample that lacks a column of other samples. In `rejected`, it is 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleParts:
    """The columns of one sample: one entry per response token, or single values."""

    train_log_prob: Sequence[float] | Column
    rollout_log_prob: Sequence[float] | Column
    old_log_prob: Sequence[float] | Column | None = None
    """None means the training log-probs."""
    loss_mask: Sequence[float] | Column | None = None
    """None means that all tokens are trained on."""
    token: Sequence[int] | Column | None = None
    weight: Sequence[float] | Column | None = None
    bounded_weight: Sequence[float] | Column | None = None
    rejected: Sequence[int] | Column | None = None
    vetoed: Sequence[int] | Column | None = None
    advantage: Sequence[float] | Column | None = None
    entropy: Sequence[float] | Column | None = None
    weight_version: Sequence[int] | Column | None = None
    rollout_worker: Sequence[int] | Column | None = None
    turn: Sequence[int] | Column | None = None
    experts: Column | None = None
    prompt: Sequence[int] | Column | None = None
    step: int | None = None
    sample_index: int | None = None
    group: int | None = None
    reward: float | None = None
    truncated: bool | None = None
    text: str | None = None
    prompt_text: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTable:
    """Response tokens as columns. Every column except log-probs and loss mask may be None.

    Log-probs are in nats, NaN if an engine returned none. Masked tokens (`loss_mask` 0) are
    included; their log-probs have no meaning.
    """

    offsets: Int64
    """[S + 1] sample i has the rows offsets[i] to offsets[i + 1]."""
    train_log_prob: Float32
    """[N] log π_θ of the training engine in the forward pass of the step."""
    old_log_prob: Float32
    """[N] log π_old of the loss, or of the training engine with --get-mismatch-metrics. Its source
    is `metadata["old_policy"]`: "recomputed" by the training engine before the rollout's first
    step, "current" (π_θ itself), "rollout" (bypass) or "interpolated"."""
    rollout_log_prob: Float32
    """[N] log π_rollout of the engine that sampled."""
    loss_mask: UInt8
    """[N] 1 for trained tokens, 0 for tokens that the policy did not sample (tool output)."""
    token: Int32 | None = None
    """[N] token ids."""
    weight: Float32 | None = None
    """[N] importance weight before bounds, exp(clamp(L, −20, 20)) at the level of the weights; 0 if
    masked."""
    bounded_weight: Float32 | None = None
    """[N] importance weight in the loss, after bounds and batch normalization; 0 if masked."""
    rejected: Int32 | None = None
    """[N] bit i is set if criterion `metadata["criteria"][i]` rejects the token; 0 if masked."""
    vetoed: UInt8 | None = None
    """[N] 1 if one catastrophic token rejected the sequence (veto)."""
    advantage: Float32 | None = None
    """[N] advantages."""
    entropy: Float32 | None = None
    """[N] entropy of the training engine's next-token distribution, nats."""
    weight_version: Int32 | None = None
    """[N] optimizer steps made before the weights that sampled the token."""
    rollout_worker: Int32 | None = None
    """[N] index in `metadata["workers"]` of the server that sampled the token; −1 if unknown."""
    turn: Int32 | None = None
    """[N] index of the contiguous run of trained tokens; masked tokens belong to the run before
    them, or to run 0."""
    experts: Int32 | None = None
    """[N, sparse layers, k] experts that the rollout engine recorded for the prediction of the
    token; −1 if missing."""
    step: Int32 | None = None
    """[S] optimizer steps made before the step that trained on the sample."""
    sample_index: Int32 | None = None
    """[S] index of the sample in the rollout."""
    group: Int32 | None = None
    """[S] index of the prompt; samples of one group answer the same prompt."""
    reward: Float32 | None = None
    """[S] rewards."""
    truncated: UInt8 | None = None
    """[S] 1 if the length limit ended the response."""
    prompt: tuple[Int32, ...] | None = None
    """[S] token ids of the prompts."""
    text: tuple[str, ...] | None = None
    """[S] text of the responses; it may be hostile, so show it as text."""
    prompt_text: tuple[str, ...] | None = None
    """[S] text of the prompts."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Values for all tokens, as JSON; docs/dumps.md ("Schema") lists the keys. Any key may be
    missing."""

    def __post_init__(self) -> None:
        starts_with_0 = len(self.offsets) > 0 and self.offsets[0] == 0
        if not starts_with_0 or bool((np.diff(self.offsets) < 0).any()):
            raise ValueError("offsets must start with 0 and never decrease.")
        # A dump may come from anybody, so its metadata may have any types.
        for key, kind in METADATA.items():
            value = self.metadata.get(key)
            if value is not None and not isinstance(value, kind):
                raise ValueError(
                    f"metadata has {key} {quoted(value, 40)}, which has the wrong type."
                )
        for name, dtype in COLUMNS.items():
            column = getattr(self, name)
            if column is None and name not in REQUIRED_COLUMNS:
                continue
            rows = len(self)
            if name in TOKEN_COLUMNS:
                rows = self.tokens
            if len(column) != rows:
                raise ValueError(f"{name} has {len(column)} rows but must have {rows}.")
            dimensions = 1
            if name == "experts":
                dimensions = 3
            if name not in OBJECT_COLUMNS and (column.dtype, column.ndim) != (dtype, dimensions):
                raise ValueError(
                    f"{name} is {column.dtype} in {column.ndim} dimensions but must be"
                    f" {np.dtype(dtype)}."
                )

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        """Number of response tokens."""
        return int(self.offsets[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all columns, one byte per character of text."""
        size = 0
        for column in (*vars(self).values(), *(self.prompt or ())):
            if isinstance(column, np.ndarray):
                size += column.nbytes
        for texts in (self.text, self.prompt_text):
            size += sum(map(len, texts or ()))
        return size

    @property
    def response_length(self) -> Int32:
        """[S] response tokens per sample."""
        return np.diff(self.offsets).astype(np.int32)

    @property
    def sample(self) -> Int32:
        """[N] index in this table of the token's sample."""
        return np.repeat(np.arange(len(self), dtype=np.int32), self.response_length)

    @property
    def position(self) -> Int32:
        """[N] index of the token in the response."""
        start = np.repeat(self.offsets[:-1], self.response_length)
        return (np.arange(self.tokens) - start).astype(np.int32)

    @property
    def valid(self) -> Bool:
        """[N] whether a token is trained on and has log-probs of both engines."""
        return (
            (self.loss_mask > 0)
            & are_log_probs(self.policy_log_prob)
            & are_log_probs(self.rollout_log_prob)
        )

    @property
    def policy_log_prob(self) -> Float32:
        """[N] log π_train: a recomputed or interpolated π_old, else π_θ."""
        uses_old = self.metadata.get("old_policy") in ("recomputed", "interpolated")
        if uses_old:
            return self.old_log_prob
        return self.train_log_prob

    @property
    def log_ratio(self) -> Float32:
        """[N] Δ = log π_train − log π_rollout; 0 for invalid tokens."""
        # inf − inf is NaN with a warning, and is replaced.
        with np.errstate(invalid="ignore"):
            difference = self.policy_log_prob - self.rollout_log_prob
        return np.where(self.valid, difference, np.float32(0))

    @classmethod
    def from_parts(
        cls, parts: Sequence[SampleParts], metadata: Mapping[str, Any] | None = None
    ) -> Self:
        """Returns the table of some samples.

        A column that no sample has is None. If only some samples have it, the others get NaN, −1,
        or 0 for flags.
        """
        lengths = [len(part.rollout_log_prob) for part in parts]
        rows: dict[str, list[Any]] = {item.name: [] for item in fields(SampleParts)}
        for part, length in zip(parts, lengths, strict=True):
            values = dict(vars(part))
            if part.old_log_prob is None:
                values["old_log_prob"] = part.train_log_prob
            if part.loss_mask is None:
                values["loss_mask"] = np.ones(length)
            else:
                values["loss_mask"] = np.asarray(part.loss_mask) > 0
            if part.prompt is not None:
                values["prompt"] = cast(part.prompt, np.int32, "prompt")
            for name, value in values.items():
                rows[name].append(value)
        for name, dtype in SAMPLE_COLUMNS.items():
            # All samples together are one piece for `_columns`.
            column = rows[name]
            if all(value is None for value in column):
                rows[name] = [None]
            else:
                rows[name] = [_without_none(column, MISSING[dtype])]
        return cls(
            offsets=offsets_of(lengths),
            **_columns(rows, lengths, [len(parts)]),
            metadata=dict(metadata or {}),
        )

    @classmethod
    def concatenate(cls, tables: Sequence[Self]) -> Self:
        """Returns the samples of all tables, one table after another.

        Missing columns are filled as in `from_parts`. Metadata keys that differ are dropped.

        Raises:
            ValueError: bits in `rejected` mean different criteria in two tables.
        """
        if len(tables) == 1:
            return tables[0]
        criteria = []
        for table in tables:
            if table.rejected is not None:
                criteria.append(table.metadata.get("criteria"))
        # A bit of `rejected` is an index into these names.
        if any(names != criteria[0] for names in criteria):
            raise ValueError(
                "the tables have different rejection criteria; read them one at a time."
            )
        rows = {name: [getattr(table, name) for table in tables] for name in COLUMNS}
        for name in OBJECT_COLUMNS:
            rows[name] = []
            for table in tables:
                rows[name] += getattr(table, name) or (None,) * len(table)
        tokens = [table.tokens for table in tables]
        samples = [len(table) for table in tables]
        columns = _columns(rows, tokens, samples)
        lengths = np.concatenate([np.diff(table.offsets) for table in tables])
        metadata = {}
        for key, value in tables[0].metadata.items():
            if all(table.metadata.get(key) == value for table in tables[1:]):
                metadata[key] = value
        return cls(offsets=offsets_of(lengths), **columns, metadata=metadata)

    def select(self, samples: Sequence[int] | Column) -> Self:
        """Returns the samples at these indices, in this order."""
        chosen = np.asarray(samples, np.int64)
        lengths = np.diff(self.offsets)[chosen]
        offsets = offsets_of(lengths)
        # The rows of sample i move from self.offsets[i] to its place among the chosen ones.
        shift = self.offsets[:-1][chosen] - offsets[:-1]
        rows = np.repeat(shift, lengths) + np.arange(offsets[-1])
        columns: dict[str, Any] = {}
        for name in COLUMNS:
            column = getattr(self, name)
            if column is None:
                continue
            if name in TOKEN_COLUMNS:
                columns[name] = column[rows]
            elif name in SAMPLE_COLUMNS:
                columns[name] = column[chosen]
            else:  # copies, as a view of one prompt would keep all prompts in memory
                columns[name] = tuple(copy(column[i]) for i in chosen)
        return replace(self, offsets=offsets, **columns)

    def of_worker(self, name: str) -> Self:
        """Returns the samples with tokens from one rollout server, and masks all other tokens."""
        assert self.rollout_worker is not None
        names = self.metadata.get("workers") or ()
        workers = np.unique(self.rollout_worker)
        indices = [index for index in workers if worker_name(names, index) == name]
        mask = self.loss_mask * np.isin(self.rollout_worker, indices)
        # A sample that another server finished keeps the tokens of this one.
        samples = np.flatnonzero(np.bincount(self.sample, mask, len(self)))
        return replace(self, loss_mask=mask.astype(np.uint8)).select(samples)

    def sampled(self, max_tokens: int) -> Self:
        """Returns random samples with at most `max_tokens` response tokens; a small table itself.

        Samples are chosen uniformly, and stay complete and in order. `metadata["sampled"]` has the
        original size.
        """
        if self.tokens <= max_tokens:
            return self
        # A fixed seed, so that every command on this dump sees the same samples.
        priority = np.random.default_rng(0).random(len(self))
        chosen = self.select(lowest_priorities(priority, self.response_length, max_tokens))
        size = self.metadata.get("sampled") or {"samples": len(self), "tokens": self.tokens}
        return replace(chosen, metadata={**self.metadata, "sampled": size})


def are_log_probs(values: NDArray[Any]) -> Bool:
    """Returns whether each value can be a log-prob: finite, and not an engine's code for −∞."""
    # NaN compares as false.
    with np.errstate(invalid="ignore"):
        log_probs: Bool = np.abs(values) < LOG_PROB_LIMIT
    return log_probs


def worker_name(names: Sequence[Any], index: int) -> str:
    """Returns the name of a rollout server; its number if the dump has no names."""
    if 0 <= index < len(names):
        return str(names[index])
    return f"server {index}"


def lowest_priorities(priority_S: Column, tokens_S: Column, max_tokens: int) -> Column:
    """Returns the indices of the samples with the lowest priorities, in increasing order.

    Together they have at most `max_tokens` tokens.
    """
    order = np.argsort(priority_S, kind="stable")
    # int64, because the sum of a large dump's int32 lengths would overflow.
    within = np.cumsum(tokens_S[order], dtype=np.int64) <= max_tokens
    return np.sort(order[within])


def offsets_of(lengths: Sequence[int] | Column) -> Int64:
    """Returns [S + 1] cumulative sums of the lengths, starting with 0."""
    ends = np.cumsum(np.asarray(lengths, np.int64))
    return np.concatenate([[0], ends]).astype(np.int64)


def cast(values: Sequence[Any] | Column, dtype: type, name: str) -> Column:
    """Returns numbers in the type of a column.

    Raises:
        ValueError: a number does not fit into the type.
    """
    array = np.asarray(values)
    if array.dtype == dtype or not array.size:
        return array.astype(dtype, copy=False)
    problem = f"{name} has an entry that does not fit {np.dtype(dtype).name}"
    if array.dtype.kind == "c":
        # numpy would only warn, and drop the imaginary parts.
        raise ValueError(f"{problem}: {array.reshape(-1)[0]}.")
    try:
        with np.errstate(invalid="ignore", over="ignore"):
            numbers: Column = array.astype(dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{problem}: {first_line(error)}.") from None
    # numpy wraps integers that are too large, and cuts off fractions.
    if np.issubdtype(dtype, np.integer):
        is_changed = numbers != array
        if is_changed.any():
            raise ValueError(f"{problem}: {array[is_changed][0]}.")
    return numbers


def _columns(
    rows: Mapping[str, Sequence[Any]], tokens: Sequence[int], samples: Sequence[int]
) -> dict[str, Any]:
    """Joins the pieces of the columns.

    Args:
        rows: Pieces of the columns; a piece is None if its source lacks the column.
        tokens: Number of tokens in each piece.
        samples: Number of samples in each piece.
    """
    columns: dict[str, Any] = {}
    for name, dtype in TOKEN_COLUMNS.items():
        columns[name] = _joined(rows[name], tokens, dtype, name)
    for name, dtype in SAMPLE_COLUMNS.items():
        columns[name] = _joined(rows[name], samples, dtype, name)
    for name, missing in OBJECT_COLUMNS.items():
        if any(value is not None for value in rows[name]):
            columns[name] = tuple(_without_none(rows[name], missing))
    return columns


def _without_none(values: Sequence[Any], missing: Any) -> list[Any]:
    """Returns the values with `missing` in the place of None."""
    return [missing if value is None else value for value in values]


def _row_shape(pieces: Sequence[Column | None], name: str) -> tuple[int, ...]:
    """Returns the shape of a column's rows; raises ValueError if pieces have different ones."""
    # A piece without rows may have lost its shape.
    shapes = {piece.shape[1:] for piece in pieces if piece is not None and len(piece)}
    if len(shapes) > 1:
        raise ValueError(
            f"{name} has rows of the shapes {' and '.join(map(str, sorted(shapes)))}; they must be"
            " equal."
        )
    if shapes:
        return shapes.pop()
    if name == "experts":
        return (0, 0)
    return ()


def _joined(rows: Sequence[Any], lengths: Sequence[int], dtype: type, name: str) -> Column | None:
    """Joins the pieces of a column; None for an optional column that all pieces lack."""
    pieces = [None if row is None else cast(row, dtype, name) for row in rows]
    if rows and name not in REQUIRED_COLUMNS and all(piece is None for piece in pieces):
        return None
    shape = _row_shape(pieces, name)
    missing = MISSING[dtype]
    if name == "rejected":
        missing = 0
    filled: list[Column] = [np.zeros((0, *shape), dtype)]  # for a table without samples
    for index, (piece, length) in enumerate(zip(pieces, lengths, strict=True)):
        if piece is None:
            piece = np.full((length, *shape), missing, dtype)
        if len(piece) != length:
            raise ValueError(
                f"sample {index} has {len(piece)} entries of {name} but {length} rollout log-probs."
            )
        filled.append(piece.reshape(length, *shape))
    return np.concatenate(filled)
