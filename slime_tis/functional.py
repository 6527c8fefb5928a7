"""The correction as one pure function: tensors in, tensors out, no look at their values.

`correct` here gives the weights and the mask of `slime_tis.correct` for padded tensors [..., T], without statistics.
torch.fx, `torch.compile(fullgraph=True)` and torch.func trace it, because only the options decide what is computed.
Options that need order statistics of the batch are refused.
"""

from typing import NamedTuple

from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.reference import correction_steps


class WeightsAndMask(NamedTuple):
    """float32 weights, 0 at invalid tokens; bool mask of the accepted tokens. Both [..., T], without gradient."""

    weights: Tensor
    mask: Tensor


def correct(
    config: RolloutCorrectionConfig,
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    *,
    current_log_probs: Tensor | None = None,
    advantages: Tensor | None = None,
) -> WeightsAndMask:
    """Importance weights and mask; see `slime_tis.correct` for the arguments, here tensors [..., T].

    `tis_batch_normalize` divides by the mean weight of this call.

    Raises:
        ValueError: an option needs the values of the batch, or advantages are missing.
    """
    wrong = config.batch_options + ["nonfinite_policy"] * (config.nonfinite_policy == "raise")
    if wrong:
        raise ValueError(f"{', '.join(wrong)} needs the values of the batch; call slime_tis.correct instead.")
    if config.needs_advantages and advantages is None:
        raise ValueError("the divergence mask or the bounds by sign need advantages; pass advantages=.")
    train, current = train_log_probs.detach(), None if current_log_probs is None else current_log_probs.detach()
    steps = correction_steps(config, (train, rollout_log_probs.detach()), loss_mask, current, advantages)
    return WeightsAndMask(steps.weights.float(), steps.mask)
