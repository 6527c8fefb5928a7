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

import errno
import logging
import math
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from slime_tis.errors import (
    CommandLineError,
    CustomFunctionError,
    NonFiniteGradient,
    OtherRankFailed,
    RunStopped,
)
from slime_tis.trainer.check_engines import show
from slime_tis.trainer.checkpointer import Position
from slime_tis.trainer.cli.file_checks import held_outputs
from slime_tis.trainer.cli.train_arguments import describe
from slime_tis.trainer.cli.train_options import Arguments
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.evaluation import is_due
from slime_tis.trainer.megatron.parallel import connect_store, initialize, lost_contact, shut_down
from slime_tis.trainer.megatron.sharded_checkpoint import CheckpointError, save_hf
from slime_tis.trainer.sample_pipeline import Rollout
from slime_tis.trainer.setup import Run, set_up
from slime_tis.trainer.stop_signals import Interrupted, Interrupts, stops_because

EXPECTED = (ValueError, OSError, RolloutUnavailable, Interrupted, RunStopped, CheckpointError)
"""Errors that end a run with one message; any other exception is a defect of this program or of a
library."""
TOO_MANY_FILES = os.strerror(errno.EMFILE)


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
        with run.process.interrupts.abandonable():  # until the first optimizer step
            rollout = run.samples.next(run.rollout_id, run.learner.step)
            check_interrupts(run)
            run.unreported = learn(run, rollout)
        run.rollout_id += 1
        run.checkpointer.position = position(run)
        if run.rollout_id % run.process.arguments.rollout.update_weights_interval == 0:
            rollout.metrics |= run.weights.send()
            show(run.process.parallel, run.engine_check.after_update())
        run.unreported[-1] |= rollout.metrics | evaluate_when_due(run)
        if run.checkpointer.is_due(run.rollout_id, run.num_rollout):
            run.checkpointer.save(before_it_counts=partial(report_rollout, run))
        else:
            report_rollout(run)
    finish(run)


def learn(run: Run, rollout: Rollout) -> list[dict[str, float]]:
    """Makes the optimizer steps of one rollout and returns their metrics; a refused step is dumped, too."""
    if run.process.arguments.loop.debug_rollout_only:
        return [{}]
    try:
        return run.learner.train(rollout.groups, rollout.advantages)
    finally:
        if run.learner.dump is not None:
            with run.process.timer("train_dump"):
                run.learner.dump.end_rollout(run.rollout_id)


def evaluate_when_due(run: Run) -> dict[str, float]:
    """Returns held-out metrics if an evaluation is due after this rollout; otherwise an empty dictionary."""
    if not is_due(run.process.arguments.rollout.eval_interval, run.rollout_id, run.num_rollout):
        return {}
    try:
        with run.process.interrupts.abandonable():
            return run.evaluation(run.learner.step, run.rollout_id)
    except Interrupted:  # the run stops at the next safe point; the resumed run evaluates
        run.evaluation.is_overdue = True
        return {}


def report_rollout(run: Run) -> None:
    """Logs the steps of the last rollout. A checkpoint that is complete before would lose them to a kill."""
    times = run.process.timer.take()
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
        for message in messages if run.process.parallel.is_main else ():
            tqdm.write(f"warning: step {step}: {message}", file=sys.stderr)


def position(run: Run) -> Position:
    """Returns where a run that resumes from here continues; a collective."""
    saves = run.process.arguments.megatron.save is not None
    in_flight = run.samples.prefetcher.finished() if saves else []
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


def finish(run: Run) -> None:
    """Exports the policy as a Hugging Face directory and prints the held-out accuracy before and after training."""
    if run.process.arguments.megatron.save is not None:
        check_interrupts(run)  # a resumed run exports
    directory = run.process.arguments.megatron.save_hf
    if directory is not None and not run.process.arguments.loop.debug_rollout_only:
        run.checkpointer.check_weights()
        written = save_hf(directory, run.learner.engine)
        if written is not None and written != Path(directory).resolve():
            print(
                f"warning: {directory} contains other files by now; the policy is at {written}",
                file=sys.stderr,
            )
    evaluation = run.evaluation
    if evaluation.is_overdue:
        check_interrupts(run)
    if math.isnan(evaluation.last_accuracy):
        evaluation(run.learner.step, run.rollout_id)  # resumed after the last rollout
    if run.process.parallel.is_main and evaluation.prompts:
        print(evaluation.summary, flush=True)


@contextmanager
def logging_before_an_error(run: Run) -> Iterator[None]:
    """After an error, logs the steps made before it."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            report(run, run.unreported, run.learner.step or run.rollout_id)
        raise


@contextmanager
def saving_before_stopping(run: Run) -> Iterator[None]:
    """Saves a run that a signal, a lost rollout engine or a non-finite gradient ends, and raises RunStopped."""
    checkpointer = run.checkpointer
    try:
        yield
    except Interrupted as error:
        raise RunStopped(
            f"stopped by {error.name}. {checkpointer.save_before_stopping()}", error.status
        ) from error
    except NonFiniteGradient as error:
        report(run, error.rows, run.learner.step + 1)
        if run.learner.step > checkpointer.position.step:  # drop the rest of the rollout
            run.rollout_id += 1
            checkpointer.position = position(run)
        raise RunStopped(f"error: {error} {checkpointer.save_before_stopping()}", 1) from error
    except RolloutUnavailable as error:
        raise RunStopped(
            f"error: {message_of(error)} {checkpointer.save_before_stopping()}", 1
        ) from error


def main(arguments: Arguments) -> int:
    """Runs a training and returns its exit status; an expected error ends in one message on stderr."""
    with Interrupts() as interrupts, ExitStack() as outputs:
        prepare_terminal()
        main_process = os.environ.get("RANK", "0") == "0"
        try:
            outputs.enter_context(
                held_outputs(arguments.megatron, arguments.reporting, main=main_process)
            )
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return _run(arguments, interrupts)


def _run(arguments: Arguments, interrupts: Interrupts) -> int:
    rank = 0
    try:
        parallel = initialize(arguments.megatron)
        rank = parallel.rank
        interrupts.share(connect_store(), rank)
        if parallel.is_main:
            print(describe(arguments), flush=True)
        with ExitStack() as opened:
            run = set_up(arguments, parallel, interrupts, opened)
            interrupts.started()
            with logging_before_an_error(run), saving_before_stopping(run):
                train(run)
    except Exception as error:
        if os.environ.get("SLIME_TIS_TRACEBACK"):
            raise
        if report_error(error, rank, interrupts):
            return exit_status(error)
        raise
    finally:
        shut_down()
    return 0


def exit_status(error: Exception) -> int:
    """Returns the exit status of a run that ended with an error."""
    if isinstance(error, (RunStopped, Interrupted)):
        return error.status
    return 2 if isinstance(error, (CommandLineError, CustomFunctionError)) else 1


def report_error(error: Exception, rank: int, interrupts: Interrupts) -> bool:
    """Prints on stderr why the run ends, once for all ranks; returns False for a defect, which needs its traceback."""
    too_many_files = TOO_MANY_FILES in str(error)  # gloo and torch raise it as RuntimeError
    if isinstance(error, OtherRankFailed) or (lost_contact(error) and not too_many_files):
        print(f"error: {stops_because(rank, interrupts.failure_elsewhere())}", file=sys.stderr)
        return True
    message = message_of(error)
    first = interrupts.report_failure(message)
    if first.rank == rank:
        expected = isinstance(error, EXPECTED) or too_many_files
        if expected:
            print(
                message if isinstance(error, (RunStopped, Interrupted)) else f"error: {message}",
                file=sys.stderr,
            )
        return expected
    if first.message != message:
        print(f"error: {stops_because(rank, first)}", file=sys.stderr)
    return True


def message_of(error: Exception) -> str:
    """Returns an error's message on one line, or its type if the message is empty."""
    if TOO_MANY_FILES in str(error):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"the run needs more open files than its limit of {limit}; raise the limit with"
            " ulimit -n."
        )
    return " ".join(str(error).split()) or type(error).__name__


def prepare_terminal() -> None:
    """Silences remarks of libraries, and gives tqdm a lock of this process.

    tqdm's default lock is a semaphore shared with forked processes. A forked process that is killed
    during `print` would hold it forever, and the run would wait at its next line.
    """
    tqdm.set_lock(threading.RLock())
    for name in ("megatron", "transformers", "torch"):
        warnings.filterwarnings("ignore", module=rf"{name}\.")
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()
