"""Turns scored samples into optimizer steps and their metrics.

samples → advantages, once per rollout for each step: batch → old log-probs if needed → correction
of the global batch → policy loss → optimizer step
"""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import chain
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
from slime_tis.policy.config import (
    COVARIANCE_LOSSES,
    PolicyConfig,
    needs_global_batch,
    needs_old_log_probs,
    uses_recomputed_old_policy,
)
from slime_tis.policy.custom_loss import CustomLoss, CustomTis, ObjectiveFunctions, token_advantages
from slime_tis.policy.loss_inputs import LossInputs, LossStep
from slime_tis.policy.losses import CovarianceLimit, covariance_limit
from slime_tis.policy.policy_loss import LossOutputs, policy_loss
from slime_tis.policy.step_sums import StepSums, mismatch, step_metrics
from slime_tis.policy.token_record import TokenRecord
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.sample import Sample, by_rollout
from slime_tis.trainer.engines.local.routing import has_usable_experts, has_usable_weights
from slime_tis.trainer.megatron.batch import (
    TrainingBatch,
    fixed_partition,
    shard,
    unshard,
)
from slime_tis.trainer.megatron.micro_batches import in_sample_order
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.megatron.routing_replay import RoutingRecord, receive_routing
from slime_tis.trainer.megatron.training_engine import Loss, StepResult, TrainingEngine
from slime_tis.trainer.on_policy_gate import OnPolicyGate
from slime_tis.trainer.routing_mismatch import mismatch_with_other_routing, named_mismatch
from slime_tis.trainer.step_assignment import (
    assigned_together,
    in_order_of_sampling,
    isolate_zero_advantage_groups,
    order_of_rollouts,
    workload,
)
from slime_tis.trainer.step_inputs import (
    Step,
    advantages_of,
    training_batch,
    user_batch,
    with_token_baseline,
    with_token_rewards,
)
from slime_tis.trainer.token_gradients import TokenGradients
from slime_tis.trainer.train_dump import StepDump, TrainDump
from slime_tis.user_functions.tensors import check_metric_names


@dataclass(kw_only=True)
class Learner:
    """Trains the policy on rollouts."""

    engine: TrainingEngine
    correction: RolloutCorrectionConfig
    policy: PolicyConfig
    rollout: RolloutConfig
    steps_per_rollout: int
    custom_tis: Callable[..., Any] | None = None
    functions: ObjectiveFunctions = field(
        default_factory=lambda: ObjectiveFunctions(args=Namespace())
    )
    gate: OnPolicyGate | None = None
    """Stops the run if a log-prob differs from the rollout engine's; None without
    --true-on-policy."""
    dump: TrainDump | None = None
    """Records the tokens of every step; set on all ranks or on none."""
    after_step: Callable[[], None] = lambda: None
    """Called after each optimizer step: from then on the rollout cannot be abandoned."""
    step: int = 0
    """Optimizer steps made so far, which is the version of the weights."""
    _old_version: int = 0
    """Version of π_old: the weights before the rollout's first step."""
    _old_log_prob_forwards: int = 0
    _token_at_fault: str = ""
    """Sentence about the token at which the last non-finite gradient began."""

    @property
    def parallel(self) -> Parallel:
        """The parallel layout."""
        return self.engine.parallel

    def train(
        self, groups: Sequence[Sequence[Sample]], user_advantages: Sequence[float] | None = None
    ) -> list[dict[str, float]]:
        """Makes all optimizer steps on one rollout, and returns their metrics."""
        rollouts = list(chain.from_iterable(map(by_rollout, groups)))
        self._old_version = self.step
        steps, order = self._prepare_steps(rollouts)
        accepted = self._accepted_rollouts([rollouts[number] for number in order], steps)
        if accepted is not None:
            accepted = in_order_of_sampling(accepted, order)
        advantages = advantages_of(groups, accepted, self.policy, user_advantages)
        local_advantages = self._local_advantages(advantages, rollouts, order, steps)
        steps = self._with_all_advantages(groups, steps, local_advantages)
        if self._scales_with_advantages:
            steps = [isolate_zero_advantage_groups(self.engine, step) for step in steps]
        rows: list[dict[str, float]] = []
        for step, sample_advantages in zip(steps, local_advantages, strict=True):
            rows.append(self._train_step(step, sample_advantages))
            self._check_gradient(rows)
            self.step += 1
            self.after_step()
        return rows

    def _prepare_steps(self, rollouts: Sequence[Sequence[Sample]]) -> tuple[list[Step], list[int]]:
        """Prepares this rank's share of all steps on the rollouts.

        All steps are prepared before the first one is made, so that all have the same π_old.

        Returns:
            The steps, and the order in which the ranks got the rollouts.
        """
        size = len(rollouts) // self.steps_per_rollout
        steps = []
        order: list[int] = []
        for start in range(0, len(rollouts), size):
            in_step = rollouts[start : start + size]
            together = assigned_together(self.engine, in_step)
            step_order = order_of_rollouts(self.engine, in_step, together)
            order += [start + number for number in step_order]
            steps.append(self._prepare([in_step[number] for number in step_order], together))
        return steps, order

    def _local_advantages(
        self,
        advantages: Sequence[float],
        rollouts: Sequence[Sequence[Sample]],
        order: Sequence[int],
        steps: Sequence[Step],
    ) -> list[list[float]]:
        """Returns the advantages of this rank's samples, step by step.

        Args:
            advantages: One for each sample of all ranks, in the order of sampling.
            rollouts: The rollouts, in the order of sampling.
            order: The order in which the ranks got the rollouts.
            steps: This rank's share of every step.
        """
        size = len(rollouts) // self.steps_per_rollout
        values = iter(advantages)
        in_sampled_order = []
        for rollout in rollouts:
            in_sampled_order.append([next(values) for _ in rollout])
        per_rollout = [in_sampled_order[number] for number in order]
        local_advantages = []
        for number, step in enumerate(steps):
            local = shard(
                per_rollout[number * size : (number + 1) * size],
                self.parallel.data_rank,
                self.parallel.data_size,
                step.assigned_together,
            )
            local_advantages.append(list(chain.from_iterable(local)))
        return local_advantages

    def _with_all_advantages(
        self,
        groups: Sequence[Sequence[Sample]],
        steps: Sequence[Step],
        advantages: Sequence[Sequence[float]],
    ) -> list[Step]:
        """Returns the steps with token advantages by the policy's estimator."""
        steps = self._with_advantages(steps, advantages)
        # Only the last stage computes the loss, and only it has the log-probs of the tokens.
        if not self.parallel.is_last_stage:
            return steps
        if self.policy.has_token_baseline:
            numbers = {group[0].group_index: number for number, group in enumerate(groups)}
            corrections = [self._mask_and_weights(step.batch) for step in steps]
            steps = with_token_baseline(
                steps, advantages, corrections, numbers, self.parallel.ranks
            )
        if self.policy.has_token_rewards:
            steps = with_token_rewards(
                steps,
                advantages,
                self.policy,
                self.parallel,
                is_bypassed=self.correction.use_rollout_logprobs,
            )
        return steps

    def _check_gradient(self, rows: list[dict[str, float]]) -> None:
        """Raises NonFiniteGradient if the last step's gradient must end the run."""
        if not rows[-1]["train/nonfinite_gradient_steps"]:
            return
        # Skipping cannot help if the weights themselves are not finite.
        is_finite = self.engine.weights_are_finite()
        if not is_finite or self.engine.config.nonfinite_gradient == "stop":
            message = nonfinite_message(self.step + 1, rows[-1], is_finite, self._token_at_fault)
            raise NonFiniteGradient(message, rows)

    def update_reference(self, rollout_id: int) -> None:
        """Makes the policy the reference policy, if that is due after `rollout_id` rollouts.

        Source: slime, backends/megatron_utils/actor.py, --ref-update-interval.
        """
        interval = self.policy.ref_update_interval
        if interval is not None and rollout_id % interval == 0:
            self.engine.update_reference()

    def _accepted_rollouts(
        self, rollouts: Sequence[Sequence[Sample]], steps: Sequence[Step]
    ) -> list[bool] | None:
        """Returns which rollouts count in their group's baseline; None if all do."""
        if self.policy.reject_before_advantage:
            accepted: list[bool] = []
            for step in steps:
                accepted += self._accepted(step)
            return accepted
        if self.rollout.max_weight_staleness is not None:
            # Stale samples have no trained token.
            is_trained = []
            for rollout in rollouts:
                is_trained.append(any(any(sample.loss_mask) for sample in rollout))
            return is_trained
        counts = []
        for rollout in rollouts:
            counts.append(not all(sample.failure for sample in rollout))
        if all(counts):
            return None
        return counts

    def score(self, samples: Sequence[Sample], size: int = 1) -> tuple[TrainingBatch, Tensor]:
        """Returns all samples as a batch of every data-parallel rank, and their log-probs [L].

        The log-probs are those of training. A micro-batch has `size` samples.
        """
        batch, _ = self._with_routing([samples] * self.parallel.data_size, range(len(samples)))
        if not self.rollout.use_rollout_routing_replay:
            batch = batch.with_routing(None, None)
        return batch, self.engine.log_probs(batch, fixed_partition(len(samples), size))

    def _with_advantages(
        self, steps: Sequence[Step], advantages: Sequence[Sequence[float]]
    ) -> list[Step]:
        """Returns the steps with token advantages, computed by the user's function if set."""
        steps = [
            replace(step, batch=step.batch.with_advantages(values))
            for step, values in zip(steps, advantages, strict=True)
        ]
        functions = self.functions
        if functions.advantage is None or not self.parallel.is_last_stage:
            return steps
        tokens = [step.batch.responses.to(self.parallel.device) for step in steps]
        # The function sees the samples of all steps at once, as slime's does.
        data: dict[str, list[Any]] = {}
        for step, step_tokens, values in zip(steps, tokens, advantages, strict=True):
            for key, column in user_batch(step, step_tokens, values).items():
                data.setdefault(key, []).extend(column)
        lengths: list[int] = []
        for step_tokens in tokens:
            lengths += step_tokens.lengths
        mask_L = torch.cat([step_tokens.loss_mask_L for step_tokens in tokens])
        advantages_L = token_advantages(functions, data, lengths, mask_L, seed=self._seed())
        tokens_per_step = [sum(step_tokens.lengths) for step_tokens in tokens]
        per_step = advantages_L.cpu().split(tokens_per_step)
        return [
            replace(step, batch=step.batch.with_token_values(advantages_L=values))
            for step, values in zip(steps, per_step, strict=True)
        ]

    def _mask_and_weights(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Returns the tokens that have advantages, and their loss weights under π_old, [L] each."""
        config = self.correction
        mask_L = batch.responses.loss_mask_L.to(self.parallel.device)
        weights_L = torch.ones_like(mask_L)
        if config.use_tis or self.policy.reject_before_advantage:
            assert batch.responses.old_log_probs_L is not None
            correction = self._correct(batch, batch.responses.old_log_probs_L)
            if self.policy.reject_before_advantage:
                mask_L = correction.mask
            # A user's correction computes other weights, which are unknown before the loss.
            if config.use_tis and self.custom_tis is None:
                weights_L = correction.weights
        return mask_L, weights_L

    def _seed(self) -> int:
        """Returns the seed of user functions, the same in a resumed run."""
        # Python randomizes the hashes of texts, not those of integers.
        return hash((self.engine.config.seed, self.step, self.parallel.data_rank)) % 2**32

    @property
    def _scales_with_advantages(self) -> bool:
        """Whether a token with advantage 0 has no gradient, for every log-prob."""
        policy = self.policy
        is_built_in = self.custom_tis is None and self.functions.loss is None
        is_scaled = is_built_in and self.correction.policy_loss not in ("dro", "kl_cov")
        return (
            is_scaled
            and not policy.use_kl_loss
            and policy.entropy_coef == policy.rollout_pull_coef == 0
        )

    def _prepare(self, rollouts: Sequence[Sequence[Sample]], together: int) -> Step:
        """Prepares this rank's share of a step: micro-batches, old and reference log-probs.

        Args:
            rollouts: The step's rollouts, in the order in which they are dealt to the ranks.
            together: Number of consecutive rollouts that go to the same rank.
        """
        size = self.parallel.data_size
        shards = [shard(rollouts, rank, size, together) for rank in range(size)]
        # Every rank plans the micro-batches of all ranks, so that their number is equal.
        rank_samples: list[list[Sample]] = []
        rank_numbers: list[list[int]] = []
        rank_tokens = []
        rank_lengths = []
        for rank_rollouts in shards:
            samples: list[Sample] = []
            numbers: list[int] = []
            for number, rollout in enumerate(rank_rollouts):
                samples += rollout
                numbers += [number] * len(rollout)
            rank_samples.append(samples)
            rank_numbers.append(numbers)
            rank_tokens.append([sample.tokens for sample in samples])
            rank_lengths.append([sample.response_length for sample in samples])
        partition, load = self.engine.micro_batches(rank_tokens, rank_lengths, rank_numbers)
        rank_load = None
        if size > 1:
            workloads = [workload(self.engine, rank_rollouts) for rank_rollouts in shards]
            rank_load = max(workloads) * size / sum(workloads)
        samples = rank_samples[self.parallel.data_rank]
        numbers = rank_numbers[self.parallel.data_rank]
        recorded, missing = self._with_routing(rank_samples, numbers)
        batch = recorded
        if not self.rollout.use_rollout_routing_replay:
            batch = recorded.with_routing(None, None)
        record: RoutingRecord | None = None
        if self.engine.config.use_routing_replay:
            record = []
        if needs_old_log_probs(self.correction, self.steps_per_rollout, self.policy):
            batch = self._with_old_policy(batch, partition, record)
        if self.policy.needs_reference:
            with self.engine.timer("ref_log_probs"):
                reference_L = self.engine.reference_log_probs(batch, partition)
                batch = batch.with_token_values(ref_log_probs_L=reference_L)
        return Step(
            samples=samples,
            rollouts=numbers,
            assigned_together=together,
            batch=batch,
            recorded=recorded,
            partition=partition,
            load=load,
            rank_load=rank_load,
            routing_record=record,
            samples_without_routing=missing,
        )

    def _with_routing(
        self, shares: Sequence[Sequence[Sample]], rollouts: Sequence[int]
    ) -> tuple[TrainingBatch, int]:
        """Returns the batch of this rank's share with its experts.

        Also returns the number of samples without experts on all ranks.
        """
        samples = shares[self.parallel.data_rank]
        batch = training_batch(samples, self.parallel, rollouts)
        sizes = self.engine.routing.sizes
        if not self.rollout.records_routed_experts or sizes is None:
            return batch, 0
        receive_routing(self.parallel, shares)
        replays_weights = self.rollout.routing_replay_weights
        experts: list[Tensor | None] = []
        weights: list[Tensor | None] = []
        local_missing = 0
        for sample in samples:
            is_usable = has_usable_experts(sample, sizes)
            if replays_weights:
                is_usable = is_usable and has_usable_weights(sample)
            if is_usable:
                experts.append(sample.rollout_routed_experts)
                weights.append(sample.rollout_routing_weights)
            else:
                # Training routes the tokens of this sample itself.
                experts.append(None)
                weights.append(None)
                local_missing += 1
        missing = sum(self.parallel.all_gather_data(local_missing))
        if not replays_weights:
            return batch.with_routing(experts, None), missing
        return batch.with_routing(experts, weights), missing

    def _accepted(self, step: Step) -> list[bool]:
        """Returns which rollouts of a step, of all ranks, have an accepted token."""
        accepted: list[bool] = []
        if self.parallel.is_last_stage:
            old_log_probs_L = step.batch.responses.old_log_probs_L
            assert old_log_probs_L is not None  # computed in _prepare for --reject-before-advantage
            accepted = [False] * (max(step.rollouts) + 1)
            correction = self._correct(step.batch, old_log_probs_L)
            counts = correction.accepted_per_sequence.tolist()
            for rollout, count in zip(step.rollouts, counts, strict=True):
                accepted[rollout] |= count > 0
        accepted = self.parallel.broadcast_from_last_stage(accepted)
        gathered = self.parallel.all_gather_data(accepted)
        return unshard(gathered, step.assigned_together)

    def _correct(self, batch: TrainingBatch, train_log_probs_L: Tensor) -> Correction[Tensor]:
        """Returns the correction of a step's samples on this rank, with statistics of all ranks."""
        tokens = batch.responses.to(self.parallel.device)
        return correct(
            self.correction,
            train_log_probs_L,
            tokens.rollout_log_probs_L,
            tokens.loss_mask_L,
            lengths=tokens.lengths,
            advantages=tokens.advantages_L,
            global_batch=GlobalBatch(ranks=self.parallel.ranks.with_slices(tokens.slices)),
        )

    def _with_old_policy(
        self, batch: TrainingBatch, partition: list[list[int]], record: RoutingRecord | None
    ) -> TrainingBatch:
        """Returns the batch with log π_old, and the values of the same pass that options need."""
        policy = self.policy
        names = ["old_log_probs_L"]
        if policy.use_rollout_entropy:
            names.append("old_entropy_L")
        if policy.has_token_baseline:
            names.append("sum_pi_squared_L")
        values = self._old_log_probs(
            batch,
            partition,
            record=record,
            gives_entropy=policy.use_rollout_entropy,
            sums_squares=policy.has_token_baseline,
        )
        columns = values.view(-1, len(names)).unbind(1)
        return batch.with_token_values(**dict(zip(names, columns, strict=True)))

    def _old_log_probs(
        self,
        batch: TrainingBatch,
        partition: list[list[int]],
        **options: Any,
    ) -> Tensor:
        """Returns log-probs of a forward pass without gradient, and counts the pass."""
        self._old_log_prob_forwards += 1
        with self.engine.timer("old_log_probs"):
            return self.engine.log_probs(batch, partition, **options)

    def _custom_tis(self) -> CustomTis | None:
        """Returns the calls of the user's correction in the next step; None without a function."""
        if self.custom_tis is None:
            return None
        return CustomTis(
            function=self.custom_tis,
            args=self.functions.args,
            seed=self._seed(),
            context_group=self.parallel.context_group,
        )

    def _train_step(self, step: Step, advantages: Sequence[float]) -> dict[str, float]:
        """Makes one optimizer step and returns its metrics."""
        batch = step.batch
        global_batch = self._global_batch(batch, step)
        context = self._loss_step(batch, global_batch)
        interval = self.rollout.measure_routing_mismatch
        measures = interval is not None and self.step % interval == 0
        replays = self.rollout.use_rollout_routing_replay
        measured: dict[str, float] = {}
        if measures:
            measured = mismatch_with_other_routing(self.engine, step, replays=not replays)
        records: list[TokenRecord] = []
        trained_mismatch: list[Statistics] = []
        gradients = TokenGradients()

        def loss(inputs: LossInputs) -> LossOutputs:
            if measures:
                ranks = context.global_batch.ranks
                trained_mismatch.append(mismatch(inputs.tokens, inputs.log_probs_L.detach(), ranks))
            gradients.watch(inputs)
            outputs = policy_loss(inputs, context)
            if self.dump is not None:
                records.append(outputs.record)
            return outputs

        result = self.engine.train_step(
            batch,
            step.partition,
            self._watched(loss),
            source=step.routing_record,
            scales_with_advantages=self._scales_with_advantages,
            before_step=partial(self._check_log_probs, step),
            rate_scale=self._rate_scale,
        )
        if not result.is_finite:
            self._token_at_fault = gradients.first_nonfinite(step, self.parallel)
        self._dump(step, advantages, records, global_batch)
        with self.engine.timer("metrics"):
            routing = self.engine.routing.metrics()
            if self.rollout.records_routed_experts:
                routing["routing_replay_missing"] = float(step.samples_without_routing)
            if measures:
                statistics = None
                if self.parallel.is_last_stage:
                    statistics = reduce(Statistics.merge, trained_mismatch)
                measured |= named_mismatch(self.parallel, statistics, replays=replays)
            metrics = self._step_metrics(result, context.custom or context.custom_loss)
            metrics |= train_metrics(routing | measured)
        return metrics | step.load_metrics()

    def _loss_step(self, batch: TrainingBatch, global_batch: GlobalBatch) -> LossStep:
        """Returns what the loss of every micro-batch of a step needs."""
        custom_loss = None
        if self.functions.loss is not None:
            custom_loss = CustomLoss(
                function=self.functions.loss, args=self.functions.args, seed=self._seed()
            )
        return LossStep(
            correction=self.correction,
            policy=self.policy,
            uses_recomputed_old_policy=uses_recomputed_old_policy(
                self.correction, self.steps_per_rollout
            ),
            version=self.step,
            # Only the sums of the complete step are added over the data-parallel ranks.
            global_batch=replace(global_batch, ranks=Ranks(context=self.parallel.ranks.context)),
            covariance=self._covariance_limit(batch),
            # The sums of complete sequences are equal on all context-parallel ranks.
            counts=self.parallel.context_rank == 0,
            custom=self._custom_tis(),
            custom_loss=custom_loss,
            functions=self.functions,
        )

    def _watched(self, loss: Loss) -> Loss:
        """Returns a loss that also shows its inputs to the gate, if there is one."""
        gate = self.gate
        if gate is None:
            return loss

        def watched(inputs: LossInputs) -> LossOutputs:
            gate.watch(inputs)
            return loss(inputs)

        return watched

    def _check_log_probs(self, step: Step) -> None:
        """Stops the run if a token's log-prob differs from the rollout engine's; a collective."""
        if self.gate is not None:
            self.gate.check(step, self.step + 1, self.parallel)

    def _rate_scale(self, sums: StepSums | None) -> float:
        """Returns the factor of the learning rate: the effective sequence share, or its root."""
        scaling = self.engine.config.ess_lr_scaling
        if scaling == "off":
            return 1.0
        share = 1.0
        if sums is not None:  # on the last pipeline stage
            metrics = sums.statistics.all_reduce(self.parallel.ranks).metrics()
            share = metrics.get("effective_sequence_share", 1.0)
        share = self.parallel.broadcast_from_last_stage(share)
        if scaling == "sqrt":
            return math.sqrt(share)
        return share

    def _dump(
        self,
        step: Step,
        advantages: Sequence[float],
        records: Sequence[TokenRecord],
        global_batch: GlobalBatch,
    ) -> None:
        """Adds the step's tokens to the dumps; every data-parallel rank has one."""
        parallel = self.parallel
        # Tensor-parallel ranks have the same log-probs.
        if self.dump is None or not parallel.is_last_stage or parallel.tensor_rank > 0:
            return
        with self.engine.timer("train_dump"):
            tokens = step.batch.responses
            record = torch.cat([micro.stack() for micro in records])
            record_L = in_sample_order(record, step.partition, tokens.lengths)
            record_N = parallel.ranks.over_context(tokens.slices.scatter(record_L))
            if parallel.context_rank == 0:
                self.dump.add(
                    StepDump(
                        samples=step.samples,
                        advantages=advantages,
                        record_N=record_N.cpu(),
                        step=self.step,
                        global_batch=replace(global_batch, ranks=Ranks()),
                    )
                )

    def _global_batch(self, batch: TrainingBatch, step: Step) -> GlobalBatch:
        """Returns statistics of the step's global batch, before the first micro-batch.

        These are the mean weight, the second-moment limit and adaptive bounds.
        """
        correction = self.correction
        tokens = batch.responses
        if not needs_global_batch(correction):
            return GlobalBatch()
        weights_old_policy = uses_recomputed_old_policy(correction, self.steps_per_rollout)
        weights_old_policy |= self.step == self._old_version  # no step was made on the rollout
        if weights_old_policy and tokens.old_log_probs_L is not None:
            train_L = tokens.old_log_probs_L
        else:  # the weights follow π_θ, which changes with every step
            train_L = self._old_log_probs(batch, step.partition, source=step.routing_record)
        if not self.parallel.is_last_stage:
            return GlobalBatch()
        if correction.old_logprobs == "interpolate":
            train_L = interpolate_old_log_probs(
                train_L,
                tokens.rollout_log_probs_L.to(train_L),
                self.step,
                tokens.weight_versions_L.to(train_L.device),
            )
        return self._correct(batch, train_L).global_batch

    def _covariance_limit(self, batch: TrainingBatch) -> CovarianceLimit | None:
        """Returns the selection of clip_cov or kl_cov in the global batch, or None."""
        name = self.correction.policy_loss
        if name not in COVARIANCE_LOSSES or not self.parallel.is_last_stage:
            return None
        tokens = batch.responses.to(self.parallel.device)
        old_L: Tensor | None = tokens.rollout_log_probs_L
        if not self.correction.use_rollout_logprobs:
            old_L = tokens.old_log_probs_L
        assert old_L is not None
        assert tokens.advantages_L is not None
        return covariance_limit(
            old_L.to(self.parallel.device),
            tokens.advantages_L,
            tokens.loss_mask_L,
            self.policy,
            name,
            self.parallel.ranks,
        )

    def _step_metrics(
        self, result: StepResult, custom: CustomTis | CustomLoss | None
    ) -> dict[str, float]:
        """Returns the metrics of the loss and the optimizer; a collective of all ranks."""
        parallel = self.parallel
        metrics: dict[str, float] = {}
        if result.sums is not None:  # on the last pipeline stage
            if custom is not None:
                names = parallel.all_gather_data_and_context(sorted(result.sums.custom))
                check_metric_names(custom.function, names, "rank")
            sums = result.sums.all_reduce(parallel.ranks)
            metrics = step_metrics(sums, self.correction, self.policy)
        metrics = parallel.broadcast_from_last_stage(metrics)
        metrics |= {
            "grad_norm": result.grad_norm,
            "lr": result.learning_rate,
            "loss_denominator": float(result.loss_denominator),
            "old_log_prob_forwards": float(self._old_log_prob_forwards),
            "skipped_steps": float(result.loss_denominator == 0),
            "nonfinite_gradient_steps": float(not result.is_finite),
        }
        if result.loss_scale is not None:
            metrics |= {"loss_scale": result.loss_scale, "overflow_steps": float(result.overflowed)}
            # An overflow only lowers the loss scale, and its gradient norm has no meaning.
            if result.overflowed:
                del metrics["grad_norm"]
        self._old_log_prob_forwards = 0
        return train_metrics(metrics)


def train_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Adds the prefix train/ to metric names."""
    return {f"train/{name}": value for name, value in metrics.items()}


def nonfinite_message(
    step: int, metrics: dict[str, float], weights_are_finite: bool, token_at_fault: str
) -> str:
    """Returns the error message for a step with a non-finite gradient or loss.

    `token_at_fault` is the sentence of `TokenGradients.first_nonfinite`.
    """
    values = []
    for name in ("loss", "grad_norm", "lr"):
        if f"train/{name}" in metrics:
            values.append(f"{name} {metrics[f'train/{name}']:.3g}")
    cause = (
        "Lower --lr, check rewards, coefficients and custom functions, or add --nonfinite-gradient"
        " skip."
    )
    if not weights_are_finite:
        cause = (
            "The weights are not finite: lower --lr or --weight-decay, or give another"
            " --hf-checkpoint."
        )
    return (
        f"the gradient of step {step} is not finite; the step was not made ({', '.join(values)})."
        f" {token_at_fault} {cause}"
    )
