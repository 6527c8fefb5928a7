"""The expected correction and loss of SDE steps: Python loops over float64 numbers, written from
the formulas alone.

Weights, masks and the core's metrics are those of `tests.correction.expected`.
"""

import math
from dataclasses import dataclass, replace

from slime_tis import RolloutCorrectionConfig
from tests.correction.expected import expected_correction
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


def expected_trajectories(config, train, rollout):
    """The correction of a batch, every step being valid."""
    return expected_correction(
        config, train, rollout, [[True] * len(row) for row in train], are_densities=True
    )


def expected_metrics(config, train, rollout, timesteps=None):
    result = expected_trajectories(config, train, rollout)
    found = dict(result.metrics)
    if config.use_rollout_logprobs and not config.use_tis:
        kept = ("tis_mode", "tis_level", "tis_lower_bound", "tis_upper_bound", "nonfinite_policy")
        reported = RolloutCorrectionConfig(
            use_tis=True, **{name: getattr(config, name) for name in kept}
        )
        measured = expected_trajectories(reported, train, rollout).metrics
        found |= {name: value for name, value in measured.items() if name.startswith("mis_")}
    if "train_rollout_logprob_abs_diff" in found:
        found["logprob_abs_diff_mean"] = found["train_rollout_logprob_abs_diff"]
        sizes = [
            [abs(t - r) for t, r in zip(ts, rs, strict=True)]
            for ts, rs in zip(train, rollout, strict=True)
        ]
        finite = [x for row in sizes for x in row if math.isfinite(x) and x < 1e6]
        found["logprob_abs_diff_max"] = max(finite, default=0.0)
        for timestep in sorted({t for row in timesteps or [] for t in row}):
            assert timesteps is not None
            at = [
                x
                for row, times in zip(sizes, timesteps, strict=True)
                for x, t in zip(row, times, strict=True)
                if t == timestep and math.isfinite(x) and x < 1e6
            ]
            if at:
                found[f"logprob_abs_diff/ts_{timestep:g}"] = math.fsum(at) / len(at)
    if config.corrects:
        found["rejected_sequence_fraction"] = sum(not all(row) for row in result.mask) / len(train)
    prefix = "actor/rollout_corr/" if config.use_rollout_logprobs else "rollout_corr/"
    return {prefix + name: value for name, value in found.items()}


def expected_loss(config, current, old, rollout, advantages, clip_range):
    """The loss of a batch: decoupled from `old` and `rollout`, in bypass mode from `current` and
    `rollout`."""
    bypass = config.use_rollout_logprobs
    if bypass:
        old = rollout
    result = expected_trajectories(config, current if bypass else old, rollout)
    accepted, steps = sum(map(sum, result.mask)), sum(map(len, current))
    denominator = accepted if config.rejection_normalizer == "kept" else steps
    loss, clipped, kl, ratios = 0.0, 0, 0.0, 0.0
    gradient = [[0.0] * len(row) for row in current]
    for i, row in enumerate(current):
        for t, log_prob in enumerate(row):
            if not result.mask[i][t]:
                continue
            old_log_prob = old[i][t] if math.isfinite(old[i][t]) else log_prob
            value, slope, cut = _step(config, log_prob, old_log_prob, advantages[i][t], clip_range)
            loss += result.weights[i][t] * value
            gradient[i][t] = result.weights[i][t] * slope / max(denominator, 1)
            clipped += cut
            kl += old_log_prob - log_prob
            ratios += math.exp(log_prob - old_log_prob)
    return ExpectedLoss(loss / max(denominator, 1), denominator, gradient, clipped, kl, ratios)


def _step(config, log_prob, old, advantage, clip_range):
    """(loss, its derivative by log π_θ, whether the clip is active) of one step."""
    if config.policy_loss == "reinforce":
        return -advantage * log_prob, -advantage, False
    ratio = math.exp(log_prob - old)
    near = min(max(ratio, 1 - clip_range), 1 + clip_range)
    plain, cut = -ratio * advantage, -near * advantage
    if cut > plain:
        return cut, 0.0, True
    return plain, -ratio * advantage, False


def clipped_loss(config):
    """The same options with the clipped loss, whose ratio in bypass mode allows no weights."""
    return replace(
        config, policy_loss="ppo", use_tis=config.use_tis and not config.use_rollout_logprobs
    )
