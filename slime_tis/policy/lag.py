"""The mismatch by age of the weights: staleness seen apart from precision.

Tokens are put together by their lag, the optimizer steps between the weights that sampled them and the policy that
is trained.

Shapes: suffix _R the response tokens a rank holds.
"""

import torch
from torch import Tensor

from slime_tis.correction import LOG_RATIO_BOUND, LOG_RATIO_LIMIT

LAGS = ("0", "1", "2", "3_to_4", "5_to_8", "9_or_more")
FIRST_LAGS = (1, 2, 3, 5, 9)
"""Where each of `LAGS` but the first begins."""


@torch.no_grad()
def lag_table(train_R: Tensor, rollout_R: Tensor, mask_R: Tensor, lag_R: Tensor) -> Tensor:
    """Sums over the tokens of each lag: count, Δ, e^Δ − 1 and |Δ|, with Δ = log π_train − log π_rollout.

    Args:
        train_R: log-probs of the training policy.
        rollout_R: those of the rollout policy.
        mask_R: nonzero at valid tokens; those whose Δ is not finite, or reaches ±`LOG_RATIO_LIMIT`, are left out.
        lag_R: int64, optimizer steps.

    Returns:
        float64 [len(LAGS), 4], to be added over micro-batches and ranks.
    """
    delta_R = (train_R - rollout_R).double()
    valid_R = (mask_R != 0) & (delta_R.abs() < LOG_RATIO_LIMIT)
    delta_R = torch.where(valid_R, delta_R, 0.0)
    excess_R = delta_R.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expm1()
    columns = torch.stack([valid_R.double(), delta_R, excess_R, delta_R.abs()], 1)
    bucket_R = torch.bucketize(lag_R, torch.tensor(FIRST_LAGS, device=lag_R.device), right=True)
    return columns.new_zeros(len(LAGS), columns.shape[1]).index_add_(0, bucket_R, columns)


def staleness_metrics(table: Tensor) -> dict[str, float]:
    """KL, k3 KL and mean absolute difference of the tokens of each lag, and their share; only of lags that occur.

    Empty where all tokens are of the present weights, as the figures of all tokens then say the same.
    """
    rows = table.tolist()
    total = sum(row[0] for row in rows)
    if not total or rows[0][0] == total:
        return {}
    figures = {}
    for name, (count, log_ratio, excess, difference) in zip(LAGS, rows, strict=True):
        if count:
            figures[f"mismatch_kl_lag_{name}"] = -log_ratio / count
            figures[f"mismatch_k3_kl_lag_{name}"] = max(excess - log_ratio, 0.0) / count
            figures[f"train_rollout_logprob_abs_diff_lag_{name}"] = difference / count
            figures[f"token_fraction_lag_{name}"] = count / total
    return figures
