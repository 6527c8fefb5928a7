"""The expected correction: Python loops over float64 numbers, written from the formulas alone."""

import math
import statistics
from dataclasses import dataclass, field
from fractions import Fraction

from slime_tis import Criterion, RolloutCorrectionConfig

Sequences = list[list[float]]


@dataclass
class Expected:
    """Weights, mask and metrics of a batch."""

    weights: Sequences = field(default_factory=list)
    mask: list[list[bool]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def expected_correction(
    config: RolloutCorrectionConfig, train: Sequences, rollout: Sequences, loss_mask: list[list[bool]]
) -> Expected:
    pairs = [_log_ratios(config, t, r, m) for t, r, m in zip(train, rollout, loss_mask, strict=True)]
    ratios, valid = [p[0] for p in pairs], [p[1] for p in pairs]
    train = [
        [t if v and _is_finite(t - r) else 0.0 for t, r, v in zip(*three, strict=True)]
        for three in zip(train, rollout, valid, strict=True)
    ]
    result = Expected()
    result.weights, weight_rejects, weight_metrics = _weights(config, ratios, valid, loss_mask)
    rejected, rejection_metrics = _rejection(config, ratios, valid, loss_mask)
    touches_loss = config.corrects or config.use_rollout_logprobs
    for s, mask in enumerate(loss_mask):
        if touches_loss:
            result.mask.append(
                [valid[s][t] and not rejected[s][t] and not weight_rejects[s][t] for t in range(len(mask))]
            )
        else:
            result.mask.append(list(mask))
            result.weights[s] = [1.0 if m else 0.0 for m in mask]
    result.metrics = _mismatch(train, ratios, valid, loss_mask, pairs) | weight_metrics | rejection_metrics
    total = sum(map(sum, loss_mask))
    if config.corrects and total:
        result.metrics["gradient_kept_fraction"] = sum(map(sum, result.mask)) / total
    return result


def ess_share(log_weights: list[float]) -> float:
    """(Σ w)² / (n Σ w²), from the largest weight, so that nothing overflows."""
    bounded = [min(max(x, -340.0), 340.0) for x in log_weights]
    relative = [math.exp(x - max(bounded)) for x in bounded]
    return math.fsum(relative) ** 2 / (len(relative) * math.fsum(x * x for x in relative))


def _log_ratios(
    config: RolloutCorrectionConfig, train: list[float], rollout: list[float], mask: list[bool]
) -> tuple[list[float], list[bool], int]:
    """Δ, which tokens are valid, and how many are not finite."""
    ratios, valid, lost = [], [], 0
    for t, r, m in zip(train, rollout, mask, strict=True):
        difference = t - r
        finite = _is_finite(difference)
        lost += m and not finite
        valid.append(m and (finite or config.nonfinite_policy == "neutral"))
        ratios.append(difference if m and finite else 0.0)
    return ratios, valid, lost


def _is_finite(log_ratio: float) -> bool:
    return math.isfinite(log_ratio) and abs(log_ratio) < 1e6


def aggregate(aggregation: str, values: list[float], valid: list[bool], mask: list[bool]) -> list[float]:
    """The statistic at every token: its own, that of its prefix, its turn, or its sequence."""
    picked = [v for v, ok in zip(values, valid, strict=True) if ok]
    if aggregation == "token":
        return list(values)
    if aggregation == "prefix":
        return [math.fsum(values[: t + 1]) for t in range(len(values))]
    if aggregation == "segment":
        return [_turn_sum(values, mask, t) for t in range(len(values))]
    whole = {
        "sum": math.fsum(picked),
        "mean": math.fsum(picked) / max(len(picked), 1),
        "max": max(picked, default=-math.inf),
    }[aggregation]
    return [whole] * len(values)


def _turn_sum(values: list[float], mask: list[bool], position: int) -> float:
    if not mask[position]:
        return 0.0
    first = last = position
    while first > 0 and mask[first - 1]:
        first -= 1
    while last + 1 < len(mask) and mask[last + 1]:
        last += 1
    return math.fsum(values[first : last + 1])


LEVELS = {"token": "token", "sequence": "sum", "geometric": "mean", "prefix": "prefix", "segment": "segment"}


def _weights(
    config: RolloutCorrectionConfig, ratios: Sequences, valid: list[list[bool]], masks: list[list[bool]]
) -> tuple[Sequences, list[list[bool]], dict[str, float]]:
    if not config.use_tis:
        ones = [[1.0 if ok else 0.0 for ok in v] for v in valid]
        return ones, [[False] * len(v) for v in valid], {}
    lower, upper = config.is_bounds
    raw_of, bounded_of, rejects, unclamped_of = [], [], [], []
    for values, ok, mask in zip(ratios, valid, masks, strict=True):
        levels = aggregate(LEVELS[config.tis_level], values, ok, mask)
        raw = [math.exp(min(max(level, -20.0), 20.0)) for level in levels]
        outside = [not lower <= w <= upper for w in raw]
        if config.tis_mode == "truncate":
            bounded = [min(w, upper) for w in raw]
        elif config.tis_mode == "clip":
            bounded = [min(max(w, lower), upper) for w in raw]
        else:
            bounded = [0.0 if out else w for w, out in zip(raw, outside, strict=True)]
        raw_of.append(raw)
        unclamped_of.append([math.exp(min(max(level, -700.0), 700.0)) for level in levels])
        bounded_of.append(bounded)
        rejects.append([config.tis_mode == "mask" and out for out in outside])
    once = LEVELS[config.tis_level] not in ("token", "prefix", "segment")
    units = [
        (w, b)
        for raw, bounded, ok in zip(raw_of, bounded_of, valid, strict=True)
        for w, b in _units(raw, bounded, ok, once)
    ]
    if not units:
        return [[0.0] * len(v) for v in valid], rejects, {}
    mean = math.fsum(b for _, b in units) / len(units)
    factor = mean if config.tis_batch_normalize and mean > 1e-8 else 1.0
    weights = [
        [b / factor if ok else 0.0 for b, ok in zip(bounded, v, strict=True)]
        for bounded, v in zip(bounded_of, valid, strict=True)
    ]
    square = math.fsum(b * b for _, b in units) / len(units)
    before = [w for w, _ in units]
    if once:  # the ratio of a whole sequence is reported without the clamp at ±20
        pairs = zip(unclamped_of, bounded_of, valid, strict=True)
        before = [w for raw, bounded, ok in pairs for w, _ in _units(raw, bounded, ok, once)]
    metrics = {
        "mis_mean_is_weight_before_clip": math.fsum(w for w, _ in units) / len(units),
        "mis_weight_min_before_clip": min(before),
        "mis_weight_max_before_clip": max(before),
        "mis_ratio_mean_after_mis": mean,
        "mis_weight_min": min(b for _, b in units) / factor,
        "mis_weight_max": max(b for _, b in units) / factor,
        "mis_weight_std": math.sqrt(math.fsum((b - mean) ** 2 for _, b in units) / len(units)) / factor,
        "mis_eff_sample_size": mean**2 / square if square else 0.0,
    }
    high, low = sum(w > upper for w, _ in units) / len(units), sum(w < lower for w, _ in units) / len(units)
    if config.tis_mode == "truncate":
        metrics |= {"mis_truncate_fraction": high, "mis_ratio_fraction_low": low}
    else:
        metrics |= {f"mis_{config.tis_mode}_fraction_low": low, f"mis_{config.tis_mode}_fraction_high": high}
    if config.tis_batch_normalize:
        metrics["mis_batch_norm_factor"] = factor
    if not once:
        metrics |= _sequence_means(raw_of, bounded_of, valid, lower, upper)
    return weights, rejects, metrics


def _sequence_means(
    raw_of: Sequences, bounded_of: Sequences, valid: list[list[bool]], lower: float, upper: float
) -> dict[str, float]:
    """Of the mean weight of each sequence with a valid token."""

    def means(values_of: Sequences) -> list[float]:
        picked = [[v for v, ok in zip(vs, oks, strict=True) if ok] for vs, oks in zip(values_of, valid, strict=True)]
        return [math.fsum(vs) / len(vs) for vs in picked if vs]

    raw, bounded = means(raw_of), means(bounded_of)
    mean = math.fsum(bounded) / len(bounded)
    return {
        "mis_seq_weight_mean": mean,
        "mis_seq_weight_std": math.sqrt(math.fsum((w - mean) ** 2 for w in bounded) / len(bounded)),
        "mis_seq_weight_min": min(bounded),
        "mis_seq_weight_max": max(bounded),
        "mis_seq_weight_max_deviation": max(abs(w - 1) for w in bounded),
        "mis_seq_weight_fraction_high": sum(w > upper for w in raw) / len(raw),
        "mis_seq_weight_fraction_low": sum(w < lower for w in raw) / len(raw),
    }


def _units(raw: list[float], bounded: list[float], valid: list[bool], once: bool) -> list[tuple[float, float]]:
    """What counts in the metrics of the weights: each valid token, or each sequence with one."""
    picked = [(w, b) for w, b, ok in zip(raw, bounded, valid, strict=True) if ok]
    return picked[:1] if once else picked


def divergence(kind: str, delta: float) -> float:
    """k1, k2, k3 or error of one log-ratio."""
    bounded = min(delta, 20.0)
    error = math.exp(min(abs(delta), 20.0))
    return {"k1": delta, "k2": delta * delta / 2, "k3": math.expm1(bounded) - bounded, "error": error}[kind]


def _outside(criterion: Criterion, values: list[float], valid: list[bool], mask: list[bool]) -> list[bool]:
    if not any(valid):
        return [False] * len(values)
    statistics = aggregate(criterion.aggregation, [divergence(criterion.divergence, v) for v in values], valid, mask)
    if criterion.lower is None:
        bad = [x > criterion.upper for x in statistics]
    else:
        bad = [x > math.log(criterion.upper) for x in statistics]
        if criterion.lower:
            bad = [b or x < math.log(criterion.lower) for b, x in zip(bad, statistics, strict=True)]
    return [b and ok for b, ok in zip(bad, valid, strict=True)]


def _outside_adaptive(
    config: RolloutCorrectionConfig, ratios: Sequences, valid: list[list[bool]]
) -> tuple[list[list[bool]], dict[str, float]]:
    """z = max(|Σ Δ + k3·n| − 5e-5·n, 0) / √(2·k3·n) of every sequence against the z-score of the batch."""
    picked = [[x for x, ok in zip(xs, v, strict=True) if ok] for xs, v in zip(ratios, valid, strict=True)]
    present = [xs for xs in picked if xs]
    if not present:
        return [[False] * len(v) for v in valid], {}
    k3 = math.fsum(divergence("k3", min(max(x, -1.0), 1.0)) for xs in present for x in xs) / sum(map(len, present))

    def score(xs: list[float]) -> float:
        if not xs:
            return 0.0
        beyond = max(abs(math.fsum(xs) + k3 * len(xs)) - 5e-5 * len(xs), 0.0)
        return beyond / math.sqrt(2 * max(k3, 1e-12) * len(xs))

    if config.rs_z_score is not None:
        limit = config.rs_z_score
    else:
        assert config.rs_target_fraction is not None
        rejected = math.floor(Fraction(str(config.rs_target_fraction)) * len(present))
        limit = sorted(map(score, present))[len(present) - 1 - rejected] * (1 + 1e-5)
    length = statistics.median_low(map(len, present))
    half = limit * math.sqrt(2 * k3 / length) + 5e-5
    scale = length if config.rs_level == "sequence" else 1
    metrics = {
        "mis_rs_k3": k3,
        "mis_rs_z_score": limit,
        "mis_rs_lower_bound": math.exp(max(scale * (-k3 - half), -20.0)),
        "mis_rs_upper_bound": math.exp(min(scale * (-k3 + half), 20.0)),
    }
    out = [[ok and score(xs) > limit for ok in v] for xs, v in zip(picked, valid, strict=True)]
    return out, metrics


def _rejection(
    config: RolloutCorrectionConfig, ratios: Sequences, valid: list[list[bool]], masks: list[list[bool]]
) -> tuple[list[list[bool]], dict[str, float]]:
    """Which valid tokens are rejected by criteria and veto, and the metrics of that."""
    tokens, sequences = sum(map(sum, valid)), sum(any(v) for v in valid)
    by_rs = [[False] * len(v) for v in valid]
    metrics = {}
    for criterion in config.rejections:
        if criterion.adaptive:
            out, adaptive_metrics = _outside_adaptive(config, ratios, valid)
            metrics |= adaptive_metrics
        else:
            out = [_outside(criterion, *three) for three in zip(ratios, valid, masks, strict=True)]
        by_rs = [[a or b for a, b in zip(x, y, strict=True)] for x, y in zip(by_rs, out, strict=True)]
        if tokens:
            metrics[f"mis_rs_{criterion.name}_masked_fraction"] = sum(map(sum, out)) / tokens
            metrics[f"mis_rs_{criterion.name}_seq_masked_fraction"] = sum(map(any, out)) / sequences
    if config.rejections and tokens:
        metrics["mis_rs_masked_fraction"] = sum(map(sum, by_rs)) / tokens
        metrics["mis_rs_seq_masked_fraction"] = sum(map(any, by_rs)) / sequences
    rejected = by_rs
    if config.vetoes:
        floor = -math.inf if config.rs_veto_threshold is None else math.log(config.rs_veto_threshold)
        ceiling = math.inf if config.rs_veto_upper_threshold is None else math.log(config.rs_veto_upper_threshold)
        bad = [
            [ok and not floor <= x <= ceiling for x, ok in zip(xs, v, strict=True)]
            for xs, v in zip(ratios, valid, strict=True)
        ]
        rejected = [[any(b)] * len(r) if any(b) else r for b, r in zip(bad, rejected, strict=True)]
        if tokens:
            metrics["mis_catastrophic_token_fraction"] = sum(map(sum, bad)) / tokens
            metrics["mis_catastrophic_seq_fraction"] = sum(map(any, bad)) / sequences
    if config.rs_second_moment_bound is not None:
        squares = [x * x for xs, v in zip(ratios, valid, strict=True) for x, ok in zip(xs, v, strict=True) if ok]
        limit = second_moment_limit(squares, config.rs_second_moment_bound)
        large = [
            [ok and x * x >= limit for x, ok in zip(xs, v, strict=True)] for xs, v in zip(ratios, valid, strict=True)
        ]
        rejected = [[a or b for a, b in zip(x, y, strict=True)] for x, y in zip(large, rejected, strict=True)]
        if tokens:
            metrics["mis_second_moment_masked_fraction"] = sum(map(sum, large)) / tokens
    return rejected, metrics


def second_moment_limit(squares: list[float], bound: float) -> float:
    """The first value, in rising order, with which the mean is above the bound; +inf if there is none."""
    ordered, total = sorted(squares), Fraction(0)
    for count, value in enumerate(ordered, start=1):
        total += Fraction(value)
        if total > count * Fraction(bound):
            return value
    return math.inf


def _mismatch(
    train: Sequences,
    ratios: Sequences,
    valid: list[list[bool]],
    masks: list[list[bool]],
    pairs: list[tuple[list[float], list[bool], int]],
) -> dict[str, float]:
    total = sum(map(sum, masks))
    metrics = {"nonfinite_token_fraction": sum(p[2] for p in pairs) / total} if total else {}
    deltas = [x for xs, v in zip(ratios, valid, strict=True) for x, ok in zip(xs, v, strict=True) if ok]
    if not deltas:
        return metrics
    present = [s for s, v in enumerate(valid) if any(v)]
    finite = [sum(mask) - p[2] for mask, p in zip(masks, pairs, strict=True)]
    measured = [s for s, n in enumerate(finite) if n]
    training = [-math.fsum(train[s]) / finite[s] for s in measured]
    difference = [-math.fsum(ratios[s]) / finite[s] for s in measured]
    rollout = [a - b for a, b in zip(training, difference, strict=True)]

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    def ratio(delta: float) -> float:
        return math.exp(min(max(delta, -20.0), 20.0))

    metrics |= {
        "mismatch_kl": -mean(deltas),
        "mismatch_k3_kl": mean([ratio(x) - 1 - x for x in deltas]),
        "mismatch_chi2_token": mean([ratio(x) ** 2 - 1 for x in deltas]),
        "mismatch_chi2_seq": mean([ratio(math.fsum(ratios[s])) ** 2 - 1 for s in present]),
        "effective_sequence_share": ess_share([math.fsum(ratios[s]) for s in present]),
        "train_rollout_logprob_abs_diff": mean([abs(x) for x in deltas]),
    }
    if not measured:
        return metrics
    return metrics | {
        "mismatch_training_log_ppl": mean(training),
        "mismatch_training_ppl": mean([math.exp(min(x, 80.0)) for x in training]),
        "mismatch_rollout_log_ppl": mean(rollout),
        "mismatch_rollout_ppl": mean([math.exp(min(x, 80.0)) for x in rollout]),
        "mismatch_log_ppl_diff": mean(difference),
        "mismatch_log_ppl_abs_diff": mean([abs(x) for x in difference]),
        "mismatch_log_ppl_diff_max": max(difference),
        "mismatch_log_ppl_diff_min": min(difference),
        "mismatch_ppl_ratio": mean([math.exp(min(x, 80.0)) for x in difference]),
    }
