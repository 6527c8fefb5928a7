"""Scored samples in, optimizer steps and their metrics out.

samples → advantages, per rollout
for every step: batch → old log-probs where needed → correction of the global batch → policy loss → optimizer step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slime_tis.correction import (
    Correction,
    GlobalBatch,
    Ranks,
    RolloutCorrectionConfig,
    Statistics,
    correct,
    interpolate_old_log_probs,
)
from slime_tis.errors import NonFiniteGradient
from slime_tis.policy.advantages import advantages
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.custom_loss import CustomLoss, ObjectiveFunctions, loss_batch, token_advantages
from slime_tis.policy.custom_tis import CustomTis, CustomTisFunction
from slime_tis.policy.policy_loss import LossStep, policy_loss
from slime_tis.policy.proximal_policy import needs_global_batch, needs_old_log_probs, uses_recomputed_old_policy
from slime_tis.policy.replay_mismatch import MeasuredLoss, mismatch, mismatch_metrics
from slime_tis.policy.step_sums import step_metrics
from slime_tis.trainer.data.sample import Sample, by_rollout
from slime_tis.trainer.engines.local.routing import has_usable_experts, has_usable_weights
from slime_tis.trainer.megatron.batch import TrainingBatch, dealt_together, fixed_partition, make_batch, shard, unshard
from slime_tis.trainer.megatron.engine import StepResult, TrainingEngine
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.megatron.routing_replay import RoutingRecord
from slime_tis.trainer.rollout.metrics import rollout_reward
from slime_tis.trainer.train_dump import RecordedLoss, StepDump, TrainDump

WITH_REPLAY, WITHOUT_REPLAY = "with_replay", "without_replay"
"""Prefixes of the metrics of both passes that `--measure-routing-mismatch` compares."""
DIFFERENCE = "routing_difference"
"""Share of tokens that the training router would send to other experts; that of one layer has its name appended."""


@dataclass(kw_only=True)
class Learner:
    """What turns rollouts into optimizer steps."""

    engine: TrainingEngine
    correction: RolloutCorrectionConfig
    policy: PolicyConfig
    steps_per_rollout: int
    leaves_out_samples: bool
    """Whether samples may come without a token to train on, and are then left out of their group's baseline."""
    custom_tis: CustomTisFunction | None = None
    """A user's correction function."""
    functions: ObjectiveFunctions | None = None
    """The user's functions for advantages and the loss."""
    replays_rollout_routing: bool = False
    """Whether the experts that samples come with are replayed in training."""
    replays_routing_weights: bool = False
    """Whether their combine weights are, too."""
    measure_routing_mismatch: int | None = None
    """Steps between two measurements of the mismatch with and without the rollout's experts; None means none."""
    dump: TrainDump | None = None
    """Gets every step's tokens; on all ranks or none, and used by those that have whole responses' log-probs first."""
    step: int = 0
    """Optimizer steps made so far: the version of the weights."""
    _old_version: int = 0
    """Version of π_old: the weights before the rollout's first step."""
    _old_log_prob_forwards: int = 0

    @property
    def parallel(self) -> Parallel:
        """This process's place in the layout."""
        return self.engine.parallel

    @property
    def _uses_rollout_routing(self) -> bool:
        """Whether the experts that samples come with are replayed, or measured with."""
        return self.replays_rollout_routing or self.measure_routing_mismatch is not None

    @property
    def has_stepped(self) -> bool:
        """Whether a step was made on the rollout that is trained on."""
        return self.step > self._old_version

    def train(
        self, groups: Sequence[Sequence[Sample]], given_advantages: Sequence[float] | None = None
    ) -> list[dict[str, float]]:
        """Makes all optimizer steps on one rollout.

        Args:
            groups: the samples of each prompt.
            given_advantages: of every sample, in place of the estimator's; `normalize_advantages` acts on them.

        Returns:
            The metrics of each step.

        Raises:
            NonFiniteGradient: a gradient is not finite, and such steps are not to be skipped.
        """
        rollouts = [rollout for group in groups for rollout in by_rollout(group)]
        size = len(rollouts) // self.steps_per_rollout
        self._old_version = self.step
        steps = [self._prepare(rollouts[start : start + size]) for start in range(0, len(rollouts), size)]
        accepted = None
        if self.policy.reject_before_advantage:
            accepted = [keep for step in steps for keep in self._accepted(step)]
        elif self.leaves_out_samples:
            accepted = [any(map(any, (sample.loss_mask for sample in rollout))) for rollout in rollouts]
        elif any(sample.failure for rollout in rollouts for sample in rollout):
            accepted = [not all(sample.failure for sample in rollout) for rollout in rollouts]
        advantages = iter(advantages_of(groups, accepted, self.policy, given_advantages))
        per_rollout = [[next(advantages) for _ in rollout] for rollout in rollouts]
        shares = []
        for number, step in enumerate(steps):
            of_step = per_rollout[number * size : (number + 1) * size]
            of_rank = shard(of_step, self.parallel.data_rank, self.parallel.data_size, step.dealt_together)
            shares.append([advantage for rollout in of_rank for advantage in rollout])
        steps = [self._zeros_together(step) for step in self._with_advantages(steps, shares)]
        rows = []
        for step, share in zip(steps, shares, strict=True):
            rows.append(self._train_step(step, share))
            if rows[-1]["train/nonfinite_gradient_steps"]:
                self._check_may_skip(rows)
            self.step += 1
        return rows

    def _with_advantages(self, steps: Sequence[Step], shares: Sequence[Sequence[float]]) -> list[Step]:
        """The steps with the advantages of this rank's samples, or those that the user's function makes of them."""
        steps = [
            replace(step, batch=step.batch.with_advantages(share)) for step, share in zip(steps, shares, strict=True)
        ]
        functions = self.functions
        if functions is None or functions.advantage is None or not self.parallel.is_last_stage:
            return steps
        tokens = [step.batch.responses.to(self.parallel.backend.device) for step in steps]
        data: dict[str, list[Any]] = {}
        for step, of_step, share in zip(steps, tokens, shares, strict=True):
            part = loss_batch(of_step, step.batch.tokens)
            del part["advantages"]
            part |= {
                "tokens": part["unconcat_tokens"],
                "kl": [torch.zeros_like(values) for values in part["rollout_log_probs"]],
                "rewards": list(share),
                "raw_reward": [sample.reward for sample in step.samples],
                "sample_indices": [sample.index for sample in step.samples],
                "metadata": [sample.metadata for sample in step.samples],
            }
            for key, values in part.items():
                data.setdefault(key, []).extend(values)
        seed = hash((self.engine.config.seed, self.step, self.parallel.data_rank)) % 2**32
        advantages_L = token_advantages(
            functions,
            data,
            [length for of_step in tokens for length in of_step.lengths],
            torch.cat([of_step.loss_mask_L for of_step in tokens]),
            seed=seed,
        )
        parts = advantages_L.cpu().split([sum(of_step.lengths) for of_step in tokens])
        return [
            replace(step, batch=step.batch.with_token_advantages(part)) for step, part in zip(steps, parts, strict=True)
        ]

    @property
    def _scales_with_advantages(self) -> bool:
        """Whether the loss of every token is a multiple of its advantage."""
        policy = self.policy
        is_ours = self.custom_tis is None and (self.functions is None or self.functions.loss is None)
        return is_ours and not policy.use_kl_loss and policy.entropy_coef == 0

    def _zeros_together(self, step: Step) -> Step:
        """The step with groups whose advantages are all zero in micro-batches of their own, as far as these go.

        Such micro-batches have no backward pass. Only micro-batches of so many samples are made anew, and none whose
        experts are recorded in their order.
        """
        engine, size = self.engine, self.engine.config.micro_batch_size
        makes_anew = engine.token_budget is None and size is not None and step.routing_record is None
        if not (makes_anew and self._scales_with_advantages and engine.skips_backward):
            return step
        tokens = step.batch.responses
        assert tokens.advantages_L is not None
        counts = [bool(part.any()) for part in tokens.advantages_L.split(list(tokens.lengths))]
        group_of = dict(zip(step.rollouts, (sample.group_index for sample in step.samples), strict=True))
        samples: dict[int, list[int]] = {}
        counting = set()
        for place, rollout in enumerate(step.rollouts):
            samples.setdefault(rollout, []).append(place)
            if counts[place]:
                counting.add(group_of[rollout])
        order = sorted(samples, key=lambda rollout: group_of[rollout] not in counting)  # the others stay in their order
        partition = [
            sorted(place for index in chosen for place in samples[order[index]])
            for chosen in fixed_partition(len(order), size)
        ]
        return replace(step, partition=partition)

    def _check_may_skip(self, rows: list[dict[str, float]]) -> None:
        """Refuses to go on after a step that was not made, unless such steps are to be left out; a collective."""
        finite = self.engine.weights_are_finite()
        if not finite or self.engine.config.nonfinite_gradient == "stop":
            raise NonFiniteGradient(nonfinite_message(self.step + 1, rows[-1], weights_are_finite=finite), rows)

    def _prepare(self, rollouts: Sequence[Sequence[Sample]]) -> Step:
        """This rank's share of one step's rollouts, with old and reference log-probs, and its micro-batches.

        The segments of a rollout are in the same micro-batch, where their tokens are averaged over together.
        """
        size = self.parallel.data_size
        together = dealt_together([one[0].group_index for one in rollouts], size) if self.engine.shares_prompts else 1
        shards = [shard(rollouts, rank, size, together) for rank in range(size)]
        of_ranks = [[sample for rollout in of_rank for sample in rollout] for of_rank in shards]
        numbers = [[number for number, rollout in enumerate(of_rank) for _ in rollout] for of_rank in shards]
        samples, of_each = of_ranks[self.parallel.data_rank], numbers[self.parallel.data_rank]
        micro_batches = self.engine.micro_batches(
            [[sample.tokens for sample in of_rank] for of_rank in of_ranks],
            [[sample.response_length for sample in of_rank] for of_rank in of_ranks],
            numbers,
        )
        partition = micro_batches.partition
        recorded, missing = self._with_routing(samples, of_each)
        batch = recorded if self.replays_rollout_routing else recorded.with_routing(None, None)
        record: RoutingRecord | None = [] if self.engine.config.use_routing_replay else None
        policy = self.policy
        if needs_old_log_probs(
            self.correction, self.steps_per_rollout, policy.reject_before_advantage, policy.has_own_objective
        ):
            batch = batch.with_old_log_probs(self._old_log_probs(batch, partition, record=record))
        if self.policy.use_kl_loss:
            with self.engine.timer("ref_log_probs"):
                batch = batch.with_ref_log_probs(self.engine.reference_log_probs(batch, partition))
        return Step(
            samples=samples,
            rollouts=of_each,
            dealt_together=together,
            batch=batch,
            recorded=recorded,
            partition=partition,
            load=micro_batches.load,
            routing_record=record,
            samples_without_routing=missing,
        )

    def _with_routing(self, samples: Sequence[Sample], rollouts: Sequence[int]) -> tuple[TrainingBatch, int]:
        """The batch of this rank's samples with their experts, and how many samples of all ranks have none of use."""
        batch, sizes = training_batch(samples, self.parallel, rollouts), self.engine.routing.sizes
        if not self._uses_rollout_routing or sizes is None:
            return batch, 0
        usable = [has_usable_experts(sample, sizes) for sample in samples]
        weights: list[Tensor | None] | None = None
        if self.replays_routing_weights:
            usable = [found and has_usable_weights(sample) for found, sample in zip(usable, samples, strict=True)]
            weights = [
                sample.rollout_routing_weights if found else None for found, sample in zip(usable, samples, strict=True)
            ]
        experts = [
            sample.rollout_routed_experts if found else None for found, sample in zip(usable, samples, strict=True)
        ]
        return batch.with_routing(experts, weights), sum(self.parallel.all_gather_data(usable.count(False)))

    def _accepted(self, step: Step) -> list[bool]:
        """Which rollouts of the step have a token left after rejection, in their order, on every rank."""
        accepted: list[bool] = []
        if self.parallel.is_last_stage:
            old_log_probs_L = step.batch.responses.old_log_probs_L
            assert old_log_probs_L is not None  # made in _prepare, under the option that leads here
            accepted = [False] * (max(step.rollouts) + 1)
            left = (self._correct(step.batch, old_log_probs_L).accepted_per_sequence > 0).tolist()
            for rollout, has_some in zip(step.rollouts, left, strict=True):
                accepted[rollout] |= has_some
        of_ranks = self.parallel.all_gather_data(self.parallel.broadcast_from_last_stage(accepted))
        return unshard(of_ranks, step.dealt_together)

    def _correct(self, batch: TrainingBatch, train_log_probs_L: Tensor) -> Correction[Tensor]:
        """The correction of the step's global batch, before training on it; a collective of the last stage's ranks."""
        tokens = batch.responses.to(self.parallel.backend.device)
        return correct(
            self.correction,
            train_log_probs_L,
            tokens.rollout_log_probs_L,
            tokens.loss_mask_L,
            lengths=tokens.lengths,
            global_batch=GlobalBatch(ranks=self.parallel.ranks.with_slices(tokens.slices)),
        )

    def _old_log_probs(
        self,
        batch: TrainingBatch,
        partition: list[list[int]],
        *,
        record: RoutingRecord | None = None,
        source: RoutingRecord | None = None,
    ) -> Tensor:
        self._old_log_prob_forwards += 1
        with self.engine.timer("old_log_probs"):
            return self.engine.log_probs(batch, partition, record=record, source=source)

    def _train_step(self, step: Step, advantages: Sequence[float]) -> dict[str, float]:
        """One optimizer step with this rank's advantages; its metrics as train/NAME."""
        batch = step.batch
        known, custom, custom_loss = self._global_batch(batch, step), self._custom_tis(), self._custom_loss()
        context = LossStep(
            correction=self.correction,
            policy=self.policy,
            uses_recomputed_old_policy=uses_recomputed_old_policy(self.correction, self.steps_per_rollout),
            version=self.step,
            global_batch=replace(known, ranks=Ranks(context=self.parallel.ranks.context)),
            counts=self.parallel.context_rank == 0,
            custom=custom,
            custom_loss=custom_loss,
            functions=self.functions,
        )
        every = self.measure_routing_mismatch
        measures = every is not None and self.step % every == 0
        measured = self._mismatch_otherwise(step) if measures else {}
        loss = MeasuredLoss(context) if measures else partial(policy_loss, step=context)
        recorded = RecordedLoss(loss)
        used = loss if self.dump is None else recorded
        result = self.engine.train_step(
            batch,
            step.partition,
            used,
            source=step.routing_record,
            scales_with_advantages=self._scales_with_advantages,
        )
        self._dump(step, advantages, recorded, known)
        with self.engine.timer("metrics"):
            routing = self.engine.routing.metrics()
            if self._uses_rollout_routing:
                routing["routing_replay_missing"] = float(step.samples_without_routing)
            if isinstance(loss, MeasuredLoss):
                trained = WITH_REPLAY if self.replays_rollout_routing else WITHOUT_REPLAY
                measured |= self._mismatch(trained, loss.statistics if self.parallel.is_last_stage else None)
            metrics = self._step_metrics(result, custom or custom_loss) | train_metrics(routing | measured)
        return metrics if step.load is None else metrics | {"perf/micro_batch_load": step.load}

    def _dump(self, step: Step, advantages: Sequence[float], recorded: RecordedLoss, known: GlobalBatch) -> None:
        """Hands what the loss made of the step's tokens to the dump, whole responses on one rank of each data share.

        The context-parallel ranks put their slices together, those of the tensor-parallel ranks being the same.
        """
        parallel = self.parallel
        if self.dump is None or not parallel.is_last_stage or parallel.tensor_rank > 0:
            return
        with self.engine.timer("train_dump"):
            tokens = step.batch.responses
            record_L = recorded.in_order(step.partition, tokens.lengths)
            record_N = parallel.ranks.over_context(tokens.slices.scatter(record_L))
            if parallel.context_rank == 0:
                self.dump.add(
                    StepDump(
                        samples=step.samples,
                        advantages=advantages,
                        record_N=record_N.cpu(),
                        step=self.step,
                        global_batch=replace(known, ranks=Ranks()),
                    )
                )

    def _mismatch_otherwise(self, step: Step) -> dict[str, float]:
        """The mismatch of what training does not do, replay or no replay, by one more forward pass.

        Returns:
            Where training replays the rollout's experts, without_replay/NAME with the difference of routing; else
            with_replay/NAME, and the difference of routing as a run with replay has it.
        """
        replays = not self.replays_rollout_routing
        name = WITH_REPLAY if replays else WITHOUT_REPLAY
        with self.engine.timer(name):
            log_probs_L = self.engine.log_probs(
                step.recorded, step.partition, replays_routing=replays, counts_routing=True
            )
            statistics = None
            if self.parallel.is_last_stage:
                tokens = step.recorded.responses.to(self.parallel.backend.device)
                statistics = mismatch(tokens, log_probs_L, self.parallel.ranks)
            found = self._mismatch(name, statistics)
            counted = self.engine.routing.metrics()
        differences = {key: value for key, value in counted.items() if key.startswith(DIFFERENCE)}
        if replays:
            return found | differences
        return found | {f"{name}/{DIFFERENCE}": value for key, value in differences.items() if key == DIFFERENCE}

    def _mismatch(self, prefix: str, statistics: Statistics | None) -> dict[str, float]:
        """Metrics of the last stage's statistics, on every rank, as PREFIX/NAME."""
        found = {} if statistics is None else mismatch_metrics(statistics.all_reduce(self.parallel.ranks))
        return {f"{prefix}/{name}": value for name, value in self.parallel.broadcast_from_last_stage(found).items()}

    def _custom_loss(self) -> CustomLoss | None:
        """The user's loss for the micro-batches of this step."""
        if self.functions is None or self.functions.loss is None:
            return None
        seed = hash((self.engine.config.seed, self.step, self.parallel.data_rank)) % 2**32
        return CustomLoss(function=self.functions.loss, args=self.functions.args, seed=seed)

    def _custom_tis(self) -> CustomTis | None:
        """The user's function for the micro-batches of this step."""
        if self.custom_tis is None:
            return None
        seed = hash((self.engine.config.seed, self.step, self.parallel.data_rank)) % 2**32
        return CustomTis(function=self.custom_tis, seed=seed, context_group=self.parallel.context_group)

    def _global_batch(self, batch: TrainingBatch, step: Step) -> GlobalBatch:
        """Mean weight, second-moment limit and adaptive bounds of the step, known before its first micro-batch."""
        correction, tokens = self.correction, batch.responses
        if not needs_global_batch(correction):
            return GlobalBatch()
        of_old = uses_recomputed_old_policy(correction, self.steps_per_rollout) or not self.has_stepped
        if of_old and tokens.old_log_probs_L is not None:
            train_L = tokens.old_log_probs_L
        else:  # what is weighted follows π_θ, and that moves with every step
            train_L = self._old_log_probs(batch, step.partition, source=step.routing_record)
        if not self.parallel.is_last_stage:
            return GlobalBatch()
        if correction.old_logprobs == "interpolate":
            train_L = interpolate_old_log_probs(
                train_L, tokens.rollout_log_probs_L.to(train_L), self.step, tokens.weight_versions_L.to(train_L.device)
            )
        return self._correct(batch, train_L).global_batch

    def _step_metrics(self, result: StepResult, custom: CustomTis | CustomLoss | None) -> dict[str, float]:
        """train/… metrics of a step, on every rank."""
        parallel = self.parallel
        metrics: dict[str, float] = {}
        if result.sums is not None:  # on the last pipeline stage
            if custom is not None:
                custom.check_ranks(parallel.all_gather_data_and_context(sorted(result.sums.custom)))
            metrics = step_metrics(result.sums.all_reduce(parallel.ranks), self.correction, self.policy)
        metrics = parallel.broadcast_from_last_stage(metrics)
        metrics |= {
            "grad_norm": result.grad_norm,
            "lr": result.learning_rate,
            "loss_denominator": float(result.loss_denominator),
            "old_log_prob_forwards": float(self._old_log_prob_forwards),
            "skipped_steps": float(result.loss_denominator == 0),
            "nonfinite_gradient_steps": float(not result.is_finite),
        }
        self._old_log_prob_forwards = 0
        return train_metrics(metrics)


def train_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The same under their names in the log."""
    return {f"train/{name}": value for name, value in metrics.items()}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step's samples on this data-parallel rank."""

    samples: Sequence[Sample]
    rollouts: Sequence[int]
    """Number of the rollout that each sample is a segment of."""
    dealt_together: int
    """Consecutive rollouts of the step that are on one rank."""
    batch: TrainingBatch
    """The same samples as tensors."""
    recorded: TrainingBatch
    """These with the rollout's experts, whether or not training replays them."""
    partition: list[list[int]]
    """The samples of each micro-batch."""
    load: float | None
    """Tokens of the largest micro-batch of all ranks, as a share of the token budget; None without one."""
    routing_record: RoutingRecord | None
    """Experts of the pass for old log-probs, to be replayed in training; None without `--use-routing-replay`."""
    samples_without_routing: int
    """Samples of all ranks that have no experts to replay, or none that are possible."""


def advantages_of(
    groups: Sequence[Sequence[Sample]],
    accepted: Sequence[bool] | None,
    policy: PolicyConfig,
    given: Sequence[float] | None = None,
) -> list[float]:
    """The advantage of every sample, group after group; all segments of a rollout have that of the rollout.

    Args:
        groups: as many rollouts of each prompt; the rewards of a rollout's segments are added.
        accepted: which rollouts baselines are made of; None for all.
        policy: the estimator.
        given: advantages in place of the estimator's, one for each sample.
    """
    rollouts = [rollout for group in groups for rollout in by_rollout(group)]
    units = rollouts if given is None else [[sample] for rollout in rollouts for sample in rollout]
    if given is not None and accepted is not None:
        accepted = [keep for keep, rollout in zip(accepted, rollouts, strict=True) for _ in rollout]

    def grouped(values: Sequence[float] | Sequence[bool]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).view(len(groups) if given is None else 1, -1)

    found = advantages(
        grouped([rollout_reward(unit) for unit in units]),
        grouped([float(sum(sum(sample.loss_mask) for sample in unit)) for unit in units]),
        policy,
        None if accepted is None else grouped(accepted) > 0,
        None if given is None else grouped(given),
    )
    per_unit: list[float] = found.flatten().tolist()
    return [value for value, unit in zip(per_unit, units, strict=True) for _ in unit]


def nonfinite_message(step: int, metrics: dict[str, float], *, weights_are_finite: bool) -> str:
    """The error message for a step whose gradient or loss is not finite: which, how it shows, and usual causes."""
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


def training_batch(
    samples: Sequence[Sample], parallel: Parallel, rollouts: Sequence[int] | None = None
) -> TrainingBatch:
    """What Megatron trains on: sequences, masks and per-token values of this rank's samples.

    Args:
        samples: of this rank.
        parallel: its place in the layout.
        rollouts: number of the rollout that each sample is a segment of; None where each is a rollout of its own.
    """
    return make_batch(
        [sample.tokens for sample in samples],
        [sample.loss_mask for sample in samples],
        [sample.rollout_log_probs for sample in samples],
        [sample.weight_versions for sample in samples],
        parallel.context_rank,
        parallel.context_size,
        sampling_masks=[sample.sampling_mask for sample in samples],
        rollouts=rollouts,
    )
