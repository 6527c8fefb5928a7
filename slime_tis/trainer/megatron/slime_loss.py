"""slime's helper for user-defined loss functions: log-probs and entropies from logits."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime_tis.integrations.slime import context_parallel
from slime_tis.trainer.megatron.log_probs import TokenDistribution, vocab_parallel_log_probs


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[Tensor],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    **others: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Log-probs of the response tokens on this rank at the rollout's temperature, with gradient."""
    slices = context_parallel({}).slices([len(tokens) for tokens in unconcat_tokens], response_lengths, None)
    responses = [
        tokens[len(tokens) - length :] for tokens, length in zip(unconcat_tokens, response_lengths, strict=True)
    ]
    log_probs_L, entropy_L = vocab_parallel_log_probs(
        logits[0].clone(),  # overwritten, and the function may use them again
        slices.slice_flat(torch.cat(responses)),
        TokenDistribution(
            temperature=args.rollout_temperature,
            group=mpu.get_tensor_model_parallel_group(),
            vocab_start=mpu.get_tensor_model_parallel_rank() * logits.shape[-1],
            chunk_size=args.log_probs_chunk_size,
            entropy_gradient=with_entropy,
        ),
    )
    values = {"log_probs": log_probs_L} | ({"entropy": entropy_L} if with_entropy else {})
    return logits.new_empty(0), {name: list(value.split(slices.local_lengths)) for name, value in values.items()}
