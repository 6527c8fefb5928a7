"""The expected correction: Python loops over float64 numbers, written from the formulas alone."""

import math
import statistics
from dataclasses import dataclass
from fractions import Fraction

Rows = list[list[float]]
Masks = list[list[bool]]


@dataclass
class Expected:
    """Weights, mask and metrics of a batch."""

    weights: Rows
    mask: Masks
    metrics: dict[str, float]


@dataclass
class Sequence:
    """The tokens of one sequence; Δ is 0 where it does not count."""

    train: list[float]
    delta: list[float]
    mask: list[bool]
    finite: list[bool]
    valid: list[bool]

    def of_valid(self, values):
        return [value for value, ok in zip(values, self.valid, strict=True) if ok]

    @property
    def deltas(self):
        return self.of_valid(self.delta)


def expected_correction(config, train, rollout, loss_mask, *, are_densities=False):
    is_usable = are_near if are_densities else are_log_probs
    batch = [
        sequence(config, *three, is_usable) for three in zip(train, rollout, loss_mask, strict=True)
    ]
    weights, outside, weight_metrics = expected_weights(config, batch)
    rejected, rejection_metrics = expected_rejection(config, batch)
    metrics = mismatch(batch) | weight_metrics | rejection_metrics
    mask = [
        [ok and not out and not bad for ok, out, bad in zip(s.valid, outs, bads, strict=True)]
        for s, outs, bads in zip(batch, outside, rejected, strict=True)
    ]
    if not (config.corrects or config.use_rollout_logprobs):
        weights, mask = [[float(m) for m in s.mask] for s in batch], [s.mask for s in batch]
    total = sum(map(sum, loss_mask))
    if config.corrects and total:
        metrics["gradient_kept_fraction"] = sum(map(sum, mask)) / total
    return Expected(weights, mask, metrics)


def are_log_probs(train, rollout):
    """Whether both can be log-probs of a token; a NaN compares as false."""
    return abs(train) < 9984 and abs(rollout) < 9984


def are_near(train, rollout):
    """Whether two log-densities have a usable difference."""
    return abs(train - rollout) < 1e6


def sequence(config, train, rollout, mask, is_usable=are_log_probs):
    differences = [t - r for t, r in zip(train, rollout, strict=True)]
    finite = [m and is_usable(t, r) for t, r, m in zip(train, rollout, mask, strict=True)]
    return Sequence(
        train=[t if ok else 0.0 for t, ok in zip(train, finite, strict=True)],
        delta=[d if ok else 0.0 for d, ok in zip(differences, finite, strict=True)],
        mask=mask,
        finite=finite,
        valid=mask if config.nonfinite_policy == "neutral" else finite,
    )


def mean(values):
    return math.fsum(values) / len(values)


def deviation(values):
    return math.sqrt(mean([(value - mean(values)) ** 2 for value in values]))


def exp(value, bound=20.0):
    return math.exp(min(max(value, -bound), bound))


def ess_share(log_weights):
    """(Σ w)² / (n Σ w²), relative to the largest weight, so that nothing overflows and not all are
    0."""
    relative = [math.exp(x - max(log_weights)) for x in log_weights]
    return math.fsum(relative) ** 2 / (len(relative) * math.fsum(x * x for x in relative))


def aggregate(aggregation, values, s):
    """The statistic at every token: its own, that of its prefix, its turn, or its sequence."""
    if aggregation == "token":
        return values
    if aggregation == "prefix":
        return [math.fsum(values[: t + 1]) for t in range(len(values))]
    if aggregation == "segment":
        return [turn_sum(values, s.mask, t) for t in range(len(values))]
    counted = s.of_valid(values)
    whole = {
        "sum": math.fsum(counted),
        "mean": math.fsum(counted) / max(len(counted), 1),
        "max": max(counted, default=-math.inf),
    }
    return [whole[aggregation]] * len(values)


def turn_sum(values, mask, position):
    if not mask[position]:
        return 0.0
    first = last = position
    while first > 0 and mask[first - 1]:
        first -= 1
    while last + 1 < len(mask) and mask[last + 1]:
        last += 1
    return math.fsum(values[first : last + 1])


LEVELS = {
    "token": "token",
    "sequence": "sum",
    "geometric": "mean",
    "prefix": "prefix",
    "segment": "segment",
}


def expected_weights(config, batch):
    """The weights, which tokens they reject, and their metrics."""
    if not config.use_tis:
        return (
            [[float(ok) for ok in s.valid] for s in batch],
            [[False] * len(s.mask) for s in batch],
            {},
        )
    lower, upper = config.is_bounds
    levels = [aggregate(LEVELS[config.tis_level], s.delta, s) for s in batch]
    raw = [list(map(exp, row)) for row in levels]
    outside = [[config.tis_mode == "mask" and not lower <= w <= upper for w in row] for row in raw]
    bound = {
        "truncate": lambda w: min(w, upper),
        "clip": lambda w: min(max(w, lower), upper),
        "mask": lambda w: w if lower <= w <= upper else 0.0,
    }[config.tis_mode]
    bounded = [list(map(bound, row)) for row in raw]
    once = LEVELS[config.tis_level] in ("sum", "mean")

    def counted(rows):
        """What counts in the metrics: each valid token, or each sequence with one."""
        values = [s.of_valid(row) for s, row in zip(batch, rows, strict=True)]
        return [value for row in values for value in (row[:1] if once else row)]

    ratios, weights = counted(raw), counted(bounded)
    if not ratios:
        return [[0.0] * len(s.mask) for s in batch], outside, {}
    factor = mean(weights) if config.tis_batch_normalize and mean(weights) > 1e-8 else 1.0
    # the ratio of a whole sequence is reported without the clamp at ±20
    before = counted([[exp(level, 700.0) for level in row] for row in levels]) if once else ratios
    square = mean([w * w for w in weights])
    high, low = mean([w > upper for w in ratios]), mean([w < lower for w in ratios])
    high_name, low_name = f"{config.tis_mode}_fraction_high", f"{config.tis_mode}_fraction_low"
    if config.tis_mode == "truncate":
        high_name, low_name = "truncate_fraction", "ratio_fraction_low"
    metrics = {
        "mis_mean_is_weight_before_clip": mean(ratios),
        "mis_weight_min_before_clip": min(before),
        "mis_weight_max_before_clip": max(before),
        "mis_ratio_mean_after_mis": mean(weights),
        "mis_weight_min": min(weights) / factor,
        "mis_weight_max": max(weights) / factor,
        "mis_weight_std": deviation(weights) / factor,
        "mis_eff_sample_size": mean(weights) ** 2 / square if square else 0.0,
        f"mis_{high_name}": high,
        f"mis_{low_name}": low,
    }
    if config.tis_batch_normalize:
        metrics["mis_batch_norm_factor"] = factor
    if not once:
        means, raw_means = (
            [mean(s.of_valid(row)) for s, row in zip(batch, rows, strict=True) if any(s.valid)]
            for rows in (bounded, raw)
        )
        metrics |= {
            "mis_seq_weight_mean": mean(means),
            "mis_seq_weight_std": deviation(means),
            "mis_seq_weight_min": min(means),
            "mis_seq_weight_max": max(means),
            "mis_seq_weight_max_deviation": max(abs(w - 1) for w in means),
            "mis_seq_weight_fraction_high": mean([w > upper for w in raw_means]),
            "mis_seq_weight_fraction_low": mean([w < lower for w in raw_means]),
        }
    applied = [
        [w / factor if ok else 0.0 for w, ok in zip(row, s.valid, strict=True)]
        for s, row in zip(batch, bounded, strict=True)
    ]
    return applied, outside, metrics


def divergence(kind, delta):
    """k1, k2, k3 or error of one log-ratio."""
    bounded = min(delta, 20.0)
    error = math.exp(min(abs(delta), 20.0))
    return {
        "k1": delta,
        "k2": delta * delta / 2,
        "k3": math.expm1(bounded) - bounded,
        "error": error,
    }[kind]


def out_of_bounds(criterion, s):
    values = aggregate(
        criterion.aggregation, [divergence(criterion.divergence, d) for d in s.delta], s
    )
    low, high = -math.inf, criterion.upper
    if criterion.lower is not None:
        low, high = (
            math.log(criterion.lower) if criterion.lower else -math.inf,
            math.log(criterion.upper),
        )
    return [ok and not low <= value <= high for value, ok in zip(values, s.valid, strict=True)]


def out_of_adaptive_bounds(config, batch):
    """z = max(|Σ Δ + k3·n| − 5e-5·n, 0) / √(2·k3·n) of every sequence against the z-score of the
    batch."""
    present = [s.deltas for s in batch if any(s.valid)]
    if not present:
        return [[False] * len(s.mask) for s in batch], {}
    k3 = mean([divergence("k3", min(max(d, -1.0), 1.0)) for deltas in present for d in deltas])

    def score(deltas):
        n = len(deltas)
        beyond = max(abs(math.fsum(deltas) + k3 * n) - 5e-5 * n, 0.0)
        return beyond / math.sqrt(2 * max(k3, 1e-12) * n) if n else 0.0

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
        "mis_rs_lower_bound": exp(scale * (-k3 - half)),
        "mis_rs_upper_bound": exp(scale * (-k3 + half)),
    }
    return [[ok and score(s.deltas) > limit for ok in s.valid] for s in batch], metrics


def expected_rejection(config, batch):
    """Which valid tokens are rejected by criteria, veto and trimming, and the metrics of that."""
    tokens, sequences = sum(sum(s.valid) for s in batch), sum(any(s.valid) for s in batch)
    metrics = {}

    def report(name, rejected, of_sequences=""):
        if tokens:
            metrics[name] = sum(map(sum, rejected)) / tokens
        if tokens and of_sequences:
            metrics[of_sequences] = sum(map(any, rejected)) / sequences

    by_rs = [[False] * len(s.mask) for s in batch]
    for criterion in config.rejections:
        out, more = [out_of_bounds(criterion, s) for s in batch], {}
        if criterion.adaptive:
            out, more = out_of_adaptive_bounds(config, batch)
        metrics |= more
        by_rs = either(by_rs, out)
        prefix = f"mis_rs_{criterion.name}_"
        report(f"{prefix}masked_fraction", out, f"{prefix}seq_masked_fraction")
    if config.rejections:
        report("mis_rs_masked_fraction", by_rs, "mis_rs_seq_masked_fraction")
    rejected = by_rs
    if config.vetoes:
        floor = (
            -math.inf if config.rs_veto_threshold is None else math.log(config.rs_veto_threshold)
        )
        ceiling = (
            math.inf
            if config.rs_veto_upper_threshold is None
            else math.log(config.rs_veto_upper_threshold)
        )
        bad = [
            [ok and not floor <= d <= ceiling for d, ok in zip(s.delta, s.valid, strict=True)]
            for s in batch
        ]
        rejected = either(rejected, [[any(row)] * len(row) for row in bad])
        report("mis_catastrophic_token_fraction", bad, "mis_catastrophic_seq_fraction")
    if config.rs_second_moment_bound is not None:
        limit = second_moment_limit(
            [d * d for s in batch for d in s.deltas], config.rs_second_moment_bound
        )
        large = [
            [ok and d * d >= limit for d, ok in zip(s.delta, s.valid, strict=True)] for s in batch
        ]
        rejected = either(rejected, large)
        report("mis_second_moment_masked_fraction", large)
    return rejected, metrics


def either(first, second):
    return [
        [a or b for a, b in zip(*rows, strict=True)] for rows in zip(first, second, strict=True)
    ]


def second_moment_limit(squares, bound):
    """The first value, in rising order, with which the mean is above the bound; +inf without such a
    value."""
    ordered, total = sorted(squares), Fraction(0)
    for count, value in enumerate(ordered, start=1):
        total += Fraction(value)
        if total > count * Fraction(bound):
            return value
    return math.inf


def mismatch(batch):
    total = sum(sum(s.mask) for s in batch)
    lost = total - sum(sum(s.finite) for s in batch)
    metrics = {"nonfinite_token_fraction": lost / total} if total else {}
    deltas = [d for s in batch for d in s.deltas]
    if not deltas:
        return metrics
    sums = [math.fsum(s.delta) for s in batch if any(s.valid)]
    metrics |= {
        "mismatch_kl": -mean(deltas),
        "mismatch_k3_kl": mean([exp(d) - 1 - d for d in deltas]),
        "mismatch_chi2_token": mean([exp(d) ** 2 - 1 for d in deltas]),
        "mismatch_chi2_seq": mean([exp(total) ** 2 - 1 for total in sums]),
        "effective_sequence_share": ess_share(sums),
        "train_rollout_logprob_abs_diff": mean([abs(d) for d in deltas]),
    }
    measured = [s for s in batch if any(s.finite)]
    if not measured:
        return metrics
    training = [-math.fsum(s.train) / sum(s.finite) for s in measured]
    difference = [-math.fsum(s.delta) / sum(s.finite) for s in measured]
    rollout = [a - b for a, b in zip(training, difference, strict=True)]
    return metrics | {
        "mismatch_training_log_ppl": mean(training),
        "mismatch_training_ppl": mean([exp(x, 80.0) for x in training]),
        "mismatch_rollout_log_ppl": mean(rollout),
        "mismatch_rollout_ppl": mean([exp(x, 80.0) for x in rollout]),
        "mismatch_log_ppl_diff": mean(difference),
        "mismatch_log_ppl_abs_diff": mean([abs(x) for x in difference]),
        "mismatch_log_ppl_diff_max": max(difference),
        "mismatch_log_ppl_diff_min": min(difference),
        "mismatch_ppl_ratio": mean([exp(x, 80.0) for x in difference]),
    }
