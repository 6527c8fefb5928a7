"""A custom TIS function to copy: the complete contract, and a soft weight instead of a hard bound.

    train.py … --use-tis --custom-tis-function-path my_correction.py:soft_tis

The trainer passes, on this context-parallel rank:
    pg_loss              [N]: the token losses, one response after another
    train_log_probs      list of [T_i], one per response: log π_train, without gradient
    rollout_log_probs    list of [T_i]: log π_rollout
    loss_masks           list of complete responses: 1 at tokens that count
    total_lengths        list of int: tokens of prompt and response
    response_lengths     list of int: tokens of the response
    kwargs               log_probs (the current policy, without gradient), advantages, cp_group
Returns:
    pg_loss              [N], with its gradient
    masks                list of complete responses: nonzero at tokens in the mean of the loss
    metrics              name to [N]: averaged over the tokens of `loss_masks`, and logged
"""

from argparse import Namespace
from typing import Any

import torch
from torch import Tensor


def soft_tis(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """pg_loss · C·tanh(w/C): close to w for small weights, never above C = tis_upper_bound."""
    bound = getattr(args, "tis_upper_bound", 2.0)
    log_ratio = torch.cat(train_log_probs) - torch.cat(rollout_log_probs)
    # One infinite ratio would make every gradient NaN.
    ratio = log_ratio.nan_to_num().clamp(-20, 20).exp()
    weight = bound * torch.tanh(ratio / bound)
    metrics = {"soft_tis_ratio": ratio, "soft_tis_weight": weight}
    return pg_loss * weight, loss_masks, metrics
