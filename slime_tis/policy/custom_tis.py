"""A user's correction function, in slime's contract, as a part of the policy loss."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_tis.correction import GlobalBatch
from slime_tis.policy.tokens import ResponseTokens
from slime_tis.user_functions import TisResult, call_custom_tis, check_metric_names


@dataclass(frozen=True, kw_only=True)
class CustomTisFunction:
    """A user's function with the program's options that it gets as `args`."""

    function: Callable[..., Any]
    """In slime's contract."""
    call: Callable[..., TisResult]
    """Calls it with the contract's keyword arguments and `seed`, and checks what it returns."""

    @classmethod
    def bind(cls, function: Callable[..., Any], args: Namespace) -> CustomTisFunction:
        """The function with its first argument bound."""
        return cls(function=function, call=partial(call_custom_tis, function, args))


@dataclass(frozen=True, kw_only=True)
class CustomTisOutputs:
    """What a custom function makes of the loss of a micro-batch."""

    loss_L: Tensor
    mask_L: Tensor
    """bool, the tokens that it accepts."""
    accepted_per_sequence: Tensor
    """[S] float64, over whole sequences."""
    metrics: dict[str, Tensor]
    """[L] each."""


@dataclass(kw_only=True)
class CustomTis:
    """The calls of a user's function in one optimizer step, micro-batch by micro-batch."""

    function: CustomTisFunction
    seed: int
    """Of the random numbers that the function may draw in the first micro-batch."""
    context_group: ProcessGroup | None = None
    metric_names: list[list[str]] = field(default_factory=list)
    """Names of the metrics that each call returned."""

    def __call__(
        self,
        tokens: ResponseTokens,
        *,
        loss_L: Tensor,
        log_probs_L: Tensor,
        train_log_probs_L: Tensor,
        global_batch: GlobalBatch,
    ) -> CustomTisOutputs:
        """Calls the function on a micro-batch.

        Args:
            tokens: of the micro-batch.
            loss_L: losses, with gradient.
            log_probs_L: log π_θ.
            train_log_probs_L: log π_train, the numerator of the weights.
            global_batch: the context-parallel ranks, and what is known of the global batch.

        Raises:
            CustomFunctionError: the function raised, or returned what its contract does not allow.
        """
        assert tokens.advantages_L is not None
        lengths = tokens.lengths
        # What was not sampled has no log-prob: NaN here and 0 in slime, whose functions multiply with the mask.
        missing_L = (tokens.loss_mask_L <= 0) & ~tokens.rollout_log_probs_L.isfinite()
        new_loss_L, masks, metrics = self.function.call(
            seed=self.seed + len(self.metric_names),
            pg_loss=loss_L,
            train_log_probs=list(train_log_probs_L.split(lengths)),
            rollout_log_probs=list(tokens.rollout_log_probs_L.masked_fill(missing_L, 0.0).split(lengths)),
            loss_masks=list(tokens.loss_mask_N.split(tokens.response_lengths)),
            total_lengths=list(tokens.total_lengths),
            response_lengths=list(tokens.response_lengths),
            log_probs=list(log_probs_L.detach().split(lengths)),
            advantages=list(tokens.advantages_L.split(lengths)),
            cp_group=self.context_group,
            batch_norm_factor=global_batch.batch_norm_factor,
            second_moment_limit=global_batch.second_moment_limit,
            adaptive_bounds=global_batch.adaptive_bounds,
        )
        self.metric_names.append(sorted(metrics))
        last = len(self.metric_names) - 1
        compared = {0: self.metric_names[0], last: self.metric_names[last]}
        check_metric_names(self.function.function, compared, "micro-batch")
        return CustomTisOutputs(
            loss_L=new_loss_L,
            mask_L=torch.cat(tokens.slices.slice_list(masks)) > 0,
            accepted_per_sequence=torch.stack([(mask > 0).sum() for mask in masks]).double(),
            metrics=metrics,
        )

    def check_ranks(self, names: Sequence[Sequence[str]]) -> None:
        """Compares the metrics that the function returned on each rank.

        Raises:
            CustomFunctionError: they have other names on another rank.
        """
        check_metric_names(self.function.function, dict(enumerate(names)), "rank")
