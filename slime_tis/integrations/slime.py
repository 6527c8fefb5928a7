"""What slime and miles hand to a custom TIS function, read as this library wants it: options, ranks and slices.

Neither is imported. `args` may lack any attribute (slime's parser knows only some of them), and the
context-parallel group is looked up in the call, then in Megatron-core if the trainer has loaded it.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_tis.correction import Ranks, ResponseSlices, RolloutCorrectionConfig, correct, response_slices

TisResult = tuple[Tensor, list[Tensor], dict[str, Tensor]]
"""Loss, loss masks and metrics that a custom function returns."""
UNBOUNDED = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1e9)
"""Token ratios as they are: exp is bounded by exp(20) before this."""

STAND_INS = {"tis_upper_bound": "tis_clip", "tis_lower_bound": "tis_clip_low"}
"""Options of the correction, and slime's older names of them."""

NOT_OF_THE_CORRECTION = ("policy_loss", "use_rollout_logprobs", "old_logprobs", "get_mismatch_metrics")
"""Fields that say which loss is corrected, and not how: a custom function gets the finished loss."""

FOLLOWED_BY_THE_TRAINER = (*NOT_OF_THE_CORRECTION, "rejection_normalizer")

BOUNDS = ("tis_lower_bound", "tis_upper_bound", "rs_lower_bound", "rs_upper_bound")
"""Bounds of options that other options enable; train.py passes all of them, also unset ones."""


def config_from_args(args: Namespace) -> RolloutCorrectionConfig:
    """slime's options, or train.py's, as a configuration: the one that the library itself would correct by.

        Attributes that are missing or None take their defaults; `tis_clip` and `tis_clip_low` are read as the bounds of
        the weight, and a `tis_clip_low` of 0, slime's default, as unset. Missing bounds follow from the given
    ones: 1/upper for a lower bound, the weight's bounds for rejection without any.
    """
    values = {}
    for field in fields(RolloutCorrectionConfig):
        if field.name not in NOT_OF_THE_CORRECTION:
            values[field.name] = _first(args, field.name, STAND_INS.get(field.name, field.name))
    if getattr(args, "tis_lower_bound", None) is None:
        values["tis_lower_bound"] = values["tis_lower_bound"] or None
    given = {name: value for name, value in values.items() if value is not None}
    return RolloutCorrectionConfig(**given, policy_loss="reinforce", get_mismatch_metrics=True)


def refuse_unread(args: Namespace, function: str, read: Collection[str]) -> None:
    """Refuses options of the correction that are set and that a custom function does not follow.

    Args:
        args: The program's options; attributes that are missing are not set.
        function: Its name, for the message.
        read: Options that it follows.

    Raises:
        ValueError: naming the first of the others that departs from its default.
    """
    for field in fields(RolloutCorrectionConfig):
        value = getattr(args, field.name, field.default)
        if value != field.default and field.name not in (*read, *BOUNDS, *FOLLOWED_BY_THE_TRAINER):
            flag = "--" + field.name.replace("_", "-")
            raise ValueError(
                f"{flag} is {'on' if value is True else value}, and {function} does not follow it; remove it, or "
                f"omit --custom-tis-function-path: the built-in correction follows every option."
            )


@dataclass(frozen=True)
class ContextParallel:
    """This rank's place in its context-parallel group; alone when size is 1."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None

    @property
    def ranks(self) -> Ranks:
        """The reductions over the group."""
        if self.size == 1:
            return Ranks()
        # To torch.distributed, no group is the default one.
        return Ranks.from_groups(context=torch.distributed.group.WORLD if self.group is None else self.group)

    def slices(
        self, total_lengths: Sequence[int], response_lengths: Sequence[int], padded_lengths: Sequence[int] | None
    ) -> ResponseSlices:
        """Where this rank's tokens lie; `padded_lengths` are miles' `max_seq_lens`, which it cuts instead."""
        return response_slices(total_lengths, response_lengths, self.rank, self.size, padded_lengths)


def context_parallel(kwargs: Mapping[str, Any]) -> ContextParallel:
    """The context-parallel group of a call: `cp_group`, miles' `parallel_state`, or Megatron-core's own."""
    group = kwargs.get("cp_group")
    if group is not None:
        return ContextParallel(torch.distributed.get_rank(group), torch.distributed.get_world_size(group), group)
    state = kwargs.get("parallel_state")
    if state is not None:
        place = getattr(state, "cp", None)
        if place is not None:
            return ContextParallel(place.rank, place.size, place.group)
        return ContextParallel(state.cp_rank, state.cp_size, state.cp_group)
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is None or not megatron.model_parallel_is_initialized():
        return ContextParallel()
    return ContextParallel(
        megatron.get_context_parallel_rank(),
        megatron.get_context_parallel_world_size(),
        megatron.get_context_parallel_group(),
    )


def whole_masks(
    masks: Sequence[Tensor], loss_masks: Sequence[Tensor], slices: ResponseSlices, context: ContextParallel
) -> list[Tensor]:
    """Masks of this rank's slices as masks of whole responses, the same on every rank, in their own dtype."""
    if context.size == 1:
        return [mask.to(original.dtype) for mask, original in zip(masks, loss_masks, strict=True)]
    whole = context.ranks.over_context(slices.scatter(torch.cat(list(masks)).to(torch.float32)))
    pieces = whole.split(slices.lengths)
    return [piece.to(original.dtype) for piece, original in zip(pieces, loss_masks, strict=True)]


def weighted_by_token(
    args: Namespace,
    bounded: Callable[[Tensor, float, float], Tensor],
    pg_loss: Tensor,
    *,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor | None],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **kwargs: Any,
) -> TisResult:
    """A custom function that weights each token alone: loss, masks and slime's metrics of it.

    Args:
        args: tis_clip (2.0 if missing), tis_clip_low (0.0 if missing) and nonfinite_policy.
        bounded: The weight of a ratio within the two bounds; what is masked has ratio 0 and a loss of 0.
        pg_loss: [N], flat over this rank's response tokens.
        train_log_probs: Per response, log-probs of this rank's tokens by the training policy.
        rollout_log_probs: The same by the rollout engine.
        loss_masks: Whole responses.
        total_lengths: Tokens of prompt and response.
        response_lengths: Tokens of the response.
        kwargs: `cp_group` or `parallel_state` name the context-parallel group, if any.

    Returns:
        pg_loss, the loss masks without non-finite tokens, and tis (the raw ratio), tis_clipfrac, tis_abs, [N] each.
    """
    context = context_parallel(kwargs)
    slices = context.slices(total_lengths, response_lengths, kwargs.get("max_seq_lens"))
    config = replace(UNBOUNDED, nonfinite_policy=getattr(args, "nonfinite_policy", None) or "reject")
    ratios = correct(config, train_log_probs, rollout_log_probs, slices.slice_list(loss_masks))
    ratio, masks = torch.cat(ratios.weights), whole_masks(ratios.mask, loss_masks, slices, context)
    weight = bounded(ratio, getattr(args, "tis_clip_low", 0.0), getattr(args, "tis_clip", 2.0))
    metrics = {"tis": ratio, "tis_clipfrac": (weight != ratio).to(ratio.dtype), "tis_abs": (ratio - 1).abs()}
    return torch.where((ratio > 0) & (weight > 0), pg_loss * weight, 0.0), masks, metrics


def _first(args: Namespace, *names: str) -> Any:
    """The first of the attributes that is there and not None."""
    return next((value for name in names if (value := getattr(args, name, None)) is not None), None)
