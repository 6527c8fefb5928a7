"""Sums of a step's loss, their merging over micro-batches and ranks, and the metrics.

Shapes: suffix _L is this rank's response tokens, packed; _S the sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from slime_tis.correction import (
    LOG_RATIO_BOUND,
    GlobalBatch,
    Ranks,
    RolloutCorrectionConfig,
    Statistics,
    correct,
    is_log_prob,
)
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.response_tokens import ResponseTokens, expand


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """Terms of the loss, and values that are reported as well.

    All are [L] per token, or float64 scalars as sums over tokens.
    """

    pg_loss: Tensor
    """Policy loss after weights."""
    pg_clipfrac: Tensor
    """1 at tokens whose gradient a clip removes."""
    ppo_kl: Tensor
    """log π_old − log π_θ."""
    ois: Tensor
    """π_θ/π_old."""
    entropy_loss: Tensor
    """Entropy of the distribution that predicts the token."""
    entropy_gap: Tensor
    """Entropy plus log π_θ: 0 on average if tokens are sampled from the distribution that predicts
    them."""
    kl_loss: Tensor
    """Estimate of the KL divergence from the reference policy."""

    def stack(self) -> Tensor:
        """[7, …], in the order of the fields."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])

    @classmethod
    def unstack(cls, values: Tensor) -> "LossTerms":
        """The inverse of `stack`."""
        names = [field.name for field in fields(cls)]
        return cls(**dict(zip(names, values.unbind(), strict=True)))


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Mergeable sums of the loss, in float64; metrics are computed once per step, after merging."""

    terms: LossTerms
    """Numerators over accepted tokens or sequences, of this rank's tokens."""
    loss_denominator: Tensor
    """Accepted tokens, or rollouts with an accepted token. This and the next three are nonzero only
    on context-parallel rank 0."""
    original_denominator: Tensor
    """The denominator before rejection."""
    accepted_tokens: Tensor
    masked_in_tokens: Tensor
    """Tokens of the loss mask."""
    statistics: Statistics
    """The correction's statistics."""
    old_policy_statistics: Statistics
    """Statistics of π_old against π_rollout, under --get-mismatch-metrics; else empty."""
    staleness: Tensor
    """[buckets, 4] sums of the mismatch by staleness, of this rank's tokens."""
    turns: Tensor
    """[buckets, 4] sums of the mismatch by turn."""
    workers: Tensor
    """[buckets, 4] sums of the mismatch by rollout server."""
    opsm_clipped: Tensor | None = None
    """Tokens that off-policy sequence masking omits, a numerator over `original_denominator`; None
    if it is off."""
    rollout_pull: Tensor | None = None
    """Pull to the rollout policy, a numerator over `original_denominator`; None if it is off."""
    custom: dict[str, Tensor] = field(default_factory=dict)
    """Numerators of a custom function's metrics: over `original_denominator` for a custom
    correction, over `loss_denominator` for a custom loss."""

    def merge(self, other: "StepSums") -> "StepSums":
        """The sums of two micro-batches."""
        pairs = zip(self._tensors(), other._tensors(), strict=True)
        added = [first + second for first, second in pairs]
        return replace(
            self._with_tensors(added),
            statistics=self.statistics.merge(other.statistics),
            old_policy_statistics=self.old_policy_statistics.merge(other.old_policy_statistics),
        )

    def all_reduce(self, ranks: Ranks) -> "StepSums":
        """The sums of all context- and data-parallel ranks.

        A collective of the last pipeline stage.
        """
        tensors = self._tensors()
        # One collective for all sums: all are float64.
        flat = ranks.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        pieces = flat.split([tensor.numel() for tensor in tensors])
        reduced = [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
        return replace(
            self._with_tensors(reduced),
            statistics=self.statistics.all_reduce(ranks),
            old_policy_statistics=self.old_policy_statistics.all_reduce(ranks),
        )

    def _tensors(self) -> list[Tensor]:
        """The tensors that are added over micro-batches and ranks."""
        tensors = [value for value in vars(self).values() if isinstance(value, Tensor)]
        tensors += vars(self.terms).values()
        # Sorted: functions on several ranks may return metrics in different orders.
        tensors += [self.custom[name] for name in sorted(self.custom)]
        return tensors

    def _with_tensors(self, values: Sequence[Tensor]) -> "StepSums":
        """The same sums with other tensors, in the order of `_tensors`."""
        rest = iter(values)
        changes: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changes[name] = next(rest)
        terms = LossTerms(**{name: next(rest) for name in vars(self.terms)})
        custom = dict(zip(sorted(self.custom), rest, strict=True))
        return replace(self, **changes, terms=terms, custom=custom)


def step_metrics(
    sums: StepSums, correction: RolloutCorrectionConfig, policy: PolicyConfig
) -> dict[str, float]:
    """The metrics of one optimizer step, without the prefix train/.

    `sums` are those of all micro-batches and ranks.
    """
    denominator = sums.loss_denominator.clamp_min(1)
    original_denominator = sums.original_denominator.clamp_min(1)
    means = (sums.terms.stack() / denominator).tolist()
    names = [field.name for field in fields(LossTerms)]
    metrics = dict(zip(names, means, strict=True))
    metrics["loss"] = (
        metrics["pg_loss"]
        - policy.entropy_coef * metrics["entropy_loss"]
        + policy.kl_loss_coef * metrics["kl_loss"]
    )
    if sums.rollout_pull is not None:
        metrics["loss"] += policy.rollout_pull_coef * float(sums.rollout_pull / denominator)
    if policy.loss_type == "custom_loss":
        # The function's loss contains the other terms already.
        metrics["loss"] = metrics["pg_loss"]
    if not policy.use_kl_loss:
        del metrics["kl_loss"]
    metrics |= sums.statistics.metrics()
    metrics["gradient_kept_fraction"] = float(
        sums.accepted_tokens / sums.masked_in_tokens.clamp_min(1)
    )
    if correction.get_mismatch_metrics:
        old_policy_metrics = sums.old_policy_statistics.metrics()
        # This correction rejects nothing. The fraction from above, of the loss, must stay.
        old_policy_metrics.pop("gradient_kept_fraction", None)
        metrics |= old_policy_metrics
    metrics |= metrics_by(STALENESS, sums.staleness)
    metrics |= metrics_by(TURN, sums.turns)
    metrics |= worst_worker(sums.workers)
    if sums.rollout_pull is not None:
        metrics["rollout_pull"] = float(sums.rollout_pull / original_denominator)
    if sums.opsm_clipped is not None:
        metrics["opsm_clipfrac"] = float(sums.opsm_clipped / original_denominator)
    custom_denominator = original_denominator
    if policy.loss_type == "custom_loss":
        # A custom loss reduces its metrics itself, over accepted tokens.
        custom_denominator = denominator
    custom = {name: float(value / custom_denominator) for name, value in sums.custom.items()}
    return metrics | _under_free_names(custom, metrics)


RESERVED = (
    "grad_norm",
    "lr",
    "loss_denominator",
    "old_log_prob_forwards",
    "skipped_steps",
    "nonfinite_gradient_steps",
    "loss_scale",
    "overflow_steps",
)
"""Metrics of a step that the learner adds."""


def _under_free_names(custom: dict[str, float], own: dict[str, float]) -> dict[str, float]:
    """A custom function's metrics; a name that the library uses gets the prefix custom_."""
    taken = {*own, *RESERVED}
    metrics = {name: value for name, value in custom.items() if name not in taken}
    for name in sorted(taken & custom.keys()):
        free = f"custom_{name}"
        while free in taken or free in metrics:
            free = f"custom_{free}"
        metrics[free] = custom[name]
    return metrics


@dataclass(frozen=True)
class LossReduction:
    """Masked sums; divided by `denominator` they are a mean.

    It is a mean over tokens, or the rollouts' mean of their means over tokens.
    """

    scale_L: Tensor
    """float32: factor per token, 0 at masked tokens."""
    denominator: Tensor
    """float64 scalar: tokens, or rollouts with a token."""

    @classmethod
    def build(
        cls,
        mask_L: Tensor,
        counts_S: Tensor,
        lengths: Sequence[int],
        rollouts: Sequence[int],
        *,
        per_token: bool,
    ) -> "LossReduction":
        """The reduction over the tokens of a mask on this rank.

        Args:
            mask_L: bool: the tokens that count.
            counts_S: float64: divisor of a complete sequence, its tokens before or after rejection.
            lengths: Tokens on this rank per sequence.
            rollouts: Rollout per sequence, from 0; sequences of the same rollout are averaged
                together.
            per_token: Average over tokens, not over sequences.
        """
        if per_token:
            return cls(mask_L.float(), counts_S.sum())
        rollout_S = torch.tensor(rollouts, dtype=torch.int64).to(counts_S.device, non_blocking=True)
        zeros_R = counts_S.new_zeros(max(rollouts, default=-1) + 1)
        counts_R = zeros_R.index_add_(0, rollout_S, counts_S)
        # clamp_min: a rollout without tokens has no token in the mask either.
        inverse_S = (1 / counts_R.clamp_min(1)).float()[rollout_S]
        return cls(
            torch.where(mask_L, expand(inverse_S, lengths), 0.0),
            (counts_R > 0).sum().to(counts_S.dtype),
        )

    def sum(self, term_L: Tensor) -> Tensor:
        """Σ scale · term, with gradient; masked tokens contribute 0, whatever their term is."""
        return torch.where(self.scale_L > 0, term_L, 0.0) @ self.scale_L

    def sum_each(self, terms: Tensor) -> Tensor:
        """The sums of several terms [n, L], float64 [n], without gradient."""
        masked_terms = torch.where(self.scale_L > 0, terms.detach(), 0.0)
        return masked_terms.double() @ self.scale_L.double()


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Ranges of a per-token number, for metrics of the mismatch per range."""

    name: str
    buckets: tuple[str, ...]
    """Names of the ranges in metrics."""
    first: tuple[int, ...]
    """First numbers of the buckets, without the first bucket."""


STALENESS = Breakdown(
    name="staleness",
    buckets=("0", "1", "2", "3_to_4", "5_to_8", "9_or_more"),
    first=(1, 2, 3, 5, 9),
)
"""Optimizer steps between the weights that sampled a token and the trained weights."""
TURN = Breakdown(
    name="turn", buckets=("1", "2", "3", "4", "5_to_8", "9_or_more"), first=(2, 3, 4, 5, 9)
)
"""Number of the turn that a token belongs to."""
MAX_WORKERS = 256
WORKER = Breakdown(
    name="worker", buckets=tuple(map(str, range(MAX_WORKERS))), first=tuple(range(1, MAX_WORKERS))
)
"""Index of the rollout server that sampled a token; the last bucket has all further servers."""
MIN_WORKER_TOKENS = 30
"""Smallest number of tokens by which a server is judged."""
SMALLEST_DIFFERENCE = 1e-6
"""Smallest mean abs(Δ) that a server is compared with, nats."""


@torch.no_grad()
def sums_by(
    by: Breakdown,
    train_log_probs_L: Tensor,
    rollout_log_probs_L: Tensor,
    loss_mask_L: Tensor,
    number_L: Tensor,
) -> Tensor:
    """Sums per bucket: count, Δ, e^Δ − 1 and |Δ|.

        Δ = log π_train − log π_rollout

    Tokens without one of the two log-probs (`is_log_prob`) are omitted.

    Args:
        by: The buckets.
        train_log_probs_L: log π_train.
        rollout_log_probs_L: log π_rollout.
        loss_mask_L: Nonzero at trained tokens.
        number_L: int64: number that selects a token's bucket.

    Returns:
        float64 [buckets, 4], to be added over micro-batches and ranks.
    """
    log_ratio_L = (train_log_probs_L - rollout_log_probs_L).double()
    valid_L = (loss_mask_L != 0) & is_log_prob(train_log_probs_L) & is_log_prob(rollout_log_probs_L)
    # Before exp and the sums: 0 · NaN in a later product with the mask is NaN.
    log_ratio_L = torch.where(valid_L, log_ratio_L, 0.0)
    ratio_minus_1_L = log_ratio_L.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expm1()
    columns = torch.stack([valid_L.double(), log_ratio_L, ratio_minus_1_L, log_ratio_L.abs()], 1)
    first = torch.tensor(by.first).to(number_L.device, non_blocking=True)
    # `right`: a number that begins a bucket belongs to it.
    bucket_L = torch.bucketize(number_L, first, right=True)
    sums = columns.new_zeros(len(by.buckets), columns.shape[1])
    return sums.index_add_(0, bucket_L, columns)


def metrics_by(by: Breakdown, sums: Tensor) -> dict[str, float]:
    """KL, k3 KL, mean absolute difference and token share of the buckets with tokens.

    Empty if all tokens are in the first bucket, whose metrics equal those of all tokens.
    """
    rows = sums.tolist()
    total = sum(row[0] for row in rows)
    if not total or rows[0][0] == total:
        return {}
    metrics = {}
    for name, (count, log_ratio, ratio_minus_1, difference) in zip(by.buckets, rows, strict=True):
        if count:
            suffix = f"{by.name}_{name}"
            # Rounding may make it negative.
            k3_sum = max(ratio_minus_1 - log_ratio, 0.0)
            metrics[f"mismatch_kl_{suffix}"] = -log_ratio / count
            metrics[f"mismatch_k3_kl_{suffix}"] = k3_sum / count
            metrics[f"train_rollout_logprob_abs_diff_{suffix}"] = difference / count
            metrics[f"token_fraction_{suffix}"] = count / total
    return metrics


def worst_worker(sums: Tensor) -> dict[str, float]:
    """The server with the largest mean abs(Δ), compared with the mean of all other servers.

    Empty with one server.
    """
    count = sums[:, 0]
    difference = sums[:, 3]
    # Servers with few tokens are never the worst one.
    mean = torch.where(count >= MIN_WORKER_TOKENS, difference / count.clamp_min(1), -1.0)
    worst = int(mean.argmax())
    others = count.sum() - count[worst]
    if mean[worst] < 0 or others < MIN_WORKER_TOKENS:
        return {}
    mean_of_others = (difference.sum() - difference[worst]) / others
    return {
        "worst_worker": float(worst),
        "worst_worker_abs_diff": float(mean[worst]),
        "worst_worker_ratio": float(mean[worst] / mean_of_others.clamp_min(SMALLEST_DIFFERENCE)),
    }


REPLAY_CONFIG = RolloutCorrectionConfig(use_tis=True, tis_level="token")
"""For statistics with and without routing replay: ratios of single tokens."""

REPLAY_METRICS = {
    "mismatch_k3_kl": "mismatch_k3_kl",
    "train_rollout_logprob_abs_diff": "train_rollout_logprob_abs_diff",
    "mis_weight_max_before_clip": "ratio_max",
    "mis_weight_min_before_clip": "ratio_min",
}
"""Metric of the correction → metric of the replay."""


def mismatch(tokens: ResponseTokens, log_probs_L: Tensor, ranks: Ranks) -> Statistics:
    """Mismatch of training and rollout log-probs, over the context-parallel ranks."""
    context_ranks = Ranks(context=ranks.context).with_slices(tokens.slices)
    correction = correct(
        REPLAY_CONFIG,
        log_probs_L,
        tokens.rollout_log_probs_L,
        tokens.loss_mask_L,
        lengths=tokens.lengths,
        global_batch=GlobalBatch(ranks=context_ranks),
    )
    return correction.statistics


def mismatch_metrics(statistics: Statistics) -> dict[str, float]:
    """The metrics of `REPLAY_METRICS` from merged statistics."""
    metrics = statistics.metrics()
    return {name: metrics[metric] for metric, name in REPLAY_METRICS.items() if metric in metrics}
