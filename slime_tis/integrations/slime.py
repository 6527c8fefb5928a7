"""Arguments of custom TIS functions in slime and miles, as our options, ranks and slices.

`args` may lack any attribute, because slime's parser has only some of our options.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_tis.correction import (
    Ranks,
    ResponseSlices,
    RolloutCorrectionConfig,
    correct,
    response_slices,
)
from slime_tis.integrations.arguments import given_options
from slime_tis.options.fields import flag

TisResult = tuple[Tensor, list[Tensor], dict[str, Tensor]]
"""Loss, loss masks and metrics that a custom function returns."""
UNBOUNDED = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1e9)
"""Raw token ratios: the bound is above exp(20), the largest ratio."""

LOSS_OPTIONS = (
    "policy_loss",
    "use_rollout_logprobs",
    "old_logprobs",
    "get_mismatch_metrics",
)
"""Options that choose the corrected loss: a custom function gets the finished loss."""
TRAINER_OPTIONS = (*LOSS_OPTIONS, "rejection_normalizer")
"""Options that the trainer follows itself."""
BOUNDS = ("tis_lower_bound", "tis_upper_bound", "rs_lower_bound", "rs_upper_bound")
"""Bounds act only with other options; train.py passes all of them, also unset ones."""

GLOBAL_BATCH_OPTIONS = {
    "rs_second_moment_bound": "second_moment_limit",
    "rs_z_score": "adaptive_bounds",
    "rs_target_fraction": "adaptive_bounds",
}
"""Option that needs the global batch → argument that passes its statistics to a custom function."""


def config_from_args(args: Namespace) -> RolloutCorrectionConfig:
    """Returns the configuration of slime's options, or of train.py's.

    Attributes that are missing or None take their defaults. `tis_clip` and `tis_clip_low` bound the
    weight; a `tis_clip_low` of 0, slime's default, counts as unset.
    """
    options = given_options(args)
    for name in LOSS_OPTIONS:
        options.pop(name, None)
    if getattr(args, "tis_lower_bound", None) is None and not options.get("tis_lower_bound"):
        options.pop("tis_lower_bound", None)
    return RolloutCorrectionConfig(**options, policy_loss="reinforce", get_mismatch_metrics=True)


def refuse_unread(args: Namespace, function: str, read: Collection[str]) -> None:
    """Refuses correction options that a custom function does not follow.

    Args:
        args: The trainer's options.
        function: Name of the custom function, for the message.
        read: Options that the function follows.

    Raises:
        ValueError: Another option of the correction is set.
    """
    allowed = {*read, *BOUNDS, *TRAINER_OPTIONS}
    for field in fields(RolloutCorrectionConfig):
        value = getattr(args, field.name, field.default)
        if value != field.default and field.name not in allowed:
            shown = value
            if value is True:
                shown = "on"
            raise ValueError(
                f"{flag(field.name)} is {shown}, and {function} does not follow it; remove it, or"
                " omit --custom-tis-function-path: the built-in correction follows every option."
            )


@dataclass(frozen=True)
class ContextParallel:
    """This rank in its context-parallel group; there is no group if the size is 1."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None

    @property
    def ranks(self) -> Ranks:
        """The reductions over the group."""
        if self.size == 1:
            return Ranks()
        # torch.distributed takes None for the default group.
        group = self.group or torch.distributed.group.WORLD
        return Ranks.from_groups(context=group)

    def slices(
        self,
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        padded_lengths: Sequence[int] | None,
    ) -> ResponseSlices:
        """Returns this rank's slices of responses.

        miles slices `padded_lengths` (its `max_seq_lens`) instead of total lengths.
        """
        return response_slices(
            total_lengths, response_lengths, self.rank, self.size, padded_lengths
        )


def context_parallel(kwargs: Mapping[str, Any]) -> ContextParallel:
    """Returns the context-parallel group: `cp_group`, of miles' `parallel_state`, or Megatron's."""
    group = kwargs.get("cp_group")
    if group is not None:
        return ContextParallel(
            torch.distributed.get_rank(group), torch.distributed.get_world_size(group), group
        )
    state = kwargs.get("parallel_state")
    if state is not None:
        context = getattr(state, "cp", None)
        if context is not None:
            return ContextParallel(context.rank, context.size, context.group)
        return ContextParallel(state.cp_rank, state.cp_size, state.cp_group)
    # Without an import of Megatron in this process there is no group.
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is None or not megatron.model_parallel_is_initialized():
        return ContextParallel()
    return ContextParallel(
        megatron.get_context_parallel_rank(),
        megatron.get_context_parallel_world_size(),
        megatron.get_context_parallel_group(),
    )


def complete_masks(
    masks: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    slices: ResponseSlices,
    context: ContextParallel,
) -> list[Tensor]:
    """Gathers masks of complete responses, equal on all ranks, from masks of this rank's slices.

    They have the dtypes of `loss_masks`.
    """
    if context.size > 1:
        scattered = slices.scatter(torch.cat(list(masks)).to(torch.float32))
        masks = context.ranks.over_context(scattered).split(slices.lengths)
    return [mask.to(original.dtype) for mask, original in zip(masks, loss_masks, strict=True)]


def weighted_by_token(
    args: Namespace,
    bounded: Callable[[Tensor, float, float], Tensor],
    pg_loss: Tensor,
    call: Mapping[str, Any],
) -> TisResult:
    """Weights each token separately, as a custom function.

    Args:
        args: Reads `tis_clip` (default 2), `tis_clip_low` (default 0) and `nonfinite_policy`.
        bounded: Returns the weight for a ratio, a lower and an upper bound.
        pg_loss: Loss of this rank's tokens, [N].
        call: slime's other arguments.

    Returns:
        pg_loss, the loss masks without non-finite tokens, and tis (the raw ratio), tis_clipfrac,
        tis_abs, [N] each. Masked tokens have ratio 0 and loss 0.
    """
    loss_masks = call["loss_masks"]
    context = context_parallel(call)
    slices = context.slices(
        call["total_lengths"], call["response_lengths"], call.get("max_seq_lens")
    )
    nonfinite_policy: Any = getattr(args, "nonfinite_policy", None) or "reject"
    correction = correct(
        replace(UNBOUNDED, nonfinite_policy=nonfinite_policy),
        call["train_log_probs"],
        call["rollout_log_probs"],
        slices.slice_list(loss_masks),
    )
    masks = complete_masks(correction.mask, loss_masks, slices, context)
    ratio = torch.cat(correction.weights)
    weight = bounded(ratio, getattr(args, "tis_clip_low", 0.0), getattr(args, "tis_clip", 2.0))
    metrics = {
        "tis": ratio,
        "tis_clipfrac": (weight != ratio).to(ratio.dtype),
        "tis_abs": (ratio - 1).abs(),
    }
    # The loss of a masked token may be NaN, and 0 · NaN is NaN.
    loss = torch.where((ratio > 0) & (weight > 0), pg_loss * weight, 0.0)
    return loss, masks, metrics
