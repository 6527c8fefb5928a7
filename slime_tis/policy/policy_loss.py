"""The policy loss of one micro-batch: which policy is the old one, correction, loss per token, and its reduction.

    LossInputs → policy_loss(inputs, step) → LossOutputs

A micro-batch returns a numerator and a denominator (tokens or sequences); the training engine sums both over all
micro-batches and ranks and divides once, so the mean is the global batch's for every split.

Shapes: suffix _L the response tokens this rank holds, packed; _S the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial

import torch
from torch import Tensor

from slime_tis.correction import (
    Correction,
    GlobalBatch,
    Ranks,
    RolloutCorrectionConfig,
    Statistics,
    TokenPassFunction,
    correct,
    interpolate_old_log_probs,
    off_policy_sequence_mask,
    torch_token_pass,
)
from slime_tis.policy.breakdown import STALENESS, TURN, sums_by
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.custom_loss import CustomLoss, ObjectiveFunctions, reduced_loss
from slime_tis.policy.custom_tis import CustomTis
from slime_tis.policy.losses import LOSSES, TokenLossInputs, kl_estimate
from slime_tis.policy.step_sums import LossReduction, LossTerms, StepSums
from slime_tis.policy.tokens import ResponseTokens, expand


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One micro-batch after its forward pass."""

    tokens: ResponseTokens
    log_probs_L: Tensor
    """log π_θ, with gradient."""
    entropy_L: Tensor
    """Entropies of the distributions that the tokens were predicted from."""
    sequences: Sequence[Tensor] = ()
    """Prompt and response of each sample, int64, for a user's loss; empty without one."""
    logits: Tensor | None = None
    """[1, L, V] of these tokens with gradient, for a user's loss; None without one."""

    @property
    def advantages_L(self) -> Tensor:
        """The advantages, which the learner has put in before training."""
        assert self.tokens.advantages_L is not None
        return self.tokens.advantages_L


@dataclass(frozen=True, kw_only=True)
class LossOutputs:
    """The loss of one micro-batch; the step's loss is Σ numerator / Σ denominator."""

    numerator: Tensor
    """Scalar, with gradient."""
    denominator: Tensor
    """int32 scalar: tokens or rollouts; 0 but on context-parallel rank 0."""
    sums: StepSums
    """What metrics are computed from."""
    record: TokenRecord
    """What the loss made of each token, which dumps are written of."""


@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    """What the loss made of each response token of a micro-batch, without gradient; [L] each."""

    log_probs_L: Tensor
    """log π_θ."""
    old_log_probs_L: Tensor
    """log π_old of the loss."""
    entropy_L: Tensor
    weights_L: Tensor
    """What multiplied the loss, 1 without importance weights and 0 where masked; NaN where a user's function did it."""
    accepted_L: Tensor
    """bool, the tokens that count in the loss."""

    def stack(self) -> Tensor:
        """float32 [L, 5], in the order of the fields."""
        return torch.stack([getattr(self, field.name).detach().float() for field in fields(self)], 1)

    @classmethod
    def unstack(cls, values: Tensor) -> TokenRecord:
        """The inverse of `stack`, but for the types."""
        return cls(**{field.name: column for field, column in zip(fields(cls), values.unbind(1), strict=True)})


@dataclass(frozen=True, kw_only=True)
class LossStep:
    """What all micro-batches of an optimizer step have in common."""

    correction: RolloutCorrectionConfig
    policy: PolicyConfig
    uses_recomputed_old_policy: bool
    """Whether `old_log_probs_L` gives π_old; otherwise π_old is π_θ of this forward pass, detached."""
    version: int = 0
    """Of the policy's weights, in optimizer steps."""
    global_batch: GlobalBatch = field(default_factory=GlobalBatch)
    """The context-parallel ranks, and what is known of the global batch before its first micro-batch."""
    counts: bool = True
    """Whether this rank counts tokens and sequences: one of the context-parallel ranks does."""
    custom: CustomTis | None = None
    """A user's function instead of the library's correction."""
    custom_loss: CustomLoss | None = None
    """A user's function instead of the loss."""
    functions: ObjectiveFunctions | None = None
    """The user's other functions; None without any."""

    @property
    def token_pass(self) -> TokenPassFunction:
        """The correction's pass over the tokens."""
        return torch_token_pass if self.functions is None else self.functions.token_pass


def policy_loss(inputs: LossInputs, step: LossStep) -> LossOutputs:
    """The loss of one micro-batch by the algorithm that the options choose (the README lists them)."""
    old_L = old_log_probs(inputs, step)
    train_L = inputs.log_probs_L.detach() if step.correction.use_rollout_logprobs else old_L
    correction = correct_tokens(inputs.tokens, train_L, step)
    opsm = opsm_mask(inputs, old_L, step) if step.policy.use_opsm else None
    losses = token_losses(inputs, old_L, train_L, correction, opsm, step)
    reduction = LossReduction.build(
        losses.mask_L,
        correction.masked_in_per_sequence
        if step.correction.rejection_normalizer == "original"
        else losses.accepted_per_sequence,
        inputs.tokens.lengths,
        inputs.tokens.rollout_of_each,
        per_token=step.policy.calculate_per_token_loss,
    )
    sums = step_sums(inputs, train_L, correction, opsm, losses, reduction, step)
    weights_L = applied_weights(inputs.tokens, correction, step)
    numerator, sums = objective(inputs, losses, weights_L, reduction, sums, step)
    return LossOutputs(
        numerator=numerator,
        denominator=sums.loss_denominator.to(torch.int),
        sums=sums,
        record=TokenRecord(
            log_probs_L=inputs.log_probs_L.detach(),
            old_log_probs_L=old_L.detach(),
            entropy_L=inputs.entropy_L.detach(),
            weights_L=weights_L,
            accepted_L=losses.mask_L,
        ),
    )


def objective(
    inputs: LossInputs,
    losses: TokenLosses,
    weights_L: Tensor,
    reduction: LossReduction,
    sums: StepSums,
    step: LossStep,
) -> tuple[Tensor, StepSums]:
    """The numerator of the loss, and the sums with what a user's function made of the policy loss.

    Args:
        inputs: of the micro-batch.
        losses: per token.
        weights_L: importance weights, without gradient.
        reduction: over the accepted tokens.
        sums: of the micro-batch.
        step: the options.
    """
    terms, policy, tokens = losses.terms, step.policy, inputs.tokens
    if step.custom_loss is not None:
        assert inputs.logits is not None
        if step.correction.corrects:
            tokens = replace(tokens, loss_mask_N=whole_mask(tokens, losses.mask_L, step))
        loss, metrics = step.custom_loss(tokens, weights_L, inputs.sequences, inputs.logits, reduction.sum)
        return loss, replace(sums, terms=replace(sums.terms, pg_loss=loss.detach().double()), custom=metrics)
    if step.functions is None or step.functions.reducer is None:
        objective_L = terms.pg_loss - policy.entropy_coef * terms.entropy_loss + policy.kl_loss_coef * terms.kl_loss
        return reduction.sum(objective_L), sums
    mask_L = losses.mask_L
    loss = reduced_loss(
        step.functions,
        tokens,
        torch.where(mask_L, terms.pg_loss, 0.0),
        whole_mask(tokens, mask_L, step),
        per_token=policy.calculate_per_token_loss,
        seed=step.version,
    )
    sums = replace(sums, terms=replace(sums.terms, pg_loss=loss.detach().double()))
    regularizer_L = policy.kl_loss_coef * terms.kl_loss - policy.entropy_coef * terms.entropy_loss
    return loss + reduction.sum(regularizer_L), sums


def whole_mask(tokens: ResponseTokens, mask_L: Tensor, step: LossStep) -> Tensor:
    """The mask of whole responses, float32 [N], from the slices of all context-parallel ranks."""
    return step.global_batch.ranks.over_context(tokens.slices.scatter(mask_L.float()))


def applied_weights(tokens: ResponseTokens, correction: Correction[Tensor], step: LossStep) -> Tensor:
    """Returns the weights [L] that multiply the loss; in bypass mode the correction's weights are only measured."""
    if step.custom is not None and step.correction.corrects:
        return torch.full_like(correction.weights, torch.nan)
    return correction.weights if step.correction.use_tis else (tokens.loss_mask_L > 0).float()


def old_log_probs(inputs: LossInputs, step: LossStep) -> Tensor:
    """log π_old [L]: the rollout's (bypass), an interpolated or recomputed one, or this forward pass's."""
    tokens = inputs.tokens
    if step.correction.use_rollout_logprobs:
        return tokens.rollout_log_probs_L
    if step.correction.old_logprobs == "interpolate":
        return interpolate_old_log_probs(
            inputs.log_probs_L, tokens.rollout_log_probs_L, step.version, tokens.weight_versions_L
        )
    if not step.uses_recomputed_old_policy:
        return inputs.log_probs_L.detach()
    assert tokens.old_log_probs_L is not None
    return tokens.old_log_probs_L


def correct_tokens(tokens: ResponseTokens, train_log_probs_L: Tensor, step: LossStep) -> Correction[Tensor]:
    """The correction of the micro-batch; with a user's function in its place, its statistics alone."""
    config = step.correction
    return correct(
        without_correction(config) if step.custom is not None else with_measured_weights(config),
        train_log_probs_L,
        tokens.rollout_log_probs_L,
        tokens.loss_mask_L,
        lengths=tokens.lengths,
        global_batch=replace(step.global_batch, ranks=step.global_batch.ranks.with_slices(tokens.slices)),
        token_pass=step.token_pass,
    )


@dataclass(frozen=True, kw_only=True)
class OffPolicySequenceMask:
    """The sequences that off-policy sequence masking (OPSM) accepts, bool."""

    opsm_mask_S: Tensor
    opsm_mask_L: Tensor
    """At each token the value of its sequence."""

    def apply(self, mask_L: Tensor, accepted_S: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a mask and its token count per sequence, without the rejected sequences."""
        return mask_L & self.opsm_mask_L, accepted_S * self.opsm_mask_S


def opsm_mask(inputs: LossInputs, old_log_probs_L: Tensor, step: LossStep) -> OffPolicySequenceMask:
    """Applies off-policy sequence masking to a micro-batch."""
    tokens, policy = inputs.tokens, step.policy
    advantage_S = torch.stack([part.sum() for part in inputs.advantages_L.split(tokens.lengths)]).double()
    opsm_mask_S = off_policy_sequence_mask(
        inputs.log_probs_L,
        tokens.rollout_log_probs_L if policy.opsm_policy == "rollout" else old_log_probs_L,
        # The sign is what counts, and all tokens of a sequence share it.
        step.global_batch.ranks.over_context(advantage_S),
        tokens.loss_mask_L,
        delta=policy.opsm_bound,
        nonfinite_policy=step.correction.nonfinite_policy,
        lengths=tokens.lengths,
        ranks=step.global_batch.ranks,
    )
    return OffPolicySequenceMask(opsm_mask_S=opsm_mask_S, opsm_mask_L=expand(opsm_mask_S, tokens.lengths))


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """The loss of every token, and the tokens that it is averaged over."""

    terms: LossTerms
    """[L] each, with gradient where the loss has one."""
    mask_L: Tensor
    """bool, the accepted tokens."""
    accepted_per_sequence: Tensor
    """[S] float64, over whole sequences."""
    custom_metrics: dict[str, Tensor]
    """[L] each, from a user's function."""


def token_losses(
    inputs: LossInputs,
    old_log_probs_L: Tensor,
    train_log_probs_L: Tensor,
    correction: Correction[Tensor],
    opsm: OffPolicySequenceMask | None,
    step: LossStep,
) -> TokenLosses:
    """The loss per token with its weights, and the mask without what is rejected.

    Args:
        inputs: of the micro-batch.
        old_log_probs_L: log π_old.
        train_log_probs_L: log π_train, the numerator of the weights.
        correction: weights and mask.
        opsm: the off-policy sequence mask, None when disabled.
        step: the options.
    """
    tokens = inputs.tokens
    mask_L, accepted_S = correction.mask, correction.accepted_per_sequence
    if opsm is not None:
        mask_L, accepted_S = opsm.apply(mask_L, accepted_S)
    # What is masked or not finite gets ratio 1 before any arithmetic: a NaN behind a mask would still poison
    # the gradient.
    log_probs_L = torch.where(mask_L, inputs.log_probs_L, inputs.log_probs_L.detach().nan_to_num())
    old_L = torch.where(mask_L & old_log_probs_L.isfinite(), old_log_probs_L, log_probs_L.detach())
    loss_L, clipped_L = LOSSES[step.correction.policy_loss](
        TokenLossInputs(
            log_probs_L=log_probs_L,
            old_log_probs_L=old_L,
            advantages_L=inputs.advantages_L,
            sequence_mean=partial(sequence_mean, mask_L=mask_L, lengths=tokens.lengths, ranks=step.global_batch.ranks),
            config=step.policy,
        )
    )
    custom_metrics: dict[str, Tensor] = {}
    if step.custom is not None:
        custom = step.custom(
            tokens,
            loss_L=loss_L,
            log_probs_L=log_probs_L,
            train_log_probs_L=train_log_probs_L,
            global_batch=step.global_batch,
        )
        custom_metrics = custom.metrics
        if step.correction.corrects:  # otherwise metrics alone: the loss stays as it was, to the bit
            loss_L = custom.loss_L
            mask_L, accepted_S = custom.mask_L, custom.accepted_per_sequence
            if opsm is not None:
                mask_L, accepted_S = opsm.apply(mask_L, accepted_S)
    elif step.correction.use_tis:
        loss_L = loss_L * correction.weights
    terms = LossTerms(
        pg_loss=loss_L,
        pg_clipfrac=clipped_L,
        ppo_kl=old_L - log_probs_L,
        ois=(log_probs_L - old_L).exp(),
        entropy_loss=inputs.entropy_L,
        entropy_gap=(inputs.entropy_L + log_probs_L).detach(),
        kl_loss=reference_kl(tokens, log_probs_L, step.policy),
    )
    return TokenLosses(terms=terms, mask_L=mask_L, accepted_per_sequence=accepted_S, custom_metrics=custom_metrics)


def sequence_mean(values_L: Tensor, *, mask_L: Tensor, lengths: Sequence[int], ranks: Ranks) -> Tensor:
    """Mean over the masked-in tokens of the whole sequence, at each of its tokens on this rank, [L]."""
    owner_L = expand(torch.arange(len(lengths), device=values_L.device), lengths)
    columns = torch.stack([torch.where(mask_L, values_L, 0.0), mask_L.to(values_L.dtype)], 1).double()
    sums = ranks.over_context(columns.new_zeros(len(lengths), 2).index_add_(0, owner_L, columns))
    mean_S = sums[:, 0] / sums[:, 1].clamp_min(1)
    return mean_S.to(values_L.dtype).index_select(0, owner_L)


def reference_kl(tokens: ResponseTokens, log_probs_L: Tensor, policy: PolicyConfig) -> Tensor:
    """The estimated KL divergence from the reference policy, [L]; 0 without a KL loss."""
    if not policy.use_kl_loss:
        return torch.zeros_like(log_probs_L)
    assert tokens.ref_log_probs_L is not None
    return kl_estimate(log_probs_L, tokens.ref_log_probs_L, policy.kl_loss_type)


def step_sums(
    inputs: LossInputs,
    train_log_probs_L: Tensor,
    correction: Correction[Tensor],
    opsm: OffPolicySequenceMask | None,
    losses: TokenLosses,
    reduction: LossReduction,
    step: LossStep,
) -> StepSums:
    """What the micro-batch adds to the metrics of the step.

    Args:
        inputs: of the micro-batch.
        train_log_probs_L: log π_train, the numerator of the weights.
        correction: its statistics are reported.
        opsm: the off-policy sequence mask, None when disabled.
        losses: per token.
        reduction: over the accepted tokens.
        step: the options.
    """
    tokens, masked_in_S = inputs.tokens, correction.masked_in_per_sequence
    original = LossReduction.build(
        tokens.loss_mask_L > 0,
        masked_in_S,
        tokens.lengths,
        tokens.rollout_of_each,
        per_token=step.policy.calculate_per_token_loss,
    )
    measured = {name: value.double() for name, value in losses.custom_metrics.items()}
    opsm_clipped = None if opsm is None else original.sum_each((~opsm.opsm_mask_L).double()[None])[0]
    custom = original.sum_each(torch.stack(list(measured.values()))).unbind() if measured else ()
    counted = float(step.counts)
    compared = train_log_probs_L, tokens.rollout_log_probs_L, tokens.loss_mask_L
    return StepSums(
        terms=LossTerms.unstack(reduction.sum_each(losses.terms.stack())),
        loss_denominator=reduction.denominator * counted,
        original_denominator=original.denominator * counted,
        accepted_tokens=losses.accepted_per_sequence.sum() * counted,
        masked_in_tokens=masked_in_S.sum() * counted,
        statistics=correction.statistics,
        old_policy_statistics=old_policy_statistics(inputs, step),
        staleness=sums_by(STALENESS, *compared, step.version - tokens.weight_versions_L),
        turns=sums_by(TURN, *compared, tokens.turns_L),
        opsm_clipped=opsm_clipped,
        custom=dict(zip(measured, custom, strict=True)),
    )


def old_policy_statistics(inputs: LossInputs, step: LossStep) -> Statistics:
    """The mismatch of π_old itself, which is the policy of this forward pass where no other was made for it."""
    config, tokens = without_correction(step.correction), inputs.tokens
    if not step.correction.get_mismatch_metrics:
        return Statistics.empty(config, tokens.loss_mask_L.device)
    old_L = tokens.old_log_probs_L
    return correct(
        config,
        inputs.log_probs_L.detach() if old_L is None else old_L,
        tokens.rollout_log_probs_L,
        tokens.loss_mask_L,
        lengths=tokens.lengths,
        global_batch=GlobalBatch(ranks=step.global_batch.ranks),
        token_pass=step.token_pass,
    ).statistics


def with_measured_weights(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """The configuration that statistics are made under: in bypass with the weights that the loss has no use for.

    There π_θ/π_rollout already is the ratio of the loss; verl too measures its weights and does not apply them. They
    are truncated, which leaves the mask as it is, and need no pass over the global batch.
    """
    if config.use_tis or not config.use_rollout_logprobs:
        return config
    return replace(config, use_tis=True, tis_mode="truncate", tis_batch_normalize=False, policy_loss="reinforce")


def without_correction(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """The same configuration with weights and rejection off: statistics alone."""
    return replace(
        config,
        use_tis=False,
        use_rs=False,
        rs_z_score=None,
        rs_target_fraction=None,
        rs_veto_threshold=None,
        rs_veto_upper_threshold=None,
        rs_second_moment_bound=None,
        rollout_rs=None,
        rollout_rs_threshold=None,
    )
