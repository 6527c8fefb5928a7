"""IcePop: a token whose ratio is out of bounds has no part in the gradient, and stays in the denominator.

`--custom-tis-function-path custom_tis.icepop.icepop`, in train.py, slime and miles.
Source: "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"
(https://arxiv.org/abs/2510.18855).
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime_tis.integrations.slime import refuse_unread, weighted_by_token


def check_args(args: Namespace) -> None:
    """Refuses options that `icepop` does not follow; train.py calls it before anything is built.

    Raises:
        ValueError: naming the option.
    """
    refuse_unread(args, "icepop", read=("use_tis", "nonfinite_policy"))


def icepop(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor | None],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """pg_loss · w, with w = π_train/π_rollout where tis_clip_low ≤ w ≤ tis_clip and 0 elsewhere.

    Args:
        args: Reads tis_clip (2.0 if missing), tis_clip_low (0.0 if missing) and nonfinite_policy.
        pg_loss: [N], flat over this rank's response tokens.
        train_log_probs: Per response, this rank's tokens.
        rollout_log_probs: The same of the rollout engine.
        loss_masks: Whole responses.
        total_lengths: Tokens of prompt and response.
        response_lengths: Tokens of the response.
        kwargs: `cp_group` or `parallel_state` name the context-parallel group where there is one.

    Returns:
        pg_loss, the loss masks without non-finite tokens, and tis (the raw ratio), tis_clipfrac, tis_abs, [N] each.
    """
    return weighted_by_token(
        args,
        _inside,
        pg_loss,
        train_log_probs,
        rollout_log_probs,
        loss_masks,
        total_lengths,
        response_lengths,
        kwargs,
    )


def _inside(ratio: Tensor, lower: float, upper: float) -> Tensor:
    return torch.where((ratio >= lower) & (ratio <= upper), ratio, 0.0)
