"""train.py, whose steps are timed by the clock of the benchmark.

python benchmarks/peers/ours.py CLOCK FLAGS OF train.py
"""

import sys
from functools import partial

from task import CLOCKS

from slime_tis.trainer.cli.arguments import parse_args

if __name__ == "__main__":
    arguments = parse_args(sys.argv[2:])
    from slime_tis import train  # after the command line is read, as the program itself does

    train.Timer = partial(train.Timer, CLOCKS[sys.argv[1]])
    sys.exit(train.main(arguments))
