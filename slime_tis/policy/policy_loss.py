"""The policy loss of one micro-batch: which policy is the old one, correction, loss per token, and its reduction.

    LossInputs → policy_loss(inputs, step) → LossOutputs

A micro-batch returns a numerator and a denominator (tokens or sequences); the training engine sums
both over all micro-batches and ranks and divides once, so the mean is the global batch's for every
split.

Shapes: suffix _L the response tokens this rank holds, packed; _S the sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slime_tis.correction import (
    Correction,
    GlobalBatch,
    Ranks,
    ResponseSlices,
    RolloutCorrectionConfig,
    Statistics,
    correct,
    interpolate_old_log_probs,
    is_log_prob,
    off_policy_sequence_mask,
)
from slime_tis.policy.config import COVARIANCE_LOSSES, PolicyConfig
from slime_tis.policy.custom_loss import CustomLoss, CustomTis, ObjectiveFunctions, reduced_loss
from slime_tis.policy.losses import (
    LOSSES,
    CovarianceLimit,
    TokenLossInputs,
    bounded,
    covariance_limit,
    kl_estimate,
    policy_ratio,
)
from slime_tis.policy.response_tokens import ResponseTokens, expand
from slime_tis.policy.step_sums import (
    STALENESS,
    TURN,
    WORKER,
    LossReduction,
    LossTerms,
    StepSums,
    sums_by,
)


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
    contributing: Tensor
    """Scalar: tokens with a gradient, the accepted ones, or all of the mask with a pull to the
    rollout policy."""
    sums: StepSums
    """What metrics are computed from."""
    record: "TokenRecord"
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
    """What multiplied the loss, 1 without importance weights and 0 where masked; NaN where a user's
    function did it."""
    accepted_L: Tensor
    """bool, the tokens that count in the loss."""
    measured_log_probs_L: Tensor
    """log π_train of the mismatch metrics, as `measured_log_probs` has it."""

    def stack(self) -> Tensor:
        """float32 [L, 6], in the order of the fields."""
        return torch.stack(
            [getattr(self, field.name).detach().float() for field in fields(self)], 1
        )

    @classmethod
    def unstack(cls, values: Tensor) -> "TokenRecord":
        """The inverse of `stack`, but for the types."""
        return cls(
            **{
                field.name: column
                for field, column in zip(fields(cls), values.unbind(1), strict=True)
            }
        )


@dataclass(frozen=True, kw_only=True)
class LossStep:
    """What all micro-batches of an optimizer step have in common."""

    correction: RolloutCorrectionConfig
    policy: PolicyConfig
    uses_recomputed_old_policy: bool
    """Whether `old_log_probs_L` gives π_old; otherwise π_old is π_θ of this forward pass,
    detached."""
    version: int = 0
    """Of the policy's weights, in optimizer steps."""
    global_batch: GlobalBatch = field(default_factory=GlobalBatch)
    """The context-parallel ranks, and what is known of the global batch before its first
    micro-batch."""
    covariance: CovarianceLimit | None = None
    """The tokens of the global batch that clip_cov or kl_cov select; None selects in each
    micro-batch."""
    counts: bool = True
    """Whether this rank counts tokens and sequences: one of the context-parallel ranks does."""
    custom: CustomTis | None = None
    """A user's function instead of the library's correction."""
    custom_loss: CustomLoss | None = None
    """A user's function instead of the loss."""
    functions: ObjectiveFunctions = field(default_factory=ObjectiveFunctions)
    """The user's other functions."""


def policy_loss(inputs: LossInputs, step: LossStep) -> LossOutputs:
    """The loss of one micro-batch by the algorithm that the options choose (the README lists them)."""
    corrected = correct_micro_batch(inputs, step)
    losses = token_losses(inputs, corrected, step)
    weights_L = applied_weights(inputs.tokens, corrected.correction, step)
    sums = step_sums(inputs, corrected, losses, step)
    numerator, sums = objective(inputs, losses, weights_L, sums, step)
    if step.policy.rollout_pull_coef > 0:
        original = _reduction(
            inputs.tokens.loss_mask_L > 0,
            corrected.correction.masked_in_per_sequence,
            inputs.tokens,
            step,
        )
        pull = original.sum(rollout_pull(inputs))
        numerator = numerator + step.policy.rollout_pull_coef * pull
        sums = replace(sums, rollout_pull=pull.detach().double())
    return LossOutputs(
        numerator=numerator,
        denominator=sums.loss_denominator.to(torch.int),
        contributing=sums.accepted_tokens if sums.rollout_pull is None else sums.masked_in_tokens,
        sums=sums,
        record=TokenRecord(
            log_probs_L=inputs.log_probs_L.detach(),
            old_log_probs_L=corrected.old_log_probs_L.detach(),
            entropy_L=inputs.entropy_L.detach(),
            weights_L=weights_L,
            accepted_L=losses.mask_L,
            measured_log_probs_L=measured_log_probs(inputs, corrected, step),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class CorrectedMicroBatch:
    """The old policy of a micro-batch, and its correction before the loss is known."""

    old_log_probs_L: Tensor
    train_log_probs_L: Tensor
    """log π_train, the numerator of the weights."""
    correction: Correction[Tensor]
    opsm_mask_L: Tensor | None
    """bool, the tokens that off-policy sequence masking (OPSM) accepts; None where it is off."""

    def without_opsm(
        self, mask_L: Tensor, accepted_S: Tensor, lengths: Sequence[int], ranks: Ranks
    ) -> tuple[Tensor, Tensor]:
        """A mask and its token count per sequence, without the tokens that OPSM rejects."""
        if self.opsm_mask_L is None:
            return mask_L, accepted_S
        mask_L = mask_L & self.opsm_mask_L
        counts_S = torch.stack([part.sum() for part in mask_L.split(lengths)])
        return mask_L, ranks.over_context(counts_S.double())


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """The loss of every token, and the tokens that it is averaged over."""

    terms: LossTerms
    """[L] each, with gradient where the loss has one."""
    mask_L: Tensor
    """bool, the accepted tokens."""
    accepted_per_sequence: Tensor
    """[S] float64, over whole sequences."""
    reduction: LossReduction
    """Over the accepted tokens."""
    custom_metrics: dict[str, Tensor]
    """[L] each, from a user's function."""


def correct_micro_batch(inputs: LossInputs, step: LossStep) -> CorrectedMicroBatch:
    """The correction of the micro-batch; its statistics alone if a user's function corrects."""
    config, tokens, ranks = step.correction, inputs.tokens, step.global_batch.ranks
    old_L = old_log_probs(inputs, step)
    train_L = inputs.log_probs_L.detach() if config.use_rollout_logprobs else old_L
    correction = correct(
        without_correction(config) if step.custom is not None else with_measured_weights(config),
        train_L,
        tokens.rollout_log_probs_L,
        tokens.loss_mask_L,
        lengths=tokens.lengths,
        current_log_probs=inputs.log_probs_L,
        advantages=tokens.advantages_L,
        global_batch=replace(step.global_batch, ranks=ranks.with_slices(tokens.slices)),
    )
    opsm_mask_L = None
    if step.policy.use_opsm:
        opsm_mask_L = off_policy_sequence_mask(
            inputs.log_probs_L,
            tokens.rollout_log_probs_L if step.policy.opsm_policy == "rollout" else old_L,
            inputs.advantages_L,
            tokens.loss_mask_L,
            delta=step.policy.opsm_bound,
            nonfinite_policy=config.nonfinite_policy,
            lengths=tokens.lengths,
            ranks=ranks,
        )
    return CorrectedMicroBatch(
        old_log_probs_L=old_L,
        train_log_probs_L=train_L,
        correction=correction,
        opsm_mask_L=opsm_mask_L,
    )


def objective(
    inputs: LossInputs, losses: TokenLosses, weights_L: Tensor, sums: StepSums, step: LossStep
) -> tuple[Tensor, StepSums]:
    """The numerator of the loss, and the sums with the loss and metrics of a user's function."""
    terms, policy, tokens, reduction = losses.terms, step.policy, inputs.tokens, losses.reduction
    if step.custom_loss is not None:
        assert inputs.logits is not None
        if step.correction.corrects:
            tokens = replace(tokens, loss_mask_N=whole_mask(tokens, losses.mask_L, step))
        loss, metrics = step.custom_loss(
            tokens, weights_L, inputs.sequences, inputs.logits, reduction.sum
        )
        return loss, replace(
            sums, terms=replace(sums.terms, pg_loss=loss.detach().double()), custom=metrics
        )
    if step.functions.reducer is None:
        objective_L = (
            terms.pg_loss
            - policy.entropy_coef * terms.entropy_loss
            + policy.kl_loss_coef * terms.kl_loss
        )
        return reduction.sum(objective_L), sums
    loss = reduced_loss(
        step.functions,
        tokens,
        torch.where(losses.mask_L, terms.pg_loss, 0.0),
        whole_mask(tokens, losses.mask_L, step),
        per_token=policy.calculate_per_token_loss,
        seed=step.version,
    )
    sums = replace(sums, terms=replace(sums.terms, pg_loss=loss.detach().double()))
    regularizer_L = policy.kl_loss_coef * terms.kl_loss - policy.entropy_coef * terms.entropy_loss
    return loss + reduction.sum(regularizer_L), sums


def rollout_pull(inputs: LossInputs) -> Tensor:
    """(log π_θ − log π_rollout)² of each token, with gradient, [L]; 0 where one of both is not a log-prob.

    The gradient pulls the policy back to the policy that sampled, also at rejected tokens, whose
    policy loss has no gradient.

    Source: "Kimi K2.5" (https://arxiv.org/abs/2602.02276); prime-rl,
        src/prime_rl/trainer/rl/loss.py, kl_tau.
    """
    rollout_L, log_probs_L = inputs.tokens.rollout_log_probs_L, inputs.log_probs_L
    counts_L = is_log_prob(rollout_L) & is_log_prob(log_probs_L.detach())
    return (
        torch.where(counts_L, log_probs_L, 0.0) - torch.where(counts_L, rollout_L, 0.0)
    ).square()


def whole_mask(tokens: ResponseTokens, mask_L: Tensor, step: LossStep) -> Tensor:
    """The mask of whole responses, float32 [N], from the slices of all context-parallel ranks."""
    return step.global_batch.ranks.over_context(tokens.slices.scatter(mask_L.float()))


def applied_weights(
    tokens: ResponseTokens, correction: Correction[Tensor], step: LossStep
) -> Tensor:
    """Returns the weights [L] that multiply the loss; in bypass mode the correction's weights are only measured."""
    if step.custom is not None and step.correction.corrects:
        return torch.full_like(correction.weights, torch.nan)
    weights_L = correction.weights if step.correction.use_tis else (tokens.loss_mask_L > 0).float()
    return (
        weights_L
        if step.policy.staleness_decay == 1
        else weights_L * staleness_weights(tokens, step)
    )


def staleness_weights(tokens: ResponseTokens, step: LossStep) -> Tensor:
    """γ^(v_θ − v) of tokens that weights of version v sampled, float32 [L]; 1 where v is not known (below 0)."""
    age_L = (step.version - tokens.weight_versions_L).clamp_min(0)
    return torch.where(
        tokens.weight_versions_L < 0, 1.0, step.policy.staleness_decay ** age_L.double()
    ).float()


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


def token_losses(inputs: LossInputs, corrected: CorrectedMicroBatch, step: LossStep) -> TokenLosses:
    """The loss per token with its weights, and the mask without rejected tokens."""
    tokens, correction, policy = inputs.tokens, corrected.correction, step.policy
    ranks = step.global_batch.ranks
    mask_L, accepted_S = corrected.without_opsm(
        correction.mask, correction.accepted_per_sequence, tokens.lengths, ranks
    )
    # A masked token, or one without a log-prob, gets ratio 1 before any arithmetic: a NaN behind a
    # mask would still poison the gradient.
    counts_L = mask_L & is_log_prob(inputs.log_probs_L.detach())
    log_probs_L = torch.where(counts_L, inputs.log_probs_L, bounded(inputs.log_probs_L.detach()))
    old_L = corrected.old_log_probs_L
    old_L = torch.where(counts_L & is_log_prob(old_L), old_L, log_probs_L.detach())
    loss_L, clipped_L = LOSSES[step.correction.policy_loss](
        TokenLossInputs(
            log_probs_L=log_probs_L,
            old_log_probs_L=old_L,
            advantages_L=inputs.advantages_L,
            over_sequence=partial(
                over_sequence, mask_L=mask_L, lengths=tokens.lengths, ranks=ranks
            ),
            prefix_sums=partial(prefix_sums, mask_L=mask_L, slices=tokens.slices, ranks=ranks),
            config=policy,
            selected_L=selected_tokens(corrected.old_log_probs_L, tokens, step),
        )
    )
    custom_metrics: dict[str, Tensor] = {}
    if step.custom is not None:
        custom_loss_L, custom_mask_L, custom_accepted_S, custom_metrics = step.custom(
            tokens,
            loss_L=loss_L,
            log_probs_L=log_probs_L,
            train_log_probs_L=corrected.train_log_probs_L,
            global_batch=step.global_batch,
        )
        if (
            step.correction.corrects
        ):  # otherwise metrics alone: the loss stays as it was, to the bit
            loss_L = custom_loss_L
            mask_L, accepted_S = corrected.without_opsm(
                custom_mask_L, custom_accepted_S, tokens.lengths, ranks
            )
    elif step.correction.use_tis:
        loss_L = loss_L * correction.weights
    if policy.staleness_decay < 1:
        loss_L = loss_L * staleness_weights(tokens, step)
    kl_L = torch.zeros_like(log_probs_L)
    if policy.use_kl_loss:
        assert tokens.ref_log_probs_L is not None
        ratio_L = policy_ratio(log_probs_L, old_L) if policy.use_unbiased_kl else None
        kl_L = kl_estimate(log_probs_L, tokens.ref_log_probs_L, policy.kl_loss_type, ratio_L)
        # −9984 nats of a reference without a log-prob would drown the mean
        kl_L = torch.where(is_log_prob(tokens.ref_log_probs_L), kl_L, 0.0)
    terms = LossTerms(
        pg_loss=loss_L,
        pg_clipfrac=clipped_L,
        ppo_kl=old_L - log_probs_L,
        ois=policy_ratio(log_probs_L, old_L),
        entropy_loss=inputs.entropy_L,
        entropy_gap=(inputs.entropy_L + log_probs_L).detach(),
        kl_loss=kl_L,
    )
    is_original = step.correction.rejection_normalizer == "original"
    counts_S = correction.masked_in_per_sequence if is_original else accepted_S
    return TokenLosses(
        terms=terms,
        mask_L=mask_L,
        accepted_per_sequence=accepted_S,
        reduction=_reduction(mask_L, counts_S, tokens, step),
        custom_metrics=custom_metrics,
    )


def _reduction(
    mask_L: Tensor, counts_S: Tensor, tokens: ResponseTokens, step: LossStep
) -> LossReduction:
    per_token = step.policy.calculate_per_token_loss
    rollouts = range(len(tokens)) if tokens.rollouts is None else tokens.rollouts
    return LossReduction.build(mask_L, counts_S, tokens.lengths, rollouts, per_token=per_token)


def selected_tokens(
    old_log_probs_L: Tensor, tokens: ResponseTokens, step: LossStep
) -> Tensor | None:
    """bool [L], the tokens that clip_cov or kl_cov select by log π_old; None for other losses."""
    name, advantages_L = step.correction.policy_loss, tokens.advantages_L
    if name not in COVARIANCE_LOSSES:
        return None
    assert advantages_L is not None
    limit = step.covariance or covariance_limit(
        old_log_probs_L,
        advantages_L,
        tokens.loss_mask_L,
        step.policy,
        name,
        step.global_batch.ranks,
    )
    return limit.selects(old_log_probs_L, advantages_L)


def over_sequence(
    values_L: Tensor, *, mean: bool, mask_L: Tensor, lengths: Sequence[int], ranks: Ranks
) -> Tensor:
    """Mean or sum over the masked-in tokens of the whole sequence, at each of its tokens on this rank, [L]."""
    owner_L = expand(torch.arange(len(lengths), device=values_L.device), lengths)
    columns = torch.stack(
        [torch.where(mask_L, values_L, 0.0), mask_L.to(values_L.dtype)], 1
    ).double()
    sums = ranks.over_context(columns.new_zeros(len(lengths), 2).index_add_(0, owner_L, columns))
    result_S = sums[:, 0] / sums[:, 1].clamp_min(1) if mean else sums[:, 0]
    return result_S.to(values_L.dtype).index_select(0, owner_L)


def prefix_sums(
    values_L: Tensor, *, mask_L: Tensor, slices: ResponseSlices, ranks: Ranks
) -> Tensor:
    """Sums over the masked-in tokens of the whole sequence up to each token on this rank, [L]."""
    whole_N = ranks.over_context(slices.scatter(torch.where(mask_L, values_L, 0.0).double()))
    sums_N = torch.cat([whole_N[:0], *(part.cumsum(0) for part in whole_N.split(slices.lengths))])
    return slices.slice_flat(sums_N).to(values_L.dtype)


def step_sums(
    inputs: LossInputs, corrected: CorrectedMicroBatch, losses: TokenLosses, step: LossStep
) -> StepSums:
    """The micro-batch's contribution to the metrics of the step."""
    tokens, masked_in_S = inputs.tokens, corrected.correction.masked_in_per_sequence
    workers_L = tokens.workers_L
    original = _reduction(tokens.loss_mask_L > 0, masked_in_S, tokens, step)
    opsm_clipped = None
    if corrected.opsm_mask_L is not None:
        opsm_clipped = original.sum_each((~corrected.opsm_mask_L).double()[None])[0]
    measured = {name: value.double() for name, value in losses.custom_metrics.items()}
    custom = original.sum_each(torch.stack(list(measured.values()))).unbind() if measured else ()
    counted = float(step.counts)
    measured_L = measured_log_probs(inputs, corrected, step)
    compared = (measured_L, tokens.rollout_log_probs_L, tokens.loss_mask_L)
    return StepSums(
        terms=LossTerms.unstack(losses.reduction.sum_each(losses.terms.stack())),
        loss_denominator=losses.reduction.denominator * counted,
        original_denominator=original.denominator * counted,
        accepted_tokens=losses.accepted_per_sequence.sum() * counted,
        masked_in_tokens=masked_in_S.sum() * counted,
        statistics=corrected.correction.statistics,
        old_policy_statistics=old_policy_statistics(inputs, step),
        staleness=sums_by(STALENESS, *compared, step.version - tokens.weight_versions_L),
        turns=sums_by(TURN, *compared, tokens.turns_L),
        workers=sums_by(
            WORKER, *compared, torch.zeros_like(tokens.turns_L) if workers_L is None else workers_L
        ),
        opsm_clipped=opsm_clipped,
        rollout_pull=None,
        custom=dict(zip(measured, custom, strict=True)),
    )


def training_old_log_probs(inputs: LossInputs) -> Tensor:
    """log π_old of the training engine [L]: of this forward pass if no pass was made before the first step."""
    recomputed_L = inputs.tokens.old_log_probs_L
    return inputs.log_probs_L.detach() if recomputed_L is None else recomputed_L


def measured_log_probs(
    inputs: LossInputs, corrected: CorrectedMicroBatch, step: LossStep
) -> Tensor:
    """log π_train [L] that the mismatch metrics compare with the rollout.

    It is that of the weights, or π_old of the training engine with --get-mismatch-metrics: in
    bypass mode the weights have π_θ, which moves away from the rollout with every step.
    """
    if step.correction.get_mismatch_metrics:
        return training_old_log_probs(inputs)
    return corrected.train_log_probs_L.detach()


def old_policy_statistics(inputs: LossInputs, step: LossStep) -> Statistics:
    """The mismatch of the training engine's π_old, under --get-mismatch-metrics."""
    config, tokens = without_correction(step.correction), inputs.tokens
    if not step.correction.get_mismatch_metrics:
        return Statistics.empty(config, tokens.loss_mask_L.device)
    old_L = training_old_log_probs(inputs)
    known, ranks = (
        (tokens.rollout_log_probs_L, tokens.loss_mask_L),
        GlobalBatch(ranks=step.global_batch.ranks),
    )
    return correct(config, old_L, *known, lengths=tokens.lengths, global_batch=ranks).statistics


def with_measured_weights(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """The configuration of the statistics: in bypass with weights that are measured and not applied, as in verl.

    There π_θ/π_rollout already is the ratio of the loss. Truncated weights leave the mask as it is.
    """
    if config.use_tis or not config.use_rollout_logprobs:
        return config
    return replace(
        config,
        use_tis=True,
        tis_mode="truncate",
        tis_lower_bound_negative=None,
        tis_upper_bound_negative=None,
        tis_batch_normalize=False,
        policy_loss="reinforce",
    )


def without_correction(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """The same configuration with weights and rejection off: statistics alone."""
    off: dict[str, Any] = dict.fromkeys(
        (
            *("rs_z_score", "rs_target_fraction", "rs_veto_threshold", "rs_veto_upper_threshold"),
            *("rs_second_moment_bound", "divergence_mask", "rollout_rs", "rollout_rs_threshold"),
        )
    )
    return replace(config, use_tis=False, use_rs=False, **off)
