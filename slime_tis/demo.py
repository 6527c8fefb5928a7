"""The command `slime-tis demo`: a tiny model, a minute of training with a mismatch, and a report on it."""

import os
from pathlib import Path

import torch

from slime_tis.analysis.report.command import diagnosis, report
from slime_tis.errors import quoted_path
from slime_tis.trainer.cli.arguments import parse_args
from slime_tis.trainer.sort_digits import prepare
from slime_tis.trainer.train import main as train
from slime_tis.trainer.train import prepare_terminal

FLAGS = (
    *("--input-key", "prompt", "--label-key", "label", "--rm-type", "exact_match", "--rollout-shuffle"),
    *("--num-rollout", "100", "--rollout-batch-size", "16", "--n-samples-per-prompt", "8"),
    *("--rollout-max-response-len", "12", "--lr", "1.5e-4", "--weight-decay", "0"),
    *("--rollout-precision", "fp8", "--update-weights-interval", "3", "--use-tis", "--num-threads", "1"),
)
"""Training on samples of an fp8 engine whose weights are up to two steps old, with truncated importance weights."""

NEXT_STEPS = """
Next steps
  open {report}
  slime-tis report --help           reports on other runs, and on dumps of slime, verl, NeMo-RL and prime-rl
  slime-tis train --help            trains your model on your prompts
  slime-tis port run.sh             rewrites a launch script of slime"""


def demo(out: str) -> int:
    """Trains the tiny model in a new directory, writes the report and prints the diagnosis; returns the exit status."""
    directory = Path(out)
    if os.path.lexists(directory):
        raise ValueError(f"error: {quoted_path(out)} exists already; remove it, or give another --out DIR.")
    data, run = directory / "data", directory / "run"
    prepare_terminal()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more gain little at this size
    made = prepare(data)
    torch.set_num_threads(threads)
    print(f"{data}: {made['parameters']:,} parameters, greedy accuracy {made['accuracy']:.2f}", flush=True)
    paths = {
        "--hf-checkpoint": data / "checkpoint",
        "--prompt-data": data / "train.jsonl",
        "--eval-prompt-data": data / "eval.jsonl",
        "--dump-details": run / "dump",
        "--output-dir": run,
    }
    flags = [str(word) for flag in paths.items() for word in flag]
    status = train(parse_args([*flags, *FLAGS], prog="slime-tis demo"))
    if status == 0:
        print(report([str(run)]), diagnosis(str(run)), sep="\n\n")
        print(NEXT_STEPS.format(report=run / "report.html"))
    return status
