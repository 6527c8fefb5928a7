"""How a run ends after an error: its message on stderr, and its exit status."""

import errno
import os
import resource
import sys

from slime_tis.errors import (
    CommandLineError,
    CustomFunctionError,
    OtherRankFailed,
    RunStopped,
)
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.megatron.parallel import lost_contact
from slime_tis.trainer.megatron.sharded_checkpoint import CheckpointError
from slime_tis.trainer.stop_signals import Interrupted, Interrupts, stops_because

EXPECTED = (ValueError, OSError, RolloutUnavailable, Interrupted, RunStopped, CheckpointError)
"""Errors that end a run with one message; any other exception is a defect of this program or of a
library."""
TOO_MANY_FILES = os.strerror(errno.EMFILE)
"""The system's message for the limit of open files; libraries quote it in other errors."""


def exit_status(error: Exception) -> int:
    """Returns the exit status of a run that ended with an error."""
    if isinstance(error, (RunStopped, Interrupted)):
        return error.status
    if isinstance(error, (CommandLineError, CustomFunctionError)):
        return 2
    return 1


def report_error(error: Exception, rank: int, interrupts: Interrupts) -> bool:
    """Prints on stderr why the run ends, once for all ranks.

    Every rank reports an error here, often a consequence of the first rank's error. The first rank
    prints its message. Another rank names that rank and its reason, unless the messages are equal.

    Returns:
        False for a defect of this program or of a library, which needs its traceback.
    """
    too_many_files = TOO_MANY_FILES in str(error)  # gloo and torch raise it as RuntimeError
    if isinstance(error, OtherRankFailed) or (lost_contact(error) and not too_many_files):
        print(f"error: {stops_because(rank, interrupts.failure_elsewhere())}", file=sys.stderr)
        return True
    message = message_of(error)
    first = interrupts.report_failure(message)
    if first.rank == rank:
        expected = isinstance(error, EXPECTED) or too_many_files
        if not isinstance(error, (RunStopped, Interrupted)):
            message = f"error: {message}"
        if expected:
            print(message, file=sys.stderr)
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
