"""The whole mathematics of docs/math.md on one page: padded [B, T], out of place, in the dtype of the input.

`reference_correct` computes what `slime_tis.correct` computes, written to be read; tests hold the
one to the other over every combination of options. They share the configuration and nothing else.
Train with `correct`: it is faster, takes lists and packed tokens, and is exact over micro-batches
and ranks.

Shapes: suffix _BT is [sequences, tokens], _B per sequence, _N per counted token or sequence.
"""

import math
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.modes import LEVELS, Criterion

Bounds = tuple[Tensor, Tensor]
"""Lower and upper bound of each weight."""
LARGEST = torch.finfo(torch.float32).max


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
        config: What to correct and how.
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
    for name, rejected_BT in ({"": x.rejected, **x.criteria} if x.criteria else {}).items():
        metrics |= _shares(f"mis_rs_{name}{{}}masked_fraction", rejected_BT, x.valid)
    metrics |= bound_metrics(config, x.delta, x.valid) if config.adaptive else {}
    if config.vetoes:
        token, sequence = _shares("{}", x.catastrophic, x.valid).values()
        metrics |= {
            "mis_catastrophic_token_fraction": token,
            "mis_catastrophic_seq_fraction": sequence,
        }
    if config.rs_second_moment_bound is not None:
        metrics["mis_second_moment_masked_fraction"] = (x.trimmed.sum() / x.valid.sum()).item()
    return ReferenceCorrection(x.weights, x.mask, metrics)


class Steps(NamedTuple):
    """The steps from log-probs to weights and mask, [..., T] each."""

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
    """The tokens that each criterion rejects, by its name and an underscore."""
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
        config: What to correct and how.
        log_probs: log π_train and log π_rollout.
        loss_mask: Nonzero at valid tokens.
        current_log_probs: log π_θ, for the divergence mask. Default: train_log_probs.
        advantages: For a divergence mask with direction away and for bounds by the sign of the
            advantage.
    """
    # 1. Δ at valid tokens. A log-prob of −9984 or less is an engine's code for minus infinity; a
    # NaN compares as false.
    (train_log_probs, rollout_log_probs), masked_in = log_probs, loss_mask != 0
    difference = train_log_probs - rollout_log_probs
    finite = masked_in & (train_log_probs.abs() < 9984) & (rollout_log_probs.abs() < 9984)
    if config.nonfinite_policy == "raise" and (masked_in & ~finite).any():
        raise ValueError(
            "a log-prob is not finite; fix the sample or choose --nonfinite-policy reject or"
            " neutral."
        )
    valid = masked_in if config.nonfinite_policy == "neutral" else finite
    delta = torch.where(finite, difference, 0.0)
    # 2. Δ → L at the level of the weights. 3. w = exp(clamp(L, ±20)). 4. The mode bounds w.
    level = aggregate(LEVELS[config.tis_level].aggregation, delta, valid, masked_in)
    raw = level.clamp(-20, 20).exp()
    advantages = torch.zeros_like(delta) if advantages is None else advantages
    bounds = bounds_by_sign(
        config, raw, advantages if config.has_token_weights else sequence_sum(advantages, valid)
    )
    weights = bounded(config, raw, *bounds)
    # 5. 0 at invalid tokens. 6. Normalisation by the mean of the global batch.
    outside = (weights == 0) & config.rejects_weights
    factor: Tensor | float = 1.0
    if config.tis_batch_normalize:
        counted = weighed(config, valid)
        mean = torch.where(counted, weights, 0.0).sum() / counted.sum().clamp_min(1)
        factor = torch.where(mean > 1e-8, mean, 1.0)
    weights = torch.where(valid, weights / factor if config.use_tis else torch.ones_like(raw), 0.0)
    # 7. Rejection: the criteria are ANDed, each over all valid tokens; the mask mode and the
    # trimming reject as well.
    current = train_log_probs if current_log_probs is None else current_log_probs
    anchor = rollout_log_probs if config.divergence_mask_anchor == "rollout" else train_log_probs
    criteria = {
        f"{c.name}_": (
            rejected_by(config, c, delta, valid, masked_in)
            if c.anchor is None
            else rejected_by_divergence(config, current, anchor, advantages, valid)
        )
        for c in config.rejections
    }
    rejected = reduce(torch.logical_or, criteria.values(), torch.zeros_like(valid))
    trimmed = torch.zeros_like(valid)
    if config.rs_second_moment_bound is not None:
        trimmed = valid & (
            delta.square() >= second_moment_limit(delta[valid], config.rs_second_moment_bound)
        )
    # 8. Veto: one token beyond a threshold, by its unclamped ratio, rejects its sequence.
    low, high = config.rs_veto_threshold or 0.0, config.rs_veto_upper_threshold or math.inf
    catastrophic = valid & ((delta < _log(low)) | (delta > _log(high)))
    mask = valid & ~(rejected | outside | trimmed | catastrophic.any(-1, keepdim=True))
    if not config.touches_loss:
        weights, mask = masked_in.to(weights.dtype), masked_in
    return Steps(
        *(train_log_probs, masked_in, finite, valid, advantages, delta, level, bounds, factor),
        *(criteria, rejected, trimmed, catastrophic, weights, mask),
    )


def aggregate(aggregation: str, x_BT: Tensor, valid_BT: Tensor, masked_in_BT: Tensor) -> Tensor:
    """The statistic at every token: of itself, of the tokens up to it, of its turn, or of its sequence."""
    x_BT = torch.where(valid_BT, x_BT, 0.0)
    if aggregation == "token":
        return x_BT
    if aggregation == "prefix":
        return x_BT.cumsum(-1)
    if (
        aggregation == "segment"
    ):  # turns are the runs of the loss mask, numbered by where they start
        before_BT = torch.nn.functional.pad(masked_in_BT, (1, 0))[..., :-1]
        turn_BT = (masked_in_BT & ~before_BT).cumsum(-1)
        sums_BT = torch.zeros_like(torch.nn.functional.pad(x_BT, (1, 0))).scatter_add(
            -1, turn_BT, x_BT
        )
        return sums_BT.gather(-1, turn_BT)
    if aggregation == "max":
        x_BT = torch.where(valid_BT, x_BT, -math.inf)
        return torch.nn.functional.pad(x_BT, (0, 1), value=-math.inf).amax(-1, keepdim=True)
    total_B1 = x_BT.sum(-1, keepdim=True)
    total_B1 = (
        total_B1 / valid_BT.sum(-1, keepdim=True).clamp_min(1)
        if aggregation == "mean"
        else total_B1
    )
    return total_B1.expand_as(x_BT)


def sequence_sum(x_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Σ over the valid tokens of each sequence, [..., 1]."""
    return torch.where(valid_BT, x_BT, 0.0).sum(-1, keepdim=True)


def bounds_by_sign(config: RolloutCorrectionConfig, weights: Tensor, advantages: Tensor) -> Bounds:
    """The bounds of weights, others where A < 0; of the sum of A where a sequence has one weight."""
    pairs = zip(config.is_bounds, config.is_bounds_negative, strict=True)
    lower, upper = (
        torch.where(
            advantages < 0, min(negative, LARGEST), torch.full_like(weights, min(bound, LARGEST))
        )
        for bound, negative in pairs
    )
    return lower, upper


def bounded(
    config: RolloutCorrectionConfig, raw_BT: Tensor, lower_BT: Tensor, upper_BT: Tensor
) -> Tensor:
    """truncate: min(w, hi); clip: clamp(w, lo, hi); mask: w where lo ≤ w ≤ hi, else 0."""
    if config.tis_mode == "truncate":
        return raw_BT.minimum(upper_BT)
    if config.tis_mode == "clip":
        return raw_BT.clamp(lower_BT, upper_BT)
    return torch.where((raw_BT >= lower_BT) & (raw_BT <= upper_BT), raw_BT, 0.0)


def weighed(config: RolloutCorrectionConfig, valid_BT: Tensor) -> Tensor:
    """Where a weight is counted: at every valid token, or at one of each sequence that has one weight."""
    return valid_BT if config.has_token_weights else valid_BT & (valid_BT.cumsum(-1) == 1)


def rejected_by(
    config: RolloutCorrectionConfig,
    criterion: Criterion,
    delta_BT: Tensor,
    valid_BT: Tensor,
    masked_in_BT: Tensor,
) -> Tensor:
    """Valid tokens whose statistic is out of bounds: k1 = Δ, k2 = Δ²/2, k3 = e^Δ − Δ − 1, at the criterion's level."""
    if criterion.adaptive:
        k3, limit, _ = adaptive_bounds(config, delta_BT, valid_BT)
        return valid_BT & (z_scores(delta_BT, valid_BT, k3) > limit)[:, None]
    capped_BT = delta_BT.clamp(max=20)
    divergence_BT = {
        "k1": delta_BT,
        "k2": delta_BT.square() / 2,
        "k3": capped_BT.expm1() - capped_BT,
        "error": delta_BT.abs().clamp(max=20).exp(),
    }
    statistic_BT = aggregate(
        criterion.aggregation, divergence_BT[criterion.divergence], valid_BT, masked_in_BT
    )
    if criterion.lower is None:
        return valid_BT & (statistic_BT > criterion.upper)
    return valid_BT & (
        (statistic_BT < _log(criterion.lower)) | (statistic_BT > _log(criterion.upper))
    )


def rejected_by_divergence(
    config: RolloutCorrectionConfig,
    current_BT: Tensor,
    anchor_BT: Tensor,
    advantages_BT: Tensor,
    valid_BT: Tensor,
) -> Tensor:
    """Valid tokens that the divergence mask rejects: |π − μ|, KL(μ ‖ π), or the larger KL of both directions.

    The token is a coin with probabilities π = exp(current) and μ = exp(anchor); 1 − π and 1 − μ are
    at least 2⁻²⁵.
    """
    counts_BT = valid_BT & (current_BT.abs() < 9984) & (anchor_BT.abs() < 9984)
    log_pi_BT, log_mu_BT = (
        torch.where(counts_BT, x_BT, -1.0).double() for x_BT in (current_BT, anchor_BT)
    )
    pi_BT, mu_BT = log_pi_BT.exp(), log_mu_BT.exp()
    rest_pi_BT, rest_mu_BT = (
        -x_BT.expm1().clamp(max=-(2.0**-25)) for x_BT in (log_pi_BT, log_mu_BT)
    )
    log_odds_BT, log_rest_BT = log_mu_BT - log_pi_BT, (rest_mu_BT / rest_pi_BT).log()
    kl_BT = mu_BT * log_odds_BT + rest_mu_BT * log_rest_BT
    reverse_BT = -pi_BT * log_odds_BT - rest_pi_BT * log_rest_BT
    kinds = {
        "binary_tv": (pi_BT - mu_BT).abs(),
        "binary_kl": kl_BT,
        "binary_kl_max": torch.maximum(kl_BT, reverse_BT),
    }
    divergence_BT = kinds[config.divergence_mask or ""]
    bound, bound_negative = config.divergence_bounds
    if config.divergence_mask_direction == "away":
        bound_BT = torch.where(advantages_BT < 0, bound_negative, bound)
        return counts_BT & (divergence_BT > bound_BT) & (advantages_BT * (pi_BT - mu_BT) > 0)
    if config.divergence_mask_level == "token":
        return counts_BT & (divergence_BT > bound)
    mean_B1 = sequence_sum(divergence_BT, counts_BT) / valid_BT.sum(-1, keepdim=True)
    return valid_BT & (mean_B1 > bound)


def z_scores(delta_BT: Tensor, valid_BT: Tensor, k3: Tensor) -> Tensor:
    """z = max(|Σ_t Δ_t + k3·n| − 5e-5·n, 0) / √(2·k3·n) of each sequence."""
    n_B = valid_BT.sum(1)
    beyond_B = (torch.where(valid_BT, delta_BT, 0.0).sum(1) + k3 * n_B).abs() - 5e-5 * n_B
    return beyond_B.clamp_min(0) / (2 * k3.clamp_min(1e-12) * n_B.clamp_min(1)).sqrt()


def adaptive_bounds(
    config: RolloutCorrectionConfig, delta_BT: Tensor, valid_BT: Tensor
) -> tuple[Tensor, float, int]:
    """k3 of the batch with Δ clamped to ±1, the largest z-score that is accepted, and the median length."""
    clamped_N = delta_BT[valid_BT].clamp(-1, 1)
    k3 = (clamped_N.expm1() - clamped_N).sum() / max(len(clamped_N), 1)
    lengths = sorted(n for n in valid_BT.sum(1).tolist() if n)
    median = lengths[(len(lengths) - 1) // 2] if lengths else 0
    if config.rs_target_fraction is None:
        return k3, config.rs_z_score or 0.0, median
    scores = sorted(z_scores(delta_BT, valid_BT, k3)[valid_BT.any(1)].tolist())
    rejected = math.floor(config.rs_target_fraction * len(scores) + 1e-9)
    return k3, scores[len(scores) - 1 - rejected] * (1 + 1e-5) if scores else math.inf, median


def second_moment_limit(delta_N: Tensor, bound: float) -> float:
    """min {v : mean(Δ² ≤ v) > bound}, +inf without such v."""
    squares_N = delta_N.double().square().sort().values
    counts_N = torch.arange(1, len(squares_N) + 1, device=squares_N.device)
    beyond_N = squares_N[squares_N.cumsum(0) / counts_N > bound]
    return beyond_N[0].item() if len(beyond_N) else math.inf


def mismatch_metrics(x: Steps) -> dict[str, float]:
    """Divergences over valid tokens and sequences; perplexities over the finite tokens of the sequences with one."""
    delta_BT, valid_BT, finite_BT, masked_in_BT = x.delta, x.valid, x.finite, x.masked_in
    if not masked_in_BT.any():
        return {}
    metrics = {
        "nonfinite_token_fraction": ((masked_in_BT & ~finite_BT).sum() / masked_in_BT.sum()).item()
    }
    if not valid_BT.any():
        return metrics
    delta_N, sum_N = delta_BT[valid_BT], delta_BT.sum(1)[valid_BT.any(1)]
    capped_N = delta_N.clamp(max=20)
    ratio_N = (
        sum_N.double() - sum_N.double().max()
    ).exp()  # of whole sequences, relative to the largest
    metrics |= {
        "mismatch_kl": -delta_N.mean().item(),
        "mismatch_k3_kl": (capped_N.expm1() - delta_N).mean().item(),
        "mismatch_chi2_token": (2 * capped_N).expm1().mean().item(),
        "mismatch_chi2_seq": (2 * sum_N.clamp(-20, 20)).expm1().mean().item(),
        "effective_sequence_share": (
            ratio_N.sum().square().item() / (len(ratio_N) * ratio_N.square().sum().item())
        ),
        "train_rollout_logprob_abs_diff": delta_N.abs().mean().item(),
    }
    measured_B = finite_BT.any(1)
    if not measured_B.any():
        return metrics
    n_N = finite_BT.sum(1)[measured_B]
    training_N = -torch.where(finite_BT, x.train, 0.0).sum(1)[measured_B] / n_N
    difference_N = -delta_BT.sum(1)[measured_B] / n_N
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
    """The weights before and after the mode, and the mean weights of sequences before batch normalisation."""
    level_BT, valid_BT, factor = x.level, x.valid, float(x.factor)
    raw_BT = level_BT.clamp(-20, 20).exp()
    bounded_BT = bounded(config, raw_BT, *x.bounds)
    counted_BT = weighed(config, valid_BT)
    raw_N, weight_N = raw_BT[counted_BT], bounded_BT[counted_BT]
    before_N = (
        raw_N if config.has_token_weights else level_BT[counted_BT].double().clamp(-700, 700).exp()
    )
    lower_N, upper_N = (bound_BT[counted_BT] for bound_BT in x.bounds)
    high, low = (raw_N > upper_N).double().mean().item(), (raw_N < lower_N).double().mean().item()
    square = weight_N.square().mean().item()
    metrics = {
        "mis_mean_is_weight_before_clip": raw_N.mean().item(),
        "mis_weight_min_before_clip": before_N.min().item(),
        "mis_weight_max_before_clip": before_N.max().item(),
        "mis_ratio_mean_after_mis": weight_N.mean().item(),
        "mis_weight_min": weight_N.min().item() / factor,
        "mis_weight_max": weight_N.max().item() / factor,
        "mis_weight_std": weight_N.std(correction=0).item() / factor,
        "mis_eff_sample_size": weight_N.mean().item() ** 2 / square if square else 0.0,
    }
    metrics |= {f"mis_{config.mode.low_fraction}": low, f"mis_{config.mode.high_fraction}": high}
    if config.tis_batch_normalize:
        metrics["mis_batch_norm_factor"] = factor
    if not config.has_token_weights:
        return metrics
    nonempty_B = valid_BT.any(1)
    n_N = valid_BT.sum(1)[nonempty_B]
    raw_mean_N, mean_N = (
        sequence_sum(w_BT, valid_BT).squeeze(1)[nonempty_B] / n_N for w_BT in (raw_BT, bounded_BT)
    )
    lower_N, upper_N = bounds_by_sign(
        config, raw_mean_N, sequence_sum(x.advantages, valid_BT).squeeze(1)[nonempty_B]
    )
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
    """k3, the largest accepted z-score, and the bounds on the ratio of a sequence of median length."""
    k3, z_score, n = adaptive_bounds(config, delta_BT, valid_BT)
    half = z_score * math.sqrt(2 * k3.item() / n) + 5e-5
    scale = n if config.rs_level == "sequence" else 1
    return {
        "mis_rs_k3": k3.item(),
        "mis_rs_z_score": z_score,
        "mis_rs_lower_bound": math.exp(max(scale * (-k3.item() - half), -20.0)),
        "mis_rs_upper_bound": math.exp(min(scale * (-k3.item() + half), 20.0)),
    }


def _shares(name: str, bad_BT: Tensor, valid_BT: Tensor) -> dict[str, float]:
    """Shares of the valid tokens, and of the sequences with a valid token; `name` has a place for "seq_"."""
    return {
        name.format(""): (bad_BT.sum() / valid_BT.sum()).item(),
        name.format("seq_"): (bad_BT.any(1).sum() / valid_BT.any(1).sum()).item(),
    }


def _log(bound: float) -> float:
    return math.log(bound) if bound else -math.inf
