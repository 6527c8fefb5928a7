"""Trains a language model by reinforcement learning on Megatron-core, with rollout correction.

    for each rollout:
        sample     prompts → responses (of this rollout; the next ones follow in the background)
        prepare    rewards, filters, masks, advantages: `SampleSource.next`
        learn      for each step: old log-probs if needed → correction and loss → optimizer step
        send       new weights to the rollout engine
        report     metrics, evaluation, checkpoint

`set_up` builds the parts of a run. `python train.py --help` lists the flags; docs/quick_start.md
walks through a run.
"""

import math
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from slime_tis.errors import RunStopped
from slime_tis.progress import print_line
from slime_tis.trainer.check_engines import show
from slime_tis.trainer.checkpointer import Position
from slime_tis.trainer.evaluation import is_due
from slime_tis.trainer.megatron.sharded_checkpoint import save_adapter, save_hf
from slime_tis.trainer.sample_pipeline import Rollout
from slime_tis.trainer.setup import Run
from slime_tis.trainer.stop_signals import Interrupted

MISMATCH = "train/train_rollout_logprob_abs_diff"
"""Mean abs(Δ) of a step's trained tokens, nats."""


def train(run: Run) -> None:
    """Trains on every remaining rollout, then exports the policy."""
    run.checkpointer.position = position(run)
    if run.evaluation.is_due_first(run.rollout_id):
        with run.process.interrupts.abandonable():
            run.reporters.log(run.evaluation(run.learner.step, run.rollout_id), run.learner.step)
        run.process.timer.take()
    while run.rollout_id < run.num_rollout:
        check_interrupts(run)
        run.checkpointer.position = position(run)
        # Until the first optimizer step a signal abandons the rollout at once, later after it.
        with run.process.interrupts.abandonable():
            rollout = run.samples.next(run.rollout_id, run.learner.step)
            check_interrupts(run)
            run.unreported = learn(run, rollout)
        check_mismatch(run)
        end_rollout(run)
        if run.rollout_id % run.process.arguments.rollout.update_weights_interval == 0:
            rollout.metrics |= run.weights.send()
            show(run.process.parallel, run.engine_check.after_update())
        run.checkpointer.complete_if_written()
        run.unreported[-1] |= rollout.metrics | evaluate_when_due(run)
        if run.checkpointer.is_due(run.rollout_id, run.num_rollout):
            run.checkpointer.save(before_it_counts=partial(report_rollout, run))
        else:
            report_rollout(run)
    finish(run)


def learn(run: Run, rollout: Rollout) -> list[dict[str, float]]:
    """Makes the optimizer steps of one rollout and returns their metrics.

    The dump also contains a step that was refused because of a non-finite gradient.
    """
    if run.process.arguments.loop.debug_rollout_only:
        return [{}]
    try:
        return run.learner.train(rollout.groups, rollout.advantages)
    finally:
        if run.learner.dump is not None:
            with run.process.timer("train_dump"):
                run.learner.dump.end_rollout(run.rollout_id)


def end_rollout(run: Run) -> None:
    """Counts the rollout, so that a resumed run continues after it; a collective.

    A reference update that is due belongs to the rollout: a resumed run does not repeat it.
    """
    run.rollout_id += 1
    run.learner.update_reference(run.rollout_id)
    run.checkpointer.position = position(run)


def check_mismatch(run: Run) -> None:
    """Ends the run if a step of the rollout exceeds the threshold of the mismatch.

    Source: slime, backends/megatron_utils/model.py, which asserts this with --ci-test.

    Raises:
        RunStopped: mean abs(Δ) of a step is above the threshold, or not finite.
    """
    threshold = run.process.arguments.loop.ci_train_rollout_logprob_abs_diff_threshold
    if threshold is None:
        return
    first_step = run.learner.step - len(run.unreported) + 1
    for step, row in enumerate(run.unreported, start=first_step):
        # A step without trained tokens measures no mismatch.
        difference = row.get(MISMATCH, 0.0)
        # Negated, so that NaN ends the run as well.
        if not difference <= threshold:
            raise RunStopped(
                f"error: {MISMATCH} of step {step} is {difference:.6g}, above"
                f" --ci-train-rollout-logprob-abs-diff-threshold {threshold:g}; its rollout was not"
                " saved. slime-tis diagnose finds the cause.",
                1,
            )


def evaluate_when_due(run: Run) -> dict[str, float]:
    """Returns held-out metrics if an evaluation is due after this rollout.

    Otherwise returns an empty dictionary.
    """
    if not is_due(run.process.arguments.rollout.eval_interval, run.rollout_id, run.num_rollout):
        return {}
    try:
        with run.process.interrupts.abandonable():
            return run.evaluation(run.learner.step, run.rollout_id)
    except Interrupted:  # the run stops at the next safe point; the resumed run evaluates
        run.evaluation.is_overdue = True
        return {}


def report_rollout(run: Run) -> None:
    """Logs the steps of the last rollout.

    This happens before a checkpoint completes. Otherwise a kill in between would lose these rows,
    since the resumed run starts after them.
    """
    times = run.process.timer.take()
    # The pipeline's schedule runs both passes in one call, so only their sum is timed.
    if "perf/forward_time" in times:
        times["perf/backward_time"] = (
            times["perf/forward_backward_time"] - times["perf/forward_time"]
        )
    run.unreported[-1] |= times
    report(run, run.unreported, run.learner.step or run.rollout_id)
    run.unreported = []


def report(run: Run, rows: Sequence[dict[str, float]], last_step: int) -> None:
    """Logs the metrics of consecutive steps up to step `last_step`, and prints health warnings."""
    for step, row in enumerate(rows, start=last_step - len(rows) + 1):
        health, messages = run.health.check(row)
        run.reporters.log(row | health, step)
        if run.process.parallel.is_main:
            for message in messages:
                print_line(f"warning: step {step}: {message}", sys.stderr)


def position(run: Run) -> Position:
    """Returns where a run that resumes from here continues; a collective."""
    in_flight = []
    if run.process.arguments.megatron.save is not None:  # only a checkpoint needs them
        in_flight = run.samples.prefetcher.finished()
    return Position(
        step=run.learner.step,
        rollout_id=run.rollout_id,
        dataset=run.samples.prefetcher.state_dict(),
        unfinished=run.samples.unfinished.groups(),
        in_flight=in_flight,
    )


def check_interrupts(run: Run) -> None:
    """Raises Interrupted if any rank received a signal; a collective."""
    number = run.process.parallel.largest(run.process.interrupts.number)
    if number:
        raise Interrupted(signal.Signals(number).name)


def export(run: Run) -> None:
    """Writes the policy to --save-hf: the model, LoRA adapters, or both in two directories."""
    config = run.process.arguments.megatron
    if config.save_hf is None:
        return
    run.checkpointer.check_weights()
    exports = {}
    if config.adapter_export is not None:
        exports[config.adapter_export] = save_adapter
    if config.adapter_export != config.save_hf:
        exports[config.save_hf] = save_hf
    for directory, save in exports.items():
        written = save(directory, run.learner.engine)
        if written is not None and written != Path(directory).resolve():
            print_line(
                f"warning: {directory} contains other files by now; the policy is at {written}",
                sys.stderr,
            )


def finish(run: Run) -> None:
    """Exports the policy as a Hugging Face directory and prints the held-out accuracy.

    The printed summary has the accuracy before and after training.
    """
    run.checkpointer.complete()
    if run.process.arguments.megatron.save is not None:
        # An interrupted run can be resumed, and then exports.
        check_interrupts(run)
    if not run.process.arguments.loop.debug_rollout_only:
        export(run)
    evaluation = run.evaluation
    if evaluation.is_overdue:
        # The signal that ended the evaluation ends the run, which then says how to resume.
        check_interrupts(run)
    if math.isnan(evaluation.last_accuracy):
        # The run was resumed after its last rollout.
        evaluation(run.learner.step, run.rollout_id)
    if run.process.parallel.is_main and evaluation.prompts:
        print_line(evaluation.summary)
