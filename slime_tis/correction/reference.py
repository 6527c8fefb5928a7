"""The mathematics of docs/math.md on one page: padded [B, T], out of place, in the input's dtype.

`reference_correct` computes the same as `slime_tis.correct`, but is written to be read. They share
only the configuration, and tests compare them over every combination of options. Train with
`correct`: it is faster, takes lists and packed tokens, and is exact over micro-batches and ranks.

Shapes: suffix _BT is [sequences, tokens], _B per sequence, _N per counted token or sequence.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.modes import LEVELS, Criterion

Bounds = tuple[Tensor, Tensor]
"""Lower and upper bounds of the weights, in their shape."""
LARGEST = torch.finfo(torch.float32).max
"""Bounds are at most this: torch refuses larger numbers for float32 tensors."""


@dataclass(frozen=True)
class ReferenceCorrection:
    """Weights and mask [B, T], and the metrics of the batch."""

    weights: Tensor
    mask: Tensor
    metrics: dict[str, float]


@torch.no_grad()
def reference_correct(
    config: RolloutCorrectionConfig,
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    **policy: Tensor | None,
) -> ReferenceCorrection:
    """Importance weights, rejection mask and metrics of a padded batch, which is the global batch.

    Args:
        config: The options.
        train_log_probs: log π_train, [B, T].
        rollout_log_probs: log π_rollout, [B, T].
        loss_mask: Nonzero at valid tokens, [B, T].
        policy: `current_log_probs` and `advantages` of `correction_steps`.

    Raises:
        ValueError: if a token is not finite under the "raise" policy.
    """
    x = correction_steps(config, (train_log_probs, rollout_log_probs), loss_mask, **policy)
    metrics = mismatch_metrics(x)
    if config.corrects and x.masked_in.any():
        metrics["gradient_kept_fraction"] = (x.mask.sum() / x.masked_in.sum()).item()
    if not x.valid.any():
        return ReferenceCorrection(x.weights, x.mask, metrics)
    if config.use_tis:
        metrics |= weight_metrics(config, x)
    rejected = {}
    if x.criteria:
        rejected = {"mis_rs_": x.rejected}
    for name, rejected_BT in x.criteria.items():
        rejected[f"mis_rs_{name}_"] = rejected_BT
    for prefix, rejected_BT in rejected.items():
        metrics[f"{prefix}masked_fraction"] = token_share(rejected_BT, x.valid)
        metrics[f"{prefix}seq_masked_fraction"] = sequence_share(rejected_BT, x.valid)
    if config.adaptive:
        metrics |= bound_metrics(config, x.delta, x.valid)
    if config.vetoes:
        metrics["mis_catastrophic_token_fraction"] = token_share(x.catastrophic, x.valid)
        metrics["mis_catastrophic_seq_fraction"] = sequence_share(x.catastrophic, x.valid)
    if config.rs_second_moment_bound is not None:
        metrics["mis_second_moment_masked_fraction"] = token_share(x.trimmed, x.valid)
    return ReferenceCorrection(x.weights, x.mask, metrics)


class Steps(NamedTuple):
    """The steps from log-probs to weights and mask, all [..., T]."""

    train: Tensor
    masked_in: Tensor
    finite: Tensor
    valid: Tensor
    advantages: Tensor
    delta: Tensor
    level: Tensor
    bounds: Bounds
    factor: Tensor | float
    """The mean weight, or 1 without normalisation."""
    criteria: dict[str, Tensor]
    """The rejected tokens by the name of the criterion."""
    rejected: Tensor
    trimmed: Tensor
    catastrophic: Tensor
    weights: Tensor
    mask: Tensor


def correction_steps(
    config: RolloutCorrectionConfig,
    log_probs: tuple[Tensor, Tensor],
    loss_mask: Tensor,
    current_log_probs: Tensor | None = None,
    advantages: Tensor | None = None,
) -> Steps:
    """The correction step by step, in the order of docs/math.md; `functional.correct` traces it.

    Args:
        config: The options.
        log_probs: log π_train and log π_rollout.
        loss_mask: Nonzero at valid tokens.
        current_log_probs: log π_θ, for the divergence mask. If None, it is log π_train.
        advantages: For a divergence mask with direction away and for bounds by the sign of the
            advantage. If None, they are 0.
    """
    # 1. Δ at valid tokens. A log-prob of −9984 or less is an engine's code for minus infinity; a
    # NaN compares as false.
    train_log_probs, rollout_log_probs = log_probs
    masked_in = loss_mask != 0
    difference = train_log_probs - rollout_log_probs
    finite = masked_in & (train_log_probs.abs() < 9984) & (rollout_log_probs.abs() < 9984)
    if config.nonfinite_policy == "raise" and (masked_in & ~finite).any():
        raise ValueError(
            "a log-prob is not finite; fix the sample or choose --nonfinite-policy reject or"
            " neutral."
        )
    valid = finite
    if config.nonfinite_policy == "neutral":
        valid = masked_in
    delta = torch.where(finite, difference, 0.0)
    # 2. Δ → L at the level of the weights. 3. w = exp(clamp(L, ±20)). 4. The mode bounds w.
    level = aggregate(LEVELS[config.tis_level].aggregation, delta, valid, masked_in)
    raw = level.clamp(-20, 20).exp()
    if advantages is None:
        advantages = torch.zeros_like(delta)
    bounds = bounds_of_weights(config, raw, advantages, valid)
    weights = bounded(config, raw, *bounds)
    # 5. Normalisation by the mean of the global batch. 6. 0 at invalid tokens.
    outside = (weights == 0) & config.rejects_weights
    factor: Tensor | float = 1.0
    if config.tis_batch_normalize:
        factor = mean_weight(config, weights, valid)
    weights = weights / factor
    if not config.use_tis:
        weights = torch.ones_like(raw)
    weights = torch.where(valid, weights, 0.0)
    # 7. Rejection: the criteria are ANDed, each over all valid tokens; the mask mode and the
    # trimming reject as well.
    criteria = {}
    for criterion in config.rejections:
        if criterion.anchor is None:
            criteria[criterion.name] = rejected_by(config, criterion, delta, valid, masked_in)
    if config.divergence_mask is not None:
        criteria["divergence_mask"] = rejected_by_divergence(
            config, log_probs, current_log_probs, advantages, valid
        )
    rejected = any_of(criteria, valid)
    trimmed = trimmed_tokens(config, delta, valid)
    # 8. Veto: one token beyond a threshold, by its unclamped ratio, rejects its sequence.
    # Unset thresholds become −inf and +inf, which no Δ passes.
    log_low = _log(config.rs_veto_threshold or 0.0)
    log_high = _log(config.rs_veto_upper_threshold or math.inf)
    catastrophic = valid & ((delta < log_low) | (delta > log_high))
    mask = valid & ~(rejected | outside | trimmed | catastrophic.any(-1, keepdim=True))
    if not config.touches_loss:
        weights = masked_in.to(weights.dtype)
        mask = masked_in
    return Steps(
        train=train_log_probs,
        masked_in=masked_in,
        finite=finite,
        valid=valid,
        advantages=advantages,
        delta=delta,
        level=level,
        bounds=bounds,
        factor=factor,
        criteria=criteria,
        rejected=rejected,
        trimmed=trimmed,
        catastrophic=catastrophic,
        weights=weights,
        mask=mask,
    )


def aggregate(aggregation: str, x_BT: Tensor, valid_BT: Tensor, masked_in_BT: Tensor) -> Tensor:
    """Aggregates over the token, the prefix, the turn, or the sequence; one result per token."""
    x_BT = torch.where(valid_BT, x_BT, 0.0)
    if aggregation == "token":
        return x_BT
    if aggregation == "prefix":
        return x_BT.cumsum(-1)
    if aggregation == "segment":
        # A turn is a run of the loss mask. Turns are numbered from 1; 0 is before the first one.
        before_BT = torch.nn.functional.pad(masked_in_BT, (1, 0))[..., :-1]
        turn_BT = (masked_in_BT & ~before_BT).cumsum(-1)
        # One more column, for turn 0 before the first run.
        zeros_BT = torch.zeros_like(torch.nn.functional.pad(x_BT, (1, 0)))
        sums_BT = zeros_BT.scatter_add(-1, turn_BT, x_BT)
        return sums_BT.gather(-1, turn_BT)
    if aggregation == "max":
        x_BT = torch.where(valid_BT, x_BT, -math.inf)
        # One more column, because amax refuses T = 0.
        return torch.nn.functional.pad(x_BT, (0, 1), value=-math.inf).amax(-1, keepdim=True)
    result_B1 = x_BT.sum(-1, keepdim=True)
    if aggregation == "mean":
        result_B1 = result_B1 / valid_BT.sum(-1, keepdim=True).clamp_min(1)
    return result_B1.expand_as(x_BT)


def sequence_sum(x_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Σ over the valid tokens of a sequence, [..., 1]."""
    return torch.where(valid_BT, x_BT, 0.0).sum(-1, keepdim=True)


def bounds_by_sign(config: RolloutCorrectionConfig, weights: Tensor, advantages: Tensor) -> Bounds:
    """Bounds of the weights by the sign of the advantages, which broadcast against the weights."""
    is_negative = advantages < 0
    bounds = []
    for bound, negative in zip(config.is_bounds, config.is_bounds_negative, strict=True):
        positive_bounds = torch.full_like(weights, min(bound, LARGEST))
        bounds.append(torch.where(is_negative, min(negative, LARGEST), positive_bounds))
    lower, upper = bounds
    return lower, upper


def bounds_of_weights(
    config: RolloutCorrectionConfig, weights: Tensor, advantages: Tensor, valid: Tensor
) -> Bounds:
    """Bounds by the token's advantage, or by the sequence's sum for sequence-wide weights."""
    if not config.has_token_weights:
        advantages = sequence_sum(advantages, valid)
    return bounds_by_sign(config, weights, advantages)


def bounded(
    config: RolloutCorrectionConfig, raw_BT: Tensor, lower_BT: Tensor, upper_BT: Tensor
) -> Tensor:
    """truncate: min(w, hi); clip: clamp(w, lo, hi); mask: w if lo ≤ w ≤ hi, else 0."""
    if config.tis_mode == "truncate":
        return raw_BT.minimum(upper_BT)
    if config.tis_mode == "clip":
        return raw_BT.clamp(lower_BT, upper_BT)
    return torch.where((raw_BT >= lower_BT) & (raw_BT <= upper_BT), raw_BT, 0.0)


def counted_weights(config: RolloutCorrectionConfig, valid_BT: Tensor) -> Tensor:
    """Tokens whose weights count: all valid ones, or one per sequence for sequence-wide weights."""
    if config.has_token_weights:
        return valid_BT
    # The first valid token stands for its sequence.
    return valid_BT & (valid_BT.cumsum(-1) == 1)


def mean_weight(config: RolloutCorrectionConfig, weights_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Mean weight over the batch, 1 if it is too small to divide by."""
    counted_BT = counted_weights(config, valid_BT)
    mean = torch.where(counted_BT, weights_BT, 0.0).sum() / counted_BT.sum().clamp_min(1)
    return torch.where(mean > 1e-8, mean, 1.0)


def any_of(criteria: dict[str, Tensor], valid_BT: Tensor) -> Tensor:
    """Tokens that at least one criterion rejects."""
    rejected_BT = torch.zeros_like(valid_BT)
    for tokens_BT in criteria.values():
        rejected_BT = rejected_BT | tokens_BT
    return rejected_BT


def rejected_by(
    config: RolloutCorrectionConfig,
    criterion: Criterion,
    delta_BT: Tensor,
    valid_BT: Tensor,
    masked_in_BT: Tensor,
) -> Tensor:
    """Valid tokens whose statistic, aggregated as the criterion says, is out of bounds.

    k1 = Δ, k2 = Δ²/2, k3 = e^Δ − Δ − 1, error = e^|Δ|.
    """
    if criterion.adaptive:
        k3, limit, _ = adaptive_bounds(config, delta_BT, valid_BT)
        is_beyond_B = z_scores(delta_BT, valid_BT, k3) > limit
        return valid_BT & is_beyond_B[:, None]
    capped_BT = delta_BT.clamp(max=20)
    divergences = {
        "k1": delta_BT,
        "k2": delta_BT.square() / 2,
        "k3": capped_BT.expm1() - capped_BT,
        "error": delta_BT.abs().clamp(max=20).exp(),
    }
    divergence_BT = divergences[criterion.divergence]
    statistic_BT = aggregate(criterion.aggregation, divergence_BT, valid_BT, masked_in_BT)
    if criterion.lower is None:
        return valid_BT & (statistic_BT > criterion.upper)
    is_below_BT = statistic_BT < _log(criterion.lower)
    is_above_BT = statistic_BT > _log(criterion.upper)
    return valid_BT & (is_below_BT | is_above_BT)


def rejected_by_divergence(
    config: RolloutCorrectionConfig,
    log_probs: tuple[Tensor, Tensor],
    current_BT: Tensor | None,
    advantages_BT: Tensor,
    valid_BT: Tensor,
) -> Tensor:
    """Valid tokens that the divergence mask rejects, by |π − μ|, KL(μ ‖ π), or the larger KL.

    The token is a coin with probabilities π = exp(current) and μ = exp(anchor); 1 − π and 1 − μ are
    at least 2⁻²⁵.
    """
    train_BT, rollout_BT = log_probs
    if current_BT is None:
        current_BT = train_BT
    anchor_BT = train_BT
    if config.divergence_mask_anchor == "rollout":
        anchor_BT = rollout_BT
    counts_BT = valid_BT & (current_BT.abs() < 9984) & (anchor_BT.abs() < 9984)
    # Other tokens get any finite log-prob: their divergence is not used.
    log_pi_BT = torch.where(counts_BT, current_BT, -1.0).double()
    log_mu_BT = torch.where(counts_BT, anchor_BT, -1.0).double()
    pi_BT = log_pi_BT.exp()
    mu_BT = log_mu_BT.exp()
    # 1 − π is −expm1(log π), without cancellation for π near 1.
    rest_pi_BT = -log_pi_BT.expm1().clamp(max=-(2.0**-25))
    rest_mu_BT = -log_mu_BT.expm1().clamp(max=-(2.0**-25))
    log_ratio_BT = log_mu_BT - log_pi_BT
    log_rest_BT = (rest_mu_BT / rest_pi_BT).log()
    kl_BT = mu_BT * log_ratio_BT + rest_mu_BT * log_rest_BT
    reverse_BT = -pi_BT * log_ratio_BT - rest_pi_BT * log_rest_BT
    divergences = {
        "binary_tv": (pi_BT - mu_BT).abs(),
        "binary_kl": kl_BT,
        "binary_kl_max": torch.maximum(kl_BT, reverse_BT),
    }
    divergence_BT = divergences[config.divergence_mask or ""]
    bound, bound_negative = config.divergence_bounds
    if config.divergence_mask_direction == "away":
        bound_BT = torch.where(advantages_BT < 0, bound_negative, bound)
        return counts_BT & (divergence_BT > bound_BT) & (advantages_BT * (pi_BT - mu_BT) > 0)
    if config.divergence_mask_level == "token":
        return counts_BT & (divergence_BT > bound)
    mean_B1 = sequence_sum(divergence_BT, counts_BT) / valid_BT.sum(-1, keepdim=True)
    return valid_BT & (mean_B1 > bound)


def z_scores(delta_BT: Tensor, valid_BT: Tensor, k3: Tensor) -> Tensor:
    """z = max(|Σ_t Δ_t + k3·n| − 5e-5·n, 0) / √(2·k3·n) per sequence, [B]."""
    n_B = valid_BT.sum(1)
    sum_B = torch.where(valid_BT, delta_BT, 0.0).sum(1)
    beyond_B = (sum_B + k3 * n_B).abs() - 5e-5 * n_B
    return beyond_B.clamp_min(0) / (2 * k3.clamp_min(1e-12) * n_B.clamp_min(1)).sqrt()


def adaptive_bounds(
    config: RolloutCorrectionConfig, delta_BT: Tensor, valid_BT: Tensor
) -> tuple[Tensor, float, int]:
    """k3 of the batch with Δ clamped to ±1, the largest accepted z-score, and the median length."""
    clamped_N = delta_BT[valid_BT].clamp(-1, 1)
    k3 = (clamped_N.expm1() - clamped_N).sum() / max(len(clamped_N), 1)
    lengths = sorted(n for n in valid_BT.sum(1).tolist() if n)
    if not lengths:
        return k3, math.inf, 0
    # The lower one of two, as an order statistic is one of the lengths.
    median = lengths[(len(lengths) - 1) // 2]
    if config.rs_z_score is not None:
        return k3, config.rs_z_score, median
    assert config.rs_target_fraction is not None
    scores = sorted(z_scores(delta_BT, valid_BT, k3)[valid_BT.any(1)].tolist())
    # 0.29 · 100 is 28.999999999999996 in float64.
    rejected = math.floor(config.rs_target_fraction * len(scores) + 1e-9)
    # Scores that differ only by rounding are equal.
    limit = scores[len(scores) - 1 - rejected] * (1 + 1e-5)
    return k3, limit, median


def trimmed_tokens(config: RolloutCorrectionConfig, delta_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Valid tokens whose Δ² is at or above the limit of second-moment trimming."""
    if config.rs_second_moment_bound is None:
        return torch.zeros_like(valid_BT)
    limit = second_moment_limit(delta_BT[valid_BT], config.rs_second_moment_bound)
    return valid_BT & (delta_BT.square() >= limit)


def second_moment_limit(delta_N: Tensor, bound: float) -> float:
    """min {v : mean(Δ² ≤ v) > bound}, +inf without such v."""
    squares_N = delta_N.double().square().sort().values
    counts_N = torch.arange(1, len(squares_N) + 1, device=squares_N.device)
    beyond_N = squares_N[squares_N.cumsum(0) / counts_N > bound]
    if len(beyond_N) == 0:
        return math.inf
    return beyond_N[0].item()


def mismatch_metrics(x: Steps) -> dict[str, float]:
    """Divergences over valid tokens and sequences; perplexities over finite tokens."""
    if not x.masked_in.any():
        return {}
    nonfinite_BT = x.masked_in & ~x.finite
    metrics = {"nonfinite_token_fraction": (nonfinite_BT.sum() / x.masked_in.sum()).item()}
    if not x.valid.any():
        return metrics
    delta_N = x.delta[x.valid]
    sum_N = x.delta.sum(1)[x.valid.any(1)]
    capped_N = delta_N.clamp(max=20)
    # Ratios of sequences relative to the largest, so that exp does not overflow.
    ratio_N = (sum_N.double() - sum_N.double().max()).exp()
    square_of_sum = ratio_N.sum().square().item()
    sum_of_squares = ratio_N.square().sum().item()
    metrics |= {
        "mismatch_kl": -delta_N.mean().item(),
        "mismatch_k3_kl": (capped_N.expm1() - delta_N).mean().item(),
        "mismatch_chi2_token": (2 * capped_N).expm1().mean().item(),
        "mismatch_chi2_seq": (2 * sum_N.clamp(-20, 20)).expm1().mean().item(),
        "effective_sequence_share": square_of_sum / (len(ratio_N) * sum_of_squares),
        "train_rollout_logprob_abs_diff": delta_N.abs().mean().item(),
    }
    measured_B = x.finite.any(1)
    if not measured_B.any():
        return metrics
    n_N = x.finite.sum(1)[measured_B]
    train_sum_B = torch.where(x.finite, x.train, 0.0).sum(1)
    training_N = -train_sum_B[measured_B] / n_N
    difference_N = -x.delta.sum(1)[measured_B] / n_N
    rollout_N = training_N - difference_N
    return metrics | {
        "mismatch_training_log_ppl": training_N.mean().item(),
        "mismatch_training_ppl": training_N.clamp(-80, 80).exp().mean().item(),
        "mismatch_rollout_log_ppl": rollout_N.mean().item(),
        "mismatch_rollout_ppl": rollout_N.clamp(-80, 80).exp().mean().item(),
        "mismatch_log_ppl_diff": difference_N.mean().item(),
        "mismatch_log_ppl_abs_diff": difference_N.abs().mean().item(),
        "mismatch_log_ppl_diff_max": difference_N.max().item(),
        "mismatch_log_ppl_diff_min": difference_N.min().item(),
        "mismatch_ppl_ratio": difference_N.clamp(-80, 80).exp().mean().item(),
    }


def weight_metrics(config: RolloutCorrectionConfig, x: Steps) -> dict[str, float]:
    """Weights before and after the mode; per-sequence mean weights before batch normalisation."""
    factor = float(x.factor)
    lower_BT, upper_BT = x.bounds
    raw_BT = x.level.clamp(-20, 20).exp()
    bounded_BT = bounded(config, raw_BT, lower_BT, upper_BT)
    counted_BT = counted_weights(config, x.valid)
    raw_N = raw_BT[counted_BT]
    weight_N = bounded_BT[counted_BT]
    before_N = raw_N
    if not config.has_token_weights:
        # A sequence's ratio is reported without the clamp at ±20.
        before_N = x.level[counted_BT].double().clamp(-700, 700).exp()
    is_high_N = raw_N > upper_BT[counted_BT]
    is_low_N = raw_N < lower_BT[counted_BT]
    mean = weight_N.mean().item()
    mean_square = weight_N.square().mean().item()
    metrics = {
        "mis_mean_is_weight_before_clip": raw_N.mean().item(),
        "mis_weight_min_before_clip": before_N.min().item(),
        "mis_weight_max_before_clip": before_N.max().item(),
        "mis_ratio_mean_after_mis": mean,
        "mis_weight_min": weight_N.min().item() / factor,
        "mis_weight_max": weight_N.max().item() / factor,
        "mis_weight_std": weight_N.std(correction=0).item() / factor,
        "mis_eff_sample_size": 0.0,
        f"mis_{config.mode.low_fraction}": is_low_N.double().mean().item(),
        f"mis_{config.mode.high_fraction}": is_high_N.double().mean().item(),
    }
    if mean_square:
        metrics["mis_eff_sample_size"] = mean**2 / mean_square
    if config.tis_batch_normalize:
        metrics["mis_batch_norm_factor"] = factor
    if not config.has_token_weights:
        return metrics
    nonempty_B = x.valid.any(1)
    n_N = x.valid.sum(1)[nonempty_B]
    raw_mean_N = sequence_sum(raw_BT, x.valid).squeeze(1)[nonempty_B] / n_N
    mean_N = sequence_sum(bounded_BT, x.valid).squeeze(1)[nonempty_B] / n_N
    advantage_N = sequence_sum(x.advantages, x.valid).squeeze(1)[nonempty_B]
    lower_N, upper_N = bounds_by_sign(config, raw_mean_N, advantage_N)
    return metrics | {
        "mis_seq_weight_mean": mean_N.mean().item(),
        "mis_seq_weight_std": mean_N.std(correction=0).item(),
        "mis_seq_weight_min": mean_N.min().item(),
        "mis_seq_weight_max": mean_N.max().item(),
        "mis_seq_weight_max_deviation": (mean_N - 1).abs().max().item(),
        "mis_seq_weight_fraction_high": (raw_mean_N > upper_N).double().mean().item(),
        "mis_seq_weight_fraction_low": (raw_mean_N < lower_N).double().mean().item(),
    }


def bound_metrics(
    config: RolloutCorrectionConfig, delta_BT: Tensor, valid_BT: Tensor
) -> dict[str, float]:
    """k3, the largest accepted z-score, and the ratio's bounds for a sequence of median length."""
    k3, z_score, n = adaptive_bounds(config, delta_BT, valid_BT)
    half = z_score * math.sqrt(2 * k3.item() / n) + 5e-5
    scale = 1
    if config.rs_level == "sequence":
        scale = n
    return {
        "mis_rs_k3": k3.item(),
        "mis_rs_z_score": z_score,
        "mis_rs_lower_bound": math.exp(max(scale * (-k3.item() - half), -20.0)),
        "mis_rs_upper_bound": math.exp(min(scale * (-k3.item() + half), 20.0)),
    }


def token_share(rejected_BT: Tensor, valid_BT: Tensor) -> float:
    """Rejected tokens / valid tokens."""
    return (rejected_BT.sum() / valid_BT.sum()).item()


def sequence_share(rejected_BT: Tensor, valid_BT: Tensor) -> float:
    """Sequences with a rejected token / sequences with a valid token."""
    return (rejected_BT.any(1).sum() / valid_BT.any(1).sum()).item()


def _log(bound: float) -> float:
    """log x, −inf for 0, which math.log refuses."""
    if bound == 0:
        return -math.inf
    return math.log(bound)
