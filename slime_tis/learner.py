"""Scored samples in, optimizer steps and their metrics out.

samples → advantages, per rollout
for every step: batch → old log-probs where needed → correction of the global batch → objective → optimizer step
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from slime_tis.correction import (
    Correction,
    GlobalBatch,
    Ranks,
    RolloutCorrectionConfig,
    correct,
    interpolate_old_log_probs,
    response_slices,
)
from slime_tis.custom import check_metric_names
from slime_tis.errors import NonFiniteGradient
from slime_tis.megatron.batch import TrainingBatch, make_batch, tensors
from slime_tis.megatron.engine import StepResult, TrainingEngine
from slime_tis.megatron.parallel import Parallel
from slime_tis.policy.advantages import advantages
from slime_tis.policy.anchor import anchors_on_recomputed, needs_global_batch, needs_old_log_probs
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.objective import PolicyObjective
from slime_tis.policy.report import step_metrics
from slime_tis.rollout.sample import Sample


@dataclass(kw_only=True)
class Learner:
    """What turns rollouts into optimizer steps."""

    engine: TrainingEngine
    correction: RolloutCorrectionConfig
    policy: PolicyConfig
    steps_per_rollout: int
    leaves_out_samples: bool
    """Whether samples may come without a token to train on, and are then no part of their group's baseline."""
    custom_tis: Callable[..., Any] | None
    """A user's correction function, in slime's contract."""
    args: Namespace
    """The command line as that function gets it."""
    step: int = 0
    """Optimizer steps made so far: the version of the weights."""
    _old_version: int = 0
    """Version of π_old: the weights before the rollout's first step."""
    _old_log_prob_forwards: int = 0

    @property
    def parallel(self) -> Parallel:
        return self.engine.parallel

    @property
    def has_stepped(self) -> bool:
        """Whether a step was made on the rollout that is trained on."""
        return self.step > self._old_version

    def train(self, groups: list[list[Sample]]) -> list[dict[str, float]]:
        """All optimizer steps on one rollout; the metrics of each."""
        samples = [sample for group in groups for sample in group]
        size = len(samples) // self.steps_per_rollout
        self._old_version = self.step
        steps = [self._prepare(samples[start : start + size]) for start in range(0, len(samples), size)]
        kept = None
        if self.policy.reject_before_advantage:
            kept = [keep for step in steps for keep in self._kept(step.batch)]
        elif self.leaves_out_samples:
            kept = [any(sample.loss_mask) for sample in samples]
        per_sample = advantages_of(groups, kept, self.policy)
        rows = []
        for number, step in enumerate(steps):
            mine = per_sample[number * size : (number + 1) * size][self.parallel.data_rank :: self.parallel.data_size]
            rows.append(self._train_step(step.with_advantages(mine)))
            if rows[-1]["train/nonfinite_gradient_steps"]:
                self._check_may_skip(rows)
            self.step += 1
        return rows

    def _check_may_skip(self, rows: list[dict[str, float]]) -> None:
        """Refuses to go on after a step that was not made, unless such steps are to be left out; a collective."""
        finite = self.engine.weights_are_finite()
        if not finite or self.engine.config.nonfinite_gradient == "stop":
            raise NonFiniteGradient(nonfinite_message(self.step + 1, rows[-1], weights_are_finite=finite), rows)

    def _prepare(self, samples: list[Sample]) -> Step:
        """This rank's share of one step's samples, with old and reference log-probs, and its micro-batches."""
        ranks = [samples[rank :: self.parallel.data_size] for rank in range(self.parallel.data_size)]
        partition = self.engine.partitions([[len(sample.token_ids) for sample in mine] for mine in ranks])
        batch = training_batch(ranks[self.parallel.data_rank], self.parallel)
        policy = self.policy
        if needs_old_log_probs(self.correction, self.steps_per_rollout, policy.reject_before_advantage):
            batch = batch.with_local("old_log_probs", self._old_log_probs(batch, partition))
        if policy.use_kl_loss:
            with self.engine.timer("ref_log_probs"):
                batch = batch.with_local("ref_log_probs", self.engine.reference_log_probs(batch, partition))
        return Step(batch=batch, partition=partition)

    def _kept(self, batch: TrainingBatch) -> list[bool]:
        """Which samples of the step have a token left after rejection, in their order, on every rank."""
        kept: list[bool] = []
        if self.parallel.is_last_stage:
            found = self._correct(batch, batch.local["old_log_probs"])
            kept = (found.accepted_per_sequence > 0).tolist()
        shares = self.parallel.from_data_ranks(self.parallel.from_last_stage(kept))
        return [keep for together in zip(*shares, strict=True) for keep in together]

    def _correct(self, batch: TrainingBatch, train_log_probs: list[torch.Tensor]) -> Correction[list[torch.Tensor]]:
        """The correction of the step's global batch, before training on it; a collective of the last stage's ranks."""
        rollout_log_probs, loss_masks = (
            [value.to(self.parallel.backend.device) for value in batch.local[name]]
            for name in ("rollout_log_probs", "loss_masks")
        )
        rank, size = self.parallel.context_rank, self.parallel.context_size
        slices = response_slices(batch.total_lengths, batch.response_lengths, rank, size)
        return correct(
            self.correction,
            train_log_probs,
            rollout_log_probs,
            loss_masks,
            global_batch=GlobalBatch(ranks=self.parallel.ranks.with_slices(slices)),
        )

    def _old_log_probs(self, batch: TrainingBatch, partition: list[list[int]]) -> list[torch.Tensor]:
        self._old_log_prob_forwards += 1
        with self.engine.timer("old_log_probs"):
            return self.engine.log_probs(batch, partition)

    def _train_step(self, step: Step) -> dict[str, float]:
        objective = self._objective(step.batch, step.partition)
        result = self.engine.train_step(step.batch, step.partition, objective)
        with self.engine.timer("metrics"):
            return self._step_metrics(result)

    def _objective(self, batch: TrainingBatch, partition: list[list[int]]) -> PolicyObjective:
        parallel = self.parallel
        known = self._global_batch(batch, partition)
        return PolicyObjective(
            correction=self.correction,
            policy=self.policy,
            recompute_old=anchors_on_recomputed(self.correction, self.steps_per_rollout),
            custom_tis=self.custom_tis,
            args=self.args,
            custom_seed=hash((self.engine.config.seed, self.step, parallel.data_rank)) % 2**32,
            version=self.step,
            context_rank=parallel.context_rank,
            context_size=parallel.context_size,
            context_group=parallel.context_group,
            global_batch=replace(known, ranks=Ranks(context=parallel.ranks.context)),
        )

    def _global_batch(self, batch: TrainingBatch, partition: list[list[int]]) -> GlobalBatch:
        """Mean weight, second-moment limit and adaptive bounds of the step, known before its first micro-batch."""
        correction = self.correction
        if not needs_global_batch(correction):
            return GlobalBatch()
        of_old = anchors_on_recomputed(correction, self.steps_per_rollout) or self.step == self._old_version
        if of_old and "old_log_probs" in batch.local:
            train = batch.local["old_log_probs"]
        else:  # what is weighted follows π_θ, and that moves with every step
            train = self._old_log_probs(batch, partition)
        if not self.parallel.is_last_stage:
            return GlobalBatch()
        if correction.old_logprobs == "interpolate":
            of_rollout, versions = batch.local["rollout_log_probs"], batch.local["weight_versions"]
            train = [
                interpolate_old_log_probs(current, rollout.to(current), self.step, version.to(current.device))
                for current, rollout, version in zip(train, of_rollout, versions, strict=True)
            ]
        return self._correct(batch, train).global_batch

    def _step_metrics(self, result: StepResult) -> dict[str, float]:
        """train/… metrics of a step, on every rank."""
        parallel = self.parallel
        metrics: dict[str, float] = {}
        if parallel.is_last_stage:
            if self.custom_tis is not None:
                names = parallel.from_data_and_context_ranks(sorted(result.report.custom))
                check_metric_names(self.custom_tis, names, "rank")
            report = result.report.all_reduce(parallel.ranks)
            metrics = step_metrics(report, self.correction, self.policy, custom=self.custom_tis is not None)
        metrics = parallel.from_last_stage(metrics)
        metrics |= {
            "grad_norm": result.grad_norm,
            "lr": result.learning_rate,
            "loss_units": float(result.units),
            "old_log_prob_forwards": float(self._old_log_prob_forwards),
            "skipped_steps": float(result.units == 0),
            "nonfinite_gradient_steps": float(not result.is_finite),
        }
        self._old_log_prob_forwards = 0
        return {f"train/{name}": value for name, value in metrics.items()}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step's samples on this data-parallel rank."""

    batch: TrainingBatch
    partition: list[list[int]]
    """The samples of each micro-batch."""

    def with_advantages(self, per_sample: list[float]) -> Step:
        """The same step with every sample's advantage at each of its tokens."""
        per_token = [
            torch.full((len(mask),), advantage, dtype=torch.float64).float()  # beyond float32 it is infinite
            for mask, advantage in zip(self.batch.local["loss_masks"], per_sample, strict=True)
        ]
        return replace(self, batch=self.batch.with_local("advantages", per_token))


def advantages_of(groups: Sequence[Sequence[Sample]], kept: Sequence[bool] | None, policy: PolicyConfig) -> list[float]:
    """The advantage of every sample, group after group.

    Args:
        groups: as many samples of each prompt.
        kept: which samples baselines are made of; None for all.
        policy: the estimator.
    """
    samples = [sample for group in groups for sample in group]

    def grouped(values: Sequence[float] | Sequence[bool]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).view(len(groups), -1)

    rewards = grouped([sample.reward or 0.0 for sample in samples])
    valid = grouped([float(sum(sample.loss_mask)) for sample in samples])
    found = advantages(rewards, valid, policy, None if kept is None else grouped(kept) > 0)
    return found.flatten().tolist()


def nonfinite_message(step: int, metrics: dict[str, float], *, weights_are_finite: bool) -> str:
    """What to say of a step whose gradient or loss is not finite: which, how it shows, and where to look."""
    shown = ", ".join(
        f"{name} {metrics[f'train/{name}']:.3g}" for name in ("loss", "grad_norm", "lr") if f"train/{name}" in metrics
    )
    missing = metrics.get("train/nonfinite_token_fraction", 0.0)
    if not weights_are_finite:
        cause = (
            "The weights themselves are not finite: those of --hf-checkpoint are not, or an earlier step was too long; "
            "lower --lr or --weight-decay."
        )
    else:
        cause = (
            "Usual causes: --lr too large, rewards, --kl-loss-coef or --entropy-coef out of scale, --clip-grad off, or "
            "a custom function; --nonfinite-gradient skip leaves such steps out."
        )
        if missing:
            cause = f"{missing:.1%} of the tokens have a log-prob that is not finite (--nonfinite-policy). {cause}"
    return f"the gradient of step {step} is not finite, and the step was not made ({shown}). {cause}"


def training_batch(samples: list[Sample], parallel: Parallel) -> TrainingBatch:
    """What Megatron trains on: sequences, masks and per-token values. A missing log-prob is NaN."""
    return make_batch(
        [sample.token_ids for sample in samples],
        [len(sample.response_ids) for sample in samples],
        [sample.loss_mask for sample in samples],
        {
            "rollout_log_probs": tensors([sample.rollout_log_probs for sample in samples], torch.float32),
            "weight_versions": tensors([sample.weight_versions for sample in samples], torch.int64),
        },
        parallel.context_rank,
        parallel.context_size,
    )
