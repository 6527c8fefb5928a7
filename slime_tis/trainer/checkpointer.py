"""Saves a run, finds the checkpoint to resume, and restores it."""

import hashlib
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slime_tis.health import HealthState
from slime_tis.hf_directory import ModelSizes
from slime_tis.hf_tensors import weights_fingerprint
from slime_tis.options.fields import flag
from slime_tis.progress import print_line
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.data.data_source import CustomDataSource
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.data.sample_file import from_dict, load_batches, save_batches, to_dict
from slime_tis.trainer.evaluation import EVALUATION_OPTIONS, Evaluation, is_due
from slime_tis.trainer.megatron import checkpoint_saving, sharded_checkpoint
from slime_tis.trainer.megatron.routing_replay import drop_routing
from slime_tis.trainer.rollout.prefetch import FinishedBatch
from slime_tis.trainer.storage.checkpoint_files import (
    IN_FLIGHT,
    TrainerState,
    changed,
    changed_options,
    check_options,
    checkpoint_path,
    checkpoints,
    read_trainer_state,
)
from slime_tis.trainer.storage.directories import same_path
from slime_tis.trainer.weight_sync import PolicyWeights


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a resumed run continues: after the last completely trained rollout, or at the start."""

    step: int = 0
    rollout_id: int = 0
    dataset: dict[str, Any] = field(default_factory=dict)
    unfinished: list[list[Sample]] = field(default_factory=list)
    in_flight: list[FinishedBatch] = field(default_factory=list)
    """Complete rollouts that are not trained on yet."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A checkpoint that is being written in the background."""

    saving: checkpoint_saving.Saving
    step: int


SAMPLING_OPTIONS = (
    "rollout_batch_size",
    "over_sampling_batch_size",
    "n_samples_per_prompt",
    "rollout_max_response_len",
    "rollout_max_context_len",
    "rollout_temperature",
    "rollout_top_p",
    "rollout_top_k",
    "rollout_stop",
    "rollout_stop_token_ids",
    "rollout_seed",
    "rollout_engine",
    "rollout_precision",
    "rollout_lora",
    "use_rollout_routing_replay",
    "measure_routing_mismatch",
    "custom_generate_function_path",
)
"""Options that decide how samples are made. If a resumed run changes one, it samples the rollouts
in flight again."""


def model_hash(config: MegatronConfig) -> str:
    """Returns a SHA-256 that identifies the model.

    It is the hash of config.json. With LoRA, it also covers samples of the weights: a checkpoint
    then has only adapters, which belong to exactly these weights.
    """
    digest = hashlib.sha256((Path(config.hf_checkpoint) / "config.json").read_bytes())
    if config.trains_adapters:
        digest.update(weights_fingerprint(config.hf_checkpoint))
    return digest.hexdigest()


def find_resume_point(
    config: MegatronConfig, options: dict[str, Any], *, is_main: bool
) -> tuple[Path, TrainerState] | None:
    """Returns the latest complete checkpoint under --load and its state, or None; a collective."""
    if config.load is None:
        return None
    latest = sharded_checkpoint.latest_complete_checkpoint(config.load)
    if latest is None:
        return None
    newest, damages = latest
    if is_main:
        for damage in damages:
            print_line(f"warning: passed over {config.load}/{damage}", sys.stderr)
    state = read_trainer_state(newest)
    check_options(state.options, options)
    if state.model != model_hash(config):
        difference = "whose config.json differs"
        if config.trains_adapters:
            difference = "whose config.json or weights differ"
        raise ValueError(
            f"--hf-checkpoint is {config.hf_checkpoint!r}, but {newest} trains "
            f"{state.options.get('hf_checkpoint')!r}, {difference}; pass that model."
        )
    return newest, state


@dataclass(kw_only=True)
class Checkpointer:
    """Saves the run at its position and restores it."""

    config: MegatronConfig
    weights: PolicyWeights
    evaluation: Evaluation
    data: CustomDataSource | None
    """The user's data source, which saves itself; None if prompts come from a file."""
    run_id: str
    options: dict[str, Any]
    model: str
    position: Position = field(default_factory=Position)
    health: Callable[[], HealthState] = HealthState
    """Returns the counters of the health warnings after the steps so far."""
    saved_step: int | None = None
    """The step of the latest checkpoint under --save; None if this run has not saved one."""
    pending: Pending | None = None
    """The checkpoint that is being written in the background."""

    def resume(self, path: Path, state: TrainerState) -> None:
        """Restores the policy, the rollout engine and the evaluation."""
        options = self.options
        learner = self.weights.learner
        sampler = self.weights.sampler
        sharded_checkpoint.load(path, learner.engine)
        learner.step = state.step
        learner.engine.keep_token_budget(state.token_budget)
        evaluates_alike = not changed(state.options, options, EVALUATION_OPTIONS)
        if state.first_accuracy is not None and evaluates_alike:
            self.evaluation.first_accuracy = state.first_accuracy
        # A signal interrupted this evaluation, so its result is missing in the metrics.
        self.evaluation.is_overdue = bool(self.evaluation.prompts) and state.evaluation_due
        save = self.config.save
        resumes_there = save is not None and same_path(path.parent, save)
        # The same position with an evaluation still due has to be saved again.
        if resumes_there and not self.evaluation.is_overdue:
            self.saved_step = state.step
        unfinished = []
        for rows in state.unfinished:
            unfinished.append([from_dict(row) for row in rows])
        sampler.resume_unfinished(unfinished)
        self._restore_sampler_weights(path, state)
        if learner.parallel.is_main:
            if resumes_there:
                # A killed run may not have removed them, and this run may never save.
                sharded_checkpoint.remove_older(path, self.run_id, self.config.save_retain)
            print_line(f"resumed from {path}, after step {state.step}")
            difference = changed_options(state.options, options)
            if difference:
                print_line(f"options changed since then: {difference}")

    def _restore_sampler_weights(self, path: Path, state: TrainerState) -> None:
        """Gives the rollout engine the weights that it had at the checkpoint, or the newest."""
        sampler = self.weights.sampler
        engine_options = ("rollout_engine", "rollout_precision", "rollout_lora")
        same_engine = not changed(state.options, self.options, engine_options)
        # An asynchronous run samples with older weights; a bitwise resumption needs those.
        sampler_is_behind = state.sampler_weight_version != state.step
        if sampler_is_behind and same_engine and sampler.can_checkpoint_weights:
            sampler.load_weights(path, state.sampler_weight_version)
            self.weights.updates.load_samples(path, state.sampler_weight_version)
        else:
            self.weights.send()

    def rollouts_in_flight(
        self, path: Path, state: TrainerState, sizes: ModelSizes
    ) -> list[FinishedBatch]:
        """Returns the complete rollouts of a checkpoint that are not trained on.

        None are returned if an option that decides how samples are made has changed.
        """
        if not state.in_flight:
            return []
        different = changed(state.options, self.options, SAMPLING_OPTIONS)
        is_main = self.weights.learner.parallel.is_main
        if different:
            if is_main:
                flags = ", ".join(map(flag, different))
                print_line(f"rollouts in flight are sampled again: {flags} changed")
            return []
        batches = load_batches(path / IN_FLIGHT, len(state.in_flight), sizes)
        if not is_main:
            # As after sampling, only rank 0 has the experts.
            for groups in batches:
                drop_routing(groups)
        rollouts = []
        for groups, prompts in zip(batches, state.in_flight, strict=True):
            rollouts.append(FinishedBatch(groups=groups, prompts=prompts))
        return rollouts

    def save(self, before_it_counts: Callable[[], object] = lambda: None) -> None:
        """Writes a checkpoint of the position, or begins to with --async-save; a collective.

        A checkpoint that is still being written is completed first.
        """
        self.complete()
        config = self.config
        position = self.position
        sampler = self.weights.sampler
        dump = self.weights.learner.dump
        engine = self.weights.learner.engine
        assert config.save is not None
        self.check_weights()
        state = self._trainer_state()

        def write_extra(directory: Path) -> None:
            if position.in_flight:
                groups = [batch.groups for batch in position.in_flight]
                save_batches(directory / IN_FLIGHT, groups)
            if sampler.weight_version != position.step and sampler.can_checkpoint_weights:
                sampler.save_weights(directory)
                self.weights.updates.save_samples(directory)

        if dump is not None:
            # A resumed run does not repeat the checkpoint's rollouts, so their dumps must exist.
            with engine.timer("train_dump"):
                dump.flush()
        saving = checkpoint_saving.Saving(
            final=checkpoint_path(config.save, position.step),
            engine=engine,
            run=self.run_id,
            retain=config.save_retain,
        )
        saving.start(asdict(state), write_extra, in_background=config.async_save)
        self.pending = Pending(saving=saving, step=position.step)
        if config.async_save:
            before_it_counts()
        else:
            self.complete(before_it_counts)

    def complete(self, before_it_counts: Callable[[], object] = lambda: None) -> None:
        """Waits for the checkpoint that is being written, if there is one; a collective."""
        pending = self.pending
        if pending is None:
            return
        # Before the wait: an error in it must not make a second call wait again.
        self.pending = None
        pending.saving.complete(before_it_counts)
        self.saved_step = pending.step

    def complete_if_written(self) -> None:
        """Completes the checkpoint in the background if all files are written; a collective."""
        if self.pending is not None and self.pending.saving.is_written():
            self.complete()

    def abandon(self) -> None:
        """Removes the files of a checkpoint in the background, after an error of the run."""
        if self.pending is not None:
            self.pending.saving.abandon()
            self.pending = None

    def _trainer_state(self) -> TrainerState:
        """Returns the state of the trainer at the position."""
        position = self.position
        dataset = position.dataset
        if self.data is not None:
            dataset = self.data.checkpoint(dataset, position.rollout_id - 1)
        unfinished = []
        for group in position.unfinished:
            unfinished.append([to_dict(sample) for sample in group])
        first_accuracy: float | None = self.evaluation.first_accuracy
        # JSON has no NaN.
        if math.isnan(self.evaluation.first_accuracy):
            first_accuracy = None
        budget = self.weights.learner.engine.token_budget
        budget_tokens = None
        if budget is not None:
            budget_tokens = budget.tokens
        return TrainerState(
            run=self.run_id,
            step=position.step,
            rollout_id=position.rollout_id,
            dataset=dataset,
            unfinished=unfinished,
            evaluation_due=self.evaluation.is_overdue,
            sampler_weight_version=self.weights.sampler.weight_version,
            first_accuracy=first_accuracy,
            token_budget=budget_tokens,
            options=self.options,
            model=self.model,
            in_flight=[batch.prompts for batch in position.in_flight],
            health=self.health(),
        )

    def is_due(self, rollout_id: int, num_rollout: int) -> bool:
        """Returns whether a checkpoint is due after this rollout; never without --save."""
        if self.config.save is None:
            return False
        return is_due(self.config.save_interval, rollout_id, num_rollout)

    def save_before_stopping(self) -> str:
        """Saves the position, unless it is saved; returns a message with the directory."""
        self.complete()
        save = self.config.save
        step = self.position.step
        if self.position.rollout_id == 0:
            return "The run stops before its first optimizer step; there is nothing to save."
        if save is None:
            return f"The run stops after step {step}, unsaved: --save is unset."
        if not self.weights.learner.engine.weights_are_finite():
            return f"Nothing was saved, since the weights are not finite. {self._newest()}"
        if self.saved_step != step:
            self.save()
        return (
            f"The run stops after step {step}, saved under {save}; the same command with --load"
            f" {save} resumes."
        )

    def check_weights(self) -> None:
        """Refuses to save weights that are not finite; a collective.

        Raises:
            CheckpointError: A weight is not finite.
        """
        if not self.weights.learner.engine.weights_are_finite():
            raise sharded_checkpoint.CheckpointError(
                f"the weights are not finite after step {self.position.step} and were not saved; "
                f"lower --lr or --weight-decay. {self._newest()}"
            )

    def _newest(self) -> str:
        """Returns a sentence about the latest checkpoint."""
        if self.config.save is not None:
            earlier = checkpoints(self.config.save)
            if earlier:
                return f"The latest checkpoint is {earlier[-1]}."
        return "There is no earlier checkpoint."
