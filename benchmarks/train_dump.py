"""What --save-debug-train-data adds to a step: train.py with and without it, in turns.

    python -m benchmarks.train_dump [PAIRS]

Prints, as medians over the pairs with intervals that have the true median in 95 of 100 cases or
more: the CPU time of the whole process with dumps divided by that without, the same for the wall
time of a step, and the share of a step that training spends on the dump itself.
"""

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.runs import make_task, run_here

SIZES = {"hidden_size": 128, "intermediate_size": 256}
FLAGS = (
    *(
        "--rollout-batch-size",
        "8",
        "--n-samples-per-prompt",
        "8",
        "--rollout-max-response-len",
        "64",
    ),
    *(
        "--num-rollout",
        "4",
        "--use-tis",
        "--use-rs",
        "--rs-upper-bound",
        "1.2",
        "--rs-veto-threshold",
        "1e-3",
    ),
)


def main(pairs: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        flags = [*make_task(directory, **SIZES), *FLAGS]
        measure(flags, directory / "warm-up")
        cpu, wall, share = [], [], []
        for pair in range(pairs):
            found = {}
            for dumps in (False, True) if pair % 2 else (True, False):
                extra = (
                    ["--save-debug-train-data", str(directory / "{rollout_id}.parquet")]
                    if dumps
                    else []
                )
                found[dumps] = measure([*flags, *extra], directory / f"{pair}-{dumps}")
            cpu.append(found[True][0] / found[False][0])
            wall.append(found[True][1] / found[False][1])
            share.append(found[True][2])
            print(
                f"pair {pair}: CPU {cpu[-1]:.4f}, step {wall[-1]:.4f}, share {share[-1]:.4f}",
                flush=True,
            )
    for title, values in (("CPU time", cpu), ("step time", wall), ("share of a step", share)):
        low, high = interval(values)
        print(f"{title}: {statistics.median(values):.4f} ({low:.4f} to {high:.4f}, {pairs} pairs)")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A distribution-free 95 % confidence interval of the median; for few values, their extremes.

    A value is below the median with chance ½, so that the number of such values is binomial.
    """
    n = len(values)
    left_out = 0
    while 2 * sum(math.comb(n, k) for k in range(left_out + 2)) <= 0.05 * 2**n:
        left_out += 1
    return sorted(values)[left_out], sorted(values)[n - 1 - left_out]


def measure(flags: Sequence[str], output: Path) -> tuple[float, float, float]:
    """Returns CPU seconds of a run, median seconds per step, and the dump's share of a step."""
    begun = time.process_time()
    rows = run_here(flags, output)[1:]
    share = [row.get("perf/train_dump_time", 0.0) / row["perf/step_time"] for row in rows]
    times = [row["perf/step_time"] for row in rows]
    return time.process_time() - begun, statistics.median(times), statistics.median(share)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
