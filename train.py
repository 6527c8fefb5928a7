"""Trains a language model by reinforcement learning; the program is slime_tis/trainer/train.py.

`python train.py --help` lists the flags; docs/quick_start.md walks through a run. Where slime_tis
is installed, `slime-tis train` does the same.
"""

import sys

from slime_tis.main import train

if __name__ == "__main__":
    sys.exit(train())
