"""The command `slime-tis`: what one does besides training.

slime-tis port run.sh        prints a launch script of slime in this program's flags
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from slime_tis.cli.launch_script import read_launch
from slime_tis.cli.port import Vocabulary, port, show

RANK_0 = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""What torchrun tells the first rank."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status, 2 for what it refuses."""
    parser = argparse.ArgumentParser(prog="slime-tis", description="Tools for rollout correction and its training.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    ported = commands.add_parser(
        "port",
        help="print a launch script of slime in the flags of train.py",
        description="Reads a bash launch script of slime without running it, and prints the command line of train.py "
        "with comments on what was changed, added or left out.",
    )
    ported.add_argument("script", metavar="SCRIPT", help="launch script, for example slime/scripts/run-qwen3-4B.sh")
    chosen = parser.parse_args(argv)
    try:
        sys.stdout.write(port_script(chosen.script))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def port_script(path: str) -> str:
    """The command line of train.py for a launch script of slime, with comments.

    Raises:
        ValueError: the script cannot be read, or runs no training.
    """
    from slime_tis.cli.arguments import ALIASES, FLAGS, OPTIONS, configure

    ported = port(read_launch(path), Vocabulary(options=OPTIONS, aliases=ALIASES, flags=FLAGS))
    verdict = ""
    try:
        configure(ported.argv, {**RANK_0, "WORLD_SIZE": str(ported.ranks)})
    except (ValueError, OSError) as error:
        verdict = str(error)
    return show(ported, os.path.basename(path), verdict)


if __name__ == "__main__":
    sys.exit(main())
