"""The process that compares expressions: run as a script, it imports math-verify and nothing of this program.

Its arguments are the path of modules, the processor time of a comparison in seconds, and its memory in bytes. It writes
`r` when it is ready; each line of its input is the JSON of [answer, expected, as_number], and each reply `1` or `0`.
"""

import json
import os
import resource
import signal
import sys


def main() -> None:
    """Answers until its input ends."""
    sys.path[:] = json.loads(sys.argv[1])
    seconds, memory = float(sys.argv[2]), int(sys.argv[3])
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not be read as a reply
    from math_verify import parse, verify
    from sympy import Eq, Number

    def same(answer: str, expected: str, as_number: bool) -> bool:
        found, right = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (answer, expected))
        if not found or not right:
            return False
        value = found[0].rhs if isinstance(found[0], Eq) else found[0]
        if as_number and not isinstance(value, Number):
            return False
        return bool(verify(right, found, timeout_seconds=None))

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies.write(b"r")
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # ends this process: nobody handles the signal
        try:
            equal = same(*json.loads(line))
        except Exception:  # parsers and sympy may raise anything, including RecursionError and MemoryError
            equal = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(b"1" if equal else b"0")


if __name__ == "__main__":
    main()
