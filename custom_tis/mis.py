"""Masked importance sampling: slime's `mis.py`, its signatures and metric names, on this library.

`--custom-tis-function-path custom_tis.mis.compute_mis_weights_with_cp`, in train.py, slime and
miles.

It is the built-in correction behind slime's contract: the same options give the same weights and
masks.

What differs from slime's file, deliberately: rejection works without `use_tis` and veto without
`use_rs`; a lower bound of rejection that is not given is 1/upper where the upper one is given; the
mask mode gives weight 0 outside the bounds; geometric weights can be batch-normalised; a sequence
without valid tokens has no part in the batch mean; a non-finite log-prob rejects its token, and
does nothing where masked. What is a property of the global batch (its mean weight, its second
moment) comes from the trainer where the trainer knows it, as train.py does; slime does not, and
there the mean weight covers the micro-batch, as in slime's file, and a second-moment bound is
refused.
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

SLIME_LEVELS = ("token", "sequence", "geometric")
"""Levels whose ratio before the bounds is a metric of slime's."""


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
        ValueError: if the lists or the lengths disagree, or the options are inconsistent.
    """
    config = config_from_args(args)
    found = correct(config, train_log_probs, rollout_log_probs, loss_masks)
    metrics = _metrics(
        config, found, (train_log_probs, rollout_log_probs, loss_masks), ContextParallel()
    )
    lengths = [len(mask) for mask in loss_masks]
    masks = [mask.to(original.dtype) for mask, original in zip(found.mask, loss_masks, strict=True)]
    return (
        found.weights if config.use_tis else None,
        masks,
        {name: list(values.split(lengths)) for name, values in metrics.items()},
    )


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
    """The same for slime's custom TIS contract, on this rank's slices.

    One all-reduce over the context-parallel group adds the sums of sequences. At the levels prefix
    and segment, it gathers the tokens instead.

    Args beyond slime's contract, which `template.py` describes:
        batch_norm_factor: Mean weight of the global batch; None uses these responses.
        second_moment_limit: Δ² from which tokens of the global batch are trimmed.
        adaptive_bounds: Rejection bounds of the global batch for rs_z_score or rs_target_fraction.
        kwargs: `log_probs` and `advantages` of the current policy, which train.py passes and a
            divergence mask needs; `cp_group` or `parallel_state` for the context-parallel group,
            if there is one.

    Returns:
        pg_loss times the weights, masks of complete responses, and metrics [N] with the prefix
        mis_.

    Raises:
        ValueError: if an option needs statistics of the global batch, but the trainer passes none.
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
    inputs = train_log_probs, rollout_log_probs, slices.slice_list(loss_masks)
    policy: dict[str, Any] = {
        "current_log_probs": kwargs.get("log_probs"),
        "advantages": kwargs.get("advantages"),
    }
    found = correct(config, *inputs, **policy, global_batch=global_batch)
    metrics = _metrics(config, found, inputs, context)
    if config.use_tis:
        weights = torch.cat(found.weights)
        pg_loss = torch.where(weights > 0, pg_loss * weights, 0.0)
    masks = complete_masks(found.mask, loss_masks, slices, context)
    return pg_loss, masks, {f"mis_{name}": values for name, values in metrics.items()}


@torch.no_grad()
def _metrics(
    config: RolloutCorrectionConfig,
    found: Correction[list[Tensor]],
    inputs: tuple[Sequence[Tensor], Sequence[Tensor | None], Sequence[Tensor]],
    context: ContextParallel,
) -> dict[str, Tensor]:
    """slime's metrics, flat over the tokens of this rank, a sequence's value at each of its tokens."""
    loss_masks = inputs[2]
    counts = torch.tensor([len(mask) for mask in loss_masks]).to(
        loss_masks[0].device, non_blocking=True
    )
    size = sum(map(len, loss_masks))

    def spread(values_S: Tensor) -> Tensor:
        """One value per sequence, at each of its tokens on this rank."""
        return values_S.to(torch.float32).repeat_interleave(counts, output_size=size)

    log_ratio = _log_ratio(*inputs)
    metrics = _mismatch_metrics(found.sequence_sums, log_ratio, spread)
    if config.use_tis:
        applied, factor = torch.cat(found.weights), found.global_batch.batch_norm_factor
        bounded = applied if factor is None else applied * factor.to(torch.float32)
        metrics |= _weight_metrics(config, found, log_ratio, bounded, spread)
    if config.use_rs and config.rs_level in SLIME_LEVELS and not config.adaptive:
        ratio, (lower, upper) = (
            _ratio(config.rs_level, found.sequence_sums, log_ratio, spread),
            config.rs_bounds,
        )
        metrics["rs_mask_fraction_low"] = (ratio < lower).float()
        metrics["rs_mask_fraction_high"] = (ratio > upper).float()
    if found.sequence_sums.catastrophic is not None:
        floor = (
            -math.inf if config.rs_veto_threshold is None else math.log(config.rs_veto_threshold)
        )
        ceiling = (
            math.inf
            if config.rs_veto_upper_threshold is None
            else math.log(config.rs_veto_upper_threshold)
        )
        metrics["rs_catastrophic_token_fraction"] = (
            (log_ratio < floor) | (log_ratio > ceiling)
        ).float()
        metrics["rs_catastrophic_seq_fraction"] = spread(found.sequence_sums.catastrophic > 0)
    if found.global_batch.second_moment_limit is not None:
        trimmed = log_ratio.square() >= found.global_batch.second_moment_limit
        metrics["second_moment_masked_fraction"] = trimmed.float()
    if config.use_tis:
        metrics |= _final_metrics(found, loss_masks, counts, context, spread)
        if factor is not None:
            metrics["batch_norm_factor"] = factor.to(torch.float32).expand_as(log_ratio)
    return metrics


def _log_ratio(
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor | None],
    loss_masks: Sequence[Tensor],
) -> Tensor:
    """Δ of this rank's tokens, flat, 0 where masked or not finite."""
    pairs = zip(train_log_probs, rollout_log_probs, strict=True)
    rollout = torch.cat(
        [torch.full_like(train, torch.nan) if r is None else r for train, r in pairs]
    )
    train = torch.cat(list(train_log_probs))
    usable = torch.cat(list(loss_masks)).bool() & is_log_prob(train) & is_log_prob(rollout)
    return torch.where(usable, train - rollout, 0.0).to(torch.float32)


def _mismatch_metrics(
    sums_S: SequenceSums[Tensor], log_ratio: Tensor, spread: Spread
) -> dict[str, Tensor]:
    n = (sums_S.masked_in - sums_S.nonfinite).clamp_min(1)  # a neutral token has no log-prob
    return {
        **{name: spread(values_S) for name, values_S in vars(perplexities(sums_S)).items()},
        "kl": -log_ratio,
        "k3_kl": (
            (log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expm1() - log_ratio).clamp_min(0)
        ),
        "chi2_token": spread((sums_S.ratio_minus_1_squared + 2 * sums_S.ratio_minus_1) / n),
        "chi2_seq": spread(safe_exp(sums_S.log_ratio).square() - 1),
    }


def _weight_metrics(
    config: RolloutCorrectionConfig,
    found: Correction[list[Tensor]],
    log_ratio: Tensor,
    bounded: Tensor,
    spread: Spread,
) -> dict[str, Tensor]:
    """Before and after the mode; before it only where the level is one of slime's."""
    metrics = {"tis_weight_after_bound": bounded, "is_ratio_mean_after_tis_rs": bounded}
    if config.tis_level not in SLIME_LEVELS:
        return metrics
    raw = _ratio(config.tis_level, found.sequence_sums, log_ratio, spread)
    lower, upper = config.is_bounds
    touched = {f"tis_{config.mode.high_fraction}": (raw > upper).float()}
    if config.mode.has_lower_bound:
        touched[f"tis_{config.mode.low_fraction}"] = (raw < lower).float()
    return {"tis_weight_before_bound": raw, **touched, **metrics}


def _final_metrics(
    found: Correction[list[Tensor]],
    loss_masks: Sequence[Tensor],
    counts: Tensor,
    context: ContextParallel,
    spread: Spread,
) -> dict[str, Tensor]:
    """Mean, minimum and maximum of each whole sequence's weights as applied; 0 where it has no valid token."""
    weights, valid = torch.cat(found.weights), torch.cat(list(loss_masks)).bool()
    # unsafe omits a check of the lengths for which a GPU's host would wait
    total = torch.segment_reduce(
        weights.to(torch.float64), "sum", lengths=counts, unsafe=True, initial=0
    )
    lowest = torch.segment_reduce(
        torch.where(valid, -weights, -torch.inf),
        "max",
        lengths=counts,
        unsafe=True,
        initial=-torch.inf,
    )
    highest = torch.segment_reduce(weights, "max", lengths=counts, unsafe=True, initial=0)
    ranks = context.ranks
    total = ranks.over_context(total)
    lowest, highest = ranks.over_context(torch.stack([lowest, highest]), "max").unbind()
    n, nonempty = found.sequence_sums.valid.clamp_min(1), found.sequence_sums.valid > 0
    return {
        "is_ratio_mean_final": spread(total / n),
        "is_ratio_min_final": spread(torch.where(nonempty, -lowest, 0.0)),
        "is_ratio_max_final": spread(highest),
    }


def _ratio(level: str, sums_S: SequenceSums[Tensor], log_ratio: Tensor, spread: Spread) -> Tensor:
    """exp of the log-ratio at one of slime's three levels, at every token."""
    if level == "token":
        return safe_exp(log_ratio)
    return spread(
        safe_exp(sums_S.log_ratio / (sums_S.valid.clamp_min(1) if level == "geometric" else 1))
    )
