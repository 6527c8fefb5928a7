"""The policy loss of one micro-batch: old policy → rollout correction → loss per token → reduction.

    LossInputs → policy_loss(inputs, step) → LossOutputs

A micro-batch returns a numerator and a denominator (tokens or sequences). The training engine sums
both over all micro-batches and ranks and divides once. So the mean is the same for every split of
the global batch.

Shapes: suffix _L is the response tokens on this rank, packed; _N the tokens of complete responses
on all context-parallel ranks; _S the sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from slime_tis.correction import (
    Correction,
    Ranks,
    ResponseSlices,
    RolloutCorrectionConfig,
    correct,
    interpolate_old_log_probs,
    is_log_prob,
    off_policy_sequence_mask,
)
from slime_tis.policy.config import COVARIANCE_LOSSES, without_correction
from slime_tis.policy.custom_loss import reduced_loss
from slime_tis.policy.loss_inputs import LossInputs, LossStep
from slime_tis.policy.losses import (
    LOSSES,
    TokenLossInputs,
    bounded,
    covariance_limit,
    kl_estimate,
    policy_ratio,
)
from slime_tis.policy.micro_batch_sums import (
    measured_log_probs,
    micro_batch_sums,
    with_optional_metrics,
)
from slime_tis.policy.response_tokens import ResponseTokens, expand
from slime_tis.policy.step_sums import (
    LossReduction,
    LossTerms,
    StepSums,
)
from slime_tis.policy.token_record import TokenRecord


@dataclass(frozen=True, kw_only=True)
class LossOutputs:
    """The loss of one micro-batch; the step's loss is Σ numerator / Σ denominator."""

    numerator: Tensor
    """Scalar, with gradient."""
    denominator: Tensor
    """int32 scalar: tokens or rollouts; nonzero only on context-parallel rank 0."""
    contributing: Tensor
    """Scalar: number of tokens that receive a gradient. These are the accepted tokens, or all
    masked-in tokens with a pull to the rollout policy."""
    sums: StepSums
    """Sums for the metrics."""
    record: TokenRecord
    """Per-token values, for dumps."""


def policy_loss(inputs: LossInputs, step: LossStep) -> LossOutputs:
    """The loss of one micro-batch by the algorithm of the options (docs/choosing.md, section 2).

    Args:
        inputs: Log-probs, entropies and data of the micro-batch's response tokens.
        step: Options, version and user functions of the optimizer step.

    Returns:
        Numerator and denominator of the loss, sums for metrics, and per-token values for dumps.

    Raises:
        CustomFunctionError: A user's function returned invalid values.
    """
    tokens = inputs.tokens
    options = step.correction
    ranks = step.global_batch.ranks

    # 1. Old policy. In bypass mode it is the rollout policy, so the mismatch is measured with π_θ.
    old_L = old_log_probs(inputs, step)
    train_L = old_L
    if options.use_rollout_logprobs:
        train_L = inputs.log_probs_L.detach()

    # 2. Correction: weights and rejected tokens, then sequences that OPSM rejects.
    correction = correct(
        config_of_correction(step),
        train_L,
        tokens.rollout_log_probs_L,
        tokens.loss_mask_L,
        lengths=tokens.lengths,
        current_log_probs=inputs.log_probs_L,
        advantages=tokens.advantages_L,
        global_batch=replace(step.global_batch, ranks=ranks.with_slices(tokens.slices)),
    )
    opsm_mask_L = opsm_mask(inputs, old_L, step)
    correction = without_opsm(correction, opsm_mask_L, ranks)

    # 3. Loss per token.
    log_probs_L, finite_old_L = usable_log_probs(inputs.log_probs_L, old_L, correction.mask)
    selected_L = selected_tokens(old_L, tokens, step)
    terms = token_terms(inputs, log_probs_L, finite_old_L, correction.mask, selected_L, step)
    weighted = weighted_loss(inputs, terms.pg_loss, log_probs_L, train_L, correction, step)
    terms = replace(terms, pg_loss=weighted.loss_L)
    correction = weighted.correction
    if step.custom is not None and options.corrects:
        # The user's function returned another mask.
        correction = without_opsm(correction, opsm_mask_L, ranks)

    # 4. Reduction over the accepted tokens; some metrics need it over all masked-in tokens.
    accepted_S = correction.accepted_per_sequence
    masked_in_S = correction.masked_in_per_sequence
    counts_S = accepted_S
    if options.rejection_normalizer == "original":
        counts_S = masked_in_S
    reduction = reduction_over(correction.mask, counts_S, tokens, step)
    original = reduction_over(tokens.loss_mask_L > 0, masked_in_S, tokens, step)
    measured_L = measured_log_probs(inputs, train_L, step)
    sums = micro_batch_sums(inputs, correction, terms, reduction, original, measured_L, step)
    sums = with_optional_metrics(sums, original, opsm_mask_L, weighted.custom_metrics)
    numerator, sums = objective(
        inputs, terms, correction.mask, weighted.weights_L, reduction, sums, step
    )
    contributing = sums.accepted_tokens
    if step.policy.rollout_pull_coef > 0:
        pull = original.sum(rollout_pull(inputs))
        numerator = numerator + step.policy.rollout_pull_coef * pull
        sums = replace(sums, rollout_pull=pull.detach().double())
        # Rejected tokens are pulled, too.
        contributing = sums.masked_in_tokens
    return LossOutputs(
        numerator=numerator,
        denominator=sums.loss_denominator.to(torch.int),
        contributing=contributing,
        sums=sums,
        record=TokenRecord(
            log_probs_L=inputs.log_probs_L.detach(),
            old_log_probs_L=old_L.detach(),
            entropy_L=inputs.entropy_L.detach(),
            weights_L=weighted.weights_L,
            accepted_L=correction.mask,
            measured_log_probs_L=measured_L,
        ),
    )


def usable_log_probs(
    log_probs_L: Tensor, old_log_probs_L: Tensor, mask_L: Tensor
) -> tuple[Tensor, Tensor]:
    """log π_θ with gradient and log π_old; tokens that are masked or lack one have ratio 1.

    This comes before any arithmetic, because the gradient of a masked NaN is NaN.
    """
    current_L = log_probs_L.detach()
    counts_L = mask_L & is_log_prob(current_L)
    usable_L = torch.where(counts_L, log_probs_L, bounded(current_L))
    has_old_L = counts_L & is_log_prob(old_log_probs_L)
    return usable_L, torch.where(has_old_L, old_log_probs_L, usable_L.detach())


def old_log_probs(inputs: LossInputs, step: LossStep) -> Tensor:
    """log π_old [L]: the rollout's (bypass), interpolated, recomputed, or of this forward pass."""
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


def config_of_correction(step: LossStep) -> RolloutCorrectionConfig:
    """The configuration that `correct` gets.

    If a user's function corrects, the library only computes statistics. In bypass mode the ratio of
    the loss is π_θ/π_rollout already, so weights are only measured, as in verl. Truncated weights
    do not change the mask.
    """
    config = step.correction
    if step.custom is not None:
        return without_correction(config)
    if config.use_tis or not config.use_rollout_logprobs:
        return config
    return replace(
        config,
        use_tis=True,
        tis_mode="truncate",
        tis_lower_bound_negative=None,
        tis_upper_bound_negative=None,
        tis_batch_normalize=False,
        # The configuration refuses weights in bypass mode with a loss that has a ratio.
        policy_loss="reinforce",
    )


def opsm_mask(inputs: LossInputs, old_log_probs_L: Tensor, step: LossStep) -> Tensor | None:
    """Tokens that off-policy sequence masking (OPSM) accepts, bool [L]; None if it is off."""
    if not step.policy.use_opsm:
        return None
    tokens = inputs.tokens
    reference_L = old_log_probs_L
    if step.policy.opsm_policy == "rollout":
        reference_L = tokens.rollout_log_probs_L
    return off_policy_sequence_mask(
        inputs.log_probs_L,
        reference_L,
        inputs.advantages_L,
        tokens.loss_mask_L,
        delta=step.policy.opsm_bound,
        nonfinite_policy=step.correction.nonfinite_policy,
        lengths=tokens.lengths,
        ranks=step.global_batch.ranks,
    )


def without_opsm(
    correction: Correction[Tensor], opsm_mask_L: Tensor | None, ranks: Ranks
) -> Correction[Tensor]:
    """Removes the tokens that OPSM rejects from the mask; a collective if OPSM is on."""
    if opsm_mask_L is None:
        return correction
    mask_L = correction.mask & opsm_mask_L
    counts_S = torch.stack([mask.sum() for mask in mask_L.split(correction.lengths)])
    return replace(
        correction, mask=mask_L, accepted_per_sequence=ranks.over_context(counts_S.double())
    )


def token_terms(
    inputs: LossInputs,
    log_probs_L: Tensor,
    old_log_probs_L: Tensor,
    mask_L: Tensor,
    selected_L: Tensor | None,
    step: LossStep,
) -> LossTerms:
    """Terms of the loss per token before weights; all are [L].

    Args:
        inputs: The micro-batch.
        log_probs_L: log π_θ with gradient, bounded at masked tokens.
        old_log_probs_L: log π_old, equal to `log_probs_L` at masked tokens.
        mask_L: bool: the accepted tokens, over which losses average a sequence.
        selected_L: The result of `selected_tokens`.
        step: Options of the optimizer step.
    """
    tokens = inputs.tokens
    ranks = step.global_batch.ranks
    loss_inputs = TokenLossInputs(
        log_probs_L=log_probs_L,
        old_log_probs_L=old_log_probs_L,
        advantages_L=inputs.advantages_L,
        over_sequence=partial(over_sequence, mask_L=mask_L, lengths=tokens.lengths, ranks=ranks),
        prefix_sums=partial(prefix_sums, mask_L=mask_L, slices=tokens.slices, ranks=ranks),
        config=step.policy,
        selected_L=selected_L,
    )
    loss_L, clipped_L = LOSSES[step.correction.policy_loss](loss_inputs)
    ratio_L = policy_ratio(log_probs_L, old_log_probs_L)
    kl_L = torch.zeros_like(log_probs_L)
    if step.policy.use_kl_loss:
        reference_L = tokens.ref_log_probs_L
        assert reference_L is not None
        kl_ratio_L = None
        if step.policy.use_unbiased_kl:
            kl_ratio_L = ratio_L
        kl_L = kl_estimate(log_probs_L, reference_L, step.policy.kl_loss_type, kl_ratio_L)
        # A reference without a log-prob has −9984 nats, which would dominate the mean.
        kl_L = torch.where(is_log_prob(reference_L), kl_L, 0.0)
    return LossTerms(
        pg_loss=loss_L,
        pg_clipfrac=clipped_L,
        ppo_kl=old_log_probs_L - log_probs_L,
        ois=ratio_L,
        entropy_loss=inputs.entropy_L,
        entropy_gap=(inputs.entropy_L + log_probs_L).detach(),
        kl_loss=kl_L,
    )


def selected_tokens(
    old_log_probs_L: Tensor, tokens: ResponseTokens, step: LossStep
) -> Tensor | None:
    """Tokens that clip_cov or kl_cov select by log π_old, bool [L]; None for other losses."""
    name = step.correction.policy_loss
    if name not in COVARIANCE_LOSSES:
        return None
    advantages_L = tokens.advantages_L
    assert advantages_L is not None
    limit = step.covariance
    if limit is None:
        limit = covariance_limit(
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
    """Mean or sum over a complete sequence's masked-in tokens, at all tokens of the sequence, [L].

    A collective: context-parallel ranks share a sequence.
    """
    sequence_L = expand(torch.arange(len(lengths), device=values_L.device), lengths)
    masked_L = torch.where(mask_L, values_L, 0.0)
    columns = torch.stack([masked_L, mask_L.to(values_L.dtype)], 1).double()
    local_sums = columns.new_zeros(len(lengths), 2).index_add_(0, sequence_L, columns)
    sum_S, count_S = ranks.over_context(local_sums).unbind(1)
    result_S = sum_S
    if mean:
        result_S = sum_S / count_S.clamp_min(1)
    return result_S.to(values_L.dtype).index_select(0, sequence_L)


def prefix_sums(
    values_L: Tensor, *, mask_L: Tensor, slices: ResponseSlices, ranks: Ranks
) -> Tensor:
    """Sums over the masked-in tokens of a sequence up to every token on this rank, [L].

    A collective: context-parallel ranks share a sequence.
    """
    masked_L = torch.where(mask_L, values_L, 0.0).double()
    values_N = ranks.over_context(slices.scatter(masked_L))
    sums = [response.cumsum(0) for response in values_N.split(slices.lengths)]
    # An empty tensor first: cat refuses an empty list, and a micro-batch may have no sequences.
    sums_N = torch.cat([values_N[:0], *sums])
    return slices.slice_flat(sums_N).to(values_L.dtype)


@dataclass(frozen=True, kw_only=True)
class WeightedLoss:
    """The policy loss of a micro-batch after the correction."""

    loss_L: Tensor
    """Loss per token times its weight, with gradient."""
    weights_L: Tensor
    """The weights, float32; NaN if a user's function applied its own."""
    correction: Correction[Tensor]
    """The correction, with the mask of a user's function if there is one."""
    custom_metrics: dict[str, Tensor]
    """Metrics of a user's function, [L] each."""


def weighted_loss(
    inputs: LossInputs,
    loss_L: Tensor,
    log_probs_L: Tensor,
    train_log_probs_L: Tensor,
    correction: Correction[Tensor],
    step: LossStep,
) -> WeightedLoss:
    """Multiplies the loss per token by the weights of the library or of a user's function.

    Args:
        inputs: The micro-batch.
        loss_L: Loss per token, with gradient.
        log_probs_L: log π_θ with gradient, bounded at masked tokens.
        train_log_probs_L: log π_train, the numerator of the weights.
        correction: The library's correction.
        step: Options of the optimizer step.

    Raises:
        CustomFunctionError: A user's function returned invalid values.
    """
    tokens = inputs.tokens
    options = step.correction
    weights_L = (tokens.loss_mask_L > 0).float()
    if options.use_tis:
        weights_L = correction.weights
    custom_metrics: dict[str, Tensor] = {}
    if step.custom is not None:
        custom_loss_L, mask_L, accepted_S, custom_metrics = step.custom(
            tokens,
            loss_L=loss_L,
            log_probs_L=log_probs_L,
            train_log_probs_L=train_log_probs_L,
            global_batch=step.global_batch,
        )
        # Without --use-tis and --use-rs the function only measures, and the loss keeps all bits.
        if options.corrects:
            loss_L = custom_loss_L
            # The function applies its weights itself, and does not return them.
            weights_L = torch.full_like(weights_L, torch.nan)
            correction = replace(correction, mask=mask_L, accepted_per_sequence=accepted_S)
    elif options.use_tis:
        loss_L = loss_L * weights_L
    if step.policy.staleness_decay < 1:
        decay_L = staleness_weights(tokens, step)
        loss_L = loss_L * decay_L
        weights_L = weights_L * decay_L
    return WeightedLoss(
        loss_L=loss_L, weights_L=weights_L, correction=correction, custom_metrics=custom_metrics
    )


def staleness_weights(tokens: ResponseTokens, step: LossStep) -> Tensor:
    """γ^(v_θ − v), float32 [L], with the version v of the weights that sampled a token.

    1 if the version is unknown (below 0).
    """
    age_L = (step.version - tokens.weight_versions_L).clamp_min(0)
    decay_L = step.policy.staleness_decay ** age_L.double()
    return torch.where(tokens.weight_versions_L < 0, 1.0, decay_L).float()


def reduction_over(
    mask_L: Tensor, counts_S: Tensor, tokens: ResponseTokens, step: LossStep
) -> LossReduction:
    """The mean of the options over the tokens of a mask; `counts_S` are the divisors."""
    rollouts = tokens.rollouts
    if rollouts is None:
        rollouts = tuple(range(len(tokens)))
    per_token = step.policy.calculate_per_token_loss
    return LossReduction.build(mask_L, counts_S, tokens.lengths, rollouts, per_token=per_token)


def objective(
    inputs: LossInputs,
    terms: LossTerms,
    mask_L: Tensor,
    weights_L: Tensor,
    reduction: LossReduction,
    sums: StepSums,
    step: LossStep,
) -> tuple[Tensor, StepSums]:
    """The numerator of the loss, and the sums with the loss and metrics of a user's function."""
    tokens = inputs.tokens
    policy = step.policy
    if step.custom_loss is not None:
        assert inputs.logits is not None
        if step.correction.corrects:
            tokens = replace(tokens, loss_mask_N=mask_of_responses(tokens, mask_L, step))
        loss, metrics = step.custom_loss(
            tokens, weights_L, inputs.sequences, inputs.logits, reduction.sum
        )
        custom_terms = replace(sums.terms, pg_loss=loss.detach().double())
        return loss, replace(sums, terms=custom_terms, custom=metrics)
    if step.functions.reducer is not None:
        loss = reduced_loss(
            step.functions,
            tokens,
            torch.where(mask_L, terms.pg_loss, 0.0),
            mask_of_responses(tokens, mask_L, step),
            per_token=policy.calculate_per_token_loss,
            seed=step.version,
        )
        reduced_terms = replace(sums.terms, pg_loss=loss.detach().double())
        # The function reduces the policy loss; KL and entropy keep the reduction of the options.
        regularizer_L = (
            policy.kl_loss_coef * terms.kl_loss - policy.entropy_coef * terms.entropy_loss
        )
        return loss + reduction.sum(regularizer_L), replace(sums, terms=reduced_terms)
    objective_L = (
        terms.pg_loss
        - policy.entropy_coef * terms.entropy_loss
        + policy.kl_loss_coef * terms.kl_loss
    )
    return reduction.sum(objective_L), sums


def mask_of_responses(tokens: ResponseTokens, mask_L: Tensor, step: LossStep) -> Tensor:
    """The mask of complete responses, float32 [N], from slices of all context-parallel ranks."""
    return step.global_batch.ranks.over_context(tokens.slices.scatter(mask_L.float()))


def rollout_pull(inputs: LossInputs) -> Tensor:
    """(log π_θ − log π_rollout)² per token with gradient, [L]; 0 if a log-prob is missing.

    The gradient pulls the policy back to the rollout policy. Rejected tokens are pulled as well;
    their policy loss has no gradient.

    Source: "Kimi K2.5" (https://arxiv.org/abs/2602.02276); prime-rl,
        src/prime_rl/trainer/rl/loss.py, kl_tau.
    """
    log_probs_L = inputs.log_probs_L
    rollout_L = inputs.tokens.rollout_log_probs_L
    counts_L = is_log_prob(rollout_L) & is_log_prob(log_probs_L.detach())
    # Zeros before the difference: a later mask would leave the NaN gradient of inf − inf.
    difference_L = torch.where(counts_L, log_probs_L, 0.0) - torch.where(counts_L, rollout_L, 0.0)
    return difference_L.square()
