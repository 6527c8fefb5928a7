"""The trained tokens of a table, as the rules use them.

Shapes: suffix _N the tokens, one sample after another.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from slime_tis.analysis.dumps.table import TokenTable, are_log_probs

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]

MAX_SIZE = 10.0
"""Largest weight of a single token, nats, so that a broken token does not hide the others."""
MIN_TOKENS = 30
"""Smallest number of tokens with a visible pattern."""
MAX_TOKENS = 400_000
"""Largest number of tokens, a random part of the samples of a larger table."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Tokens with `loss_mask` 1, as arrays [N]."""

    train: Floats
    """log π_train, NaN and infinite included."""
    rollout: Floats
    """log π_rollout, likewise."""
    sample: Integers
    """Index of the sample."""
    position: Integers
    """Index in the response."""
    token: Integers | None = None
    """Token ids."""
    repeats: Integers | None = None
    """How often the token came before in its response; None without token ids."""
    in_prompt: Integers | None = None
    """1 if the prompt has the token; None without prompts."""
    context: Integers | None = None
    """Hash of the prompt and the response up to the token; None without prompts."""
    entropy: Floats | None
    """Entropy of the training engine's distribution, nats."""
    version: Integers | None = None
    """Optimizer steps made before the sampling weights."""
    step: Integers | None = None
    """Optimizer steps made before the step that trained on the token."""
    worker: Integers | None = None
    """Index in `workers` of the rollout server that sampled the token."""
    workers: tuple[str, ...]
    """Names of the rollout servers; empty if unknown."""
    has_experts: bool
    """Whether the engines may route tokens to different experts: not if training replays the
    recorded experts."""
    precisions: tuple[str, str]
    """Precisions of the training and the rollout engine; empty if unknown."""

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.train)

    @property
    def staleness(self) -> Integers | None:
        """[N] optimizer steps between the sampling and the trained weights."""
        return None if self.version is None or self.step is None else self.step - self.version

    @property
    def finite(self) -> Mask:
        """[N] whether the token has log-probs of both engines."""
        return are_log_probs(self.train) & are_log_probs(self.rollout)

    @property
    def log_ratio(self) -> Floats:
        """[N] Δ = log π_train − log π_rollout; 0 if not finite."""
        with np.errstate(invalid="ignore"):
            log_ratio: Floats = np.where(self.finite, self.train - self.rollout, 0.0)
        return log_ratio

    @property
    def size(self) -> Floats:
        """[N] min(abs(Δ), 10); 10 if Δ is not finite."""
        size: Floats = np.where(self.finite, np.minimum(np.abs(self.log_ratio), MAX_SIZE), MAX_SIZE)
        return size

    @property
    def uncertainty(self) -> Floats:
        """[N] 1 − p, the factor from logit noise to log-prob noise; at least 0.001."""
        likelier = np.maximum(
            np.nan_to_num(self.train, nan=-1.0), np.nan_to_num(self.rollout, nan=-1.0)
        )
        uncertainty: Floats = np.maximum(1 - np.exp(np.minimum(likelier, 0.0)), 1e-3)
        return uncertainty

    @property
    def surprise(self) -> Floats:
        """[N] log π_train + entropy, whose mean over samples of π_train is 0; NaN without entropy."""
        return self.train + (np.nan if self.entropy is None else self.entropy)

    def only(self, chosen: Mask) -> Self:
        """The chosen tokens."""
        columns: dict[str, Any] = {
            name: value[chosen]
            for name, value in vars(self).items()
            if isinstance(value, np.ndarray)
        }
        return replace(self, **columns)


def tokens_of(table: TokenTable) -> Tokens:
    """The trained tokens of a table, of a random part of a large table."""
    table = table.sampled(MAX_TOKENS)
    chosen = table.loss_mask > 0
    version, entropy, metadata = table.weight_version, table.entropy, table.metadata
    versions = None if version is None or (version[chosen] < 0).any() else version
    columns = {
        "token": table.token,
        "version": versions,
        "step": None if table.step is None else table.step[table.sample],
        "worker": table.rollout_worker,
        **_contexts(table),
    }
    return Tokens(
        train=table.policy_log_prob.astype(np.float64)[chosen],
        rollout=table.rollout_log_prob.astype(np.float64)[chosen],
        sample=table.sample.astype(np.int64)[chosen],
        position=table.position.astype(np.int64)[chosen],
        entropy=(
            None
            if entropy is None or not np.isfinite(entropy[chosen]).any()
            else entropy[chosen].astype(float)
        ),
        workers=tuple(map(str, metadata.get("workers") or ())),
        has_experts=not metadata.get("replays_experts")
        and (table.experts is not None or bool(metadata.get("num_experts"))),
        precisions=(metadata.get("precision") or "", metadata.get("rollout_precision") or ""),
        **{
            name: column.astype(np.int64)[chosen]
            for name, column in columns.items()
            if column is not None
        },
    )


def _contexts(table: TokenTable) -> dict[str, Integers]:
    """The columns repeats, in_prompt and context, where token ids and prompts are known."""
    if table.token is None:
        return {}
    sample = table.sample.astype(np.int64)
    key = (sample << 32) + table.token
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    repeats = np.empty(len(key), np.int64)
    repeats[order] = np.arange(len(key)) - np.repeat(starts, np.diff(np.append(starts, len(key))))
    if table.prompt is None or not all(map(len, table.prompt)):
        return {"repeats": repeats}
    lengths = np.array([len(prompt) for prompt in table.prompt], np.int64)
    prompts = np.concatenate([np.zeros(0, np.int64), *table.prompt]).astype(np.int64)
    owner = np.repeat(np.arange(len(table)), lengths)
    in_prompt = np.isin(key, (owner << 32) + prompts)
    place = np.arange(len(prompts)) - np.repeat(
        np.cumsum(lengths), lengths
    )  # −1 is the last token of the prompt
    of_prompt = np.zeros(len(table), np.int64)
    np.add.at(of_prompt, owner, _mixed(prompts, place))
    sums = np.cumsum(_mixed(table.token.astype(np.int64), table.position.astype(np.int64)))
    before = np.concatenate([[0], sums])[table.offsets[:-1]]
    context = sums + (of_prompt - before)[sample]
    return {"repeats": repeats, "in_prompt": in_prompt.astype(np.int64), "context": context}


def _mixed(token: Integers, position: Integers) -> Integers:
    """A random number of 64 bits for each token and position (splitmix64), whose sum identifies a sequence."""
    with np.errstate(over="ignore"):
        x = token.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + position.astype(np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return (x ^ (x >> np.uint64(31))).astype(np.int64)


def mean_of(values: NDArray[Any], sample: NDArray[Any]) -> tuple[float, float]:
    """The mean of a value per token, and its standard error over the tokens' samples; NaN without tokens."""
    if not len(values):
        return float("nan"), float("nan")
    _, sample = np.unique(sample, return_inverse=True)
    sums, counts = np.bincount(sample, values), np.bincount(sample)
    mean = sums.sum() / counts.sum()
    return float(mean), float(np.sqrt(((sums - mean * counts) ** 2).sum()) / counts.sum())
