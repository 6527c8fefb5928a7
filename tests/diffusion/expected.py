"""The expected correction and loss of SDE steps: Python loops over float64 numbers, written from
the formulas alone.

Weights, masks and the core's metrics are those of `tests.correction.expected`.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from slime_tis import RolloutCorrectionConfig
from tests.correction.expected import Expected, expected_correction
from tests.diffusion.strategies import Rows


@dataclass
class ExpectedLoss:
    """The loss of a batch, its gradient, and what it is averaged over."""

    loss: float
    denominator: int
    gradient: Rows
    """∂loss/∂log π_θ."""
    clipped: int
    kl: float
    ratio: float


def expected_trajectories(config: RolloutCorrectionConfig, train: Rows, rollout: Rows) -> Expected:
    """The correction of a batch, every step being valid."""
    mask = [[True] * len(row) for row in train]
    return expected_correction(config, train, rollout, mask, are_densities=True)


def expected_metrics(
    config: RolloutCorrectionConfig, train: Rows, rollout: Rows, timesteps: Rows | None = None
) -> dict[str, float]:
    """The metrics of a batch, with the prefix of its mode."""
    result = expected_trajectories(config, train, rollout)
    metrics = dict(result.metrics)
    if config.use_rollout_logprobs and not config.use_tis:
        kept = ("tis_mode", "tis_level", "tis_lower_bound", "tis_upper_bound", "nonfinite_policy")
        options: dict[str, Any] = {name: getattr(config, name) for name in kept}
        reported = RolloutCorrectionConfig(use_tis=True, **options)
        measured = expected_trajectories(reported, train, rollout).metrics
        metrics |= {name: value for name, value in measured.items() if name.startswith("mis_")}
    if "train_rollout_logprob_abs_diff" in metrics:
        metrics["logprob_abs_diff_mean"] = metrics["train_rollout_logprob_abs_diff"]
        metrics |= expected_differences(train, rollout, timesteps)
    if config.corrects:
        rejected = sum(not all(row) for row in result.mask)
        metrics["rejected_sequence_fraction"] = rejected / len(train)
    prefix = "actor/rollout_corr/" if config.use_rollout_logprobs else "rollout_corr/"
    return {prefix + name: value for name, value in metrics.items()}


def expected_differences(train: Rows, rollout: Rows, timesteps: Rows | None) -> dict[str, float]:
    """The largest |Δ|, and the mean |Δ| of each timestep, over usable steps."""
    differences: list[float] = []
    by_timestep: dict[float, list[float]] = {}
    for i, row in enumerate(train):
        for t, log_prob in enumerate(row):
            difference = abs(log_prob - rollout[i][t])
            if not math.isfinite(difference) or difference >= 1e6:
                continue
            differences.append(difference)
            if timesteps is not None:
                by_timestep.setdefault(timesteps[i][t], []).append(difference)
    metrics = {"logprob_abs_diff_max": max(differences, default=0.0)}
    for timestep, values in by_timestep.items():
        metrics[f"logprob_abs_diff/ts_{timestep:g}"] = math.fsum(values) / len(values)
    return metrics


def expected_loss(
    config: RolloutCorrectionConfig,
    current: Rows,
    old: Rows,
    rollout: Rows,
    advantages: Rows,
    clip_range: float,
) -> ExpectedLoss:
    """The loss of a batch: decoupled from `old` and `rollout`, in bypass mode from `current` and
    `rollout`."""
    if config.use_rollout_logprobs:
        old = rollout
        result = expected_trajectories(config, current, rollout)
    else:
        result = expected_trajectories(config, old, rollout)
    denominator = sum(map(len, current))
    if config.rejection_normalizer == "kept":
        denominator = sum(map(sum, result.mask))
    gradient = [[0.0] * len(row) for row in current]
    expected = ExpectedLoss(
        loss=0.0, denominator=denominator, gradient=gradient, clipped=0, kl=0.0, ratio=0.0
    )
    divisor = max(denominator, 1)
    for i, row in enumerate(current):
        for t, log_prob in enumerate(row):
            if not result.mask[i][t]:
                continue
            old_log_prob = old[i][t] if math.isfinite(old[i][t]) else log_prob
            step = _step(config, log_prob, old_log_prob, advantages[i][t], clip_range)
            weight = result.weights[i][t]
            expected.loss += weight * step.loss / divisor
            gradient[i][t] = weight * step.derivative / divisor
            expected.clipped += step.is_clipped
            expected.kl += old_log_prob - log_prob
            expected.ratio += math.exp(log_prob - old_log_prob)
    return expected


class Step(NamedTuple):
    """The loss of one step."""

    loss: float
    derivative: float
    """∂loss/∂log π_θ."""
    is_clipped: bool


def _step(
    config: RolloutCorrectionConfig,
    log_prob: float,
    old: float,
    advantage: float,
    clip_range: float,
) -> Step:
    if config.policy_loss == "reinforce":
        return Step(-advantage * log_prob, -advantage, False)
    ratio = math.exp(log_prob - old)
    clipped_ratio = min(max(ratio, 1 - clip_range), 1 + clip_range)
    plain = -ratio * advantage
    clipped = -clipped_ratio * advantage
    if clipped > plain:
        return Step(clipped, 0.0, True)
    return Step(plain, -ratio * advantage, False)


def clipped_loss(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """The same options with the clipped loss, whose ratio in bypass mode allows no weights."""
    use_tis = config.use_tis and not config.use_rollout_logprobs
    return replace(config, policy_loss="ppo", use_tis=use_tis)
