"""Sums of a micro-batch, from which the step's metrics are computed.

Shapes: suffix _L is the response tokens on this rank, packed.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from slime_tis.correction import Correction, GlobalBatch, Statistics, correct
from slime_tis.policy.config import without_correction
from slime_tis.policy.loss_inputs import LossInputs, LossStep
from slime_tis.policy.step_sums import (
    STALENESS,
    TURN,
    WORKER,
    LossReduction,
    LossTerms,
    StepSums,
    sums_by,
)


def micro_batch_sums(
    inputs: LossInputs,
    correction: Correction[Tensor],
    terms: LossTerms,
    reduction: LossReduction,
    original: LossReduction,
    measured_log_probs_L: Tensor,
    step: LossStep,
) -> StepSums:
    """Returns the micro-batch's sums for the step's metrics, without optional metrics."""
    tokens = inputs.tokens
    workers_L = tokens.workers_L
    if workers_L is None:
        workers_L = torch.zeros_like(tokens.turns_L)
    by_bucket = partial(
        sums_by,
        train_log_probs_L=measured_log_probs_L,
        rollout_log_probs_L=tokens.rollout_log_probs_L,
        loss_mask_L=tokens.loss_mask_L,
    )
    # All context-parallel ranks have the complete counts; one rank adds them to the step.
    is_counted = float(step.counts)
    return StepSums(
        terms=LossTerms.unstack(reduction.sum_each(terms.stack())),
        loss_denominator=reduction.denominator * is_counted,
        original_denominator=original.denominator * is_counted,
        accepted_tokens=correction.accepted_per_sequence.sum() * is_counted,
        masked_in_tokens=correction.masked_in_per_sequence.sum() * is_counted,
        statistics=correction.statistics,
        old_policy_statistics=old_policy_statistics(inputs, step),
        staleness=by_bucket(STALENESS, number_L=step.version - tokens.weight_versions_L),
        turns=by_bucket(TURN, number_L=tokens.turns_L),
        workers=by_bucket(WORKER, number_L=workers_L),
    )


def with_optional_metrics(
    sums: StepSums,
    original: LossReduction,
    opsm_mask_L: Tensor | None,
    custom_metrics: dict[str, Tensor],
) -> StepSums:
    """Adds the sums of OPSM and of a user's correction, over all masked-in tokens."""
    if opsm_mask_L is not None:
        rejected_L = (~opsm_mask_L).double()
        sums = replace(sums, opsm_clipped=original.sum_each(rejected_L[None])[0])
    if custom_metrics:
        values = torch.stack([value.double() for value in custom_metrics.values()])
        metric_sums = original.sum_each(values).unbind()
        sums = replace(sums, custom=dict(zip(custom_metrics, metric_sums, strict=True)))
    return sums


def measured_log_probs(inputs: LossInputs, train_log_probs_L: Tensor, step: LossStep) -> Tensor:
    """log π_train [L] of the mismatch metrics.

    It is log π_train of the importance weights. With --get-mismatch-metrics it is the training
    engine's log π_old: in bypass mode the weights have π_θ, which moves away from the rollout
    policy with every step.
    """
    if step.correction.get_mismatch_metrics:
        return training_old_log_probs(inputs)
    return train_log_probs_L.detach()


def training_old_log_probs(inputs: LossInputs) -> Tensor:
    """The training engine's log π_old [L]: recomputed before the step, or of this forward pass."""
    recomputed_L = inputs.tokens.old_log_probs_L
    if recomputed_L is None:
        return inputs.log_probs_L.detach()
    return recomputed_L


def old_policy_statistics(inputs: LossInputs, step: LossStep) -> Statistics:
    """Mismatch of the training engine's π_old, with --get-mismatch-metrics; else empty."""
    config = without_correction(step.correction)
    tokens = inputs.tokens
    if not step.correction.get_mismatch_metrics:
        return Statistics.empty(config, tokens.loss_mask_L.device)
    correction = correct(
        config,
        training_old_log_probs(inputs),
        tokens.rollout_log_probs_L,
        tokens.loss_mask_L,
        lengths=tokens.lengths,
        global_batch=GlobalBatch(ranks=step.global_batch.ranks),
    )
    return correction.statistics
