"""Masked importance sampling: slime's `mis.py`, its signatures and metric names, on this library.

`--custom-tis-function-path custom_tis.mis.compute_mis_weights_with_cp`, in train.py, slime and
miles.

It is the built-in correction behind slime's contract: the same options give the same weights and
masks.

Deliberate differences from slime's file:
    * Rejection works without `use_tis`, and veto without `use_rs`.
    * An unset lower bound of rejection is 1/upper if the upper bound is set.
    * The mask mode gives weight 0 outside the bounds.
    * Geometric weights can be batch-normalised.
    * Sequences without valid tokens are not in the batch mean.
    * A non-finite log-prob rejects its token; at masked tokens it has no effect.

Some values belong to the global batch: the mean weight, the limit of the second moment, adaptive
bounds. train.py passes them. slime does not: then the mean weight covers the micro-batch, as in
slime's file, and options that need the other values are refused.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slime_tis import AdaptiveBounds, Correction, GlobalBatch, RolloutCorrectionConfig, correct
from slime_tis.correction import LOG_RATIO_BOUND, SequenceSums, is_log_prob, perplexities, safe_exp
from slime_tis.integrations.slime import (
    GLOBAL_BATCH_OPTIONS,
    ContextParallel,
    complete_masks,
    config_from_args,
    context_parallel,
)

Spread = Callable[[Tensor], Tensor]
"""[S], one value per sequence → [N], at each token of the sequence."""

SLIME_LEVELS = ("token", "sequence", "geometric")
"""slime's levels, whose ratio before the bounds is a metric."""


def compute_mis_weights(
    args: Namespace,
    *,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor | None],
    loss_masks: Sequence[Tensor],
) -> tuple[list[Tensor] | None, list[Tensor], dict[str, list[Tensor]]]:
    """Importance weights, rejection masks and metrics of complete responses.

    Args:
        args: The options use_tis, tis_*, use_rs and rs_*, if present.
        train_log_probs: log π_train per response, [T_i].
        rollout_log_probs: log π_rollout per response, [T_i].
        loss_masks: 1 at tokens that count, per response, [T_i].

    Returns:
        Weights per response (None without `use_tis`), masks per response, and metrics per response,
        [T_i] each.

    Raises:
        ValueError: The lists or the lengths disagree, or the options are inconsistent.
    """
    config = config_from_args(args)
    correction = correct(config, train_log_probs, rollout_log_probs, loss_masks)
    log_ratio = _log_ratio(train_log_probs, rollout_log_probs, loss_masks)
    flat_metrics = _metrics(config, correction, log_ratio, loss_masks, ContextParallel())
    lengths = [len(mask) for mask in loss_masks]
    metrics = {name: list(values.split(lengths)) for name, values in flat_metrics.items()}
    masks = [
        mask.to(original.dtype) for mask, original in zip(correction.mask, loss_masks, strict=True)
    ]
    weights = correction.weights if config.use_tis else None
    return weights, masks, metrics


def compute_mis_weights_with_cp(  # noqa: PLR0913
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor | None],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    batch_norm_factor: Tensor | None = None,
    second_moment_limit: Tensor | None = None,
    adaptive_bounds: AdaptiveBounds | None = None,
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """The correction in slime's custom TIS contract, on this rank's slices.

    One all-reduce over the context-parallel group adds the sequences' sums. At the levels prefix
    and segment, it gathers the tokens instead. `template.py` describes the arguments of slime's
    contract.

    Args beyond slime's contract:
        batch_norm_factor: Mean weight of the global batch; None uses these responses.
        second_moment_limit: Tokens with Δ² at or above this limit are trimmed.
        adaptive_bounds: Rejection bounds of the global batch for rs_z_score or rs_target_fraction.
        kwargs: `log_probs` and `advantages` of the current policy, which train.py passes and a
            divergence mask needs; `cp_group` or `parallel_state` with the context-parallel group.

    Returns:
        pg_loss times the weights, masks of complete responses, and metrics [N] with the prefix
        mis_.

    Raises:
        ValueError: An option needs statistics of the global batch, but the trainer passes none.
    """
    config = config_from_args(args)
    context = context_parallel(kwargs)
    slices = context.slices(total_lengths, response_lengths, kwargs.get("max_seq_lens"))
    global_batch = GlobalBatch(
        ranks=context.ranks.with_slices(slices),
        batch_norm_factor=batch_norm_factor,
        second_moment_limit=second_moment_limit,
        adaptive_bounds=adaptive_bounds,
    )
    for name in config.batch_options:
        if getattr(global_batch, GLOBAL_BATCH_OPTIONS[name]) is None:
            raise ValueError(
                f"{name} is {getattr(config, name)}, which needs statistics of the global batch,"
                " but this trainer passes micro-batches; remove it, or train with train.py."
            )
    local_masks = slices.slice_list(loss_masks)
    correction = correct(
        config,
        train_log_probs,
        rollout_log_probs,
        local_masks,
        current_log_probs=kwargs.get("log_probs"),
        advantages=kwargs.get("advantages"),
        global_batch=global_batch,
    )
    log_ratio = _log_ratio(train_log_probs, rollout_log_probs, local_masks)
    metrics = _metrics(config, correction, log_ratio, local_masks, context)
    if config.use_tis:
        weights = torch.cat(correction.weights)
        # The loss of a masked token may be NaN, and 0 · NaN is NaN.
        pg_loss = torch.where(weights > 0, pg_loss * weights, 0.0)
    masks = complete_masks(correction.mask, loss_masks, slices, context)
    return pg_loss, masks, {f"mis_{name}": values for name, values in metrics.items()}


@torch.no_grad()
def _metrics(
    config: RolloutCorrectionConfig,
    correction: Correction[list[Tensor]],
    log_ratio: Tensor,
    loss_masks: Sequence[Tensor],
    context: ContextParallel,
) -> dict[str, Tensor]:
    """slime's metrics, flat over this rank's tokens [N].

    slime averages them over tokens, so a metric of sequences has the sequence's value at every
    token.
    """
    lengths = [len(mask) for mask in loss_masks]
    counts = torch.tensor(lengths).to(loss_masks[0].device, non_blocking=True)

    def spread(values_S: Tensor) -> Tensor:
        # With output_size, repeat_interleave does not wait for the GPU.
        return values_S.to(torch.float32).repeat_interleave(counts, output_size=sum(lengths))

    sums_S = correction.sequence_sums
    metrics = _mismatch_metrics(sums_S, log_ratio, spread)
    if config.use_tis:
        metrics |= _weight_metrics(config, correction, log_ratio, spread)
    if config.use_rs and config.rs_level in SLIME_LEVELS and not config.adaptive:
        ratio = _ratio(config.rs_level, sums_S, log_ratio, spread)
        lower, upper = config.rs_bounds
        metrics["rs_mask_fraction_low"] = (ratio < lower).float()
        metrics["rs_mask_fraction_high"] = (ratio > upper).float()
    if sums_S.catastrophic is not None:
        catastrophic = torch.zeros_like(log_ratio, dtype=torch.bool)
        if config.rs_veto_threshold is not None:
            catastrophic |= log_ratio < math.log(config.rs_veto_threshold)
        if config.rs_veto_upper_threshold is not None:
            catastrophic |= log_ratio > math.log(config.rs_veto_upper_threshold)
        metrics["rs_catastrophic_token_fraction"] = catastrophic.float()
        metrics["rs_catastrophic_seq_fraction"] = spread(sums_S.catastrophic > 0)
    limit = correction.global_batch.second_moment_limit
    if limit is not None:
        metrics["second_moment_masked_fraction"] = (log_ratio.square() >= limit).float()
    if config.use_tis:
        metrics |= _final_metrics(correction, loss_masks, counts, context, spread)
        factor = correction.global_batch.batch_norm_factor
        if factor is not None:
            metrics["batch_norm_factor"] = factor.to(torch.float32).expand_as(log_ratio)
    return metrics


def _log_ratio(
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor | None],
    loss_masks: Sequence[Tensor],
) -> Tensor:
    """Δ of this rank's tokens, flat; 0 if a token is masked or a log-prob is not finite."""
    rollouts = []
    for train, rollout in zip(train_log_probs, rollout_log_probs, strict=True):
        if rollout is None:
            rollout = torch.full_like(train, torch.nan)
        rollouts.append(rollout)
    train_N = torch.cat(list(train_log_probs))
    rollout_N = torch.cat(rollouts)
    usable_N = torch.cat(list(loss_masks)).bool() & is_log_prob(train_N) & is_log_prob(rollout_N)
    return torch.where(usable_N, train_N - rollout_N, 0.0).to(torch.float32)


def _mismatch_metrics(
    sums_S: SequenceSums[Tensor], log_ratio: Tensor, spread: Spread
) -> dict[str, Tensor]:
    """KL and χ² estimates, and perplexities."""
    # Neutral tokens count as valid, but have no log-prob.
    n = (sums_S.masked_in - sums_S.nonfinite).clamp_min(1)
    ratio_minus_1 = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expm1()
    metrics = {name: spread(values_S) for name, values_S in vars(perplexities(sums_S)).items()}
    metrics["kl"] = -log_ratio
    metrics["k3_kl"] = (ratio_minus_1 - log_ratio).clamp_min(0)
    # r² − 1 = (r − 1)² + 2·(r − 1)
    chi2_S = (sums_S.ratio_minus_1_squared + 2 * sums_S.ratio_minus_1) / n
    metrics["chi2_token"] = spread(chi2_S)
    metrics["chi2_seq"] = spread(safe_exp(sums_S.log_ratio).square() - 1)
    return metrics


def _weight_metrics(
    config: RolloutCorrectionConfig,
    correction: Correction[list[Tensor]],
    log_ratio: Tensor,
    spread: Spread,
) -> dict[str, Tensor]:
    """Weights after the bound and, at slime's levels, before it; without normalisation."""
    weights = torch.cat(correction.weights)
    factor = correction.global_batch.batch_norm_factor
    if factor is not None:
        weights = weights * factor.to(torch.float32)
    metrics = {}
    if config.tis_level in SLIME_LEVELS:
        raw = _ratio(config.tis_level, correction.sequence_sums, log_ratio, spread)
        lower, upper = config.is_bounds
        metrics["tis_weight_before_bound"] = raw
        metrics[f"tis_{config.mode.high_fraction}"] = (raw > upper).float()
        if config.mode.has_lower_bound:
            metrics[f"tis_{config.mode.low_fraction}"] = (raw < lower).float()
    metrics["tis_weight_after_bound"] = weights
    metrics["is_ratio_mean_after_tis_rs"] = weights
    return metrics


def _final_metrics(
    correction: Correction[list[Tensor]],
    loss_masks: Sequence[Tensor],
    counts: Tensor,
    context: ContextParallel,
    spread: Spread,
) -> dict[str, Tensor]:
    """Mean, minimum and maximum of the applied weights per sequence.

    They cover the complete sequence, and are 0 for sequences without a valid token.
    """
    weights = torch.cat(correction.weights)
    valid = torch.cat(list(loss_masks)).bool()
    # unsafe=True omits a check of the lengths, for which the host would wait.
    total = torch.segment_reduce(
        weights.to(torch.float64), "sum", lengths=counts, unsafe=True, initial=0
    )
    # The minimum is −max(−w), so that one collective has both extremes.
    negative = torch.where(valid, -weights, -torch.inf)
    lowest = torch.segment_reduce(negative, "max", lengths=counts, unsafe=True, initial=-torch.inf)
    highest = torch.segment_reduce(weights, "max", lengths=counts, unsafe=True, initial=0)
    total = context.ranks.over_context(total)
    extremes = context.ranks.over_context(torch.stack([lowest, highest]), "max")
    lowest, highest = extremes.unbind()
    n = correction.sequence_sums.valid
    return {
        "is_ratio_mean_final": spread(total / n.clamp_min(1)),
        "is_ratio_min_final": spread(torch.where(n > 0, -lowest, 0.0)),
        "is_ratio_max_final": spread(highest),
    }


def _ratio(level: str, sums_S: SequenceSums[Tensor], log_ratio: Tensor, spread: Spread) -> Tensor:
    """The ratio at one of `SLIME_LEVELS`, at every token [N]."""
    if level == "token":
        return safe_exp(log_ratio)
    if level == "sequence":
        return spread(safe_exp(sums_S.log_ratio))
    return spread(safe_exp(sums_S.log_ratio / sums_S.valid.clamp_min(1)))
