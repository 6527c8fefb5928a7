"""The trained tokens of a table, with the columns that the rules on tokens read.

Shapes: N tokens, one sample after another; S samples.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from slime_tis.analysis.dumps.table import TokenTable, are_log_probs
from slime_tis.health import Finding

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]

MAX_SIZE = 10.0
"""Largest weight of a single token, nats, so that a broken token does not hide the others."""
MIN_TOKENS = 30
"""Smallest number of tokens with a visible pattern."""
MAX_TOKENS = 400_000
"""Largest number of tokens. Of a larger table, a random part of the samples is used."""
MIN_UNCERTAINTY = 1e-3
"""Smallest 1 − p, which avoids a division by 0 for certain tokens."""
UNCERTAIN = 0.05
"""Smallest 1 − p of an uncertain token. A certain token, such as a tag, agrees in most engines."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Tokens with `loss_mask` 1, as arrays [N]."""

    train: Floats
    """log π_train; it may be NaN or infinite."""
    rollout: Floats
    """log π_rollout; it may be NaN or infinite."""
    sample: Integers
    """Index of the sample."""
    position: Integers
    """Index in the response."""
    token: Integers | None = None
    """Token ids."""
    repeats: Integers | None = None
    """Number of earlier occurrences in the response; None without token ids."""
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
    turn: Integers | None = None
    """Index of the contiguous run of trained tokens."""
    group: Integers | None = None
    """Index of the prompt."""
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
        """[N] optimizer steps between the sampling and the trained weights; None if unknown."""
        if self.version is None or self.step is None:
            return None
        return self.step - self.version

    @property
    def finite(self) -> Mask:
        """[N] whether the token has log-probs of both engines."""
        return are_log_probs(self.train) & are_log_probs(self.rollout)

    @property
    def log_ratio(self) -> Floats:
        """[N] Δ = log π_train − log π_rollout; 0 if not finite."""
        # inf − inf is NaN with a warning, and is replaced.
        with np.errstate(invalid="ignore"):
            log_ratio: Floats = np.where(self.finite, self.train - self.rollout, 0.0)
        return log_ratio

    @property
    def size(self) -> Floats:
        """[N] min(abs(Δ), 10); 10 if Δ is not finite."""
        bounded = np.minimum(np.abs(self.log_ratio), MAX_SIZE)
        size: Floats = np.where(self.finite, bounded, MAX_SIZE)
        return size

    @property
    def uncertainty(self) -> Floats:
        """[N] 1 − p, the factor from logit noise to log-prob noise; p is the larger probability."""
        train = np.nan_to_num(self.train, nan=-1.0)
        rollout = np.nan_to_num(self.rollout, nan=-1.0)
        log_prob = np.minimum(np.maximum(train, rollout), 0.0)
        uncertainty: Floats = np.maximum(1 - np.exp(log_prob), MIN_UNCERTAINTY)
        return uncertainty

    @property
    def surprise(self) -> Floats:
        """[N] log π_train + entropy; its mean over samples of π_train is 0. NaN without entropy."""
        if self.entropy is None:
            return np.full(len(self), np.nan)
        return self.train + self.entropy

    @property
    def noise(self) -> float:
        """Σ abs(Δ) / Σ (1 − p): the mismatch relative to the uncertainty."""
        return float(np.abs(self.log_ratio).sum() / max(self.uncertainty.sum(), 1e-12))

    @property
    def median_noise(self) -> float:
        """Median of abs(Δ)/(1 − p) over uncertain tokens, which is robust against outliers."""
        uncertain = self.uncertainty > UNCERTAIN
        if not uncertain.any():
            return 0.0
        relative = np.abs(self.log_ratio) / self.uncertainty
        return float(np.median(relative[uncertain]))

    def only(self, chosen: Mask) -> Self:
        """Returns the chosen tokens."""
        columns: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                columns[name] = value[chosen]
        return replace(self, **columns)

    def of_newest_weights(self) -> Self:
        """Returns the tokens from the newest weights; all tokens if their age is unknown."""
        if self.staleness is None:
            return self
        return self.only(self.staleness == self.staleness.min())


Verdict = tuple[Finding, Mask] | None
"""A finding and the tokens [N] that it explains; None if the rule finds nothing."""


def tokens_of(table: TokenTable) -> Tokens:
    """Returns the trained tokens of a table, or of a random part of a large table."""
    table = table.sampled(MAX_TOKENS)
    trained = table.loss_mask > 0

    def integers(column: NDArray[Any] | None) -> Integers | None:
        if column is None:
            return None
        return column.astype(np.int64)[trained]

    version = table.weight_version
    # -1 is an unknown version, and ages of only a part of the tokens would mislead.
    if version is not None and (version[trained] < 0).any():
        version = None
    step = None
    if table.step is not None:
        step = table.step[table.sample]
    group = None
    if table.group is not None:
        group = table.group[table.sample]
    entropy = None
    if table.entropy is not None and np.isfinite(table.entropy[trained]).any():
        entropy = table.entropy.astype(np.float64)[trained]
    metadata = table.metadata
    is_moe = table.experts is not None or bool(metadata.get("num_experts"))
    return Tokens(
        train=table.policy_log_prob.astype(np.float64)[trained],
        rollout=table.rollout_log_prob.astype(np.float64)[trained],
        sample=table.sample.astype(np.int64)[trained],
        position=table.position.astype(np.int64)[trained],
        token=integers(table.token),
        repeats=integers(_repeats(table)),
        in_prompt=integers(_in_prompt(table)),
        context=integers(_context(table)),
        entropy=entropy,
        version=integers(version),
        step=integers(step),
        turn=integers(table.turn),
        group=integers(group),
        worker=integers(table.rollout_worker),
        workers=tuple(str(worker) for worker in metadata.get("workers") or ()),
        has_experts=is_moe and not metadata.get("replays_experts"),
        precisions=(metadata.get("precision") or "", metadata.get("rollout_precision") or ""),
    )


def _sample_and_token(sample: NDArray[Any], token: NDArray[Any]) -> Integers:
    """Returns one integer for each pair of a sample and a token id."""
    # Token ids have fewer than 32 bits.
    key: Integers = (sample.astype(np.int64) << 32) + token
    return key


def _repeats(table: TokenTable) -> Integers | None:
    """Counts a token's earlier occurrences [N] in its response."""
    if table.token is None:
        return None
    key = _sample_and_token(table.sample, table.token)
    # A stable sort makes equal tokens of a sample neighbors, in their order. A token's
    # index among these neighbors is the number of its earlier occurrences.
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    counts = np.diff(np.append(starts, len(key)))
    first_of_each = np.repeat(starts, counts)
    repeats = np.empty(len(key), np.int64)
    repeats[order] = np.arange(len(key)) - first_of_each
    return repeats


def _prompts(table: TokenTable) -> tuple[Integers, Integers] | None:
    """Returns the tokens of all prompts and their samples; None if a prompt is unknown."""
    if table.token is None or table.prompt is None or not all(map(len, table.prompt)):
        return None
    lengths = np.array([len(prompt) for prompt in table.prompt], np.int64)
    # concatenate takes no empty list, so an empty array comes first.
    tokens = np.concatenate([np.zeros(0, np.int64), *table.prompt]).astype(np.int64)
    return tokens, np.repeat(np.arange(len(table)), lengths)


def _in_prompt(table: TokenTable) -> Integers | None:
    """Returns 1 for each token [N] that the prompt has, and 0 for the others."""
    prompts = _prompts(table)
    if prompts is None or table.token is None:
        return None
    tokens, sample = prompts
    key = _sample_and_token(table.sample, table.token)
    prompt_key = _sample_and_token(sample, tokens)
    return np.isin(key, prompt_key).astype(np.int64)


def _context(table: TokenTable) -> Integers | None:
    """Returns a hash [N] of the prompt and of the response up to and including each token."""
    prompts = _prompts(table)
    if prompts is None or table.token is None:
        return None
    tokens, sample = prompts
    ends = np.cumsum(np.bincount(sample, minlength=len(table)))
    # −1 is the last token of the prompt, so that the response starts at 0.
    position = np.arange(len(tokens)) - ends[sample]
    prompt_hash = np.zeros(len(table), np.int64)
    np.add.at(prompt_hash, sample, _mixed(tokens, position))
    mixed = _mixed(table.token.astype(np.int64), table.position.astype(np.int64))
    # A running sum over all samples, less its value before each sample.
    sums = np.cumsum(mixed)
    before = np.concatenate([[0], sums])[table.offsets[:-1]]
    context: Integers = sums + (prompt_hash - before)[table.sample]
    return context


def _mixed(token: Integers, position: Integers) -> Integers:
    """Returns 64 pseudo-random bits for each token and position (splitmix64).

    Their sum identifies a sequence.
    """
    # Numbers of splitmix64, Steele, Lea and Flood, "Fast splittable pseudorandom number
    # generators", 2014.
    with np.errstate(over="ignore"):
        x = token.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + position.astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (x ^ (x >> np.uint64(31))).astype(np.int64)


def mean_of(values: NDArray[Any], sample: NDArray[Any]) -> tuple[float, float]:
    """Returns the mean of a value per token, and its standard error; NaN without tokens.

    The error is that of the samples, as tokens of one sample are not independent.
    """
    if not len(values):
        return float("nan"), float("nan")
    _, index = np.unique(sample, return_inverse=True)
    sums = np.bincount(index, values)
    counts = np.bincount(index)
    mean = sums.sum() / counts.sum()
    # The error of a ratio of sums, by its first-order expansion around the means.
    residual = sums - mean * counts
    error = np.sqrt((residual**2).sum()) / counts.sum()
    return float(mean), float(error)
