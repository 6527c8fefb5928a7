"""Ends a command on Ctrl-C and SIGTERM with one line, after its clean-up."""

import signal
import sys


class _Signalled(KeyboardInterrupt):
    """A signal asks the command to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


def raise_on_signals() -> None:
    """Makes Ctrl-C and SIGTERM raise a KeyboardInterrupt, which removes unfinished files.

    A second signal ends the process at once, so that its clean-up cannot hang.
    """

    def raise_once(number: int, _: object) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_DFL)
        raise _Signalled(signal.Signals(number))

    handled = []
    for number in (signal.SIGINT, signal.SIGTERM):
        # nohup, and a shell for background jobs, make a process ignore signals.
        if signal.getsignal(number) is not signal.SIG_IGN:
            handled.append(number)
            signal.signal(number, raise_once)


def status_after(interrupt: KeyboardInterrupt) -> int:
    """Prints which signal ended the command; returns the exit status."""
    number = signal.SIGINT
    if isinstance(interrupt, _Signalled):
        number = interrupt.number
    print(f"ended by {number.name}; unfinished files are removed.", file=sys.stderr)
    return 128 + number
