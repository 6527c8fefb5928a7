"""What is measured of a batch of trajectories, mergeable, and its names in the log.

Shapes: suffix _BT is [B, T] of B trajectories with T steps, _D per distinct timestep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.correction import LOG_RATIO_LIMIT, Correction, RolloutCorrectionConfig, Statistics


@dataclass(frozen=True)
class StepStatistics:
    """The core's statistics with trajectories for sequences, and the sizes of Δ that depend on the step."""

    core: Statistics
    """Of the correction that acts on the loss."""
    weights: Statistics | None
    """Statistics of weights that are only measured, under `weight_report`; None if the weights act or are missing."""
    sequences: Tensor
    """[2] float64: sequences, and sequences with a rejected step."""
    highest: Tensor
    """0-dim float64: largest |Δ|; −inf without steps."""
    timesteps_D: Tensor
    """float64, ascending: the timesteps there were."""
    abs_diff_D: Tensor
    """float64: Σ|Δ| at each."""
    count_D: Tensor
    """float64: finite Δ at each."""

    def merge(self, other: StepStatistics) -> StepStatistics:
        """The statistics of both together: micro-batches, steps of one trajectory, or ranks."""
        timesteps, index = torch.cat([self.timesteps_D, other.timesteps_D]).unique(return_inverse=True)
        weights = None if self.weights is None or other.weights is None else self.weights.merge(other.weights)
        return StepStatistics(
            core=self.core.merge(other.core),
            weights=weights,
            sequences=self.sequences + other.sequences,
            highest=torch.maximum(self.highest, other.highest),
            timesteps_D=timesteps,
            abs_diff_D=_added(torch.cat([self.abs_diff_D, other.abs_diff_D]), index, timesteps),
            count_D=_added(torch.cat([self.count_D, other.count_D]), index, timesteps),
        )

    def metrics(self) -> dict[str, float]:
        """All metrics by their names in the log.

        The core's, including weights that are only measured, under `rollout_corr/`, or `actor/rollout_corr/`
        in bypass mode; and there `logprob_abs_diff_mean`, `logprob_abs_diff_max`, `logprob_abs_diff/ts_VALUE` for each
        timestep, and `rejected_sequence_fraction`.

        Returns:
            Name to value, none of them NaN or infinite; empty where there was no finite log-ratio at all.
        """
        config = self.core.config
        found = self.core.metrics()
        if self.weights is not None:
            measured = self.weights.metrics()
            found |= {name: value for name, value in measured.items() if name.startswith("mis_") and name not in found}
        if "train_rollout_logprob_abs_diff" in found:
            found["logprob_abs_diff_mean"] = found["train_rollout_logprob_abs_diff"]
            found |= _sizes_of_steps(self)
        sequences, rejected = self.sequences.tolist()
        if config.corrects and sequences:
            found["rejected_sequence_fraction"] = rejected / sequences
        return {prefix_of(config) + name: value for name, value in found.items()}


def step_statistics(
    correction: Correction[Tensor],
    reported: Correction[Tensor] | None,
    train_BT: Tensor,
    rollout_BT: Tensor,
    timesteps_BT: Tensor | None,
) -> StepStatistics:
    """Everything that is measured of one batch.

    Args:
        correction: The one that acts.
        reported: The one whose weights are only measured.
        train_BT: log π_train on the scale that was corrected on.
        rollout_BT: log π_rollout likewise.
        timesteps_BT: Of the steps; None omits the mismatch by timestep.
    """
    difference = (train_BT - rollout_BT).abs().to(torch.float64)
    finite = difference < LOG_RATIO_LIMIT
    size = torch.where(finite, difference, 0.0)
    lost = correction.accepted_per_sequence < correction.masked_in_per_sequence
    none = size.new_zeros(0)
    timesteps, abs_diff, count = none, none, none
    if timesteps_BT is not None:
        timesteps, index = timesteps_BT.to(torch.float64).flatten().unique(return_inverse=True)
        abs_diff = _added(size.flatten(), index, timesteps)
        count = _added(finite.to(torch.float64).flatten(), index, timesteps)
    return StepStatistics(
        core=correction.statistics,
        weights=None if reported is None else reported.statistics,
        sequences=torch.stack([torch.ones_like(lost), lost]).sum(1, dtype=torch.float64),
        highest=torch.cat(
            [torch.where(finite, difference, -torch.inf).flatten(), none.new_full((1,), -torch.inf)]
        ).amax(),
        timesteps_D=timesteps,
        abs_diff_D=abs_diff,
        count_D=count,
    )


def prefix_of(config: RolloutCorrectionConfig) -> str:
    """Prefix of a correction's metrics: in bypass mode they are the actor's, which corrects in its loss."""
    return "actor/rollout_corr/" if config.use_rollout_logprobs else "rollout_corr/"


def reports_weights(config: RolloutCorrectionConfig) -> bool:
    """Whether weights are measured but not applied: in bypass mode, where the ratio of the loss is the weight."""
    return config.use_rollout_logprobs and not config.use_tis


def weight_report(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """The configuration under which those weights are measured: IS alone."""
    return RolloutCorrectionConfig(
        use_tis=True,
        tis_mode=config.tis_mode,
        tis_level=config.tis_level,
        tis_lower_bound=config.tis_lower_bound,
        tis_upper_bound=config.tis_upper_bound,
        nonfinite_policy=config.nonfinite_policy,
    )


def _sizes_of_steps(statistics: StepStatistics) -> dict[str, float]:
    """Largest |Δ|, and its mean at each timestep; timesteps that print identically count as one."""
    table: dict[str, tuple[float, float]] = {}
    columns = torch.stack([statistics.timesteps_D, statistics.abs_diff_D, statistics.count_D], 1)
    for timestep, total, count in columns.tolist():
        name = f"logprob_abs_diff/ts_{timestep:g}"
        before = table.get(name, (0.0, 0.0))
        table[name] = (before[0] + total, before[1] + count)
    highest = statistics.highest.clamp_min(0.0).item()
    return {"logprob_abs_diff_max": highest} | {name: total / n for name, (total, n) in table.items() if n}


def _added(values_N: Tensor, index_N: Tensor, timesteps_D: Tensor) -> Tensor:
    return torch.zeros_like(timesteps_D).index_add_(0, index_N, values_N)
