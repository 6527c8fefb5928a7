"""One row per response token: what the training and the rollout engine made of it, and what was done with it.

Shapes: suffix _N the tokens of all samples, one sample after another; _S the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_tis.errors import quoted

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt8 = NDArray[np.uint8]
Bool = NDArray[np.bool_]
Column = NDArray[Any]

REQUIRED_COLUMNS: dict[str, type] = {
    "train_log_prob": np.float32,
    "old_log_prob": np.float32,
    "rollout_log_prob": np.float32,
    "loss_mask": np.uint8,
}
"""Columns of tokens that every table has, and their types."""

TOKEN_COLUMNS: dict[str, type] = REQUIRED_COLUMNS | {
    "token": np.int32,
    "weight": np.float32,
    "bounded_weight": np.float32,
    "rejected": np.int32,
    "vetoed": np.uint8,
    "advantage": np.float32,
    "entropy": np.float32,
    "weight_version": np.int32,
    "turn": np.int32,
    "experts": np.int32,
}
"""All columns of tokens and their types; experts are [N, layers, k], the others [N]."""

SAMPLE_COLUMNS: dict[str, type] = {
    "step": np.int32,
    "sample_index": np.int32,
    "group": np.int32,
    "reward": np.float32,
    "truncated": np.uint8,
}
"""Columns of samples that are numbers, [S], and their types."""

METADATA: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("source", "precision", "rollout_precision", "tokenizer", "old_policy"), str),
    **dict.fromkeys(("flags", "policy", "sampled"), dict),
    "temperature": (int, float),
    "num_experts": int,
    "replays_experts": bool,
    "criteria": list,
}
"""Keys of the metadata that this program reads, and the types of their values."""

TEXT_COLUMNS = ("text", "prompt_text")
"""Columns of samples that are text."""

MISSING: dict[type, float] = {np.float32: float("nan"), np.int32: -1, np.uint8: 0}
"""What is in a column where one sample has no value and another one has; 0 in `rejected`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleParts:
    """One sample on its way into a table: arrays or sequences with one entry per response token, and its own values.

    The fields have the names and the meaning of the columns of `TokenTable`.
    """

    train_log_prob: Sequence[float] | Column
    rollout_log_prob: Sequence[float] | Column
    old_log_prob: Sequence[float] | Column | None = None
    """The training log-probs where None."""
    loss_mask: Sequence[float] | Column | None = None
    """All tokens are trained on where None."""
    token: Sequence[int] | Column | None = None
    weight: Sequence[float] | Column | None = None
    bounded_weight: Sequence[float] | Column | None = None
    rejected: Sequence[int] | Column | None = None
    vetoed: Sequence[int] | Column | None = None
    advantage: Sequence[float] | Column | None = None
    entropy: Sequence[float] | Column | None = None
    weight_version: Sequence[int] | Column | None = None
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
    """Response tokens of samples as columns; every column but the log-probs and the loss mask may be None.

    Log-probs are natural logarithms in nats, NaN where an engine gave none. Masked tokens (`loss_mask` 0) are in the
    table too, and their log-probs mean nothing.
    """

    offsets: Int64
    """[S + 1] tokens of sample i are rows offsets[i] to offsets[i + 1]."""

    train_log_prob: Float32
    """[N] log π_θ, of the training engine in the forward pass of the step."""
    old_log_prob: Float32
    """[N] log π_old that the loss was made with. `metadata["old_policy"]` says whose it is: "recomputed" by the
    training engine before the rollout's first step, "current" (π_θ itself), "rollout" (bypass) or "interpolated"."""
    rollout_log_prob: Float32
    """[N] log π_rollout, of the engine that sampled."""
    loss_mask: UInt8
    """[N] 1 where a token is trained on, 0 where it is not the policy's own (tool output)."""

    token: Int32 | None = None
    """[N] token ids."""
    weight: Float32 | None = None
    """[N] importance weight before its bounds, exp(clamp(L, −20, 20)) at the level of the weights; 0 where masked."""
    bounded_weight: Float32 | None = None
    """[N] importance weight that multiplied the loss, after bounds and batch normalisation; 0 where masked."""
    rejected: Int32 | None = None
    """[N] bit i is set where criterion `metadata["criteria"][i]` rejects the token; 0 where masked."""
    vetoed: UInt8 | None = None
    """[N] 1 where the token's sequence was rejected for one catastrophic token (veto)."""
    advantage: Float32 | None = None
    """[N] advantages."""
    entropy: Float32 | None = None
    """[N] entropy of the training engine's distribution that the token was predicted from, in nats."""
    weight_version: Int32 | None = None
    """[N] optimizer steps behind the weights that sampled the token."""
    turn: Int32 | None = None
    """[N] number of the contiguous run of trained tokens, from 0; of a masked token that of the run before it, or 0."""
    experts: Int32 | None = None
    """[N, sparse layers, k] experts of the forward pass that the token's log-prob is of, that is of the token before
    it, as the rollout engine recorded them; −1 where it did not."""

    step: Int32 | None = None
    """[S] optimizer steps made before the one that trained on the sample."""
    sample_index: Int32 | None = None
    """[S] place of the sample in the rollout."""
    group: Int32 | None = None
    """[S] the prompt that the sample answers; samples of one group are compared with each other."""
    reward: Float32 | None = None
    """[S] rewards."""
    truncated: UInt8 | None = None
    """[S] 1 where the length limit ended the response."""
    prompt: Int32 | None = None
    """Token ids of all prompts, one after another."""
    prompt_offsets: Int64 | None = None
    """[S + 1] prompt of sample i is prompt[prompt_offsets[i]:prompt_offsets[i + 1]]; None where `prompt` is."""
    text: tuple[str, ...] | None = None
    """[S] the responses' text, which may be hostile: show it as text."""
    prompt_text: tuple[str, ...] | None = None
    """[S] the prompts' text."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What holds for all tokens, as JSON takes it; each key may be missing.

    source: project and format, "slime_tis", "slime", "nemo_rl", "prime_rl", "verl" or "plain".
    precision: of the training engine, "bf16" or "fp32".
    rollout_precision: of the rollout engine; None where servers choose it.
    num_experts: routed experts of a sparse layer, 0 of a dense model.
    replays_experts: whether training took the experts that the rollout engine recorded.
    temperature: that log-probs were taken at.
    tokenizer: directory of the tokenizer.
    old_policy: as of `old_log_prob`.
    criteria: names of the bits of `rejected`.
    flags: options of the correction that the run had, by name.
    sampled: what a larger table had, {"samples", "tokens"}, where this one is a random part of it.
    """

    def __post_init__(self) -> None:
        tokens = int(self.offsets[-1]) if len(self.offsets) else -1
        if tokens < 0 or self.offsets[0] != 0 or bool((np.diff(self.offsets) < 0).any()):
            raise ValueError("offsets must begin with 0 and never fall.")
        if (self.prompt is None) != (self.prompt_offsets is None):
            raise ValueError("prompt and prompt_offsets belong together; give both or none.")
        _check_metadata(self.metadata)
        self._check(TOKEN_COLUMNS, tokens, "tokens")
        self._check(SAMPLE_COLUMNS, len(self), "samples")
        for name in TEXT_COLUMNS:
            texts = getattr(self, name)
            if texts is not None and len(texts) != len(self):
                raise ValueError(f"{name} has {len(texts)} entries but there are {len(self)} samples.")
        if self.prompt is None or self.prompt_offsets is None:
            return
        if len(self.prompt_offsets) != len(self) + 1 or self.prompt_offsets[-1] != len(self.prompt):
            raise ValueError("prompt_offsets does not span the prompts of the samples.")

    def _check(self, columns: Mapping[str, type], rows: int, noun: str) -> None:
        for name, dtype in columns.items():
            column = getattr(self, name)
            if column is None and name not in REQUIRED_COLUMNS:
                continue
            if column.dtype != dtype:
                raise ValueError(f"{name} is {column.dtype} but must be {np.dtype(dtype).name}.")
            if len(column) != rows or column.ndim != (3 if name == "experts" else 1):
                raise ValueError(f"{name} has shape {column.shape} but there are {rows} {noun}.")

    def __len__(self) -> int:
        """Samples."""
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        """Response tokens of all samples."""
        return int(self.offsets[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all columns, of text one per character."""
        columns = (getattr(self, item.name) for item in fields(self))
        numbers = sum(column.nbytes for column in columns if isinstance(column, np.ndarray))
        return numbers + sum(len(text) for name in TEXT_COLUMNS for text in getattr(self, name) or ())

    @property
    def response_length(self) -> Int32:
        """[S] response tokens of each sample."""
        return np.diff(self.offsets).astype(np.int32)

    @property
    def sample(self) -> Int32:
        """[N] the sample that each token belongs to, by its place in this table."""
        return np.repeat(np.arange(len(self), dtype=np.int32), self.response_length)

    @property
    def position(self) -> Int32:
        """[N] place of each token in its response, from 0."""
        return (np.arange(self.tokens) - np.repeat(self.offsets[:-1], self.response_length)).astype(np.int32)

    @property
    def valid(self) -> Bool:
        """[N] whether a token is trained on and both engines' log-probs of it are finite."""
        return (self.loss_mask > 0) & np.isfinite(self.policy_log_prob) & np.isfinite(self.rollout_log_prob)

    @property
    def policy_log_prob(self) -> Float32:
        """[N] log π_train, the numerator of weights: π_old where the run recomputed or interpolated it, else π_θ."""
        uses_old = self.metadata.get("old_policy") in ("recomputed", "interpolated")
        return self.old_log_prob if uses_old else self.train_log_prob

    @property
    def log_ratio(self) -> Float32:
        """[N] Δ = log π_train − log π_rollout; 0 where a token is not valid."""
        with np.errstate(invalid="ignore"):
            return np.where(self.valid, self.policy_log_prob - self.rollout_log_prob, np.float32(0))

    @classmethod
    def from_parts(cls, parts: Sequence[SampleParts], metadata: Mapping[str, Any] | None = None) -> TokenTable:
        """The table of some samples.

        A column is None where no sample has it; where only some have it the others get NaN, −1, or 0 in flags.

        Args:
            parts: the samples.
            metadata: of all of them.

        Raises:
            ValueError: the lists of a sample differ in length; names the sample and both lengths.
        """
        lengths = [len(part.rollout_log_prob) for part in parts]
        columns: dict[str, Any] = {}
        for name, dtype in TOKEN_COLUMNS.items():
            rows = [_of_sample(part, name) for part in parts]
            for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                if row is not None and len(row) != length:
                    raise ValueError(f"sample {index} has {len(row)} entries of {name} but {length} rollout log-probs.")
            columns[name] = _joined(rows, lengths, dtype, name)
        for name, dtype in SAMPLE_COLUMNS.items():
            values = [getattr(part, name) for part in parts]
            if any(value is not None for value in values):
                missing = MISSING[dtype]
                columns[name] = cast([missing if value is None else value for value in values], dtype, name)
        for name in TEXT_COLUMNS:
            texts = [getattr(part, name) for part in parts]
            if any(text is not None for text in texts):
                columns[name] = tuple(text or "" for text in texts)
        prompts = [part.prompt for part in parts]
        if any(prompt is not None for prompt in prompts):
            rows = [() if prompt is None else prompt for prompt in prompts]
            columns["prompt"] = _joined(rows, [len(row) for row in rows], np.int32, "prompt")
            columns["prompt_offsets"] = offsets_of([len(row) for row in rows])
        return cls(offsets=offsets_of(lengths), **columns, metadata=dict(metadata or {}))

    @classmethod
    def concatenate(cls, tables: Sequence[TokenTable]) -> TokenTable:
        """The samples of several tables, one table after another.

        A column that only some tables have is filled as in `from_parts`; metadata stay where they agree.

        Raises:
            ValueError: there is no table, or the tables' rejection criteria differ.
        """
        if not tables:
            raise ValueError("no tables to concatenate.")
        if len(tables) == 1:
            return tables[0]
        with_rejections = [table.metadata.get("criteria") for table in tables if table.rejected is not None]
        if any(criteria != with_rejections[0] for criteria in with_rejections):
            raise ValueError("the tables were made under different rejection criteria; read them one by one.")
        columns: dict[str, Any] = {}
        for name, dtype in TOKEN_COLUMNS.items():
            columns[name] = _joined([getattr(table, name) for table in tables], [t.tokens for t in tables], dtype, name)
        for name, dtype in SAMPLE_COLUMNS.items():
            columns[name] = _joined([getattr(table, name) for table in tables], [len(t) for t in tables], dtype, name)
        for name in TEXT_COLUMNS:
            if any(getattr(table, name) is not None for table in tables):
                columns[name] = tuple(text for table in tables for text in getattr(table, name) or ("",) * len(table))
        if any(table.prompt is not None for table in tables):
            prompts = [table.prompt for table in tables]
            columns["prompt"] = np.concatenate([prompt for prompt in prompts if prompt is not None])
            columns["prompt_offsets"] = offsets_of(np.concatenate([_prompt_lengths(table) for table in tables]))
        lengths = np.concatenate([np.diff(table.offsets) for table in tables])
        return cls(offsets=offsets_of(lengths), **columns, metadata=_agreed([table.metadata for table in tables]))

    def select(self, samples: Sequence[int] | Column) -> TokenTable:
        """The samples at these indices, in that order."""
        chosen = np.asarray(samples, np.int64)
        rows = _rows_of(self.offsets, chosen)
        columns: dict[str, Any] = {}
        for name, index in [*((name, rows) for name in TOKEN_COLUMNS), *((name, chosen) for name in SAMPLE_COLUMNS)]:
            column = getattr(self, name)
            columns[name] = None if column is None else column[index]
        for name in TEXT_COLUMNS:
            texts = getattr(self, name)
            columns[name] = None if texts is None else tuple(texts[i] for i in chosen)
        if self.prompt is not None and self.prompt_offsets is not None:
            columns["prompt"] = self.prompt[_rows_of(self.prompt_offsets, chosen)]
            columns["prompt_offsets"] = offsets_of(np.diff(self.prompt_offsets)[chosen])
        return replace(self, offsets=offsets_of(np.diff(self.offsets)[chosen]), **columns)

    def sampled(self, max_tokens: int, seed: int = 0) -> TokenTable:
        """A random part of the samples with at most `max_tokens` response tokens; itself where it has no more.

        Samples are chosen uniformly and stay whole and in their order. `metadata["sampled"]` says what the whole had.

        Args:
            max_tokens: response tokens that the part may have.
            seed: of the choice.
        """
        if self.tokens <= max_tokens:
            return self
        priority = np.random.default_rng(seed).random(len(self))
        chosen = self.select(lowest_priorities(priority, self.response_length, max_tokens))
        whole = self.metadata.get("sampled") or {"samples": len(self), "tokens": self.tokens}
        return replace(chosen, metadata={**self.metadata, "sampled": whole})


def lowest_priorities(priority_S: Column, tokens_S: Column, max_tokens: int) -> Column:
    """Indices, rising, of the samples of lowest priority that have at most `max_tokens` tokens together."""
    order = np.argsort(priority_S, kind="stable")
    within = np.cumsum(tokens_S[order], dtype=np.int64) <= max_tokens
    return np.sort(order[within])


def turns_of(loss_mask_N: Column, offsets: Int64) -> Int32:
    """The column `turn` of a table: number of the run of trained tokens, in each sample from 0."""
    trained = loss_mask_N > 0
    before = np.concatenate([[False], trained[:-1]])
    before[offsets[:-1][offsets[:-1] < len(trained)]] = False
    starts = np.cumsum(trained & ~before)
    lengths = np.diff(offsets)
    of_earlier = np.concatenate([[0], starts])[offsets[:-1]]
    number: Int32 = np.maximum(starts - np.repeat(of_earlier, lengths) - 1, 0).astype(np.int32)
    return number


def offsets_of(lengths: Sequence[int] | Column) -> Int64:
    """[S + 1] where each of some rows begins and the last one ends."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)


def _rows_of(offsets: Int64, chosen: Column) -> Column:
    lengths = np.diff(offsets)[chosen]
    starts = np.repeat(offsets[:-1][chosen] - offsets_of(lengths)[:-1], lengths)
    return starts + np.arange(int(lengths.sum()))


def _of_sample(part: SampleParts, name: str) -> Any:
    value = getattr(part, name)
    if value is None and name == "old_log_prob":
        return part.train_log_prob
    if name == "loss_mask":
        return np.ones(len(part.rollout_log_prob), np.uint8) if value is None else np.asarray(value) > 0
    return value


def _joined(rows: Sequence[Any], lengths: Sequence[int], dtype: type, name: str) -> Column | None:
    """The rows one after another; None where none has a value and the column may be missing."""
    there: list[Column] = [cast(row, dtype, name) for row in rows if row is not None]
    if not there and rows and name not in REQUIRED_COLUMNS:
        return None
    shapes = {row.shape[1:] for row in there if len(row)}
    if len(shapes) > 1:
        raise ValueError(f"{name} has rows of the shapes {' and '.join(map(str, sorted(shapes)))}; they must agree.")
    shape = shapes.pop() if shapes else ((0, 0) if name == "experts" else ())
    missing = 0 if name == "rejected" else MISSING[dtype]
    given = iter(there)
    parts = [
        np.full((length, *shape), missing, dtype) if row is None else next(given).reshape(length, *shape)
        for row, length in zip(rows, lengths, strict=True)
    ]
    return np.concatenate([np.zeros((0, *shape), dtype), *parts])


def cast(values: Sequence[Any] | Column, dtype: type, name: str) -> Column:
    """Numbers in the type of a column.

    Raises:
        ValueError: an entry is no number, or no whole number that the type can hold.
    """
    array = np.asarray(values)
    if array.dtype == dtype or not array.size:
        return array.astype(dtype, copy=False)
    if not np.issubdtype(dtype, np.integer):
        try:
            with np.errstate(over="ignore"):  # beyond float32: infinite, as training would have it
                return array.astype(dtype)
        except (TypeError, OverflowError):
            raise ValueError(f"{name} has an entry that is no number of 64 bits.") from None
    limits = np.iinfo(dtype)
    fits = array.dtype.kind in "biuf" and bool(((array >= limits.min) & (array <= limits.max)).all())
    if not fits or bool((array != np.floor(array)).any()):
        raise ValueError(f"{name} has an entry that is no whole number from {limits.min} to {limits.max}.")
    return array.astype(dtype)


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    """Refuses values of known keys that are of another type."""
    for key, kind in METADATA.items():
        if (value := metadata.get(key)) is not None and not isinstance(value, kind):
            raise ValueError(f"metadata have {key} that is {quoted(value, 40)}.")
    if not all(isinstance(name, str) for name in metadata.get("criteria") or ()):
        raise ValueError("metadata have criteria that are no names.")
    sampled = metadata.get("sampled")
    if sampled and not (isinstance(sampled.get("samples"), int) and isinstance(sampled.get("tokens"), int)):
        raise ValueError("metadata have sampled without the numbers of samples and tokens.")


def _prompt_lengths(table: TokenTable) -> Column:
    return np.zeros(len(table), np.int64) if table.prompt_offsets is None else np.diff(table.prompt_offsets)


def _agreed(metadata: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, *others = metadata
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


COLUMNS = tuple(item.name for item in fields(TokenTable))
"""Names of the fields of a table."""
