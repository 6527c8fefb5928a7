"""A user's correction function in slime's contract, as a part of the policy loss."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_tis.correction import GlobalBatch
from slime_tis.policy.tokens import ResponseTokens
from slime_tis.user_functions.tensors import call_custom_tis, check_metric_names


@dataclass(kw_only=True)
class CustomTis:
    """The calls of a user's function in one optimizer step, micro-batch by micro-batch."""

    function: Callable[..., Any]
    args: Namespace
    """Options of the program."""
    seed: int
    """Seed of the first micro-batch."""
    context_group: ProcessGroup | None = None
    metric_names: list[list[str]] = field(default_factory=list)
    """Names of the metrics of each call."""

    def __call__(
        self,
        tokens: ResponseTokens,
        *,
        loss_L: Tensor,
        log_probs_L: Tensor,
        train_log_probs_L: Tensor,
        global_batch: GlobalBatch,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Returns the function's loss [L], accepted tokens bool [L], their number per sequence [S] and metrics [L].

        `loss_L` has a gradient, `log_probs_L` is log π_θ, and `train_log_probs_L` is log π_train, the numerator.
        Raises CustomFunctionError for invalid results.
        """
        assert tokens.advantages_L is not None
        lengths = tokens.lengths
        # slime's functions multiply with the mask: log-probs of tokens that were not sampled are 0 there, NaN here
        missing_L = (tokens.loss_mask_L <= 0) & ~tokens.rollout_log_probs_L.isfinite()
        new_loss_L, masks, metrics = call_custom_tis(
            self.function,
            self.args,
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
        check_metric_names(self.function, [self.metric_names[0], self.metric_names[-1]], "micro-batch")
        accepted_S = torch.stack([(mask > 0).sum() for mask in masks]).double()
        return new_loss_L, torch.cat(tokens.slices.slice_list(masks)) > 0, accepted_S, metrics
