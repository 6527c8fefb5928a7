"""The mismatch by age of the weights: staleness seen apart from precision.

The staleness of a token is the number of optimizer steps between the weights that sampled it and the policy that is
trained.

Shapes: suffix _L the response tokens a rank holds, packed.
"""

import torch
from torch import Tensor

from slime_tis.correction import LOG_RATIO_BOUND, LOG_RATIO_LIMIT

BUCKETS = ("0", "1", "2", "3_to_4", "5_to_8", "9_or_more")
"""Ranges of staleness, in optimizer steps, as metrics name them."""
FIRST_OF_BUCKET = (1, 2, 3, 5, 9)
"""Where each of `BUCKETS` but the first begins."""


@torch.no_grad()
def staleness_sums(
    train_log_probs_L: Tensor, rollout_log_probs_L: Tensor, loss_mask_L: Tensor, staleness_L: Tensor
) -> Tensor:
    """Sums over the tokens of each bucket: count, Δ, e^Δ − 1 and |Δ|, with Δ = log π_train − log π_rollout.

    Args:
        train_log_probs_L: log-probs of the training policy.
        rollout_log_probs_L: those of the rollout policy.
        loss_mask_L: nonzero at valid tokens; those whose Δ is not finite, or reaches ±`LOG_RATIO_LIMIT`, are left out.
        staleness_L: int64, optimizer steps.

    Returns:
        float64 [len(BUCKETS), 4], to be added over micro-batches and ranks.
    """
    log_ratio_L = (train_log_probs_L - rollout_log_probs_L).double()
    valid_L = (loss_mask_L != 0) & (log_ratio_L.abs() < LOG_RATIO_LIMIT)
    log_ratio_L = torch.where(valid_L, log_ratio_L, 0.0)
    ratio_minus_1_L = log_ratio_L.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expm1()
    columns = torch.stack([valid_L.double(), log_ratio_L, ratio_minus_1_L, log_ratio_L.abs()], 1)
    first = torch.tensor(FIRST_OF_BUCKET, device=staleness_L.device)
    bucket_L = torch.bucketize(staleness_L, first, right=True)
    return columns.new_zeros(len(BUCKETS), columns.shape[1]).index_add_(0, bucket_L, columns)


def staleness_metrics(sums: Tensor) -> dict[str, float]:
    """KL, k3 KL, mean absolute difference and share of the tokens of each bucket that has any.

    Empty where all tokens are of the policy's own weights: the metrics of all tokens then are the same.

    Args:
        sums: [len(BUCKETS), 4] from `staleness_sums`, of all micro-batches and ranks.
    """
    rows = sums.tolist()
    total = sum(row[0] for row in rows)
    if not total or rows[0][0] == total:
        return {}
    metrics = {}
    for name, (count, log_ratio, ratio_minus_1, difference) in zip(BUCKETS, rows, strict=True):
        if count:
            metrics[f"mismatch_kl_staleness_{name}"] = -log_ratio / count
            metrics[f"mismatch_k3_kl_staleness_{name}"] = max(ratio_minus_1 - log_ratio, 0.0) / count
            metrics[f"train_rollout_logprob_abs_diff_staleness_{name}"] = difference / count
            metrics[f"token_fraction_staleness_{name}"] = count / total
    return metrics
