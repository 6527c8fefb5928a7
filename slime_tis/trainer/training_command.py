"""Runs a training as a command: signals, output directories, set-up, the loop, the exit status."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from transformers.utils.logging import disable_progress_bar

from slime_tis.errors import NonFiniteGradient, RunStopped
from slime_tis.progress import use_lock_of_this_process
from slime_tis.trainer.cli.file_checks import held_outputs
from slime_tis.trainer.cli.train_arguments import describe
from slime_tis.trainer.cli.train_options import Arguments
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.exits import exit_status, message_of, report_error
from slime_tis.trainer.megatron.parallel import connect_store, initialize, shut_down
from slime_tis.trainer.megatron.sharded_checkpoint import CheckpointError
from slime_tis.trainer.setup import Run, set_up
from slime_tis.trainer.stop_signals import Interrupted, Interrupts
from slime_tis.trainer.train import end_rollout, report, train


def main(arguments: Arguments) -> int:
    """Runs a training and returns its exit status.

    An expected error ends the run with one message on stderr. With SLIME_TIS_TRACEBACK set, errors
    are raised instead.
    """
    with Interrupts() as interrupts, ExitStack() as outputs:
        prepare_terminal()
        main_process = os.environ.get("RANK", "0") == "0"  # the ranks are not connected yet
        try:
            outputs.enter_context(
                held_outputs(arguments.megatron, arguments.reporting, main=main_process)
            )
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return _run(arguments, interrupts)


def _run(arguments: Arguments, interrupts: Interrupts) -> int:
    """Joins the other ranks, builds the run and trains; returns the exit status."""
    rank = 0  # the one that reports an error of `initialize`
    try:
        parallel = initialize(arguments.megatron)
        rank = parallel.rank
        interrupts.share(connect_store(), rank)
        if parallel.is_main:
            print(describe(arguments), flush=True)
        with ExitStack() as opened:
            run = set_up(arguments, parallel, interrupts, opened)
            interrupts.started()
            opened.callback(run.checkpointer.abandon)
            with logging_before_an_error(run), completing_a_save(run), saving_before_stopping(run):
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
def completing_a_save(run: Run) -> Iterator[None]:
    """After an error, completes a checkpoint that is being written in the background.

    Several ranks cannot: one that has failed alone would leave the others in a collective. Then the
    unfinished checkpoint is removed, and the earlier one remains.
    """
    try:
        yield
    except Exception:
        if run.process.parallel.size == 1:
            with suppress(CheckpointError):
                run.checkpointer.complete()
        raise


@contextmanager
def saving_before_stopping(run: Run) -> Iterator[None]:
    """Saves a run that a signal, a lost rollout engine or a non-finite gradient ends.

    Raises:
        RunStopped: With the reason, and how to resume the run.
    """
    checkpointer = run.checkpointer
    try:
        yield
    except Interrupted as error:
        raise RunStopped(
            f"stopped by {error.name}. {checkpointer.save_before_stopping()}", error.status
        ) from error
    except NonFiniteGradient as error:
        report(run, error.rows, run.learner.step + 1)
        if run.learner.step > checkpointer.position.step:
            # Steps of this rollout have changed the weights: drop the rest of the rollout.
            end_rollout(run)
        raise RunStopped(f"error: {error} {checkpointer.save_before_stopping()}", 1) from error
    except RolloutUnavailable as error:
        raise RunStopped(
            f"error: {message_of(error)} {checkpointer.save_before_stopping()}", 1
        ) from error


def prepare_terminal() -> None:
    """Silences remarks of libraries, and prepares the progress display."""
    use_lock_of_this_process()
    for name in ("megatron", "transformers", "torch"):
        warnings.filterwarnings("ignore", module=rf"{name}\.")
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()
