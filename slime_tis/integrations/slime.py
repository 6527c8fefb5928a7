"""What slime and miles hand to a custom TIS function, read as this library wants it: options, ranks and slices.

Neither is imported. `args` may lack any attribute (slime's parser knows only some of them), and the
context-parallel group is looked up in the call, then in Megatron-core if the trainer has loaded it.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_tis.correction import ResponseSlices, RolloutCorrectionConfig, correct, response_slices

DEFAULT_UPPER_BOUND = 2.0
UNBOUNDED = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1e9)
"""Token ratios as they are: exp is bounded by exp(20) before this."""


def config_from_args(args: Namespace) -> RolloutCorrectionConfig:
    """slime's options as a configuration.

    Missing attributes take their defaults; `tis_clip` and `tis_clip_low` stand in for the bounds; a lower bound
    of 0, slime's default, is none. Missing rejection bounds are those of the weight, as in slime's `mis.py`.
    """
    upper = _first(args, "tis_upper_bound", "tis_clip") or DEFAULT_UPPER_BOUND
    lower = _first(args, "tis_lower_bound", "tis_clip_low") or 1.0 / upper
    return RolloutCorrectionConfig(
        use_tis=bool(getattr(args, "use_tis", False)),
        tis_mode=getattr(args, "tis_mode", None) or "truncate",
        tis_level=getattr(args, "tis_level", None) or "token",
        tis_lower_bound=lower,
        tis_upper_bound=upper,
        tis_batch_normalize=bool(getattr(args, "tis_batch_normalize", False)),
        use_rs=bool(getattr(args, "use_rs", False)),
        rs_level=getattr(args, "rs_level", None) or "token",
        rs_lower_bound=_first(args, "rs_lower_bound") or lower,
        rs_upper_bound=_first(args, "rs_upper_bound") or upper,
        rs_veto_threshold=_first(args, "rs_veto_threshold"),
        rs_veto_upper_threshold=_first(args, "rs_veto_upper_threshold"),
        rollout_rs=getattr(args, "rollout_rs", None),
        rollout_rs_threshold=getattr(args, "rollout_rs_threshold", None),
        nonfinite_policy=getattr(args, "nonfinite_policy", None) or "reject",
        policy_loss="reinforce",
        get_mismatch_metrics=True,
    )


@dataclass(frozen=True)
class ContextParallel:
    """This rank's place in its context-parallel group; alone when size is 1."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def reduce_sum(self) -> Callable[[Tensor], Tensor] | None:
        """Sums a tensor over the group; None when alone."""
        return None if self.size == 1 else self._all_reduce(torch.distributed.ReduceOp.SUM)

    @property
    def reduce_max(self) -> Callable[[Tensor], Tensor] | None:
        """Maximum of a tensor over the group; None when alone."""
        return None if self.size == 1 else self._all_reduce(torch.distributed.ReduceOp.MAX)

    def slices(
        self, total_lengths: Sequence[int], response_lengths: Sequence[int], padded_lengths: Sequence[int] | None
    ) -> ResponseSlices:
        """Where this rank's tokens lie; `padded_lengths` are miles' `max_seq_lens`, which it cuts instead."""
        return response_slices(total_lengths, response_lengths, self.rank, self.size, padded_lengths)

    def _all_reduce(self, operation: Any) -> Callable[[Tensor], Tensor]:
        def reduce(tensor: Tensor) -> Tensor:
            reduced = tensor.clone()
            torch.distributed.all_reduce(reduced, op=operation, group=self.group)
            return reduced

        return reduce


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
    if context.reduce_sum is None:
        return [mask.to(original.dtype) for mask, original in zip(masks, loss_masks, strict=True)]
    whole = context.reduce_sum(slices.spread(torch.cat(list(masks)).to(torch.float32)))
    pieces = whole.split(slices.lengths)
    return [piece.to(original.dtype) for piece, original in zip(pieces, loss_masks, strict=True)]


def token_ratios(
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor | None],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    kwargs: Mapping[str, Any],
) -> tuple[Tensor, list[Tensor]]:
    """π_train/π_rollout of this rank's tokens, flat, 0 where masked; whole masks without non-finite tokens."""
    context = context_parallel(kwargs)
    slices = context.slices(total_lengths, response_lengths, kwargs.get("max_seq_lens"))
    found = correct(UNBOUNDED, train_log_probs, rollout_log_probs, slices.take(loss_masks))
    return torch.cat(found.weights), whole_masks(found.mask, loss_masks, slices, context)


def _first(args: Namespace, *names: str) -> float | None:
    """The first of the attributes that is there and not None."""
    return next((value for name in names if (value := getattr(args, name, None)) is not None), None)
