"""How a run that an error ended is reported: one message for all ranks, and the exit status of errors.py."""

import sys

from slime_tis.errors import CustomFunctionError, OtherRankFailed, RunStopped
from slime_tis.trainer.engines.engine import RolloutUnavailable
from slime_tis.trainer.interrupt import Interrupted, Interrupts, stops_because
from slime_tis.trainer.megatron.checkpoint import CheckpointError
from slime_tis.trainer.megatron.parallel import lost_contact

EXPECTED = (ValueError, OSError, RolloutUnavailable, Interrupted, RunStopped, CheckpointError)
"""What ends a run with one message; any other exception is a defect of this program or of a library."""


def exit_status(error: Exception) -> int:
    """The exit status of a run that an error ended; errors.py has the table."""
    if isinstance(error, (RunStopped, Interrupted)):
        return error.status
    return 2 if isinstance(error, CustomFunctionError) else 1


def report_error(error: Exception, rank: int, interrupts: Interrupts) -> bool:
    """Prints on stderr why the run ends, once for all ranks.

    Returns:
        False for a defect, whose traceback is wanted.
    """
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
