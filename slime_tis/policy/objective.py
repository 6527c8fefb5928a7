"""The objective of one micro-batch: which policy is the anchor, correction, loss, and what it is averaged over.

A micro-batch returns a numerator and a count of units (tokens or sequences); the training engine sums both over all
micro-batches and ranks and divides once, so that the mean is that of the global batch however it was split.

Shapes: suffix _R the response tokens this rank holds, one sequence after another; _S the sequences.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from slime_tis.correction import (
    Correction,
    GlobalBatch,
    ResponseSlices,
    RolloutCorrectionConfig,
    Statistics,
    correct,
    interpolate_old_log_probs,
    off_policy_sequence_mask,
    response_slices,
)
from slime_tis.custom import call_custom_tis, check_metric_names
from slime_tis.policy import losses
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.lag import lag_table
from slime_tis.policy.report import SUMS, Reducer, Report, metrics_only, with_measured_weights


class Responses(Protocol):
    """What the objective reads of a micro-batch: whole-response facts, and this rank's slices by name."""

    @property
    def total_lengths(self) -> list[int]: ...

    @property
    def response_lengths(self) -> list[int]: ...

    @property
    def loss_masks(self) -> list[Tensor]: ...

    @property
    def local(self) -> dict[str, list[Tensor]]: ...


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """Loss of one micro-batch: DESIGN's table of algorithms, from the configuration."""

    correction: RolloutCorrectionConfig
    policy: PolicyConfig
    recompute_old: bool
    """Whether `old_log_probs` of the batch anchor the loss; otherwise π_old is π_θ of this very forward, detached."""
    custom_tis: Callable[..., Any] | None = None
    """A user's function in slime's contract, in place of the library's correction."""
    args: Namespace | None = None
    """The command line as slime names it, for the custom function alone."""
    custom_seed: int = 0
    """Of the random numbers that the custom function may draw in the step's first micro-batch."""
    custom_metric_names: list[list[str]] = field(default_factory=list)
    """Names of the metrics that the custom function returned, micro-batch by micro-batch."""
    version: int = 0
    """Version of the policy's weights, in optimizer steps; what interpolated old log-probs go by."""
    context_rank: int = 0
    context_size: int = 1
    context_group: Any = None
    global_batch: GlobalBatch = field(default_factory=GlobalBatch)
    """The context-parallel ranks, and what is known of the global batch before its first micro-batch."""

    def __call__(self, batch: Responses, log_prob_R: Tensor, entropy_R: Tensor) -> tuple[Tensor, Tensor, Report]:
        """Returns (numerator, units, report); the loss of the step is Σ numerator / Σ units.

        Args:
            batch: the micro-batch.
            log_prob_R: log π_θ of this rank's response tokens, with gradient.
            entropy_R: entropies of the distributions they were predicted from.
        """
        lengths = [len(mask) for mask in batch.local["loss_masks"]]
        flat = {name: torch.cat(values) for name, values in batch.local.items()}
        old_R = self._anchor(flat, log_prob_R)
        train_R = log_prob_R.detach() if self.correction.use_rollout_logprobs else old_R
        correction = self._correct(batch, flat, train_R)
        recomputed = self._recomputed_statistics(flat, log_prob_R, lengths)
        weight_R, mask_R, counts_S = correction.weights, correction.mask, correction.accepted_per_sequence
        assert isinstance(weight_R, Tensor) and isinstance(mask_R, Tensor)  # packed in, packed out
        near_S, near_R = self._near_policy(flat, log_prob_R, old_R, lengths)
        mask_R, counts_S = mask_R & near_R, counts_S * near_S

        # What is masked or not finite gets ratio 1 before any arithmetic: a NaN behind a mask would still poison
        # the gradient.
        log_prob_R = torch.where(mask_R, log_prob_R, log_prob_R.detach().nan_to_num())
        old_R = torch.where(mask_R & old_R.isfinite(), old_R, log_prob_R.detach())
        loss_R, clipped_R = self._token_loss(log_prob_R, old_R, flat["advantages"], mask_R, lengths)
        custom: dict[str, Tensor] = {}
        if self.custom_tis is not None:
            new_loss_R, new_mask_R, new_counts_S, custom = self._custom(batch, flat, loss_R, train_R, log_prob_R)
            if self.correction.corrects:  # otherwise metrics alone: the loss stays as it was, to the bit
                loss_R, mask_R, counts_S = new_loss_R, new_mask_R & near_R, new_counts_S * near_S
        elif self.correction.use_tis:
            loss_R = loss_R * weight_R

        kept = self._reducer(mask_R, counts_S, correction.masked_in_per_sequence, lengths)
        ratio_R = (log_prob_R - old_R).exp()
        terms = {
            "pg_loss": loss_R,
            "pg_clipfrac": clipped_R,
            "ppo_kl": old_R - log_prob_R,
            "ois": ratio_R,
            "entropy_loss": entropy_R,
            "kl_loss": self._reference_kl(flat, log_prob_R),
        }
        objective_R = terms["pg_loss"] - self.policy.entropy_coef * entropy_R
        numerator = kept.sum(objective_R + self.policy.kl_loss_coef * terms["kl_loss"])
        original = self._reducer(
            flat["loss_masks"] > 0, correction.masked_in_per_sequence, correction.masked_in_per_sequence, lengths
        )
        report = Report(
            sums=kept.sum_each([terms[name] for name in SUMS]),
            units=torch.stack([kept.units, original.units, counts_S.sum(), correction.masked_in_per_sequence.sum()])
            * float(self.context_rank == 0),
            statistics=correction.statistics,
            recomputed=recomputed,
            lags=lag_table(
                train_R, flat["rollout_log_probs"], flat["loss_masks"], self.version - flat["weight_versions"]
            ),
            opsm_clipped=original.sum_each([(~near_R).float()])[0],
            custom={name: original.sum_each([value])[0] for name, value in custom.items()},
        )
        return numerator, report.units[0].to(torch.int), report

    def _anchor(self, flat: dict[str, Tensor], log_prob_R: Tensor) -> Tensor:
        """log π_old: the rollout's (bypass), an interpolated or recomputed one, or that of this forward."""
        if self.correction.use_rollout_logprobs:
            return flat["rollout_log_probs"]
        if self.correction.old_logprobs == "interpolate":
            return interpolate_old_log_probs(
                log_prob_R, flat["rollout_log_probs"], self.version, flat["weight_versions"]
            )
        return flat["old_log_probs"] if self.recompute_old else log_prob_R.detach()

    def _correct(self, batch: Responses, flat: dict[str, Tensor], train_R: Tensor) -> Correction:
        return correct(
            (metrics_only if self.custom_tis is not None else with_measured_weights)(self.correction),
            train_R,
            flat["rollout_log_probs"],
            flat["loss_masks"],
            lengths=[len(mask) for mask in batch.local["loss_masks"]],
            global_batch=replace(self.global_batch, ranks=self.global_batch.ranks.with_slices(self._slices(batch))),
        )

    def _token_loss(
        self, log_prob_R: Tensor, old_R: Tensor, advantage_R: Tensor, mask_R: Tensor, lengths: list[int]
    ) -> tuple[Tensor, Tensor]:
        clip: dict[str, Any] = {"clip_low": self.policy.eps_clip, "clip_high": self.policy.clip_high}
        if self.correction.policy_loss == "reinforce":
            return losses.reinforce(log_prob_R, advantage_R), torch.zeros_like(advantage_R)
        if self.correction.policy_loss == "cispo":
            return losses.cispo(log_prob_R, old_R, advantage_R, **clip)
        if self.correction.policy_loss == "gspo":
            mean_R = self._mean_log_ratio((log_prob_R - old_R).detach(), mask_R, lengths)
            return losses.gspo(log_prob_R, mean_R, advantage_R, **clip)
        return losses.ppo_clip(log_prob_R, old_R, advantage_R, **clip, dual_clip=self.policy.eps_clip_c)

    def _near_policy(
        self, flat: dict[str, Tensor], log_prob_R: Tensor, old_R: Tensor, lengths: list[int]
    ) -> tuple[Tensor, Tensor]:
        """True for sequences, and for their tokens, that off-policy sequence masking keeps; all where it is off."""
        if not self.policy.use_opsm:
            near_R = torch.ones_like(log_prob_R, dtype=torch.bool)
            return near_R.new_ones(len(lengths)), near_R
        advantage_S = torch.stack([part.sum() for part in flat["advantages"].split(lengths)]).double()
        # The sign is what counts, and all tokens of a sequence share it.
        advantage_S = self.global_batch.ranks.over_context(advantage_S)
        near_S = off_policy_sequence_mask(
            log_prob_R,
            flat["rollout_log_probs"] if self.policy.opsm_policy == "rollout" else old_R,
            advantage_S,
            flat["loss_masks"],
            delta=self.policy.opsm_bound,
            nonfinite_policy=self.correction.nonfinite_policy,
            lengths=lengths,
            ranks=self.global_batch.ranks,
        )
        repeats = torch.tensor(lengths, device=near_S.device)
        return near_S, near_S.repeat_interleave(repeats, output_size=len(log_prob_R))

    def _mean_log_ratio(self, log_ratio_R: Tensor, mask_R: Tensor, lengths: list[int]) -> Tensor:
        """Mean over the kept tokens of the whole sequence, at each of its tokens on this rank."""
        sizes_S = torch.tensor(lengths, device=log_ratio_R.device)
        owner_R = torch.arange(len(lengths), device=log_ratio_R.device).repeat_interleave(
            sizes_S, output_size=len(log_ratio_R)
        )
        columns = torch.stack([torch.where(mask_R, log_ratio_R, 0.0), mask_R.to(log_ratio_R.dtype)], 1).double()
        table_S = columns.new_zeros(len(lengths), 2).index_add_(0, owner_R, columns)
        table_S = self.global_batch.ranks.over_context(table_S)
        mean_S = table_S[:, 0] / table_S[:, 1].clamp_min(1)
        return mean_S.to(log_ratio_R.dtype).index_select(0, owner_R)

    def _reference_kl(self, flat: dict[str, Tensor], log_prob_R: Tensor) -> Tensor:
        if not self.policy.use_kl_loss:
            return torch.zeros_like(log_prob_R)
        return losses.kl_estimate(log_prob_R, flat["ref_log_probs"], self.policy.kl_loss_type)

    def _recomputed_statistics(self, flat: dict[str, Tensor], log_prob_R: Tensor, lengths: list[int]) -> Statistics:
        """Of π_old itself, which is the policy of this forward where no other pass was made for it."""
        config = metrics_only(self.correction)
        if not self.correction.get_mismatch_metrics:
            return Statistics.empty(config, flat["loss_masks"].device)
        return correct(
            config,
            flat.get("old_log_probs", log_prob_R.detach()),
            flat["rollout_log_probs"],
            flat["loss_masks"],
            lengths=lengths,
            global_batch=GlobalBatch(ranks=self.global_batch.ranks),
        ).statistics

    def _custom(
        self,
        batch: Responses,
        flat: dict[str, Tensor],
        loss_R: Tensor,
        train_R: Tensor,
        log_prob_R: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Calls the user's function: (loss, local mask, kept tokens per sequence, metrics per token)."""
        assert self.custom_tis is not None
        lengths = [len(mask) for mask in batch.local["loss_masks"]]
        # What was not sampled has no log-prob: NaN here and 0 in slime, whose functions multiply with the mask.
        rollout_R = flat["rollout_log_probs"]
        rollout_R = torch.where((flat["loss_masks"] > 0) | rollout_R.isfinite(), rollout_R, 0.0)
        new_loss_R, masks, metrics = call_custom_tis(
            self.custom_tis,
            self.args,
            seed=self.custom_seed + len(self.custom_metric_names),
            pg_loss=loss_R,
            train_log_probs=list(train_R.split(lengths)),
            rollout_log_probs=list(rollout_R.split(lengths)),
            loss_masks=batch.loss_masks,
            total_lengths=batch.total_lengths,
            response_lengths=batch.response_lengths,
            log_probs=list(log_prob_R.detach().split(lengths)),
            advantages=list(flat["advantages"].split(lengths)),
            cp_group=self.context_group,
            batch_norm_factor=self.global_batch.batch_norm_factor,
            second_moment_limit=self.global_batch.second_moment_limit,
            adaptive_bounds=self.global_batch.adaptive_bounds,
        )
        self.custom_metric_names.append(sorted(metrics))
        check_metric_names(self.custom_tis, self.custom_metric_names, "micro-batch")
        mask_R = torch.cat(self._slices(batch).slice_list(masks)) > 0
        counts_S = torch.stack([(mask > 0).sum() for mask in masks]).double()
        return new_loss_R, mask_R, counts_S, metrics

    def _slices(self, batch: Responses) -> ResponseSlices:
        return response_slices(batch.total_lengths, batch.response_lengths, self.context_rank, self.context_size)

    def _reducer(self, mask_R: Tensor, kept_S: Tensor, valid_S: Tensor, lengths: list[int]) -> Reducer:
        counts_S = valid_S if self.correction.rejection_normalizer == "original" else kept_S
        return Reducer.build(mask_R, counts_S, lengths, per_token=self.policy.calculate_per_token_loss)
