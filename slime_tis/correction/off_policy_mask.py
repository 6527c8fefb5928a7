"""Off-policy sequence masking (OPSM): bad samples that the current policy has moved away from are masked."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime_tis.correction.config import NonfinitePolicy, RolloutCorrectionConfig
from slime_tis.correction.global_batch import GlobalBatch
from slime_tis.correction.inputs import LogProbs
from slime_tis.correction.ranks import ONE_RANK, Ranks
from slime_tis.correction.rollout_correction import correct

_MEASURE = RolloutCorrectionConfig(use_rollout_logprobs=True, policy_loss="reinforce")


@torch.no_grad()
def off_policy_sequence_mask(
    log_probs: LogProbs,
    old_log_probs: LogProbs,
    advantages: Tensor,
    loss_mask: LogProbs,
    *,
    delta: float,
    nonfinite_policy: NonfinitePolicy = "reject",
    lengths: Sequence[int] | None = None,
    ranks: Ranks = ONE_RANK,
) -> Tensor:
    """accept = not (A < 0 and mean_t(log π_old − log π_θ) > δ), one verdict per sequence.

    The source's π_old is the policy as the inference engine sampled from it, so that what is bounded is made of both
    staleness and the mismatch between the engines; TRL does the same. slime takes π_old of the training engine, from
    which π_θ does not differ before the rollout's second optimizer step.

    Source: "DeepSeek-V3.2" (https://arxiv.org/abs/2512.02556), section 3.1, off-policy sequence masking, eq. 9.

    Args:
        log_probs: log π_θ, as a list of [T_i], padded [B, T], or packed [N] with `lengths`.
        old_log_probs: log π_rollout, or log π_old for slime's variant, in the same layout.
        advantages: One per sequence, [S].
        loss_mask: Nonzero at valid tokens, in the same layout.
        delta: Bound on the mean log-ratio in nats per token, above 0; 0.1 is customary against π_rollout, and slime's
            default against π_old is 1e-4.
        nonfinite_policy: What a token with a log-prob that is not finite does to the mean: "reject" excludes it,
            "neutral" counts it with a difference of 0, "raise" refuses it.
        lengths: Lengths of packed sequences.
        ranks: One table is summed over the context-parallel ones, where sequences are sliced.

    Returns:
        bool [S], True where the sequence is accepted.

    Raises:
        ValueError: if there is not one advantage per sequence, or a token is not finite under "raise".
    """
    config = replace(_MEASURE, nonfinite_policy=nonfinite_policy)
    inputs: tuple[Any, Any, Any] = (log_probs, old_log_probs, loss_mask)
    sums_S = correct(config, *inputs, lengths=lengths, global_batch=GlobalBatch(ranks=ranks)).sequence_sums
    if advantages.shape != sums_S.valid.shape:
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)} for {sums_S.valid.numel()} sequences; pass one each."
        )
    divergence = -sums_S.log_ratio / sums_S.valid.clamp_min(1)
    return ~((advantages < 0) & (divergence > delta))
