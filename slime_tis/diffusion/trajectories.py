"""Correction of trajectories: weights and mask per step, bypass, statistics, and warnings.

A trajectory is a sequence whose tokens are its SDE steps. There is no padding: every step is valid
unless a log-prob is not finite.

Shapes: suffix _BT is [B, T] of B trajectories with T steps, or [B] for one step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.alarm import Alarm
from slime_tis.correction import (
    LOG_RATIO_LIMIT,
    THIS_CALL,
    GlobalBatch,
    RolloutCorrectionConfig,
    Statistics,
    correct,
)
from slime_tis.diffusion.sde import STEPS, at_least_float32, check_shapes

REJECTED_SHARE = 0.05
"""Largest share of rejected sequences; above it, training sees a selected set."""
LASTING = 10
"""Steps in a row after which a condition is not chance."""
FIRST_STEPS = 50
"""Steps at the start of a run in which a gap comes from the set-up."""
LARGEST_LOG_PPL_GAP = 1.0
"""Largest difference of a step's mean log-prob, in nats, between engines with the same set-up."""


@dataclass(frozen=True)
class StepStatistics:
    """The statistics of the correction, with trajectories as sequences, and |Δ| by timestep."""

    core: Statistics
    """Of the correction that acts on the loss."""
    weights: Statistics | None
    """Statistics of weights that are only measured, under `weight_report`; None if the weights act
    or are missing."""
    sequences: Tensor
    """[2] float64: sequences, and sequences with a rejected step."""
    highest: Tensor
    """0-dim float64: largest finite |Δ|; 0 without steps."""
    by_timestep: Tensor
    """[n, 3] float64: a timestep, Σ|Δ| and the number of finite Δ; one row per distinct timestep of
    each batch."""

    def merge(self, other: "StepStatistics") -> "StepStatistics":
        """The statistics of both together: micro-batches, steps of one trajectory, or ranks."""
        weights = None
        if self.weights is not None and other.weights is not None:
            weights = self.weights.merge(other.weights)
        return StepStatistics(
            core=self.core.merge(other.core),
            weights=weights,
            sequences=self.sequences + other.sequences,
            highest=torch.maximum(self.highest, other.highest),
            by_timestep=torch.cat([self.by_timestep, other.by_timestep]),
        )

    def metrics(self) -> dict[str, float]:
        """All metrics by their names in the log.

        The core's, including weights that are only measured, under `rollout_corr/`, or
        `actor/rollout_corr/` in bypass mode; `logprob_abs_diff_mean`, `_max` and `/ts_VALUE` of
        each timestep; `rejected_sequence_fraction`. No value is NaN or infinite; empty without a
        finite log-ratio.
        """
        config = self.core.config
        metrics = self.core.metrics()
        if self.weights is not None:
            for name, value in self.weights.metrics().items():
                if name.startswith("mis_"):
                    metrics.setdefault(name, value)
        if "train_rollout_logprob_abs_diff" in metrics:
            metrics["logprob_abs_diff_mean"] = metrics["train_rollout_logprob_abs_diff"]
            metrics |= _differences_by_step(self)
        sequences, rejected = self.sequences.tolist()
        if config.corrects and sequences:
            metrics["rejected_sequence_fraction"] = rejected / sequences
        prefix = prefix_of(config)
        return {prefix + name: value for name, value in metrics.items()}


def prefix_of(config: RolloutCorrectionConfig) -> str:
    """Prefix of metrics. In bypass mode the actor corrects in its loss and reports them."""
    if config.use_rollout_logprobs:
        return "actor/rollout_corr/"
    return "rollout_corr/"


def weight_report(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """The configuration that measures weights without applying them: only importance weights."""
    return RolloutCorrectionConfig(
        use_tis=True,
        tis_mode=config.tis_mode,
        tis_level=config.tis_level,
        tis_lower_bound=config.tis_lower_bound,
        tis_upper_bound=config.tis_upper_bound,
        nonfinite_policy=config.nonfinite_policy,
    )


def _differences_by_step(statistics: StepStatistics) -> dict[str, float]:
    """Largest |Δ|, and mean |Δ| per timestep; timesteps that print identically count as one."""
    totals: dict[str, float] = {}
    counts: dict[str, float] = {}
    for timestep, total, count in sorted(statistics.by_timestep.tolist()):
        name = f"logprob_abs_diff/ts_{timestep:g}"
        totals[name] = totals.get(name, 0.0) + total
        counts[name] = counts.get(name, 0.0) + count
    metrics = {"logprob_abs_diff_max": statistics.highest.item()}
    for name, total in totals.items():
        if counts[name]:
            metrics[name] = total / counts[name]
    return metrics


@dataclass(frozen=True)
class TrajectoryCorrection:
    """Weights and mask of the steps, and statistics. No tensor carries a gradient."""

    weights: Tensor
    """[B, T] or [B] float32 importance weights; 1 if IS is off or only reported."""
    mask: Tensor
    """Of the same shape, bool: True at accepted steps."""
    statistics: StepStatistics
    """To be merged over micro-batches and ranks, then read with `statistics.metrics()`."""
    global_batch: GlobalBatch
    """As in the core's `Correction`."""

    @property
    def folded(self) -> Tensor:
        """weights × mask: one factor per step. Accepted steps have positive factors."""
        return self.weights * self.mask


def apply_bypass_mode(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch with log π_old := log π_rollout, which saves the forward pass of π_old.

    Args:
        batch: With `rollout_log_probs`, [B, T] or [B].

    Returns:
        A batch of the same tensors, with the rollout's log-probs as `old_log_probs`.

    Raises:
        ValueError: if the rollout log-probs are missing.
    """
    rollout = batch.get("rollout_log_probs")
    if rollout is None:
        raise ValueError(
            "--use-rollout-logprobs needs rollout_log_probs, but the batch has"
            f" {', '.join(batch) or 'nothing'}; have the rollout engine return the log-prob of"
            " every SDE step, or remove the flag."
        )
    return {**batch, "old_log_probs": rollout}


def correct_trajectories(
    config: RolloutCorrectionConfig,
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    *,
    timesteps: Tensor | None = None,
    latent_dims: int = 1,
    global_batch: GlobalBatch = THIS_CALL,
) -> TrajectoryCorrection:
    """Weights and mask per step of a batch of trajectories, with all levels, modes and criteria.

        Δ_t = D·(log π_train − log π_rollout)(t);   weights and mask as from `slime_tis.correct`

    Decoupled, π_train is π_old, and this is called once per global batch. Levels, batch
    normalisation and trimming then use the complete batch. In bypass mode the loss calls this
    function with π_θ. A clipped loss has a ratio that already is the importance weight. Its weights
    are only measured, with `--tis-level`, `--tis-mode` and the bounds.

    Args:
        config: The options.
        train_log_probs: log π_train, [B, T], or [B] for a single step; then all levels are the
            same.
        rollout_log_probs: log π_rollout, of the same shape.
        timesteps: The scheduler's timesteps, of the same shape, or [T] or 0-dim if all trajectories
            share them. They add the mismatch by timestep to the metrics, and one host
            synchronisation, which finds the distinct timesteps.
        latent_dims: D, if the log-probs are means over D latent dimensions and the bounds apply to
            the ratio of the sum; 1 uses the log-probs unchanged.
        global_batch: As in `slime_tis.correct`: statistics of the global batch if this is one of
            its micro-batches, and the data-parallel ranks that share it.

    Raises:
        ValueError: if the shapes differ or are neither [B, T] nor [B], naming both.
    """
    check_shapes(STEPS, train_log_probs=train_log_probs, rollout_log_probs=rollout_log_probs)
    shape = train_log_probs.shape
    trajectories = shape
    if len(shape) == 1:
        trajectories = torch.Size((shape[0], 1))  # `correct` takes [B, T]
    # Before the product: bf16 log-probs times thousands of dimensions would lose digits.
    train = at_least_float32(train_log_probs.detach()).view(trajectories) * latent_dims
    rollout = at_least_float32(rollout_log_probs.detach()).view(trajectories) * latent_dims
    every_step = torch.ones_like(train, dtype=torch.bool)
    acting = correct(
        config, train, rollout, every_step, global_batch=global_batch, are_densities=True
    )
    reported_statistics = None
    if config.use_rollout_logprobs and not config.use_tis:
        # the loss's ratio is the weight, so weights are only reported
        reported = correct(weight_report(config), train, rollout, every_step, are_densities=True)
        reported_statistics = reported.statistics
    difference = (train - rollout).abs().to(torch.float64)
    # NaN and engines' sentinels fail this comparison and do not count.
    finite = difference < LOG_RATIO_LIMIT
    size = torch.where(finite, difference, 0.0)
    by_timestep = size.new_zeros(0, 3)
    if timesteps is not None:
        by_timestep = _sums_by_timestep(_as_steps(timesteps, shape), size, finite)
    lost = acting.accepted_per_sequence < acting.masked_in_per_sequence
    statistics = StepStatistics(
        core=acting.statistics,
        weights=reported_statistics,
        sequences=torch.stack([torch.ones_like(lost), lost]).sum(1, dtype=torch.float64),
        # The added 0 gives a batch without steps a maximum; amax of nothing raises.
        highest=torch.cat([size.flatten(), size.new_zeros(1)]).amax(),
        by_timestep=by_timestep,
    )
    return TrajectoryCorrection(
        weights=acting.weights.view(shape),
        mask=acting.mask.view(shape),
        statistics=statistics,
        global_batch=acting.global_batch,
    )


def _sums_by_timestep(timesteps: Tensor, size: Tensor, finite: Tensor) -> Tensor:
    """Returns `StepStatistics.by_timestep` of |Δ| and its validity, one value per step."""
    timestep_N = timesteps.to(torch.float64).flatten()
    distinct, index = timestep_N.unique(return_inverse=True)
    columns = torch.stack([size.flatten(), finite.to(torch.float64).flatten()], 1)
    sums = columns.new_zeros(len(distinct), 2).index_add_(0, index, columns)
    return torch.cat([distinct[:, None], sums], 1)


def _as_steps(timesteps: Tensor, shape: torch.Size) -> Tensor:
    """The timesteps of all steps, in this shape."""
    shared = timesteps.shape == shape[1:]  # [T], or 0-dim for a single step
    if timesteps.shape != shape and not shared:
        raise ValueError(
            f"timesteps has shape {tuple(timesteps.shape)}, train_log_probs {tuple(shape)}; pass"
            " the timestep of every step, or of the steps that all trajectories share,"
            f" {tuple(shape[1:])}."
        )
    return timesteps.expand(shape)


class Diagnostics:
    """Checks the metrics of each step and returns each warning once, for the caller to log."""

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        self._config = config
        self._prefix = prefix_of(config)
        self._steps = 0
        self._rejecting = Alarm(LASTING)
        self._at_bound = Alarm(LASTING)
        self._reported: set[object] = set()

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """The warnings after a step."""
        values = {name.removeprefix(self._prefix): value for name, value in metrics.items()}
        self._steps += 1
        is_first = self._steps <= FIRST_STEPS
        mode = self._config.mode
        rejects_many = values.get("rejected_sequence_fraction", 0.0) > REJECTED_SHARE
        has_gap = values.get("mismatch_log_ppl_abs_diff", 0.0) > LARGEST_LOG_PPL_GAP
        # A mode that rejects has no weights at the bound.
        at_bound = not mode.rejects and values.get(f"mis_{mode.high_fraction}", 0.0) > 0.0
        # Both alarms observe every step, because they count steps in a row.
        problems = {
            _about_rejection: self._rejecting.observe(rejects_many),
            _about_gap: is_first and has_gap,
            _about_bound: self._at_bound.observe(at_bound) and is_first,
        }
        messages = []
        for about, holds in problems.items():
            if holds and about not in self._reported:
                self._reported.add(about)
                messages.append(about(self._config, values, self._steps))
        return messages


def _about_rejection(config: RolloutCorrectionConfig, found: Mapping[str, float], _: int) -> str:
    message = (
        f"{found['rejected_sequence_fraction']:.1%} of the sequences lost a step to rejection, and"
        f" more than {REJECTED_SHARE:.0%} did in each of the last {LASTING} steps: training is on a"
        " selected set. Bring the rollout closer (newer weights, higher precision), or widen the"
        " bounds that reject."
    )
    if config.rejection_normalizer == "original":
        message += (
            f" The gradient is shrunk to {found['gradient_kept_fraction']:.0%} by it; "
            "--rejection-normalizer kept takes the mean over the accepted steps."
        )
    if config.use_rollout_logprobs:
        message += (
            " Without --use-rollout-logprobs rejection compares π_old, not the moving π_θ, with the"
            " rollout."
        )
    return message


def _about_gap(_: RolloutCorrectionConfig, found: Mapping[str, float], step: int) -> str:
    gap = found["mismatch_log_ppl_abs_diff"]
    return (
        f"mismatch_log_ppl_abs_diff is {gap:.2f} nats at step {step}, above"
        f" {LARGEST_LOG_PPL_GAP:g}: rollout and training disagree about a step by more than"
        " precision explains. Compare their timesteps, noise level and guidance, and the scale of"
        " their log-probs (mean or sum over latent dimensions); then raise the precision of the"
        " rollout or update its weights more often."
    )


def _about_bound(config: RolloutCorrectionConfig, _: Mapping[str, float], __: int) -> str:
    return (
        f"The largest weight was at its bound --tis-upper-bound {config.tis_upper_bound:g} in each"
        f" of the last {LASTING} steps: the bound is doing the work. Bring the rollout closer"
        " (newer weights, higher precision), or raise the bound."
    )
