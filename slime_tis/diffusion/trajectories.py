"""Correction of whole trajectories: weights and mask of every step, bypass, mergeable statistics, and warnings.

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
    Correction,
    GlobalBatch,
    RolloutCorrectionConfig,
    Statistics,
    correct,
)
from slime_tis.diffusion.sde import STEPS, at_least_float32, check_shapes

REJECTED_SHARE = 0.05
"""Share of sequences rejected above which training is on a selected set."""
LASTING = 10
"""Steps in a row after which something is not chance."""
FIRST_STEPS = 50
"""Steps of a run in which a gap is one of the set-up."""
LARGEST_LOG_PPL_GAP = 1.0
"""Mean log-prob of a step, in nats, by which two engines that compute the same thing never
differ."""


@dataclass(frozen=True)
class StepStatistics:
    """The core's statistics with trajectories for sequences, and the sizes of Δ that depend on the step."""

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
        weights = (
            None
            if self.weights is None or other.weights is None
            else self.weights.merge(other.weights)
        )
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
        found = self.core.metrics()
        if self.weights is not None:
            measured = self.weights.metrics()
            found |= {
                name: value
                for name, value in measured.items()
                if name.startswith("mis_") and name not in found
            }
        if "train_rollout_logprob_abs_diff" in found:
            found["logprob_abs_diff_mean"] = found["train_rollout_logprob_abs_diff"]
            found |= _sizes_of_steps(self)
        sequences, rejected = self.sequences.tolist()
        if config.corrects and sequences:
            found["rejected_sequence_fraction"] = rejected / sequences
        return {prefix_of(config) + name: value for name, value in found.items()}


def prefix_of(config: RolloutCorrectionConfig) -> str:
    """Prefix of a correction's metrics: in bypass mode they are the actor's, which corrects in its loss."""
    return "actor/rollout_corr/" if config.use_rollout_logprobs else "rollout_corr/"


def weight_report(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """The configuration under which weights are measured that do not act: IS alone."""
    names = ("tis_mode", "tis_level", "tis_lower_bound", "tis_upper_bound", "nonfinite_policy")
    return RolloutCorrectionConfig(use_tis=True, **{name: getattr(config, name) for name in names})


def _sizes_of_steps(statistics: StepStatistics) -> dict[str, float]:
    """Largest |Δ|, and its mean at each timestep; timesteps that print identically count as one."""
    sums: dict[str, list[float]] = {}
    for timestep, *row in sorted(statistics.by_timestep.tolist()):
        before = sums.setdefault(f"logprob_abs_diff/ts_{timestep:g}", [0.0, 0.0])
        before[:] = map(sum, zip(before, row, strict=True))
    means = {name: total / count for name, (total, count) in sums.items() if count}
    return {"logprob_abs_diff_max": statistics.highest.item()} | means


@dataclass(frozen=True)
class TrajectoryCorrection:
    """What to multiply into the loss of each step, and what was measured. Nothing carries a gradient."""

    weights: Tensor
    """[B, T] or [B] float32 importance weights, 1 where IS is off or only reported."""
    mask: Tensor
    """Of the same shape, bool: True where the step is accepted."""
    statistics: StepStatistics
    """To be merged over micro-batches and ranks, then read with `statistics.metrics()`."""
    global_batch: GlobalBatch
    """As in the core's `Correction`."""

    @property
    def folded(self) -> Tensor:
        """weights × mask: one factor per step. An accepted step has a positive one, so nothing is lost by folding."""
        return self.weights * self.mask


def apply_bypass_mode(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch with log π_old := log π_rollout: the forward pass that recomputes log π_old is saved.

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
    """Weights and mask of every step of a batch of trajectories, with all levels, modes and criteria of the core.

        Δ_t = D·(log π_train − log π_rollout)(t);   weights and mask as `slime_tis.correct` makes them of Δ

    Decoupled, π_train is π_old, and this is called once per global batch: levels, batch
    normalisation and trimming are the whole batch's. In bypass mode the loss calls it, with π_θ;
    under a clipped loss, whose ratio is the importance weight, the weights are then only measured,
    as `--tis-level`, `--tis-mode` and the bounds say.

    Args:
        config: What to correct and how.
        train_log_probs: log π_train, [B, T], or [B] for a single step; every level is then the
            token's.
        rollout_log_probs: log π_rollout, of the same shape.
        timesteps: Of the steps, as the scheduler counts them: of the same shape, or [T] or 0-dim
            where all trajectories share theirs. Adds the mismatch by timestep to what is measured,
            and a synchronisation with the host, which is what finding the different ones takes.
        latent_dims: D, where the log-probs are means over D latent dimensions and bounds are to be
            on the ratio of the sum; 1 takes them as they are.
        global_batch: As in `slime_tis.correct`: what is known of it where micro-batches are
            corrected one by one, and the data-parallel ranks that share it.

    Raises:
        ValueError: if the shapes differ or are neither [B, T] nor [B], naming both.
    """
    check_shapes(STEPS, train_log_probs=train_log_probs, rollout_log_probs=rollout_log_probs)
    shape = train_log_probs.shape
    train, rollout = (
        at_least_float32(x.detach()).view(*shape, *[1] * (2 - x.dim())) * latent_dims
        for x in (train_log_probs, rollout_log_probs)
    )
    every_step = torch.ones_like(train, dtype=torch.bool)
    acting = correct(
        config, train, rollout, every_step, global_batch=global_batch, are_densities=True
    )
    reported: Correction[Tensor] | None = None
    if config.use_rollout_logprobs and not config.use_tis:  # the ratio of the loss is the weight
        reported = correct(weight_report(config), train, rollout, every_step, are_densities=True)
    difference = (train - rollout).abs().to(torch.float64)
    finite = difference < LOG_RATIO_LIMIT
    size = torch.where(finite, difference, 0.0)
    by_timestep = size.new_zeros(0, 3)
    if timesteps is not None:
        distinct, index = (
            _as_steps(timesteps, shape).to(torch.float64).flatten().unique(return_inverse=True)
        )
        columns = torch.stack([size.flatten(), finite.to(torch.float64).flatten()], 1)
        sums = columns.new_zeros(len(distinct), 2).index_add_(0, index, columns)
        by_timestep = torch.cat([distinct[:, None], sums], 1)
    lost = acting.accepted_per_sequence < acting.masked_in_per_sequence
    statistics = StepStatistics(
        core=acting.statistics,
        weights=None if reported is None else reported.statistics,
        sequences=torch.stack([torch.ones_like(lost), lost]).sum(1, dtype=torch.float64),
        highest=torch.cat([size.flatten(), size.new_zeros(1)]).amax(),
        by_timestep=by_timestep,
    )
    weights, mask = acting.weights.view(shape), acting.mask.view(shape)
    return TrajectoryCorrection(weights, mask, statistics, acting.global_batch)


def _as_steps(timesteps: Tensor, shape: torch.Size) -> Tensor:
    shared = timesteps.shape == shape[1:]  # [T] where there are T of them, 0-dim where there is one
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
        found = {name.removeprefix(self._prefix): value for name, value in metrics.items()}
        self._steps += 1
        is_first, mode = self._steps <= FIRST_STEPS, self._config.mode
        rejects_many = found.get("rejected_sequence_fraction", 0.0) > REJECTED_SHARE
        at_bound = (
            not mode.rejects and found.get(f"mis_{mode.high_fraction}", 0.0) > 0.0
        )  # one that rejects has none
        problems = {
            _about_rejection: self._rejecting.observe(rejects_many),
            _about_gap: (
                is_first and found.get("mismatch_log_ppl_abs_diff", 0.0) > LARGEST_LOG_PPL_GAP
            ),
            _about_bound: self._at_bound.observe(at_bound) and is_first,
        }
        new = [about for about, holds in problems.items() if holds and about not in self._reported]
        self._reported.update(new)
        return [about(self._config, found, self._steps) for about in new]


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
