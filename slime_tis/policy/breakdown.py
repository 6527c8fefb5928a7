"""The mismatch in parts: by the age of the weights, which is apart from precision, and by the turns of an episode.

The staleness of a token is the number of optimizer steps between the weights that sampled it and the policy that is
trained. The turns of a response are its runs of tokens that are trained on, numbered from 1.

Shapes: suffix _L the response tokens a rank holds, packed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.correction import LOG_RATIO_BOUND, LOG_RATIO_LIMIT


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Ranges of a number that every token has."""

    name: str
    """Of the number, in the names of metrics."""
    buckets: tuple[str, ...]
    """The ranges, as metrics name them."""
    first: tuple[int, ...]
    """Where each of them but the first begins."""


STALENESS = Breakdown(name="staleness", buckets=("0", "1", "2", "3_to_4", "5_to_8", "9_or_more"), first=(1, 2, 3, 5, 9))
"""Optimizer steps between the weights that sampled a token and the trained weights."""
TURN = Breakdown(name="turn", buckets=("1", "2", "3", "4", "5_to_8", "9_or_more"), first=(2, 3, 4, 5, 9))
"""Number of the turn that a token belongs to."""


@torch.no_grad()
def sums_by(
    by: Breakdown, train_log_probs_L: Tensor, rollout_log_probs_L: Tensor, loss_mask_L: Tensor, number_L: Tensor
) -> Tensor:
    """Sums over the tokens of each bucket: count, Δ, e^Δ − 1 and |Δ|, with Δ = log π_train − log π_rollout.

    Args:
        by: the buckets.
        train_log_probs_L: log-probs of the training policy.
        rollout_log_probs_L: Log-probs of the rollout policy.
        loss_mask_L: nonzero at valid tokens; those whose Δ is not finite, or reaches ±`LOG_RATIO_LIMIT`, are omitted.
        number_L: int64, the number that buckets are ranges of.

    Returns:
        float64 [buckets, 4], to be added over micro-batches and ranks.
    """
    log_ratio_L = (train_log_probs_L - rollout_log_probs_L).double()
    valid_L = (loss_mask_L != 0) & (log_ratio_L.abs() < LOG_RATIO_LIMIT)
    log_ratio_L = torch.where(valid_L, log_ratio_L, 0.0)
    ratio_minus_1_L = log_ratio_L.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expm1()
    columns = torch.stack([valid_L.double(), log_ratio_L, ratio_minus_1_L, log_ratio_L.abs()], 1)
    first = torch.tensor(by.first).to(number_L.device, non_blocking=True)
    bucket_L = torch.bucketize(number_L, first, right=True)
    return columns.new_zeros(len(by.buckets), columns.shape[1]).index_add_(0, bucket_L, columns)


def metrics_by(by: Breakdown, sums: Tensor) -> dict[str, float]:
    """KL, k3 KL, mean absolute difference and share of the tokens of each bucket that has any.

    Empty where all tokens are in the first bucket: the metrics of all tokens then are the same.

    Args:
        by: the buckets.
        sums: [buckets, 4] from `sums_by`, of all micro-batches and ranks.
    """
    rows = sums.tolist()
    total = sum(row[0] for row in rows)
    if not total or rows[0][0] == total:
        return {}
    metrics = {}
    for name, (count, log_ratio, ratio_minus_1, difference) in zip(by.buckets, rows, strict=True):
        if count:
            metrics[f"mismatch_kl_{by.name}_{name}"] = -log_ratio / count
            metrics[f"mismatch_k3_kl_{by.name}_{name}"] = max(ratio_minus_1 - log_ratio, 0.0) / count
            metrics[f"train_rollout_logprob_abs_diff_{by.name}_{name}"] = difference / count
            metrics[f"token_fraction_{by.name}_{name}"] = count / total
    return metrics
