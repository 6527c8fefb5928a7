"""Trains a language model by reinforcement learning on Megatron-core, with rollout correction.

    parse the command line → start the process groups → build the training engine, the rollout engine and the data
    for every rollout:
        prompts → responses → rewards → advantages
        for every step: old log-probs where needed → correction and loss → optimizer step
        weights to the rollout engine → evaluation → checkpoint → report
    write the policy as a Hugging Face directory

`python train.py --help` lists the flags; docs/quick_start.md walks through a run.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from transformers.utils.logging import disable_progress_bar

from arguments import Arguments, describe, effective_config, parse_args
from slime_tis.correction import Correction, batch_norm_factor, correct, interpolate_old_log_probs, response_slices
from slime_tis.custom import load_function
from slime_tis.megatron import checkpoint
from slime_tis.megatron.batch import TrainingBatch, make_batch, tensors
from slime_tis.megatron.engine import StepResult, TrainingEngine
from slime_tis.megatron.parallel import Parallel, initialize, shut_down
from slime_tis.policy.advantages import advantages
from slime_tis.policy.anchor import anchors_on_recomputed, needs_global_batch, needs_old_log_probs
from slime_tis.policy.objective import PolicyObjective
from slime_tis.policy.report import step_figures
from slime_tis.reporting.reporters import open_reporters
from slime_tis.reporting.timing import Timer
from slime_tis.rollout.checkpoint import load_tokenizer
from slime_tis.rollout.dump import load_samples, save_samples
from slime_tis.rollout.engine import RolloutEngine, build_engine, evaluation_sampling, training_sampling
from slime_tis.rollout.evaluate import evaluate, load_evaluation_prompts
from slime_tis.rollout.figures import rollout_figures
from slime_tis.rollout.local import LocalEngine
from slime_tis.rollout.prompts import PromptDataset
from slime_tis.rollout.rewards import build_reward, score
from slime_tis.rollout.sample import Sample


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status. What the user can mend ends in one sentence on stderr."""
    arguments = parse_args(argv)
    quiet_libraries()
    parallel = initialize(arguments.megatron)
    if parallel.is_main:
        print(describe(arguments), flush=True)
    try:
        Trainer(arguments, parallel).run()
    except (ValueError, OSError, checkpoint.CheckpointError) as error:
        if os.environ.get("SLIME_TIS_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shut_down()
    return 0


class Trainer:
    """The rooms of a run, built once, and the loop through them."""

    def __init__(self, arguments: Arguments, parallel: Parallel) -> None:
        self.arguments, self.parallel = arguments, parallel
        megatron, rollout = arguments.megatron, arguments.rollout
        self.timer = Timer()
        self.tokenizer = load_tokenizer(megatron.hf_checkpoint)
        self.dataset = PromptDataset(rollout.prompt_data, self.tokenizer, rollout)
        self.eval_prompts = load_evaluation_prompts(rollout, self.tokenizer)
        self.reward = build_reward(rollout, arguments.namespace)
        path = arguments.custom_tis_function_path
        self.custom_tis = None if path is None else load_function(path)
        self.num_rollout = self._num_rollout()
        self.engine = TrainingEngine(
            megatron,
            parallel,
            temperature=rollout.rollout_temperature,
            total_steps=self.num_rollout * self.steps_per_rollout,
            keep_reference=arguments.policy.use_kl_loss,
            entropy_gradient=arguments.policy.entropy_coef != 0,
            timer=self.timer,
        )
        self.sampler = build_engine(rollout, megatron.hf_checkpoint, self.tokenizer, device=parallel.backend.device)
        self.step = self.rollout_id = self.old_log_prob_forwards = 0
        self.evaluator: RolloutEngine | None = None
        self.first_accuracy = self.last_accuracy = float("nan")
        self._resume()
        self.reporters = open_reporters(
            arguments.reporting,
            effective_config(arguments),
            total_steps=self.num_rollout * self.steps_per_rollout,
            resume_step=self.step + 1 if self.step else 0,
            rank=0 if parallel.is_main else 1,
        )

    def run(self) -> None:
        """The loop of the module's docstring."""
        try:
            self._loop()
        except BaseException:
            with suppress(OSError):  # the disk may be what failed
                self.reporters.close()
            raise
        self.reporters.close()

    def _loop(self) -> None:
        if self._evaluates_before_training():
            self.reporters.log(self._evaluate(), self.step)
            self.timer.take()
        while self.rollout_id < self.num_rollout:
            groups = self._sample()
            sampled = rollout_figures(groups, self.step)
            rows = [{}] if self.arguments.loop.debug_rollout_only else self._train(groups)
            self.rollout_id += 1
            self._update_sampler()
            rows[-1] |= {**sampled, **self._evaluate_when_due()}
            self._save_when_due()
            rows[-1] |= self._times()
            for step, row in enumerate(rows, start=self.step - len(rows) + 1):
                self.reporters.log(row, step if self.step else self.rollout_id)
        self._finish()

    def _times(self) -> dict[str, float]:
        """perf/… seconds since the last row; the backward is what the forward leaves of both."""
        times = self.timer.take()
        if "perf/forward_time" in times:
            times["perf/backward_time"] = times["perf/forward_backward_time"] - times["perf/forward_time"]
        return times

    @property
    def steps_per_rollout(self) -> int:
        steps = self.arguments.loop.num_steps_per_rollout
        assert steps is not None  # arguments.py derives it
        return steps

    def _num_rollout(self) -> int:
        loop, prompts = self.arguments.loop, self.arguments.rollout.rollout_batch_size
        if loop.num_rollout is not None:
            return loop.num_rollout
        assert loop.num_epoch is not None  # arguments.py requires one of the two
        return max(loop.num_epoch * len(self.dataset) // prompts, 1)

    def _sample(self) -> list[list[Sample]]:
        """Prompts → scored responses; the same groups on every rank."""
        loop, rollout = self.arguments.loop, self.arguments.rollout
        if loop.load_debug_rollout_data is not None:
            path = loop.load_debug_rollout_data.format(rollout_id=self.rollout_id)
            return load_samples(path, rollout.rollout_batch_size, rollout.n_samples_per_prompt)
        prompts = self.dataset.next_batch(rollout.rollout_batch_size)
        with self.timer("generate"):
            seed = (rollout.rollout_seed << 32) + self.rollout_id
            groups = self.sampler.generate(prompts, training_sampling(rollout), seed)
        with self.timer("reward"):
            score(groups, self.reward)
        if loop.save_debug_rollout_data is not None and self.parallel.is_main:
            save_samples(loop.save_debug_rollout_data.format(rollout_id=self.rollout_id), groups)
        return groups

    def _train(self, groups: list[list[Sample]]) -> list[dict[str, float]]:
        """All optimizer steps on one rollout; the figures of each."""
        samples = [sample for group in groups for sample in group]
        size = len(samples) // self.steps_per_rollout
        steps = [self._prepare(samples[start : start + size]) for start in range(0, len(samples), size)]
        early = self.arguments.policy.reject_before_advantage
        kept = [keep for step in steps for keep in self._kept(step.batch)] if early else None
        per_sample = advantages_of(samples, kept, self.arguments)
        rows = []
        for number, step in enumerate(steps):
            mine = per_sample[number * size : (number + 1) * size][self.parallel.data_rank :: self.parallel.data_size]
            rows.append(self._train_step(step.with_advantages(mine)))
        return rows

    def _prepare(self, samples: list[Sample]) -> Step:
        """This rank's share of one step's samples, with old and reference log-probs, and its micro-batches."""
        ranks = [samples[rank :: self.parallel.data_size] for rank in range(self.parallel.data_size)]
        partition = self.engine.partitions([[len(sample.token_ids) for sample in mine] for mine in ranks])
        batch = training_batch(ranks[self.parallel.data_rank], self.parallel)
        policy = self.arguments.policy
        if needs_old_log_probs(self.arguments.correction, self.steps_per_rollout, policy.reject_before_advantage):
            batch = batch.with_local("old_log_probs", self._old_log_probs(batch, partition))
        if policy.use_kl_loss:
            with self.timer("ref_log_probs"):
                batch = batch.with_local("ref_log_probs", self.engine.reference_log_probs(batch, partition))
        return Step(batch=batch, partition=partition)

    def _kept(self, batch: TrainingBatch) -> list[bool]:
        """Which samples of the step have a token left after rejection, in their order, on every rank."""
        kept: list[bool] = []
        if self.parallel.is_last_stage:
            found = self._correct(batch, batch.local["old_log_probs"])
            kept = (found.kept_per_sequence > 0).tolist()
        shares = self.parallel.from_data_ranks(self.parallel.from_last_stage(kept))
        return [keep for together in zip(*shares, strict=True) for keep in together]

    def _correct(self, batch: TrainingBatch, train_log_probs: list[torch.Tensor]) -> Correction[list[torch.Tensor]]:
        """The correction of the step's global batch, before training on it; a collective of the last stage's ranks."""
        rollout_log_probs, loss_masks = (
            [value.to(self.parallel.backend.device) for value in batch.local[name]]
            for name in ("rollout_log_probs", "loss_masks")
        )
        rank, size = self.parallel.context_rank, self.parallel.context_size
        return correct(
            self.arguments.correction,
            train_log_probs,
            rollout_log_probs,
            loss_masks,
            reduce_sequences=self.parallel.reduce_sequences,
            slices=response_slices(batch.total_lengths, batch.response_lengths, rank, size),
            reduce_batch=self.parallel.sum_over_data,
        )

    def _old_log_probs(self, batch: TrainingBatch, partition: list[list[int]]) -> list[torch.Tensor]:
        self.old_log_prob_forwards += 1
        with self.timer("old_log_probs"):
            return self.engine.log_probs(batch, partition)

    def _train_step(self, step: Step) -> dict[str, float]:
        objective = self._objective(step.batch, step.partition)
        result = self.engine.train_step(step.batch, step.partition, objective)
        self.step += 1
        with self.timer("metrics"):
            return self._step_metrics(result)

    def _objective(self, batch: TrainingBatch, partition: list[list[int]]) -> PolicyObjective:
        arguments, parallel = self.arguments, self.parallel
        factor, limit = self._of_global_batch(batch, partition)
        return PolicyObjective(
            correction=arguments.correction,
            policy=arguments.policy,
            recompute_old=anchors_on_recomputed(arguments.correction, self.steps_per_rollout),
            custom_tis=self.custom_tis,
            args=arguments.namespace,
            version=self.step,
            context_rank=parallel.context_rank,
            context_size=parallel.context_size,
            context_group=parallel.context_group,
            reduce_sequences=parallel.reduce_sequences,
            batch_norm_factor=factor,
            second_moment_limit=limit,
        )

    def _of_global_batch(
        self, batch: TrainingBatch, partition: list[list[int]]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Mean weight and second-moment limit of the step, known before its first micro-batch is trained on."""
        correction = self.arguments.correction
        if not needs_global_batch(correction):
            return None, None
        if anchors_on_recomputed(correction, self.steps_per_rollout):
            train = batch.local["old_log_probs"]
        else:  # what is weighted follows π_θ, and that moves with every step
            train = self._old_log_probs(batch, partition)
        if not self.parallel.is_last_stage:
            return None, None
        if correction.old_logprobs == "interpolate":
            of_rollout, versions = batch.local["rollout_log_probs"], batch.local["weight_versions"]
            train = [
                interpolate_old_log_probs(current, rollout.to(current), self.step, version.to(current.device))
                for current, rollout, version in zip(train, of_rollout, versions, strict=True)
            ]
        found = self._correct(batch, train)
        sums = self.parallel.sum_over_data(found.statistics.sums)
        return batch_norm_factor(correction, replace(found.statistics, sums=sums)), found.second_moment_limit

    def _step_metrics(self, result: StepResult) -> dict[str, float]:
        """train/… figures of a step, on every rank."""
        parallel, arguments = self.parallel, self.arguments
        figures: dict[str, float] = {}
        if parallel.is_last_stage:
            report = result.report.over_ranks(
                sum_data=parallel.sum_over_data,
                sum_all=parallel.sum_over_data_and_context,
                min_all=parallel.min_over_data_and_context,
                max_all=parallel.max_over_data_and_context,
            )
            figures = step_figures(report, arguments.correction, arguments.policy, custom=self.custom_tis is not None)
        figures = parallel.from_last_stage(figures)
        figures |= {
            "grad_norm": result.grad_norm,
            "lr": result.learning_rate,
            "loss_units": float(result.units),
            "old_log_prob_forwards": float(self.old_log_prob_forwards),
            "skipped_steps": float(result.units == 0),
        }
        self.old_log_prob_forwards = 0
        return {f"train/{name}": value for name, value in figures.items()}

    def _update_sampler(self) -> None:
        if self.rollout_id % self.arguments.rollout.update_weights_interval == 0:
            with self.timer("update_weights"):
                self.sampler.update_weights(self.engine.named_hf_tensors(), self.step)

    def _evaluates_before_training(self) -> bool:
        return bool(self.eval_prompts) and self.rollout_id == 0 and not self.arguments.rollout.skip_eval_before_train

    def _evaluate_when_due(self) -> dict[str, float]:
        interval = self.arguments.rollout.eval_interval
        last = self.rollout_id == self.num_rollout
        return self._evaluate() if last or (interval and self.rollout_id % interval == 0) else {}

    def _evaluate(self) -> dict[str, float]:
        """Held-out accuracy of the training policy itself: its present weights, unrounded."""
        if not self.eval_prompts:
            return {}
        figures: dict[str, float] = {}
        with self.timer("eval"):
            if self.evaluator is None:
                self.evaluator = LocalEngine(
                    self.arguments.megatron.hf_checkpoint,
                    self.tokenizer,
                    precision="bf16" if self.arguments.megatron.bf16 else "fp32",
                    device=self.parallel.backend.device,
                )
            self.evaluator.update_weights(self.engine.named_hf_tensors(), self.step)
            for name, prompts in self.eval_prompts.items():
                found = evaluate(self.evaluator, prompts, self.reward, evaluation_sampling(self.arguments.rollout))
                figures |= {f"eval/{name}": found.pop("accuracy")}
                figures |= {f"eval/{name}/{figure}": value for figure, value in found.items()}
        self.last_accuracy = figures[f"eval/{next(iter(self.eval_prompts))}"]
        if math.isnan(self.first_accuracy):
            self.first_accuracy = self.last_accuracy
        return figures

    def _save_when_due(self) -> None:
        config = self.arguments.megatron
        last = self.rollout_id == self.num_rollout
        if config.save is None or not (last or (config.save_interval and self.rollout_id % config.save_interval == 0)):
            return
        state = {
            "step": self.step,
            "rollout_id": self.rollout_id,
            "dataset": self.dataset.state_dict(),
            "sampler_weight_version": self.sampler.weight_version,
            "first_accuracy": None if math.isnan(self.first_accuracy) else self.first_accuracy,
        }
        stale = self.sampler.weight_version != self.step
        with self.timer("save"):
            checkpoint.save(
                config.save,
                self.step,
                self.engine,
                state,
                retain=config.save_retain,
                write_extra=self.sampler.save_weights if stale else None,
            )

    def _resume(self) -> None:
        """Goes on from the newest complete checkpoint under --load, if there is one."""
        found = self.arguments.megatron.load and checkpoint.newest(self.arguments.megatron.load)
        if not found:
            return
        state = checkpoint.load(found, self.engine)
        self.step, self.rollout_id = state["step"], state["rollout_id"]
        self.dataset.load_state_dict(state["dataset"])
        self.first_accuracy = math.nan if state["first_accuracy"] is None else state["first_accuracy"]
        if state["sampler_weight_version"] == self.step:
            self.sampler.update_weights(self.engine.named_hf_tensors(), self.step)
        else:
            self.sampler.load_weights(found, state["sampler_weight_version"])
        if self.parallel.is_main:
            print(f"resumed from {found}, after step {self.step}", flush=True)

    def _finish(self) -> None:
        """Writes the policy for everybody else, and says how it did."""
        save_hf = self.arguments.megatron.save_hf
        if save_hf is not None and not self.arguments.loop.debug_rollout_only:
            checkpoint.save_hf(save_hf, self.engine)
        if self.eval_prompts and math.isnan(self.last_accuracy):
            self._evaluate()  # resumed after the last rollout
        if self.parallel.is_main and self.eval_prompts:
            print(f"eval accuracy: {self.first_accuracy:.2f} -> {self.last_accuracy:.2f}", flush=True)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step's samples on this data-parallel rank."""

    batch: TrainingBatch
    partition: list[list[int]]
    """The samples of each micro-batch."""

    def with_advantages(self, per_sample: list[float]) -> Step:
        """The same step with every sample's advantage at each of its tokens."""
        per_token = [
            torch.full((len(mask),), advantage)
            for mask, advantage in zip(self.batch.local["loss_masks"], per_sample, strict=True)
        ]
        return replace(self, batch=self.batch.with_local("advantages", per_token))


def advantages_of(samples: list[Sample], kept: list[bool] | None, arguments: Arguments) -> list[float]:
    """The advantage of every sample; the samples of a prompt stand together."""

    def grouped(values: list[float] | list[bool]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).view(-1, arguments.rollout.n_samples_per_prompt)

    rewards = grouped([sample.reward or 0.0 for sample in samples])
    valid = grouped([float(sum(sample.loss_mask)) for sample in samples])
    found = advantages(rewards, valid, arguments.policy, None if kept is None else grouped(kept) > 0)
    return found.flatten().tolist()


def training_batch(samples: list[Sample], parallel: Parallel) -> TrainingBatch:
    """What Megatron trains on: sequences, masks and per-token values. A missing log-prob is NaN."""
    return make_batch(
        [sample.token_ids for sample in samples],
        [len(sample.response_ids) for sample in samples],
        [sample.loss_mask for sample in samples],
        {
            "rollout_log_probs": tensors([rollout_log_probs(sample) for sample in samples], torch.float32),
            "weight_versions": tensors([sample.weight_versions for sample in samples], torch.int64),
        },
        parallel.context_rank,
        parallel.context_size,
    )


def rollout_log_probs(sample: Sample) -> list[float]:
    """The sample's log-probs, NaN where the engine gave none."""
    return [math.nan if value is None else value for value in sample.rollout_log_probs]


def quiet_libraries() -> None:
    """Leaves the terminal to this program: what libraries only remark goes unsaid."""
    for name in ("megatron", "transformers", "torch"):
        warnings.filterwarnings("ignore", module=rf"{name}\.")
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
