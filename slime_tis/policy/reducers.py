"""Reductions of the policy loss in slime's contract, for --custom-pg-loss-reducer-function-path."""

from argparse import Namespace
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slime_tis.integrations.slime import context_parallel


def dr_grpo(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
    *,
    args: Namespace,
) -> Callable[[Tensor], Tensor]:
    """Divides the loss of every response by the longest allowed length, for every length of the response.

        L = 1/S Σ_i Σ_t mask_it · loss_it / C,    C = --rollout-max-response-len

    The mean over a response's own tokens makes wrong answers that are long cost less than short
    ones.

    Source: "Understanding R1-Zero-Like Training: A Critical Perspective", Liu et al.
    (https://arxiv.org/abs/2503.20783), section 3.2.

    Args:
        total_lengths: tokens of prompt and response.
        response_lengths: tokens of the response.
        loss_masks: of whole responses.
        calculate_per_token_loss: whether the sum is divided by tokens, and not by sequences.
        args: with rollout_max_response_len.
    """
    context = context_parallel({})
    mask_L = torch.cat(context.slices(total_lengths, response_lengths, None).slice_list(loss_masks))

    def reduce(loss_L: Tensor) -> Tensor:
        longest: int = args.rollout_max_response_len
        return (loss_L * mask_L).sum() / longest

    return reduce
