"""Trains a language model by reinforcement learning. The program itself is slime_tis/train.py.

`python train.py --help` lists the flags; docs/quick_start.md walks through a run.
"""

import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main() runs: no traceback through the imports below

from slime_tis.train import main

if __name__ == "__main__":
    sys.exit(main())
