"""Trains a language model by reinforcement learning on Megatron-core, with rollout correction.

    parse the command line → start the process groups → build the training engine, the rollout engine and the data
    for every rollout:
        prompts → responses (of this rollout, and of the next ones in the background) → rewards → advantages
        for every step: old log-probs where needed → correction and loss → optimizer step
        weights to the rollout engine → evaluation → checkpoint → report
    write the policy as a Hugging Face directory

`python train.py --help` lists the flags; docs/quick_start.md walks through a run.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import os
import signal
import sys
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from slime_tis.cli.arguments import Arguments, describe, effective_config, options_in_force, parse_args
from slime_tis.cli.output_paths import held_outputs
from slime_tis.cli.preflight import prompt_sizes
from slime_tis.custom import load_custom_tis
from slime_tis.errors import CustomFunctionError, NonFiniteGradient, OtherRankFailed, RunStopped
from slime_tis.interrupt import Interrupted, Interrupts, stops_because
from slime_tis.learner import Learner
from slime_tis.megatron import checkpoint
from slime_tis.megatron.engine import TrainingEngine
from slime_tis.megatron.export import save_hf
from slime_tis.megatron.parallel import Parallel, connect_store, initialize, lost_contact, shut_down
from slime_tis.megatron.sync_check import log_prob_gap
from slime_tis.reporting.health import Health
from slime_tis.reporting.progress import shown_progress
from slime_tis.reporting.reporters import open_reporters
from slime_tis.reporting.run_directory import check_metrics
from slime_tis.reporting.timing import Timer
from slime_tis.rollout.build import build_engine, evaluation_sampling, training_sampling
from slime_tis.rollout.checkpoint import load_tokenizer
from slime_tis.rollout.dump import from_dict, load_samples, save_samples, to_dict
from slime_tis.rollout.engine import RolloutEngine, RolloutFuture, RolloutUnavailable
from slime_tis.rollout.evaluate import evaluate, load_evaluation_prompts
from slime_tis.rollout.local import LocalEngine
from slime_tis.rollout.metrics import rollout_metrics
from slime_tis.rollout.prefetch import Prefetcher
from slime_tis.rollout.prompts import PromptDataset
from slime_tis.rollout.rewards import assign_rewards, build_reward, check_prompts
from slime_tis.rollout.sample import Prompt, Sample
from slime_tis.rollout.staleness import mask_stale_samples
from slime_tis.storage.checkpoints import checkpoints
from slime_tis.storage.directories import same_path
from slime_tis.storage.resumption import (
    TrainerState,
    changed,
    changed_options,
    check_options,
    read_trainer_state,
)

PROBE_TOKENS = 512
"""Longest prompt on which --check-weight-sync compares the engines."""

EVALUATION = (
    "eval_prompt_data",
    "n_samples_per_eval_prompt",
    "eval_temperature",
    "eval_top_p",
    "eval_max_response_len",
)
"""Options that decide what a held-out accuracy means."""


EXPECTED = (ValueError, OSError, RolloutUnavailable, Interrupted, RunStopped, checkpoint.CheckpointError)
"""What ends a run with one message; any other exception is a defect of this program or of a library."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status. Every expected error ends in one message on stderr."""
    with Interrupts() as interrupts:
        arguments = parse_args(argv)
        prepare_terminal()
        outputs = ExitStack()
        try:
            main_process = os.environ.get("RANK", "0") == "0"
            outputs.enter_context(held_outputs(arguments.megatron, arguments.reporting, main=main_process))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        with outputs:
            return _run(arguments, interrupts)


def _run(arguments: Arguments, interrupts: Interrupts) -> int:
    rank = 0
    try:
        parallel = initialize(arguments.megatron)
        rank = parallel.rank
        interrupts.share(connect_store(), rank)
        if parallel.is_main:
            print(describe(arguments), flush=True)
        Trainer(arguments, parallel, interrupts).run()
    except Exception as error:
        if os.environ.get("SLIME_TIS_TRACEBACK"):
            raise
        if _report(error, rank, interrupts):
            return exit_status(error)
        raise
    finally:
        shut_down()
    return 0


def exit_status(error: Exception) -> int:
    """The exit status of a run that an error ended; errors.py has the table."""
    if isinstance(error, (RunStopped, Interrupted)):
        return error.status
    return 2 if isinstance(error, CustomFunctionError) else 1


def _report(error: Exception, rank: int, interrupts: Interrupts) -> bool:
    """Says on stderr why the run ends, once for all ranks; False for a defect, whose traceback is wanted."""
    if isinstance(error, OtherRankFailed) or lost_contact(error):
        print(f"error: {stops_because(rank, interrupts.failure_elsewhere())}", file=sys.stderr)
        return True
    message = message_of(error)
    first = interrupts.report_failure(message)
    if first.rank == rank:
        if isinstance(error, EXPECTED):
            print(message if isinstance(error, (RunStopped, Interrupted)) else f"error: {message}", file=sys.stderr)
        return isinstance(error, EXPECTED)
    if first.message != message:
        print(f"error: {stops_because(rank, first)}", file=sys.stderr)
    return True


def message_of(error: Exception) -> str:
    """An error's message on one line, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a resumed run goes on: after the last rollout that was trained on as a whole."""

    step: int
    rollout_id: int
    dataset: dict[str, Any]
    unfinished: list[list[Sample]]


class Trainer:
    """The rooms of a run, built once, and the loop through them."""

    def __init__(self, arguments: Arguments, parallel: Parallel, interrupts: Interrupts) -> None:
        self.arguments, self.parallel, self.interrupts = arguments, parallel, interrupts
        megatron, rollout = arguments.megatron, arguments.rollout
        custom_tis = self._custom_tis()  # code of the user's own is loaded before anything is built
        self.reward = build_reward(rollout, arguments.namespace, interrupts.check)
        self.eval_reward = build_reward(rollout, arguments.namespace, interrupts.check, evaluation=True)
        self.timer = Timer()
        self.options = effective_config(arguments)
        self.model = model_identity(megatron.hf_checkpoint)
        self.resumed = self._find_checkpoint()
        self.run_id = uuid.uuid4().hex if self.resumed is None else self.resumed[1].run
        check_metrics(arguments.reporting.output_dir, self.run_id)
        self.tokenizer = load_tokenizer(megatron.hf_checkpoint)
        sizes = prompt_sizes(megatron, rollout)
        self.dataset = PromptDataset(rollout.prompt_data, self.tokenizer, rollout, sizes)
        if self.resumed is not None:
            self.dataset.load_state_dict(self.resumed[1].dataset)
        self.eval_prompts = load_evaluation_prompts(rollout, self.tokenizer, sizes)
        self._check_prompts()
        self.num_rollout = self._num_rollout()
        self.engine = TrainingEngine(
            megatron,
            parallel,
            temperature=rollout.rollout_temperature,
            total_steps=self.num_rollout * self.steps_per_rollout,
            keep_reference=arguments.policy.use_kl_loss,
            entropy_gradient=arguments.policy.entropy_coef != 0,
            timer=self.timer,
            safe_point=self._between_micro_batches,
        )
        self.learner = Learner(
            engine=self.engine,
            correction=arguments.correction,
            policy=arguments.policy,
            steps_per_rollout=self.steps_per_rollout,
            leaves_out_samples=rollout.max_weight_staleness is not None,
            custom_tis=custom_tis,
            args=arguments.namespace,
        )
        self.rollout_id = 0
        self.sampler = build_engine(
            rollout,
            arguments.sglang,
            megatron.hf_checkpoint,
            self.tokenizer,
            weights=self.engine.named_hf_tensors,
            weights_version=lambda: self.step,
            output_dir=arguments.reporting.output_dir,
            device=parallel.backend.device,
            safe_point=interrupts.check,
        )
        self.prefetcher = Prefetcher(
            self.dataset, self._submit, prompts=self._fresh_prompts, depth=rollout.rollout_lookahead
        )
        self.evaluator: RolloutEngine | None = None
        self.first_accuracy = self.last_accuracy = float("nan")
        self.evaluation_due = False
        self.saved_step: int | None = None
        self.health = Health(arguments.correction)
        self.rows: list[dict[str, float]] = []
        """Metrics of the steps of a rollout that have been made and not been reported."""
        self._resume()
        self.position = self._position()
        self.reporters = open_reporters(
            arguments.reporting,
            options_in_force(arguments),
            total_steps=self.num_rollout * self.steps_per_rollout,
            resume_step=self.step + 1 if self.step else 0,
            evaluates_again=self.evaluation_due,
            run=self.run_id,
            rank=0 if parallel.is_main else 1,
        )

    def run(self) -> None:
        """The loop of the module's docstring.

        Raises:
            RunStopped: a signal, a lost rollout engine or a gradient that is not finite ended it, with a checkpoint.
        """
        self.interrupts.started()
        try:
            self._loop_or_save()
        except BaseException:
            with suppress(OSError):  # the disk may be what failed
                self._log_rows(self.rows, self.step or self.rollout_id)
                self._close()
            raise
        self._close()

    def _loop_or_save(self) -> None:
        try:
            self._loop()
        except Interrupted as error:
            raise RunStopped(f"stopped by {error.name}. {self._save_before_stopping()}", error.status) from error
        except NonFiniteGradient as error:
            self._log_rows(error.rows, self.step + 1)
            if self.step > self.position.step:  # its earlier steps are made; what is left of the rollout is dropped
                self.rollout_id += 1
                self.position = self._position()
            raise RunStopped(f"error: {error} {self._save_before_stopping()}", 1) from error
        except RolloutUnavailable as error:
            raise RunStopped(f"error: {message_of(error)} {self._save_before_stopping()}", 1) from error

    def _close(self) -> None:
        self.sampler.close()
        self.reporters.close()

    def _loop(self) -> None:
        if self._evaluates_first():
            with self.interrupts.abandonable():
                self.reporters.log(self._evaluate(), self.step)
            self.timer.take()
        while self.rollout_id < self.num_rollout:
            self._safe_point()
            self.position = self._position()
            with self.interrupts.abandonable():
                groups = self._sample()
                sampled = rollout_metrics(groups, self.step) | self.sampler.metrics()
                groups, sampled["rollout/stale_samples"] = mask_stale_samples(
                    groups, self.step, self.arguments.rollout.max_weight_staleness
                )
                self._safe_point()
                rows = [{}] if self.arguments.loop.debug_rollout_only else self.learner.train(groups)
            self.rows = rows
            self.rollout_id += 1
            self.position = self._position()
            if self.rollout_id % self.arguments.rollout.update_weights_interval == 0:
                self._update_sampler()
            rows[-1] |= {**sampled, **self._evaluate_when_due()}
            self._save_when_due()
            rows[-1] |= self._times()
            self._log_rows(rows, self.step or self.rollout_id)
            self.rows = []
        self._finish()

    def _log_rows(self, rows: list[dict[str, float]], last: int) -> None:
        """Reports the steps of a rollout, the last of which has number `last`."""
        for step, row in enumerate(rows, start=last - len(rows) + 1):
            health = self.health.read(row)
            self.reporters.log(row | health.metrics, step)
            for message in health.messages if self.parallel.is_main else ():
                tqdm.write(f"warning: step {step}: {message}", file=sys.stderr)

    def _position(self) -> Position:
        return Position(
            step=self.step,
            rollout_id=self.rollout_id,
            dataset=self.prefetcher.state_dict(),
            unfinished=self.sampler.unfinished(),
        )

    def _safe_point(self) -> None:
        """Stops the run where any rank was asked to; a collective."""
        number = self.parallel.largest(self.interrupts.number)
        if number:
            raise Interrupted(signal.Signals(number).name)

    def _between_micro_batches(self) -> None:
        """Gives a rollout up as long as no step was made on it; of several ranks none can do so alone."""
        if self.interrupts.number and self.parallel.size == 1 and self.step == self.position.step:
            self.interrupts.check()

    def _times(self) -> dict[str, float]:
        """perf/… seconds since the last row; the backward is what the forward leaves of both."""
        times = self.timer.take()
        if "perf/forward_time" in times:
            times["perf/backward_time"] = times["perf/forward_backward_time"] - times["perf/forward_time"]
        return times

    @property
    def step(self) -> int:
        """Optimizer steps made so far: the version of the policy's weights."""
        return self.learner.step

    @property
    def steps_per_rollout(self) -> int:
        steps = self.arguments.loop.num_steps_per_rollout
        assert steps is not None  # parse_args derives it
        return steps

    def _check_prompts(self) -> None:
        """Whether every prompt can be scored, before a model is built."""
        rollout = self.arguments.rollout
        if self.arguments.loop.load_debug_rollout_data is None:  # loaded samples have their rewards
            check_prompts(rollout, self.dataset.prompts)
        for name, prompts in self.eval_prompts.items():
            check_prompts(rollout, prompts, f"--label-key or --eval-label-key (--eval-prompt-data {name})")

    def _custom_tis(self) -> Callable[..., Any] | None:
        path = self.arguments.custom_tis_function_path
        return None if path is None else load_custom_tis(path, self.arguments.namespace)

    def _num_rollout(self) -> int:
        loop, prompts = self.arguments.loop, self.arguments.rollout.rollout_batch_size
        if loop.num_rollout is not None:
            return loop.num_rollout
        assert loop.num_epoch is not None  # parse_args requires one of the two
        return max(loop.num_epoch * len(self.dataset) // prompts, 1)

    def _sample(self) -> list[list[Sample]]:
        """Prompts → scored responses; the same groups on every rank."""
        loop, rollout = self.arguments.loop, self.arguments.rollout
        if loop.load_debug_rollout_data is not None:
            path = loop.load_debug_rollout_data.format(rollout_id=self.rollout_id)
            return load_samples(path, rollout.rollout_batch_size, rollout.n_samples_per_prompt)
        shown = self.parallel.is_main and self.arguments.reporting.progress
        with self.timer("generate"), shown_progress(self.prefetcher.progress, "responses", shown=shown):
            groups = self.prefetcher.next(self.rollout_id, self.num_rollout - 1)
        with self.timer("reward"):
            assign_rewards(groups, self.reward)
        if loop.save_debug_rollout_data is not None and self.parallel.is_main:
            save_samples(loop.save_debug_rollout_data.format(rollout_id=self.rollout_id), groups)
        return groups

    def _submit(self, prompts: list[Prompt], number: int) -> RolloutFuture:
        rollout = self.arguments.rollout
        num_groups = rollout.rollout_batch_size if rollout.partial_rollout else None
        seed = (rollout.rollout_seed << 32) + number
        return self.sampler.submit(prompts, training_sampling(rollout), seed, num_groups=num_groups)

    def _fresh_prompts(self) -> int:
        """Prompts that the next rollout takes from the data, besides those that are not finished."""
        rollout = self.arguments.rollout
        return (rollout.over_sampling_batch_size or rollout.rollout_batch_size) - len(self.sampler.unfinished())

    def _update_sampler(self) -> None:
        """The policy's present weights to the rollout engine."""
        with self.timer("update_weights"):
            self.sampler.update_weights(self.engine.named_hf_tensors(), self.step)
        rollout = self.arguments.rollout
        if not rollout.check_weight_sync:
            return
        probe = list(max((prompt.token_ids for prompt in self.dataset.prompts[:64]), key=len)[:PROBE_TOKENS])
        for name, log_probs in self.sampler.prompt_log_probs(probe).items():
            gap = log_prob_gap(self.engine, probe, log_probs)
            if not gap <= rollout.weight_sync_bound:
                raise ValueError(
                    f"parameter-sync error: after the update to step {self.step} the log-probs of a probe prompt "
                    f"differ by {gap:.3g} on average between training and {name}, more than --weight-sync-bound "
                    f"{rollout.weight_sync_bound}; see that both run the same model, and raise the bound if the "
                    "rollout engine is meant to be that coarse."
                )

    def _evaluates_first(self) -> bool:
        """Whether the loop begins with an evaluation: before training, or the one that a signal ended."""
        before = self.rollout_id == 0 and not self.arguments.rollout.skip_eval_before_train
        return bool(self.eval_prompts) and (before or self.evaluation_due)

    def _evaluate_when_due(self) -> dict[str, float]:
        interval = self.arguments.rollout.eval_interval
        last = self.rollout_id == self.num_rollout
        if not (last or (interval and self.rollout_id % interval == 0)):
            return {}
        try:
            with self.interrupts.abandonable():
                return self._evaluate()
        except Interrupted:  # the run stops at the next safe point; it evaluates when it is resumed
            self.evaluation_due = bool(self.eval_prompts)
            return {}

    def _evaluate(self) -> dict[str, float]:
        """Held-out accuracy of the training policy itself, with its present weights."""
        if not self.eval_prompts:
            return {}
        metrics: dict[str, float] = {}
        with self.timer("eval"):
            evaluator = self._evaluator()
            if evaluator.weight_version != self.step:
                evaluator.update_weights(self.engine.named_hf_tensors(), self.step)
            for name, prompts in self.eval_prompts.items():
                found = evaluate(evaluator, prompts, self.eval_reward, evaluation_sampling(self.arguments.rollout))
                metrics |= {f"eval/{name}": found.pop("accuracy")}
                metrics |= {f"eval/{name}/{part}": value for part, value in found.items()}
        self.last_accuracy = metrics[f"eval/{next(iter(self.eval_prompts))}"]
        if math.isnan(self.first_accuracy):
            self.first_accuracy = self.last_accuracy
        self.evaluation_due = False
        return metrics

    def _evaluator(self) -> RolloutEngine:
        """A copy of the weights as they are trained, unrounded, in this process; or the rollout engine itself."""
        if not self.arguments.rollout.evaluates_locally:
            return self.sampler
        if self.evaluator is None:
            self.evaluator = LocalEngine(
                self.arguments.megatron.hf_checkpoint,
                self.tokenizer,
                precision="bf16" if self.arguments.megatron.bf16 else "fp32",
                device=self.parallel.backend.device,
                safe_point=self.interrupts.check,
            )
        return self.evaluator

    def _save_when_due(self) -> None:
        config = self.arguments.megatron
        last = self.rollout_id == self.num_rollout
        if last or (config.save_interval and self.rollout_id % config.save_interval == 0):
            self._save()

    def _save_before_stopping(self) -> str:
        """Saves what was trained, unless that is done; says where."""
        save = self.arguments.megatron.save
        if self.position.rollout_id == 0:
            return "The run stops before its first rollout was trained on; there is nothing to save."
        if save is None:
            return f"The run stops after step {self.step}, unsaved: --save is unset."
        if not self.engine.weights_are_finite():
            return f"Nothing was saved, as the weights are not finite. {self._newest()}"
        if self.saved_step != self.step:
            self._save()
        return f"The run stops after step {self.step}, saved under {save}; the same command with --load {save} resumes."

    def _save(self) -> None:
        """Writes a checkpoint of the last rollout that was trained on as a whole."""
        config = self.arguments.megatron
        if config.save is None:
            return
        self._check_weights()
        state = TrainerState(
            run=self.run_id,
            step=self.step,
            rollout_id=self.position.rollout_id,
            dataset=self.position.dataset,
            unfinished=[[to_dict(sample) for sample in group] for group in self.position.unfinished],
            evaluation_due=self.evaluation_due,
            sampler_weight_version=self.sampler.weight_version,
            first_accuracy=None if math.isnan(self.first_accuracy) else self.first_accuracy,
            options=self.options,
            model=self.model,
        )
        stale = self.sampler.weight_version != self.step
        with self.timer("save"):
            checkpoint.save(
                config.save,
                self.step,
                self.engine,
                asdict(state),
                run=self.run_id,
                retain=config.save_retain,
                write_extra=self.sampler.save_weights if stale and self.sampler.can_checkpoint_weights else None,
            )
        self.saved_step = self.step

    def _find_checkpoint(self) -> tuple[Path, TrainerState] | None:
        """The newest whole checkpoint under --load and its state, checked against the options of this run."""
        megatron = self.arguments.megatron
        found = None if megatron.load is None else checkpoint.newest_whole(megatron.load)
        if found is None:
            return None
        if self.parallel.is_main:
            for damaged in found.damaged:
                print(f"warning: passed over {megatron.load}/{damaged}", file=sys.stderr)
        state = read_trainer_state(found.checkpoint)
        check_options(state.options, self.options)
        if state.model != self.model:
            raise ValueError(
                f"--hf-checkpoint is {megatron.hf_checkpoint!r}, a model with another config.json than that of "
                f"{state.options.get('hf_checkpoint')!r}, which {found.checkpoint} trains; give that one."
            )
        return found.checkpoint, state

    def _check_weights(self) -> None:
        """Refuses to write weights that are not finite, over good ones perhaps."""
        if not self.engine.weights_are_finite():
            raise checkpoint.CheckpointError(
                f"the weights are not finite after step {self.step} and were not saved: the step was too long; lower "
                f"--lr or --weight-decay. {self._newest()}"
            )

    def _newest(self) -> str:
        save = self.arguments.megatron.save
        earlier = [] if save is None else checkpoints(save)
        return f"The newest checkpoint is {earlier[-1]}." if earlier else "There is no earlier checkpoint."

    def _resume(self) -> None:
        """Goes on from the checkpoint that was found, if one was."""
        if self.resumed is None:
            if not self.sampler.can_checkpoint_weights:  # its weights are whatever its servers were started with
                self._update_sampler()
            return
        found, state = self.resumed
        checkpoint.load(found, self.engine)
        self.learner.step, self.rollout_id = state.step, state.rollout_id
        if state.first_accuracy is not None and not changed(state.options, self.options, EVALUATION):
            self.first_accuracy = state.first_accuracy
        self.evaluation_due = bool(self.eval_prompts) and state.evaluation_due
        save = self.arguments.megatron.save
        if save is not None and same_path(found.parent, save) and not self.evaluation_due:
            self.saved_step = self.step
        self.sampler.resume_unfinished([[from_dict(row) for row in group] for group in state.unfinished])
        same_engine = not changed(state.options, self.options, ("rollout_engine", "rollout_precision"))
        if state.sampler_weight_version != self.step and same_engine and self.sampler.can_checkpoint_weights:
            self.sampler.load_weights(found, state.sampler_weight_version)
        else:
            self._update_sampler()
        if self.parallel.is_main:
            print(f"resumed from {found}, after step {self.step}", flush=True)
            difference = changed_options(state.options, self.options)
            if difference:
                print(f"options changed since then: {difference}", flush=True)

    def _finish(self) -> None:
        """Writes the policy for everybody else, and says how it did."""
        if self.arguments.megatron.save is not None:
            self._safe_point()  # what follows a resumed run does
        directory = self.arguments.megatron.save_hf
        if directory is not None and not self.arguments.loop.debug_rollout_only:
            self._check_weights()
            written = save_hf(directory, self.engine)
            if written is not None and written != Path(directory).resolve():
                print(f"warning: {directory} holds other files by now; the policy is at {written}", file=sys.stderr)
        if self.evaluation_due:
            self._safe_point()
        if self.eval_prompts and math.isnan(self.last_accuracy):
            self._evaluate()  # resumed after the last rollout
        if self.parallel.is_main and self.eval_prompts:
            print(f"eval accuracy: {self.first_accuracy:.2f} -> {self.last_accuracy:.2f}", flush=True)


def model_identity(hf_checkpoint: str) -> str:
    """SHA-256 of a model's config.json."""
    return hashlib.sha256((Path(hf_checkpoint) / "config.json").read_bytes()).hexdigest()


def prepare_terminal() -> None:
    """Leaves the terminal to this program: what libraries only remark goes unsaid, and any path can be printed."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for name in ("megatron", "transformers", "torch"):
        warnings.filterwarnings("ignore", module=rf"{name}\.")
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()
