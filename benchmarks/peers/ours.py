"""train.py with step times by the benchmark's clock.

python benchmarks/peers/ours.py CLOCK FLAGS OF train.py
"""

import sys
from functools import partial
from typing import Any

from task import CLOCKS

from slime_tis.trainer import setup, training_command
from slime_tis.trainer.cli.train_arguments import parse_args

if __name__ == "__main__":
    arguments = parse_args(sys.argv[2:])
    timer: Any = setup
    timer.Timer = partial(timer.Timer, CLOCKS[sys.argv[1]])
    sys.exit(training_command.main(arguments))
