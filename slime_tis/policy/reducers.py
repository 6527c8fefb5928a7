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
    """Divides all responses' losses by the same number, the longest allowed length.

        L = 1/S Σ_i Σ_t mask_it · loss_it / C,    C = --rollout-max-response-len

    With a mean over the tokens of a response, long wrong answers would cost less than short ones.

    Source: "Understanding R1-Zero-Like Training: A Critical Perspective", Liu et al.
    (https://arxiv.org/abs/2503.20783), section 3.2.

    Args:
        total_lengths: Tokens of prompt and response.
        response_lengths: Tokens of the response.
        loss_masks: Masks of complete responses.
        calculate_per_token_loss: Whether the trainer divides by tokens instead of sequences.
        args: Options with rollout_max_response_len.

    Returns:
        A function from losses [L] of this rank's tokens to their reduced loss [].
    """
    context = context_parallel({})
    mask_L = torch.cat(context.slices(total_lengths, response_lengths, None).slice_list(loss_masks))

    def reduce(loss_L: Tensor) -> Tensor:
        longest: int = args.rollout_max_response_len
        return (loss_L * mask_L).sum() / longest

    return reduce
